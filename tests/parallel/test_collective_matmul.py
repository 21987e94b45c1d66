"""Collective products of plain arrays: values, gradients, and what is exchanged."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collective_oracle import FUNCTIONS, TRANSPORTS, check, computed, mesh_of, oracle, place, random_case
from jax.sharding import PartitionSpec as P
from parameters import in_turns

from te_jax.hlo import collectives
from te_jax.parallel import Ring, all_gather_matmul, matmul_reduce_scatter
from te_jax.recipe import CurrentScaling
from te_jax.testing import assert_close

last = pytest.mark.parametrize("transport", TRANSPORTS[-1:])  # where the transport matters little
NAMES = ["all_gather_matmul", "matmul_reduce_scatter"]
functions = pytest.mark.parametrize("name", NAMES)


def kinds(compiled):
    return sorted(entry.kind for entry in collectives(compiled))


@pytest.mark.parametrize(("transport", "size"), in_turns(TRANSPORTS, (2, 8)))
@functions
def test_values_and_gradients(size, name, transport, rng):
    check(random_case(rng, name, size), mesh_of({"tp": size}), transport=transport)


@last
@pytest.mark.parametrize(("name", "dtype"), in_turns(NAMES, ["bfloat16", "float16"]))
def test_16_bits(dtype, name, transport, rng):
    size = min(jax.device_count(), 4)
    case = random_case(rng, name, size, rows=8, inner=32, outers=((16,),), dtype=dtype)
    check(case, mesh_of({"tp": size}), transport=transport)


@last
@functions
def test_partial_sums_of_dx_are_not_rounded_to_out_dtype(name, transport, rng):
    """Of a float32 x whose y is asked for in bfloat16."""
    case = random_case(rng, name, 2, rows=8, inner=32, outers=((16,),), y_dtype="bfloat16")
    found = computed(case, mesh_of({"tp": 2}), transport=transport, out_dtype=jnp.bfloat16)
    assert_close(found.dx, oracle(case).dx, tolerance=1e-5, dtype=jnp.float32)


@last
@functions
def test_dtypes_of_gradients(name, transport, rng):
    """Weights in float32 and results in float32, of x in bfloat16: the weight gradient is not rounded to bfloat16."""
    case = random_case(rng, name, 2, rows=8, inner=32, outers=((16,),), dtype="bfloat16", weight_dtype="float32")
    case = dataclasses.replace(case, dys=tuple(dy.astype(jnp.float32) for dy in case.dys))
    found = check(case, mesh_of({"tp": 2}), transport=transport, out_dtype=jnp.float32)
    exact = dataclasses.replace(case, weights=tuple(w.astype(jnp.bfloat16) for w in case.weights))
    assert_close(found.dweights[0], oracle(exact).dweights[0], tolerance=1e-5, dtype=jnp.float32)


@last
@pytest.mark.parametrize("residual", ["gathered", "shard"])
def test_several_weights(residual, transport, rng):
    case = random_case(rng, "all_gather_matmul", 4, lead=(2,), outers=((3,), (2,), (1, 2)))
    case = dataclasses.replace(case, biases=(case.biases[0], None, case.biases[2]))
    check(case, mesh_of({"tp": 4}), transport=transport, residual=residual)


@last
@pytest.mark.parametrize(
    ("name", "lead", "mid", "axis"), [(NAMES[0], (), (3, 2), 0), (NAMES[1], (2,), (), 1), (NAMES[1], (2,), (3,), -3)]
)
def test_any_axis(lead, mid, axis, name, transport, rng):
    case = random_case(rng, name, 2, lead=lead, mid=mid, rows=2, outers=((3, 2),))
    check(case, mesh_of({"tp": 2}), transport=transport, axis=axis)


@pytest.mark.parametrize(("name", "size", "rows"), [(NAMES[0], 2, 5), (NAMES[1], 4, 1), (NAMES[0], 4, 2)])
def test_a_ring_both_ways(size, rows, name, rng):
    case = random_case(rng, name, size, lead=(2,), rows=rows)
    check(case, mesh_of({"tp": size}), transport=Ring(bidirectional=True))


@pytest.mark.parametrize(("transport", "name"), in_turns(["auto", *TRANSPORTS], NAMES))
def test_one_device(transport, name, rng):
    case, mesh = random_case(rng, name, 1, lead=(2,)), mesh_of({"tp": 1})
    check(case, mesh, transport=transport)
    assert kinds(jax.jit(case.mapped(mesh, transport=transport)).lower(*case.operands).compile()) == []


# ------------------------------------------------------------------------------------------------- what is exchanged


@pytest.mark.parametrize(
    ("name", "outers", "plain"),
    [("all_gather_matmul", ((3,), (2,)), "all-gather"), ("matmul_reduce_scatter", ((3,),), "reduce-scatter")],
)
@pytest.mark.parametrize("size", [4])
def test_collectives(size, name, outers, plain, rng):
    case, mesh = random_case(rng, name, size, outers=outers), mesh_of({"tp": size})
    for options, expected in (
        ({}, [plain]),
        ({"transport": "ring"}, ["collective-permute"] * (size - 1)),
        ({"transport": Ring(bidirectional=True)}, ["collective-permute"] * 2 * (size - 1)),
    ):
        compiled = jax.jit(case.mapped(mesh, **options)).lower(*case.placed(mesh).operands).compile()
        found = kinds(compiled)
        # On GPUs XLA may send to both sides at once.
        assert found == expected if jax.default_backend() == "cpu" else set(found) == set(expected)


@pytest.mark.parametrize(("residual", "gathers"), [("gathered", 1), ("shard", 2)])
def test_the_residual_is_a_choice(residual, gathers, rng):
    """Either x is gathered once and kept whole, or this device's part is kept and gathered again."""
    case, mesh = random_case(rng, "all_gather_matmul", 4), mesh_of({"tp": 4})
    function = jax.jit(functools.partial(jax.vjp, case.mapped(mesh, transport="xla", residual=residual)))
    _, vjp = function(*case.placed(mesh).operands)
    kept = {leaf.shape for leaf in jax.tree.leaves(vjp) if leaf.size and leaf.shape[-1] == 5}
    whole = math.prod(case.x.shape) * (4 if residual == "gathered" else 1)
    assert [math.prod(shape) for shape in kept] == [whole]

    def gradients(operands, dys):
        return jax.vjp(case.mapped(mesh, transport="xla", residual=residual), *operands)[1](dys)

    # As it is written: XLA's CPU backend drops the barrier, and then finds that both gathers are one.
    text = str(jax.make_jaxpr(gradients)(case.operands, case.dys))
    assert text.count(" all_gather[") == gathers
    assert ("optimization_barrier" in text) == (residual == "shard")


