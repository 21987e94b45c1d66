"""`per_shard` with operations that it has never seen, made of jnp: it must know the rule only."""

import contextlib
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax import sharding
from te_jax.hlo import collectives
from te_jax.testing import assert_close

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
axis_types = pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])


# A contraction: k is reduced, by a sum over the mesh axes that split it.
@sharding.per_shard("... k, k j -> ... j", axes_of=("k",))
def scaled_product(x, weights, *, axes, scale):
    if "k" in axes:
        (part,) = scaled_product(x, weights, scale=scale)
        return (lax.psum(part, axes["k"]),)
    return (scale * jnp.matmul(x, weights, precision="highest"),)


# A scan along the row, that must have all of it.
@sharding.per_shard("... v -> ... v, ...", replicated=("v",))
def running_sum(x, *, axes, reverse):
    assert not axes
    return lax.cumsum(x, x.ndim - 1, reverse=reverse), jnp.sum(x, axis=-1)


# The place of a shard matters, and nothing is combined.
@sharding.per_shard("... v -> ... v", axes_of=("v",))
def times_column(x, *, axes):
    if "v" in axes:
        (local,) = times_column(x)
        return (local + lax.axis_index(axes["v"]).astype(x.dtype) * x.shape[-1] * x,)
    return (x * jnp.expand_dims(jnp.arange(x.shape[-1]).astype(x.dtype), tuple(range(x.ndim - 1))),)


def place(x, mesh, spec):
    # From NumPy: JAX would compile a program that cuts the array.
    return jax.device_put(np.asarray(x), NamedSharding(mesh, spec))


def random(rng, *shape):
    return jax.device_put(np.asarray(rng.standard_normal(shape), jnp.float32))


def product(x, weights):
    return scaled_product(x, weights, scale=3.0)[0]


def expected_product(x, weights):
    return 3.0 * np.asarray(x, np.float64) @ np.asarray(weights, np.float64)


def test_without_a_mesh(rng):
    x, weights = random(rng, 2, 3, 8), random(rng, 8, 5)
    for wrap in (lambda f: f, jax.jit):
        assert_close(wrap(product)(x, weights), expected_product(x, weights), dtype="float32")
    prefix, total = running_sum(x, reverse=False)
    assert_close(prefix, np.cumsum(np.asarray(x, np.float64), axis=-1), dtype="float32")
    assert_close(total, np.asarray(x, np.float64).sum(axis=-1), dtype="float32")
    assert_close(times_column(x)[0], x * jnp.arange(8.0)[None, None])


@axis_types
@pytest.mark.parametrize(
    ("x_spec", "weights_spec", "kinds"),
    [
        (P("x"), P(), set()),
        (P(None, "x", "y"), P("y"), {"all-reduce"}),
        (P("x"), P(None, "y"), set()),
        (P(None, None, ("x", "y")), P(("x", "y")), {"all-reduce"}),
        (P("x", None, "y"), P("y"), {"all-reduce"}),
        (P(), P(), set()),
    ],
    ids=str,
)
def test_reduced_factor(x_spec, weights_spec, kinds, axis_type, make_mesh, rng):
    mesh = make_mesh({"x": axis_type, "y": axis_type})
    x, weights = random(rng, 8, 4, 16), random(rng, 16, 6)
    placed = place(x, mesh, x_spec), place(weights, mesh, weights_spec)
    compiled = jax.jit(product).lower(*placed).compile()
    assert {entry.kind for entry in collectives(compiled)} == kinds
    result = compiled(*placed)
    assert_close(result, expected_product(x, weights), dtype="float32")
    batch = (*tuple(x_spec), None, None)[:2]
    columns = (*tuple(weights_spec), None, None)[1]
    assert result.sharding.is_equivalent_to(NamedSharding(mesh, P(*batch, columns)), 3)


