"""FP8 for the dense layers and experts of MaxText, which asks an object for a `dot_general_cls` and an `einsum`."""

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
from te_jax.layers import linear as layers
from te_jax.recipe import DelayedScaling, Recipe


class _Log:
    """The kinds of kernels that were multiplied, by the names of their axes and their shapes."""

    def __init__(self):
        self.layers: dict[tuple[Any, ...], conversion.Layer] = {}

    def note(
        self, kernel_axes: tuple[str | None, ...], kernel: Array, recipe: Recipe | None, reason: str | None
    ) -> None:
        path = "/".join(map(str, kernel_axes))
        self.layers[kernel_axes, kernel.shape] = conversion.Layer(path, f"kernel {kernel.shape}", recipe, reason or "")


@dataclasses.dataclass(frozen=True)
class MaxTextQuantization:
    """A quantization of MaxText (0.2.4, 0.2.5) whose dense layers and experts multiply in FP8 as a recipe says.

    In a training loop of your own, MaxText's models take it as an argument:

        model = model_creation_utils.get_transformer_model(config, mesh, MaxTextQuantization(BlockScaling()), rngs=rngs)

    MaxText's own trainer asks `configure_quantization(config)`, which knows MaxText's names alone. Until upstream calls
    a function that users register there, replace it before the model is made:

        from maxtext.layers import quantizations
        quantizations.configure_quantization = lambda *_, **__: MaxTextQuantization(BlockScaling())

    Parameters have the names and shapes of the unquantized model, so checkpoints load in both directions. Embeddings,
    output heads, routers and KV caches stay in the dtype of their operands. `report` lists the kernels for which
    MaxText asks the quantization.

    Experts are quantized with sparse_matmul=False. With sparse_matmul=True and megablox=False, MaxText 0.2.5 calls
    `jax.lax.ragged_dot` without asking the quantization; 0.2.4 fails with any but that of AQT. Put such experts in FP8
    once the model is made, in a training loop of your own; the report of it has the dense layers too:

        te_jax.nnx.convert(model, BlockScaling())

    MaxText hands its `matmul_precision` to no quantized product: set `jax_default_matmul_precision` for those that stay
    in high precision.

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

    def einsum(self, mesh_axes: Sequence[str | None] = (), dtype: Any = None) -> Callable[..., Array]:
        """Returns the function that multiplies by the kernels of experts: einsum(subscripts, inputs, kernel).

        MaxText multiplies tokens by masks with it too. It is `jnp.einsum` for these, and for `DelayedScaling`.

        Args:
          mesh_axes: the logical names of the dimensions of the right operand. Those of activations begin with
            "activation".
          dtype: ignored; the result has the dtype of the inputs.
        """
        del dtype
        axes = tuple(mesh_axes)
        if not axes or any(str(axis).startswith("activation") for axis in axes):
            return jnp.einsum
        return functools.partial(self._einsum, axes)

    def _einsum(self, kernel_axes: tuple[str | None, ...], subscripts: str, inputs: Array, kernel: Array) -> Array:
        obstacle = conversion.obstacle_in_einsum(subscripts, kernel.shape, "subscripts")
        if isinstance(self.recipe, DelayedScaling):
            obstacle = "DelayedScaling has no place for its state in experts: use a recipe without state"
        self._log.note(kernel_axes, kernel, None if obstacle else self.recipe, obstacle)
        if obstacle:
            return jnp.einsum(subscripts, inputs, kernel)
        names = layers.Einsum.parse(subscripts, kernel.shape)
        options = layers.Options(self.recipe, None, self.implementation)
        return layers.einsum(names, inputs, kernel, None, None, dtype=inputs.dtype, options=options)

    def report(self) -> conversion.Report:
        """Reports which kernels are multiplied in FP8, and why the others are not.

        Kernels are known by their logical axes and their shape, which all layers of a kind share: each kind has one
        row. Call it after the model was called, as experts are in the report from then on.

        Raises:
          ValueError: no model was made with this quantization.
        """
        if not self._log.layers:
            raise ValueError("no layer has multiplied with this quantization: make the model with it, then ask again")
        return conversion.report(self._log.layers.values(), ())


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
        dimension_numbers: jax.lax.DotDimensionNumbers,
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        out_sharding: layers.OutSharding = None,
        **kwargs: Any,
    ) -> Array:
        """The product, as `te_jax.flax.DotGeneral` returns it."""
        obstacle = "a router by its axes" if _is_router(self.kernel_axes) else None
        recipe = self.recipe if obstacle is None else None
        if self.log is not None:
            self.log.note(self.kernel_axes, rhs, recipe, obstacle)
        options: Any = {"preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
        if obstacle is not None:
            return lax.dot_general(lhs, rhs, dimension_numbers, precision=precision, **options)
        return super().__call__(lhs, rhs, dimension_numbers, precision, **options, **kwargs)

    def noted(self, shape: Sequence[int]) -> conversion.Layer | None:
        """The row of a kernel in the quantization's report: that of its axes, if layers are stacked in its shape."""
        rows = {} if self.log is None else self.log.layers
        same_axes = [row for (axes, _), row in rows.items() if axes == self.kernel_axes]
        return rows.get((self.kernel_axes, tuple(shape)), next(iter(same_axes), None))


def _is_router(kernel_axes: tuple[str | None, ...]) -> bool:
    """Whether a kernel with these axes is that of a router.

    MaxText's are ("embed", None) or ("embed_router", None), and it quantizes no other kernel with a name for its rows
    and none for its columns.
    """
    return len(kernel_axes) == 2 and kernel_axes[0] is not None and kernel_axes[1] is None
