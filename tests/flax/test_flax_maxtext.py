"""MaxTextQuantization in layers that use a quantization as those of maxtext 0.2.5 do. test_flax_maxtext_models.py has
whole models of MaxText."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from te_jax.flax.maxtext import MaxTextQuantization
from te_jax.nnx import OverwriteWithGradient, convert, overwrite_with_gradient
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling
from te_jax.testing import relative_error

RECIPES = {"current": CurrentScaling(), "block": BlockScaling(), "delayed": DelayedScaling(history_len=4)}
TRAINED = nnx.Any(nnx.Param, OverwriteWithGradient)


class LikeDenseGeneral(nnx.Module):
    """How a dense layer of MaxText makes and calls its product: a Linen module, bridged when the layer is made."""

    def __init__(self, in_features_shape, out_features_shape, quant, rngs, kernel_axes=("embed", "mlp")):
        self.in_features_shape = in_features_shape
        shape = (*in_features_shape, *out_features_shape)
        assert quant
        assert quant.quant_mode not in ("serve", "convert")
        self.kernel = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), shape, jnp.float32))
        linen = quant.dot_general_cls(mesh_axes=kernel_axes)()
        product = nnx.bridge.ToNNX(linen, rngs=rngs)
        setattr(self, f"{type(linen).__name__}_0", product)
        block_size = getattr(quant, "get_block_size", lambda: 1)()
        inputs = jnp.zeros((block_size, *in_features_shape), jnp.bfloat16)
        product.lazy_init(inputs, self.kernel[...].astype(jnp.bfloat16), self._numbers(inputs), precision=None)
        if not quant.needs_apply_rngs:
            product.to_nnx__rngs = None
        self.name = f"{type(linen).__name__}_0"

    def _numbers(self, inputs):
        count = len(self.in_features_shape)
        return (tuple(range(inputs.ndim - count, inputs.ndim)), tuple(range(count))), ((), ())

    def __call__(self, inputs):
        inputs, kernel = jnp.asarray(inputs, jnp.bfloat16), jnp.asarray(self.kernel[...], jnp.bfloat16)
        return getattr(self, self.name)(inputs, kernel, self._numbers(inputs), precision=None, mutable=["aqt"])


def test_the_report_of_convert_has_layers_that_are_quantized():
    """Convert is for the experts of MaxText; its dense layers run in FP8 by their quantization."""
    quant, rngs = MaxTextQuantization(BlockScaling()), nnx.Rngs(0)
    up, gate = (
        LikeDenseGeneral((32,), (2, 16), quant, rngs),
        LikeDenseGeneral((32,), (8,), quant, rngs, ("embed", None)),
    )
    layers = {layer.path: layer for layer in convert(nnx.Dict(up=up, gate=gate), BlockScaling()).layers}
    assert (layers["up"].recipe, layers["up"].reason) == (BlockScaling(), "by its MaxTextQuantization")
    assert (layers["gate"].recipe, layers["gate"].reason) == (None, "a router by its axes")
    assert not layers["up"].all_experts


def of_maxtext(in_features_shape, out_features_shape, quant, rngs):
    linears = pytest.importorskip("maxtext.layers.linears")
    return linears.DenseGeneral(
        in_features_shape,
        out_features_shape,
        axis=tuple(range(-len(in_features_shape), 0)),
        dtype=jnp.bfloat16,
        quant=quant,
        kernel_axes=("embed", "heads", "mlp"),
        rngs=rngs,
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MaxText's own
@pytest.mark.parametrize(
    ("make", "recipe"),
    [
        (LikeDenseGeneral, BlockScaling()),
        (LikeDenseGeneral, DelayedScaling(history_len=4)),
        pytest.param(of_maxtext, DelayedScaling(history_len=4), marks=pytest.mark.slow),
    ],
    ids=["block", "delayed", "of MaxText"],
)
def test_dense_layers_multiply_in_fp8(rng, make, recipe):
    layer = nnx.jit(lambda key: make((4, 8), (48,), MaxTextQuantization(recipe), nnx.Rngs(key)))(jax.random.key(0))
    x = jax.device_put(np.asarray(rng.standard_normal((3, 5, 4, 8)), jnp.bfloat16))

    @nnx.jit
    def step(layer, x):
        def loss(layer):
            y = layer(x)
            return jnp.sum(y.astype(jnp.float32) ** 2), y

        (_, y), gradients = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, TRAINED), has_aux=True)(layer)
        overwrite_with_gradient(layer, gradients)
        return y, gradients

    for _ in range(2):
        y, gradients = step(layer, x)
    exact = np.einsum("btij,ijk->btk", *(np.asarray(a, np.float64) for a in (x, layer.kernel[...])))
    assert 1e-3 < relative_error(y, exact) < 0.06
    expected = np.einsum("btij,btk->ijk", np.asarray(x, np.float64), 2 * exact)
    assert relative_error(gradients["kernel"][...], expected) < 0.12
    state = nnx.to_pure_dict(nnx.state(layer, OverwriteWithGradient))
    if isinstance(recipe, DelayedScaling):
        (histories,) = state.values()
        np.testing.assert_array_equal(histories["activation_amax_history"], [jnp.abs(x).max()] * 2 + [0] * 2)
    else:
        assert not state
    if make is LikeDenseGeneral:  # MaxText 0.2.4 keeps the numbers that its bridge to Linen draws
        assert not nnx.state(layer, nnx.RngState)


@pytest.mark.parametrize(
    ("axes", "shape", "reason"),
    [
        (("embed", None), (32, 8), "a router by its axes"),  # as GateLogit makes it
        (("embed_router", None), (32, 16), "a router by its axes"),
    ],
)
def test_routers_are_those_of_maxtext(axes, shape, reason):
    recipe = DelayedScaling(history_len=4)
    quant = MaxTextQuantization(recipe)

    def made(x):
        layer = LikeDenseGeneral(shape[:1], shape[1:], quant, nnx.Rngs(0), axes)
        dense = LikeDenseGeneral((32,), (48,), quant, nnx.Rngs(0), (None, None))
        programs.append(str(jax.make_jaxpr(lambda: layer(x))()))
        return layer, dense

    programs = []
    layer, dense = nnx.eval_shape(made, jnp.ones((3, shape[0]), jnp.bfloat16))
    assert "f8_" not in programs[0]
    assert not nnx.state(layer, OverwriteWithGradient)
    assert nnx.state(dense, OverwriteWithGradient)
    first, second = quant.report().layers
    path = "/".join(map(str, axes))
    assert (first.path, first.kind, first.recipe, first.reason) == (path, f"kernel {shape}", None, reason)
    assert (second.path, second.recipe, second.reason) == ("None/None", recipe, "")


def test_a_report_needs_a_model():
    with pytest.raises(ValueError, match="no layer has multiplied with this quantization: make the model with it"):
        MaxTextQuantization(BlockScaling()).report()


@pytest.mark.parametrize(
    ("subscripts", "axes", "x_shape", "kernel_shape"),
    [  # of RoutedMoE.dense_matmul, with and without a capacity factor
        ("BSM,EMH -> BSEH", ("exp", "embed_moe", "mlp_moe"), (2, 16, 32), (4, 32, 48)),
        ("BSEH,EHM -> BSEM", ("exp", "mlp_moe", "embed_moe"), (2, 16, 4, 48), (4, 48, 32)),
        ("EBCM,EMH -> EBCH", ("exp", None, "mlp"), (4, 2, 8, 32), (4, 32, 48)),
    ],
)
def test_experts_multiply_in_fp8(rng, subscripts, axes, x_shape, kernel_shape):
    quant = MaxTextQuantization(BlockScaling())
    einsum = quant.einsum(mesh_axes=axes)
    x, kernel = (jax.device_put(np.asarray(rng.standard_normal(s), jnp.bfloat16)) for s in (x_shape, kernel_shape))

    @jax.jit
    def both_passes(x, kernel):
        y, backward = jax.vjp(lambda x, kernel: einsum(subscripts, x, kernel), x, kernel)
        return y, *backward(y)

    y, dx, dkernel = both_passes(x, kernel)
    x, kernel = (np.asarray(a, np.float64) for a in (x, kernel))
    inputs, weights, result = subscripts.replace(" ", "").replace("->", ",").split(",")
    exact = np.einsum(subscripts, x, kernel)
    assert y.dtype == jnp.bfloat16
    assert 1e-3 < relative_error(y, exact) < 0.06
    assert relative_error(dx, np.einsum(f"{result},{weights}->{inputs}", exact, kernel)) < 0.12
    assert relative_error(dkernel, np.einsum(f"{inputs},{result}->{weights}", x, exact)) < 0.12
    (row,) = quant.report().layers
    assert (row.path, row.kind) == ("/".join(map(str, axes)), f"kernel {kernel_shape}")
    assert (row.recipe, row.reason) == (BlockScaling(), "")


@pytest.mark.parametrize(
    ("recipe", "axes", "features", "reason"),
    [
        (DelayedScaling(), ("exp", None, "mlp"), 48, "DelayedScaling has no place for its state in experts: use a "),
        (BlockScaling(), ("activation_batch_moe", None, None), 48, None),  # a mask
        (BlockScaling(), (), 48, None),
    ],
)
def test_other_einsums_are_those_of_maxtext(rng, recipe, axes, features, reason):
    quant = MaxTextQuantization(recipe)
    shapes = (4, 3, 32), (4, 32, features)
    x, kernel = (jax.device_put(np.asarray(rng.standard_normal(shape), jnp.float32)) for shape in shapes)
    y = quant.einsum(mesh_axes=axes)("EBM,EMH -> EBH", x, kernel)
    np.testing.assert_array_equal(y, jnp.einsum("EBM,EMH->EBH", x, kernel))
    if reason is None:
        with pytest.raises(ValueError, match="no layer has multiplied"):
            quant.report()
    else:
        (row,) = quant.report().skipped
        assert row.reason.startswith(reason)


def test_it_is_a_static_argument():
    assert hash(MaxTextQuantization(CurrentScaling())) == hash(MaxTextQuantization(CurrentScaling()))
    assert MaxTextQuantization(CurrentScaling()) != MaxTextQuantization(BlockScaling())


@pytest.mark.slow
def test_it_has_what_the_classes_of_maxtext_have():
    quantizations = pytest.importorskip("maxtext.layers.quantizations")
    public = {name for name in vars(quantizations.Quantization) if not name.startswith("_")}
    assert public <= set(dir(MaxTextQuantization(CurrentScaling())))
    assert not quantizations.in_serve_mode(MaxTextQuantization(CurrentScaling()))
    assert not quantizations.in_convert_mode(MaxTextQuantization(CurrentScaling()))