@axis_types
def test_replicated_factor_is_gathered_and_no_other(axis_type, make_mesh, rng):
    mesh = make_mesh({"x": axis_type, "y": axis_type})
    x = random(rng, 8, 16)
    placed = place(x, mesh, P("x", "y"))
    compiled = jax.jit(lambda x: running_sum(x, reverse=True)).lower(placed).compile()
    gathers = [entry for entry in collectives(compiled) if entry.kind == "all-gather"]
    assert len(gathers) == 1
    assert [array.elements for array in gathers[0].results] == [8 * 16 // mesh.shape["x"]]
    prefix, total = compiled(placed)
    assert_close(prefix, np.cumsum(np.asarray(x, np.float64)[:, ::-1], axis=-1)[:, ::-1], dtype="float32")
    assert_close(total, np.asarray(x, np.float64).sum(axis=-1), dtype="float32")
    assert total.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 1)


@axis_types
@pytest.mark.parametrize("axes", ["y", ("x", "y"), ("y", "x")], ids=str)
def test_place_of_a_shard(axes, axis_type, make_mesh, rng):
    mesh = make_mesh({"x": axis_type, "y": axis_type})
    x = random(rng, 3, 16)
    result = jax.jit(lambda x: times_column(x)[0])(place(x, mesh, P(None, axes)))
    assert_close(result, x * jnp.arange(16.0)[None])
    assert result.sharding.is_equivalent_to(NamedSharding(mesh, P(None, axes)), 2)


@pytest.mark.parametrize(("explicit", "another_order"), [("x", False), ("y", False), ("y", True)])
def test_mesh_of_explicit_and_auto_axes(explicit, another_order, make_mesh, rng):
    """Types do not name devices, but `jax.set_mesh` does."""
    mesh = make_mesh({axis: EXPLICIT if axis == explicit else AUTO for axis in ("x", "y")})
    if another_order:
        mesh = Mesh(mesh.devices[::-1, ::-1], mesh.axis_names, axis_types=mesh.axis_types)
    x, weights = random(rng, 8, 4, 16), random(rng, 16, 6)
    placed = place(x, mesh, P("x", None, "y")), place(weights, mesh, P("y"))
    with jax.set_mesh(mesh) if another_order else contextlib.nullcontext():
        result = jax.jit(product)(*placed)
    assert result.sharding.mesh.devices.tolist() == mesh.devices.tolist()
    assert_close(result, expected_product(x, weights), dtype="float32")


