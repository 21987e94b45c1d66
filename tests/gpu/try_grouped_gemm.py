"""First minutes of the grouped GEMM on a GPU: correctness of all forms, equal bits, then timings.

python tests/gpu/try_grouped_gemm.py check      # under `timeout 300`; prints every failure, and goes on
python tests/gpu/try_grouped_gemm.py pair       # that of sums of two products alone
python tests/gpu/try_grouped_gemm.py time
python tests/gpu/try_grouped_gemm.py time_pair
"""

import functools
import os
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch shares the GPU

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from te_jax import ops, recipe
from te_jax.ops.grouped_gemm import grouped_gemm_of_pairs

BLOCK = recipe.BlockScaling()
RNG = np.random.default_rng(int(time.time()))


def rel(found, expected):
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    norm = np.linalg.norm(expected)
    error = np.linalg.norm(found - expected)
    return error / norm if norm else error


def loads(rows, groups, align):
    def cut(p):
        sizes = np.floor(np.asarray(p, float) / sum(p) * rows / align).astype(int) * align
        return sizes.tolist()

    zipf = 1.0 / np.arange(1, groups + 1)
    yield "balanced", cut(np.ones(groups))
    yield "zipf", cut(RNG.permutation(zipf))
    yield "one-hot", [rows if g == groups // 2 else 0 for g in range(groups)]
    some = RNG.random(groups) * (RNG.random(groups) < 0.5)
    yield "half empty", cut(some + 1e-9)
    yield "random sum < rows", (np.asarray(cut(RNG.random(groups))) // 3).tolist()
    yield "none", [0] * groups
    yield "too many", [rows] * groups


def quantized(x, role, stacked):
    q = lambda a: ops.quantize(a, BLOCK.quantization(role), copies="both")  # noqa: E731
    return jax.jit(jax.vmap(q) if stacked else q)(x)


def dequant(copy, scale, kind, values_outer_last=False):
    v = np.asarray(copy.astype(jnp.float32), np.float64)
    s = np.asarray(scale, np.float64)
    m, k = v.shape[-2:]
    if kind == "block_1x128":  # [k / 128, m]
        return v * np.swapaxes(np.repeat(s, 128, axis=-2)[..., :k, :], -1, -2)
    return v * np.repeat(np.repeat(s, 128, -2), 128, -1)[..., :m, :k]


def drawn(kind, form, rows, groups, k, n):
    """Operands of a product of grouped rows, as they are multiplied and in float64."""
    lhs = jnp.asarray(RNG.standard_normal((rows, k)), jnp.bfloat16)
    shape = (groups, k, n) if form == "forward" else (groups, n, k)
    rhs = jnp.asarray(RNG.standard_normal(shape), jnp.bfloat16)
    if kind == "bf16":
        return (lhs, rhs), tuple(np.asarray(x, np.float64) for x in (lhs, rhs))
    left, right = quantized(lhs, "activation", False), quantized(rhs, "kernel", True)
    a = dequant(left.data, left.scale_inv, left.scaling)
    if form == "dgrad":
        return (left, right), (a, dequant(right.data, right.scale_inv, right.scaling))
    b = dequant(right.transposed, right.transposed_scale_inv, right.transposed_scaling)
    return (left, right), (a, np.swapaxes(b, 1, 2))


def check_pairs():
    failures = 0
    for rows, groups, k, n in ((512, 3, 256, 256), (1600, 5, 400, 272), (1024, 4, 656, 400), (2048, 128, 1024, 128)):
        for kind in ("block", "bf16"):
            for form in ("forward", "dgrad"):
                pairs, values = zip(*(drawn(kind, form, rows, groups, k, n) for _ in range(2)), strict=True)
                options = {"rhs_contracting": "cols"} if form == "dgrad" else {}
                for out in (jnp.float32, jnp.bfloat16):
                    f = jax.jit(
                        functools.partial(grouped_gemm_of_pairs, implementation="native", out_dtype=out, **options)
                    )
                    for align in (128, 1):
                        for load, sizes in loads(rows, groups, align):
                            poison = jnp.full((rows * n,), jnp.nan, out).block_until_ready()
                            del poison
                            found = f(*pairs, jnp.asarray(sizes, jnp.int32))
                            again = f(*pairs, jnp.asarray(sizes, jnp.int32))
                            ends = np.minimum(np.cumsum([0, *sizes]), rows)
                            expected = np.zeros((rows, n))
                            for a, b in values:
                                for g, (s, e) in enumerate(itertools.pairwise(ends)):
                                    expected[s:e] += a[s:e] @ (b[g].T if form == "dgrad" else b[g])
                            error = rel(found, expected)
                            bits = np.array_equal(np.asarray(found), np.asarray(again))
                            if not error < (2e-3 if out == jnp.float32 else 5e-3) or not bits:
                                failures += 1
                                print(
                                    f"FAIL pair {kind} {form} {rows}x{groups} {k}->{n} {out.__name__} {load}/{align}: "
                                    f"error {error:.2e} equal bits {bits}; bounds {ends[:9].tolist()}",
                                    flush=True,
                                )
                print(
                    f"pair {kind} {form} {rows} rows x {groups} groups {k}->{n} done, {failures} failures", flush=True
                )
    return failures


def check():
    failures = check_pairs()
    for rows, groups, k, n in ((512, 3, 256, 256), (1600, 5, 400, 272), (4096, 8, 1024, 768), (2048, 128, 128, 128)):
        for kind in ("block", "bf16"):
            for form in ("forward", "dgrad", "wgrad"):
                lhs = jnp.asarray(RNG.standard_normal((rows, k)), jnp.bfloat16)
                shape = (rows, n) if form == "wgrad" else (groups, k, n) if form == "forward" else (groups, n, k)
                rhs = jnp.asarray(RNG.standard_normal(shape), jnp.bfloat16)
                if kind == "bf16":
                    a, b = (np.asarray(x, np.float64) for x in (lhs, rhs))
                    left, right = lhs, rhs
                else:
                    left = quantized(lhs, "activation", False)
                    right = quantized(rhs, "gradient" if form == "wgrad" else "kernel", form != "wgrad")
                    if form == "wgrad" and right.transposed_scaling != "block_128x128":
                        right = quantized(rhs, "kernel", False)
                    if form == "wgrad":
                        a = dequant(left.transposed, left.transposed_scale_inv, left.transposed_scaling).T
                        b = dequant(right.transposed, right.transposed_scale_inv, right.transposed_scaling).T
                    else:
                        a = dequant(left.data, left.scale_inv, left.scaling)
                        b = (
                            dequant(right.data, right.scale_inv, right.scaling)
                            if form == "dgrad"
                            else np.swapaxes(
                                dequant(right.transposed, right.transposed_scale_inv, right.transposed_scaling), 1, 2
                            )
                        )
                options = {"forward": {}, "dgrad": {"rhs_contracting": "cols"}, "wgrad": {"lhs_contracting": "rows"}}[
                    form
                ]
                for out in (jnp.float32, jnp.bfloat16):
                    # Poisoned memory: a donated buffer of NaN is often what the result gets.
                    f = jax.jit(functools.partial(ops.grouped_gemm, implementation="native", out_dtype=out, **options))
                    for align in (128, 1):
                        for load, sizes in loads(rows, groups, align):
                            poison = jnp.full((groups * k * n if form == "wgrad" else rows * n,), jnp.nan, out)
                            poison.block_until_ready()
                            del poison
                            found = f(left, right, jnp.asarray(sizes, jnp.int32))
                            again = f(left, right, jnp.asarray(sizes, jnp.int32))
                            ends = np.minimum(np.cumsum([0, *sizes]), rows)
                            if form == "wgrad":
                                expected = np.stack([a[s:e].T @ b[s:e] for s, e in itertools.pairwise(ends)])
                            else:
                                expected = np.zeros((rows, n))
                                for g, (s, e) in enumerate(itertools.pairwise(ends)):
                                    expected[s:e] = a[s:e] @ (b[g].T if form == "dgrad" else b[g])
                            error = rel(found, expected)
                            bits = np.array_equal(np.asarray(found), np.asarray(again))
                            limit = 2e-3 if out == jnp.float32 else 5e-3
                            if not error < limit or not bits:
                                failures += 1
                                wrong = ~np.isclose(
                                    np.asarray(found, np.float64),
                                    expected,
                                    rtol=0.05,
                                    atol=0.05 * np.abs(expected).max(),
                                )
                                where = np.argwhere(wrong)
                                print(
                                    f"FAIL {kind} {form} {rows}x{groups} {k}->{n} {out.__name__} {load}/{align}: "
                                    f"error {error:.2e} equal bits {bits}; wrong {len(where)} of {wrong.size}, first "
                                    f"{where[:2].tolist()} last {where[-1:].tolist()} bounds {ends[:9].tolist()}",
                                    flush=True,
                                )
                print(
                    f"{kind} {form} {rows} rows x {groups} groups {k}->{n} done, {failures} failures so far", flush=True
                )
    return failures


def timed(f, *args, seconds=0.3):
    """Median µs of chains of calls: time of N calls less that of N / 8, over their difference."""
    jax.block_until_ready(f(*args))
    begin = time.perf_counter()
    jax.block_until_ready(f(*args))
    once = time.perf_counter() - begin
    count = max(16, int(seconds / max(once, 2e-5)))

    def run(times):
        begin = time.perf_counter()
        for _ in range(times):
            out = f(*args)
        jax.block_until_ready(out)
        return time.perf_counter() - begin

    return float(np.median([(run(count) - run(count // 8)) / (count - count // 8) for _ in range(5)])) * 1e6


def torch_times(groups, rows, k, n, sizes):
    import torch

    offs = torch.tensor(np.cumsum(sizes), dtype=torch.int32, device="cuda")
    x, dy = (torch.randn(rows, w, device="cuda", dtype=torch.bfloat16) for w in (k, n))
    w = torch.randn(groups, k, n, device="cuda", dtype=torch.bfloat16)
    forms = {
        "forward": lambda: torch._grouped_mm(x, w, offs=offs),
        "dgrad": lambda: torch._grouped_mm(dy, w.transpose(1, 2), offs=offs),
        "wgrad": lambda: torch._grouped_mm(x.t(), dy, offs=offs),
    }
    result = {}
    for name, f in forms.items():
        for _ in range(5):
            f()
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        samples = []
        for _ in range(5):
            start.record()
            for _ in range(20):
                f()
            end.record()
            torch.cuda.synchronize()
            samples.append(start.elapsed_time(end) / 20 * 1e3)
        result[name] = float(np.median(samples))
    return result


def time_pairs():
    """The input gradient of gate and up: in one product, and in two whose float32 results are added."""
    for groups, rows, k, n in ((64, 262144, 1024, 2048), (8, 32768, 14336, 4096)):
        key = jax.random.split(jax.random.key(2), 4)
        dys = [jax.random.normal(key[i], (rows, k), jnp.bfloat16) for i in range(2)]
        ws = [jax.random.normal(key[2 + i], (groups, n, k), jnp.bfloat16) for i in range(2)]
        plain = list(zip(dys, ws, strict=True))
        fp8 = [(quantized(dy, "gradient", False), quantized(w, "kernel", True)) for dy, w in plain]
        common = {"rhs_contracting": "cols", "implementation": "native"}
        one = jax.jit(functools.partial(grouped_gemm_of_pairs, out_dtype=jnp.bfloat16, **common))

        @jax.jit
        def two(first, second, s, common=common):
            parts = [ops.grouped_gemm(*pair, s, out_dtype=jnp.float32, **common) for pair in (first, second)]
            return (parts[0] + parts[1]).astype(jnp.bfloat16)

        for load, sizes in list(loads(rows, groups, 128))[:2]:
            s, flops = jnp.asarray(sizes, jnp.int32), 4 * sum(sizes) * k * n
            for kind, pairs in (("fp8", fp8), ("bf16", plain)):
                error = rel(one(*pairs, s)[:4096].astype(jnp.float32), two(*pairs, s)[:4096].astype(jnp.float32))
                us, other = timed(one, *pairs, s), timed(two, *pairs, s)
                print(
                    f"{groups} groups {load}: {kind} pair {us:9.1f} us {flops / us / 1e6:7.0f} TFLOP/s; two products "
                    f"and their sum {other:9.1f} us, x {other / us:.2f}; apart by {error:.1e}",
                    flush=True,
                )


def times():
    time_pairs()
    for groups, rows, k, n in ((8, 32768, 4096, 14336), (128, 65536, 2048, 768)):
        key = jax.random.split(jax.random.key(1), 3)
        x, dy = (jax.random.normal(key[i], (rows, w)).astype(jnp.bfloat16) for i, w in enumerate((k, n)))
        w = jax.random.normal(key[2], (groups, k, n)).astype(jnp.bfloat16)
        x8, w8 = quantized(x, "activation", False), quantized(w, "kernel", True)
        dy8 = quantized(dy, "gradient", False)
        # The right operand of wgrad has square blocks of whatever role gives them.
        dys = dy8 if dy8.transposed_scaling == "block_128x128" else quantized(dy, "kernel", False)
        for load, sizes in list(loads(rows, groups, 128))[:3]:
            flops = 2 * sum(sizes) * k * n
            s = jnp.asarray(sizes, jnp.int32)
            g = functools.partial(ops.grouped_gemm, implementation="native", out_dtype=jnp.bfloat16)
            wgrad = jax.jit(functools.partial(g, lhs_contracting="rows"))
            main_grad = jnp.zeros((groups, k, n), jnp.float32)
            step = jax.jit(
                lambda m, a, b, s: ops.grouped_gemm(
                    a, b, s, lhs_contracting="rows", accumulator=m, implementation="native"
                ),
                donate_argnums=0,
            )
            try:
                torch_us = torch_times(groups, rows, k, n, sizes)
            except Exception as e:
                print("torch:", e)
                torch_us = {}
            dgrad = jax.jit(functools.partial(g, rhs_contracting="cols"))
            cases = {
                "fp8 forward": (jax.jit(g), x8, w8, s),
                "fp8 dgrad": (dgrad, dy8, w8, s),
                "fp8 wgrad": (wgrad, x8, dys, s),
                "bf16 forward": (jax.jit(g), x, w, s),
                "bf16 dgrad": (dgrad, dy, w, s),
                "bf16 wgrad": (wgrad, x, dy, s),
            }
            if groups == 8 and load == "balanced":
                cases["lax.ragged_dot forward"] = (jax.jit(lambda a, b, s: jax.lax.ragged_dot(a, b, s)), x, w, s)
            for name, (f, *args) in cases.items():
                us = timed(f, *args)
                other = torch_us.get(name.split()[-1])
                print(
                    f"{groups} groups {load}: {name:24s} {us:9.1f} us {flops / us / 1e6:7.0f} TFLOP/s"
                    + (f"  torch bf16 {other:9.1f} us, x {other / us:.2f}" if other else ""),
                    flush=True,
                )
            for name, a, b in (("fp8", x8, dys), ("bf16", x, dy)):
                m = jnp.zeros_like(main_grad)
                m = step(m, a, b, s)
                m.block_until_ready()
                begin = time.perf_counter()
                for _ in range(20):
                    m = step(m, a, b, s)
                m.block_until_ready()
                us = (time.perf_counter() - begin) / 20 * 1e6
                print(
                    f"{groups} groups {load}: {name} wgrad added to float32 {us:9.1f} us "
                    f"{flops / us / 1e6:7.0f} TFLOP/s",
                    flush=True,
                )


sys.exit(bool({"check": check, "pair": check_pairs, "time": times, "time_pair": time_pairs}[sys.argv[1]]()))
