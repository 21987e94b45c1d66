"""Kernels that are quantized once and used by several microbatches, in NNX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax.nnx import (
    Linear,
    LinearGeneral,
    OverwriteWithGradient,
    QuantizedKernel,
    accumulate_gradients,
    overwrite_with_gradient,
    quantize_kernels,
)
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from te_jax.testing import assert_close

RECIPES = {
    "current": CurrentScaling(),
    "rowwise": RowwiseScaling(),
    "block": BlockScaling(),
    "delayed": DelayedScaling(history_len=4),
}
TRAINED = nnx.Any(nnx.Param, OverwriteWithGradient)
WRT = nnx.DiffState(0, TRAINED)


class Model(nnx.Module):
    """Two layers that are quantized and one that is not, with heads that blocks of 128 do not divide."""

    def __init__(self, recipe, rngs):
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.split = LinearGeneral(32, (4, 48), recipe=recipe, activation="gelu", rngs=rngs)
        self.join = LinearGeneral((4, 48), 32, axis=(-2, -1), recipe=recipe, use_bias=False, rngs=rngs)
        self.exact = Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return self.exact(self.join(self.split(self.norm(x))))


class Block(nnx.Module):
    def __init__(self, recipe, rngs):
        self.linear = Linear(32, 32, recipe=recipe, rngs=rngs)

    def __call__(self, x):
        return x + self.linear(x)


class Scanned(nnx.Module):
    def __init__(self, recipe, rngs):
        self.blocks = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: Block(recipe, rngs)))(rngs)

    def __call__(self, x):
        layer = nnx.remat(lambda x, block: block(x))
        return nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)


def normal(rng, shape):
    return jax.device_put(np.asarray(rng.standard_normal(shape), jnp.float32))


def loss_fn(model, x):
    return jnp.mean(jnp.square(model(x)))


def zeros(model):
    return jax.tree.map(jnp.zeros_like, nnx.state(model, TRAINED))


def parameters(state):
    return nnx.to_pure_dict(nnx.state(state, nnx.Param))


@nnx.jit
def observe(model, x):
    overwrite_with_gradient(model, nnx.grad(loss_fn, argnums=WRT)(model, x))


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        pytest.param(Model, "current", marks=pytest.mark.slow),
        (Model, "block"),
        (Model, "delayed"),
        (Scanned, "delayed"),
    ],
)
def test_gradients_are_those_of_kernels_quantized_in_each_microbatch(rng, model, recipe):
    model = model(RECIPES[recipe], nnx.Rngs(int(rng.integers(2**31))))
    microbatches = normal(rng, (2, 16, 32))
    if recipe == "delayed":  # kernels quantized once have scales that are always up to date
        observe(model, microbatches[0])

    @nnx.jit
    def accumulated(model, microbatches):
        quantized, gradients = quantize_kernels(model), zeros(model)
        losses = []
        for x in microbatches:
            loss, gradients = accumulate_gradients(loss_fn)(quantized, gradients, x)
            losses.append(loss)
        return jnp.stack(losses), gradients

    untouched = nnx.clone(model)
    losses, actual = accumulated(model, microbatches)
    value_and_gradient = nnx.jit(nnx.value_and_grad(loss_fn, argnums=WRT))
    single = [value_and_gradient(untouched, x) for x in microbatches]
    expected = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *(parameters(g) for _, g in single))
    jax.tree.map(lambda a, e: assert_close(a, e, tolerance=5e-3), parameters(actual), expected)
    assert_close(losses, np.stack([loss for loss, _ in single]), tolerance=1e-3)
    if recipe == "delayed":
        found = dict(nnx.to_flat_state(nnx.state(actual, OverwriteWithGradient)))
        for path, variable in found.items():
            if path[-1] != "kernel_amax_history":  # quantized kernels are not observed
                states = [dict(nnx.to_flat_state(g))[path][...] for _, g in single]
                np.testing.assert_allclose(variable[...], np.max(states, axis=0), rtol=1e-3)
    if isinstance(model, Model):  # what the loss changes beside is kept
        np.testing.assert_allclose(model.norm.mean[...], untouched.norm.mean[...], rtol=1e-5, atol=1e-7)
        assert jnp.any(model.norm.mean[...] != 0)


def test_only_kernels_of_layers_with_a_recipe_are_quantized(rng):
    model = Model(BlockScaling(), nnx.Rngs(0))
    quantized = quantize_kernels(model)
    found = {path for path, _ in nnx.to_flat_state(nnx.state(quantized, QuantizedKernel))}
    assert found == {("split", "kernel"), ("join", "kernel")}
    assert isinstance(model.split.kernel, nnx.Param)
    assert quantized.split.bias is model.split.bias
    assert quantized.exact.kernel is model.exact.kernel
    kernel = np.asarray(model.join.kernel[...])
    values = quantized.join.kernel.get_value().dequantize().reshape(kernel.shape)
    assert_close(values, kernel, tolerance=0.04)
    x = normal(rng, (16, 32))
    model.eval(), quantized.eval()
    assert_close(quantized(x), model(x), tolerance=2e-3)
    assert_close(nnx.jit(lambda model, x: model(x))(quantize_kernels(quantized), x), model(x), tolerance=2e-3)


def test_training_with_quantized_kernels_follows_training_without(rng):
    """Optimizer steps with two microbatches each; the optimizer's model holds the only float32 kernels."""
    data, seed = normal(rng, (3, 2, 16, 32)), int(rng.integers(2**31))

    def train(quantize):
        model = Model(CurrentScaling(), nnx.Rngs(seed))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, microbatches):
            used, gradients = quantize_kernels(model) if quantize else model, zeros(model)
            for x in microbatches:
                loss, gradients = accumulate_gradients(loss_fn)(used, gradients, x)
            optimizer.update(model, gradients)
            return loss

        before = parameters(nnx.state(model))
        losses = [float(step(model, optimizer, microbatches)) for microbatches in data]
        moved = jax.tree.map(lambda a, b: a - b, parameters(nnx.state(model)), before)
        return losses, moved

    (losses, moved), (expected_losses, expected_moved) = train(True), train(False)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-3)
    assert losses[-1] < losses[0]
    jax.tree.map(lambda a, e: assert_close(a, e, tolerance=0.02), moved, expected_moved)