@pytest.mark.parametrize("check_vma", [True, False])
def test_manual(check_vma, make_mesh, rng):
    """Operands are local, and the caller says itself what is split."""
    mesh = make_mesh({"x": AUTO, "y": AUTO})
    x, weights = random(rng, 8, 4, 16), random(rng, 16, 6)

    def local(x, weights):
        return scaled_product(x, weights, scale=3.0, axes={"k": "y"})[0]

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(P("x", None, "y"), P("y")), out_specs=P("x"), check_vma=check_vma
    )  # fmt: skip
    assert_close(jax.jit(mapped)(x, weights), expected_product(x, weights), dtype="float32")


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(None, "y"), (None, "z"), (None, ("y", "z")), (None, ("z", "y")), ("y", "z"), ("z", "y")],
    ids=str,
)
@pytest.mark.parametrize("outer", [EXPLICIT, AxisType.Manual], ids=["explicit", "manual"])
def test_two_auto_axes_beside_another(outer, rows, columns, make_mesh, rng):
    """The place of a shard, and the devices that combine, whichever axes split the first result."""
    mesh = make_mesh({"x": AUTO if outer == AxisType.Manual else EXPLICIT, "y": AUTO, "z": AUTO})
    x, weights = random(rng, 8, 4, 16), random(rng, 16, 6)

    def both(x, weights):
        return times_column(x)[0], product(x, weights)

    if outer == AxisType.Manual:
        both = jax.shard_map(both, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"})
    numbered, total = jax.jit(both)(place(x, mesh, P("x", rows, columns)), place(weights, mesh, P(columns)))
    assert_close(numbered, x * jnp.arange(16.0)[None, None])
    assert_close(total, expected_product(x, weights), dtype="float32")


@axis_types
@pytest.mark.parametrize("spec", [P(None, "x", "y"), P("x", None, "y")], ids=["inner", "mapped"])
def test_vmap_of_a_sharded_dimension(spec, axis_type, make_mesh, rng):
    mesh = make_mesh({"x": axis_type, "y": axis_type})
    x = random(rng, 8, 4, 16)
    placed = place(x, mesh, spec)
    compiled = jax.jit(jax.vmap(lambda x: times_column(x)[0])).lower(placed).compile()
    assert collectives(compiled) == []
    assert_close(compiled(placed), x * jnp.arange(16.0)[None, None])


def test_vmap_of_an_operand_that_has_no_batch_dimensions(rng):
    """The rule gives the weights none, and vmap adds one: right for a function that takes it, as matmul does."""
    x, weights = random(rng, 3, 16), random(rng, 5, 16, 6)
    result = jax.vmap(product, in_axes=(None, 0))(x, weights)
    for i in range(5):
        assert_close(result[i], expected_product(x, weights[i]), dtype="float32")


def test_eager_calls_are_compiled_once(rng, caplog):
    x = random(rng, 5, 17)
    for compiles in (True, False):
        caplog.clear()
        with jax.log_compiles():
            running_sum(x, reverse=True)
        assert ("Compiling" in caplog.text) == compiles


@pytest.fixture
def gspmd():
    """Without Shardy, as long as JAX has that option."""
    jax.config.update("jax_use_shardy_partitioner", False)
    yield
    jax.config.update("jax_use_shardy_partitioner", True)


@pytest.mark.usefixtures("gspmd")
@pytest.mark.parametrize("from_arguments", [True, False], ids=["arguments", "in_shardings"])
def test_without_shardy_several_devices_are_refused(from_arguments, make_mesh, rng):
    """While lowering: XLA would end the process."""
    mesh = make_mesh({"x": AUTO, "y": AUTO})
    x, weights = random(rng, 8, 16), random(rng, 16, 6)
    shardings = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    given = jax.device_put((x, weights), shardings) if from_arguments else (np.asarray(x), np.asarray(weights))
    run = jax.jit(product, in_shardings=None if from_arguments else shardings)
    with pytest.raises(NotImplementedError, match=r"jax_use_shardy_partitioner is False.*set the option to True"):
        run.lower(*given)
    assert_close(jax.jit(product)(x, weights), expected_product(x, weights), dtype="float32")  # one device


def test_derivatives_are_the_operations_business(rng):
    x, weights = random(rng, 3, 16), random(rng, 16, 6)
    with pytest.raises(NotImplementedError, match="implementation='reference'"):
        jax.grad(lambda x: product(x, weights).sum())(x)


# -------------------------------------------------------------------------------------------------- compound dimensions


# A product of values that share a scale in blocks of 4, in the layout of FP8 operands.
@sharding.per_shard("... m (kb ki), ... kb m, ... n (kb ki) -> ... m n", axes_of=("kb",), sizes={"ki": 4})
def block_product(x, scales, y, *, axes):
    if "kb" in axes:
        (part,) = block_product(x, scales, y)
        return (lax.psum(part, axes["kb"]),)
    LOCAL_SHAPES.append(x.shape)
    spread = jnp.repeat(jnp.swapaxes(scales, -1, -2), 4, axis=-1)[..., : x.shape[-1]]
    return (jnp.matmul(x * spread, jnp.swapaxes(y, -1, -2), precision="highest"),)


# Scales of blocks, and the transposed values: compound dimensions in the results.
@sharding.per_shard("... r (cb ci) -> ... (cb ci) r, ... cb r", axes_of=("cb",), sizes={"ci": 4})
def transposed_blocks(x, *, axes):
    if "cb" in axes:
        return transposed_blocks(x)  # blocks do not cross shards: nothing to combine
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 4)]
    blocks = jnp.pad(x, padding).reshape(*x.shape[:-1], -1, 4)
    return jnp.swapaxes(x, -1, -2), jnp.swapaxes(jnp.max(jnp.abs(blocks), axis=-1), -1, -2)


