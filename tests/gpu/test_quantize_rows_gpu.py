"""Rows that are gathered and quantized in one pass on a GPU: all forms, tails, loads, vmap, 64-bit indices, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.quantize_oracle import E4M3, E5M2, assert_bits, quantization_of, random_case

from te_jax import ops
from te_jax.hlo import buffers
from te_jax.ops._quantize_rows import quantize_rows
from te_jax.recipe import BlockScaling

pytestmark = pytest.mark.gpu

PAIRS = ("1x128", "128x128", "1x128 and square", "square and 1x128")
quantized = jax.jit(quantize_rows, static_argnums=(2, 3, 4))


def random_rows(rng, count, rows):
    """Rows that x has, in any order, some several times, and others."""
    known = rng.integers(0, count, rows)
    others = rng.choice([-1, -(2**31), count, 2**31 - 1], rows)
    return jnp.asarray(np.where(rng.random(rows) < 0.1, others, known), jnp.int32)


def poison(bytes_of_results):
    """Leaves NaN in memory that results are then written to."""
    for size in (bytes_of_results // 4, bytes_of_results // 128):
        jax.block_until_ready([jnp.full(size, jnp.nan, jnp.float32) for _ in range(8)])


def assert_as_reference(x, rows, quantization, copies):
    poison(rows.size * x.shape[1])
    found = quantized(x, rows, quantization, copies, True)
    wanted = quantized(x, rows, quantization, copies, False)
    jax.tree.map(assert_bits, found, wanted)


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ((500, 1024), 2048),
        ((3000, 400), 1616),  # the last tiles are partial
        ((77, 333), 999),  # no vector is aligned
        ((1, 16), 16),
        ((130, 256), 131),  # rows are not aligned, columns are
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bits(rng, shape, rows, dtype):
    x, index = random_case(rng, shape, dtype), random_rows(rng, shape[0], rows)
    for pair in PAIRS:
        for copies in ("both", "data", "transposed"):
            quantization = quantization_of(pair, (E4M3, E5M2)[int(rng.integers(2))], bool(rng.integers(2)))
            assert_as_reference(x, index, quantization, copies)


def test_special_values(rng):
    x = np.array(random_case(rng, (300, 512), "bfloat16"))
    for value in (np.nan, np.inf, -np.inf, -0.0):
        x[rng.integers(0, 300, 5), rng.integers(0, 512, 5)] = value
    rows = random_rows(rng, 300, 1024)
    for pair in PAIRS:
        assert_as_reference(jnp.asarray(x), rows, quantization_of(pair), "both")


@pytest.mark.parametrize("load", ["even", "one has all", "skewed", "none has any"])
def test_tokens_of_experts(rng, load):
    """One program, whatever the experts are given."""
    tokens, top_k, experts = 3000, 4, 16
    x = random_case(rng, (tokens, 768), "bfloat16")
    skew = np.exp(-np.arange(experts) / 2.0) if load == "skewed" else np.ones(experts)
    order = np.argsort(np.log(rng.random((tokens, experts))) / skew, axis=1)[:, ::-1][:, :top_k]
    if load == "one has all":
        order = np.where(np.arange(top_k) == 0, 5, -1) + np.zeros_like(order)
    if load == "none has any":
        order = np.full_like(order, -1)
    permutation = ops.group_by_expert(jnp.asarray(order, jnp.int32), experts, align=128)
    for role in ("activation", "gradient"):
        quantization = BlockScaling().quantization(role)
        poison(permutation.choices.size * 768)
        found = quantized(x, permutation.choices // top_k, quantization, "both", True)
        jax.tree.map(assert_bits, found, ops.quantize(ops.permute(x, permutation), quantization))


@pytest.mark.parametrize(("shape", "rows"), [((3, 200, 272), 400), ((5, 33, 77), 130)], ids=str)
def test_examples_of_a_vmap(rng, shape, rows):
    """Every example has a table and rows of its own, and starts at any alignment."""
    x = random_case(rng, shape, "bfloat16")
    index = jnp.stack([random_rows(rng, shape[1], rows) for _ in range(shape[0])])
    for pair in PAIRS:
        call = functools.partial(quantize_rows, quantization=quantization_of(pair), copies="both")
        found, wanted = (jax.jit(jax.vmap(functools.partial(call, use_native=n)))(x, index) for n in (True, False))
        jax.tree.map(assert_bits, found, wanted)


def test_more_values_than_32_bits_count(rng):
    """Both in the table and in the results: blocks of 128 rows are what they are alone."""
    count, cols, rows = 70016, 32768, 66048
    assert min(count, rows) * cols > 2**31
    x = jax.jit(lambda key: jax.random.normal(key, (count, cols), jnp.bfloat16))(
        jax.random.key(int(rng.integers(2**31)))
    )
    index = random_rows(rng, count, rows).at[-128:].set(count - 1 - jnp.arange(128, dtype=jnp.int32))
    quantization = quantization_of("1x128")
    whole = quantized(x, index, quantization, "both", True)
    for block in (0, 2**31 // cols // 128, rows // 128 - 1):
        part = slice(128 * block, 128 * block + 128)
        own = quantized(x, index[part], quantization, "both", False)
        assert_bits(own.data, whole.data[part])
        assert_bits(own.scale_inv, whole.scale_inv[:, part])
        assert_bits(own.transposed, whole.transposed[:, part])
        assert_bits(own.transposed_scale_inv[0], whole.transposed_scale_inv[block])


def test_memory(rng):
    """Only the results are allocated, and nothing is laid out anew; another run gives the same bits."""
    x, rows = random_case(rng, (1000, 2048), "bfloat16"), random_rows(rng, 1000, 8192)
    compiled = quantized.lower(x, rows, quantization_of("1x128 and square"), "both", True).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.02 * rows.size * x.shape[1]
    assert [b for b in buffers(compiled, "copy", "copy-start", "transpose", "gather") if b.bytes > 1024] == []
    first = compiled(x, rows)
    for _ in range(5):
        jax.tree.map(assert_bits, compiled(x, rows), first)
