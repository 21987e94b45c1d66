"""Products by kernels in functions of others: they are those of te_jax.ops, bit for bit, and nothing else is lost."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

from te_jax import ops
from te_jax.layers.kernel_products import KernelOptions, call_with_products
from te_jax.layers.linear import Options
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling
from te_jax.testing import relative_error

WAY_OUT = "leave it alone"
DELAYED = DelayedScaling(history_len=4)


def with_products(function, x, *kernels, recipe, scaling_state=None):
    names = [f"k{i}" for i in range(len(kernels))]
    options = dict.fromkeys(names, KernelOptions(Options(recipe, None, None), scaling_state))
    named = dict(zip(names, kernels, strict=True))
    return call_with_products(lambda *values: function(x, *values), named, options, "my.Class", WAY_OUT)


def dense(x, kernel, options):
    return ops.dense(x, kernel, **options)


# A function of x [4, 32] and kernels [3, 32, 48], and what it is by te_jax.ops with the options r.
FORMS = {
    "matmul": (lambda x, k: x @ k[0], lambda x, k, r: dense(x, k[0], r)),
    "cast": (
        lambda x, k: x.astype(jnp.bfloat16) @ k.astype(jnp.bfloat16)[0],
        lambda x, k, r: dense(x.astype(jnp.bfloat16), k[0], r),  # quantized from its own dtype
    ),
    "wide": (
        lambda x, k: jnp.dot(x.astype(jnp.bfloat16), k[0].astype(jnp.bfloat16), preferred_element_type=jnp.float32),
        lambda x, k, r: dense(x.astype(jnp.bfloat16).astype(jnp.float32), k[0], r),
    ),
    "scaled": (lambda x, k: x @ (0.5 * k[1] / 3.0), lambda x, k, r: dense(x, k[1] * 0.5 / 3.0, r)),
    "joined": (
        lambda x, k: x @ jnp.concatenate([k[0], k[2]], -1),
        lambda x, k, r: dense(x, jnp.concatenate([k[0], k[2]], -1), r),
    ),
    "two products": (lambda x, k: x @ k[0] + x @ k[1], lambda x, k, r: dense(x, k[0], r) + dense(x, k[1], r)),
    "transposed": (lambda x, k: x @ k.mT[1].T, lambda x, k, r: dense(x, k[1], r)),
    "kernel first": (
        lambda x, k: jnp.einsum("edf,td->fte", k, x),
        lambda x, k, r: ops.einsum("td,edf->fte", x, k, **r),
    ),
    "experts": (
        lambda x, k: jnp.einsum("etd,edf->etf", jnp.broadcast_to(x, (3, *x.shape)), k),
        lambda x, k, r: ops.einsum("etd,edf->etf", jnp.broadcast_to(x, (3, *x.shape)), k, **r),
    ),
    "jit": (lambda x, k: jax.jit(lambda k: x @ k[0])(k), lambda x, k, r: dense(x, k[0], r)),
    "checkpoint": (
        lambda x, k: jax.checkpoint(lambda x, k: jnp.sin(x @ k[0]))(x, k),
        lambda x, k, r: jnp.sin(dense(x, k[0], r)),
    ),
    "scan": (
        lambda x, k: lax.scan(lambda y, k: (y + jnp.sin(x @ k), None), x[:, :1] * jnp.ones((1, 48)), k)[0],
        lambda x, k, r: lax.scan(lambda y, k: (y + jnp.sin(dense(x, k, r)), None), x[:, :1] * jnp.ones((1, 48)), k)[0],
    ),
    "cond": (
        lambda x, k: lax.cond(x[0, 0] > 99, lambda k: x @ k[0], lambda k: x @ k[1], k),
        lambda x, k, r: dense(x, k[1], r),
    ),
}  # fmt: skip


def test_products_are_those_of_ops(rng):
    recipes = dict(zip(FORMS, itertools.cycle((CurrentScaling(), BlockScaling(), DELAYED))))
    x, k = (jax.device_put(rng.standard_normal(s, np.float32) / 4) for s in ((4, 32), (3, 32, 48)))

    @jax.jit
    def both(x, k):
        def run(function, recipe):
            state = recipe.init() if recipe == DELAYED else None
            y, vjp = jax.vjp(
                lambda x, k, state: function(x, k, {"recipe": recipe, "scaling_state": state}), x, k, state
            )
            return y, *vjp(jnp.cos(y))

        return {
            name: (
                run(lambda x, k, r, f=form: with_products(f, x, k, **r), recipes[name]),
                run(expected, recipes[name]),
                run(lambda x, k, r, f=form: f(x, k), None),
            )
            for name, (form, expected) in FORMS.items()
        }

    for name, (found, expected, exact) in both(x, k).items():
        equal = functools.partial(np.testing.assert_array_equal, strict=True, err_msg=name)
        jax.tree.map(equal, found, expected)
        assert 1e-3 < relative_error(found[0], exact[0]) < 0.1, name


@pytest.mark.parametrize("last", [False, True], ids=["in, out", "out, in"])
def test_ragged_dot_is_grouped_dense(rng, last):
    """Groups of any sizes, of rows that need not be a multiple of 16; rows of no group are zero."""
    sizes, rows = np.asarray([5, 0, 20], np.int32), 27
    x, k = (jax.device_put(rng.standard_normal(s, np.float32)) for s in ((rows, 32), (3, 32, 48)))
    stored = k.mT if last else k

    @jax.jit
    def step(x, stored):
        def multiply(x, k):
            return lax.ragged_dot(x.astype(jnp.bfloat16), (k.mT if last else k).astype(jnp.bfloat16), sizes)

        y, vjp = jax.vjp(lambda x, k: with_products(multiply, x, k, recipe=BlockScaling()), x, stored)
        return y, vjp(jnp.ones_like(y))

    y, (dx, dk) = step(x, stored)
    assert y.dtype == jnp.bfloat16
    dk = np.asarray(dk.mT if last else dk)
    parts, kernels = np.split(np.float64(x), np.cumsum(sizes)), np.float64(k)
    exact = [*map(np.matmul, parts, kernels), np.zeros((2, 48))]
    assert 1e-3 < relative_error(y, np.concatenate(exact)) < 0.06
    dy = [np.ones((size, 48)) for size in sizes]
    exact = [*(g @ kernel.T for g, kernel in zip(dy, kernels, strict=True)), np.zeros((2, 32))]
    assert relative_error(dx, np.concatenate(exact)) < 0.08
    assert relative_error(dk, np.stack([part.T @ g for part, g in zip(parts, dy, strict=False)])) < 0.08
    assert not np.any(dk[1])


def test_a_product_in_shard_map(rng, make_mesh):
    mesh = make_mesh({"data": AxisType.Auto})
    x, k = (jax.device_put(rng.standard_normal(s, np.float32)) for s in ((16, 32), (2, 32, 48)))

    def sharded(multiply):
        specs = {"in_specs": (jax.P("data"), jax.P()), "out_specs": jax.P("data"), "check_vma": False}
        return jax.shard_map(multiply, mesh=mesh, **specs)

    @jax.jit
    def both(x, k):
        found = with_products(sharded(lambda x, k: x @ k[1]), x, k, recipe=CurrentScaling())
        return found, sharded(lambda x, k: dense(x, k[1], {"recipe": CurrentScaling()}))(x, k)

    np.testing.assert_array_equal(*both(x, k))


def test_effects_without_results(rng):
    x, k = (jax.device_put(rng.standard_normal(s, np.float32)) for s in ((4, 32), (32, 48)))
    seen = []

    def function(x, k):
        y = x @ k
        jax.debug.callback(lambda total: seen.append(float(total)), y.sum())
        return y

    y = with_products(function, x, k, recipe=CurrentScaling())
    jax.effects_barrier()
    np.testing.assert_allclose(seen, [y.sum()], rtol=1e-6)


@jax.custom_vjp
def opaque(x, k):
    return x @ k[0]


opaque.defvjp(lambda x, k: (opaque(x, k), None), lambda _, dy: (dy, dy))

REFUSED = {
    "no product": (lambda x, k: x, "k0 is in no product in the __call__ of my.Class"),
    "a sum": (lambda x, k: (x @ k[0], jnp.sum(k)), "k0 is an operand of reduce_sum"),
    "a result": (lambda x, k: (x @ k[0], k.mT), "k0 is one of its results"),
    "a sum of kernels": (lambda x, k: x @ (k[0] + k[1]), "k0 is an operand of add"),
    "a kernel for each row": (lambda x, k: x @ (k[0] * k[0]), "k0 is an operand of mul"),
    "two kernels": (lambda x, k: x @ (k[0] @ k[1].T), "k0 are multiplied with each other"),
    "a function with a derivative of its own": (opaque, "k0 is an operand of custom_vjp_call"),
    "rounded": (lambda x, k: x @ k[0].astype(jnp.int8).astype(jnp.float32), "k0 is cast to int8"),
    "carried": (lambda x, k: lax.scan(lambda k, _: (k[::-1], x @ k[0]), k, None, 2), "k0 is one of the carried values"),
    "sizes": (lambda x, k: lax.ragged_dot(x, k[..., :20], jnp.full(3, 1)), "FP8 cannot take .*32 features in, 20 out"),
    "no contraction": (lambda x, k: jnp.einsum("td,edf->tedf", x, k), "no product of inputs and a kernel"),
    "groups of columns": (
        lambda x, k: lax.ragged_dot_general(
            x, k[0], np.full(2, 16, np.int32), lax.RaggedDotDimensionNumbers((((1,), (0,)), ((), ())), (1,), ())
        ),
        "k0 is in a ragged_dot of other dimensions",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_other_uses_are_refused(name):
    function, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"(?s){message}.*: {WAY_OUT}"):
        jax.eval_shape(
            lambda x, k: with_products(function, x, k, recipe=BlockScaling()), jnp.ones((4, 32)), jnp.ones((3, 32, 48))
        )


@pytest.mark.parametrize(
    ("recipes", "different"), [((CurrentScaling(), BlockScaling()), "different recipes"), ((DELAYED,) * 2, "states")]
)
def test_kernels_with_different_recipes_or_states_share_no_product(recipes, different):
    state = DELAYED.init() if DELAYED in recipes else None
    first, second = (KernelOptions(Options(recipe, None, None), state) for recipe in recipes)
    options = {"a": first, "b": second}
    x, kernels = np.ones((4, 32), np.float32), dict.fromkeys("ab", np.ones((32, 16), np.float32))

    def joined(a, b):
        return x @ jnp.concatenate([a, b], -1)

    with pytest.raises(ValueError, match=f"a and b have {different}.* and share a product"):
        jax.eval_shape(lambda k: call_with_products(joined, k, options, "C", WAY_OUT), kernels)


def test_a_ragged_dot_has_no_state():
    def multiply(x, k):
        return lax.ragged_dot(x, k, np.asarray([1, 3, 0]))

    with pytest.raises(ValueError, match="k0 is in a ragged_dot, which takes no recipe with state"):
        jax.eval_shape(
            lambda x, k: with_products(multiply, x, k, recipe=DELAYED, scaling_state=DELAYED.init()),
            jnp.ones((4, 32)),
            jnp.ones((3, 32, 48)),
        )
