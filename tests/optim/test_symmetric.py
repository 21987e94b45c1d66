"""Products whose results are symmetric, against NumPy in float64."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax import native
from te_jax.optim import _orthogonal, _symmetric
from te_jax.testing import relative_error

# (m, k). On a GPU: one tile of 128 rows and several, more than a band of eight tiles, and k of one step of 64 and more.
SHAPES = ((128, 64), (256, 8), (384, 456), (1152, 128)) if jax.default_backend() == "gpu" else ((128, 64), (40, 24))


def drawn(rng, *shape, dtype="float16"):
    return jnp.asarray(rng.standard_normal(shape).astype(np.float32)).astype(dtype)


def commuting(rng, m, dtype):
    """Two symmetric matrices that commute: polynomials of one."""
    half = rng.standard_normal((m, m)) / np.sqrt(m)
    x = (half + half.T) / 2
    return (jnp.asarray(each.astype(np.float32)).astype(dtype) for each in (x, x @ x - x))


def call(a, b, c=None, *, summed_first=False, alpha=1.0, beta=0.0, diagonal=0.0):
    m = a.shape[2 if summed_first else 1]
    operands = {"a": a, "b": b} | ({} if c is None else {"c": c})
    attributes = {"summed_first": summed_first, "alpha": alpha, "beta": beta, "diagonal": diagonal}
    return native.call(
        "te_symmetric_gemm", {"d": jax.ShapeDtypeStruct((len(a), m, m), a.dtype)}, operands, **attributes
    )


def exact(a, b, c=None, *, summed_first=False, alpha=1.0, beta=0.0, diagonal=0.0):
    """The lower triangle and its mirror, in float64."""
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    d = alpha * np.einsum("ikm,ikn->imn" if summed_first else "imk,ink->imn", a, b)
    d += (0 if c is None else beta * np.asarray(c, np.float64)) + diagonal * np.eye(d.shape[1])
    return np.tril(d) + np.swapaxes(np.tril(d, -1), 1, 2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("summed_first", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape, summed_first, dtype, native_kernels, rng):
    m, k = shape
    x = drawn(rng, 3, *((k, m) if summed_first else (m, k)), dtype=dtype)
    c = drawn(rng, 3, m, m, dtype=dtype)
    c = jnp.tril(c) + jnp.swapaxes(jnp.tril(c, -1), 1, 2)
    for others in ({}, {"c": c, "alpha": 2.0315, "beta": -4.775, "diagonal": 3.4445}):
        found = jax.jit(functools.partial(call, summed_first=summed_first, **others))(x, x)[0]
        wanted = exact(x, x, summed_first=summed_first, **others)
        np.testing.assert_array_equal(found, jnp.swapaxes(found, 1, 2))
        assert relative_error(found, wanted) < {"float16": 4e-4, "bfloat16": 3e-3}[dtype]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_matrices_that_commute(dtype, native_kernels, rng):
    """The upper triangle is that of the lower one, where rounding makes them differ."""
    a, b = (x[None] for x in commuting(rng, 256, dtype))
    (found,) = call(a, b)
    assert relative_error(found, exact(a, b)) < {"float16": 4e-4, "bfloat16": 3e-3}[dtype]
    np.testing.assert_array_equal(found, jnp.swapaxes(found, 1, 2))


def test_functions_are_those_of_xla(native_kernels, rng):
    x = drawn(rng, 128, 256) / 16
    for over_rows, operand in ((False, x), (True, x.T)):
        of_each = (
            _symmetric.symmetric_gemm(operand, operand, over_rows=over_rows, implementation=name)
            for name in ("native", "reference")
        )
        assert relative_error(*of_each) < 5e-4
    gram = _symmetric.symmetric_gemm(x, x, implementation="native")
    gram = (gram / jnp.linalg.norm(gram.astype(jnp.float32)).astype(jnp.float16)).astype(jnp.float16)
    of_each = (_symmetric.polynomial(gram, _orthogonal.MUON[0], name) for name in ("native", "reference"))
    assert relative_error(*of_each) < 5e-4


def test_derivatives_are_those_of_xla(native_kernels, rng):
    x, direction = (drawn(rng, 128, 256) / 16 for _ in range(2))
    of_each = []
    for name in ("native", "reference"):
        function = functools.partial(_orthogonal.orthogonalize, coefficients=_orthogonal.MUON[:2], implementation=name)
        of_each.append(
            jax.jit(lambda x, direction, function=function: jax.jvp(function, (x,), (direction,))[1])(x, direction)
        )
    assert relative_error(*of_each) < 5e-3


@pytest.mark.parametrize("shape", [(128, 128), (128, 384), (384, 128)], ids=str)
def test_orthogonal_factors(shape, native_kernels, rng):
    """Near those of float64, with singular values from 0.01 to 1."""
    left, _, right = np.linalg.svd(rng.standard_normal(shape), full_matrices=False)
    values = np.geomspace(1, 0.01, min(shape))
    x = jnp.asarray((left * values @ right).astype(np.float16))
    found = jax.jit(functools.partial(_orthogonal.orthogonalize, implementation="native"))(x)
    singular = np.linalg.svd(np.asarray(found, np.float64), compute_uv=False)
    assert 0.65 < singular.min() < singular.max() < 1.25
    wanted = jax.jit(functools.partial(_orthogonal.orthogonalize, implementation="reference"))(x)
    assert relative_error(found, wanted) < 0.01


def test_a_gpu_computes_the_lower_triangle_where_that_is_faster(report_gpus):
    """Five iterations in Gram form have 16 symmetric products, and two others."""
    count = {}
    for capability, shape in (
        ("9.0", (4096, 14336)),
        ("9.0", (14336, 4096)),
        ("9.0", (1024, 4096)),
        ("8.0", (4096,) * 2),
    ):
        report_gpus(capability)
        text = jax.jit(_orthogonal.orthogonalize).lower(jax.ShapeDtypeStruct(shape, jnp.float16)).as_text()
        count[capability, shape] = len(re.findall(r"custom_call @te_symmetric_gemm", text)), text.count("dot_general")
    assert list(count.values()) == [(16, 2), (16, 2), (0, 18), (0, 15)]


D = jax.ShapeDtypeStruct((1, 128, 128), jnp.float16)
A = jnp.ones((1, 128, 64), jnp.float16)


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ({"a": A, "b": A[:, :64]}, "b is F16[1,64,64]; it must have a's shape"),
        ({"a": A[:, :64], "b": A[:, :64]}, "a is F16[1,64,64]; it must have d's count and m"),
        ({"a": A[0], "b": A}, "a is F16[128,64]; it must be a stack [count, m, k], or [count, k, m] with summed_first"),
        ({"a": A, "b": A.astype(jnp.bfloat16)}, "b is BF16[1,128,64]; it must be of type F16"),
        ({"a": A, "b": A, "c": A}, "c is F16[1,128,64]; it must have 16384 elements"),
        ({"a": A[..., :0], "b": A[..., :0]}, "a is F16[1,128,0]; it must have values to sum over"),
    ],
)
def test_operands_that_do_not_fit_are_refused(operands, message, native_kernels):
    attributes = {"summed_first": False, "alpha": 1.0, "beta": 1.0, "diagonal": 0.0}
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(f"te_symmetric_gemm: {message}")):
        native.call("te_symmetric_gemm", {"d": D}, operands, **attributes)[0].block_until_ready()
