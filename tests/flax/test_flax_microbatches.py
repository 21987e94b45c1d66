"""Kernels that are quantized once: what Linen's transforms, boxes and serialization do to them. Else: tests/modules."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as OVERWRITE
from flax_apis import normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax.flax import Dense, accumulate_gradients, quantize_kernels
from te_jax.hlo import Buffer, buffers
from te_jax.ops import quantize
from te_jax.quantized import QuantizedArray
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling
from te_jax.testing import assert_close

X = np.ones((16, 32), np.float32)


def loss_of(model):
    return lambda variables, x: jnp.mean(jnp.square(model.apply(variables, x)))


def shapes_of(model, *args):
    return jax.eval_shape(model.init, jax.random.key(0), *args)


def quantized_shapes(model, variables, *args):
    return jax.eval_shape(lambda variables: quantize_kernels(model, variables, *args), variables)


def test_kernels_below_what_nn_jit_has_traced_before():
    class Jitted(nn.Module):
        @nn.jit
        @nn.compact
        def __call__(self, x):
            return Dense(32, recipe=CurrentScaling())(x)

    model = Jitted()
    variables = shapes_of(model, X)
    jax.eval_shape(model.apply, variables, X)
    for _ in range(2):
        quantized = quantized_shapes(model, variables, X)
        assert isinstance(quantized["params"]["Dense_0"]["kernel"], QuantizedArray)


def test_other_collections_keep_their_values():
    """Such as averages of the parameters."""
    model = Dense(32, recipe=CurrentScaling())
    params = shapes_of(model, X)["params"]
    quantized = quantized_shapes(model, {"params": params, "averages": params}, X)
    assert isinstance(quantized["params"]["kernel"], QuantizedArray)
    assert quantized["averages"] == params


def test_gradients_are_written_over_the_former_sum():
    """Donated gradients are not copied."""
    model, x = Dense(256, use_bias=False, recipe=CurrentScaling()), jnp.ones((16, 256))
    variables = shapes_of(model, x)
    step = jax.jit(accumulate_gradients(loss_of(model)), donate_argnums=1)
    compiled = step.lower(quantized_shapes(model, variables, x), variables, x).compile()
    assert Buffer("f32", (256, 256)) not in buffers(compiled, "copy")


def test_a_quantized_kernel_has_no_gradient_of_its_own():
    model = Dense(32, recipe=CurrentScaling())
    quantized = quantized_shapes(model, shapes_of(model, X), X)
    with pytest.raises(NotImplementedError, match=r"has no gradient of its own.*accumulate_gradients"):
        jax.eval_shape(jax.grad(loss_of(model)), quantized, X)
    assert jax.eval_shape(jax.grad(loss_of(model), argnums=1), quantized, X).shape == X.shape
    with pytest.raises(ValueError, match=r"inputs have sizes \(48,\) along the contracted axes"):
        jax.eval_shape(model.apply, quantized, jnp.ones((16, 48)))


def test_flags_among_the_arguments(rng):
    """What is no array reaches the model as it is, as `model.apply` hands it on."""

    class WithFlag(nn.Module):
        @nn.compact
        def __call__(self, inputs, train, names):
            x = Dense(32, recipe=CurrentScaling())(inputs["x"])
            return x if train else x[..., : len(names["kept"])]

    model, arguments = WithFlag(), ({"x": X}, False, {"kept": "abcd"})
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), *arguments))
    shapes = {"x": jax.ShapeDtypeStruct(X.shape, X.dtype)}
    named = {"train": False, "names": {"kept": "abcd"}}
    for given, by_name in ((arguments, {}), ((shapes, *arguments[1:]), {}), (arguments[:1], named)):
        quantized = jax.eval_shape(lambda v, a=given, n=by_name: quantize_kernels(model, v, *a, **n), variables)
        assert isinstance(quantized["params"]["Dense_0"]["kernel"], QuantizedArray)
        assert jax.eval_shape(lambda v: model.apply(v, *arguments), quantized).shape == (16, 4)


def test_gradients_that_do_not_fit_are_refused():
    model = Dense(32, recipe=DelayedScaling(history_len=4))
    zeros = shapes_of(model, X)
    quantized = quantized_shapes(model, zeros, X)
    remedy = r"start from jax.tree.map\(jnp.zeros_like, variables\), of the variables \(of flax.linen.unbox"

    def refuses(gradients, message):
        with pytest.raises(ValueError, match=f"{message}.*{remedy}"):
            jax.eval_shape(accumulate_gradients(loss_of(model)), quantized, gradients, X)

    refuses(quantized, r"a QuantizedArray for \['params'\]\['kernel'\]")
    refuses({"params": zeros["params"]}, f"have nothing for .*{OVERWRITE}")
    refuses(zeros | {"other": X}, "have .*other.*, which is not differentiated")
    for name, wrong in (("kernel", jnp.zeros((32, 16))), ("bias", jnp.zeros(16))):
        gradients = zeros | {"params": zeros["params"] | {name: wrong}}
        refuses(gradients, rf"have shape \(.*16,?\) for .*{name}.*, which has shape")


def test_gradients_with_stacked_layers_elsewhere_are_refused():
    how = CurrentScaling().quantization("kernel")
    kernel = jax.eval_shape(jax.vmap(lambda kernel: quantize(kernel, how)), jnp.zeros((3, 16, 32)))
    accumulate = accumulate_gradients(loss_of(Dense(32)))
    with pytest.raises(ValueError, match=r"shape \(16, 3, 32\) for .*kernel.*, which has shape \(3, 16, 32\): start"):
        jax.eval_shape(accumulate, {"kernel": kernel}, {"kernel": jnp.zeros((16, 3, 32))})


def test_layers_stacked_along_another_dimension_are_refused():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return Dense(32, recipe=CurrentScaling())(x), None

    model = nn.scan(Block, variable_axes={"params": 1}, split_rngs={"params": True}, length=3)()
    with pytest.raises(
        ValueError, match=r"kernel Dense_0/kernel has shape \(32, 3, 32\), and its layer sees \(32, 32\)"
    ):
        quantized_shapes(model, shapes_of(model, X, None), X, None)


def test_boxed_and_sharded_kernels(rng, make_mesh):
    mesh = make_mesh({"data": AxisType.Auto, "model": AxisType.Auto})
    rules = (("embed", None), ("mlp", "model"))
    kernel_init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    bias_init = nn.with_logical_partitioning(nn.initializers.zeros, ("mlp",))
    model = Dense(512, kernel_init=kernel_init, bias_init=bias_init, recipe=CurrentScaling())
    x = normal(rng, (64, 256))
    boxed = jax.jit(model.init)(jax.random.key(int(rng.integers(2**31))), x)
    variables = nn.unbox(boxed)
    expected = jax.jit(jax.grad(loss_of(model)))(variables, x)

    @jax.jit
    def gradients(variables, x):
        quantized = quantize_kernels(model, variables, x)
        zeros = jax.tree.map(jnp.zeros_like, nn.unbox(variables))
        return accumulate_gradients(loss_of(model))(quantized, zeros, x)[1]

    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)
        found = gradients(jax.device_put(boxed, shardings), jax.device_put(x, NamedSharding(mesh, P("data"))))
    jax.tree.map(functools.partial(assert_close, tolerance=5e-3), found, expected)


@pytest.mark.parametrize("recipe", [BlockScaling(), DelayedScaling(history_len=4)], ids=["block", "delayed"])
def test_serialization(recipe):
    """As those save quantized models who use neither Orbax nor pickle."""
    model, x = Dense(32, recipe=recipe), jnp.ones((4, 64))
    quantized = jax.jit(lambda: quantize_kernels(model, model.init(jax.random.key(0), x), x))()
    target = jax.eval_shape(lambda: quantized)
    restored = serialization.from_bytes(target, serialization.to_bytes(quantized))
    assert jax.tree.structure(restored) == jax.tree.structure(quantized)
    jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), restored, quantized)


def test_serialization_of_other_copies():
    kernel = jax.jit(lambda: quantize(jnp.ones((32, 48)), CurrentScaling().quantization("kernel")))()
    saved = serialization.to_bytes({"kernel": kernel.without_data()})
    with pytest.raises(ValueError, match=r"kernel at .*kernel was saved with \['transposed', 'transposed_scale_inv'\]"):
        serialization.from_bytes({"kernel": kernel}, saved)
