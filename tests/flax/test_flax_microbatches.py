"""Kernels that are quantized once and used by several microbatches, in Linen."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as OVERWRITE
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax.flax import Dense, DenseGeneral, accumulate_gradients, quantize_kernels
from te_jax.inspect import Buffer, buffers
from te_jax.ops import quantize
from te_jax.quantized import QuantizedArray
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from te_jax.testing import assert_close

RECIPES = {
    "current": CurrentScaling(),
    "rowwise": RowwiseScaling(),
    "block": BlockScaling(),
    "delayed": DelayedScaling(history_len=4),
}


class Model(nn.Module):
    """Two layers that are quantized and one that is not, with heads that blocks of 128 do not divide."""

    recipe: object

    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm(name="norm")(x)
        x = DenseGeneral((4, 48), recipe=self.recipe, activation="gelu", name="split")(x)
        x = DenseGeneral(32, axis=(-2, -1), recipe=self.recipe, use_bias=False, name="join")(x)
        return Dense(8, name="exact")(x)


class Scanned(nn.Module):
    recipe: object

    @nn.compact
    def __call__(self, x):
        class Block(nn.Module):
            recipe: object

            @nn.compact
            def __call__(self, x, _):
                return x + Dense(32, recipe=self.recipe, name="dense")(x), None

        scan = nn.scan(
            nn.remat(Block), variable_axes={"params": 0, OVERWRITE: 0}, split_rngs={"params": True}, length=3
        )
        return scan(self.recipe, name="layers")(x, None)[0]


def normal(rng, shape):
    return jax.device_put(np.asarray(rng.standard_normal(shape), jnp.float32))


def loss_of(model):
    return lambda variables, x: jnp.mean(jnp.square(model.apply(variables, x)))


def assert_trees_close(actual, expected, tolerance):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(lambda a, e: assert_close(a, e, tolerance=tolerance), actual, expected)


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        (Model, "current"),
        *(pytest.param(Model, name, marks=pytest.mark.slow) for name in ("block", "delayed")),
        (Scanned, "delayed"),
    ],
)
def test_gradients_are_those_of_kernels_quantized_in_each_microbatch(rng, model, recipe):
    model = model(RECIPES[recipe])
    microbatches = normal(rng, (3, 16, 32))
    variables = jax.jit(model.init)(jax.random.key(int(rng.integers(2**31))), microbatches[0])
    value_and_gradient = jax.jit(jax.value_and_grad(loss_of(model)))
    if OVERWRITE in variables:  # scales that a step has found; those of kernels quantized once are always up to date
        variables |= {OVERWRITE: value_and_gradient(variables, microbatches[0])[1][OVERWRITE]}

    @jax.jit
    def accumulated(variables, microbatches):
        quantized = quantize_kernels(model, variables, microbatches[0])

        def one(gradients, x):
            return accumulate_gradients(loss_of(model))(quantized, gradients, x)[::-1]

        return jax.lax.scan(one, jax.tree.map(jnp.zeros_like, variables), microbatches)

    actual, losses = accumulated(variables, microbatches)
    expected_losses, single = zip(*(value_and_gradient(variables, x) for x in microbatches), strict=True)
    expected = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *(leaf["params"] for leaf in single))
    assert_trees_close(actual["params"], expected, 5e-3)
    assert_close(losses, np.stack(expected_losses), tolerance=1e-3)
    if OVERWRITE in variables:
        largest = jax.tree.map(lambda *leaves: np.max(leaves, axis=0), *(leaf[OVERWRITE] for leaf in single))
        found = dict(jax.tree.leaves_with_path(actual[OVERWRITE]))
        for path, expected in jax.tree.leaves_with_path(largest):
            if "kernel_amax_history" not in str(path):  # quantized kernels are not observed
                np.testing.assert_allclose(found[path], expected, rtol=1e-3)


@pytest.mark.parametrize("recipe", [RECIPES["block"], RECIPES["delayed"]], ids=["block", "delayed"])
def test_only_kernels_of_layers_with_a_recipe_are_quantized(rng, recipe):
    model, x = Model(recipe), normal(rng, (16, 32))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    if OVERWRITE in variables:
        variables |= {OVERWRITE: jax.jit(jax.grad(loss_of(model)))(variables, x)[OVERWRITE]}
    quantized = quantize_kernels(model, variables, x)
    leaves = jax.tree.leaves_with_path(quantized["params"], is_leaf=lambda leaf: isinstance(leaf, QuantizedArray))
    kinds = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    found = {path for path, leaf in kinds.items() if isinstance(leaf, QuantizedArray)}
    assert found == {"split/kernel", "join/kernel"}
    kernel = np.asarray(variables["params"]["join"]["kernel"])
    assert_close(
        np.asarray(kinds["join/kernel"].dequantize()).reshape(kernel.shape), kernel, tolerance=0.04, dtype=jnp.float32
    )
    assert_close(model.apply(quantized, x), model.apply(variables, x), tolerance=2e-3)
    averaged = quantize_kernels(model, {**variables, "averages": variables["params"]}, x)["averages"]
    jax.tree.map(np.testing.assert_array_equal, averaged, variables["params"])
    again = quantize_kernels(model, quantized, x)
    assert jax.tree.structure(again) == jax.tree.structure(quantized)
    assert [*map(jax.typeof, jax.tree.leaves(again))] == [*map(jax.typeof, jax.tree.leaves(quantized))]


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


def test_training_with_quantized_kernels_follows_training_without(rng):
    """Optimizer steps with two microbatches each; the optimizer holds the only float32 kernels."""
    model, data = Model(CurrentScaling()), normal(rng, (3, 2, 16, 32))
    variables = jax.jit(model.init)(jax.random.key(int(rng.integers(2**31))), data[0, 0])

    def train(quantize):
        state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optax.sgd(0.1))

        @jax.jit
        def step(state, microbatches):
            used = {"params": state.params}
            gradients = jax.tree.map(jnp.zeros_like, used)
            if quantize:
                used = quantize_kernels(model, used, microbatches[0])
            for x in microbatches:
                loss, gradients = accumulate_gradients(loss_of(model))(used, gradients, x)
            return state.apply_gradients(grads=gradients["params"]), loss

        losses = []
        for microbatches in data:
            state, loss = step(state, microbatches)
            losses.append(float(loss))
        return state, losses

    (state, losses), (expected_state, expected_losses) = train(True), train(False)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-3)
    assert losses[-1] < losses[0]
    moved = jax.tree.map(lambda a, b: a - b, expected_state.params, variables["params"])
    actual = jax.tree.map(lambda a, b: a - b, state.params, variables["params"])
    assert_trees_close(actual, moved, 0.02)


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


def test_gradient_of_a_kernel_that_the_loss_does_not_use(rng):
    class Two(nn.Module):
        def setup(self):
            self.used, self.unused = (Dense(32, recipe=CurrentScaling()) for _ in range(2))

        def __call__(self, x):
            return self.used(x) + self.unused(x)

    model, x = Two(), normal(rng, (16, 32))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    quantized = quantize_kernels(model, variables, x)
    before = jax.tree.map(jnp.ones_like, variables)
    loss, after = accumulate_gradients(lambda v, x: jnp.sum(model.apply(v, x, method=lambda m, x: m.used(x)) ** 2))(
        quantized, before, x
    )
    assert jnp.isfinite(loss)
    np.testing.assert_array_equal(after["params"]["unused"]["kernel"], 1.0)
    assert jnp.linalg.norm(after["params"]["used"]["kernel"] - 1.0) > 1.0


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


@pytest.mark.parametrize("jit", [False, True])
def test_a_quantized_kernel_that_is_used_twice_is_visible(rng, jit):
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            shared = Dense(32, recipe=CurrentScaling(), name="shared")
            return Dense(32, recipe=CurrentScaling(), name="then")(shared(shared(x)))

    model, x = Twice(), normal(rng, (16, 32))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    quantized = quantize_kernels(model, variables, x)
    function = accumulate_gradients(loss_of(model))
    gradients = jax.tree.map(jnp.zeros_like, variables)
    if jit:
        assert jnp.isnan(jax.jit(function)(quantized, gradients, x)[0])
    else:
        with pytest.raises(ValueError, match=r"kernel .*shared.* is quantized and was used 2.0 times"):
            function(quantized, gradients, x)


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


@pytest.mark.parametrize("jit", [False, True])
def test_gradients_that_do_not_fit_are_refused(jit, rng):
    model, x = Dense(32, recipe=DelayedScaling(history_len=4)), normal(rng, (16, 32))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    quantized = quantize_kernels(model, variables, x)
    function = accumulate_gradients(loss_of(model))
    function = jax.jit(function) if jit else function
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


def test_aux_is_handed_on(rng):
    model, x = Dense(32, recipe=CurrentScaling()), normal(rng, (16, 32))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    zeros = jax.tree.map(jnp.zeros_like, variables)
    loss_fn = accumulate_gradients(lambda v, x: (loss_of(model)(v, x), {"rows": x.shape[0]}), has_aux=True)
    (loss, aux), _ = loss_fn(quantize_kernels(model, variables, x), zeros, x)
    assert aux == {"rows": 16}
    assert loss == accumulate_gradients(loss_of(model))(quantize_kernels(model, variables, x), zeros, x)[0]


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
    model = Dense(512, kernel_axes=("embed", "mlp"), bias_axes=("mlp",), recipe=CurrentScaling())
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


@pytest.mark.parametrize("recipe", [RECIPES["block"], RECIPES["delayed"]], ids=["block", "delayed"])
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


def test_what_is_no_module_has_no_kernels(rng):
    model, x = Dense(32, recipe=CurrentScaling()), normal(rng, (16, 32))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    with pytest.raises(ValueError, match=r"model is of type dict; it must be a flax\.linen\.Module"):
        quantize_kernels(variables, model, x)
