"""What only a GPU shows of matrix products: large ones, every epilogue of cuBLASLt, CUDA graphs, threads, memory."""

import ctypes
import functools
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import cuda_graphs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_jax
from te_jax import native, ops, recipe
from te_jax.hlo import buffers
from te_jax.quantized import QuantizedArray
from te_jax.testing import assert_close, relative_error

pytestmark = pytest.mark.gpu

E4M3, E5M2 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)
SCALINGS = {"tensor": ("tensor", "tensor"), "row": ("row", "row"), "block": ("block_1x128", "block_128x128")}
MIB = 2**20


def draw(rng, kind, m, n, k, lhs_dtype=E4M3, rhs_dtype=E4M3):
    """lhs [m, k] and rhs [n, k] from normal values made on the device: they are too many for the host's generator."""
    keys = jax.random.split(jax.random.key(int(rng.integers(2**31))))
    dtypes = (lhs_dtype, rhs_dtype)
    plain = [jax.random.normal(key, (outer, k), jnp.bfloat16) for key, outer in zip(keys, (m, n), strict=True)]
    if kind == "plain":
        return tuple(plain)
    return tuple(
        ops.quantize(x, recipe.Quantization(dtype, scaling, scaling), copies="data", implementation="reference")
        for x, dtype, scaling in zip(plain, dtypes, SCALINGS[kind], strict=True)
    )


def multiply(lhs, rhs, **options):
    return ops.gemm(lhs, rhs, rhs_contracting="cols", implementation="native", **options)


def values(x):
    """What an operand stands for, in float32, which holds FP8 times a scale to 24 bits."""
    if not isinstance(x, QuantizedArray):
        return x
    return QuantizedArray(
        x.data, x.scale_inv, None, None, 1, 1, x.scaling, x.transposed_scaling, np.dtype(np.float32)
    ).dequantize()


def expected_rows(lhs, rhs, rows):
    wide = np.asarray(values(lhs)[jnp.asarray(rows)]).astype(np.float64)
    return wide @ np.asarray(values(rhs)).astype(np.float64).T


def exact(lhs, rhs):
    return expected_rows(lhs, rhs, np.arange(lhs.shape[0]))


# ---------------------------------------------------------------------------------------------------- sizes and dtypes


@pytest.mark.parametrize("kind", [*SCALINGS, "plain"])
@pytest.mark.parametrize(
    "shape", [(4096, 4096, 4096), (8192, 2048, 8192), (2048, 14336, 1024), (520, 1040, 16384)], ids=str
)
def test_large_products(shape, kind, rng):
    """Sums of up to 16384 products, promoted to float32 every 128."""
    lhs, rhs = draw(rng, kind, *shape)
    rows = np.unique(rng.integers(0, shape[0], 32))
    expected = expected_rows(lhs, rhs, rows)
    for dtype, tolerance in (("float32", 2e-3), ("bfloat16", 1e-2)):
        result = jax.jit(functools.partial(multiply, out_dtype=dtype))(lhs, rhs)
        assert_close(np.asarray(result[jnp.asarray(rows)]), expected, dtype=dtype, tolerance=tolerance)
    # No tile was left out: the sums of all rows are those of the product with ones.
    sums = np.asarray(jnp.sum(result, axis=1, dtype=jnp.float32)).astype(np.float64)
    column = np.asarray(jnp.sum(values(rhs).astype(jnp.float32), axis=0)).astype(np.float64)
    assert relative_error(sums, np.asarray(values(lhs)).astype(np.float64) @ column) < 0.03


@pytest.mark.parametrize("kind", ["tensor", "row"])
def test_fast_accumulation(kind, rng):
    """Less exact than promotion, and still far better than the formats; really another mode."""
    lhs, rhs = draw(rng, kind, 1024, 1024, 8192)
    expected = exact(lhs, rhs)
    errors = [
        relative_error(multiply(lhs, rhs, out_dtype="float32", fast_accumulation=fast), expected)
        for fast in (False, True)
    ]
    assert errors[0] < 2e-3
    assert errors[0] < errors[1] < 3e-2


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 16, 16), (3, 48, 208), (7, 272, 4112), (11, 32, 48), (127, 144, 272), (129, 16, 4096), (2000, 7168, 16)],
)
def test_sizes_at_the_edges_of_tiles(m, n, k, kind, rng):
    lhs, rhs = draw(rng, kind, m, n, k)
    for dtype in ("float32", "bfloat16"):
        result = multiply(lhs, rhs, out_dtype=dtype)
        assert_close(result, exact(lhs, rhs), dtype=dtype, tolerance=2e-3 if dtype == "float32" else None)


