"""`te_jax.layers.apply_layers` against a loop in Python, and the program that XLA makes of it."""

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

from te_jax import checkpoint_policies, ops
from te_jax.layers import apply_layers, residual_table
from te_jax.recipe import CurrentScaling, DelayedScaling
from te_jax.testing import assert_close

LAYERS, WIDTH = 3, 32
REMAT = {"none": None, "all": True, "policy": jax.checkpoint_policies.save_only_these_names("hidden")}
both_forms = pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])


def layer(x, params):
    hidden = checkpoint_name(jnp.tanh(x["stream"] @ params["kernel"]), "hidden")
    return {"stream": x["stream"] + jnp.sin(hidden) * params["scale"][None], "count": x["count"] + 1}


def loop(params, x):
    for of_layer in params:
        x = layer(x, of_layer)
    return x


def total(run):
    return lambda params, stream: jnp.sum(jnp.cos(run(params, {"stream": stream, "count": 0})["stream"]))


def random_layers(rng):
    return [
        {
            "kernel": jax.device_put(np.asarray(rng.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5, jnp.float32)),
            "scale": jax.device_put(np.asarray(rng.uniform(0.5, 1.5, WIDTH), jnp.float32)),
        }
        for _ in range(LAYERS)
    ]


def stack(layers):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *layers)


@pytest.fixture
def params(rng):
    return random_layers(rng)


@pytest.fixture
def stream(rng):
    return jax.device_put(np.asarray(rng.standard_normal((4, WIDTH)), jnp.float32))


def assert_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        assert_close(one, other, tolerance=1e-6)


@pytest.mark.parametrize(("remat", "stacked"), in_turns(REMAT, [True, False]))
def test_values_and_gradients_are_those_of_a_loop(stacked, remat, params, stream):
    def run(params, x):
        return apply_layers(layer, params, x, remat=remat)

    given = stack(params) if stacked else params
    gradient = jax.value_and_grad(total(run), argnums=(0, 1))
    value, (found, of_stream) = jax.jit(gradient)(given, stream)
    gradient = jax.value_and_grad(total(loop), argnums=(0, 1))
    expected, (gradients, expected_of_stream) = jax.jit(gradient)(params, stream)
    assert_equal(value, expected)
    assert_equal(of_stream, expected_of_stream)
    assert_equal(found, stack(gradients) if stacked else gradients)
    assert run(given, {"stream": stream, "count": 0})["count"] == LAYERS


@both_forms
def test_forward_mode_and_second_derivatives(stacked, params, stream):
    given = stack(params) if stacked else params

    @jax.jit
    def slopes(given, params, stream):
        def slope(run, params):
            return jax.jvp(jax.grad(lambda s: total(run)(params, s)), (stream,), (stream,))[1]

        return slope(lambda p, x: apply_layers(layer, p, x), given), slope(loop, params)

    assert_close(*slopes(given, params, stream), tolerance=1e-5)


def test_no_layers(stream):
    assert apply_layers(layer, [], stream) is stream
    assert apply_layers(layer, {"kernel": jnp.zeros((0, 3))}, stream) is stream


def test_gradients_of_what_the_layer_closes_over(params, stream):
    def with_shift(run):
        return lambda shift: total(lambda p, x: run(lambda x, p: layer({**x, "stream": x["stream"] + shift}, p), p, x))(
            params, stream
        )

    def plain(layer, params, x):
        for of_layer in params:
            x = layer(x, of_layer)
        return x

    @jax.jit
    def gradients(shift):
        of = [with_shift(lambda *a, remat=remat: apply_layers(*a, remat=remat)) for remat in REMAT.values()]
        return [jax.grad(f)(shift) for f in (*of, with_shift(plain))]

    *found, expected = gradients(0.3)
    for one in found:
        assert_close(one, expected, tolerance=1e-5)


def test_the_layer_is_traced_once(params, stream):
    traced = []

    def counted(x, params):
        traced.append(1)
        return layer(x, params)

    jax.make_jaxpr(jax.grad(total(lambda p, x: apply_layers(counted, p, x))))(params, stream)
    assert len(traced) == 1


@both_forms
def test_remat_keeps_what_it_says(stacked, params, stream, capsys):
    given = stack(params) if stacked else params
    kept = {}
    for name, remat in REMAT.items():
        run = total(lambda p, x, remat=remat: apply_layers(layer, p, x, remat=remat))
        jax.ad_checkpoint.print_saved_residuals(lambda s, run=run: run(given, s), stream)
        kept[name] = capsys.readouterr().out.count(f"f32[4,{WIDTH}]")
    assert kept["all"] < kept["none"]
    assert kept["policy"] - kept["all"] == LAYERS


def test_results_of_attention_stay():
    def attend(x, kernel):
        heads = (x @ kernel).reshape(2, 16, 2, 8)
        return x + ops.attention(heads, heads, heads, causal=True).reshape(x.shape)

    operands = [np.ones((16, 16), np.float32)] * 2, np.ones((2, 16, 16), np.float32)
    table = residual_table(attend, *operands, remat="attention")
    assert set(re.findall(r"te_\w+", table)) == {"te_attention_output", "te_attention_lse"}


def test_the_recomputation_stands_behind_a_barrier(params, stream):
    """Without one XLA merges it with the forward pass, and nothing is saved."""

    def lowered(remat):
        gradient = jax.grad(total(lambda p, x: apply_layers(layer, p, x, remat=remat)))
        return jax.jit(gradient).lower(params, stream).as_text()

    texts = {name: lowered(remat) for name, remat in REMAT.items()}
    assert "optimization_barrier" not in texts["none"]
    assert texts["all"].count("optimization_barrier") == texts["policy"].count("optimization_barrier") > 0