LOCAL_SHAPES: list[tuple[int, ...]] = []


def block_case(rng, m=8, k=64, n=6, batch=()):
    return random(rng, *batch, m, k), random(rng, *batch, -(-k // 4), m), random(rng, *batch, n, k)


def expected_block_product(x, scales, y):
    spread = np.repeat(np.swapaxes(np.asarray(scales, np.float64), -1, -2), 4, axis=-1)[..., : x.shape[-1]]
    return (np.asarray(x, np.float64) * spread) @ np.swapaxes(np.asarray(y, np.float64), -1, -2)


def product_of_blocks(x, scales, y):
    return block_product(x, scales, y)[0]


@axis_types
@pytest.mark.parametrize(
    ("specs", "kinds"),
    [
        ((P("x", "y"), P("y", "x"), P(None, "y")), {"all-reduce"}),
        ((P(None, ("x", "y")), P(("x", "y")), P(None, ("x", "y"))), {"all-reduce"}),
        ((P("x"), P(None, "x"), P("y")), set()),
        ((P(None, "x"), P("x"), P("y", "x")), {"all-reduce"}),
    ],
    ids=str,
)
def test_blocks_are_split(specs, kinds, axis_type, make_mesh, rng):
    mesh = make_mesh({"x": axis_type, "y": axis_type})
    case = block_case(rng)
    placed = [place(x, mesh, spec) for x, spec in zip(case, specs, strict=True)]
    LOCAL_SHAPES.clear()
    compiled = jax.jit(product_of_blocks).lower(*placed).compile()
    assert {entry.kind for entry in collectives(compiled)} == kinds
    assert NamedSharding(mesh, specs[0]).shard_shape(case[0].shape) in LOCAL_SHAPES
    result = compiled(*placed)
    assert_close(result, expected_block_product(*case), dtype="float32")
    rows, columns = (*tuple(specs[0]), None)[0], (*tuple(specs[2]), None)[0]
    assert result.sharding.is_equivalent_to(NamedSharding(mesh, P(rows, columns)), 2)


def test_shardings_flow_through_blocks(make_mesh, rng):
    """What only one operand says, the others follow, and the results."""
    mesh = make_mesh({"x": AUTO, "y": AUTO})
    x = random(rng, 8, 64)
    compiled = jax.jit(lambda x: transposed_blocks(jnp.sin(x))).lower(place(x, mesh, P("x", "y"))).compile()
    assert collectives(compiled) == []
    transposed, scales = compiled(place(x, mesh, P("x", "y")))
    assert transposed.sharding.is_equivalent_to(NamedSharding(mesh, P("y", "x")), 2)
    assert scales.sharding.is_equivalent_to(NamedSharding(mesh, P("y", "x")), 2)
    assert_close(transposed, np.sin(np.asarray(x)).T, dtype="float32")
    assert_close(scales, np.abs(np.sin(np.asarray(x))).reshape(8, 16, 4).max(axis=-1).T, dtype="float32")


@axis_types
@pytest.mark.parametrize(
    ("k", "spec"),
    [(24, P("y", "x")), (56, P(None, ("x", "y"))), (4, P("x", "y"))],
    ids=["6 over 4", "14 over 8", "one"],
)
def test_blocks_that_shards_would_cut_are_gathered(k, spec, axis_type, make_mesh, rng):
    mesh = make_mesh({"x": axis_type, "y": axis_type})
    if mesh.size != 8:
        pytest.skip("the sizes are for eight devices")
    case = block_case(rng, k=k)
    placed = place(case[0], mesh, spec), place(case[1], mesh, P()), place(case[2], mesh, spec if k == 56 else P())
    LOCAL_SHAPES.clear()
    compiled = jax.jit(product_of_blocks).lower(*placed).compile()
    assert LOCAL_SHAPES[-1][1] == k
    assert {entry.kind for entry in collectives(compiled)} == {"all-gather"}
    assert_close(compiled(*placed), expected_block_product(*case), dtype="float32")


@pytest.mark.parametrize("partly", [False, True], ids=["manual", "partly manual"])
def test_blocks_in_shard_map(partly, make_mesh, rng):
    mesh = make_mesh({"x": AUTO, "y": AUTO})
    case = block_case(rng)

    def local(x, scales, y):
        return block_product(x, scales, y, axes=None if partly else {"kb": "y"})[0]

    split = None if partly else "y"
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P("x", split), P(split, "x"), P(None, split)),
        out_specs=P("x"),
        axis_names={"x"} if partly else {"x", "y"},
    )
    specs = P("x", "y"), P("y", "x"), P(None, "y")
    placed = [place(x, mesh, spec) for x, spec in zip(case, specs, strict=True)]
    compiled = jax.jit(mapped).lower(*placed).compile()
    assert {entry.kind for entry in collectives(compiled)} == {"all-reduce"}
    assert_close(compiled(*placed), expected_block_product(*case), dtype="float32")