@pytest.mark.parametrize("kind", [*SCALINGS, "plain"])
def test_more_elements_than_32_bits_count(kind, rng):
    m, n, k = 65536, 40960, 64
    lhs, rhs = draw(rng, kind, m, n, k)
    assert m * n > 2**31
    rows = np.array([0, 1, 2**31 // n - 1, 2**31 // n, 2**31 // n + 1, m // 2, m - 2, m - 1])
    result = multiply(lhs, rhs, out_dtype="bfloat16")
    assert_close(np.asarray(result[jnp.asarray(rows)]), expected_rows(lhs, rhs, rows), dtype="bfloat16")


# ------------------------------------------------------------------------------------------ every epilogue of cuBLASLt


@pytest.mark.parametrize("followup", ["", "bias", "gelu", "bias gelu", "bias gelu saved", "gelu saved"])
@pytest.mark.parametrize(
    ("lhs_dtype", "rhs_dtype", "out_dtype"),
    [
        *((E4M3, E4M3, dtype) for dtype in ("bfloat16", "float16", "float32")),
        *((E5M2, E4M3, dtype) for dtype in ("bfloat16", "float16", "float32")),
        (E4M3, E5M2, "bfloat16"),
    ],
    ids=str,
)
@pytest.mark.parametrize("algorithm", ["cublaslt", "auto", "te_jax"])
def test_epilogues_of_fp8_tensors(algorithm, lhs_dtype, rhs_dtype, out_dtype, followup, rng):
    """Whatever combination is chosen for cuBLASLt, it has an algorithm for, and the result is the reference's."""
    lhs, rhs = draw(rng, "tensor", 528, 1040, 1056, lhs_dtype, rhs_dtype)
    options = {"out_dtype": out_dtype}
    if "gelu" in followup:
        options["activation"] = "gelu"
    if "bias" in followup:
        options["bias"] = 30 * jax.random.normal(jax.random.key(1), (1040,), out_dtype)
    if "saved" in followup:
        options["save_preactivation"] = True
    actual = jax.jit(functools.partial(multiply, algorithm=algorithm, **options))(lhs, rhs)
    expected = ops.gemm(lhs, rhs, rhs_contracting="cols", implementation="reference", **options)
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype
        tolerance = {2: 1e-2, 4: 3e-3}[ours.dtype.itemsize]
        assert relative_error(ours, theirs) < tolerance, (ours.dtype, ours.shape)


@pytest.mark.parametrize("followup", ["", "bias", "gelu", "bias gelu saved", "accumulate"])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float32"),
        ("float16", "float16"),
        ("float32", "float32"),
        ("float16", "bfloat16"),
    ],
)
@pytest.mark.parametrize(
    "contracting", [("cols", "rows"), ("rows", "rows"), ("cols", "cols"), ("rows", "cols")], ids=str
)
def test_epilogues_of_plain_arrays(contracting, dtype, out_dtype, followup, rng):
    m, n, k = 264, 520, 392
    keys = jax.random.split(jax.random.key(int(rng.integers(2**31))), 3)
    lhs = jax.random.normal(keys[0], (m, k) if contracting[0] == "cols" else (k, m), dtype)
    rhs = jax.random.normal(keys[1], (k, n) if contracting[1] == "rows" else (n, k), dtype)
    options = {"lhs_contracting": contracting[0], "rhs_contracting": contracting[1], "out_dtype": out_dtype}
    if followup == "accumulate":
        options["accumulator"] = jax.random.normal(keys[2], (m, n), out_dtype)
    if "bias" in followup:
        options["bias"] = jax.random.normal(keys[2], (n,), out_dtype)
    if "gelu" in followup:
        options["activation"] = "gelu"
        options["save_preactivation"] = "saved" in followup
    actual = jax.jit(functools.partial(ops.gemm, implementation="native", **options))(lhs, rhs)
    expected = ops.gemm(lhs, rhs, implementation="reference", **options)
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        tolerance = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}[out_dtype]
        assert_close(ours, theirs, tolerance=tolerance)


