"""Reference models: what `te-jax train`, the notebooks and the benchmarks share."""

from te_jax.models.decoder import PRESETS, DecoderConfig, apply, init, init_scaling_state, loss

__all__ = ["PRESETS", "DecoderConfig", "apply", "init", "init_scaling_state", "loss"]
