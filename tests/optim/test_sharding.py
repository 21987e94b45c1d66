"""Optimizers of sharded parameters: states lie where parameters do, and every bit is that of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optim_cases import FLOAT8, adam_state, assert_same, normal_like
from parameters import in_turns

from te_jax import optim
from te_jax.hlo import collectives

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
AXIS_TYPES = {"explicit": EXPLICIT, "auto": AUTO}
# Of parameters on 4 × 2 devices; with whole blocks on each, and with blocks that shards cut.
WHOLE = {
    "cols over both": ((3, 1024), P(None, ("model", "data"))),
    "rows": ((4, 2, 136), P("data", "model")),
    "one dimension": ((2048,), P(("data", "model"))),
}
CUT = {"cols": ((8, 200), P("data", "model")), "blocks that do not divide": ((6, 384), P(None, "data"))}
NARROW = optim.scale_by_adam(mu_dtype="bfloat16", nu_dtype=FLOAT8)


@pytest.fixture
def mesh(axis_type, make_mesh):
    return make_mesh({"data": axis_type, "model": axis_type})


def place(tree, mesh, spec):
    # From NumPy: JAX would compile a program that cuts the array.
    return jax.device_put(jax.tree.map(np.asarray, tree), NamedSharding(mesh, spec))


def assert_sharded_as(state, param):
    """Moments as the parameter; bounds too, where there are as many as shards or a multiple."""
    rows, cols = param.sharding.spec[: param.ndim - 1], (*param.sharding.spec, *[None] * param.ndim)[param.ndim - 1]
    for moment, bounds in ((state.mu, state.mu_bounds), (state.nu, state.nu_bounds)):
        assert moment.sharding.is_equivalent_to(param.sharding, param.ndim)
        if bounds is not None:
            names = (cols,) if isinstance(cols, str) else cols or ()
            shards = np.prod([param.sharding.mesh.shape[name] for name in names], dtype=int)
            rows = (*rows, *[None] * (param.ndim - 1 - len(rows)))
            expected = P(*rows, cols if bounds.shape[-1] % shards == 0 else None)
            assert bounds.sharding.is_equivalent_to(NamedSharding(param.sharding.mesh, expected), param.ndim)


def update_both(transform, shape, spec, mesh, rng):
    """Two updates: compiled for the sharding, with its results, and those of one device."""
    x = jnp.zeros(shape)
    gradients = [normal_like(rng, x) for _ in range(2)]
    expected, update = transform.init(x), jax.jit(transform.update)
    for g in gradients:
        expected_updates, expected = update(g, expected, x)
    placed, *gradients = (place(array, mesh, spec) for array in (x, *gradients))
    # As a loop finds it: the count is on all devices after the first step.
    state = transform.init(placed)
    assert_sharded_as(state, placed)
    abstract = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=placed.sharding)
    assert_sharded_as(transform.init(abstract), abstract)  # what a checkpoint is restored to
    state = jax.device_put(state, jax.tree.map(lambda s: s.sharding if s.ndim else NamedSharding(mesh, P()), state))
    compiled = jax.jit(transform.update).lower(gradients[0], state, placed).compile()
    for g in gradients:
        updates, state = compiled(g, state, placed)
    assert updates.sharding.is_equivalent_to(placed.sharding, placed.ndim)
    assert_sharded_as(state, placed)
    assert_same_values((updates, state), (expected_updates, expected))
    return compiled


def assert_same_values(actual, expected):
    """Every bit, but for the last of bounds: what XLA fuses in so small an array depends on its size."""
    (updates, state), (expected_updates, expected) = actual, expected
    for name in ("mu_bounds", "nu_bounds"):
        if getattr(expected, name) is not None:
            jax.tree.map(
                lambda a, e: np.testing.assert_array_almost_equal_nulp(np.asarray(a), np.asarray(e), nulp=2),
                *(getattr(s, name) for s in (state, expected)),
            )
    state, expected = (s._replace(mu_bounds=None, nu_bounds=None) for s in (state, expected))
    assert_same((updates, state), (expected_updates, expected))


@pytest.mark.parametrize(("case", "axis_type"), in_turns(WHOLE, AXIS_TYPES))
def test_shards_of_whole_blocks_exchange_nothing(case, mesh, rng):
    shape, spec = case
    assert collectives(update_both(NARROW, shape, spec, mesh, rng)) == []


@pytest.mark.parametrize(("case", "axis_type"), in_turns(CUT, AXIS_TYPES))
def test_blocks_that_shards_cut(case, mesh, rng):
    shape, spec = case
    """Gathered or exchanged; the bits are those of whole ones."""
    assert collectives(update_both(NARROW, shape, spec, mesh, rng)) != []


def test_bfloat16_has_no_blocks(make_mesh, rng):
    """And no exchange, however odd the shards are."""
    transform, mesh = (
        optim.scale_by_adam(mu_dtype="bfloat16", nu_dtype="bfloat16"),
        make_mesh({"data": AUTO, "model": AUTO}),
    )
    assert collectives(update_both(transform, *CUT["cols"], mesh, rng)) == []


def test_shard_map(make_mesh, rng):
    """Every shard is updated as an array of its own, whose places are counted within it."""
    mesh = make_mesh({"data": AUTO, "model": AUTO})
    spec = P("data", "model")
    optimizer = optim.adamw(0.1, mu_dtype="bfloat16", nu_dtype=FLOAT8, master_dtype="float32")
    params = normal_like(rng, jnp.zeros((8, 512), jnp.bfloat16))
    gradients = [normal_like(rng, params) for _ in range(2)]
    specs = jax.tree.map(lambda x: spec if x.ndim else P(), optimizer.init(params))

    def step(params, state, g):
        updates, state = optimizer.update(g, state, params)
        return optim.apply_updates(params, updates), state

    init = jax.jit(jax.shard_map(optimizer.init, mesh=mesh, in_specs=spec, out_specs=specs, check_vma=False))
    run = jax.shard_map(step, mesh=mesh, in_specs=(spec, specs, spec), out_specs=(spec, specs), check_vma=True)
    actual, state = params, init(params)
    run, alone = jax.jit(run), jax.jit(step)
    for g in gradients:
        actual, state = run(actual, state, g)
    rows, cols = 8 // mesh.shape["data"], 512 // mesh.shape["model"]
    part = np.s_[rows : 2 * rows, cols : 2 * cols]
    expected, expected_state = params[part], optimizer.init(params[part])
    for g in gradients:
        expected, expected_state = alone(expected, expected_state, g[part])
    assert_same(actual[part], expected)
    assert_same(
        (state.master[part], adam_state(state).nu[part]), (expected_state.master, adam_state(expected_state).nu)
    )


class Parameters(nnx.Module):
    """Parameters on 4 × 2 devices: blocks that divide, and blocks that do not, in two dimensions and in one."""

    def __init__(self, values, names):
        for name, value in values.items():
            setattr(self, name, nnx.Param(value, out_sharding=names[name]))


BOXED = {"whole": (8, 512), "cut": (264,)}
NAMES = {name: ("data", "model")[-len(shape) :] for name, shape in BOXED.items()}
LAST_OF_BOUNDS = {"whole": "model", "cut": None}


@pytest.mark.parametrize(("mu_dtype", "jit", "axis_type"), in_turns(["float8_e4m3fn"], {"jit": True}, AXIS_TYPES))
def test_nnx_optimizer_of_parameters_with_out_sharding(mesh, jit, mu_dtype, rng):
    """Bounds are split as the names of their axes say, which are the parameter's where devices divide the blocks."""
    values = normal_like(rng, {name: jnp.zeros(shape) for name, shape in BOXED.items()})
    optimizer = optim.adamw(0.1, mu_dtype=mu_dtype, nu_dtype=FLOAT8, stochastic_rounding=False)
    expected, _ = jax.jit(optimizer.update)(values, optimizer.init(values), values)
    with jax.set_mesh(mesh):
        model = Parameters(jax.device_put(values, NamedSharding(mesh, P())), NAMES)
        make = lambda model: nnx.Optimizer(model, optimizer, wrt=nnx.Param)  # noqa: E731
        wrapper = (nnx.jit(make) if jit else make)(model)
        for wanted in (expected, None):  # names and shardings stay what they are in later steps
            state = adam_state(wrapper.opt_state)
            for name, last in LAST_OF_BOUNDS.items():
                names = (*NAMES[name][:-1], last)
                for tree in (state.mu_bounds, state.nu_bounds):
                    if tree is not None:
                        value = tree[name].get_value()
                        assert tree[name].get_metadata("out_sharding") == names
                        assert value.sharding.is_equivalent_to(NamedSharding(mesh, P(*names)), value.ndim)
            updates = nnx.jit(lambda wrapper, model: wrapper.update(model, nnx.state(model, nnx.Param)))(wrapper, model)
            for name in wanted or ():
                np.testing.assert_allclose(updates[name], wanted[name], rtol=1e-5)
