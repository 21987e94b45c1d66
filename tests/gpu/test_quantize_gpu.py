"""What only a GPU shows of quantization: large tensors, 64-bit indices, CUDA graphs, memory, several devices."""

import functools
import os
import threading

import cuda_graphs
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from te_jax import ops, recipe
from te_jax.hlo import buffers
from te_jax.recipe import Quantization

pytestmark = pytest.mark.gpu

E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
QUANTIZATIONS = {
    "current": recipe.CurrentScaling().quantization("activation"),
    "row": recipe.RowwiseScaling().quantization("gradient"),
    "block activation": recipe.BlockScaling().quantization("activation"),
    "block kernel": recipe.BlockScaling().quantization("kernel"),
    "block gradient": recipe.BlockScaling(gradient_dtype=E5M2).quantization("gradient"),
    "square and 1x128": Quantization(E4M3, "block_128x128", "block_1x128", True),
}
each_quantization = pytest.mark.parametrize("quantization", QUANTIZATIONS.values(), ids=QUANTIZATIONS)


def draw(rng, shape, dtype="bfloat16"):
    """Values made on the device; rows and columns differ in size by up to 2^16, and some values are not finite."""
    keys = jax.random.split(jax.random.key(int(rng.integers(2**31))), 4)

    @jax.jit
    def values():
        rows = jnp.exp2(jax.random.uniform(keys[0], (shape[0], 1), minval=-8.0, maxval=8.0))
        cols = jnp.exp2(jax.random.uniform(keys[1], (1, shape[1]), minval=-4.0, maxval=4.0))
        return (jax.random.normal(keys[2], shape) * rows * cols).astype(dtype)

    return values()


def with_special_values(x, rng):
    places = [rng.integers(0, n, 12) for n in x.shape]
    special = np.array([np.nan, np.inf, -np.inf, -0.0] * 3, np.float32)
    return x.at[tuple(map(jnp.asarray, places))].set(jnp.asarray(special).astype(x.dtype))


@jax.jit
def differing_bits(a, b):
    """How many elements of two trees differ, each as [count]."""

    def count(a, b):
        unsigned = {1: jnp.uint8, 4: jnp.uint32}[a.dtype.itemsize]
        a, b = (jax.lax.bitcast_convert_type(x, unsigned) for x in (a, b))
        return jnp.sum(a != b, dtype=jnp.int32)

    return jax.tree.map(count, a, b)


def assert_same_bits(a, b):
    wrong = {jax.tree_util.keystr(path): int(n) for path, n in jax.tree.leaves_with_path(differing_bits(a, b)) if n}
    assert not wrong, wrong


def run(x, quantization, implementation="native", **options):
    return jax.jit(lambda x: ops.quantize(x, quantization, implementation=implementation, **options))(x)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((8192, 8192), "bfloat16"),
        ((16384, 8192), "bfloat16"),
        ((4112, 11008), "bfloat16"),  # the last tiles are partial
        ((4096, 14336), "float32"),
        ((2000, 3333), "bfloat16"),  # rows start at every alignment
        ((1, 100000), "bfloat16"),
        ((100000, 1), "float32"),
        ((8, 131072), "bfloat16"),
    ],
    ids=str,
)
@each_quantization
def test_large_tensors(quantization, shape, dtype, rng):
    for x in (draw(rng, shape, dtype), with_special_values(draw(rng, shape, dtype), rng)):
        native, reference = (run(x, quantization, name, with_amax=True) for name in ("native", "reference"))
        assert_same_bits(native, reference)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 4096),
        (4, 14336),
        (16, 4096),
        (64, 14336),
        (127, 400),  # the last block is partial
        (128, 4096),  # as many rows as a tile has
        (3, 8),
        (5, 1044),  # the rows of bfloat16 are no vectors of 16 bytes
        (2001, 4112),  # many rows, which TMA would not store
        (300, 1048),
    ],
    ids=str,
)
def test_rows_without_a_transposed_copy(shape, dtype, rng):
    """Written into memory that held NaN."""
    for fp8 in (E4M3, E5M2):
        for power_of_two_scales in (False, True):
            quantization = Quantization(fp8, "block_1x128", "block_1x128", power_of_two_scales)
            finite = draw(rng, shape, dtype)
            for x in (finite, with_special_values(finite, rng), draw_extremes(rng, shape).astype(dtype)):
                reference = run(x, quantization, "reference", copies="data")
                jax.block_until_ready([jnp.full(x.size, jnp.nan, jnp.float32) for _ in range(4)])
                assert_same_bits(run(x, quantization, copies="data"), reference)


