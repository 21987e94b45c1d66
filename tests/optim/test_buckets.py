"""Small leaves in a few arrays: what comes out is what went in, also for gradients, and leaves do not share blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optim_cases import assert_same, normal_like

from te_jax import optim

SHAPES = {"scalar": (), "odd": (3, 7), "empty": (0, 4), "block": (128,), "long": (5, 100), "large": (40, 40)}


def draw(rng, dtype):
    return normal_like(rng, {name: np.zeros(shape, dtype) for name, shape in SHAPES.items()})


@pytest.fixture
def tree(rng):
    return {
        **{dtype: draw(rng, dtype) for dtype in ("float32", "bfloat16")},
        "keys": jax.random.split(jax.random.key(1)),
        "steps": jax.device_put(np.arange(3)),
    }


@functools.partial(jax.jit, static_argnums=0)
def there_and_back(plan, tree):
    packed = plan.pack(tree)
    return packed, plan.unpack(packed)


def without_keys(tree):
    return jax.tree.map(lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree)


@pytest.mark.parametrize("largest", [0, 21, 10**6])
def test_there_and_back(largest, tree):
    """Integers and keys stay what they are. A plan may be made of shapes, and be a static argument."""
    buckets = optim.Buckets.of(jax.eval_shape(lambda: tree), largest=largest)
    assert (buckets, hash(buckets)) == (optim.Buckets.of(tree, largest=largest), hash(buckets))
    packed, again = there_and_back(buckets, tree)
    assert_same(without_keys(again), without_keys(tree))
    alone = [
        leaf for leaf in jax.tree.leaves(tree) if leaf.size > largest or not jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    assert_same(without_keys(list(packed.leaves)), without_keys(alone))
    assert all(bucket.ndim == 1 and bucket.size % 128 == 0 for bucket in packed.buckets.values())


def test_a_bucket_for_each_dtype_and_label(tree):
    labels = {"float32": "decayed", "bfloat16": {name: name[0] for name in SHAPES}, "steps": "decayed", "keys": "keys"}
    packed = jax.eval_shape(optim.Buckets.of(tree, labels=labels).pack, tree)
    assert set(packed.buckets) == {"decayed/float32", *(f"{name[0]}/bfloat16" for name in SHAPES)}


def test_other_dtypes_than_planned(rng):
    tree, wide = draw(rng, "bfloat16"), draw(rng, "float32")
    buckets = optim.Buckets.of(tree)
    assert_same(there_and_back(buckets, wide)[1], wide)
    mixed = {**wide, "odd": tree["odd"]}
    assert_same(there_and_back(buckets, mixed)[1], {**wide, "odd": np.asarray(tree["odd"]).astype(np.float32)})


def test_gradients_come_packed(rng):
    """And second derivatives come through."""
    tree, weights = draw(rng, "float32"), draw(rng, "float32")
    buckets = optim.Buckets.of(tree, largest=600)

    def loss(tree):
        return sum(jnp.sum(jnp.sin(tree[name]) * weights[name]) for name in SHAPES)

    @jax.jit
    def derivatives(tree):
        packed = buckets.pack(tree)
        of_packed = jax.jvp(jax.grad(lambda packed: loss(buckets.unpack(packed))), (packed,), (packed,))
        of_tree = jax.jvp(jax.grad(loss), (tree,), (tree,))
        return of_packed, [buckets.unpack(of) for of in of_packed], list(of_tree)

    (gradient, _), actual, expected = derivatives(tree)
    assert isinstance(gradient, optim.Packed)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6), actual, expected)


def test_integers_have_no_gradient():
    tree = {"kernel": jnp.ones(3), "steps": jnp.arange(3)}
    buckets = optim.Buckets.of(tree)

    def loss(packed):
        return jnp.sum(buckets.unpack(packed)["kernel"] ** 2)

    gradient = jax.grad(loss, allow_int=True)(buckets.pack(tree))
    np.testing.assert_array_equal(buckets.unpack(gradient)["kernel"], [2, 2, 2])


@pytest.mark.parametrize("nu_dtype", ["float32", "float8_e4m3fn"])
def test_a_step_is_that_of_the_leaves(nu_dtype, rng):
    """With blocks too: the bits of leaves of one block show that neighbours, however large, have no part in it."""
    params, gradients = draw(rng, "float32"), draw(rng, "float32")
    gradients["odd"] = 1e4 * gradients["odd"]
    buckets = optim.Buckets.of(params)
    optimizer = optim.adamw(1e-2, weight_decay=0.1, nu_dtype=nu_dtype, stochastic_rounding=False)

    @jax.jit
    def steps(params, gradients):
        plain, state = optimizer.update(gradients, optimizer.init(params), params)
        packed = buckets.pack(params)
        updates, packed_state = optimizer.update(buckets.pack(gradients), optimizer.init(packed), packed)
        return (buckets.unpack(updates), buckets.unpack(packed_state[0].nu)), (plain, state[0].nu)

    (updates, actual), (plain, wanted) = steps(params, gradients)
    if nu_dtype != "float32":
        assert_same(
            {name: actual[name] for name in ("scalar", "block")}, {name: wanted[name] for name in ("scalar", "block")}
        )
        actual = wanted = ()
    for one, other in zip(*map(jax.tree.leaves, ((updates, actual), (plain, wanted))), strict=True):
        np.testing.assert_array_max_ulp(np.asarray(one), np.asarray(other), 10)


def test_few_arrays_and_few_operations():
    tree = {f"leaf {i}": jax.ShapeDtypeStruct((8, 8), jnp.float32) for i in range(300)}
    optimizer = optim.adamw(1e-3, mu_dtype="bfloat16", nu_dtype="bfloat16")
    packed = jax.eval_shape(optim.Buckets.of(tree).pack, tree)

    def step(gradients, params, state):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(optimizer.init, packed)
    assert len(jax.tree.leaves((packed, state))) <= 5
    assert len(jax.jit(step).lower(packed, packed, state).as_text().splitlines()) < 300


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"m": "x", "n": None}, "labels must have the structure of tree, or the beginning of it"),
        ({"m": 0, "n": 1}, "labels has 0 at a leaf; it must be a string"),
    ],
)
def test_labels_of_no_use(labels, message):
    with pytest.raises(ValueError, match=message):
        optim.Buckets.of({"m": np.ones(2), "n": np.ones(3)}, labels=labels)


def test_what_does_not_fit_is_refused():
    """Of leaves that another plan packed, those of the sizes of this plan would be cut out at wrong places."""
    params = {"first": np.ones(300, np.float32), "second": np.ones(4, np.float32)}
    buckets, longer = optim.Buckets.of(params), {**params, "first": np.ones(400, np.float32)}
    with pytest.raises(ValueError, match="structure"):
        buckets.pack({"other": params["first"]})
    with pytest.raises(ValueError, match=r"shape \(400,\) where the buckets were planned for \(300,\)"):
        buckets.pack(longer)
    for planned, other, largest in ((2**16, params, 100), (2**16, longer, 1000), (100, longer, 100)):
        buckets = optim.Buckets.of(params, largest=planned)
        packed = jax.eval_shape(optim.Buckets.of(other, largest=largest).pack, other)
        with pytest.raises(ValueError, match=r"packed has buckets of shapes .* with the plan that packed it"):
            jax.eval_shape(buckets.unpack, packed)
