"""The shape of a decoder, and shapes with names."""

import dataclasses
import math
from typing import Any, Literal, NamedTuple, get_args

from te_jax._core.arguments import is_finite_number, is_whole_number, static_way_out
from te_jax._core.types import PyTree
from te_jax.layers.attention import Heads, RopeScaling
from te_jax.layers.mixture import Router
from te_jax.layers.stack import Remat, check_remat
from te_jax.offload import Offload
from te_jax.ops.attention import AttentionImplementation
from te_jax.quantized import Facts, facts_of
from te_jax.recipe import DelayedScaling, Product, ProductRecipes, Recipe
from te_jax.reference.activation import Activation, ActivationName

Params = dict[str, PyTree]
"""The parameters of a decoder, as `te_jax.models.init` names them."""

ATTENTION = ("query", "key", "value", "out")
"""The names of a block's kernels around attention."""

LATENT = ("query_down", "query_up", "key_value_down", "key_value_up")
"""The names of kernels of latent attention, in the place of "query", "key" and "value"."""

MLP = ("gate", "up", "down")
"""The names of a block's kernels that a mixture of experts has one of for each expert."""

_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Experts:
    """The mixture of experts in the place of MLPs: see `te_jax.layers.moe`.

    Args:
      num_experts: MLPs of each block, of which a token meets `router.top_k`.
      router: how they are chosen.
      biases: whether the router and the experts add biases: `router_bias`, `gate_bias`, `up_bias` and `down_bias`.
      choice_bias: whether there is an `expert_bias` [experts], which moves the choice of `te_jax.ops.router` and not
        the weights. Its gradient is 0: `te_jax.ops.update_expert_bias` has its updates.
      shared: experts that every token meets besides, as one MLP of this many times their width: `shared_gate`,
        `shared_up` and `shared_down`.
      weighted_shared: width of such an MLP whose result is multiplied by sigmoid(x · `shared_router`), a kernel
        [hidden_size, 1], as in Qwen 2; in the place of `shared`.
      dense_layers, dense_size: so many blocks, the first ones, have one MLP of this width in the place of experts.
      balance_weight: factor of each block's `te_jax.ops.load_balancing_loss` in `te_jax.models.loss`.
      z_weight: factor of each block's `te_jax.ops.router_z_loss` there.

    Raises:
      ValueError: a number is out of range, or `router` no Router.
    """

    num_experts: int
    router: Router
    balance_weight: float = 1e-2
    z_weight: float = 0.0
    biases: bool = False
    choice_bias: bool = False
    shared: int = 0
    dense_layers: int = 0
    dense_size: int | None = None
    weighted_shared: int | None = None

    def __post_init__(self):
        if not isinstance(self.router, Router):
            raise ValueError(f"router is {self.router!r}: it needs to be a te_jax.layers.Router, as Router(top_k=2) is")
        if not is_whole_number(self.router.top_k) or self.router.top_k < 1:
            raise ValueError(f"router.top_k is {self.router.top_k!r}: it needs to be a whole number of at least 1")
        if not is_whole_number(self.num_experts) or self.num_experts < self.router.top_k:
            raise ValueError(
                f"num_experts is {self.num_experts!r}: it needs to be a whole number of at least router.top_k, "
                f"{self.router.top_k}"
            )
        object.__setattr__(self, "num_experts", int(self.num_experts))
        for name in ("shared", "dense_layers"):
            value = getattr(self, name)
            if not is_whole_number(value) or value < 0:
                raise ValueError(f"{name} is {value!r}: it needs to be a whole number of at least 0")
            object.__setattr__(self, name, int(value))
        size = self.dense_size
        if (size is None) != (self.dense_layers == 0) or not (size is None or (is_whole_number(size) and size >= 1)):
            raise ValueError(
                f"dense_size is {size!r} and dense_layers {self.dense_layers}: give the width of the MLP of blocks "
                "without experts, at least 1, where there are any"
            )
        if (wide := self.weighted_shared) is not None and (not is_whole_number(wide) or wide < 1 or self.shared):
            raise ValueError(
                f"weighted_shared is {wide!r} and shared {self.shared}: give a width of at least 1, or shared"
            )
        object.__setattr__(self, "weighted_shared", None if wide is None else int(wide))
        for name in ("balance_weight", "z_weight"):
            value = getattr(self, name)
            if not is_finite_number(value) or value < 0:
                raise ValueError(f"{name} is {value!r}: it needs to be a finite number of at least 0")
            object.__setattr__(self, name, float(value))


