"""MaxTextQuantization in layers that use a quantization as those of maxtext 0.2.5 do, and in MaxText where it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from te_jax.flax.maxtext import MaxTextQuantization
from te_jax.nnx import OverwriteWithGradient, overwrite_with_gradient
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling
from te_jax.testing import relative_error

RECIPES = {"current": CurrentScaling(), "block": BlockScaling(), "delayed": DelayedScaling(history_len=4)}
TRAINED = nnx.Any(nnx.Param, OverwriteWithGradient)


class LikeDenseGeneral(nnx.Module):
    """How a dense layer of MaxText makes and calls its product: a Linen module, bridged when the layer is made."""

    def __init__(self, in_features_shape, out_features_shape, quant, rngs):
        self.in_features_shape = in_features_shape
        shape = (*in_features_shape, *out_features_shape)
        assert quant
        assert quant.quant_mode not in ("serve", "convert")
        self.kernel = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), shape, jnp.float32))
        linen = quant.dot_general_cls(mesh_axes=("embed", "mlp"))()
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


@pytest.mark.filterwarnings("ignore:'sharding' is deprecated:DeprecationWarning")  # MaxText's own
@pytest.mark.parametrize("make", [LikeDenseGeneral, of_maxtext])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_dense_layers_multiply_in_fp8(rng, make, recipe):
    layer = make((4, 8), (48,), MaxTextQuantization(recipe), nnx.Rngs(int(rng.integers(2**31))))
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
    assert not nnx.state(layer, nnx.RngState)


def test_einsum_takes_either_argument_and_is_that_of_jax(rng):
    quant = MaxTextQuantization(CurrentScaling())
    x, kernel = (
        jax.device_put(np.asarray(rng.standard_normal(shape), jnp.float32)) for shape in ((2, 3, 4), (2, 4, 5))
    )
    for einsum in (quant.einsum(mesh_axes=("expert", "embed")), quant.einsum(dtype=jnp.bfloat16), quant.einsum()):
        np.testing.assert_array_equal(einsum("ebd,edf->ebf", x, kernel), jnp.einsum("ebd,edf->ebf", x, kernel))


def test_it_is_a_static_argument():
    assert hash(MaxTextQuantization(CurrentScaling())) == hash(MaxTextQuantization(CurrentScaling()))
    assert MaxTextQuantization(CurrentScaling()) != MaxTextQuantization(BlockScaling())


def test_it_has_what_the_classes_of_maxtext_have():
    quantizations = pytest.importorskip("maxtext.layers.quantizations")
    public = {name for name in vars(quantizations.Quantization) if not name.startswith("_")}
    assert public <= set(dir(MaxTextQuantization(CurrentScaling())))
    assert not quantizations.in_serve_mode(MaxTextQuantization(CurrentScaling()))
    assert not quantizations.in_convert_mode(MaxTextQuantization(CurrentScaling()))