def draw_extremes(rng, shape):
    """Blocks of zeros, of subnormal values, of the smallest normal ones and of nearly the largest."""
    sizes = np.array([0.0, 1e-40, 2.0**-126, 1e38, 1.0], np.float32)
    rows, cols = np.indices(shape)
    return jnp.asarray(sizes[(rows + cols // 128) % 5] * rng.uniform(-2.0, 2.0, shape).astype(np.float32))


@pytest.mark.parametrize("shape", [(3, 5, 272), (31, 4, 4096), (40, 12, 264), (2, 200, 512)], ids=str)
def test_rows_of_batches_without_a_transposed_copy(shape, rng):
    count, rows, cols = shape
    x = with_special_values(draw(rng, (count * rows, cols)), rng).reshape(shape)

    def quantized(implementation):
        call = functools.partial(ops.quantize, copies="data", implementation=implementation)
        return jax.jit(jax.vmap(lambda x: call(x, QUANTIZATIONS["block activation"])))(x)

    assert_same_bits(quantized("native"), quantized("reference"))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((64, 512, 2048), "bfloat16"),
        ((7, 1040, 2064), "bfloat16"),  # the last tiles are partial
        ((300, 144, 272), "float32"),
        ((33, 200, 333), "bfloat16"),  # examples start at every alignment
        ((70000, 3, 5), "float32"),
        ((2, 8192, 4096), "bfloat16"),
    ],
    ids=str,
)
@each_quantization
def test_batches(quantization, shape, dtype, rng):
    """Every example is a tensor of its own."""
    count, rows, cols = shape
    x = with_special_values(draw(rng, (count * rows, cols), dtype), rng).reshape(shape)

    def quantized(implementation, x):
        call = functools.partial(
            ops.quantize, quantization=quantization, with_amax=True, with_dbias=True, implementation=implementation
        )
        *copies, dbias = jax.jit(jax.vmap(call))(x)
        return copies, dbias

    found, dbias = quantized("native", x)
    expected, _ = quantized("reference", x)
    assert_same_bits(found, expected)
    finite = jnp.isfinite(x).all(axis=1)
    terms = jnp.abs(x.astype(jnp.float32)).sum(axis=1)
    difference = jnp.abs(dbias - x.astype(jnp.float32).sum(axis=1))
    assert (jnp.where(finite, difference <= 1e-5 * terms, ~jnp.isfinite(dbias))).all()


@pytest.mark.parametrize("amax", [0.5, 300.0])
def test_delayed_scaling_of_a_large_tensor(amax, rng):
    x = with_special_values(draw(rng, (8192, 4096)), rng)
    for dtype in (E4M3, E5M2):
        quantization = Quantization(dtype, "tensor", "tensor")
        native, reference = (
            run(x, quantization, name, amax=jnp.float32(amax), with_amax=True) for name in ("native", "reference")
        )
        assert_same_bits(native, reference)


@each_quantization
def test_dbias(quantization, rng):
    x = draw(rng, (8208, 4112))
    _, dbias = run(x, quantization, with_dbias=True)
    expected = np.asarray(x).astype(np.float64)
    terms = np.abs(expected).sum(axis=0)
    assert (np.abs(np.asarray(dbias, np.float64) - expected.sum(axis=0)) <= 1e-6 * terms).all()


@pytest.mark.parametrize("shape", [(70016, 32768), (131072, 16400)], ids=str)
def test_more_values_than_32_bits_count(shape, rng):
    """Blocks of 128 rows, quantized by themselves, are what the whole has in their place."""
    rows, cols = shape
    assert rows * cols > 2**31
    x = draw(rng, shape)
    quantization = QUANTIZATIONS["block activation"]
    quantized, amax = run(x, quantization, with_amax=True)
    tensor = run(x, QUANTIZATIONS["current"], amax=amax)
    last = 2**31 // cols // 128
    for block in {0, last - 1, last, min(last + 1, rows // 128 - 1), rows // 128 - 1}:
        part = slice(128 * block, 128 * block + 128)
        own = run(x[part], quantization)
        assert_same_bits(own.data, quantized.data[part])
        assert_same_bits(own.scale_inv, quantized.scale_inv[:, part])
        assert_same_bits(own.transposed, quantized.transposed[:, part])
        assert_same_bits(own.transposed_scale_inv[0], quantized.transposed_scale_inv[block])
        own = run(x[part], QUANTIZATIONS["current"], amax=amax)
        assert_same_bits(own.data, tensor.data[part])
        assert_same_bits(own.transposed, tensor.transposed[:, part])


@each_quantization
def test_memory(quantization, rng):
    """Only the results, amaxes and partial sums are allocated, and nothing is laid out anew."""
    x = draw(rng, (4096, 8192))
    compiled = jax.jit(lambda x: ops.quantize(x, quantization, with_dbias=True)).lower(x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.02 * x.nbytes
    assert [b for b in buffers(compiled, "copy", "copy-start", "transpose") if b.bytes > 1024] == []


def test_repeated_runs_give_the_same_bits(rng):
    x = draw(rng, (4112, 4112))
    for quantization in QUANTIZATIONS.values():
        call = jax.jit(lambda x, q=quantization: ops.quantize(x, q, with_amax=True, with_dbias=True))
        first = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(call(x))]
        for _ in range(10):
            assert [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(call(x))] == first


_HASHES = """
    import hashlib
    import jax, jax.numpy as jnp, numpy as np
    from te_jax import ops, recipe

    rng = np.random.default_rng({seed})
    recipes = (recipe.CurrentScaling(), recipe.RowwiseScaling(), recipe.BlockScaling())
    digest = hashlib.sha256()
    for shape in ((512, 1024), (130, 77)):
        x = jnp.asarray(rng.standard_normal(shape, np.float32)).astype(jnp.bfloat16)

        @jax.jit
        def steps(x):  # several launches in a row, so that XLA has something to put into a graph
            for scaling in recipes:
                quantized, amax = ops.quantize(
                    x, scaling.quantization("gradient"), with_amax=True, implementation="native"
                )
                x = x + (quantized.dequantize() / amax.astype(x.dtype))
            delayed = recipe.DelayedScaling().quantization("activation")
            return ops.quantize(x, delayed, amax=amax, with_amax=True, with_dbias=True, implementation="native"), x

        for _ in range(5):  # a graph is captured, and then replayed and updated
            results, x = steps(x)
            for leaf in jax.tree.leaves(results):
                digest.update(np.asarray(leaf).tobytes())
    print(digest.hexdigest())
"""


def test_cuda_graphs_do_not_change_a_bit():
    """With command buffers that take custom calls, with the default, and with none."""
    code = _HASHES.format(seed=int.from_bytes(os.urandom(4), "little"))
    digests = cuda_graphs.outputs(code)
    assert len(set(digests.values())) == 1, (code, digests)


def test_devices_driven_by_their_own_threads(require_devices, rng):
    require_devices(2)
    x = draw(rng, (2048, 4096))
    quantization = QUANTIZATIONS["current"]
    call = jax.jit(lambda x: ops.quantize(x, quantization, with_amax=True, implementation="native"))
    expected = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(call(x))]
    seen, failures = set(), []

    def drive(device):
        try:
            local = jax.device_put(x, device)
            for _ in range(10):
                assert [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(call(local))] == expected
            seen.add(device)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=drive, args=(device,)) for device in jax.devices()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert seen == set(jax.devices())