@pytest.mark.parametrize("sizes", [None, {}, {"kb": 4}, {"ki": 4, "m": 4}])
def test_sizes_must_name_the_minor_factors(sizes):
    with pytest.raises(ValueError, match=r"needs the sizes of \['ki'\]"):
        sharding.per_shard("m (kb ki) -> m", sizes=sizes)


@pytest.mark.parametrize("length", [6, 13])
def test_uneven_shards_of_a_reduced_factor_are_gathered(length, make_mesh, rng):
    """XLA would pad them with anything, and the sum would take it in."""
    mesh = make_mesh({"x": AUTO, "y": AUTO})
    x, weights = random(rng, 8, 4, 16), random(rng, 16, 6)

    def run(x, weights):
        return product(jnp.exp(x)[..., :length], jnp.exp(weights)[:length])

    placed = place(x, mesh, P(None, None, ("x", "y"))), place(weights, mesh, P(("x", "y")))
    expected = expected_product(np.exp(np.asarray(x))[..., :length], np.exp(np.asarray(weights))[:length])
    assert_close(jax.jit(run)(*placed), expected, dtype="float32")


# ---------------------------------------------------------------------------------------------------------------- reuse


@sharding.per_shard("... -> ...", reuse={0: 0})
def with_reuse(x, *, axes, reuse):
    assert not axes
    return (x + 1,)


@sharding.per_shard("... -> ...", reuse={0: 0})
def reuses(x, *, axes, reuse):
    """How many results are written over operands."""
    assert not axes
    return (jnp.zeros_like(x) + len(reuse),)


def in_shard_map(x, mesh):
    return jax.shard_map(lambda x: reuses(x)[0], mesh=mesh, in_specs=P("x"), out_specs=P("x"))(x)


IN_PROGRAMS = {
    "argument": (lambda x, mesh: reuses(x)[0], 0),
    "shard_map": (in_shard_map, 1),
    "called function": (lambda x, mesh: jax.jit(lambda x: reuses(x)[0])(x), 1),
    "loop": (lambda x, mesh: lax.fori_loop(0, 2, lambda i, x: reuses(x)[0], x), 1),
    "intermediate": (lambda x, mesh: reuses(jnp.exp(x))[0], 1),
}


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("donated", [False, True], ids=["kept", "donated"])
@pytest.mark.parametrize(("program", "of_kept"), IN_PROGRAMS.values(), ids=IN_PROGRAMS)
def test_what_is_reused(program, of_kept, donated, split, make_mesh, rng):
    """Not an argument that the caller keeps, where that can be seen."""
    mesh = make_mesh({"x": AUTO})
    x = place(random(rng, 8, 4), mesh, P("x")) if split else random(rng, 8, 4)
    run = jax.jit(lambda x: program(x, mesh), donate_argnums=0 if donated else ())
    np.testing.assert_array_equal(run(x), np.full((8, 4), 1 if donated else of_kept))


