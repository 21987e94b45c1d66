"""`apply_layers` and `scan_layers` of te_jax.layers with offload, against themselves without, and what leaves."""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from parameters import in_turns

from te_jax import native
from te_jax.layers import apply_layers, residual_table, scan_layers
from te_jax.offload import LAYER_INPUT, Offload, stack
from te_jax.testing import assert_close

LAYERS, WIDTH, ROWS = 4, 16, 8
KEEP_HIDDEN = jax.checkpoint_policies.save_only_these_names("hidden")
ALL = Offload(min_size=0)
CASES = {
    "everything": (None, ALL),
    "input": (True, ALL),
    "input and hidden": (KEEP_HIDDEN, ALL),
    "hidden": (KEEP_HIDDEN, Offload(names=["hidden"], min_size=0)),
    "two stay": (True, Offload(min_size=0, keep=2)),
    "all stay": (True, Offload(min_size=0, keep=LAYERS)),
    "rule": (None, Offload(names=lambda residual: residual.shape == (ROWS, WIDTH), min_size=0)),
}


def scanned(layer, params, x, *, remat=None, offload=None, implementation=None):
    """scan_layers as apply_layers is called: with a list of parameters."""
    if offload is not None:
        offload = dataclasses.replace(offload, implementation=implementation)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
    return scan_layers(layer, stacked, x, remat=remat, offload=offload)


LOOPS = {
    "loop": apply_layers,
    "scan by xla": functools.partial(scanned, implementation="xla"),
    "scan": functools.partial(scanned, implementation="native"),
}


def layer(x, params):
    hidden = checkpoint_name(jnp.tanh(x["stream"] @ params["kernel"]), "hidden")
    return {"stream": x["stream"] + jnp.sin(hidden) * params["scale"], "count": x["count"] + 1}


def total(params, stream, *, run=layer, loop=apply_layers, **options):
    return jnp.sum(jnp.cos(loop(run, params, {"stream": stream, "count": jnp.int32(0)}, **options)["stream"]))


def normal(rng, *shape):
    return jax.device_put(np.asarray(rng.standard_normal(shape) / WIDTH**0.5, np.float32))


@pytest.fixture
def params(rng):
    return [{"kernel": normal(rng, WIDTH, WIDTH), "scale": jnp.float32(rng.uniform(0.5, 1.5))} for _ in range(LAYERS)]


@pytest.fixture
def stream(rng):
    return WIDTH**0.5 * normal(rng, ROWS, WIDTH)


def gradient(remat, offload, **options):
    return jax.value_and_grad(lambda *a: total(*a, remat=remat, offload=offload, **options), argnums=(0, 1))


gradient_without = functools.cache(lambda: jax.jit(gradient(None, None)))


def assert_equal(found, expected):
    """Up to the order of sums, of which scalars may be nearly 0 by cancellation."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        assert one.sharding.memory_kind == "device"
        if one.ndim == 0:
            assert float(one) == pytest.approx(float(other), rel=1e-5, abs=1e-4)
        else:
            assert_close(one, other, tolerance=1e-5)


@pytest.mark.parametrize(("case", "loop"), in_turns(CASES, LOOPS))
def test_values_and_gradients_are_those_without_offload(case, loop, params, stream):
    remat, offload = case
    found = jax.jit(gradient(remat, offload, loop=loop))(params, stream)
    assert_equal(found, gradient_without()(params, stream))


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, (x, x[:0])), lambda kept, g: (2 * g + 0 * kept[0] + kept[1].sum(),))


@pytest.mark.parametrize("loop", [apply_layers, LOOPS["scan"]], ids=["loop", "scan"])
def test_residuals_without_values_stay_in_their_layer(loop, params, stream):
    """cuDNN's attention of jax.nn has some, and XLA of jax 0.11 does not survive one that leaves a shard_map."""

    def run(x, params):
        return {**x, "stream": jnp.tanh(doubled(x["stream"] @ params["kernel"])) + doubled(x["stream"])}

    @jax.jit
    def both(*operands):
        _, backward = jax.vjp(functools.partial(total, run=run, loop=loop, offload=ALL), *operands)
        assert all(leaf.size for leaf in jax.tree.leaves(backward))
        return backward(jnp.float32(1)), jax.grad(functools.partial(total, run=run), argnums=(0, 1))(*operands)

    assert_equal(*both(params, stream))


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                yield from equations(getattr(inner, "jaxpr", inner))