def test_gradient_of_a_kernel_that_the_loss_does_not_use(rng):
    model = Model(CurrentScaling(), nnx.Rngs(0))
    before = jax.tree.map(jnp.ones_like, nnx.state(model, TRAINED))
    loss, after = accumulate_gradients(lambda model, x: jnp.sum(model.split(x) ** 2))(
        quantize_kernels(model), before, normal(rng, (16, 32))
    )
    assert jnp.isfinite(loss)
    np.testing.assert_array_equal(after["join"]["kernel"][...], 1.0)
    assert jnp.linalg.norm(after["split"]["kernel"][...] - 1.0) > 1.0


@pytest.mark.parametrize("jit", [False, True])
def test_a_quantized_kernel_that_is_used_twice_is_visible(rng, jit):
    model, x = Linear(32, 32, recipe=CurrentScaling(), rngs=nnx.Rngs(0)), normal(rng, (16, 32))
    function = accumulate_gradients(lambda model, x: jnp.sum(model(model(x))))
    arguments = quantize_kernels(model), zeros(model), x
    if jit:
        assert jnp.isnan(nnx.jit(function)(*arguments)[0])
    else:
        with pytest.raises(ValueError, match=r"kernel kernel is quantized and was used 2.0 times"):
            function(*arguments)


def test_debug_nans_without_jit(rng):
    model = Linear(32, 32, recipe=CurrentScaling(), rngs=nnx.Rngs(0))
    arguments = quantize_kernels(model), zeros(model), normal(rng, (16, 32))
    with jax.disable_jit(), jax.debug_nans(True):
        loss, _ = accumulate_gradients(loss_fn)(*arguments)
    assert_close(loss, nnx.jit(accumulate_gradients(loss_fn))(*arguments)[0], tolerance=1e-4)
    assert loss > 0


def test_aux_is_handed_on(rng):
    model, x = Linear(32, 32, recipe=CurrentScaling(), rngs=nnx.Rngs(0)), normal(rng, (16, 32))
    quantized = quantize_kernels(model)
    with_aux = accumulate_gradients(lambda model, x: (loss_fn(model, x), {"rows": x.shape[0]}), has_aux=True)
    (loss, aux), _ = with_aux(quantized, zeros(model), x)
    assert aux == {"rows": 16}
    assert loss == accumulate_gradients(loss_fn)(quantized, zeros(model), x)[0]


class Tied(nnx.Module):
    def __init__(self, recipe, other, features=32):
        rngs = nnx.Rngs(0)
        self.first = Linear(32, 32, recipe=recipe, rngs=rngs)
        self.second = LinearGeneral(32, features, recipe=other, rngs=rngs)
        self.second.kernel = self.first.kernel

    def __call__(self, x):
        return self.second(x)


def test_a_kernel_that_layers_share_stays_one(rng):
    model, x = Tied(CurrentScaling(), CurrentScaling()), normal(rng, (16, 32))
    quantized = quantize_kernels(model)
    assert quantized.first.kernel is quantized.second.kernel
    assert model.first.kernel is model.second.kernel
    assert isinstance(model.first.kernel, nnx.Param)
    assert_close(quantized(x), model(x), tolerance=1e-4)
    _, actual = accumulate_gradients(loss_fn)(quantized, zeros(model), x)
    expected = nnx.grad(loss_fn)(model, x)
    assert_close(actual["first"]["kernel"][...], expected["first"]["kernel"][...], tolerance=5e-3)
    with pytest.raises(ValueError, match=r"kernel first.kernel is quantized and was used 2.0 times"):
        accumulate_gradients(lambda model, x: jnp.sum(model(model.first(x))))(quantized, zeros(model), x)


