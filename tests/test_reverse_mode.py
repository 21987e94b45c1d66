"""Operations whose derivatives are taken in reverse mode only say so in forward mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from te_jax import ops
from te_jax._core.reverse_mode import reverse_mode_only
from te_jax.parallel import all_gather_matmul, matmul_reduce_scatter
from te_jax.recipe import CurrentScaling

RECIPE = CurrentScaling()
KERNEL = jnp.ones((32, 32))
LABELS = jnp.zeros(32, jnp.int32)

OPERATIONS = {
    "te_jax.ops.softmax_cross_entropy": (
        lambda x: ops.softmax_cross_entropy(x, LABELS, implementation="native"),
        "implementation='reference'",
    ),
    "te_jax.ops.dense": (lambda x: ops.dense(x, KERNEL, recipe=RECIPE), "recipe=None"),
    "te_jax.ops.dense with a recipe or a wgrad_accumulator": (
        lambda x: ops.dense(x, KERNEL, wgrad_accumulator=KERNEL),
        "no wgrad_accumulator",
    ),
    "te_gemm": (lambda x: ops.gemm(x, KERNEL, implementation="native"), "implementation='reference'"),
    "quantize": (lambda x: ops.quantize(x, RECIPE.quantization("kernel")).dequantize(), "jax.lax.stop_gradient"),
}


def forward_derivatives(fn, x):
    yield lambda: jax.jvp(fn, (x,), (x,))
    yield lambda: jax.jvp(jax.jit(fn), (x,), (x,))
    yield lambda: jax.jit(lambda x: jax.jvp(fn, (x,), (x,)))(x)
    yield lambda: jax.jacfwd(fn)(x)
    yield lambda: jax.jvp(jax.checkpoint(fn), (x,), (x,))


@pytest.mark.parametrize("name", OPERATIONS)
def test_forward_mode_names_the_operation_and_the_way_out(name, native_kernels):
    fn, way_out = OPERATIONS[name]
    for derivative in forward_derivatives(fn, jnp.ones((32, 32))):
        with pytest.raises(NotImplementedError, match=name) as raised:
            derivative()
        assert way_out in str(raised.value)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if "ops" in name])
def test_linearized_functions_refuse_tangents_and_transpose(name, native_kernels):
    fn, _ = OPERATIONS[name]
    x = jnp.ones((32, 32))
    y, linear = jax.linearize(fn, x)
    with pytest.raises(NotImplementedError, match=name):
        linear(x)
    (gradient,) = jax.linear_transpose(linear, x)(y)
    np.testing.assert_array_equal(gradient, jax.vjp(fn, x)[1](y)[0])


@pytest.mark.parametrize("product", [all_gather_matmul, matmul_reduce_scatter])
@pytest.mark.parametrize("recipe", [None, RECIPE])
def test_collective_products(recipe, product, make_mesh):
    mesh = make_mesh({"tp": AxisType.Auto})
    rows, columns = P("tp"), P(None, "tp")
    in_specs, out_specs = ((rows, columns), columns) if product is all_gather_matmul else ((columns, rows), rows)
    layer = functools.partial(product, axis_name="tp", recipe=recipe)
    mapped = jax.shard_map(layer, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    x = jnp.ones((16 * mesh.shape["tp"], 16 * mesh.shape["tp"]))
    with pytest.raises(NotImplementedError, match=rf"te_jax.parallel.{product.__name__} has .* jnp.matmul"):
        jax.jvp(lambda x: mapped(x, x), (x,), (x,))


# Reverse mode: nothing is left of it


def identity(x, *others):
    return reverse_mode_only((x, *others), "refused")[0]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint, jax.vmap])
def test_reverse_mode_passes_through(wrap, rng):
    x = jax.device_put(np.asarray(rng.standard_normal(5), jnp.float32))

    def loss(x):
        return jnp.sum(jnp.sin(wrap(lambda x: identity(x) ** 2)(x)))

    expected = jax.grad(lambda x: jnp.sum(jnp.sin(x**2)))
    for transform in (lambda f: f, jax.jit):
        np.testing.assert_allclose(transform(jax.grad(loss))(x), expected(x), rtol=1e-6)
        second = transform(jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2)))(x)
        np.testing.assert_allclose(second, jax.grad(lambda x: jnp.sum(expected(x) ** 2))(x), rtol=1e-5)


def test_scan(rng):
    xs, w = jax.device_put(np.asarray(rng.standard_normal((3, 5)), jnp.float32)), jnp.ones(5)

    def loss(w, through):
        return jax.lax.scan(lambda c, x: (through(c * w) + x, None), jnp.zeros(5), xs)[0].sum()

    np.testing.assert_array_equal(jax.grad(loss)(w, identity), jax.grad(loss)(w, lambda x: x))
    with pytest.raises(NotImplementedError, match="refused"):
        jax.jvp(lambda w: loss(w, identity), (w,), (w,))


def test_operands_that_are_kept_are_not_copied():
    """A copy of each would be a residual of a jitted layer, or of every step of a scan."""
    x, w = jnp.ones((4, 4)), jnp.ones((4, 4))

    @jax.jit
    def layer(x, w):
        x, w = reverse_mode_only((x, w), "refused")
        return jnp.sin(x) @ w

    for function, primals in ((layer, (x, w)), (lambda x: layer(x, w), (x,))):
        kept = jax.tree.leaves(jax.vjp(function, *primals)[1])
        assert w.unsafe_buffer_pointer() in {leaf.unsafe_buffer_pointer() for leaf in kept}


def test_without_derivatives_it_is_no_operation():
    x = jnp.ones(4)
    assert identity(x) is x
    assert "te_" not in jax.jit(identity).lower(x).as_text()
    assert jax.jit(jax.vmap(identity, in_axes=(0, None)))(x, x).shape == (4,)