def copies(function, *operands):
    """The types of what goes to the host, and of what comes back."""
    there, back = [], []
    for eqn in equations(jax.make_jaxpr(function)(*operands).jaxpr):
        if eqn.primitive.name == "device_put":
            for var in eqn.outvars:
                is_host = var.aval.memory_space == jax.memory.Space.Host
                (there if is_host else back).append((var.aval.dtype.name, var.aval.shape))
    return sorted(there), sorted(back)


@pytest.mark.parametrize(
    ("case", "leaves"),
    [("input", 1), ("input and hidden", 2), ("hidden", 1), ("two stay", 1), ("all stay", 0), ("everything", None)],
)
def test_what_leaves_comes_back_once(case, leaves, params, stream, monkeypatch):
    monkeypatch.setattr(stack, "is_whole", lambda: False)
    remat, offload = CASES[case]
    there, back = copies(gradient(remat, offload), params, stream)
    assert there == back
    stay = {"two stay": 2, "all stay": LAYERS}.get(case, 1)
    if leaves is None:
        assert len(there) > 2 * (LAYERS - 1)
    else:
        assert there == [("float32", (ROWS, WIDTH))] * leaves * (LAYERS - stay)
    assert copies(lambda *a: total(*a, remat=remat, offload=offload), params, stream) == ([], [])


def test_many_residuals_of_a_layer_leave_as_one_array(params, stream, monkeypatch):
    """One for each dtype, so that no more than two copies are under way."""

    def run(x, p):
        for name in ("a", "b", "c", "d"):
            x = x + jnp.sin(checkpoint_name(jnp.tanh(x @ p["kernel"]), name))
        return x

    def loss(p, x):
        return jnp.sum(jnp.cos(apply_layers(run, p, x, remat=keep, offload=offload)))

    keep = jax.checkpoint_policies.save_only_these_names("a", "b", "c", "d")
    offload = Offload(names=("a", "b", "c", "d"), min_size=0, quantize=("b",))
    monkeypatch.setattr(stack, "is_whole", lambda: False)
    expected = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, stream)
    monkeypatch.setattr(stack, "is_whole", lambda: True)
    gradient = jax.grad(lambda p, x: loss(p, x), argnums=(0, 1))
    there, back = copies(gradient, params, stream)
    assert there == back == sorted([("float32", (3 * ROWS * WIDTH,)), ("float8_e4m3fn", (ROWS, WIDTH))] * (LAYERS - 1))
    assert_equal(jax.jit(gradient)(params, stream), expected)


def test_parameters_and_what_follows_from_them_stay(params, stream):
    def run(x, p):
        return x @ jnp.sin(p["kernel"]) * p["scale"]

    there, _ = copies(jax.grad(lambda p, x: jnp.sum(apply_layers(run, p, x, offload=ALL))), params, stream)
    assert ("float32", (WIDTH, WIDTH)) not in there
    assert ("float32", (ROWS, WIDTH)) in there


def test_one_array_in_two_shapes_leaves_once(params, stream):
    def run(x, p):
        hidden = checkpoint_name(jnp.tanh(x @ p["kernel"]), "hidden")
        heads = hidden.reshape(ROWS, 4, -1)
        return x + jnp.sin(x) * hidden + (jnp.cos(x).reshape(heads.shape) * heads).reshape(x.shape)

    def loss(p, x, offload):
        return jnp.sum(jnp.cos(apply_layers(run, p, x, remat=None, offload=offload)))

    offload = Offload(names=["hidden"], min_size=0)
    there, _ = copies(jax.grad(lambda p, x: loss(p, x, offload)), params, stream)
    assert len(there) == LAYERS - 1
    expected = jax.jit(jax.grad(lambda p, x: loss(p, x, None)))(params, stream)
    assert_equal(jax.jit(jax.grad(lambda p, x: loss(p, x, offload)))(params, stream), expected)


@pytest.mark.parametrize("order", ["C", "F"])
def test_one_array_in_another_order(order, params, stream):
    """Residuals of as many values and bytes: the array leaves once if they are in the same order, else twice."""

    def run(x, p):
        hidden = checkpoint_name(jnp.tanh(x @ p["kernel"]), "hidden")
        flat = jnp.ravel(hidden, order=order)
        weights = jnp.sin(x[0, 0] * jnp.arange(flat.size, dtype=jnp.float32))
        return x + jnp.sin(x) * hidden + jnp.mean(weights * flat)

    def loss(p, x, offload):
        return jnp.sum(jnp.cos(apply_layers(run, p, x, offload=offload)))

    offload = Offload(names=["hidden"], min_size=0)
    there, _ = copies(jax.grad(functools.partial(loss, offload=offload)), params, stream)
    assert sum(math.prod(shape) for _, shape in there) == stream.size * (LAYERS - 1) * (1 if order == "C" else 2)
    found, expected = jax.jit(
        lambda *operands: [jax.grad(functools.partial(loss, offload=of), (0, 1))(*operands) for of in (offload, None)]
    )(params, stream)
    assert_equal(found, expected)


