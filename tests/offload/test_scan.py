"""The copies of `te_jax.layers.scan_layers`: delayed, through poisoned slots, and called in an order that is none."""

import functools
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import compiled, know_handlers, needs_compiler
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from late_copies import late_copies

from te_jax import testing
from te_jax.layers import apply_layers, residual_table, scan_layers
from te_jax.offload import LAYER_INPUT, Offload

KEEP_HIDDEN = jax.checkpoint_policies.save_only_these_names("hidden")


@pytest.fixture
def delays():
    with late_copies():
        yield


def layer(x, params):
    hidden = checkpoint_name(x @ params["up"], "hidden")
    return x + jnp.tanh(hidden) @ params["down"]


def loss(params, x, remat, offload):
    return jnp.sum(jnp.sin(scan_layers(layer, params, x, remat=remat, offload=offload)))


def gradient(remat, offload):
    return jax.jit(jax.value_and_grad(functools.partial(loss, remat=remat, offload=offload), argnums=(0, 1)))


def drawn(rng, layers=7, width=32, mlp=48, rows=16):
    def normal(*shape):
        return jax.device_put(np.asarray(rng.standard_normal(shape) / shape[-2] ** 0.5, np.float32))

    return {"up": normal(layers, width, mlp), "down": normal(layers, mlp, width)}, normal(rows, width)


