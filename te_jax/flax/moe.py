"""A mixture of experts for Linen."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from te_jax import native
from te_jax.flax.gated_mlp import GatedMLP
from te_jax.flax.linear import Dense, Einsum, Initializer
from te_jax.layers import linear, mixture
from te_jax.parallel.experts import Exchange, experts_of_device
from te_jax.recipe import Recipe
from te_jax.reference.activation import Activation, ActivationName
from te_jax.sharding import AxisName

ROUTER_STATE = "router_state"


class MoE(nn.Module):
    """A mixture of gated MLPs, the experts, of which a router chooses some for every token: `te_jax.layers.moe`.

        layer = MoE(num_experts=8, hidden_features=256, router=te_jax.layers.Router(top_k=2))
        result = layer.apply(variables, x)
        loss = loss_of(result.y) + 1e-2 * ops.load_balancing_loss(result.logits, result.routing.experts)

    It consists of "router"; "gate_proj", "up_proj" and "down_proj" with kernels [experts, in, out]; and "shared", a
    `GatedMLP`. Auxiliary losses are yours to add, from the logits and the routing that a call returns. Returned values
    pass through `nn.jit`, `nn.remat` and `nn.scan` like y; no collection has to be named for them.

    With expert_bias=True the collection "router_state" holds the bias of the choice. No call changes it. Update it once
    for each optimizer step, with the counts of all its tokens; here it is in the outermost module:

        counts = ops.expert_counts(result.routing.experts, num_experts)
        state = {"expert_bias": ops.update_expert_bias(state["expert_bias"], counts)}

    where `state` is variables["router_state"]. The optimizer gets variables["params"] alone.

    With axis_name each device holds some of the experts, and tokens travel to them. Call `init` outside of `shard_map`:
    it creates all experts, whatever axis_name is. Call `apply` inside, where kernels and biases of "gate_proj",
    "up_proj" and "down_proj" are split along their first dimension, by PartitionSpec("expert") in `in_specs`, and all
    other variables are whole; docs/experts.md has an example.

    Attributes:
      num_experts: number of experts, without shared ones.
      hidden_features: of each expert.
      router: how experts are chosen, a `te_jax.layers.Router`.
      out_features: None is the number of input features.
      activation: as in `te_jax.ops.gated_activation`; "silu" is SwiGLU.
      weighted, capacity, axis_name, buffer_factor, exchange: as in `te_jax.layers.moe`.
      shared_features: hidden features of all shared experts together; None for no shared experts.
      expert_bias: whether there is a bias of the choice, `te_jax.ops.update_expert_bias`. It is zero at first.
      use_bias: whether the router and the experts have biases. Shared experts have none.
      dtype, param_dtype, implementation: as in `DenseGeneral`. The router computes in float32. Kernels of experts are
        rounded to `dtype` before they are quantized.
      recipe: of the experts and the shared ones, as in `te_jax.ops.grouped_dense`; None to compute in `dtype`.
      kernel_init, bias_init: initializers. They see the kernel of one expert as a matrix, and its bias as a vector.
      down_kernel_init, router_kernel_init: of "down_proj" and "router"; None for kernel_init.
      kernel_axes, bias_axes: names of the dimensions in "gate_proj" and "up_proj", [experts, in, hidden] and [experts,
        hidden], as in `DenseGeneral`.
      down_kernel_axes, down_bias_axes: of "down_proj", [experts, hidden, out] and [experts, out].
      router_kernel_axes, router_bias_axes: of "router", [in, experts] and [experts].
      shared_kernel_axes, shared_down_kernel_axes: of "shared", [in, hidden] and [hidden, out].
    """

    num_experts: int
    hidden_features: int
    router: mixture.Router
    out_features: int | None = None
    _: dataclasses.KW_ONLY
    activation: Activation | ActivationName = "silu"
    weighted: Literal["results", "inputs"] = "results"
    capacity: int | None = None
    axis_name: AxisName | None = None
    buffer_factor: float | None = None
    exchange: Exchange | None = None
    shared_features: int | None = None
    expert_bias: bool = False
    use_bias: bool = False
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    down_kernel_init: Initializer | None = None
    router_kernel_init: Initializer | None = None
    bias_init: Initializer = nn.initializers.zeros_init()
    kernel_axes: Sequence[str | None] | None = None
    down_kernel_axes: Sequence[str | None] | None = None
    bias_axes: Sequence[str | None] | None = None
    down_bias_axes: Sequence[str | None] | None = None
    router_kernel_axes: Sequence[str | None] | None = None
    router_bias_axes: Sequence[str | None] | None = None
    shared_kernel_axes: Sequence[str | None] | None = None
    shared_down_kernel_axes: Sequence[str | None] | None = None
    recipe: Recipe | None = None
    implementation: native.Implementation | None = None

    def __post_init__(self) -> None:
        mixture.Router.check(self.router)
        linear.Options(self.recipe, None, self.implementation)
        super().__post_init__()

    @nn.compact
    def __call__(self, x: jax.typing.ArrayLike) -> mixture.MoEResult:
        """Applies the layer to all tokens of x together; inside `shard_map` to those of a device.

        Args:
          x: [*tokens, in], floating point.

        Returns:
          `te_jax.layers.MoEResult`: y [*tokens, out_features], logits, routing, and the number of dropped choices.

        Raises:
          ValueError: for shapes, dtypes or options that do not fit, naming the argument.
        """
        x = linear.as_array("x", x)
        (experts,) = linear.sizes("num_experts", self.num_experts)
        apart = (self.axis_name, self.buffer_factor, self.exchange)
        held = experts
        if self.is_initializing():
            apart = (None, None, None)
        elif self.axis_name is not None:
            held = experts_of_device(experts, self.axis_name)
        (hidden,) = linear.sizes("hidden_features", self.hidden_features)
        features = x.shape[-1]
        out_features = features if self.out_features is None else self.out_features
        quantized: Any = {"recipe": self.recipe, "implementation": self.implementation}
        activation = Activation.of(self.activation)
        layer: Any = {
            "use_bias": self.use_bias,
            "dtype": self.dtype,
            "param_dtype": self.param_dtype,
            "bias_init": mixture.for_each_expert(self.bias_init),
            **quantized,
        }
        wide: Any = {
            "kernel_init": mixture.for_each_expert(self.kernel_init),
            "kernel_axes": self.kernel_axes,
            "bias_axes": self.bias_axes,
        }
        down_kernel_init = self.down_kernel_init or self.kernel_init
        router = Dense(
            experts,
            use_bias=self.use_bias,
            param_dtype=self.param_dtype,
            kernel_init=self.router_kernel_init or self.kernel_init,
            bias_init=self.bias_init,
            kernel_axes=self.router_kernel_axes,
            bias_axes=self.router_bias_axes,
            name="router",
        )
        gate = Einsum((held, features, hidden), mixture.EINSUM, name="gate_proj", **wide, **layer)
        up = Einsum((held, features, hidden), mixture.EINSUM, name="up_proj", **wide, **layer)
        down = Einsum(
            (held, hidden, out_features),
            mixture.EINSUM,
            kernel_init=mixture.for_each_expert(down_kernel_init),
            kernel_axes=self.down_kernel_axes,
            bias_axes=self.down_bias_axes,
            name="down_proj",
            **layer,
        )
        expert_bias = None
        if self.expert_bias:
            expert_bias = self.variable(ROUTER_STATE, "expert_bias", jnp.zeros, (experts,), jnp.float32).value
        result = mixture.moe_of_layers(
            x,
            router.held((features,)),
            (gate.held(), up.held(), down.held()),
            self.router,
            expert_bias=expert_bias,
            dtype=self.dtype,
            options=mixture.Options(activation, self.weighted, self.capacity, *apart, **quantized),
        )
        if self.shared_features is None:
            return result
        shared = GatedMLP(
            self.shared_features,
            out_features,
            activation=activation,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            down_kernel_init=down_kernel_init,
            kernel_axes=self.shared_kernel_axes,
            down_kernel_axes=self.shared_down_kernel_axes,
            name="shared",
            **quantized,
        )
        return result._replace(y=result.y + shared(x))
