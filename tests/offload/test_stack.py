"""`apply_layers` and `scan_layers` of te_jax.layers with offload, against themselves without, and what leaves."""

import dataclasses
import functools
import itertools
import math
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from te_jax import native, ops
from te_jax.layers import accumulate_gradients, apply_layers, dense_kernels, residual_table, scan_layers
from te_jax.offload import LAYER_INPUT, Offload, stack
from te_jax.recipe import BlockScaling, DelayedScaling
from te_jax.testing import assert_close

LAYERS, WIDTH, ROWS = 5, 32, 8
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
every_case = pytest.mark.parametrize(("remat", "offload"), CASES.values(), ids=CASES)


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


@pytest.fixture(params=LOOPS.values(), ids=LOOPS)
def loop(request):
    """A call with the arguments of apply_layers."""
    return request.param


def layer(x, params):
    hidden = checkpoint_name(jnp.tanh(x["stream"] @ params["kernel"]), "hidden")
    return {"stream": x["stream"] + jnp.sin(hidden) * params["scale"], "count": x["count"] + 1}


def total(params, stream, *, run=layer, loop=apply_layers, **options):
    return jnp.sum(jnp.cos(loop(run, params, {"stream": stream, "count": jnp.int32(0)}, **options)["stream"]))


def random_layers(rng, count=LAYERS):
    return [
        {
            "kernel": jnp.asarray(rng.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5, jnp.float32),
            "scale": jnp.asarray(rng.uniform(0.5, 1.5), jnp.float32),
        }
        for _ in range(count)
    ]


@pytest.fixture
def params(rng):
    return random_layers(rng)


@pytest.fixture
def stream(rng):
    return jnp.asarray(rng.standard_normal((ROWS, WIDTH)), jnp.float32)


def gradient(remat, offload, **options):
    return jax.value_and_grad(lambda *a: total(*a, remat=remat, offload=offload, **options), argnums=(0, 1))


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


@every_case
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_values_and_gradients_are_those_without_offload(loop, jit, remat, offload, params, stream):
    found = gradient(remat, offload, loop=loop)
    assert_equal((jax.jit(found) if jit else found)(params, stream), gradient(remat, None, loop=loop)(params, stream))


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, (x, x[:0])), lambda kept, g: (2 * g + 0 * kept[0] + kept[1].sum(),))


def test_residuals_without_values_stay_in_their_layer(loop, params, stream):
    """cuDNN's attention of jax.nn has some, and XLA of jax 0.11 does not survive one that leaves a shard_map."""

    def run(x, params):
        return {**x, "stream": jnp.tanh(doubled(x["stream"] @ params["kernel"])) + doubled(x["stream"])}

    _, backward = jax.vjp(functools.partial(total, run=run, loop=loop, offload=ALL), params, stream)
    assert all(leaf.size for leaf in jax.tree.leaves(backward))
    expected = jax.grad(functools.partial(total, run=run), argnums=(0, 1))(params, stream)
    assert_equal(backward(jnp.float32(1)), expected)


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


@pytest.mark.parametrize("quantize", [False, True], ids=["float32", "one of them in FP8"])
def test_many_residuals_of_a_layer_leave_as_one_array(quantize, params, stream, monkeypatch):
    """One for each dtype, so that no more than two copies are under way."""

    def run(x, p):
        for name in ("a", "b", "c", "d"):
            x = x + jnp.sin(checkpoint_name(jnp.tanh(x @ p["kernel"]), name))
        return x

    def loss(p, x, **options):
        return jnp.sum(jnp.cos(apply_layers(run, p, x, remat=keep, **options)))

    keep = jax.checkpoint_policies.save_only_these_names("a", "b", "c", "d")
    offload = Offload(names=("a", "b", "c", "d"), min_size=0, quantize=("b",) if quantize else False)
    gradient = jax.grad(functools.partial(loss, offload=offload), argnums=(0, 1))
    monkeypatch.setattr(stack, "is_whole", lambda: False)
    expected = gradient(params, stream)
    monkeypatch.setattr(stack, "is_whole", lambda: True)
    one = ("float32", ((3 if quantize else 4) * stream.size,))
    fp8 = [("float8_e4m3fn", (ROWS, WIDTH))] if quantize else []
    there, back = copies(gradient, params, stream)
    assert there == back == sorted([one, *fp8] * (LAYERS - 1))
    assert_equal(gradient(params, stream), expected)


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
    found = jax.grad(functools.partial(loss, offload=offload), argnums=(0, 1))(params, stream)
    assert_equal(found, jax.grad(functools.partial(loss, offload=None), argnums=(0, 1))(params, stream))


