"""Linear layers of experts against a loop over experts. tests/linear has what all linear layers do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.gemm_oracle import random_array, wide
from parameters import in_turns

from te_jax import ops
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from te_jax.testing import assert_close

pytestmark = pytest.mark.skipif(
    jax.default_backend() == "gpu", reason="float32, which has no kernel on a GPU: see tests/gpu"
)

ROWS, IN, OUT, EXPERTS = 512, 192, 128, 3
SIZES = {"aligned": [128, 0, 256], "uneven": [37, 100, 250], "all": [0, 512, 0]}
RECIPES = {"none": None, "block": BlockScaling(), "row": RowwiseScaling(), "current": CurrentScaling()}
FORWARD, GRADIENT = 0.055, 0.085  # what FP8 costs on normal data; see tests/ops/dense_oracle.py


def draw(rng, dtype="float32", rows=ROWS):
    x, dy = random_array(rng, (rows, IN), dtype), random_array(rng, (rows, OUT), dtype)
    return x, random_array(rng, (EXPERTS, IN, OUT), dtype), random_array(rng, (EXPERTS, OUT), dtype), dy


def expected(x, kernel, bias, dy, sizes):
    """y and gradients in float64."""
    x, kernel, bias, dy = map(wide, (x, kernel, bias, dy))
    y, dx = np.zeros((len(x), OUT)), np.zeros_like(x)
    dkernel, dbias = np.zeros_like(kernel), np.zeros_like(bias)
    begin = 0
    for e, size in enumerate(sizes):
        rows = slice(begin, begin := begin + size)
        y[rows] = x[rows] @ kernel[e] + bias[e]
        dx[rows] = dy[rows] @ kernel[e].T
        dkernel[e], dbias[e] = x[rows].T @ dy[rows], dy[rows].sum(axis=0)
    return y, (dx, dkernel, dbias)


@functools.cache
def step_of(**options):
    @jax.jit
    def step(x, kernel, bias, dy, sizes):
        y, vjp = jax.vjp(lambda *a: ops.grouped_dense(*a[:2], sizes, a[2], **options), x, kernel, bias)
        return y, vjp(dy)

    return step


@pytest.mark.parametrize(
    ("recipe", "implementation", "dtype", "contracting"),
    [*in_turns(list(RECIPES), ["native"], ["float32"], ["first"]), ("none", "native", "bfloat16", "last")],
)
def test_values_and_gradients(rng, recipe, implementation, dtype, contracting):
    step = step_of(recipe=RECIPES[recipe], implementation=implementation, kernel_contracting=contracting)
    fp8 = recipe != "none"
    for sizes in SIZES.values():
        x, kernel, bias, dy = map(np.asarray, draw(rng, dtype))
        wanted, wanted_gradients = expected(x, kernel, bias, dy, sizes)
        if contracting == "last":
            kernel = np.ascontiguousarray(kernel.mT)
        y, (dx, dkernel, dbias) = step(x, kernel, bias, dy, np.int32(sizes))
        dkernel = np.asarray(dkernel) if contracting == "first" else np.asarray(dkernel).mT
        assert_close(y, wanted, dtype=dtype, tolerance=FORWARD if fp8 else None)
        exact = not fp8, not fp8, True
        for gradient, other, same in zip((dx, dkernel, dbias), wanted_gradients, exact, strict=True):
            assert_close(gradient, other, dtype=dtype, tolerance=None if same else GRADIENT)
        for e, size in enumerate(sizes):
            assert size or not dkernel[e].any(), "an expert without rows has a gradient"
    assert step._cache_size() == 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_of_no_expert_are_never_read(rng, recipe):
    x, kernel, bias, dy = draw(rng)
    step = step_of(recipe=RECIPES[recipe], implementation="native", kernel_contracting="first")
    sizes = np.int32(SIZES["uneven"])
    outside = np.arange(ROWS)[:, None] >= sum(SIZES["uneven"])
    found, clean = (
        step(np.where(outside, value, x), kernel, bias, np.where(outside, value, dy), sizes)
        for value in (np.float32(np.nan), np.float32(0))
    )
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(one, other)


X, KERNEL, COUNTS = np.ones((32, 16), np.float32), np.ones((2, 16, 32), np.float32), np.int32([16, 16])
X8 = ops.quantize(X, CurrentScaling().quantization("activation"))
REFUSED = {
    "x": (lambda: ops.grouped_dense(X[None], KERNEL, COUNTS), r"x has shape \(1, 32, 16\)"),
    "kernel": (lambda: ops.grouped_dense(X, KERNEL.swapaxes(1, 2), COUNTS),
     r"kernel has shape .*it must be \(2, 16, out\)"),
    "transposed kernel": (lambda: ops.grouped_dense(X, KERNEL, COUNTS, kernel_contracting="last"),
     r"kernel has shape .*it must be \(2, out, 16\)"),
    "kernel_contracting": (lambda: ops.grouped_dense(X, KERNEL, COUNTS, kernel_contracting="rows"),
     "kernel_contracting is 'rows'; it must be 'first' or 'last'"),
    "sizes": (lambda: ops.grouped_dense(X, KERNEL, COUNTS.astype(float)), "group_sizes has shape"),
    "dtype": (lambda: ops.grouped_dense(X, KERNEL.astype(jnp.int8), COUNTS), "kernel has dtype int8; it must be"),
    "bias": (lambda: ops.grouped_dense(X, KERNEL, COUNTS, jnp.ones(32)), r"bias has shape \(32,\)"),
    "of several": (lambda: ops.grouped_dense(X, (KERNEL, KERNEL[:, :8]), COUNTS),
     r"kernel\[1\] has shape \(2, 8, 32\)"),
    "x in FP8 without a recipe": (lambda: ops.grouped_dense(X8, KERNEL, COUNTS),
     "recipe is None, but x is a Quantized"),
    "x in FP8 by another recipe": (lambda: ops.grouped_dense(X8, KERNEL, COUNTS, recipe=BlockScaling()),
     "x has 'tensor' and 'tensor' scaling, but recipe is BlockScaling"),
    "none": (lambda: ops.grouped_dense(X, (), COUNTS), "kernel is an empty tuple"),
    "rows": (lambda: ops.grouped_dense(X[:31], KERNEL, COUNTS, recipe=BlockScaling()), "x has 31 rows"),
    "out": (lambda: ops.grouped_dense(X, KERNEL[..., :8], COUNTS, recipe=BlockScaling()), "kernel has 8 values of"),
    "delayed": (lambda: ops.grouped_dense(X, KERNEL, COUNTS, recipe=DelayedScaling()), "scaling_state is None"),
    "state": (lambda: ops.grouped_dense(X, KERNEL, COUNTS, recipe=BlockScaling(),
     scaling_state=DelayedScaling().init()), "scaling_state is given, but recipe is BlockScaling"),
    "recipe": (lambda: ops.grouped_dense(X, KERNEL, COUNTS, recipe="fp8"), "recipe is 'fp8'; it must be a Recipe"),
    "accumulator": (lambda: ops.grouped_dense(X, KERNEL, COUNTS, wgrad_accumulator=jnp.ones((2, 16))),
     r"wgrad_accumulator has shape \(2, 16\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call)