@pytest.mark.parametrize("loop", [apply_layers, LOOPS["scan"]], ids=["loop", "scan"])
def test_fp8(loop, params, rng):
    """Gradients differ by the rounding of FP8, and not by less."""
    stream = normal(rng, 64, WIDTH)
    offload = Offload(names=["hidden"], min_size=0, quantize=True)
    found = gradient(KEEP_HIDDEN, offload, loop=loop)
    if loop is apply_layers:
        there, back = copies(found, params, stream)
        assert there == back == [("float8_e4m3fn", (64, WIDTH))] * (LAYERS - 1)
    (value, gradients), (expected, exact) = (
        jax.jit(each)(params, stream) for each in (found, gradient(KEEP_HIDDEN, None))
    )
    assert float(value) == pytest.approx(float(expected), rel=1e-5, abs=1e-4)
    for one, other in zip(gradients[0], exact[0], strict=True):
        assert_close(one["kernel"], other["kernel"], tolerance=0.05)
    assert np.any(np.asarray(gradients[0][0]["kernel"]) != np.asarray(exact[0][0]["kernel"]))


def test_layers_of_other_functions_and_shapes(rng):
    params = [normal(rng, WIDTH, 48), {"a": normal(rng, 48, 16), "b": np.ones(16, np.float32)}, normal(rng, 16, 16)]
    functions = [
        lambda x, p: jnp.tanh(x @ p),
        lambda x, p: jnp.sin(x @ p["a"]) * p["b"][None],
        lambda x, p: x + jnp.tanh(x @ p),
    ]

    def loss(params, x, offload):
        return jnp.sum(apply_layers(functions, params, x, remat=True, offload=offload) ** 2)

    x = normal(rng, ROWS, WIDTH)
    assert_equal(*(jax.jit(jax.grad(functools.partial(loss, offload=of)))(params, x) for of in (ALL, None)))
    with pytest.raises(ValueError, match="layer has 2 functions, and params has 3 layers"):
        apply_layers(functions[:2], params, x)


def test_layers_of_which_some_have_nothing_that_leaves(rng):
    """Each gets its own residuals, not those of the layer that was fetched before it."""
    sizes = [32, 4, 32, 4, 4, 32, 32, 4]
    params = [normal(rng, *pair) for pair in itertools.pairwise([*sizes, 32])]
    x = normal(rng, ROWS, 32)

    def gradient(offload):
        def loss(params, x):
            return jnp.sum(apply_layers(lambda x, p: jnp.sin(x @ p), params, x, remat=True, offload=offload) ** 2)

        return jax.jit(jax.grad(loss, argnums=(0, 1)))

    found = gradient(Offload(min_size=4 * ROWS * 32))
    assert_equal(found(params, x), gradient(None)(params, x))
    assert len(copies(found, params, x)[0]) == 4


def test_results_that_nothing_reads(rng):
    """Layers sum up something, such as a loss of their own, which the caller drops."""

    def layer(x, kernel):
        stream = jnp.tanh(x[0] @ kernel)
        return stream, x[1] + jnp.mean(stream**2)

    kernels, stream = [normal(rng, WIDTH, WIDTH) for _ in range(2)], normal(rng, ROWS, WIDTH)

    @jax.jit
    def both(kernels):
        return [
            jax.grad(lambda k, loop=loop: jnp.sum(loop(layer, k, (stream, jnp.float32(0.0)), offload=ALL)[0]))(kernels)
            for loop in (apply_layers, LOOPS["scan"])
        ], jax.grad(lambda k: jnp.sum(apply_layers(layer, k, (stream, jnp.float32(0.0)))[0]))(kernels)

    found, expected = both(kernels)
    for each in found:
        assert_equal(each, expected)


@pytest.mark.parametrize("loop", [apply_layers, LOOPS["scan"]], ids=["loop", "scan"])
def test_what_layers_close_over(loop, params, stream):
    """Arrays with and without a gradient, integers, and a key."""
    key, table = jax.random.key(0), jnp.arange(ROWS)

    def loss(shift, weight, offload):
        def run(x, p):
            noise = jax.random.normal(key, x.shape)
            return jnp.tanh(x @ p["kernel"] + shift) * weight[None] + noise * table[:, None].astype(x.dtype)

        return jnp.sum(loop(run, params, stream, remat=True, offload=offload) ** 2)

    for argnums in (0, (0, 1)):
        found, expected = jax.jit(
            lambda *of: [jax.grad(functools.partial(loss, offload=offload), argnums)(*of) for offload in (ALL, None)]  # noqa: B023
        )(np.float32(0.3), np.ones(WIDTH, np.float32))
        assert_equal(found, expected)