def test_partial_sums_are_added_in_float32():
    """256 and seven ones are 263 in float32, and 256 where each sum is rounded to bfloat16."""
    mesh = mesh_of({"tp": 8})
    x = np.ones((8, 8), np.float32)
    x[:, 3] = 256
    x, w = jnp.asarray(x, jnp.bfloat16), jnp.ones((8, 4), jnp.bfloat16)
    for transport in set(TRANSPORTS) - {"xla"}:
        run = jax.shard_map(
            lambda x, w, transport=transport: matmul_reduce_scatter(x, w, axis_name="tp", transport=transport),
            mesh=mesh, in_specs=(P(None, "tp"), P("tp")), out_specs=P("tp"),
        )  # fmt: skip
        assert_close(jax.jit(run)(x, w), np.full((8, 4), 263).astype(jnp.bfloat16), tolerance=0.0)


@last
@functions
def test_gradients_of_a_bias_are_added_in_float32(name, transport):
    """257 ones for each column: 256 where their sum is rounded to bfloat16."""
    x, w = jnp.ones((514, 32), jnp.bfloat16), jnp.ones((32, 32), jnp.bfloat16)

    def gradient(x, w):
        call = functools.partial(FUNCTIONS[name], x, w, axis_name="tp", transport=transport)
        y, vjp = jax.vjp(lambda bias: call(bias=bias), jnp.zeros((w.shape[1],)))
        return vjp(jnp.zeros_like(y).at[:257].set(1))[0][None]

    rows, columns = P("tp"), P(None, "tp")
    specs = (rows, columns) if name == "all_gather_matmul" else (columns, rows)
    run = jax.shard_map(gradient, mesh=mesh_of({"tp": 2}), in_specs=specs, out_specs=rows, check_vma=False)
    dbias = jax.jit(run)(x, w)
    assert_close(dbias, np.full(dbias.shape, 257), tolerance=0.0, dtype=jnp.float32)


@pytest.mark.parametrize(
    ("transport", "size", "recipe"),
    in_turns([*TRANSPORTS, "xla"], (4, 2, 2, 1), {"plain": None, "fp8": CurrentScaling(), "plain too": None}),
)
def test_products_of_several_weights_are_rounded_together(size, recipe, transport):
    """Each is beyond the range of float16, and their sum is not."""
    weights = tuple(jnp.full((32, 16 * size), sign * 512, jnp.float16) for sign in (1, -1, 1))
    gather = functools.partial(all_gather_matmul, axis_name="tp", transport=transport, out_dtype=jnp.float32)

    def gradient(x, weights):
        dys = 16.0, 15.0, -0.5  # the first of each weight's parts of the gradient: 16 · 16 · 512 = 131072
        ys = functools.partial(gather, kernel=weights, recipe=recipe)
        return jax.grad(lambda x: sum(jnp.sum(dy * y) for dy, y in zip(dys, ys(x), strict=True)))(x)

    run = jax.shard_map(gradient, mesh=mesh_of({"tp": size}), in_specs=(P("tp"), P(None, "tp")), out_specs=P("tp"))
    dx = jax.jit(run)(jnp.ones((8 * size, 32), jnp.float16), weights)
    assert_close(
        dx, np.full((8 * size, 32), size * 16 * 512 * 0.5, np.float16), tolerance=0.0 if recipe is None else 0.05
    )


