"""Kernels that are quantized once: what Linen's transforms, boxes and serialization do to them. Else: tests/modules."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as OVERWRITE
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax.flax import Dense, accumulate_gradients, quantize_kernels
from te_jax.hlo import Buffer, buffers
from te_jax.ops import quantize
from te_jax.quantized import QuantizedArray
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling
from te_jax.testing import assert_close


def normal(rng, shape):
    return jax.device_put(np.asarray(rng.standard_normal(shape), jnp.float32))


def loss_of(model):
    return lambda variables, x: jnp.mean(jnp.square(model.apply(variables, x)))


def assert_trees_close(actual, expected, tolerance):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(lambda a, e: assert_close(a, e, tolerance=tolerance), actual, expected)


@pytest.mark.parametrize("times", [1, 2])
def test_kernels_below_what_nn_jit_has_traced_before(times, rng):
    class Jitted(nn.Module):
        @nn.jit
        @nn.compact
        def __call__(self, x):
            return Dense(32, recipe=CurrentScaling())(x)

    model, x = Jitted(), normal(rng, (16, 32))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    model.apply(variables, x)
    for _ in range(times):
        quantized = quantize_kernels(model, variables, x)
    assert isinstance(quantized["params"]["Dense_0"]["kernel"], QuantizedArray)


def test_other_collections_keep_their_values(rng):
    """Such as averages of the parameters."""
    model, x = Dense(32, recipe=CurrentScaling()), normal(rng, (16, 32))
    params = jax.jit(model.init)(jax.random.key(0), x)["params"]
    quantized = quantize_kernels(model, {"params": params, "averages": params}, x)
    assert isinstance(quantized["params"]["kernel"], QuantizedArray)
    jax.tree.map(np.testing.assert_array_equal, quantized["averages"], params)


def test_gradients_are_written_over_the_former_sum(rng):
    """Donated gradients are not copied."""
    model, x = Dense(256, use_bias=False, recipe=CurrentScaling()), normal(rng, (16, 256))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    quantized = quantize_kernels(model, variables, x)
    gradients = jax.tree.map(jnp.zeros_like, variables)
    step = jax.jit(accumulate_gradients(loss_of(model)), donate_argnums=1)
    compiled = step.lower(quantized, gradients, x).compile()
    assert Buffer("f32", (256, 256)) not in buffers(compiled, "copy")
    loss, after = compiled(quantized, gradients, x)
    assert gradients["params"]["kernel"].is_deleted()
    assert after["params"]["kernel"].dtype == jnp.float32
    assert jnp.isfinite(loss)


def test_a_quantized_kernel_has_no_gradient_of_its_own(rng):
    model, x = Dense(32, recipe=CurrentScaling()), normal(rng, (16, 32))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    quantized = quantize_kernels(model, variables, x)
    for gradient in (jax.grad(loss_of(model)), jax.jit(jax.grad(loss_of(model)))):
        with pytest.raises(NotImplementedError, match=r"has no gradient of its own.*accumulate_gradients"):
            gradient(quantized, x)
    assert_close(
        jax.grad(loss_of(model), argnums=1)(quantized, x),
        jax.grad(loss_of(model), argnums=1)(variables, x),
        tolerance=1e-4,
    )
    with pytest.raises(ValueError, match=r"inputs have sizes \(48,\) along the contracted axes"):
        model.apply(quantized, normal(rng, (16, 48)))


def test_flags_among_the_arguments(rng):
    """What is no array reaches the model as it is, as `model.apply` hands it on."""

    class WithFlag(nn.Module):
        @nn.compact
        def __call__(self, inputs, train, names):
            x = Dense(32, recipe=CurrentScaling())(inputs["x"])
            return x if train else x[..., : len(names["kept"])]

    model, x = WithFlag(), normal(rng, (16, 32))
    arguments = {"x": x}, False, {"kept": "abcd"}
    variables = model.init(jax.random.key(0), *arguments)
    shapes = {"x": jax.ShapeDtypeStruct(x.shape, x.dtype)}
    named = {"train": False, "names": {"kept": "abcd"}}
    for given, by_name in ((arguments, {}), ((shapes, *arguments[1:]), {}), (arguments[:1], named)):
        quantized = quantize_kernels(model, variables, *given, **by_name)
        assert isinstance(quantized["params"]["Dense_0"]["kernel"], QuantizedArray)
        assert model.apply(quantized, *arguments).shape == (16, 4)


def test_gradients_that_do_not_fit_are_refused(rng):
    model, x = Dense(32, recipe=DelayedScaling(history_len=4)), normal(rng, (16, 32))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    quantized = quantize_kernels(model, variables, x)
    function = jax.jit(accumulate_gradients(loss_of(model)))
    zeros = jax.tree.map(jnp.zeros_like, variables)
    remedy = r"start from jax.tree.map\(jnp.zeros_like, variables\), of the variables \(of flax.linen.unbox"
    with pytest.raises(ValueError, match=rf"a QuantizedArray for \['params'\]\['kernel'\].*{remedy}"):
        function(quantized, jax.tree.map(jnp.zeros_like, quantized), x)
    with pytest.raises(ValueError, match=rf"have nothing for .*{OVERWRITE}.*{remedy}"):
        function(quantized, {"params": zeros["params"]}, x)
    with pytest.raises(ValueError, match=rf"have .*other.*, which is not differentiated: {remedy}"):
        function(quantized, zeros | {"other": x}, x)
    for name, wrong in (("kernel", jnp.zeros((32, 16))), ("bias", jnp.zeros(16))):
        with pytest.raises(ValueError, match=rf"have shape \(.*16,?\) for .*{name}.*, which has shape .*: {remedy}"):
            function(quantized, zeros | {"params": zeros["params"] | {name: wrong}}, x)


def test_gradients_with_stacked_layers_elsewhere_are_refused():
    how = CurrentScaling().quantization("kernel")
    variables = {"kernel": jax.vmap(lambda kernel: quantize(kernel, how))(jnp.zeros((3, 16, 32)))}
    with pytest.raises(ValueError, match=r"shape \(16, 3, 32\) for .*kernel.*, which has shape \(3, 16, 32\): start"):
        accumulate_gradients(loss_of(Dense(32)))(variables, {"kernel": jnp.zeros((16, 3, 32))})


def test_layers_stacked_along_another_dimension_are_refused(rng):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return Dense(32, recipe=CurrentScaling())(x), None

    model = nn.scan(Block, variable_axes={"params": 1}, split_rngs={"params": True}, length=3)()
    x = normal(rng, (16, 32))
    variables = jax.jit(model.init)(jax.random.key(0), x, None)
    with pytest.raises(
        ValueError, match=r"kernel Dense_0/kernel has shape \(32, 3, 32\), and its layer sees \(32, 32\)"
    ):
        quantize_kernels(model, variables, x, None)


def test_boxed_and_sharded_kernels(rng, make_mesh):
    mesh = make_mesh({"data": AxisType.Auto, "model": AxisType.Auto})
    rules = (("embed", None), ("mlp", "model"))
    kernel_init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    bias_init = nn.with_logical_partitioning(nn.initializers.zeros, ("mlp",))
    model = Dense(512, kernel_init=kernel_init, bias_init=bias_init, recipe=CurrentScaling())
    x = normal(rng, (64, 256))
    boxed = jax.jit(model.init)(jax.random.key(int(rng.integers(2**31))), x)
    variables = nn.unbox(boxed)
    expected = jax.grad(loss_of(model))(variables, x)

    @jax.jit
    def gradients(variables, x):
        quantized = quantize_kernels(model, variables, x)
        zeros = jax.tree.map(jnp.zeros_like, nn.unbox(variables))
        return accumulate_gradients(loss_of(model))(quantized, zeros, x)[1]

    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)
        found = gradients(jax.device_put(boxed, shardings), jax.device_put(x, NamedSharding(mesh, P("data"))))
    assert_trees_close(found, expected, 5e-3)


@pytest.mark.parametrize("recipe", [BlockScaling(), DelayedScaling(history_len=4)], ids=["block", "delayed"])
def test_serialization(recipe, rng):
    """As those save quantized models who use neither Orbax nor pickle."""
    model, x = Dense(32, recipe=recipe), jax.device_put(np.asarray(rng.standard_normal((4, 64)), jnp.float32))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    quantized = jax.jit(lambda variables: quantize_kernels(model, variables, x))(variables)
    target = jax.eval_shape(lambda variables: quantize_kernels(model, variables, x), variables)
    restored = serialization.from_bytes(target, serialization.to_bytes(quantized))
    assert jax.tree.structure(restored) == jax.tree.structure(quantized)
    jax.tree.map(np.testing.assert_array_equal, restored, quantized)
    np.testing.assert_array_equal(model.apply(restored, x), model.apply(quantized, x))


def test_serialization_of_other_copies(rng):
    kernel = quantize(
        jax.device_put(np.asarray(rng.standard_normal((32, 48)), jnp.float32)), CurrentScaling().quantization("kernel")
    )
    saved = serialization.to_bytes({"kernel": kernel.without_data()})
    with pytest.raises(ValueError, match=r"kernel at .*kernel was saved with \['transposed', 'transposed_scale_inv'\]"):
        serialization.from_bytes({"kernel": kernel}, saved)
