"""Linear layers on sharded operands: FP8 between devices, and shapes, kernels and meshes that are special.

What each sharding exchanges is in tests/conformance.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_oracle import RECIPES, random_case, warm_state
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax import ops
from te_jax.hlo import collectives, parse
from te_jax.testing import assert_close

pytestmark = pytest.mark.usefixtures("native_kernels")

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
axis_types = pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
BATCH, IN, OUT = (4, 256), 512, 512


def place(x, mesh, spec):
    # From NumPy: JAX would compile a program that cuts the array.
    return jax.device_put(np.asarray(x), NamedSharding(mesh, spec))


def placed(case, mesh, specs):
    return [place(a, mesh, spec) for a, spec in zip((case.x, case.kernel, case.dy), specs, strict=True)]


@functools.cache
def backward_of(**options):
    def gradients(x, kernel, dy):
        return jax.vjp(lambda x, kernel: ops.dense(x, kernel, **options), x, kernel)[1](dy)

    return jax.jit(gradients)


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_fsdp_gathers_fp8(recipe, make_mesh, rng, tmp_path):
    """One byte a value, half of bfloat16. XLA's CPU backend widens FP8 afterwards, so this reads the program before."""
    mesh = make_mesh({"data": AUTO, "model": AUTO})
    case = random_case(rng, BATCH, (IN,), (OUT,), with_bias=False)
    x, kernel, dy = placed(case, mesh, (P("data"), P("data"), P("data")))
    dump = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_pass_re": "spmd-partitioning"}
    backward_of(recipe=RECIPES[recipe]).lower(x, kernel, dy).compile(compiler_options=dump)
    (partitioned,) = tmp_path.glob("*gradients*after_spmd-partitioning*.txt")
    gathers = [entry for entry in parse(partitioned.read_text()) if entry.kind == "all-gather"]
    arrays = [array for entry in gathers for array in entry.results]
    assert {array.dtype for array in arrays} <= {"f8e4m3fn", "f32"}  # values, scales of blocks
    assert [array.bytes for array in arrays if array.dtype == "f8e4m3fn"] == [IN * OUT]
    assert sum(array.bytes for array in arrays) < 1.01 * IN * OUT


def test_blocks_that_a_part_of_an_axis_would_split(require_devices, rng):
    """6 blocks on 4 devices: Shardy proposes to split them over two of these."""
    require_devices(8)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AUTO, AUTO), devices=jax.devices()[:8])
    case = random_case(rng, BATCH, (768,), (768,))
    run = backward_of(recipe=RECIPES["block"])
    sharded = run(*placed(case, mesh, (P("data"), P("data", "model"), P("data"))))
    for found, expected in zip(sharded, run(case.x, case.kernel, case.dy), strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize(("recipe", "length"), [("block", 197), ("delayed", 196)])
def test_data_parallel_sequences_of_any_length(recipe, length, make_mesh, rng):
    """What crosses devices is the sum of the weight gradient and amaxes, never tokens."""
    mesh = make_mesh({"data": EXPLICIT if recipe == "block" else AUTO})
    case = random_case(rng, (mesh.size, length), (64,), (32,), with_bias=False)
    state = warm_state(case, RECIPES[recipe]) if recipe == "delayed" else None

    @jax.jit
    def gradients(x, kernel, dy, state):
        layer = functools.partial(ops.dense, recipe=RECIPES[recipe])
        return jax.vjp(lambda x, kernel, state: layer(x, kernel, scaling_state=state), x, kernel, state)[1](dy)

    operands = *placed(case, mesh, (P("data"), P(), P("data"))), jax.device_put(state, NamedSharding(mesh, P()))
    compiled = gradients.lower(*operands).compile()
    assert {collective.kind for collective in collectives(compiled)} == {"all-reduce"}
    assert max(collective.bytes for collective in collectives(compiled)) <= 4 * 64 * 32
    expected = gradients(case.x, case.kernel, case.dy, state)
    # Blocks of 128 tokens begin with every sequence where several devices share a batch.
    for one, other in zip(jax.tree.leaves(compiled(*operands)), jax.tree.leaves(expected), strict=True):
        assert_close(one, other, tolerance=5e-2 if recipe == "block" else 5e-3)


@axis_types
def test_a_warning_names_the_gather_of_blocks(axis_type, require_devices, rng):
    require_devices(2)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:2])
    case = random_case(rng, (192,), (64,), (32,), with_bias=False)
    with pytest.warns(RuntimeWarning, match="192 values is split over 2 devices, whose shards would cut blocks of 128"):
        backward_of(recipe=RECIPES["block"]).lower(*placed(case, mesh, (P("data"), P(), P("data")))).compile()


@pytest.mark.parametrize("kind", ["unreduced", "reduced"])
def test_sums_that_types_leave_to_others(kind, make_mesh):
    spec, x = P(None, None, **{kind: {"data"}}), jnp.zeros((16, 32))
    for name, function in (
        ("kernel", lambda kernel: ops.dense(x, kernel)),
        ("x", lambda x: ops.quantize(x, RECIPES["current"].quantization("activation"))),
        ("logits", lambda logits: ops.softmax_cross_entropy(logits, jnp.zeros(32, jnp.int32))),
    ):
        with (
            jax.set_mesh(make_mesh({"data": EXPLICIT})),
            pytest.raises(ValueError, match=rf"^{name} is {kind} over \['data'\], .*: pass it through jax.reshard"),
        ):
            jax.eval_shape(lambda array, function=function: function(jax.reshard(array, spec)), jnp.zeros((32, 16)))


def test_sums_that_shard_map_leaves_to_others(make_mesh):
    def local(x):
        return ops.dense(lax.pcast(x, "data", to="unreduced"), jnp.zeros((16, 32)))

    run = jax.shard_map(local, mesh=make_mesh({"data": AUTO}), in_specs=P("data"), out_specs=P("data"))
    with pytest.raises(ValueError, match=r"^x is unreduced over \['data'\], a part of a sum on each device: sum it"):
        jax.eval_shape(run, jnp.zeros((32, 16)))
