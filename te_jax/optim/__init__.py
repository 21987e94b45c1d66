"""Adam and Muon with states in few bytes, as optax transforms."""

from typing import TYPE_CHECKING, NoReturn

try:
    import optax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "optax":
        raise
    raise ImportError('te_jax.optim needs optax, which is not installed: pip install "optax>=0.2.6"') from error

from te_jax._core import transformer_engine
from te_jax.optim._adam import ScaleByAdamState, adam, adamw, scale_by_adam
from te_jax.optim._buckets import Buckets, Packed
from te_jax.optim._convert import convert_state
from te_jax.optim._master import MasterWeightsState, master_weights, weights
from te_jax.optim._matrices import muon_dimension_numbers
from te_jax.optim._muon import ScaleByMuonState, muon, scale_by_muon
from te_jax.optim._nonfinite import (
    DynamicLossScaleState,
    SkipNonfiniteState,
    dynamic_loss_scale,
    loss_scale,
    skip_nonfinite,
)
from te_jax.optim._offload import offload
from te_jax.optim._overwrite import overwrite_with_gradient
from te_jax.optim._requantize import Requantize, apply_updates, merge_kernels

__all__ = [
    "Buckets",
    "DynamicLossScaleState",
    "MasterWeightsState",
    "Packed",
    "Requantize",
    "ScaleByAdamState",
    "ScaleByMuonState",
    "SkipNonfiniteState",
    "adam",
    "adamw",
    "apply_updates",
    "convert_state",
    "dynamic_loss_scale",
    "loss_scale",
    "master_weights",
    "merge_kernels",
    "muon",
    "muon_dimension_numbers",
    "offload",
    "overwrite_with_gradient",
    "scale_by_adam",
    "scale_by_muon",
    "skip_nonfinite",
    "weights",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        raise transformer_engine.missing(__name__, name)