@dataclasses.dataclass(frozen=True)
class Lora:
    """Adapters beside the kernels of blocks, which are trained in their place: y = x · kernel + scale · (x · a) · b.

    Args:
      rank: columns of a, rows of b.
      alpha: the scale is alpha / rank; None is 2 · rank.
      names: kernels that have one, out of "query", "key", "value", "out", "gate", "up" and "down"; with experts the
        first four alone. With latent attention "query_down" and others, as `te_jax.models.Latent` has them.

    Raises:
      ValueError: a number is out of range, or a name unknown.

    References:
      Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, arXiv:2106.09685.
    """

    rank: int
    alpha: float | None = None
    names: tuple[str, ...] = (*ATTENTION, *MLP)

    def __post_init__(self):
        if not is_whole_number(self.rank) or self.rank < 1:
            raise ValueError(f"rank is {self.rank!r}: it needs to be a whole number of at least 1")
        alpha = 2.0 * self.rank if self.alpha is None else self.alpha
        if not is_finite_number(alpha) or alpha <= 0:
            raise ValueError(f"alpha is {alpha!r}: it needs to be a finite number above 0, or None")
        known = (*ATTENTION, *LATENT, *MLP)
        if not isinstance(self.names, tuple | list) or not self.names or not set(self.names) <= set(known):
            raise ValueError(f"names is {self.names!r}: it needs to be one or more names out of {known}")
        object.__setattr__(self, "alpha", float(alpha))
        object.__setattr__(self, "names", tuple(name for name in known if name in self.names))

    @property
    def scale(self) -> float:
        """What multiplies x · a · b."""
        assert self.alpha is not None
        return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class Factors:
    """Constants that scale what a decoder computes: those of Granite's config.json.

    Args:
      embedding: multiplies the embedding of a token.
      residual: multiplies what attention and MLP add to the residual stream.
      scores: multiplies the products of query and key; None is head_dim^-½.
      logits_divisor: divides the logits.

    Raises:
      ValueError: one is no finite number above 0.
    """

    embedding: float = 1.0
    residual: float = 1.0
    scores: float | None = None
    logits_divisor: float = 1.0

    def __post_init__(self):
        for name in ("embedding", "residual", "scores", "logits_divisor"):
            value: Any = getattr(self, name)
            if name == "scores" and value is None:
                continue
            if not is_finite_number(value) or value <= 0:
                raise ValueError(f"factors.{name} is {value!r}: it needs to be a finite number above 0")
            object.__setattr__(self, name, float(value))


@dataclasses.dataclass(frozen=True)
class Softcaps:
    """Caps c of what becomes c · tanh(x / c), as in Gemma 2; None for none.

    Args:
      scores: of those of attention, which XLA alone computes so.
      logits: of those of the output head.

    Raises:
      ValueError: one is no finite number from 1e-30 to 1e30.
    """

    scores: float | None = None
    logits: float | None = None

    def __post_init__(self):
        for name in ("scores", "logits"):
            if (value := getattr(self, name)) is not None:
                if not is_finite_number(value) or not 1e-30 <= value <= 1e30:
                    raise ValueError(
                        f"softcaps.{name} is {value!r}: it needs to be a number from 1e-30 to 1e30, or None"
                    )
                object.__setattr__(self, name, float(value))


