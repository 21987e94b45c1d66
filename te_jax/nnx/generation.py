"""Text from an NNX model: tokens that follow a prompt, one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from te_jax._core.types import PyTree
from te_jax.layers import sampling
from te_jax.nnx.attention import Attention
from te_jax.nnx.microbatches import quantize_kernels
from te_jax.nnx.variables import OverwriteWithGradient

Model = TypeVar("Model", bound=nnx.Module)


def generate(
    model: Model,
    tokens: jax.typing.ArrayLike,
    vocab_size: int,
    *,
    max_new_tokens: int,
    lengths: jax.typing.ArrayLike | None = None,
    samples: int = 1,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    key: Array | None = None,
    stop_tokens: Collection[int] = (),
    logits: Callable[[Model, Array], Array] | None = None,
) -> tuple[Array, Array]:
    """The tokens that follow a prompt, by a model whose attention is te_jax's, as `te_jax.models.generate` draws them.

    The model stays as it is. Each `Attention` gets a cache [batch, time + max_new_tokens, kv_heads, head_dim], and
    kernels of layers with a recipe are quantized once. One compilation serves calls of the same shapes and options.

    Args:
      model: gives logits [batch, time, vocab_size] of tokens [batch, time]. Only `Attention` may look at other tokens,
        and positions must be its own (`rope_theta`). Call `model.eval()` before, if it has dropout.
      tokens: integer [batch, time], each in [0, vocab_size): prompts.
      vocab_size: of the logits.
      max_new_tokens, lengths, samples, temperature, top_p, top_k, key, stop_tokens: as in `te_jax.models.generate`.
      logits: logits(model, tokens), where a call of the model needs more or returns something else. Pass the same
        function each time: another one is another program.

    Returns:
      Tokens int32 and their log-probabilities float32, both [batch × samples, max_new_tokens].

    Raises:
      ValueError: an argument breaks a rule, the model has no `Attention` or one of Flax, or it has delayed scaling,
        whose state is one of training.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from te_jax.nnx import TransformerBlock, generate
      >>> rngs = nnx.Rngs(0)
      >>> block = TransformerBlock(32, 64, num_heads=2, rope_theta=10_000.0, rngs=rngs)
      >>> model = nnx.Sequential(nnx.Embed(16, 32, rngs=rngs), block, nnx.Linear(32, 16, rngs=rngs))
      >>> found, log_probs = generate(model, jnp.array([[1, 2, 3]]), 16, max_new_tokens=5)
      >>> found.shape
      (1, 5)
    """
    options, inputs, _ = sampling.validate(
        tokens,
        vocab_size,
        max_new_tokens=max_new_tokens,
        lengths=lengths,
        samples=samples,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        key=key,
        stop_tokens=stop_tokens,
    )
    graphdef, state = nnx.split(model)
    if nnx.to_flat_state(nnx.filter_state(state, OverwriteWithGradient)):
        raise ValueError("model has delayed scaling, whose state is one of training: convert it with another recipe")
    return _generate(graphdef, state, inputs, options, vocab_size, logits)


@functools.partial(jax.jit, static_argnames=("graphdef", "options", "vocab_size", "logits"))
def _generate(
    graphdef: nnx.GraphDef[Model],
    state: PyTree,
    inputs: sampling.Inputs,
    options: sampling.Options,
    vocab_size: int,
    logits: Callable[[Model, Array], Array] | None,
) -> tuple[Array, Array]:
    model = quantize_kernels(nnx.merge(graphdef, state))
    batch, time = inputs.prompt.shape
    attentions = [module for _, module in nnx.iter_modules(model) if isinstance(module, Attention)]
    if not attentions or any(isinstance(module, nnx.MultiHeadAttention) for _, module in nnx.iter_modules(model)):
        raise ValueError(
            "model needs te_jax.nnx.Attention, whose cache holds the tokens before the next one, for all of its "
            "attention: use it in the place of flax.nnx.MultiHeadAttention"
        )
    for attention in attentions:
        attention.decode = True
        attention.init_cache(batch, time + options.count)
    graphdef, caches, rest = nnx.split(model, nnx.Cache, ...)
    rest = lax.optimization_barrier(rest)  # so that no loop quantizes once more

    def run(tokens: Array, caches: PyTree, lengths: Array | None) -> tuple[None, Array, PyTree]:
        model = nnx.merge(graphdef, caches, rest)
        found = cast(Callable[[Array], Array], model)(tokens) if logits is None else logits(model, tokens)
        if found.shape != (*tokens.shape, vocab_size):
            raise ValueError(
                f"model gives {list(found.shape)} of tokens {list(tokens.shape)}, and vocab_size is {vocab_size}: it "
                "needs to give [batch, time, vocab_size]; logits=… says how, where a call does not"
            )
        if lengths is not None:  # padding is not there for the tokens that follow
            for _, module in nnx.iter_modules(model):
                if isinstance(module, Attention) and module.cache_index is not None:
                    module.cache_index.set_value(lengths)
        last = tokens.shape[1] - 1 if lengths is None else lengths - 1
        found = jnp.take_along_axis(found, jnp.reshape(last, (-1, 1, 1)), axis=1)[:, 0]
        return None, found.astype(jnp.float32), nnx.state(model, nnx.Cache)

    def keep(_: None, logits: Array, tokens: Array) -> Array:
        logits -= jnp.max(logits, axis=1, keepdims=True)  # before the division, which may overflow
        scaled = jax.nn.log_softmax(logits / inputs.temperature if options.draws else logits)
        return jnp.take_along_axis(scaled, tokens[:, None], axis=1)[:, 0]

    found, log_probs, counts = sampling.sample(run, caches, options, inputs, keep)
    return found, jnp.where(counts, log_probs, 0.0)