def test_frozen_parameters_get_no_gradient(params, stream):
    """The products of their gradients are in no program, though barriers stand between layers."""

    def products(argnums):
        found = jax.grad(lambda *a: total(*a, remat=True, offload=ALL), argnums=argnums)
        return jax.jit(found).lower(params, stream).compile().as_text().count(" dot(")

    assert products((0, 1)) - products(0) == 1  # the gradient of the first layer's input
    assert products((0, 1)) - products(1) == LAYERS


@pytest.mark.parametrize(
    ("mode", "loop"),
    [("shard_map", LOOPS["scan"]), ("auto", apply_layers), ("explicit", apply_layers), ("auto", LOOPS["scan"])],
    ids=["shard_map-scan", "auto-loop", "explicit-loop", "auto-scan"],
)
def test_several_devices(loop, mode, params, rng, require_devices):
    require_devices(4)
    explicit = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((4,), ("data",), (explicit,), devices=jax.devices()[:4])
    rows = normal(rng, 16, WIDTH)
    expected = jax.jit(jax.grad(total))(params, rows)

    def loss(params, rows):
        return total(params, rows, remat=True, offload=ALL, loop=loop)

    if mode == "shard_map":
        mapped = jax.shard_map(
            lambda p, r: lax.psum(loss(p, r), "data"), mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
        )
        found = jax.jit(jax.grad(mapped))(params, rows)
    else:
        with jax.set_mesh(mesh):
            split = jax.device_put(rows, jax.NamedSharding(mesh, P("data")))
            operands = jax.device_put(params, jax.NamedSharding(mesh, P())), split
            if loop is LOOPS["scan"]:
                with pytest.raises(native.NativeUnavailableError, match=r"Call it inside jax\.shard_map"):
                    jax.jit(jax.grad(loss))(*operands)
                return
            found = jax.jit(jax.grad(loss))(*operands)
    assert_equal(found, expected)


def test_the_table(params, stream):
    text = residual_table(
        layer, params, {"stream": stream, "count": jnp.int32(0)}, remat=KEEP_HIDDEN, offload=CASES["hidden"][1]
    )
    assert text.splitlines()[0] == "layers 0 to 2, each"
    assert len(re.findall(rf"host .*hidden: float32\[{ROWS}, {WIDTH}\]", text)) == 1
    assert len(re.findall("device .*layer_input", text)) == 2
    assert text.splitlines()[-2].startswith("in all 0.0 MB on the host")


def test_layers_that_keep_theirs_are_spread(params, stream):
    x, offload = {"stream": stream, "count": jnp.int32(0)}, Offload(min_size=0, keep=2)
    text = residual_table(layer, params, x, remat=True, offload=offload)
    of_layers = [line for line in text.splitlines() if line.startswith("layer")]
    assert of_layers == ["layer 0", "layer 1", "layer 2", "layer 3"]
    assert " 0.0 MB on the host" in residual_table(layer, params, x, remat=True, offload=Offload(min_size=0, keep=9))


@pytest.mark.parametrize(
    ("offload", "words"),
    [
        (Offload(names=["hiden"], min_size=0), r"names \['hiden'\], and layer 0 keeps .*It keeps .*hidden: float32"),
        (Offload(names=["hiden", LAYER_INPUT], min_size=0), "required=False"),
    ],
)
def test_a_name_that_nothing_has_is_refused(offload, words, params, stream):
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(gradient(KEEP_HIDDEN, offload), params, stream)
    optional = Offload(names=offload.names, min_size=0, required=False)
    jax.eval_shape(gradient(KEEP_HIDDEN, optional), params, stream)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"names": "hidden"}, r"it must be a sequence of names, such as \['hidden'\]"),
        ({"names": [1]}, "names must be strings"),
        ({"names": 1}, "it must be names, a function or None"),
        ({"quantize": None}, "it must be names or a bool"),
        ({"min_size": -1}, "a number of bytes"),
        ({"keep": 0}, "it must be 1 or more"),
        ({"required": 2}, "True or False"),
        ({"implementation": "te_jax"}, "'native', 'xla' or None"),
        ({"slots": 0}, "1 or more"),
        ({"names": ["a"], "quantize": ["b"]}, r"quantize has \['b'\], which names does not"),
    ],
)
def test_options_that_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        Offload(**arguments)