@dataclasses.dataclass(frozen=True)
class Latent:
    """Attention whose keys and values are products of one vector of each token, as in DeepSeek V2 and V3.

    With N = head_dim - rope_dim, H heads, and c and k the parts of a product, the first one of width `rank`:

        c, k     = x · key_value_down                     [D, rank + rope_dim]
        n, value = norm(c) · key_value_up, of each head   [rank, H · (N + value_dim)]
        key      = n and then the rotated k, which all heads share
        query    = x · query                              [D, H · head_dim]
                or norm(x · query_down) · query_up        [D, query_rank], [query_rank, H · head_dim]

    The last rope_dim features of a query are rotated, as pairs (2i, 2i + 1). In generation the cache holds norm(c) and
    the rotated k of each token, rank + rope_dim numbers, and queries are multiplied by key_value_up instead of keys.

    Args:
      rank: width of c.
      rope_dim: features of a head that rotary positions turn; even, and less than head_dim.
      value_dim: features of a head of value.
      query_rank: width between query_down and query_up; None for one kernel, query.
      norm_eps: added to the mean square in both norms, whose scales are `key_value_norm` and `query_down_norm`.

    Raises:
      ValueError: a size is no whole number of at least 1, rope_dim is odd, or norm_eps is no finite number above 0.

    References:
      DeepSeek-V2: arXiv:2405.04434.
    """

    rank: int
    rope_dim: int
    value_dim: int
    query_rank: int | None = None
    norm_eps: float = 1e-6

    def __post_init__(self):
        for name in ("rank", "rope_dim", "value_dim", "query_rank"):
            value: Any = getattr(self, name)
            if name == "query_rank" and value is None:
                continue
            if not is_whole_number(value) or value < 1:
                raise ValueError(f"latent.{name} is {value!r}: it needs to be a whole number of at least 1")
            object.__setattr__(self, name, int(value))
        if self.rope_dim % 2:
            raise ValueError(f"latent.rope_dim is {self.rope_dim}: rotary positions turn pairs; choose an even number")
        if not is_finite_number(self.norm_eps) or self.norm_eps <= 0:
            raise ValueError(f"latent.norm_eps is {self.norm_eps!r}: it needs to be a finite number above 0")
        object.__setattr__(self, "norm_eps", float(self.norm_eps))


