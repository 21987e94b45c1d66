"""Reference models: what `te-jax train`, the notebooks and the benchmarks share."""

from te_jax.layers.attention import RopeScaling
from te_jax.models.adapters import join_adapters, merge_adapters, split_adapters
from te_jax.models.config import PRESETS, DecoderConfig, Experts, Factors, Latent, Lora, Softcaps
from te_jax.models.decoder import (
    Losses,
    apply,
    apply_head,
    init,
    init_scaling_state,
    is_head,
    loss,
    losses,
    requantize,
)
from te_jax.models.generation import generate
from te_jax.models.huggingface import config_from_hf, from_hf, to_hf
from te_jax.models.parallel import TensorParallel, param_specs
from te_jax.models.peft import from_peft, to_peft
from te_jax.models.safetensors import FolderError
from te_jax.models.sharded import parallel_apply, parallel_loss, parallel_losses

__all__ = [
    "PRESETS",
    "DecoderConfig",
    "Experts",
    "Factors",
    "FolderError",
    "Latent",
    "Lora",
    "Losses",
    "RopeScaling",
    "Softcaps",
    "TensorParallel",
    "apply",
    "apply_head",
    "config_from_hf",
    "from_hf",
    "from_peft",
    "generate",
    "init",
    "init_scaling_state",
    "is_head",
    "join_adapters",
    "loss",
    "losses",
    "merge_adapters",
    "parallel_apply",
    "parallel_loss",
    "parallel_losses",
    "param_specs",
    "requantize",
    "split_adapters",
    "to_hf",
    "to_peft",
]
