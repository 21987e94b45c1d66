"""FP8 for the dense layers of MaxText, which asks an object for a `dot_general_cls`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from te_jax import native
from te_jax.flax import linear
from te_jax.layers import convert as conversion
from te_jax.recipe import Recipe


class _Log:
    """The kinds of kernels that were multiplied, by the names of their axes and their shapes."""

    def __init__(self):
        self.layers: dict[tuple[Any, ...], conversion.Layer] = {}


@dataclasses.dataclass(frozen=True)
class MaxTextQuantization:
    """A quantization of MaxText (0.2.5) whose dense layers multiply in FP8 as a recipe says.

    In a training loop of your own, MaxText's models take it as an argument:

        model = model_creation_utils.get_transformer_model(config, mesh, MaxTextQuantization(BlockScaling()), rngs=rngs)

    MaxText's own trainer asks `configure_quantization(config)`, which knows MaxText's names alone. Until upstream calls
    a function that users register there, replace it before the model is made:

        from maxtext.layers import quantizations
        quantizations.configure_quantization = lambda *_, **__: MaxTextQuantization(BlockScaling())

    Only dense layers are quantized. Routers, experts and KV caches are computed in the dtype of their operands, and so
    are dense layers whose sizes are no multiples of 16; `report` lists them. MaxText hands its `matmul_precision` to no
    quantized product: set `jax_default_matmul_precision` for those that stay in high precision.

    Attributes:
      recipe: how to quantize. The state of `DelayedScaling` is in variables of the type by which MaxText knows state
        that is overwritten with its gradient.
      implementation: as in `te_jax.flax.DenseGeneral`.
      quant_mode: "train": kernels are parameters, which are quantized in every step.
      needs_apply_rngs: False: quantization draws no random numbers.
    """

    recipe: Recipe
    implementation: native.Implementation | None = None
    quant_mode: ClassVar[str] = "train"
    needs_apply_rngs: ClassVar[bool] = False
    _log: _Log = dataclasses.field(default_factory=_Log, init=False, repr=False, compare=False)

    def dot_general_cls(self, mesh_axes: Sequence[str | None] = ()) -> Callable[[], DotGeneral]:
        """Returns the class of the Linen module that multiplies the inputs and the kernel of one layer.

        Args:
          mesh_axes: the logical names of the kernel's dimensions.
        """
        return functools.partial(
            DotGeneral, self.recipe, implementation=self.implementation, kernel_axes=tuple(mesh_axes), log=self._log
        )

    def report(self) -> conversion.Report:
        """Reports which kernels are multiplied in FP8, and why the others are not.

        Layers are known by the logical axes and the shape of their kernels, which all layers of a kind share: each kind
        has one row. Call it after the model was made.

        Raises:
          ValueError: no model was made with this quantization.
        """
        if not self._log.layers:
            raise ValueError("no layer has multiplied with this quantization: make the model with it, then ask again")
        return conversion.report(self._log.layers.values(), ())

    def einsum(self, mesh_axes: Sequence[str | None] = (), dtype: Any = None) -> Callable[..., Array]:
        """`jnp.einsum`: MaxText does not say which of its operands is a kernel."""
        del mesh_axes, dtype
        return jnp.einsum


class DotGeneral(linear.DotGeneral):
    """`te_jax.flax.DotGeneral` of one layer of MaxText; MaxText's own product where FP8 is not for it.

    Attributes:
      kernel_axes: the logical names of the kernel's dimensions.
      log: where the layer is noted for the report.
    """

    kernel_axes: tuple[str | None, ...] = ()
    log: Any = dataclasses.field(default=None, repr=False, compare=False)

    def __call__(
        self,
        lhs: Array,
        rhs: Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        out_sharding: Any = None,
        **kwargs: Any,
    ) -> Array:
        """The product, as `te_jax.flax.DotGeneral` returns it."""
        (_, contracted), _ = dimension_numbers
        features = [size for axis, size in enumerate(rhs.shape) if axis not in contracted]
        if _is_router(self.kernel_axes):
            obstacle = "a router by its axes"
        else:
            obstacle = conversion.obstacle_in_sizes([rhs.shape[axis] for axis in contracted], features)
        recipe = self.recipe if obstacle is None else None
        if self.log is not None:
            path = "/".join(map(str, self.kernel_axes))
            row = conversion.Layer(path, f"kernel {rhs.shape}", recipe, obstacle or "")
            self.log.layers[self.kernel_axes, rhs.shape] = row
        options: Any = {"preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
        if obstacle is not None:
            return lax.dot_general(lhs, rhs, dimension_numbers, precision=precision, **options)
        return super().__call__(lhs, rhs, dimension_numbers, precision, **options, **kwargs)


def _is_router(kernel_axes: tuple[str | None, ...]) -> bool:
    """Whether a kernel with these axes is that of a router.

    MaxText's are ("embed", None) or ("embed_router", None), and it quantizes no other kernel with a name for its rows
    and none for its columns.
    """
    return len(kernel_axes) == 2 and kernel_axes[0] is not None and kernel_axes[1] is None