def assert_close(found, expected):
    """Up to the order of sums, which XLA chooses for each program."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        testing.assert_close(one, other, tolerance=1e-3)


def assert_same_bits(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("slots", [1, 2, 3, 9])
@pytest.mark.parametrize(
    ("remat", "options"),
    [
        (True, {"names": [LAYER_INPUT]}),
        (KEEP_HIDDEN, {"names": ["hidden", LAYER_INPUT], "keep": 2}),
        (KEEP_HIDDEN, {"names": ["hidden"], "quantize": True}),
    ],
    ids=["input", "two pieces, two stay", "FP8"],
)
def test_no_copy_is_read_or_overwritten_too_early(slots, remat, options, rng):
    """Several executions at a time, from several threads: the bits are those of one after another without delays."""
    operands = [drawn(rng) for _ in range(8)]
    found = gradient(remat, Offload(min_size=0, implementation="native", slots=slots, **options))
    wanted = [jax.block_until_ready(found(*of)) for of in operands]
    by_xla = gradient(remat, Offload(min_size=0, implementation="xla", **options))
    assert_close(wanted[0], by_xla(*operands[0]))
    results = [None] * len(operands)

    def run(thread):
        for place in range(thread, len(operands), 2):
            results[place] = found(*operands[place])

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(2)]
    with late_copies():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        jax.block_until_ready(results)
    assert_same_bits(results, wanted)


@pytest.mark.parametrize("number", range(2))
def test_random_stacks(number, delays, rng):
    sizes = {
        name: int(rng.integers(1, most)) for name, most in {"layers": 9, "width": 200, "mlp": 200, "rows": 20}.items()
    }
    operands = drawn(rng, **sizes)
    names, keep = ["hidden", LAYER_INPUT][: rng.integers(1, 3)], int(rng.integers(1, 4))
    options = {"names": names, "keep": keep, "min_size": int(rng.choice([0, 4096]))}
    if rng.integers(2):
        options["quantize"] = True
    found = gradient(KEEP_HIDDEN, Offload(implementation="native", slots=int(rng.integers(1, 5)), **options))
    expected = gradient(KEEP_HIDDEN, Offload(implementation="xla", **options))(*operands)
    for _ in range(2):
        assert_close(found(*operands), expected)


@pytest.mark.parametrize(("loop", "copies"), [(apply_layers, "xla"), (scan_layers, "xla"), (scan_layers, "native")])
def test_vectors_in_fp8(loop, copies, rng):
    params, x = drawn(rng, rows=1, layers=2)

    @jax.jit
    def both(params, x):
        offloads = None, Offload(min_size=0, quantize=True, implementation=copies)
        return [jax.grad(lambda p: jnp.sum(loop(layer, p, x, offload=of)))(params) for of in offloads]  # noqa: B023

    (exact, found), up = both(params, x[0]), lambda gradient: gradient["up"][0]
    testing.assert_close(up(found), up(exact), tolerance=0.1)
    assert np.any(up(found) != up(exact))


def test_a_name_in_a_layer_that_is_checkpointed_itself(rng):
    """For what a policy saves of a function that is not jitted, `jax.checkpoint` adds a reduce_precision."""
    params, x = drawn(rng)
    checkpointed, offload = jax.checkpoint(layer, policy=KEEP_HIDDEN), Offload(["hidden"], min_size=0)
    table = residual_table(checkpointed, params, x, offload=offload)
    assert re.search(r"host .* hidden: float32\[16, 48\]", table)


def test_a_backward_pass_runs_twice(delays, rng):
    """It takes rows from the stack and leaves them there."""
    params, x = drawn(rng)
    offload = Offload(min_size=0, implementation="native")
    _, backward = jax.vjp(lambda *a: loss(*a, True, offload), params, x)
    (first, second), expected = (backward(1.0), backward(1.0)), gradient(True, None)(params, x)[1]
    assert_same_bits(first, second)
    assert_close(first, expected)

    @jax.jit
    def both(params, x):
        _, backward = jax.vjp(lambda *a: loss(*a, True, offload), params, x)
        return backward(1.0), backward(1.0)

    assert_same_bits(*both(params, x))


def test_two_stacks_of_the_same_values(delays, rng):
    """XLA would make one of two calls that are alike, and of two stacks."""
    params, x = drawn(rng)
    offload = Offload(min_size=0, implementation="native")

    def twice(params, x):
        return loss(params, x, True, offload) * loss(params, x, True, offload)

    (value, gradients), (one, of_one) = jax.jit(jax.value_and_grad(twice))(params, x), gradient(True, None)(params, x)
    np.testing.assert_allclose(value, one * one, rtol=2e-5)
    expected = jax.tree.map(lambda leaf: 2 * one * leaf, of_one[0])
    assert_close(gradients, expected)


@pytest.mark.parametrize("layers", [1, 2])
def test_few_layers(layers, delays, rng):
    params, x = drawn(rng, layers=layers)
    found = gradient(KEEP_HIDDEN, Offload(min_size=0, implementation="native", keep=2, slots=5))
    assert_close(found(params, x), gradient(KEEP_HIDDEN, Offload(min_size=0, implementation="xla"))(params, x))


def test_without_layers(rng):
    params, x = drawn(rng, layers=0)
    assert scan_layers(layer, params, x, offload=Offload()) is x


def test_a_program_without_a_backward_pass_copies_nothing(rng):
    offload = Offload(min_size=0, implementation="native")
    forward = jax.jit(functools.partial(loss, remat=True, offload=offload)).lower(*drawn(rng)).compile().as_text()
    assert "te_offload" not in forward


def test_what_is_refused(rng):
    params, x = drawn(rng)
    with pytest.raises(ValueError, match=r"layer returns float32\[16, 48\] for an x of float32\[16, 32\]"):
        scan_layers(lambda x, p: x @ p["up"], params, x, offload=Offload(implementation="xla"))
    with pytest.raises(ValueError, match="stacked parameters need a first dimension of one size"):
        scan_layers(layer, [params["up"], x], x)
    in_fp8 = gradient(True, Offload(min_size=0, quantize=True, implementation="xla"))
    with jax.enable_x64(True):
        of_64_bits = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), (params, x))
        with pytest.raises(ValueError, match=r"layer_input: float64\[16, 32\] is not quantized"):
            jax.eval_shape(in_fp8, *of_64_bits)
    with pytest.raises(ValueError, match=r"names \['hiden'\]"):
        gradient(True, Offload(names=["hiden"], implementation="xla"))(params, x)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_arrays_on_several_devices(axis_type, require_devices, rng):
    """No mesh is entered, so only the program says so."""
    require_devices(2)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(axis_type,))
    params, x = drawn(rng)
    operands = jax.device_put(params, NamedSharding(mesh, P())), jax.device_put(x, NamedSharding(mesh, P("data")))
    with pytest.raises(ValueError, match="arrays of this program are on several devices"):
        gradient(True, Offload(min_size=0, implementation="native")).lower(*operands)


@needs_compiler
def test_a_pass_ends_where_its_rows_are_not_read(monkeypatch):
    """The forward pass of a layer that runs again keeps nothing: its copies would go on in memory that others have."""
    know_handlers()
    monkeypatch.setattr("te_jax.native.use_native", lambda *_, **__: True)
    offload = Offload(min_size=0, implementation="native")

    def loss(params, x):
        group = lambda x, params: scan_layers(layer, params, x, remat=True, offload=offload)  # noqa: E731
        return jnp.sum(scan_layers(group, params, x, remat=True))

    params, x = drawn(np.random.default_rng(0))
    groups = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), params)
    text = compiled(jax.grad(loss), groups, x).as_text()
    assert text.count('"te_offload_begin_store"') == 1
    assert text.count('"te_offload_end_store"') == 2  # of the stack, and of the rows that stay


def test_the_execution_after_one_that_failed(rng):
    """It is right, though a pass of the one before has no end."""
    params, x = drawn(rng)
    offload, fail = Offload(min_size=0, implementation="native"), [True]

    def check(value):
        if fail[0]:
            raise FloatingPointError("as asked")
        return value

    def failing(x, p):
        y = layer(x, p)
        return y + (jax.pure_callback(check, jax.ShapeDtypeStruct((), y.dtype), lax.stop_gradient(y[0, 0])) * 0)

    def loss(params, x, offload):
        return jnp.sum(jnp.sin(scan_layers(failing, params, x, offload=offload)))

    found = jax.jit(jax.grad(functools.partial(loss, offload=offload)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="as asked"):
        jax.block_until_ready(found(params, x))
    fail[0] = False
    expected = jax.jit(jax.grad(functools.partial(loss, offload=None)))(params, x)
    assert_close(found(params, x), expected)