@pytest.mark.parametrize("m", [1, 7, 33])
@pytest.mark.parametrize("n", [1, 9, 130])
def test_plain_arrays_of_any_size(m, n, rng):
    for dtype in ("bfloat16", "float32"):
        lhs, rhs = (jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(dtype) for shape in ((m, 35), (35, n)))
        result = ops.gemm(lhs, rhs, out_dtype="float32", implementation="native")
        expected = np.asarray(lhs).astype(np.float64) @ np.asarray(rhs).astype(np.float64)
        assert_close(result, expected, dtype="float32")


@pytest.mark.parametrize("kind", [*SCALINGS, "plain"])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(3, 48, 400), (12, 144, 272), (20, 48, 272), (132, 272, 144), (516, 144, 1168)]
)
def test_batches(m, n, k, kind, rng):
    """Sizes that are no multiples of a tile, and of the second example on scales that are not on 16 bytes."""
    examples = [draw(rng, kind, m, n, k) for _ in range(5)]
    lhs, rhs = (jax.tree.map(lambda *leaves: jnp.stack(leaves), *side) for side in zip(*examples, strict=True))
    products = np.stack([exact(*example) for example in examples])
    for dtype, tolerance in (("float32", 2e-3), ("bfloat16", 1e-2)):
        keys = jax.random.split(jax.random.key(int(rng.integers(2**31))))
        bias, total = jax.random.normal(keys[0], (5, n), dtype), jax.random.normal(keys[1], (5, m, n), dtype)
        wide_bias, wide_total = (np.asarray(x).astype(np.float64) for x in (bias[:, None], total))
        for options in ({}, {"algorithm": "te_jax"}) if kind != "plain" else ({},):
            run = jax.vmap(functools.partial(multiply, out_dtype=dtype, **options))
            check = functools.partial(assert_close, dtype=dtype, tolerance=tolerance)
            check(run(lhs, rhs), products)
            check(run(lhs, rhs, bias=bias), products + wide_bias)
            check(run(lhs, rhs, accumulator=total), products + wide_total)


# ------------------------------------------------------------------------------------------------- the package's kernel


@pytest.mark.parametrize(
    ("kind", "fast"), [("tensor", False), ("tensor", True), ("row", False), ("row", True), ("block", False)]
)
def test_te_jax_kernel_without_cublaslt(kind, fast, rng):
    """Nothing here is a product of cuBLASLt, with whose FP8 kernels racecheck ends."""
    sizes = [(4, 16, 16), (132, 144, 272), (1300, 1056, 1168)]
    if kind == "block":  # few rows of few and of many columns, and each of the small tiles (tests/native/test_tiles.py)
        sizes += [(8, 4624, 400), (8, 272, 4112), (16, 1056, 1168), (64, 1040, 656), (516, 4112, 272)]
    for m, n, k in sizes:
        for lhs_dtype, rhs_dtype in ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)):
            lhs, rhs = draw(rng, kind, m, n, k, lhs_dtype, rhs_dtype)
            expected = exact(lhs, rhs)
            for dtype, tolerance in (("float32", 2e-3), ("bfloat16", 1e-2)):
                check = functools.partial(assert_close, dtype=dtype, tolerance=3e-2 if fast else tolerance)
                run = functools.partial(multiply, lhs, rhs, algorithm="te_jax", fast_accumulation=fast)
                check(run(out_dtype=dtype), expected)
                total = jax.random.normal(jax.random.key(0), (m, n), dtype)
                check(run(accumulator=total), np.asarray(total).astype(np.float64) + expected)


