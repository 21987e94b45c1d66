"""Sorting tokens by expert and back, against loops over choices in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import results_and_gradients
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from te_jax import ops
from te_jax.testing import assert_close

TOKENS, TOP_K, EXPERTS, FEATURES = (3, 7), 2, 5, 6


# One program for each case: run eagerly, it is several.
group = functools.partial(
    jax.jit(ops.group_by_expert, static_argnames=("num_experts", "align", "capacity")), num_experts=EXPERTS
)


def draw(rng, tokens=TOKENS, top_k=TOP_K, experts=EXPERTS):
    """Different experts for each token, expert 1 without any."""
    others = [e for e in range(experts) if e != 1]
    flat = [rng.choice(others, top_k, replace=False) for _ in range(int(np.prod(tokens)))]
    return np.array(flat, np.int32).reshape(*tokens, top_k)


def numbers(rng, *shape, dtype=jnp.float32):
    return jax.device_put(rng.standard_normal(shape).astype(dtype))


def by_loops(experts, count, align, capacity):
    """(rows, choices without padding at the end, group sizes, dropped)."""
    flat = experts.reshape(-1)
    rows, choices, sizes, dropped = np.full(flat.size, -1), [], [], 0
    for expert in range(count):
        size = 0
        for choice, chosen in enumerate(flat):
            if chosen == expert:
                if capacity is not None and size == capacity:
                    dropped += 1
                    continue
                rows[choice] = len(choices)
                choices.append(choice)
                size += 1
        while size % align:
            choices.append(-1)
            size += 1
        sizes.append(size)
    return rows.reshape(experts.shape), choices, sizes, dropped


CASES = {
    "plain": {},
    "aligned": {"align": 8},
    "capacity": {"capacity": 3},
    "capacity, aligned": {"capacity": 5, "align": 4},
    "wide": {"align": 128},
}


@pytest.mark.parametrize("case", CASES)
def test_group_by_expert(rng, case):
    options = CASES[case]
    group = jax.jit(functools.partial(ops.group_by_expert, num_experts=EXPERTS, **options))  # of its own: see below
    one, outside = np.full((*TOKENS, TOP_K), 3, np.int32), draw(rng)
    outside[0], outside[1, 2] = -1, EXPERTS + 3
    for experts in (draw(rng), draw(rng), one, outside):
        found = jax.tree.map(np.asarray, group(experts))
        rows, choices, sizes, dropped = by_loops(experts, EXPERTS, options.get("align", 1), options.get("capacity"))
        np.testing.assert_array_equal(found.rows, rows)
        np.testing.assert_array_equal(found.choices[: len(choices)], choices)
        assert (found.choices[len(choices) :] == -1).all()
        np.testing.assert_array_equal(found.group_sizes, sizes)
        assert found.dropped == dropped
        assert {x.dtype for x in found} == {jnp.dtype(jnp.int32)}
    assert group._cache_size() == 1, "sizes changed what is compiled"


@pytest.mark.parametrize("align", [1, 4, 128])
@pytest.mark.parametrize("capacity", [None, 3, 6])
def test_the_number_of_rows_is_the_largest_that_there_can_be(align, capacity):
    """Enough in every case, and reached in one."""
    top_k, count = 1, 3
    most = 0
    for choices in range(3**4):
        experts = np.array([choices // 3**i % 3 for i in range(4)], np.int32)[:, None]
        _, rows, _, _ = by_loops(experts, count, align, capacity)
        most = max(most, len(rows))
    found = jax.eval_shape(
        functools.partial(ops.group_by_expert, num_experts=count, align=align, capacity=capacity),
        jax.ShapeDtypeStruct((4, top_k), jnp.int32),
    )
    bound = found.choices.shape[0]
    assert most == bound


def combined(x, weights, permutation, factors):
    """A layer: each row times a factor of its own."""
    rows = ops.permute(x, permutation)
    y = rows * factors[:, None].astype(rows.dtype)
    return ops.unpermute(y, permutation, weights)


def expected_layer(x, weights, factors, rows, dy):
    """(y, gradients of x, weights and factors)"""
    known, of_rows = rows >= 0, np.where(rows >= 0, factors[np.maximum(rows, 0)], 0.0)
    each, dots = np.sum(of_rows * weights, axis=-1, keepdims=True), np.sum(x * dy, axis=-1, keepdims=True)
    dfactors = np.zeros_like(factors)
    np.add.at(dfactors, rows[known], (weights * dots)[known])
    return each * x, (each * dy, of_rows * dots, dfactors)


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, jnp.float32) for case in CASES), ("capacity, aligned", jnp.bfloat16)]
)
def test_there_and_back(rng, case, dtype):
    """Values, and gradients of the tokens and of the weights, against float64."""
    permutation = group(draw(rng), **CASES[case])
    x, weights = numbers(rng, *TOKENS, FEATURES, dtype=dtype), numbers(rng, *TOKENS, TOP_K)
    factors, cotangent = numbers(rng, len(permutation.choices)), numbers(rng, *TOKENS, FEATURES, dtype=dtype)
    operands = x, weights, factors
    found, gradients = results_and_gradients(lambda x, w, f: combined(x, w, permutation, f), operands, cotangent)
    *wide, dy = (np.asarray(a, np.float64) for a in (*operands, cotangent))
    wanted, expected = expected_layer(*wide, np.asarray(permutation.rows), dy)
    assert_close(found, wanted, dtype=dtype)
    assert_close(gradients[0], expected[0], dtype=dtype)
    assert_close(gradients[1], expected[1], dtype=jnp.float32, tolerance=2e-2 if dtype == jnp.bfloat16 else None)
    assert_close(gradients[2], expected[2], dtype=jnp.float32, tolerance=2e-2 if dtype == jnp.bfloat16 else None)


def test_padding_is_never_read(rng):
    """NaN in rows of padding, and in weights of dropped choices, changes no bit of any result or gradient."""
    permutation = group(draw(rng), align=8, capacity=4)
    padding, dropped = np.asarray(permutation.choices) < 0, np.asarray(permutation.rows) < 0
    assert padding.any()
    assert dropped.any()
    y, weights = numbers(rng, len(permutation.choices), FEATURES), numbers(rng, *TOKENS, TOP_K)
    x, cotangent = numbers(rng, *TOKENS, FEATURES), numbers(rng, *TOKENS, FEATURES)

    @jax.jit
    def everything(y, weights, drows):
        out, vjp = jax.vjp(lambda y, w: ops.unpermute(y, permutation, w), y, weights)
        rows, of_x = jax.vjp(lambda x: ops.permute(x, permutation), x)
        plain = ops.unpermute(y, permutation)
        return out, vjp(cotangent), rows, of_x(drows), plain, ops.permute_weights(weights, permutation)

    poisoned = np.where(padding[:, None], np.float32(np.nan), y)
    bad_weights = np.where(dropped, np.float32(np.nan), weights)
    for found, expected in zip(
        jax.tree.leaves(everything(poisoned, bad_weights, poisoned)),
        jax.tree.leaves(everything(y, weights, y)),
        strict=True,
    ):
        assert np.isfinite(found).all()
        np.testing.assert_array_equal(found, expected)


def test_no_scatter(rng):
    def loss(x, weights, experts):
        permutation = ops.group_by_expert(experts, EXPERTS, align=8)
        y = ops.permute(x, permutation) * ops.permute_weights(weights, permutation)[:, None]
        return jnp.sum(ops.unpermute(jnp.tanh(y), permutation, weights))

    arguments = numbers(rng, *TOKENS, FEATURES), numbers(rng, *TOKENS, TOP_K), draw(rng)
    assert "scatter" not in jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arguments).as_text()


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.int32])
def test_rows_of_other_dtypes(rng, dtype):
    permutation = group(draw(rng), align=8)
    x = (8 * rng.standard_normal((*TOKENS, FEATURES))).astype(dtype)
    rows = np.asarray(jax.jit(ops.permute)(x, permutation)).astype(np.float32)
    flat = x.astype(np.float32).reshape(-1, FEATURES)
    for row, choice in zip(rows, np.asarray(permutation.choices), strict=True):
        np.testing.assert_array_equal(row, flat[choice // TOP_K] if choice >= 0 else np.zeros(FEATURES))


def layer(x, weights, experts):
    permutation = ops.group_by_expert(experts, EXPERTS, align=4, capacity=6)
    return ops.unpermute(jnp.sin(ops.permute(x, permutation)), permutation, weights)


def step(x, weights, experts):
    return jax.value_and_grad(lambda x, w: jnp.sum(layer(x, w, experts) ** 2), argnums=(0, 1))(x, weights)


def test_sharded_tokens(rng):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Auto,))
    operands = numbers(rng, 4, 7, FEATURES), numbers(rng, 4, 7, TOP_K), draw(rng, (4, 7))
    split = jax.sharding.NamedSharding(mesh, P("data"))
    found = jax.jit(step)(*jax.device_put(operands, split))
    for leaf, expected in zip(jax.tree.leaves(found), jax.tree.leaves(jax.jit(step)(*operands)), strict=True):
        assert_close(leaf, expected, tolerance=1e-6)


def test_explicit_axes(rng):
    """Tokens that are split are refused, with the way out; tests/conformance splits features."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        experts = jax.device_put(draw(rng, (4, 7)), jax.sharding.NamedSharding(mesh, P("data")))
        with pytest.raises(ValueError, match=r"experts are split over \['data'\].*call it inside shard_map"):
            ops.group_by_expert(experts, EXPERTS)


