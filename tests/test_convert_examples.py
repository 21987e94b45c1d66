"""Two models built as Flax's examples are, Gemma in NNX and lm1b in Linen, trained on from a checkpoint in FP8.

Each is made and saved as a plain model, restored, converted in one call, and trained for 200 steps. Its loss must end
within 1% of the same training in bfloat16.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as OVERWRITE

import te_jax.flax
import te_jax.nnx
import te_jax.optim
from te_jax.recipe import BlockScaling, DelayedScaling

pytestmark = pytest.mark.slow

VOCABULARY, WIDTH, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 64, 128, 2, 4, 2, 16
BATCH, LENGTH, STEPS = 8, 24, 200


@pytest.fixture(autouse=True)
def promotion_as_users_have_it():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def markov_chains(rng, count):
    """Sequences [count, BATCH, LENGTH + 1] in which each token depends on the one before, and partly on chance."""
    likely = rng.integers(1, VOCABULARY, (VOCABULARY, 4))
    tokens = np.empty((count, BATCH, LENGTH + 1), np.int32)
    tokens[..., 0] = rng.integers(1, VOCABULARY, (count, BATCH))
    for t in range(LENGTH):
        tokens[..., t + 1] = likely[tokens[..., t], rng.choice(4, (count, BATCH), p=[0.6, 0.2, 0.1, 0.1])]
    return jnp.asarray(tokens)


def cross_entropy(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()


def causal(length):
    return jnp.tril(jnp.ones((length, length), bool))


def train(loss_fn, variables, batches, held_out):
    """The loss on held-out batches after one step for each batch."""
    optimizer = te_jax.optim.overwrite_with_gradient(optax.adam(optax.constant_schedule(3e-3)))

    @jax.jit
    def run(variables, batches):
        def step(carry, tokens):
            variables, optimizer_state = carry
            loss, gradients = jax.value_and_grad(loss_fn)(variables, tokens)
            updates, optimizer_state = optimizer.update(gradients, optimizer_state, variables)
            return (optax.apply_updates(variables, updates), optimizer_state), loss

        (variables, _), losses = jax.lax.scan(step, (variables, optimizer.init(variables)), batches)
        return losses, jax.lax.map(lambda tokens: loss_fn(variables, tokens), held_out).mean()

    losses, final = run(variables, batches)
    assert losses[-20:].mean() < 0.7 * losses[:5].mean()  # it learns
    return final


def saved_and_restored(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "checkpoint", tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path / "checkpoint", jax.eval_shape(lambda: tree))


# Gemma: einsums for attention, a gated MLP, norms whose scales begin at zero, and the embedding as the output head.


class RMSNorm(nnx.Module):
    def __init__(self, features, *, rngs):
        self.scale = nnx.Param(jnp.zeros(features))

    def __call__(self, x):
        x32 = x.astype(jnp.float32)
        x32 *= jax.lax.rsqrt(jnp.mean(jnp.square(x32), -1, keepdims=True) + 1e-6)
        return (x32 * (1 + self.scale[...])).astype(x.dtype)


def rotated(x):
    """Rotary positions for x [batch, time, heads, head_dim]."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] / 1e4 ** (jnp.arange(half) / half)
    sin, cos, (a, b) = jnp.sin(angles), jnp.cos(angles), jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


