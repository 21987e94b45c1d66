"""Reference models: what `te-jax train`, the notebooks and the benchmarks share."""

from te_jax.models.config import PRESETS, DecoderConfig, Experts
from te_jax.models.decoder import Losses, apply, init, init_scaling_state, is_head, loss, losses, requantize
from te_jax.models.parallel import TensorParallel, param_specs
from te_jax.models.sharded import parallel_apply, parallel_loss, parallel_losses

__all__ = [
    "PRESETS",
    "DecoderConfig",
    "Experts",
    "Losses",
    "TensorParallel",
    "apply",
    "init",
    "init_scaling_state",
    "is_head",
    "loss",
    "losses",
    "parallel_apply",
    "parallel_loss",
    "parallel_losses",
    "param_specs",
    "requantize",
]