def test_fp8(loop, rng):
    """Gradients differ by the rounding of FP8, and not by less."""
    params = random_layers(rng)
    stream = jnp.asarray(rng.standard_normal((64, WIDTH)), jnp.float32)
    offload = Offload(names=["hidden"], min_size=0, quantize=True)
    found = gradient(KEEP_HIDDEN, offload, loop=loop)
    if loop is apply_layers:
        there, back = copies(found, params, stream)
        assert there == back == [("float8_e4m3fn", (64, WIDTH))] * (LAYERS - 1)
    (value, gradients), (expected, exact) = jax.jit(found)(params, stream), gradient(KEEP_HIDDEN, None)(params, stream)
    assert float(value) == pytest.approx(float(expected), rel=1e-5, abs=1e-4)
    for one, other in zip(gradients[0], exact[0], strict=True):
        assert_close(one["kernel"], other["kernel"], tolerance=0.05)
    assert np.any(np.abs(gradients[0][0]["kernel"] - exact[0][0]["kernel"]) > 1e-4)


def test_each_layer_gets_its_own(loop, stream):
    """With values far apart, so that another layer's residuals could not be taken for its own."""

    def run(x, p):
        return x * p + checkpoint_name(jnp.square(x), "square") * 0

    scales = [jnp.float32(10.0**i) for i in range(LAYERS)]
    stream = jnp.abs(stream)  # whose sum in float32 cancels nothing
    found = jax.grad(lambda s: jnp.sum(loop(run, s, stream, remat=True, offload=ALL)))(scales)
    product = 10.0 ** sum(range(LAYERS)) * float(jnp.sum(stream))
    for i, of_layer in enumerate(found):
        assert_close(of_layer, jnp.float32(product / 10.0**i), tolerance=1e-5)


def test_layers_of_other_functions_and_shapes(rng):
    first = jnp.asarray(rng.standard_normal((WIDTH, 48)), jnp.float32)
    second = {"a": jnp.asarray(rng.standard_normal((48, 16)), jnp.float32), "b": jnp.ones((16,))}
    third = jnp.asarray(rng.standard_normal((16, 16)), jnp.float32)
    functions = [
        lambda x, p: jnp.tanh(x @ p),
        lambda x, p: jnp.sin(x @ p["a"]) * p["b"][None],
        lambda x, p: x + jnp.tanh(x @ p),
    ]
    x = jnp.asarray(rng.standard_normal((ROWS, WIDTH)), jnp.float32)

    def loss(params, offload):
        return jnp.sum(apply_layers(functions, params, x, remat=True, offload=offload) ** 2)

    params = [first, second, third]
    assert_equal(jax.jit(jax.grad(lambda p: loss(p, ALL)))(params), jax.grad(lambda p: loss(p, None))(params))


def test_layers_of_which_some_have_nothing_that_leaves(rng):
    """Each gets its own residuals, not those of the layer that was fetched before it."""
    sizes = [32, 4, 32, 4, 4, 32, 32, 4]
    params = [jnp.asarray(rng.standard_normal(pair), jnp.float32) for pair in itertools.pairwise([*sizes, 32])]
    x = jnp.asarray(rng.standard_normal((ROWS, 32)), jnp.float32)

    def loss(params, x, offload):
        return jnp.sum(apply_layers(lambda x, p: jnp.sin(x @ p), params, x, remat=True, offload=offload) ** 2)

    found = jax.jit(jax.grad(lambda p, x: loss(p, x, Offload(min_size=4 * ROWS * 32)), argnums=(0, 1)))
    assert_equal(found(params, x), jax.grad(lambda p, x: loss(p, x, None), argnums=(0, 1))(params, x))
    assert len(copies(found, params, x)[0]) == 4


