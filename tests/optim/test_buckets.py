"""Small leaves in a few arrays: what comes out is what went in, also for gradients, and leaves do not share blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from te_jax import optim

SHAPES = {"scalar": (), "odd": (3, 7), "empty": (0, 4), "block": (128,), "long": (5, 100), "large": (40, 40)}


def draw(rng, dtypes=("float32", "bfloat16")):
    tree = {
        dtype: {
            name: jax.device_put(np.asarray(rng.standard_normal(shape), jnp.dtype(dtype)))
            for name, shape in SHAPES.items()
        }
        for dtype in dtypes
    }
    return {**tree, "steps": jnp.arange(3)}


@pytest.fixture
def tree(rng):
    return draw(rng)


def same_bits(a, b):
    return all(
        x.dtype == y.dtype and x.shape == y.shape and np.array_equal(np.asarray(x), np.asarray(y))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.parametrize("largest", [0, 21, 1000, 10**6])
def test_there_and_back(largest, tree):
    buckets = optim.Buckets.of(tree, largest=largest)
    packed = buckets.pack(tree)
    assert same_bits(buckets.unpack(packed), tree)
    alone = [leaf for leaf in jax.tree.leaves(tree) if leaf.size > largest or leaf.dtype == jnp.int32]
    assert same_bits(list(packed.leaves), alone)
    assert all(bucket.ndim == 1 and bucket.size % 128 == 0 for bucket in packed.buckets.values())


def test_a_bucket_for_each_dtype_and_label(tree):
    labels = {"float32": "decayed", "bfloat16": {name: name[0] for name in SHAPES}, "steps": "decayed"}
    packed = optim.Buckets.of(tree, labels=labels).pack(tree)
    assert set(packed.buckets) == {"decayed/float32", *(f"{name[0]}/bfloat16" for name in SHAPES)}


def test_planned_from_shapes_and_static_under_jit(tree):
    buckets = optim.Buckets.of(jax.eval_shape(lambda: tree))
    assert buckets == optim.Buckets.of(tree)
    assert hash(buckets) == hash(optim.Buckets.of(tree))
    again = jax.jit(lambda plan, x: plan.unpack(plan.pack(x)), static_argnums=0)(buckets, tree)
    assert same_bits(again, tree)


def test_other_dtypes_than_planned(rng):
    tree = draw(rng, ["bfloat16"])["bfloat16"]
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) + 1e-3, tree)
    buckets = optim.Buckets.of(tree)
    assert same_bits(buckets.unpack(buckets.pack(wide)), wide)
    mixed = {**wide, "odd": tree["odd"]}
    with jax.numpy_dtype_promotion("strict"):
        packed = buckets.pack(mixed)
    assert same_bits(buckets.unpack(packed), {**wide, "odd": tree["odd"].astype(jnp.float32)})


def test_gradients_come_packed(rng):
    tree, weights = draw(rng, ["float32"])["float32"], draw(rng, ["float32"])["float32"]
    buckets = optim.Buckets.of(tree, largest=600)

    def loss(tree):
        return sum(jnp.sum(jnp.sin(x) * w) for x, w in zip(*map(jax.tree.leaves, (tree, weights)), strict=True))

    packed = jax.jit(jax.grad(lambda packed: loss(buckets.unpack(packed))))(buckets.pack(tree))
    expected = jax.jit(jax.grad(loss))(tree)
    assert isinstance(packed, optim.Packed)
    for actual, wanted in zip(*map(jax.tree.leaves, (buckets.unpack(packed), expected)), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-6)


def test_second_derivatives():
    tree = {"bias": jnp.asarray([1.0, 2.0, 3.0]), "scale": jnp.float32(4)}
    buckets = optim.Buckets.of(tree)

    def loss(tree):
        return jnp.sum(tree["scale"] * tree["bias"] ** 3)

    def product(loss, x):
        return jax.jvp(jax.grad(loss), (x,), (x,))[1]

    found = buckets.unpack(product(lambda packed: loss(buckets.unpack(packed)), buckets.pack(tree)))
    assert same_bits(found, product(loss, tree))


def test_integers_have_no_gradient(tree):
    buckets = optim.Buckets.of(tree)

    def loss(packed):
        return jnp.sum(buckets.unpack(packed)["float32"]["odd"] ** 2)

    gradient = jax.grad(loss, allow_int=True)(buckets.pack(tree))
    assert np.array_equal(buckets.unpack(gradient)["float32"]["odd"], 2 * tree["float32"]["odd"])


def test_random_keys_stay_what_they_are(tree):
    tree["keys"] = jax.random.split(jax.random.key(1))
    buckets = optim.Buckets.of(tree)
    packed = buckets.pack(tree)
    assert set(packed.buckets) == {"float32", "bfloat16"}
    assert len(packed.leaves) == 2
    keys = buckets.unpack(packed)["keys"]
    assert np.array_equal(jax.random.key_data(keys), jax.random.key_data(tree["keys"]))


@pytest.mark.parametrize("nu_dtype", ["float32", "float8_e4m3fn"])
def test_a_step_is_that_of_the_leaves(nu_dtype, rng):
    """With blocks too: the bits of leaves of one block show that neighbours, however large, have no part in it."""
    params, gradients = (draw(rng, ["float32"])["float32"] for _ in range(2))
    gradients["odd"] = 1e4 * gradients["odd"]
    buckets = optim.Buckets.of(params)
    optimizer = optim.adamw(1e-2, weight_decay=0.1, nu_dtype=nu_dtype, stochastic_rounding=False)
    plain, state = jax.jit(optimizer.update)(gradients, optimizer.init(params), params)
    packed = buckets.pack(params)
    updates, packed_state = jax.jit(optimizer.update)(buckets.pack(gradients), optimizer.init(packed), packed)
    for actual, wanted in zip(*map(jax.tree.leaves, (buckets.unpack(updates), plain)), strict=True):
        np.testing.assert_array_max_ulp(np.asarray(actual), np.asarray(wanted), 2)
    actual, wanted = buckets.unpack(packed_state[0].nu), state[0].nu
    for name in SHAPES if nu_dtype == "float32" else ("scalar", "block"):
        assert same_bits(actual[name], wanted[name]), name


def test_few_arrays_and_few_operations():
    tree = {f"leaf {i}": jnp.full((8, 8), i, jnp.float32) for i in range(300)}
    optimizer = optim.adamw(1e-3, mu_dtype="bfloat16", nu_dtype="bfloat16")
    packed = optim.Buckets.of(tree).pack(tree)

    def step(gradients, params, state):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(packed)
    assert len(jax.tree.leaves((packed, state))) <= 5
    assert len(jax.jit(step).lower(packed, packed, state).as_text().splitlines()) < 300


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"m": "x", "q": "y"}, "labels must have the structure of tree, or the beginning of it"),
        ({"m": "x", "n": None}, "labels must have the structure of tree, or the beginning of it"),
        ({"m": 0, "n": 1}, "labels has 0 at a leaf; it must be a string"),
    ],
)
def test_labels_of_no_use(labels, message):
    with pytest.raises(ValueError, match=message):
        optim.Buckets.of({"m": jnp.ones(2), "n": jnp.ones(3)}, labels=labels)


def test_what_does_not_fit_is_refused(tree):
    buckets = optim.Buckets.of(tree)
    with pytest.raises(ValueError, match="structure"):
        buckets.pack({"other": tree["steps"]})
    with pytest.raises(ValueError, match=r"shape \(3, 8\) where the buckets were planned for \(3, 7\)"):
        buckets.pack({**tree, "float32": {**tree["float32"], "odd": jnp.zeros((3, 8))}})


def test_what_another_plan_packed_is_refused():
    """Leaves of the sizes of this plan would be cut out of it at wrong places."""
    params = {"first": jnp.ones(300), "second": jnp.ones(4)}
    longer = {**params, "first": jnp.ones(400)}
    for planned, other, largest in ((2**16, params, 100), (2**16, longer, 1000), (100, longer, 100)):
        buckets = optim.Buckets.of(params, largest=planned)
        packed = optim.Buckets.of(other, largest=largest).pack(other)
        with pytest.raises(
            ValueError, match=r"packed has buckets of shapes .* the plan .* with the plan that packed it"
        ):
            buckets.unpack(packed)