@pytest.mark.parametrize("fast", [False, True], ids=["split", "fast"])
def test_te_jax_kernel_agrees_with_cublaslt(fast, rng):
    for lhs_dtype, rhs_dtype in ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)):
        lhs, rhs = draw(rng, "tensor", 1000, 1040, 2064, lhs_dtype, rhs_dtype)
        results = [
            multiply(lhs, rhs, out_dtype="float32", fast_accumulation=fast, algorithm=algorithm)
            for algorithm in ("cublaslt", "te_jax")
        ]
        assert relative_error(results[0], results[1]) < (3e-2 if fast else 2e-3)
        assert relative_error(results[1], exact(lhs, rhs)) < (3e-2 if fast else 2e-3)


# -------------------------------------------------------------------------------------------------- memory and buffers


@pytest.mark.parametrize("kind", [*SCALINGS, "plain"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_accumulation_is_in_place(dtype, kind, rng):
    lhs, rhs = draw(rng, kind, 4096, 4096, 1024)
    total = jax.random.normal(jax.random.key(0), (4096, 4096), dtype)
    rows = np.unique(rng.integers(0, 4096, 32))
    before = np.asarray(total[jnp.asarray(rows)]).astype(np.float64)
    step = jax.jit(lambda lhs, rhs, total: multiply(lhs, rhs, accumulator=total), donate_argnums=2)
    compiled = step.lower(lhs, rhs, total).compile()
    size, pointer = total.nbytes, total.unsafe_buffer_pointer()
    assert compiled.memory_analysis().alias_size_in_bytes >= size
    assert compiled.memory_analysis().temp_size_in_bytes < 40 * MIB  # cuBLASLt's workspace
    assert [b for b in buffers(compiled, "copy", "copy-start") if b.bytes >= size] == []
    for _ in range(3):
        total = compiled(lhs, rhs, total)
    assert total.unsafe_buffer_pointer() == pointer
    expected = before + 3 * expected_rows(lhs, rhs, rows)
    assert_close(np.asarray(total[jnp.asarray(rows)]), expected, dtype=dtype, tolerance={"float32": 2e-3}.get(dtype))


@pytest.mark.parametrize("kind", ["row", "block"])
def test_te_jax_kernel_takes_no_workspace(kind, rng):
    lhs, rhs = draw(rng, kind, 2048, 2048, 2048)
    compiled = jax.jit(functools.partial(multiply, algorithm="te_jax")).lower(lhs, rhs).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < MIB


def test_what_was_exported_without_a_gpu_says_so(rng, monkeypatch):
    """cuBLASLt's workspace is a result, of a size that tracing decides."""
    monkeypatch.setattr(native, "has_gpu", lambda: False)
    lhs, rhs = draw(rng, "tensor", 48, 80, 112)
    with pytest.raises(jax.errors.JaxRuntimeError, match="export the program where JAX sees a GPU"):
        jax.block_until_ready(multiply(lhs, rhs))


# --------------------------------------------------------------------------------- bits, CUDA graphs, threads, devices


@pytest.mark.parametrize("kind", [*SCALINGS, "plain"])
def test_repeated_runs_give_the_same_bits(kind, rng):
    """Also for shapes where splitting k pays, and while the GPU is busy with something else."""
    for shape in ((256, 256, 16384), (128, 4096, 8192), (4096, 4096, 512)):
        lhs, rhs = draw(rng, kind, *shape)
        run = jax.jit(functools.partial(multiply, out_dtype="float32"))
        first = np.asarray(run(lhs, rhs)).tobytes()
        for _ in range(10):
            assert np.asarray(run(lhs, rhs)).tobytes() == first


_HASHES = """
    import functools, hashlib, json
    import jax, jax.numpy as jnp, numpy as np
    from te_jax import ops, recipe
    from te_jax.recipe import Quantization

    E4M3 = np.dtype(jnp.float8_e4m3fn)

    def run(kind, m, n, k, seed):
        rng = np.random.default_rng(seed)
        x = jnp.asarray(rng.standard_normal((m, k), np.float32)).astype("bfloat16")
        w = jnp.asarray(rng.standard_normal((k, k), np.float32)).astype("bfloat16")
        scalings = {{"tensor": ("tensor",) * 2, "row": ("row",) * 2, "block": ("block_1x128", "block_128x128")}}[kind]
        algorithm = "te_jax" if kind == "block" else "cublaslt"
        multiply = functools.partial(ops.gemm, rhs_contracting="cols", algorithm=algorithm, implementation="native")
        w8 = ops.quantize(w, Quantization(E4M3, scalings[1], scalings[1]), copies="data", implementation="reference")

        @jax.jit
        def steps(x, total):  # several launches in a row, so that XLA has something to put into a graph
            for _ in range(4):
                x8 = ops.quantize(x, Quantization(E4M3, scalings[0], scalings[0]), copies="data")
                y = multiply(x8, w8)
                total = multiply(x8, w8, accumulator=total)
                x = y * np.float32(k**-0.5).astype(y.dtype)
            return x, total

        digest = hashlib.sha256()
        total = jnp.zeros((m, k), jnp.float32)
        for _ in range(5):  # a graph is captured, and then replayed and updated
            x, total = steps(x, total)
            digest.update(np.asarray(x).tobytes() + np.asarray(total).tobytes())
        return digest.hexdigest()

    print(json.dumps([run(*case) for case in {cases}]))
"""


def test_cuda_graphs_do_not_change_a_bit():
    """With command buffers that take custom calls, with the default, and with none: the same products and sums."""
    seed = int.from_bytes(os.urandom(4), "little")
    cases = [("tensor", 256, 512, 512, seed), ("row", 512, 1024, 1024, seed), ("block", 256, 1024, 1024, seed)]
    digests = cuda_graphs.outputs(_HASHES.format(cases=cases))
    assert len(set(digests.values())) == 1, (seed, digests)


def test_one_plan_from_many_threads(rng):
    """Threads that launch the same kind of product at once, each with arrays of its own."""
    cases = [draw(rng, "tensor", 512, 512, 512) for _ in range(8)]
    run = jax.jit(functools.partial(multiply, out_dtype="float32"))
    expected = [np.asarray(run(*case)).tobytes() for case in cases]
    _run_in_threads(8, lambda i: [_assert_bits(run(*cases[i]), expected[i]) for _ in range(50)])


def test_devices_driven_by_their_own_threads(require_devices, rng):
    require_devices(2)
    lhs, rhs = draw(rng, "tensor", 1024, 1024, 1024)
    run = jax.jit(functools.partial(multiply, algorithm="cublaslt"))
    expected = np.asarray(run(lhs, rhs)).tobytes()

    def drive(i):
        local = jax.device_put((lhs, rhs), jax.devices()[i])
        for _ in range(10):
            _assert_bits(run(*local), expected)

    _run_in_threads(jax.device_count(), drive)


def test_autotuning_where_there_is_no_memory_left():
    """With all memory in XLA's hands, the first suggestion is taken, and nothing fails."""
    code = textwrap.dedent("""
        import jax, jax.numpy as jnp
        from te_jax import ops
        x = jnp.ones((16384, 32768), "bfloat16")
        result = ops.gemm(x, x, rhs_contracting="cols", implementation="native")
        print(float(result[0, 0].astype("float32")), float(result[-1, -1].astype("float32")))
    """)
    environment = {
        **os.environ,
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.99",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
        "PYTHONPATH": os.pathsep.join([str(Path(te_jax.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]),
    }
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=250)
    if "RESOURCE_EXHAUSTED" in result.stderr:
        pytest.skip("another process holds the GPU's memory")
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.split() == ["32768.0", "32768.0"]


def test_an_error_is_reported_once():
    """CUDA keeps a thread's last error, which whoever asks for it after a launch takes for that of the launch."""
    module = native.extension_module("gpu")
    module.introduce({0: 0})
    runtime = ctypes.CDLL("libcudart.so.13")
    runtime.cudaGetLastError()
    with pytest.raises(RuntimeError, match="cudaMalloc of memory that processes share: out of memory"):
        module.create_segment([0, 1 << 16], 1, 0, 2**60)
    assert runtime.cudaGetLastError() == 0


def _assert_bits(result, expected):
    assert np.asarray(result).tobytes() == expected


def _run_in_threads(count, work):
    failures = []

    def guarded(i):
        try:
            work(i)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