def test_layers_that_share_a_kernel_and_need_different_ones_are_refused():
    with pytest.raises(ValueError, match="layers first and second share a kernel and quantize it differently"):
        quantize_kernels(Tied(CurrentScaling(), BlockScaling()))
    first, second = (
        LinearGeneral(*sizes, axis=axis, recipe=CurrentScaling(), rngs=nnx.Rngs(0))
        for sizes, axis in ((((16, 16), 32), (-2, -1)), ((16, (16, 32)), -1))
    )
    second.kernel = first.kernel
    with pytest.raises(ValueError, match=r"layers 0 and 1 share a kernel .*: give them the same .* of dimensions"):
        quantize_kernels(nnx.List([first, second]))
    for recipes, names in (
        ((None, CurrentScaling()), "second .* with first.kernel"),
        ((CurrentScaling(), None), "first .* with second.kernel"),
    ):
        with pytest.raises(ValueError, match=f"layer {names}, which needs it as it is: use recipe=None"):
            quantize_kernels(Tied(*recipes))


@pytest.mark.parametrize("jit", [False, True])
def test_gradients_that_do_not_fit_are_refused(jit, rng):
    model, x = Linear(32, 32, recipe=DelayedScaling(history_len=4), rngs=nnx.Rngs(0)), normal(rng, (16, 32))
    quantized, given = quantize_kernels(model), dict(nnx.to_flat_state(zeros(model)))
    function = accumulate_gradients(loss_fn)
    function = nnx.jit(function) if jit else function

    def refuses(gradients, message):
        remedy = (
            r"start from jax.tree.map\(jnp.zeros_like, nnx.state\(model, .*OverwriteWithGradient\)\)\), of the model"
        )
        with pytest.raises(ValueError, match=f"gradients have {message}.*: {remedy}"):
            function(quantized, gradients, x)

    refuses(jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param)), "nothing for .*'activation_amax_history'")
    refuses(zeros(quantized), r"nothing for \['kernel'\]")
    everything = nnx.Any(TRAINED, QuantizedKernel)
    refuses(jax.tree.map(jnp.zeros_like, nnx.state(quantized, everything)), "a QuantizedArray for kernel")
    refuses(nnx.from_flat_state(given | {("other",): nnx.Param(x)}), r"\['other'\], which is not differentiated")
    for name in ("kernel", "bias"):
        wrong = given | {(name,): given[(name,)].replace(jnp.zeros(16))}
        refuses(nnx.from_flat_state(wrong), rf"shape \(16,\) for {name}, which has shape")


@pytest.mark.filterwarnings("ignore:a dimension of .* whose shards would cut blocks:RuntimeWarning")
@pytest.mark.parametrize(
    ("sizes", "kernel_spec", "bias_spec", "x_spec"),
    [
        ((64, (4, 32)), P(None, None, "model"), P(None, "model"), P("data")),
        ((64, (4, 32)), P("data", "model", None), P("model"), P("data")),
        (((4, 32), 64), P(None, "model", None), P(), P("data", None, "model")),
        (((4, 32), 64), P("model", None, "data"), P("data"), P(None, "model")),
    ],
    ids=["in heads", "of heads", "in contracted heads", "of contracted heads"],
)
def test_heads_on_explicit_meshes(sizes, kernel_spec, bias_spec, x_spec, make_mesh, rng):
    """Blocks of 128 do not divide heads, so that those are merged, however they are split over devices."""
    mesh = make_mesh({"data": AxisType.Explicit, "model": AxisType.Explicit})
    inner, outer = sizes
    axis = (-2, -1) if isinstance(inner, tuple) else -1
    model = LinearGeneral(inner, outer, axis=axis, recipe=BlockScaling(), rngs=nnx.Rngs(int(rng.integers(2**31))))
    x = normal(rng, (16, *model.in_features))

    def gradients_of(model, x):
        return accumulate_gradients(loss_fn)(quantize_kernels(model), zeros(model), x)

    loss, expected = nnx.jit(gradients_of)(model, x)
    with jax.set_mesh(mesh):
        for variable, spec in ((model.kernel, kernel_spec), (model.bias, bias_spec)):
            variable.set_value(jax.device_put(variable[...], NamedSharding(mesh, spec)))
        actual_loss, actual = nnx.jit(gradients_of)(model, jax.device_put(x, NamedSharding(mesh, x_spec)))
    assert_close(actual_loss, loss, tolerance=1e-4)
    jax.tree.map(lambda a, e: assert_close(a, e, tolerance=1e-3), parameters(actual), parameters(expected))
    assert actual["kernel"][...].sharding.is_equivalent_to(NamedSharding(mesh, kernel_spec), model.kernel.ndim)


def test_what_is_no_module_has_no_kernels():
    with pytest.raises(ValueError, match=r"model is of type int; it must be a flax\.nnx\.Module"):
        quantize_kernels(3)