class Rope(NamedTuple):
    """Rotary positions of a block: the base of their wavelengths, and how these are stretched."""

    theta: float
    scaling: RopeScaling | None


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
      rope_theta: base of the rotary wavelengths; position angles are t · rope_theta^(-2i / head_dim). One number for
        all blocks, or a tuple of one for each; None is a block without rotary positions.
      rope_scaling: how these are stretched for sequences longer than those of pre-training; None leaves them. One for
        all blocks, or a tuple of one for each.
      norm_eps: added to the mean square in RMSNorm.
      dtype: "float32" or "bfloat16": what activations and projections are computed in. Parameters are always float32;
        norms, rotations and the softmax of attention are computed in float32.
      remat: recompute each block in the backward pass and keep only its input: memory for about a third more FLOPs.
        "attention" also keeps the results of attention, as much as the input, and does not compute it again. Or a
        policy: see `te_jax.layers.apply_layers`.
      offload: which residuals of a block wait for the backward pass in host memory; see `te_jax.offload.Offload`. With
        `remat` its input is the only one. Otherwise "layer_input", "te_attention_operand" and "te_attention_output"
        are those that take the longest to recompute for their bytes.
      recipe: how the projections of attention and MLP are quantized to FP8 (`te_jax.recipe`); those of experts must
        then have sizes that are multiples of 16. None computes them in `dtype`. Kernels are quantized from float32.
      head_recipe: how the products of the output head in `te_jax.models.loss` are quantized; None computes them in
        `dtype`. Logits of `te_jax.models.apply` are always in `dtype`.
      head_fp8_products: which of "forward", "dgrad" and "wgrad" these are: see `te_jax.ops.linear_cross_entropy`.
        "forward" in FP8 loses most of the accuracy.
      experts: a mixture of experts in the place of MLPs; None for one MLP in every block.
      latent: latent attention, with as many heads of key and value as of query; None for kernels of key and value.
      attention: the implementation of `te_jax.ops.attention`: "native", "fa3", "reference", or None, which
        chooses.
      max_segments_per_seq: of packed sequences: see `te_jax.ops.attention`. None takes any, by a mask.
      window: a token sees itself and the window - 1 tokens before it. One number for all blocks, or a tuple of one for
        each; None is no window.
      activation: of the gated MLP, or of the experts: see `te_jax.ops.gated_mlp`.
      attention_biases: which of "query", "key", "value" and "out" add a bias.
      attention_sinks: whether softmax has a learned score more in each head, without a value.
      qk_norm: whether query and key are normalized by RMSNorm before they are rotated: True is each head by itself,
        "projection" all heads together.
      norms: where RMSNorm is: "before" attention and MLP, "after" them, on what they add to the residual stream, or
        "both".
      zero_centered_norms: whether norms multiply by 1 + scale, as Gemma's do.
      scaled_embedding: whether the embedding is multiplied by √hidden_size, rounded to `dtype`, as Gemma's is.
      factors: constants of embedding, residual stream, scores and logits.
      softcaps: of scores and of logits. Functions that are given to `te_jax.models.apply_head` cap logits themselves.
      tied_head: whether the output head is the transposed embedding, and no parameter of its own.
      lora: adapters beside the kernels; see `te_jax.models.split_adapters`. None for none.

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
    rope_theta: float | tuple[float | None, ...] = 10_000.0
    norm_eps: float = 1e-5
    dtype: str = "float32"
    remat: Remat = False
    recipe: Recipe | None = None
    head_recipe: Recipe | None = None
    head_fp8_products: tuple[Product, ...] = ("dgrad", "wgrad")
    offload: Offload | None = None
    experts: Experts | None = None
    attention: AttentionImplementation | None = None
    max_segments_per_seq: int | None = None
    rope_scaling: RopeScaling | tuple[RopeScaling | None, ...] | None = None
    window: int | tuple[int | None, ...] | None = None
    activation: Activation | ActivationName = "silu"
    attention_biases: tuple[Literal["query", "key", "value", "out"], ...] = ()
    attention_sinks: bool = False
    qk_norm: bool | Literal["projection"] = False
    norms: Literal["before", "after", "both"] = "before"
    zero_centered_norms: bool = False
    scaled_embedding: bool = False
    factors: Factors = Factors()
    softcaps: Softcaps = Softcaps()
    tied_head: bool = False
    lora: Lora | None = None
    latent: Latent | None = None

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
        if not is_finite_number(self.norm_eps) or self.norm_eps <= 0:
            raise ValueError(f"norm_eps is {self.norm_eps!r}: it needs to be a finite number above 0")
        object.__setattr__(self, "norm_eps", float(self.norm_eps))  # arrays are not hashable
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
        check_remat(self.remat)
        if self.remat == "attention" and self.attention == "reference":
            raise ValueError("remat is 'attention' and attention 'reference', whose results have no names: choose True")
        if self.attention not in (None, "native", "fa3", "reference"):
            raise ValueError(f"attention is {self.attention!r}: choose 'native', 'fa3', 'reference' or None")
        self._check_variants()
        if self.experts is not None and isinstance(self.recipe, DelayedScaling):
            raise ValueError(
                "recipe is DelayedScaling, and experts have no scaling state: choose BlockScaling() or CurrentScaling()"
            )

    def _check_variants(self) -> None:
        """Checks what models of the family do differently."""
        for name in ("rope_theta", "rope_scaling", "window"):
            if isinstance(value := getattr(self, name), tuple | list):
                object.__setattr__(self, name, tuple(value))
                if len(value) != self.num_layers:
                    raise ValueError(
                        f"{name} has {len(value)} entries, and num_layers is {self.num_layers}: give each one"
                    )
        theta, scaling, window = self.rope_theta, self.rope_scaling, self.window
        for each in (each for each in theta if each is not None) if isinstance(theta, tuple) else (theta,):
            if not is_finite_number(each) or each <= 0:
                raise ValueError(f"rope_theta is {theta!r}: it needs to be a finite number above 0")
        floats = tuple(each and float(each) for each in theta) if isinstance(theta, tuple) else float(theta)
        object.__setattr__(self, "rope_theta", floats)
        for each in scaling if isinstance(scaling, tuple) else (scaling,):
            if not (each is None or isinstance(each, RopeScaling)):
                raise ValueError(f"rope_scaling is {scaling!r}: it needs to be a te_jax.models.RopeScaling")
        # Where all blocks have the same, num_layers may be any number.
        alike = None if isinstance(theta, tuple) or isinstance(scaling, tuple) else Rope(float(theta), scaling)
        for rope in self.ropes if alike is None else (alike,):
            if rope is not None and rope.scaling is not None and rope.scaling.kind == "yarn" and rope.theta <= 1:
                raise ValueError(f"rope_theta is {rope.theta}: with yarn it needs to be above 1")
        for each in window if isinstance(window, tuple) else (window,):
            if each is not None and (not is_whole_number(each) or each < 1):
                raise ValueError(f"window is {window!r}: it needs whole numbers of at least 1, or None")
        if self.qk_norm != "projection" and not isinstance(self.qk_norm, bool):
            raise ValueError(f"qk_norm is {self.qk_norm!r}: it needs to be True, False or 'projection'")
        if self.norms not in ("before", "after", "both"):
            raise ValueError(f"norms is {self.norms!r}: choose 'before', 'after' or 'both'")
        flags = ("attention_sinks", "zero_centered_norms", "scaled_embedding", "tied_head")
        for name, value in ((name, getattr(self, name)) for name in flags):
            if not isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}: it needs to be True or False")
        Activation.of(self.activation)
        self._check_latent()
        if self.experts is not None and self.experts.dense_layers >= self.num_layers:
            raise ValueError(
                f"experts.dense_layers is {self.experts.dense_layers}, and num_layers is {self.num_layers}: leave a "
                "block for experts, or give no experts"
            )
        if not isinstance(self.factors, Factors):
            raise ValueError(f"factors is {self.factors!r}: it needs to be a te_jax.models.Factors")
        if not isinstance(self.softcaps, Softcaps):
            raise ValueError(f"softcaps is {self.softcaps!r}: it needs to be a te_jax.models.Softcaps")
        if self.softcaps.scores is not None and self.attention in ("native", "fa3"):
            raise ValueError(
                f"softcaps.scores is {self.softcaps.scores} and attention {self.attention!r}, which has no caps: "
                "choose None or 'reference'"
            )
        if not (self.lora is None or isinstance(self.lora, Lora)):
            raise ValueError(
                f"lora is {self.lora!r}: it needs to be a te_jax.models.Lora, as Lora(rank=16) is, or None"
            )
        if self.lora is not None and not set(self.lora.names) <= set(self.adaptable):
            of_experts = self.experts is not None and set(self.lora.names) & set(MLP)
            reason = "experts have no adapters" if of_experts else "kernels of attention have other names"
            raise ValueError(f"lora.names is {self.lora.names}, and {reason}: choose out of {self.adaptable}")
        biases = self.attention_biases
        if not isinstance(biases, tuple | list | set | frozenset) or not set(biases) <= set(ATTENTION):
            raise ValueError(f"attention_biases is {biases!r}: it needs to be names out of {ATTENTION}")
        object.__setattr__(self, "attention_biases", tuple(name for name in ATTENTION if name in biases))

    def _check_latent(self) -> None:
        latent = self.latent
        if latent is None:
            return
        if not isinstance(latent, Latent):
            raise ValueError(f"latent is {latent!r}: it needs to be a te_jax.models.Latent, or None")
        if latent.rope_dim >= self.head_dim:
            raise ValueError(
                f"latent.rope_dim is {latent.rope_dim}, and head_dim is {self.head_dim}: choose one that is smaller"
            )
        if self.num_kv_heads != self.num_heads:
            raise ValueError(
                f"num_kv_heads is {self.num_kv_heads} and num_heads {self.num_heads}: with latent attention they are "
                "the same"
            )
        for name in ("qk_norm", "attention_sinks", "attention_biases"):
            if value := getattr(self, name):
                raise ValueError(f"{name} is {value!r}, which latent attention does not have: leave it out")

    @staticmethod
    def check(config: object) -> None:
        """Raises a ValueError unless it is a DecoderConfig."""
        if not isinstance(config, DecoderConfig):
            raise ValueError(
                f"config is {config!r}: it needs to be a te_jax.models.DecoderConfig{static_way_out(config)}"
            )

    @property
    def architecture(self) -> "DecoderConfig":
        """The same with the defaults of all that says how it is computed or trained: equal for equal models."""
        experts = self.experts and dataclasses.replace(self.experts, balance_weight=0.0, z_weight=0.0)
        defaults = {"dtype": "float32", "remat": False, "head_fp8_products": ("dgrad", "wgrad"), "experts": experts}
        without = ("recipe", "head_recipe", "offload", "attention", "max_segments_per_seq")
        factors = dataclasses.replace(self.factors, scores=self.factors.scores or self.head_dim**-0.5)
        defaults |= {"rope_theta": tuple(rope and rope.theta for rope in self.ropes)}
        defaults |= {"rope_scaling": tuple(rope and rope.scaling for rope in self.ropes)}
        defaults |= {"factors": factors, "window": self.windows, "activation": Activation.of(self.activation)}
        return dataclasses.replace(self, **defaults, **dict.fromkeys(without))

    @property
    def num_parameters(self) -> int:
        """Number of float32 parameters that `init` makes."""
        return self._parameters(1 if self.experts is None else self.experts.num_experts)

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that a token meets: of the experts, those of `router.top_k`. All without experts."""
        return self._parameters(1 if self.experts is None else self.experts.router.top_k)

    def block(self, layer: int) -> "DecoderConfig":
        """The decoder whose blocks are all like this one: itself, but for the first `experts.dense_layers`."""
        experts = self.experts
        if experts is None or layer >= experts.dense_layers:
            return self
        return dataclasses.replace(self, experts=None, mlp_size=experts.dense_size)

    @property
    def _blocks(self) -> "list[tuple[DecoderConfig, int]]":
        """The kinds of blocks, and how many there are of each."""
        dense = 0 if self.experts is None else self.experts.dense_layers
        return [*([(self.block(0), dense)] if dense else []), (self, self.num_layers - dense)]

    @property
    def adaptable(self) -> tuple[str, ...]:
        """The names of kernels that may have adapters."""
        return (*self._attention_shapes, *(MLP if self.experts is None else ()))

    @property
    def projections(self) -> tuple[str, ...]:
        """The names of a block's kernels that a recipe quantizes: all but those of routers."""
        return tuple(name for name in self.kernel_shapes if name not in ("router", "shared_router"))

    @property
    def _attention_shapes(self) -> dict[str, tuple[int, int]]:
        d, query, key = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        if (latent := self.latent) is None:
            return {"query": (d, query), "key": (d, key), "value": (d, key), "out": (query, d)}
        of_query, rank = {"query": (d, query)}, latent.query_rank
        if rank is not None:
            of_query = {"query_down": (d, rank), "query_up": (rank, query)}
        expanded = self.num_heads * (self.head_dim - latent.rope_dim + latent.value_dim)
        return of_query | {
            "key_value_down": (d, latent.rank + latent.rope_dim),
            "key_value_up": (latent.rank, expanded),
            "out": (self.num_heads * latent.value_dim, d),
        }

    @property
    def kernel_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a block's kernels, as `init` makes them; of one with experts, where others have none."""
        d, experts = self.hidden_size, self.experts
        stacked = () if experts is None else (experts.num_experts,)
        wide = 0 if experts is None else experts.weighted_shared or experts.shared * self.mlp_size
        return {
            **self._attention_shapes,
            "gate": (*stacked, d, self.mlp_size),
            "up": (*stacked, d, self.mlp_size),
            "down": (*stacked, self.mlp_size, d),
            **({} if experts is None else {"router": (d, experts.num_experts)}),
            **({"shared_gate": (d, wide), "shared_up": (d, wide), "shared_down": (wide, d)} if wide else {}),
            **({"shared_router": (d, 1)} if experts is not None and experts.weighted_shared else {}),
        }

    @property
    def other_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a block's other parameters: scales of norms, biases, sinks and adapters."""
        d, whole = self.hidden_size, self.qk_norm == "projection"
        before = () if self.norms == "after" else ("attention_norm", "mlp_norm")
        after = () if self.norms == "before" else ("attention_post_norm", "mlp_post_norm")
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys((*before, *after), (d,))
        if self.qk_norm:
            of_heads = {name: self.kernel_shapes[name][1:] if whole else (self.head_dim,) for name in ("query", "key")}
            shapes |= {f"{name}_norm": shape for name, shape in of_heads.items()}
        if (latent := self.latent) is not None:
            shapes["key_value_norm"] = (latent.rank,)
            shapes |= {} if latent.query_rank is None else {"query_down_norm": (latent.query_rank,)}
        shapes |= {f"{name}_bias": self.kernel_shapes[name][1:] for name in self.attention_biases}
        if self.attention_sinks:
            shapes["sinks"] = (self.num_heads,)
        if self.experts is not None and self.experts.biases:
            each, inner = self.experts.num_experts, self.mlp_size
            shapes |= {"router_bias": (each,), "gate_bias": (each, inner), "up_bias": (each, inner)}
            shapes["down_bias"] = (each, d)
        if self.experts is not None and self.experts.choice_bias:
            shapes["expert_bias"] = (self.experts.num_experts,)
        if (lora := self.lora) is not None:
            for name in lora.names:
                rows, columns = self.kernel_shapes[name]
                shapes |= {f"{name}_a": (rows, lora.rank), f"{name}_b": (lora.rank, columns)}
        return shapes

    @property
    def heads(self) -> Heads:
        """The sizes of attention."""
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each block."""
        return self._of_blocks(self.window)

    @property
    def ropes(self) -> "tuple[Rope | None, ...]":
        """The rotary positions of each block, None where it has none."""
        both = zip(self._of_blocks(self.rope_theta), self._of_blocks(self.rope_scaling), strict=True)
        return tuple(None if theta is None else Rope(theta, scaling) for theta, scaling in both)

    def _of_blocks(self, value: Any) -> tuple[Any, ...]:
        return value if isinstance(value, tuple) else (value,) * self.num_layers

    def _parameters(self, experts: int) -> int:
        """With so many experts in a block."""
        tables = self.vocab_size * self.hidden_size * (1 if self.tied_head else 2)
        total = tables + self.hidden_size
        for block, count in self._blocks:
            shapes = block.kernel_shapes | block.other_shapes
            if block.experts is not None:
                of_experts = [name for name in shapes if name.removesuffix("_bias") in MLP]
                shapes |= {name: (experts, *shapes[name][1:]) for name in of_experts}
            total += count * sum(map(math.prod, shapes.values()))
        return total

    def flops_per_token(self, seq_len: int) -> int:
        """FLOPs of a token in training, forward and backward: those of GEMMs and of causal attention, without `remat`.

        Two for each multiplication with a kernel or the head, and as many for each of the two gradients, of which there
        is one beside adapters; of experts only those that the token meets. In the mean a token attends to half of its
        sequence.

        Args:
          seq_len: tokens in a sequence.
        """
        kernels = self.vocab_size * self.hidden_size
        for block, count in self._blocks:
            experts = block.experts
            ratio = 1.0 if experts is None else experts.router.top_k / experts.num_experts
            sizes = {name: math.prod(shape) for name, shape in block.kernel_shapes.items()}
            of_experts = sum(size for name, size in sizes.items() if name in MLP)
            kernels += count * (sum(sizes.values()) - of_experts + round(of_experts * ratio))
        # Scores and values, half of each where nothing else is hidden.
        pairs = sum(_mean_pairs(seq_len, window) for window in self.windows)
        width = self.head_dim + (self.head_dim if self.latent is None else self.latent.value_dim)
        adapters = 0
        if self.lora is not None:
            shapes = self.other_shapes
            each = (shapes[f"{name}_{part}"] for name in self.lora.names for part in "ab")
            adapters = self.num_layers * sum(map(math.prod, each))
        passes = 6 if self.lora is None else 4
        return passes * kernels + 6 * adapters + round(6 * self.num_heads * width * pairs)


def _mean_pairs(seq_len: int, window: int | None) -> float:
    """The tokens that a token sees in the mean, counted as half of the sequence without a window."""
    width = seq_len if window is None else min(window, seq_len)
    return width - width * width / (2 * seq_len)


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


def kernel_facts(config: DecoderConfig) -> Facts:
    """How kernels are scaled that are quantized before the layers; plain without a recipe, or with one for each
    product."""
    recipe = config.recipe
    return facts_of(None if recipe is None or isinstance(recipe, ProductRecipes) else recipe.scalings["kernel"][0])
