"""`per_shard` with operations that it has never seen, made of jnp: it must know the rule only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax import native
from te_jax.testing import assert_close, collectives

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
axis_types = pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])


# A contraction: k is reduced, by a sum over the mesh axes that split it.
@native.per_shard("... k, k j -> ... j", axes_of=("k",))
def scaled_product(x, weights, *, axes, scale):
    if "k" in axes:
        (part,) = scaled_product(x, weights, scale=scale)
        return (lax.psum(part, axes["k"]),)
    return (scale * jnp.matmul(x, weights, precision="highest"),)


# A scan along the row, that must have all of it.
@native.per_shard("... v -> ... v, ...", replicated=("v",))
def running_sum(x, *, axes, reverse):
    assert not axes
    return lax.cumsum(x, x.ndim - 1, reverse=reverse), jnp.sum(x, axis=-1)


# The place of a shard matters, and nothing is combined.
@native.per_shard("... v -> ... v", axes_of=("v",))
def times_column(x, *, axes):
    if "v" in axes:
        (local,) = times_column(x)
        return (local + lax.axis_index(axes["v"]).astype(x.dtype) * x.shape[-1] * x,)
    return (x * jnp.expand_dims(jnp.arange(x.shape[-1]).astype(x.dtype), tuple(range(x.ndim - 1))),)


def place(x, mesh, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def random(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


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
    assert gathers[0].elements == 8 * 16 // mesh.shape["x"]
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


@pytest.mark.parametrize("explicit", ["x", "y"])
def test_mesh_of_explicit_and_auto_axes(explicit, make_mesh, rng):
    mesh = make_mesh({axis: EXPLICIT if axis == explicit else AUTO for axis in ("x", "y")})
    x, weights = random(rng, 8, 4, 16), random(rng, 16, 6)
    placed = place(x, mesh, P("x", None, "y")), place(weights, mesh, P("y"))
    compiled = jax.jit(product).lower(*placed).compile()
    assert {entry.kind for entry in collectives(compiled)} == {"all-reduce"}
    assert_close(compiled(*placed), expected_product(x, weights), dtype="float32")


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


def test_partly_manual(make_mesh, rng):
    mesh = make_mesh({"x": AUTO, "y": AUTO})
    x, weights = random(rng, 8, 4, 16), random(rng, 16, 6)
    placed = place(x, mesh, P("x", None, "y")), place(weights, mesh, P("y"))
    mapped = jax.shard_map(product, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"})
    compiled = jax.jit(mapped).lower(*placed).compile()
    assert {entry.kind for entry in collectives(compiled)} == {"all-reduce"}
    assert_close(compiled(*placed), expected_product(x, weights), dtype="float32")


@pytest.mark.parametrize("in_axes", [(0, None), (1, None), (2, None)])
def test_vmap(in_axes, rng):
    x, weights = random(rng, 8, 4, 16), random(rng, 16, 6)
    result = jax.vmap(product, in_axes, out_axes=in_axes[0])(jnp.moveaxis(x, 0, in_axes[0]), weights)
    assert_close(jnp.moveaxis(result, in_axes[0], 0), expected_product(x, weights), dtype="float32")


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


def test_nested_jit_and_scan(make_mesh, rng):
    mesh = make_mesh({"x": AUTO, "y": AUTO})
    x, weights = random(rng, 3, 8, 16), random(rng, 16, 16)
    placed = place(x, mesh, P(None, "x", "y")), place(weights, mesh, P("y"))

    @jax.jit
    def run(x, weights):
        return lax.scan(lambda carry, x: (carry + 1, jax.jit(product)(x, weights)), 0, x)[1]

    compiled = run.lower(*placed).compile()
    assert {entry.kind for entry in collectives(compiled)} == {"all-reduce"}
    assert_close(compiled(*placed), expected_product(x, weights), dtype="float32")


def test_static_arguments_are_part_of_the_operation(rng):
    x, weights = random(rng, 3, 16), random(rng, 16, 6)
    one, two = (scaled_product(x, weights, scale=scale)[0] for scale in (1.0, 2.0))
    assert_close(two, 2.0 * one)


def test_derivatives_are_the_operations_business(rng):
    x, weights = random(rng, 3, 16), random(rng, 16, 6)
    with pytest.raises(NotImplementedError, match="implementation='reference'"):
        jax.grad(lambda x: product(x, weights).sum())(x)


# ---------------------------------------------------------------------------------------------------------------- reuse


@native.per_shard("... -> ...", reuse={0: 0})
def with_reuse(x, *, axes, reuse):
    assert not axes
    REUSES.append(dict(reuse))
    return (x + 1,)


REUSES: list[dict[int, int]] = []


def test_function_is_told_what_it_may_reuse(rng):
    REUSES.clear()
    assert_close(jax.jit(lambda x: with_reuse(x)[0])(random(rng, 4) * 0), np.ones(4, np.float32))
    assert {} in REUSES
    assert {0: 0} in REUSES