class GemmaAttention(nnx.Module):
    def __init__(self, *, rngs):
        shared = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.q_einsum = nnx.Einsum("BTD,NDH->BTNH", (HEADS, WIDTH, HEAD_DIM), **shared)
        self.kv_einsum = nnx.Einsum("BTD,CKDH->CBTKH", (2, KV_HEADS, WIDTH, HEAD_DIM), **shared)
        self.attn_vec_einsum = nnx.Einsum("BTNH,NHD->BTD", (HEADS, HEAD_DIM, WIDTH), **shared)

    def __call__(self, x):
        query = rotated(self.q_einsum(x)) * self.head_dim**-0.5
        key, value = self.kv_einsum(x)
        query = query.reshape(*query.shape[:2], KV_HEADS, HEADS // KV_HEADS, self.head_dim)
        scores = jnp.einsum("BTKGH,BSKH->BKGTS", query, rotated(key)).astype(jnp.float32)
        weights = jax.nn.softmax(jnp.where(causal(x.shape[1]), scores, -1e30)).astype(x.dtype)
        mixed = jnp.einsum("BKGTS,BSKH->BTKGH", weights, value)
        return self.attn_vec_einsum(mixed.reshape(*x.shape[:2], HEADS, self.head_dim))

    @property
    def head_dim(self):
        return self.attn_vec_einsum.kernel.shape[1]


class FeedForward(nnx.Module):
    def __init__(self, *, rngs):
        shared = {"use_bias": False, "dtype": jnp.bfloat16, "rngs": rngs}
        self.gate_proj = nnx.Linear(WIDTH, HIDDEN, **shared)
        self.up_proj = nnx.Linear(WIDTH, HIDDEN, **shared)
        self.down_proj = nnx.Linear(HIDDEN, WIDTH, **shared)

    def __call__(self, x):
        return self.down_proj(nnx.gelu(self.gate_proj(x)) * self.up_proj(x))


class GemmaBlock(nnx.Module):
    def __init__(self, *, rngs):
        self.pre_attention_norm = RMSNorm(WIDTH, rngs=rngs)
        self.attn = GemmaAttention(rngs=rngs)
        self.pre_ffw_norm = RMSNorm(WIDTH, rngs=rngs)
        self.mlp = FeedForward(rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.pre_attention_norm(x))
        return x + self.mlp(self.pre_ffw_norm(x))


class Embedder(nnx.Embed):
    def __call__(self, tokens):
        x = super().__call__(tokens)
        return x * jnp.asarray(self.features**0.5, x.dtype)


class Gemma(nnx.Module):
    def __init__(self, *, rngs):
        self.embedder = Embedder(VOCABULARY, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.layers = nnx.List([GemmaBlock(rngs=rngs) for _ in range(LAYERS)])
        self.final_norm = RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.embedder(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embedder.attend(self.final_norm(x))


def test_gemma(rng, tmp_path):
    batches, held_out = jnp.split(markov_chains(rng, STEPS + 16), [STEPS])
    state = nnx.state(Gemma(rngs=nnx.Rngs(int(rng.integers(2**31)))))
    checkpoint = saved_and_restored(tmp_path, nnx.to_pure_dict(state))

    def final_loss(recipe):
        model = Gemma(rngs=nnx.Rngs(0))
        nnx.replace_by_pure_dict(state := nnx.state(model), checkpoint)
        nnx.update(model, state)
        if recipe is not None:
            report = te_jax.nnx.convert(model, recipe)
            print(report)
            assert len(report.converted) == 6 * LAYERS
            assert [layer.path for layer in report.skipped] == ["embedder"]
            assert "layers/*/attn/q_einsum ×2" in repr(report)
        graphdef, variables = nnx.split(model)

        def loss_fn(variables, tokens):
            return cross_entropy(nnx.merge(graphdef, variables)(tokens[:, :-1]), tokens[:, 1:])

        return train(loss_fn, variables, batches, held_out)

    expected, loss = final_loss(None), final_loss(BlockScaling())
    print(f"bfloat16 {expected:.4f}, FP8 {loss:.4f}, {loss / expected - 1:+.2%}")
    assert loss != expected
    assert abs(loss / expected - 1) < 0.01


# lm1b: layers named by Linen, attention of Flax, layer norms, logical axes, and a dense output head.


def partitioned(*names):
    return nn.with_logical_partitioning(nn.initializers.xavier_uniform(), names)


class MlpBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(HIDDEN, dtype=jnp.bfloat16, kernel_init=partitioned("embed", "mlp"))(x))
        return nn.Dense(x.shape[-1] // 2, dtype=jnp.bfloat16, kernel_init=partitioned("mlp", "embed"))(x)


class DecoderBlock(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        attention = nn.MultiHeadDotProductAttention(
            HEADS, dtype=jnp.bfloat16, qkv_features=WIDTH, use_bias=False, kernel_init=partitioned("embed", "kv")
        )
        x = x + attention(nn.LayerNorm(dtype=jnp.bfloat16)(x), mask=mask)
        return x + MlpBlock()(nn.LayerNorm(dtype=jnp.bfloat16)(x))


class TransformerLM(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH, embedding_init=partitioned("vocab", "embed"), name="embed")(tokens)
        x = x + self.param("position_embedding", nn.initializers.normal(0.02), (1, LENGTH, WIDTH))
        mask = nn.make_causal_mask(tokens)
        for layer in range(LAYERS):
            x = DecoderBlock(name=f"decoderblock_{layer}")(x.astype(jnp.bfloat16), mask)
        x = nn.LayerNorm(dtype=jnp.bfloat16, name="decoder_norm")(x)
        return nn.Dense(VOCABULARY, dtype=jnp.bfloat16, kernel_init=partitioned("embed", "vocab"), name="logitdense")(x)


def test_lm1b(rng, tmp_path):
    batches, held_out = jnp.split(markov_chains(rng, STEPS + 16), [STEPS])
    key = jax.random.key(int(rng.integers(2**31)))
    params = nn.unbox(jax.jit(TransformerLM().init)(key, held_out[0, :, :-1])["params"])
    checkpoint = saved_and_restored(tmp_path, params)

    def final_loss(recipe):
        model, variables = TransformerLM(), {"params": checkpoint}
        if recipe is not None:
            model = te_jax.flax.convert(model, recipe)
            made = jax.jit(model.init)(jax.random.key(0), held_out[0, :, :-1])
            assert jax.tree.map(jnp.shape, nn.unbox(made["params"])) == jax.tree.map(jnp.shape, checkpoint)
            variables = made | variables
            report = te_jax.flax.report(model)
            print(report)
            assert len(report.converted) == 6 * LAYERS
            assert {layer.path for layer in report.skipped} == {"", "embed", "logitdense"}
            assert "decoderblock_*/MultiHeadDotProductAttention_*/query ×2" in repr(report)

        def loss_fn(variables, tokens):
            return cross_entropy(model.apply(variables, tokens[:, :-1]), tokens[:, 1:])

        assert (OVERWRITE in variables) is (recipe is not None)
        return train(loss_fn, variables, batches, held_out)

    expected, loss = final_loss(None), final_loss(DelayedScaling(history_len=16))
    print(f"bfloat16 {expected:.4f}, FP8 {loss:.4f}, {loss / expected - 1:+.2%}")
    assert loss != expected
    assert abs(loss / expected - 1) < 0.01
