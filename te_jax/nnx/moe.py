"""A mixture of experts for NNX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import variablelib

from te_jax import native
from te_jax.layers import linear, mixture, tensor_parallel
from te_jax.layers.tensor_parallel import TensorAxis
from te_jax.nnx.gated_mlp import GatedMLP
from te_jax.nnx.linear import Einsum, Initializer, Linear, split_over, without_metadata
from te_jax.nnx.variables import ExpertBias
from te_jax.recipe import Recipe
from te_jax.reference.activation import Activation, ActivationName
from te_jax.sharding import AxisName


class MoE(nnx.Module):
    """A mixture of gated MLPs, the experts, of which a router chooses some for every token: `te_jax.layers.moe`.

        layer = MoE(64, num_experts=8, hidden_features=256, router=te_jax.layers.Router(top_k=2), rngs=nnx.Rngs(0))
        result = layer(x)
        loss = loss_of(result.y) + 1e-2 * ops.load_balancing_loss(result.logits, result.routing.experts)

    It consists of `router`; `gate_proj`, `up_proj` and `down_proj` with kernels [experts, in, out]; and `shared`, a
    `GatedMLP`. Auxiliary losses are yours to add, from the logits and the routing that a call returns. Returned values
    pass through `nnx.jit`, `nnx.remat` and `nnx.scan` like y; no variable appears that such a transformation would
    have to know.

    With expert_bias=True the bias of the choice is an `ExpertBias`, which is no `nnx.Param`. No call changes it. Update
    it once for each optimizer step, with the counts of all its tokens:

        counts = ops.expert_counts(result.routing.experts, num_experts)
        layer.expert_bias.set_value(ops.update_expert_bias(layer.expert_bias.get_value(), counts))

    With expert_parallel each device holds some of the experts, and tokens travel to them. Create the layer outside of
    `shard_map`: it then has all experts. Inside call `nnx.merge(graphdef, state)(x)`, with a state whose kernels and
    biases of `gate_proj`, `up_proj` and `down_proj` are split along their first dimension, by PartitionSpec("expert")
    in `in_specs`, and all other variables whole; docs/experts.md has an example.

    Args:
      in_features: of x.
      num_experts: number of experts, without shared ones.
      hidden_features: of each expert.
      router: how experts are chosen, a `te_jax.layers.Router`.
      out_features: None is in_features.
      activation: as in `te_jax.ops.gated_activation`; "silu" is SwiGLU.
      expert_parallel: as in `te_jax.layers.moe`.
      tensor_axis: the mesh axis whose devices split the time, dimension -2 of x and of results, and the hidden features
        of shared experts: see `GatedMLP`. They divide the experts too, or the devices along the axes of expert_parallel
        do, out of all that split x. A capacity is for the tokens of those devices. None for no such axis.
      shared_features: hidden features of all shared experts together; None for no shared experts.
      expert_bias: whether there is a bias of the choice, `te_jax.ops.update_expert_bias`. It is zero at first.
      use_bias: whether the router and the experts have biases. Shared experts have none.
      dtype, param_dtype, implementation: as in `LinearGeneral`. The router computes in float32. Kernels of experts are
        rounded to `dtype` before they are quantized.
      recipe: of the experts and the shared ones, as in `te_jax.ops.grouped_dense`; None to compute in `dtype`.
      kernel_init, bias_init: of `gate_proj` and `up_proj`. They draw the kernel of one expert as a matrix, and its bias
        as a vector; metadata, as from `nnx.with_partitioning`, is that of all experts.
      down_kernel_init, down_bias_init, router_kernel_init, shared_kernel_init, shared_down_kernel_init: of `down_proj`,
        `router` and `shared`; None for kernel_init or bias_init, without metadata.
      rngs: `nnx.Rngs`, of which "params" is used.

    Raises:
      ValueError: for sizes that do not fit, or a router, recipe or implementation that is none.
    """

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        hidden_features: int,
        router: mixture.Router,
        out_features: int | None = None,
        *,
        activation: Activation | ActivationName = "silu",
        expert_parallel: mixture.ExpertParallel | AxisName | None = None,
        tensor_axis: str | None = None,
        shared_features: int | None = None,
        expert_bias: bool = False,
        use_bias: bool = False,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        kernel_init: Initializer = nnx.initializers.lecun_normal(),
        down_kernel_init: Initializer | None = None,
        router_kernel_init: Initializer | None = None,
        shared_kernel_init: Initializer | None = None,
        shared_down_kernel_init: Initializer | None = None,
        bias_init: Initializer = nnx.initializers.zeros_init(),
        down_bias_init: Initializer | None = None,
        recipe: Recipe | None = None,
        implementation: native.Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        mixture.Router.check(router)
        (features,) = linear.sizes("in_features", in_features)
        (experts,) = linear.sizes("num_experts", num_experts)
        (hidden,) = linear.sizes("hidden_features", hidden_features)
        out_features = features if out_features is None else out_features
        quantized: Any = {"recipe": recipe, "implementation": implementation}
        self.dtype = dtype
        self.choice = router  # `router` is the layer
        self.options = mixture.Options(
            Activation.of(activation), mixture.ExpertParallel.of(expert_parallel or tensor_axis), recipe, implementation
        )
        tensor_parallel.validate(tensor_axis)
        self.tensor_axis = tensor_axis
        devices = self.options.expert_parallel
        by_expert = devices.axis_name if tensor_axis is not None and devices is not None else None
        tensor_parallel.validate_sizes(by_expert, num_experts=experts)
        self.num_experts, self.by_expert = experts, by_expert
        split: Any = {"kernel_metadata": split_over(by_expert, by_expert, None, None)}
        split |= {"bias_metadata": split_over(by_expert, by_expert, None)}

        same_kernel, same_bias = without_metadata(kernel_init), without_metadata(bias_init)
        down_kernel_init = down_kernel_init or same_kernel
        shared: Any = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs, **quantized}
        wide: Any = {
            "kernel_shape": (experts, features, hidden),
            "bias_shape": (experts, hidden) if use_bias else None,
            "kernel_init": _for_each_expert(kernel_init),
            "bias_init": _for_each_expert(bias_init),
            **split,
        }
        self.router = Linear(
            features,
            experts,
            use_bias=use_bias,
            param_dtype=param_dtype,
            kernel_init=router_kernel_init or same_kernel,
            bias_init=same_bias,
            rngs=rngs,
        )
        self.gate_proj = Einsum(mixture.EINSUM, **wide, **shared)
        self.up_proj = Einsum(mixture.EINSUM, **wide, **shared)
        self.down_proj = Einsum(
            mixture.EINSUM,
            (experts, hidden, out_features),
            (experts, out_features) if use_bias else None,
            kernel_init=_for_each_expert(down_kernel_init),
            bias_init=_for_each_expert(down_bias_init or same_bias),
            **split,
            **shared,
        )
        self.expert_bias: ExpertBias | None = nnx.data(None)
        if expert_bias:
            self.expert_bias = ExpertBias(jnp.zeros((experts,), jnp.float32))
        self.shared: GatedMLP | None = nnx.data(None)
        if shared_features is not None:
            self.shared = GatedMLP(
                features,
                shared_features,
                out_features,
                activation=self.options.activation,
                tensor_axis=tensor_axis,
                kernel_init=shared_kernel_init or same_kernel,
                down_kernel_init=shared_down_kernel_init or without_metadata(down_kernel_init),
                **shared,
            )

    def __call__(self, x: jax.typing.ArrayLike) -> mixture.MoEResult:
        """Applies the layer to all tokens of x together; inside `shard_map` to those of a device.

        Args:
          x: [*tokens, in_features], floating point.

        Returns:
          `te_jax.layers.MoEResult`: y [*tokens, out_features], logits, routing, and the number of dropped choices.

        Raises:
          ValueError: for shapes, dtypes or options that do not fit, naming the argument.
        """
        x = linear.as_array("x", x)
        tensor_parallel.validate_sizes(self.by_expert, num_experts=self.num_experts)
        result = mixture.moe_of_layers(
            x,
            self.router.held(),
            (self.gate_proj.held(), self.up_proj.held(), self.down_proj.held()),
            self.choice,
            expert_bias=None if self.expert_bias is None else self.expert_bias.get_value(),
            dtype=self.dtype,
            options=self.options,
            tensor=TensorAxis.of(self.tensor_axis),
        )
        return result if self.shared is None else result._replace(y=result.y + self.shared(x))


def _for_each_expert(init: Initializer) -> Initializer:
    """`mixture.for_each_expert`, for initializers with metadata, too."""

    def drawn(*arguments: Any) -> Any:
        found: list[Any] = []

        def of_one(*arguments: Any) -> Any:
            value = init(*arguments)
            if isinstance(value, variablelib.VariableMetadata):
                found.append(value)
                return value.raw_value
            return value

        values = mixture.for_each_expert(of_one)(*arguments)
        if not found:
            return values
        found[0].raw_value = values
        return found[0]

    return drawn
