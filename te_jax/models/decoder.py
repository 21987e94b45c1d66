"""A decoder-only transformer of the Llama family as three pure functions: `init`, `apply` and `loss`.

RMSNorm before each block, rotary positions, grouped-query attention, a SiLU-gated MLP, no biases. The parameters of all
layers are stacked on a leading axis and run by one `lax.scan`, so a deeper model does not compile for longer.

The output head is not tied to the embedding: it is then a projection like every other (same layout, same precision,
split over devices in the same way), and it is what the large shapes in `PRESETS` do.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from te_jax import ops

__all__ = ["PRESETS", "DecoderConfig", "apply", "init", "loss"]

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

    Raises:
      ValueError: a size is below 1, heads do not divide, or a name is unknown.
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

    def __post_init__(self):
        for name in ("vocab_size", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "mlp_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}: it needs to be a whole number of at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads} and num_kv_heads is {self.num_kv_heads}: every key head serves the "
                f"same number of query heads; choose a num_kv_heads that divides {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}: rotary positions turn pairs; choose an even number")
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value!r}: it needs to be a finite number above 0")
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}: choose one of {', '.join(_DTYPES)}")

    @property
    def num_parameters(self) -> int:
        """Number of float32 parameters that `init` makes."""
        attention = 2 * self.hidden_size * (self.num_heads + self.num_kv_heads) * self.head_dim
        block = attention + 3 * self.hidden_size * self.mlp_size + 2 * self.hidden_size
        return 2 * self.vocab_size * self.hidden_size + self.num_layers * block + self.hidden_size


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


def init(config: DecoderConfig, key: jax.Array) -> dict[str, Any]:
    """Random parameters.

    Kernels are normal with variance 1 / fan_in, and 1 / (2 · num_layers · fan_in) for the two projections of a block
    that write to the residual stream, so that its variance does not grow with depth. The embedding has variance 1 and
    norms start at 1.

    Args:
      config: the shape.
      key: a `jax.random.key`.

    Returns:
      A dict of float32 arrays, V = vocab_size, L = num_layers, D = hidden_size, H, K = heads, F = mlp_size:
      `embedding` [V, D], `final_norm` [D], `head` [D, V] and `layers`, a dict of `attention_norm` and `mlp_norm`
      [L, D], `query` [L, D, H·head_dim], `key` and `value` [L, D, K·head_dim], `out` [L, H·head_dim, D], `gate` and
      `up` [L, D, F], `down` [L, F, D].
    """
    d, layers = config.hidden_size, config.num_layers
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {
        "query": (d, q_size),
        "key": (d, kv_size),
        "value": (d, kv_size),
        "out": (q_size, d),
        "gate": (d, config.mlp_size),
        "up": (d, config.mlp_size),
        "down": (config.mlp_size, d),
    }
    embedding_key, head_key, *layer_keys = jax.random.split(key, 2 + len(shapes))
    stacked = {}
    for layer_key, (name, shape) in zip(layer_keys, shapes.items(), strict=True):
        fan_in = shape[0] * (2 * layers if name in ("out", "down") else 1)
        stacked[name] = jax.random.normal(layer_key, (layers, *shape), jnp.float32) * fan_in**-0.5
    return {
        "embedding": jax.random.normal(embedding_key, (config.vocab_size, d), jnp.float32),
        "layers": {
            "attention_norm": jnp.ones((layers, d), jnp.float32),
            "mlp_norm": jnp.ones((layers, d), jnp.float32),
            **stacked,
        },
        "final_norm": jnp.ones((d,), jnp.float32),
        "head": jax.random.normal(head_key, (d, config.vocab_size), jnp.float32) * d**-0.5,
    }


def apply(params: dict[str, Any], tokens: jax.Array, config: DecoderConfig) -> jax.Array:
    """Logits of the next token at every position; position t sees tokens 0 … t.

    Args:
      params: what `init` returned for this `config`.
      tokens: integer [batch, time], each in [0, vocab_size).
      config: the shape.

    Returns:
      Logits [batch, time, vocab_size] in `config.dtype`.

    Raises:
      ValueError: `tokens` is not an integer array of two dimensions.
    """
    _check_tokens("tokens", tokens)
    dtype = jnp.dtype(config.dtype)
    cos, sin = _rotary_tables(tokens.shape[1], config)

    def block(x, layer):
        x = x + _attention(_rms_norm(x, layer["attention_norm"], config), layer, cos, sin, config)
        x = x + _mlp(_rms_norm(x, layer["mlp_norm"], config), layer)
        return x, None

    # Inside scan the loop itself keeps XLA from merging the recomputation with the forward pass, so the barriers that
    # prevent_cse adds would only cost time.
    body = jax.checkpoint(block, prevent_cse=False) if config.remat else block
    x = jnp.take(params["embedding"], tokens, axis=0).astype(dtype)
    x, _ = lax.scan(body, x, params["layers"])
    return _project(_rms_norm(x, params["final_norm"], config), params["head"])


def loss(
    params: dict[str, Any],
    tokens: jax.Array,
    targets: jax.Array,
    config: DecoderConfig,
    *,
    implementation: Literal["native", "reference"] | None = None,
) -> jax.Array:
    """Mean cross-entropy of `targets` under the logits of `apply`, in nats per token.

    Args:
      params: what `init` returned for this `config`.
      tokens: integer [batch, time].
      targets: integer [batch, time]: the token that follows each position, or -100 where none is to be predicted.
      config: the shape.
      implementation: passed to `te_jax.ops.softmax_cross_entropy`: None, "native" or "reference".

    Returns:
      float32 scalar.

    Raises:
      ValueError: `tokens` or `targets` is not an integer array of two dimensions, or their shapes differ.
    """
    _check_tokens("targets", targets)
    if targets.shape != tokens.shape:
        raise ValueError(
            f"targets has shape {targets.shape} and tokens has shape {tokens.shape}: give one target for each token"
        )
    return ops.softmax_cross_entropy(apply(params, tokens, config), targets, implementation=implementation)


def _check_tokens(name: str, tokens: jax.Array) -> None:
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"{name} has shape {tokens.shape} and dtype {tokens.dtype}: the decoder reads integers [batch, time]; "
            "a single sequence needs a leading axis of 1"
        )


def _project(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [..., in] · kernel [in, out] in the dtype of x. All products with parameters go through here."""
    return x @ kernel.astype(x.dtype)


