"""A mixture of experts for Linen."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from te_jax import native
from te_jax.flax.gated_mlp import GatedMLP
from te_jax.flax.linear import Dense, Einsum, Initializer, split_over, without_names
from te_jax.layers import linear, mixture, tensor_parallel
from te_jax.layers.tensor_parallel import TensorAxis
from te_jax.parallel.experts import experts_of_device
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

    With expert_parallel each device holds some of the experts, and tokens travel to them. Call `init` outside of
    `shard_map`: it creates all experts, whatever expert_parallel is. Call `apply` inside, where kernels and biases of
    "gate_proj", "up_proj" and "down_proj" are split along their first dimension, by PartitionSpec("expert") in
    `in_specs`, and all other variables are whole; docs/experts.md has an example.

    Attributes:
      num_experts: number of experts, without shared ones.
      hidden_features: of each expert.
      router: how experts are chosen, a `te_jax.layers.Router`.
      out_features: None is the number of input features.
      activation: as in `te_jax.ops.gated_activation`; "silu" is SwiGLU.
      expert_parallel: as in `te_jax.layers.moe`.
      tensor_axis: the mesh axis whose devices split the time, dimension -2 of x and of results, and the hidden features
        of shared experts: see `GatedMLP`. They divide the experts too, or the devices along the axes of expert_parallel
        do, out of all that split x. A capacity is for the tokens of those devices. None for no such axis.
      shared_features: hidden features of all shared experts together; None for no shared experts.
      expert_bias: whether there is a bias of the choice, `te_jax.ops.update_expert_bias`. It is zero at first.
      use_bias: whether the router and the experts have biases. Shared experts have none.
      dtype, param_dtype, implementation: as in `DenseGeneral`. The router computes in float32. Kernels of experts are
        rounded to `dtype` before they are quantized.
      recipe: of the experts and the shared ones, as in `te_jax.ops.grouped_dense`; None to compute in `dtype`.
      kernel_init, bias_init: of "gate_proj" and "up_proj". They draw the kernel of one expert as a matrix, and its bias
        as a vector; names of axes are those of all experts, ("expert", "embed", "mlp").
      down_kernel_init, down_bias_init, router_kernel_init, shared_kernel_init, shared_down_kernel_init: of "down_proj",
        "router" and "shared"; None for kernel_init or bias_init, without names of axes.
    """

    num_experts: int
    hidden_features: int
    router: mixture.Router
    out_features: int | None = None
    _: dataclasses.KW_ONLY
    activation: Activation | ActivationName = "silu"
    expert_parallel: mixture.ExpertParallel | AxisName | None = None
    tensor_axis: str | None = None
    shared_features: int | None = None
    expert_bias: bool = False
    use_bias: bool = False
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    down_kernel_init: Initializer | None = None
    router_kernel_init: Initializer | None = None
    shared_kernel_init: Initializer | None = None
    shared_down_kernel_init: Initializer | None = None
    bias_init: Initializer = nn.initializers.zeros_init()
    down_bias_init: Initializer | None = None
    recipe: Recipe | None = None
    implementation: native.Implementation | None = None

    def __post_init__(self) -> None:
        mixture.Router.check(self.router)
        linear.Options(self.recipe, None, self.implementation)
        tensor_parallel.validate(self.tensor_axis)
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
        devices = mixture.ExpertParallel.of(self.expert_parallel or self.tensor_axis)
        parallel, tensor, held = None, None, experts
        if not self.is_initializing():
            parallel, tensor = devices, TensorAxis.of(self.tensor_axis)
        split = devices.axis_name if self.tensor_axis is not None and devices is not None else None
        tensor_parallel.validate_sizes(split, num_experts=experts)
        if parallel is not None and (tensor is None or tensor.mesh is None):
            held = experts_of_device(experts, parallel.axis_name)
        (hidden,) = linear.sizes("hidden_features", self.hidden_features)
        features = x.shape[-1]
        out_features = features if self.out_features is None else self.out_features
        quantized: Any = {"recipe": self.recipe, "implementation": self.implementation}
        activation = Activation.of(self.activation)
        layer: Any = {"use_bias": self.use_bias, "dtype": self.dtype, "param_dtype": self.param_dtype, **quantized}
        wide: Any = {
            "kernel_init": split_over(split, mixture.for_each_expert(self.kernel_init), split, None, None),
            "bias_init": split_over(split, mixture.for_each_expert(self.bias_init), split, None),
        }
        kernel_init, bias_init = without_names(self.kernel_init), without_names(self.bias_init)
        down_kernel_init = self.down_kernel_init or kernel_init
        router = Dense(
            experts,
            use_bias=self.use_bias,
            param_dtype=self.param_dtype,
            kernel_init=self.router_kernel_init or kernel_init,
            bias_init=bias_init,
            name="router",
        )
        gate = Einsum((held, features, hidden), mixture.EINSUM, name="gate_proj", **wide, **layer)
        up = Einsum((held, features, hidden), mixture.EINSUM, name="up_proj", **wide, **layer)
        down = Einsum(
            (held, hidden, out_features),
            mixture.EINSUM,
            kernel_init=split_over(split, mixture.for_each_expert(down_kernel_init), split, None, None),
            bias_init=split_over(split, mixture.for_each_expert(self.down_bias_init or bias_init), split, None),
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
            options=mixture.Options(activation, parallel, **quantized),
            tensor=tensor,
        )
        if self.shared_features is None:
            return result
        shared = GatedMLP(
            self.shared_features,
            out_features,
            activation=activation,
            tensor_axis=self.tensor_axis,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.shared_kernel_init or kernel_init,
            down_kernel_init=self.shared_down_kernel_init or without_names(down_kernel_init),
            name="shared",
            **quantized,
        )
        return result._replace(y=result.y + shared(x))
