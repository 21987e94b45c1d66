"""Fused kernels, FP8 training and overlapped communication for JAX on Hopper GPUs.

Importing te_jax loads no extension, starts no backend and touches no GPU; the first operation does. Flax and optax are
imported with te_jax.flax, te_jax.nnx and te_jax.optim, at their first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from te_jax import checkpoint_policies, hlo, ops, parallel, recipe
from te_jax._core import transformer_engine
from te_jax._version import __version__

if TYPE_CHECKING:
    from te_jax import debug as debug
    from te_jax import flax as flax
    from te_jax import layers as layers
    from te_jax import models as models
    from te_jax import nnx as nnx
    from te_jax import offload as offload
    from te_jax import optim as optim
    from te_jax import reference as reference
    from te_jax import testing as testing

__all__ = ["__version__", "checkpoint_policies", "hlo", "ops", "parallel", "recipe"]

_AT_FIRST_USE = ("debug", "flax", "layers", "models", "nnx", "offload", "optim", "reference", "testing")


def __getattr__(name: str) -> Any:
    if name in _AT_FIRST_USE:
        return importlib.import_module(f"te_jax.{name}")
    raise transformer_engine.missing(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_AT_FIRST_USE})