def test_results_that_nothing_reads(loop, rng):
    """Layers sum up something, such as a loss of their own, which the caller drops."""

    def layer(x, kernel):
        stream = jnp.tanh(x[0] @ kernel)
        return stream, x[1] + jnp.mean(stream**2)

    kernels = [jnp.asarray(rng.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5, jnp.float32) for _ in range(2)]
    stream = jnp.asarray(rng.standard_normal((ROWS, WIDTH)), jnp.float32)

    def total(kernels, **options):
        return jnp.sum(loop(layer, kernels, (stream, jnp.float32(0.0)), **options)[0])

    expected, found = (
        jax.jit(jax.grad(functools.partial(total, **options)))(kernels) for options in ({}, {"offload": ALL})
    )
    jax.tree.map(functools.partial(assert_close, tolerance=1e-5), found, expected)


def test_what_layers_close_over(loop, params, stream):
    """Arrays with and without a gradient, integers, and a key."""
    key, table = jax.random.key(0), jnp.arange(ROWS)

    def loss(shift, weight, offload):
        def run(x, p):
            noise = jax.random.normal(key, x.shape)
            return jnp.tanh(x @ p["kernel"] + shift) * weight[None] + noise * table[:, None].astype(x.dtype)

        return jnp.sum(loop(run, params, stream, remat=True, offload=offload) ** 2)

    for argnums in (0, (0, 1)):
        found = jax.jit(jax.grad(lambda s, w: loss(s, w, ALL), argnums=argnums))(0.3, jnp.ones(WIDTH))
        expected = jax.grad(lambda s, w: loss(s, w, None), argnums=argnums)(0.3, jnp.ones(WIDTH))
        assert_equal(found, expected)


def test_frozen_parameters_get_no_gradient(params, stream):
    """The products of their gradients are in no program, though barriers stand between layers."""

    def products(argnums):
        found = jax.grad(lambda *a: total(*a, remat=True, offload=ALL), argnums=argnums)
        return jax.jit(found).lower(params, stream).compile().as_text().count(" dot(")

    assert products((0, 1)) - products(0) == 1  # the gradient of the first layer's input
    assert products((0, 1)) - products(1) == LAYERS


def test_transformations(loop, params, stream, rng):
    expected = jax.jit(gradient(True, None, loop=loop))
    found = gradient(True, ALL, loop=loop)
    streams = jnp.asarray(rng.standard_normal((3, ROWS, WIDTH)), jnp.float32)
    mapped = jax.jit(jax.vmap(found, (None, 0)))
    if loop is LOOPS["scan"]:
        with pytest.raises(NotImplementedError, match="map inside of the layer"):
            mapped(params, streams)
    else:
        wanted = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(expected(params, s) for s in streams))
        assert_equal(mapped(params, streams), wanted)
    assert_equal(
        jax.jit(lambda p, s: lax.map(lambda s: found(p, s), s))(params, streams),
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *(expected(params, s) for s in streams)),
    )

    def checkpointed(p, s):
        return jax.value_and_grad(
            jax.checkpoint(lambda p, s: total(p, s, remat=True, offload=ALL, loop=loop)), argnums=(0, 1)
        )(p, s)

    assert_equal(jax.jit(checkpointed)(params, stream), expected(params, stream))


def test_microbatches(loop, params, stream):
    def loss(params, stream):
        return total(params, stream, remat=True, offload=ALL, loop=loop)

    value, gradients = jax.jit(
        lambda p, s: lax.scan(
            lambda c, s: (jax.tree.map(jnp.add, c, jax.value_and_grad(loss)(p, s)), None),
            jax.tree.map(jnp.zeros_like, jax.value_and_grad(loss)(p, s[0])),
            s,
        )[0]
    )(params, jnp.stack([stream, stream * 2]))
    one, two = (jax.value_and_grad(lambda p, s: total(p, s))(params, s) for s in (stream, stream * 2))
    assert_equal((value, gradients), jax.tree.map(jnp.add, one, two))


