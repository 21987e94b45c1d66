"""Which residuals of a layer leave for the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from te_jax._core.arguments import as_flag, is_whole_number

LAYER_INPUT = "layer_input"
"""The name of the arrays that a layer gets as x."""


@dataclasses.dataclass(frozen=True)
class Residual:
    """An array that a layer keeps from its forward pass for its backward pass.

    Attributes:
      names: what `jax.ad_checkpoint.checkpoint_name` called it; `LAYER_INPUT` for the layer's input.
      shape, dtype: of the whole array, on all devices.
    """

    names: frozenset[str]
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, on all devices."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{' = '.join(sorted(self.names)) or 'no name'}: {self.dtype.name}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class Offload:
    """Moves what layers keep for the backward pass to host memory, and fetches it one layer ahead of its use.

    What a layer keeps, `remat` of `apply_layers` says: with remat=True its input only. Parameters, and what is computed
    from parameters alone, always stay on the device.

    Attributes:
      names: which residuals leave. Names of `checkpoint_name`, and `LAYER_INPUT` for the layer's input; or a function
        that is given a `Residual`; or None for all.
      min_size: bytes; smaller residuals stay on the device, for a copy of few bytes takes as long as one of many.
      quantize: the names of float residuals that are stored in FP8 (float8_e4m3fn, one scale for 128 values along the
        last dimension): half the bytes of bfloat16, and gradients with FP8's error. True: all that leave. float64 is
        refused.
      keep: how many layers keep their residuals on the device: the last one, with which the backward pass begins, and
        others evenly between the first and that. Keep more where copies take longer than layers compute.
      required: whether a name that no residual of a layer has is an error. False: such layers keep what they have.
      implementation: "xla" leaves the copies to XLA, which hides them in the unrolled loop of `apply_layers`, not in
        a scan. "native" makes them by te_jax's extension, in `scan_layers`, for arrays that are whole on a device or
        inside of `jax.shard_map`. None: "native" in `scan_layers` where it can run, else "xla".
      slots: how many layers' residuals wait on the device for their copies. One hides copies that last as long as a
        layer computes; two even out layers and copies that take now more, now less. None: one in `apply_layers`, two
        in `scan_layers`.

    Examples:
      >>> import jax, jax.numpy as jnp, te_jax
      >>> offload = te_jax.offload.Offload(names=[te_jax.offload.LAYER_INPUT], min_size=0)
      >>> def loss(kernels, x):
      ...     layer = lambda x, k: jnp.tanh(x @ k)
      ...     return te_jax.layers.apply_layers(layer, kernels, x, remat=True, offload=offload).sum()
      >>> jax.grad(loss)([jnp.eye(2), jnp.eye(2)], jnp.ones((1, 2)))[0].shape
      (2, 2)
    """

    names: Sequence[str] | Callable[[Residual], bool] | None = None
    min_size: int = 2**20
    quantize: Sequence[str] | bool = ()
    keep: int = 1
    required: bool = True
    implementation: Literal["native", "xla"] | None = None
    slots: int | None = None

    def __post_init__(self) -> None:
        for field in ("names", "quantize"):
            value = getattr(self, field)
            if isinstance(value, str):
                raise ValueError(f"{field} is {value!r}: it must be a sequence of names, such as [{value!r}]")
            if isinstance(value, Sequence):
                if not all(isinstance(name, str) for name in value):
                    raise ValueError(f"{field} is {value!r}: names must be strings")
                object.__setattr__(self, field, tuple(value))
            elif not (callable(value) or value is None if field == "names" else isinstance(value, bool)):
                kinds = "names, a function or None" if field == "names" else "names or a bool"
                raise ValueError(f"{field} is {value!r}: it must be {kinds}")
        if not (is_whole_number(self.min_size) and self.min_size >= 0):
            raise ValueError(f"min_size is {self.min_size!r}: it must be a number of bytes, 0 or more")
        if not (is_whole_number(self.keep) and self.keep >= 1):
            raise ValueError(
                f"keep is {self.keep!r}: it must be 1 or more, because the backward pass needs what the last "
                "layer keeps at once"
            )
        as_flag("required", self.required)
        if self.implementation not in (None, "native", "xla"):
            raise ValueError(f"implementation is {self.implementation!r}: it must be 'native', 'xla' or None")
        if self.slots is not None and not (is_whole_number(self.slots) and self.slots >= 1):
            raise ValueError(f"slots is {self.slots!r}: it must be a whole number of 1 or more, or None")
        if isinstance(self.names, tuple) and isinstance(self.quantize, tuple):
            stays = sorted(set(self.quantize) - set(self.names))
            if stays:
                raise ValueError(f"quantize has {stays}, which names does not: only what leaves is stored in FP8")

    def chooses(self, residual: Residual) -> bool:
        """Whether the residual leaves."""
        if residual.nbytes < max(self.min_size, 1):
            return False
        if self.names is None:
            return True
        if callable(self.names):
            return bool(self.names(residual))
        return not residual.names.isdisjoint(self.names)

    def stays(self, layer: int, count: int) -> bool:
        """Whether layer number `layer` of `count` keeps its residuals on the device."""
        keep = min(self.keep, count)
        return (layer + 1) * keep // count > layer * keep // count

    def stores_in_fp8(self, residual: Residual) -> bool:
        """Whether the residual, which leaves, is stored in FP8.

        Raises:
          ValueError: it is float64, and should be.
        """
        chosen = self.quantize if isinstance(self.quantize, bool) else not residual.names.isdisjoint(self.quantize)
        if not chosen or not residual.shape:
            return False
        if residual.dtype == np.float64:
            raise ValueError(
                f"offload has quantize={self.quantize!r}, and {residual} is not quantized: FP8 is for float32, "
                "bfloat16 and float16. Name the other residuals in quantize, or convert this one"
            )
        return residual.dtype.name in ("float32", "bfloat16", "float16")