def test_no_tokens():
    @jax.jit
    def all_three():
        permutation = ops.group_by_expert(jnp.zeros((0, 2), jnp.int32), EXPERTS, align=8)
        rows = ops.permute(jnp.zeros((0, FEATURES)), permutation)
        return permutation, rows, ops.unpermute(rows, permutation, jnp.zeros((0, 2)))

    permutation, rows, y = all_three()
    assert permutation.choices.shape == (0,)
    assert not np.any(permutation.group_sizes)
    assert rows.shape == y.shape == (0, FEATURES)


def one_permutation():
    return ops.group_by_expert(jnp.array([[0], [1]]), 2)


REFUSED = {
    "floats": (lambda: ops.group_by_expert(jnp.zeros((4, 2)), 2), "they must be integers"),
    "no choices": (lambda: ops.group_by_expert(jnp.zeros((4, 0), jnp.int32), 2), r"shape \(4, 0\)"),
    "align": (lambda: ops.group_by_expert(jnp.zeros((4, 2), jnp.int32), 2, align=0), "align is 0"),
    "capacity": (lambda: ops.group_by_expert(jnp.zeros((4, 2), jnp.int32), 2, capacity=1.5), "capacity is 1.5"),
    "tokens": (lambda: ops.permute(jnp.zeros((3, 4)), one_permutation()), r"one of tokens \(2,\)"),
    "rows": (lambda: ops.unpermute(jnp.zeros((3, 4)), one_permutation()), "the permutation has 2 rows"),
    "dtype": (lambda: ops.unpermute(jnp.zeros((2, 4), jnp.int32), one_permutation()), "y has dtype int32"),
    "weights": (lambda: ops.unpermute(jnp.zeros((2, 4)), one_permutation(), jnp.zeros(2)), r"choices \(2, 1\)"),
    "permutation": (lambda: ops.permute(jnp.zeros((2, 4)), (1, 2)), "permutation is of type tuple"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call)


def test_experts_of_any_dtype():
    """An expert that int32 cannot hold is none; the number of experts may exceed what the dtype of theirs holds."""
    with jax.enable_x64(True):
        for dtype, outside in (("uint32", 2**32 - 1), ("int64", 2**32), ("uint8", 255)):
            experts = np.array([[outside, 1], [1, 0]], dtype)
            both = jax.jit(lambda experts: (ops.group_by_expert(experts, 250), ops.expert_counts(experts, 250)))
            permutation, counts = both(experts)
            np.testing.assert_array_equal(permutation.rows, [[-1, 1], [2, 0]])
            np.testing.assert_array_equal(permutation.group_sizes, [1, 2, *[0] * 248])
            np.testing.assert_array_equal(counts, permutation.group_sizes)