def test_two_stacks_in_one_program(loop, params, stream, rng):
    others = random_layers(rng, 3)

    def both(offload):
        def loss(params, others, stream):
            first = loop(layer, params, {"stream": stream, "count": jnp.int32(0)}, remat=True, offload=offload)
            second = loop(layer, others, {"stream": stream * 2, "count": jnp.int32(0)}, remat=True, offload=offload)
            return jnp.sum(first["stream"] * jnp.cos(second["stream"]))

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))

    assert_equal(both(ALL)(params, others, stream), both(None)(params, others, stream))


def test_threads_and_executions_in_flight(loop, params, stream):
    found, expected = jax.jit(gradient(True, ALL, loop=loop)), jax.jit(gradient(True, None, loop=loop))
    wanted = [expected(params, stream * i) for i in range(8)]
    results = [None] * 8

    def run(thread):
        started = [(i, found(params, stream * i)) for i in range(thread, 8, 4)]
        for i, result in started:
            results[i] = jax.block_until_ready(result)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(results, wanted, strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("mode", ["shard_map", "auto", "explicit"])
def test_several_devices(loop, mode, params, rng, require_devices):
    require_devices(4)
    explicit = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((4,), ("data",), (explicit,), devices=jax.devices()[:4])
    rows = jnp.asarray(rng.standard_normal((16, WIDTH)), jnp.float32)
    expected = jax.grad(total)(params, rows)

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


def test_layers_in_fp8_with_state_and_kernels_quantized_once(loop, rng):
    x = jnp.asarray(rng.standard_normal((32, WIDTH)), jnp.float32)
    kernels = [jnp.asarray(rng.standard_normal((WIDTH, WIDTH)) / 6, jnp.float32) for _ in range(3)]
    delayed = DelayedScaling(history_len=3)

    def product(x, p):
        return jnp.tanh(ops.dense(x, p["kernel"], recipe=delayed, scaling_state=p["state"]))

    def loss(params, offload):
        return jnp.sum(loop(product, params, x, offload=offload) ** 2)

    params = [{"kernel": kernel, "state": delayed.init()} for kernel in kernels]
    found = jax.jit(jax.grad(lambda p: loss(p, ALL)))(params)
    assert_equal(found, jax.jit(jax.grad(lambda p: loss(p, None)))(params))

    recipe = BlockScaling()
    quantized = [ops.quantize(kernel, recipe.quantization("kernel")) for kernel in kernels]

    def of_kernels(offload):
        def loss(kernels):
            def run(x, kernel):
                return jnp.tanh(ops.dense(x, **dense_kernels([kernel]), recipe=recipe)[0])

            return jnp.sum(loop(run, kernels, x, offload=offload) ** 2)

        return jax.jit(lambda kernels, gradients: accumulate_gradients(loss)(kernels, gradients))

    zeros = [jnp.zeros((WIDTH, WIDTH)) for _ in kernels]
    assert_equal(of_kernels(ALL)(quantized, zeros), of_kernels(None)(quantized, zeros))


def test_the_table(params, stream):
    text = residual_table(
        layer, params, {"stream": stream, "count": jnp.int32(0)}, remat=KEEP_HIDDEN, offload=CASES["hidden"][1]
    )
    assert text.splitlines()[0] == "layers 0 to 3, each"
    assert len(re.findall(rf"host .*hidden: float32\[{ROWS}, {WIDTH}\]", text)) == 1
    assert len(re.findall("device .*layer_input", text)) == 2
    assert text.splitlines()[-2].startswith("in all 0.0 MB on the host")


def test_layers_that_keep_theirs_are_spread(params, stream):
    x, offload = {"stream": stream, "count": jnp.int32(0)}, Offload(min_size=0, keep=2)
    text = residual_table(layer, params, x, remat=True, offload=offload)
    of_layers = [line for line in text.splitlines() if line.startswith("layer")]
    assert of_layers == ["layers 0 to 1, each", "layer 2", "layer 3", "layer 4"]
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
        gradient(KEEP_HIDDEN, offload)(params, stream)
    optional = Offload(names=offload.names, min_size=0, required=False)
    assert_equal(gradient(KEEP_HIDDEN, optional)(params, stream), gradient(KEEP_HIDDEN, None)(params, stream))


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


def test_as_many_functions_as_layers(params, stream):
    with pytest.raises(ValueError, match="layer has 2 functions, and params has 5 layers"):
        apply_layers([layer, layer], params, {"stream": stream, "count": 0})
