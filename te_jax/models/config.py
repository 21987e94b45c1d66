"""The shape of a decoder, and shapes with names."""

import dataclasses

from te_jax._core.arguments import is_finite_number, is_whole_number
from te_jax.offload import Offload
from te_jax.recipe import Recipe

_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder. Frozen and hashable, so that it can be a static argument of `jax.jit`.

    Args:
      vocab_size: number of tokens V.
      num_layers: number of blocks L.
      hidden_size: width of the residual stream D.
      num_heads: query heads H; a multiple of `num_kv_heads`.
      num_kv_heads: key and value heads K, each shared by H / K query heads.
      head_dim: width of one head; even, because rotary positions turn pairs.
      mlp_size: width F between the gated projections.
      rope_theta: base of the rotary wavelengths; position angles are t · rope_theta^(-2i / head_dim).
      norm_eps: added to the mean square in RMSNorm.
      dtype: "float32" or "bfloat16": what activations and projections are computed in. Parameters are always float32;
        norms, rotations and the softmax of attention are computed in float32.
      remat: recompute each block in the backward pass and keep only its input: memory for about a third more FLOPs.
      offload: which residuals of a block wait for the backward pass in host memory; see `te_jax.offload.Offload`. With
        `remat` its input is the only one. Otherwise "layer_input", "te_attention_operand" and "te_attention_output"
        are those that take the longest to recompute for their bytes.
      recipe: how the projections of attention and MLP are quantized to FP8 (`te_jax.recipe`), whose sizes must then be
        multiples of 16; None computes them in `dtype`. Kernels are quantized from float32.
      head_recipe: how the gradients of the output head are quantized, in `loss` on one device: see
        `te_jax.ops.linear_cross_entropy`. None computes them in `dtype`.

    Raises:
      ValueError: a size is below 1, heads do not divide, a name is unknown, `recipe` is no recipe, or `offload` no
        Offload.
    """

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    dtype: str = "float32"
    remat: bool = False
    recipe: Recipe | None = None
    head_recipe: Recipe | None = None
    offload: Offload | None = None

    def __post_init__(self):
        for name in ("vocab_size", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "mlp_size"):
            value = getattr(self, name)
            if not is_whole_number(value) or value < 1:
                raise ValueError(f"{name} is {value!r}: it needs to be a whole number of at least 1")
            object.__setattr__(self, name, int(value))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads} and num_kv_heads is {self.num_kv_heads}: every key head serves the "
                f"same number of query heads; choose a num_kv_heads that divides {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}: rotary positions turn pairs; choose an even number")
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if not is_finite_number(value) or value <= 0:
                raise ValueError(f"{name} is {value!r}: it needs to be a finite number above 0")
            object.__setattr__(self, name, float(value))  # arrays are not hashable
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}: choose one of {', '.join(_DTYPES)}")
        for name in ("recipe", "head_recipe"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Recipe):
                raise ValueError(
                    f"{name} is {value!r}: it needs to be a Recipe, such as te_jax.recipe.CurrentScaling(), or None"
                )
        if self.offload is not None and not isinstance(self.offload, Offload):
            raise ValueError(f"offload is {self.offload!r}: it needs to be a te_jax.offload.Offload, or None")

    @property
    def num_parameters(self) -> int:
        """Number of float32 parameters that `init` makes."""
        attention = 2 * self.hidden_size * (self.num_heads + self.num_kv_heads) * self.head_dim
        block = attention + 3 * self.hidden_size * self.mlp_size + 2 * self.hidden_size
        return 2 * self.vocab_size * self.hidden_size + self.num_layers * block + self.hidden_size

    def flops_per_token(self, seq_len: int) -> int:
        """FLOPs of a token in training, forward and backward: those of GEMMs and of causal attention, without `remat`.

        Two for each multiplication with a kernel or the head, and as many for each of the two gradients. In the mean a
        token attends to half of its sequence.

        Args:
          seq_len: tokens in a sequence.
        """
        norms = (2 * self.num_layers + 1) * self.hidden_size
        kernels = self.num_parameters - self.vocab_size * self.hidden_size - norms
        attention = self.num_layers * self.num_heads * self.head_dim * seq_len  # scores and values, half of each
        return 6 * (kernels + attention)


PRESETS: dict[str, DecoderConfig] = {
    "nano": DecoderConfig(
        vocab_size=256, num_layers=2, hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, mlp_size=96
    ),
    "tiny": DecoderConfig(
        vocab_size=256, num_layers=4, hidden_size=128, num_heads=4, num_kv_heads=2, head_dim=32, mlp_size=384
    ),
    "small": DecoderConfig(
        vocab_size=256, num_layers=12, hidden_size=768, num_heads=12, num_kv_heads=4, head_dim=64, mlp_size=2048
    ),
    "8b": DecoderConfig(
        vocab_size=128_256,
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        mlp_size=14_336,
        rope_theta=500_000.0,
        dtype="bfloat16",
        remat=True,
    ),
}
"""Named shapes. `nano` is for tests, `tiny` trains in about a minute on two CPU cores, `small` is for one GPU (all
three read bytes: 256 tokens), and `8b` is Llama 3 8B."""
