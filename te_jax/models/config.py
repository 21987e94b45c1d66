"""The shape of a decoder, and shapes with names."""

import dataclasses
from typing import Any, get_args

from te_jax import native
from te_jax._core.arguments import is_finite_number, is_whole_number, static_way_out
from te_jax.layers.mixture import Router
from te_jax.offload import Offload
from te_jax.recipe import DelayedScaling, Product, Recipe

MLP = ("gate", "up", "down")
"""The names of a block's kernels that a mixture of experts has one of for each expert."""

_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Experts:
    """The mixture of experts in the place of every MLP: see `te_jax.layers.moe`.

    Args:
      num_experts: MLPs of each block, of which a token meets `router.top_k`.
      router: how they are chosen.
      balance_weight: factor of each block's `te_jax.ops.load_balancing_loss` in `te_jax.models.loss`.
      z_weight: factor of each block's `te_jax.ops.router_z_loss` there.

    Raises:
      ValueError: a number is out of range, or `router` no Router.
    """

    num_experts: int
    router: Router
    balance_weight: float = 1e-2
    z_weight: float = 0.0

    def __post_init__(self):
        if not isinstance(self.router, Router):
            raise ValueError(f"router is {self.router!r}: it needs to be a te_jax.layers.Router, as Router(top_k=2) is")
        if not is_whole_number(self.num_experts) or self.num_experts < self.router.top_k:
            raise ValueError(
                f"num_experts is {self.num_experts!r}: it needs to be a whole number of at least router.top_k, "
                f"{self.router.top_k}"
            )
        object.__setattr__(self, "num_experts", int(self.num_experts))
        for name in ("balance_weight", "z_weight"):
            value = getattr(self, name)
            if not is_finite_number(value) or value < 0:
                raise ValueError(f"{name} is {value!r}: it needs to be a finite number of at least 0")
            object.__setattr__(self, name, float(value))


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
      mlp_size: width F between the gated projections; with `experts`, of one expert.
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
      head_recipe: how the products of the output head in `te_jax.models.loss` are quantized; None computes them in
        `dtype`. Logits of `te_jax.models.apply` are always in `dtype`.
      head_fp8_products: which of "forward", "dgrad" and "wgrad" these are: see `te_jax.ops.linear_cross_entropy`.
        "forward" in FP8 loses most of the accuracy.
      experts: a mixture of experts in the place of every MLP; None for one MLP.
      attention: the implementation of `te_jax.ops.attention`: "native", "reference", or None, which chooses.
      max_segments_per_seq: of packed sequences: see `te_jax.ops.attention`. None takes any, by a mask.

    Raises:
      ValueError: a size is below 1, heads do not divide, a name is unknown, `recipe` is no recipe, `offload` no
        Offload, or `experts` no Experts or combined with delayed scaling.
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
    head_fp8_products: tuple[Product, ...] = ("dgrad", "wgrad")
    offload: Offload | None = None
    experts: Experts | None = None
    attention: native.Implementation | None = None
    max_segments_per_seq: int | None = None

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
        products, known = self.head_fp8_products, get_args(Product)
        if not isinstance(products, tuple | list | set | frozenset) or not products or not set(products) <= set(known):
            raise ValueError(f"head_fp8_products is {products!r}: it needs to be one or more names out of {known}")
        object.__setattr__(self, "head_fp8_products", tuple(name for name in known if name in products))
        if self.offload is not None and not isinstance(self.offload, Offload):
            raise ValueError(f"offload is {self.offload!r}: it needs to be a te_jax.offload.Offload, or None")
        if self.experts is not None and not isinstance(self.experts, Experts):
            raise ValueError(f"experts is {self.experts!r}: it needs to be a te_jax.models.Experts, or None")
        segments = self.max_segments_per_seq
        if segments is not None and (not is_whole_number(segments) or segments < 1):
            raise ValueError(
                f"max_segments_per_seq is {segments!r}: it needs to be a whole number of at least 1, or None"
            )
        if self.attention not in (None, "native", "reference"):
            raise ValueError(f"attention is {self.attention!r}: choose 'native', 'reference' or None")
        if self.experts is not None and isinstance(self.recipe, DelayedScaling):
            raise ValueError(
                "recipe is DelayedScaling, and experts have no scaling state: choose BlockScaling() or CurrentScaling()"
            )

    @staticmethod
    def check(config: Any) -> None:
        """Raises a ValueError unless it is a DecoderConfig."""
        if not isinstance(config, DecoderConfig):
            raise ValueError(
                f"config is {config!r}: it needs to be a te_jax.models.DecoderConfig{static_way_out(config)}"
            )

    @property
    def num_parameters(self) -> int:
        """Number of float32 parameters that `init` makes."""
        return self._parameters(1 if self.experts is None else self.experts.num_experts)

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that a token meets: of the experts, those of `router.top_k`. All without experts."""
        return self._parameters(1 if self.experts is None else self.experts.router.top_k)

    @property
    def kernel_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a block's kernels, as `init` makes them."""
        d, query, key = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        stacked = () if self.experts is None else (self.experts.num_experts,)
        return {
            "query": (d, query),
            "key": (d, key),
            "value": (d, key),
            "out": (query, d),
            "gate": (*stacked, d, self.mlp_size),
            "up": (*stacked, d, self.mlp_size),
            "down": (*stacked, self.mlp_size, d),
            **({} if self.experts is None else {"router": (d, self.experts.num_experts)}),
        }

    def _parameters(self, mlps: int) -> int:
        """With so many MLPs in a block."""
        attention = 2 * self.hidden_size * (self.num_heads + self.num_kv_heads) * self.head_dim
        router = 0 if self.experts is None else self.hidden_size * self.experts.num_experts
        block = attention + router + mlps * 3 * self.hidden_size * self.mlp_size + 2 * self.hidden_size
        return 2 * self.vocab_size * self.hidden_size + self.num_layers * block + self.hidden_size

    def flops_per_token(self, seq_len: int) -> int:
        """FLOPs of a token in training, forward and backward: those of GEMMs and of causal attention, without `remat`.

        Two for each multiplication with a kernel or the head, and as many for each of the two gradients; of experts
        only those that the token meets. In the mean a token attends to half of its sequence.

        Args:
          seq_len: tokens in a sequence.
        """
        norms = (2 * self.num_layers + 1) * self.hidden_size
        kernels = self.num_active_parameters - self.vocab_size * self.hidden_size - norms
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
    "moe": DecoderConfig(
        vocab_size=256,
        num_layers=4,
        hidden_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        mlp_size=192,
        experts=Experts(num_experts=8, router=Router(top_k=2)),
    ),
    "moe-3b": DecoderConfig(
        vocab_size=151_936,
        num_layers=4,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        mlp_size=768,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        dtype="bfloat16",
        remat=True,
        experts=Experts(num_experts=128, router=Router(top_k=8), balance_weight=1e-3),
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
"""Named shapes. `nano` is for tests, `tiny` and `moe`, a mixture of 8 experts, are for CPUs, `small` is for one GPU
(all four read bytes: 256 tokens), `8b` is Llama 3 8B, and `moe-3b` has 4 of the 48 blocks of Qwen3-30B-A3B."""