# -------------------------------------------------------------------------------------- meshes and transformations


@last
@pytest.mark.parametrize(
    ("name", "check_vma", "axes"), [(NAMES[1], True, {"tp": 4, "dp": 2}), (NAMES[0], False, {"tp": 4, "dp": 2})]
)
def test_groups_within_a_mesh(check_vma, axes, name, transport, rng):
    """Weights are replicated over dp: their gradients are summed over it."""
    case = random_case(rng, name, 4, lead=(4,), batch="dp")
    check(case, mesh_of(axes), transport=transport, check_vma=check_vma)


@pytest.mark.parametrize(
    ("transport", "name", "split"), in_turns(TRANSPORTS, NAMES, [("a", "b"), ("b", "a"), ("b", "a")])
)
def test_several_axes(split, name, transport, rng):
    """The first varies slowest, whatever the order of the mesh."""
    mesh = mesh_of({"a": 2, "dp": 2, "b": 2})
    size = math.prod(mesh.shape[axis] for axis in split)
    check(random_case(rng, name, size, lead=(2,), split=split, batch="dp"), mesh, transport=transport)


@pytest.mark.parametrize(("transport", "name"), in_turns(TRANSPORTS, NAMES))
def test_operands_of_which_jax_knows_that_they_vary(name, transport, rng):
    """Gradients inside of shard_map as outside, of operands that are whole outside and made to vary inside."""
    x, w, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((8, 6), (6, 5), (5,)))

    def loss(x, w, b):
        x, w = (jax.lax.pcast(operand, "tp", to="varying") for operand in (x, w))
        y = FUNCTIONS[name](x, w, bias=b, axis_name="tp", transport=transport)
        return jax.lax.psum(jnp.sum(jnp.sin(y)), "tp")

    def whole_loss(x, w, b):
        if name == "all_gather_matmul":
            return 16 * jnp.sum(jnp.sin(x @ w + b[None]))  # four devices have the rows of four
        return jnp.sum(jnp.sin(4 * (x @ w) + b[None]))

    def gradient(loss):
        return jax.grad(loss, argnums=(0, 1, 2))

    expected = jax.jit(gradient(whole_loss))(x, w, b)
    for way in (lambda mapped: gradient(mapped(loss)), lambda mapped: mapped(gradient(loss))):
        run = way(lambda local: jax.shard_map(local, mesh=mesh_of({"tp": 4}), in_specs=P(), out_specs=P()))
        for found, wanted in zip(jax.jit(run)(x, w, b), expected, strict=True):
            assert_close(found, wanted, tolerance=1e-5)


@last
def test_a_kernel_that_all_devices_share(transport, rng):
    """A gather may multiply with the same columns everywhere: its gradient is the sum of all devices' parts."""
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, 6), (6, 5)))

    def local(x, w):
        return all_gather_matmul(x, w, axis_name="tp", transport=transport)

    run = jax.shard_map(local, mesh=mesh_of({"tp": 2}), in_specs=(P("tp"), P()), out_specs=P(None, "tp"))
    y, (dx, dw) = jax.jit(lambda *a: (run(*a), jax.grad(lambda *a: jnp.sum(run(*a)), argnums=(0, 1))(*a)))(x, w)
    assert_close(y, np.concatenate([x @ w, x @ w], axis=1), tolerance=1e-5)
    assert_close(dx, 2 * np.broadcast_to(w.sum(axis=1), x.shape), tolerance=1e-5)
    assert_close(dw, 2 * np.broadcast_to(x.sum(axis=0)[:, None], w.shape), tolerance=1e-5)


@pytest.mark.parametrize(("transport", "name"), in_turns(["auto", "ring"], NAMES))
def test_partly_manual(transport, name, rng):
    """Rows of the batch are split by jit."""
    mesh = mesh_of({"dp": 2, "tp": 2})
    case = random_case(rng, name, 2, lead=(4,))
    case = dataclasses.replace(case, x=place(case.x, mesh, P("dp")))
    expected = oracle(case)
    mapped = case.mapped(mesh, transport=transport, axis_names={"tp"})
    with jax.set_mesh(mesh):
        (y,) = jax.jit(mapped)(*case.operands)
    assert_close(y, expected.ys[0], dtype=jnp.float32)