# ---------------------------------------------------------------------------------------------------- compilation cache


def with_constant(constant):
    """As operations are that are made for a request: what is static lies in the closure."""

    @sharding.per_shard("... -> ...")
    def plus(x, *, axes):
        assert not axes
        return (x + constant,)

    return plus


def with_sum(sums):
    """What is static matters where the operand is split only."""

    @sharding.per_shard("... v -> ...", axes_of=("v",))
    def total(x, *, axes):
        if "v" in axes:
            (part,) = total(x)
            return (lax.psum(part, axes["v"]) if sums else lax.pmax(part, axes["v"]),)
        return (jnp.sum(x, axis=-1),)

    return total


def with_function(function):
    """Functions in a closure have names and addresses only."""
    return sharding.per_shard("... -> ...")(lambda x, *, axes: (function(x),))


@sharding.per_shard("... v -> ... v", axes_of=("v",))
def times_size(x, *, axes, power=1):
    return (x * lax.axis_size(axes["v"]) ** power if axes else x,)


@sharding.per_shard("... v -> ... v", axes_of=("v",))
def times_place(x, *, axes):
    return (x * lax.axis_index(axes["v"]) if axes else x,)


def split_along(rule, factor):
    """The function learns from `axes` what is split, and is the same for all."""
    return sharding.per_shard(rule, axes_of=(factor,))(multiplied)


def multiplied(x, *, axes):
    return (x * math.prod(map(lax.axis_size, axes.values())),)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: lambda x: running_sum(x, reverse=False), lambda: lambda x: running_sum(x, reverse=True)),
        (lambda: with_constant(1.0), lambda: with_constant(2.0)),
        (lambda: with_sum(True), lambda: with_sum(False)),
        (lambda: with_reuse, lambda: sharding.per_shard("... -> ...", reuse={})(lambda x, *, axes: (x + 1,))),
        (lambda: with_function(lambda x: x + 1), lambda: with_function(lambda x: x + 2)),
        (lambda: lambda x: times_size(x, power=2), lambda: lambda x: times_size(x, power=3)),
        (lambda: times_size, lambda: times_place),
        (lambda: split_along("u v -> u v", "u"), lambda: split_along("u v -> u v", "v")),
        (lambda: split_along("u v -> u v", "u"), lambda: split_along("v u -> v u", "u")),
    ],
    ids=["argument", "closure", "where split", "reuse", "body", "argument where split", "name", "axes", "rule"],
)
def test_programs_differ_where_static_values_do(one, other, make_mesh):
    """And are those of other processes, where functions that call themselves on their shards have another address."""
    mesh = make_mesh({"x": AUTO, "y": AUTO})
    x = place(jnp.ones((8, 16)), mesh, P("x", "y"))
    expected = text(one(), x)
    assert text(one(), x) == expected
    assert text(other(), x) != expected


def test_programs_are_not_those_of_other_versions(make_mesh, monkeypatch):
    x = place(jnp.ones((8, 16)), make_mesh({"x": AUTO}), P("x"))
    expected = text(with_sum(True), x)
    monkeypatch.setattr("te_jax.sharding.dispatch.__version__", "0.0.0")
    assert text(with_sum(True), x) != expected


def text(function, x):
    """Without the address of a callback, which the key of the compilation cache may leave out."""
    found, addresses = re.subn(r'backend_config = "\d+"', "", jax.jit(lambda x: function(x)).lower(x).as_text())
    assert addresses
    return found
