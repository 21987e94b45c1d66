"""Loops of layers inside of loops, branches and batches: gradients of the same layers one after another.

Copies of native offload come late here, and slots hold NaN before, so that rows that are read too early show.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from late_copies import late_copies
from parameters import in_turns

from te_jax import debug, ops
from te_jax.layers import apply_layers, scan_layers
from te_jax.offload import LAYER_INPUT, Offload
from te_jax.parallel import FSDP
from te_jax.recipe import CurrentScaling, DelayedScaling
from te_jax.testing import assert_close

GROUPS, LAYERS, ROWS, WIDTH = 3, 3, 4, 32


def layer(x, kernel):
    return jnp.tanh(x @ kernel) + x


def layer_in_fp8(x, kernel):
    return jnp.tanh(ops.dense(x, kernel, recipe=CurrentScaling())) + x


def one_by_one(params, x):
    for kernel in params:
        x = layer(x, kernel)
    return x


def offload(implementation=None):
    return Offload(names=[LAYER_INPUT], min_size=0, implementation=implementation)


LOOPS = {
    "native": lambda p, x: scan_layers(layer, p, x, remat=True, offload=offload("native")),
    "xla": lambda p, x: scan_layers(layer, p, x, remat=True, offload=offload("xla")),
    "apply with offload": lambda p, x: apply_layers(layer, p, x, remat=True, offload=offload()),
    "scan": lambda p, x: scan_layers(layer, p, x, remat=True),
    "apply": lambda p, x: apply_layers(layer, p, x),
    "fsdp": lambda p, x: apply_layers(layer, p, x, fsdp=FSDP(2, min_size=1, reduce_dtype="float32")),
}


def loss(run, params, x):
    return jnp.sum(jnp.sin(run(params, x)))


# Nests: of a loop, groups [GROUPS, LAYERS, WIDTH, WIDTH] and xs [GROUPS, ROWS, WIDTH], a number and its gradients.


def gradients(function):
    return functools.wraps(function)(jax.value_and_grad(function, argnums=(1, 2)))


@gradients
def scan_over_microbatches(run, groups, xs):
    return lax.scan(lambda total, x: (total + loss(run, groups[0], x), None), 0.0, xs)[0]


@gradients
def scan_over_parameters(run, groups, xs):
    return lax.scan(lambda total, params: (total + loss(run, params, xs[0]), None), 0.0, groups)[0]


@gradients
def map_of_recomputed_bodies(run, groups, xs):
    return lax.map(jax.checkpoint(lambda of: loss(run, *of)), (groups, xs)).sum()


def gradients_in_a_scan(run, groups, xs):
    def body(total, of):
        value, of_each = jax.value_and_grad(loss, argnums=(1, 2))(run, *of)
        return total + value, of_each

    return lax.scan(body, 0.0, (groups, xs))


def gradients_in_a_while_loop(run, groups, xs):
    """Its number of iterations is known only when it runs."""

    def body(carry):
        i, total, sums = carry
        value, of_each = jax.value_and_grad(loss, argnums=(1, 2))(run, groups[i], xs[i])
        return i + 1, total + value, jax.tree.map(lambda all_, one: all_.at[i].set(one), sums, of_each)

    end = jnp.where(xs[0, 0, 0] < 1e9, GROUPS, 0)
    zeros = jnp.zeros_like(groups), jnp.zeros_like(xs)
    return lax.while_loop(lambda carry: carry[0] < end, body, (0, jnp.zeros(()), zeros))[1:]


@gradients
def scan_layers_around(run, groups, xs):
    return jnp.sum(jnp.sin(scan_layers(lambda x, params: run(params, x), groups, xs[0])))


@gradients
def scan_layers_with_offload_around(run, groups, xs):
    around = Offload(min_size=0, implementation="native")
    return jnp.sum(jnp.sin(scan_layers(lambda x, params: run(params, x), groups, xs[0], offload=around)))


@gradients
def scan_layers_with_remat_around(run, groups, xs):
    x = scan_layers(lambda x, params: run(params, x), groups, xs[0], remat=True, offload=offload("native"))
    return jnp.sum(jnp.sin(x))


@gradients
def apply_layers_with_remat_around(run, groups, xs):
    return jnp.sum(jnp.sin(apply_layers(lambda x, params: run(params, x), groups, xs[0], remat=True)))


@gradients
def cond(run, groups, xs):
    """Only one branch has residuals."""
    chosen = lambda x: lax.cond(x[0, 0] < 1e9, lambda x: loss(run, groups[1], x), jnp.sum, x)  # noqa: E731
    return chosen(xs[0]) + chosen(xs[1] + 2e9)


@gradients
def switch_of_recomputed_branches(run, groups, xs):
    def body(total, of):
        i, x = of
        branches = [lambda x: loss(run, groups[0], x), lambda x: loss(run, groups[1], 2 * x), jnp.sum]
        return total + lax.switch(i, [jax.checkpoint(branch) for branch in branches], x), None

    return lax.scan(body, 0.0, (jnp.arange(GROUPS), xs))[0]


@gradients
def vmap(run, groups, xs):
    return jax.vmap(lambda x: loss(run, groups[0], x))(xs).sum()


def vmap_of_a_backward_pass(run, groups, xs):
    value, backward = jax.vjp(lambda params, x: jnp.sin(run(params, x)), groups[0], xs[0])
    return jnp.sum(value), jax.vmap(backward)(xs)


NESTS = [
    scan_over_microbatches, scan_over_parameters, map_of_recomputed_bodies, gradients_in_a_scan,
    gradients_in_a_while_loop, scan_layers_around, scan_layers_with_offload_around, scan_layers_with_remat_around,
    apply_layers_with_remat_around, cond, switch_of_recomputed_branches, vmap, vmap_of_a_backward_pass,
]  # fmt: skip
BY_NAME = {nest.__name__: nest for nest in NESTS}
OFFLOADS = {name: LOOPS[name] for name in ("native", "xla", "apply with offload")}
# Residuals leave a loop or a branch, which XLA for GPUs does not do in host memory.
LEAVING = {scan_over_microbatches, scan_over_parameters, scan_layers_around, scan_layers_with_offload_around, cond}


def drawn(rng):
    def normal(*shape):
        return np.asarray(rng.standard_normal(shape) * 0.2, np.float32)

    return normal(GROUPS, LAYERS, WIDTH, WIDTH), normal(GROUPS, ROWS, WIDTH)


def refusal(nest, run):
    """What a nest is refused with; None where its gradients must be right."""
    if run is LOOPS["native"] and nest is vmap:
        return NotImplementedError, "scan_layers with offload under jax.vmap: map inside of the layer"
    if jax.default_backend() == "gpu" and nest in LEAVING and run in OFFLOADS.values():
        return ValueError, "Take the gradient inside of the body"
    return None


expectation = functools.cache(lambda nest: jax.jit(functools.partial(nest, one_by_one)))


def check(nest, run, rng, mesh=None):
    """Two executions, with other operands, against layers one after another."""
    compute, expect = jax.jit(functools.partial(nest, run)), expectation(nest)
    if refused := refusal(nest, run):
        with pytest.raises(refused[0], match=refused[1]):
            jax.block_until_ready(compute(*drawn(rng)))
        return
    for late in (True, False):
        operands = drawn(rng)
        with (
            late_copies() if late and run is LOOPS["native"] else contextlib.nullcontext(),
            jax.set_mesh(mesh) if mesh else contextlib.nullcontext(),
        ):
            results = jax.block_until_ready(compute(*operands))
        jax.tree.map(lambda one, other: assert_close(one, other, tolerance=1e-3), results, expect(*operands))


@pytest.mark.parametrize("nest", NESTS, ids=BY_NAME)
def test_native_offload(nest, rng):
    check(nest, LOOPS["native"], rng)


@pytest.fixture
def mesh(require_devices):
    require_devices(2)
    return Mesh(np.array(jax.devices()[:2]), ("fsdp",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("nest", [scan_over_microbatches, gradients_in_a_while_loop, scan_layers_around, cond, vmap])
def test_fsdp(nest, mesh, rng):
    check(nest, LOOPS["fsdp"], rng, mesh)


def test_statistics(rng):
    """They are of every layer, and the results are those of the program without them."""
    nest = scan_over_parameters
    groups, xs = drawn(rng)
    xs = np.tile(xs, (1, 4, 1))  # FP8 has products of 16 rows
    loop = lambda p, x: scan_layers(layer_in_fp8, p, x, remat=True, offload=offload("native"))  # noqa: E731
    program = functools.partial(nest, loop)
    if refusal(nest, LOOPS["native"]):
        pytest.skip("is refused here, as test_native_offload sees")
    results, statistics = jax.jit(debug.with_statistics(program))(groups, xs)
    jax.tree.map(lambda one, other: assert_close(one, other, tolerance=1e-3), results, jax.jit(program)(groups, xs))
    assert statistics["groups"]["activation"]["forward"].amax.shape == (GROUPS, LAYERS)


def test_delayed_scaling(rng):
    """The gradient of the state in one iteration is the state of the next."""
    recipe = DelayedScaling(history_len=3)
    groups, xs = drawn(rng)
    xs = np.tile(xs, (1, 4, 1))
    states = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (LAYERS, *leaf.shape)), recipe.init())

    def product(x, params):
        return jnp.tanh(ops.dense(x, params["kernel"], recipe=recipe, scaling_state=params["state"]))

    def step(params, x):
        loss = lambda p: jnp.sum(scan_layers(product, p, x, remat=True, offload=offload("native")))  # noqa: E731
        of_params = jax.grad(loss)(params)
        return {"kernel": params["kernel"], "state": of_params["state"]}, of_params["state"].kernel[:, 0]

    _, amax = jax.jit(lambda params, xs: lax.scan(step, params, xs))({"kernel": groups[0], "state": states}, xs)
    expected = np.abs(groups[0]).max((1, 2))
    jax.tree.map(lambda row: np.testing.assert_array_equal(row, expected), list(amax))


OTHERS = {name: run for name, run in LOOPS.items() if name not in ("native", "fsdp")}


@pytest.mark.parametrize(("nest", "run"), in_turns(BY_NAME, OTHERS))
def test_other_loops(nest, run, rng):
    check(nest, run, rng)