def scanned(params, x):
    return lax.scan(lambda x, p: (layer(x, p), None), x, params)[0]


@pytest.mark.parametrize("form", ["list", "stacked", "scan"])
def test_no_loop_and_no_stack_that_is_filled_layer_by_layer(form, params, stream):
    """A train step has neither; the last form shows that the test finds what it looks for."""

    def step(params, stream):
        run = scanned if form == "scan" else (lambda p, x: apply_layers(layer, p, x))
        gradients = jax.grad(total(run))(params, stream)
        return jax.tree.map(lambda p, g: p - g, params, gradients)

    given = params if form == "list" else stack(params)
    text = jax.jit(step, donate_argnums=0).lower(given, stream).compile().as_text()
    shape = rf"f32\[{LAYERS},{WIDTH},{WIDTH}\]"
    found = {
        "loops": re.findall(r" while\(", text),
        "zeros": re.findall(rf"= {shape}\S* broadcast\(", text),
        "updates": re.findall(rf"= {shape}\S* dynamic-update-slice\(", text),
    }
    assert [bool(each) for each in found.values()] == [form == "scan"] * 3
    assert not re.findall(rf"= {shape}\S* pad\(", text)


def test_state_of_delayed_scaling_is_a_parameter(rng):
    recipe = DelayedScaling(history_len=3)
    kernels = [np.asarray(rng.standard_normal((WIDTH, WIDTH)) * (i + 1), np.float32) for i in range(LAYERS)]
    params = [{"kernel": kernel, "state": recipe.init()} for kernel in kernels]
    x = jax.device_put(np.asarray(rng.standard_normal((32, WIDTH)), jnp.float32))

    def product(x, params):
        return jnp.tanh(ops.dense(x, params["kernel"], recipe=recipe, scaling_state=params["state"]))

    def loss(params):
        return jnp.sum(apply_layers(product, params, x, remat=checkpoint_policies.save_fp8_operands))

    for kernel, of_layer in zip(kernels, jax.jit(jax.grad(loss))(params), strict=True):
        assert of_layer["state"].kernel[0] == np.abs(kernel).max()
        assert of_layer["state"].uses == 1


def test_quantized_kernels(rng):
    recipe = CurrentScaling()
    kernels = jax.device_put(np.asarray(rng.standard_normal((LAYERS, WIDTH, WIDTH)) / WIDTH**0.5, jnp.bfloat16))
    x = jax.device_put(np.asarray(rng.standard_normal((32, WIDTH)), jnp.bfloat16))

    def quantized(kernel):
        return ops.quantize(kernel, recipe.quantization("kernel"))

    def product(x, kernel):
        return ops.dense(x, kernel, recipe=recipe)

    @jax.jit
    def three_ways(kernels, x):
        ways = kernels, jax.vmap(quantized)(kernels), [quantized(kernel) for kernel in kernels]
        return [apply_layers(product, params, x) for params in ways]

    expected, *found = three_ways(kernels, x)
    for y in found:
        np.testing.assert_array_equal(y, expected)


@both_forms
def test_vmap(stacked, rng, stream):
    members = [random_layers(rng) for _ in range(3)]
    batched = stack([stack(params) if stacked else params for params in members])

    def gradient(params):
        return jax.grad(total(lambda p, x: apply_layers(layer, p, x, remat=True)))(params, stream)

    found = jax.jit(jax.vmap(gradient))(batched)
    expected_of = jax.jit(jax.grad(total(loop)))
    for i, params in enumerate(members):
        expected = expected_of(params, stream)
        assert_equal(jax.tree.map(lambda leaf, i=i: leaf[i], found), stack(expected) if stacked else expected)


@pytest.mark.parametrize(("remat", "stacked"), in_turns(REMAT, [False, True]))
def test_shard_map(remat, stacked, params, rng, require_devices):
    require_devices(4)
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
    given = stack(params) if stacked else params
    rows = jax.device_put(np.asarray(rng.standard_normal((8, WIDTH)), jnp.float32))

    def local(params, rows):
        return lax.psum(total(lambda p, x: apply_layers(layer, p, x, remat=remat))(params, rows), "data")

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    found = jax.jit(jax.grad(mapped))(given, rows)
    expected = jax.jit(jax.grad(total(loop)))(params, rows)
    assert_equal(found, stack(expected) if stacked else expected)


@pytest.mark.parametrize(
    ("params", "remat", "words"),
    [
        ({"a": jnp.zeros((3, 2)), "b": jnp.zeros((2, 3))}, None, r"leaves of shapes \(2, 3\), \(3, 2\): .* one size"),
        ({"a": jnp.zeros(())}, None, r"leaves of shapes \(\)"),
        ({}, None, "leaves of shapes none: .* a list"),
        ([], "everything", "remat is 'everything': it must be None, True, .*or a policy"),
    ],
)
def test_what_is_refused(params, remat, words):
    with pytest.raises(ValueError, match=words):
        apply_layers(layer, params, jnp.zeros(()), remat=remat)


def test_another_offload_is_refused_also_without_gradients():
    with pytest.raises(ValueError, match=r"offload is 'host': it must be a te_jax\.offload\.Offload, or None"):
        apply_layers(lambda x, p: x * p, [jnp.ones(())], jnp.ones(4), offload="host")  # pyright: ignore[reportArgumentType]