def _rms_norm(x: jax.Array, scale: jax.Array, config: DecoderConfig) -> jax.Array:
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    return (x32 * lax.rsqrt(mean_square + config.norm_eps) * lax.expand_dims(scale, range(x.ndim - 1))).astype(x.dtype)


def _rotary_tables(length: int, config: DecoderConfig) -> tuple[jax.Array, jax.Array]:
    """cos and sin of the position angles, float32 [1, time, 1, head_dim / 2]."""
    frequencies = config.rope_theta ** (-jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim)
    angles = jnp.outer(jnp.arange(length, dtype=jnp.float32), frequencies)[None, :, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns the pairs (i, i + head_dim / 2) of x [batch, time, heads, head_dim] by their position's angle."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _attention(x: jax.Array, layer: dict[str, Any], cos: jax.Array, sin: jax.Array, config: DecoderConfig) -> jax.Array:
    batch, time, _ = x.shape

    def heads(name: str) -> jax.Array:
        return _project(x, layer[name]).reshape(batch, time, -1, config.head_dim)

    query, key = _rotate(heads("query"), cos, sin), _rotate(heads("key"), cos, sin)
    mixed = jax.nn.dot_product_attention(query, key, heads("value"), is_causal=True)
    return _project(mixed.reshape(batch, time, -1), layer["out"])


def _mlp(x: jax.Array, layer: dict[str, Any]) -> jax.Array:
    return _project(jax.nn.silu(_project(x, layer["gate"])) * _project(x, layer["up"]), layer["down"])
