"""MaxTextQuantization in layers that use a quantization as those of maxtext 0.2.5 do, and in MaxText where it is."""

from pathlib import Path

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


@pytest.mark.parametrize(
    ("axes", "shape", "reason"),
    [
        (("embed", None), (32, 8), "a router by its axes"),  # as GateLogit makes it
        (("embed_router", None), (32, 16), "a router by its axes"),
        (("embed", "mlp"), (32, 40), "32 features in, 40 out: FP8 products need multiples of 16"),
        (("mlp", "embed"), (40, 32), "40 features in, 32 out: FP8 products need multiples of 16"),
    ],
)
@pytest.mark.parametrize("recipe", [BlockScaling(), DelayedScaling(history_len=4)], ids=["block", "delayed"])
def test_routers_and_other_sizes_are_those_of_maxtext(rng, recipe, axes, shape, reason):
    quant = MaxTextQuantization(recipe)
    layer = LikeDenseGeneral(shape[:1], shape[1:], quant, nnx.Rngs(int(rng.integers(2**31))), axes)
    dense = LikeDenseGeneral((32,), (48,), quant, nnx.Rngs(0), (None, None))
    x = jax.device_put(np.asarray(rng.standard_normal((3, shape[0])), jnp.bfloat16))
    np.testing.assert_array_equal(layer(x), jax.lax.dot(x, layer.kernel[...].astype(jnp.bfloat16)), strict=True)
    assert not nnx.state(layer, OverwriteWithGradient)
    assert bool(nnx.state(dense, OverwriteWithGradient)) is isinstance(recipe, DelayedScaling)
    first, second = quant.report().layers
    path = "/".join(map(str, axes))
    assert (first.path, first.kind, first.recipe, first.reason) == (path, f"kernel {shape}", None, reason)
    assert (second.path, second.recipe, second.reason) == ("None/None", recipe, "")


def test_a_report_needs_a_model():
    with pytest.raises(ValueError, match="no layer has multiplied with this quantization: make the model with it"):
        MaxTextQuantization(BlockScaling()).report()


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # MaxText's own
@pytest.mark.parametrize("experts", [1, 8, 16])
def test_a_model_of_maxtext_takes_it_as_an_argument(rng, experts):
    creation = pytest.importorskip("maxtext.utils.model_creation_utils")
    from maxtext.configs import pyconfig
    from maxtext.utils import maxtext_utils

    base = Path(pyconfig.__file__).with_name("base.yml")
    sizes = {"base_emb_dim": 256, "base_mlp_dim": 512, "base_num_query_heads": 4, "base_num_kv_heads": 4}
    sizes |= {"head_dim": 64, "base_num_decoder_layers": 2, "vocab_size": 512, "max_target_length": 128}
    if experts > 1:
        sizes |= {"decoder_block": "mixtral", "num_experts": experts, "num_experts_per_tok": 2}
        sizes |= {"base_moe_mlp_dim": 512, "sparse_matmul": False, "megablox": False}
    config = pyconfig.initialize(
        ["", str(base)], run_name="test", hardware="cpu", enable_checkpointing=False, scan_layers=False,
        attention="dot_product", dataset_type="synthetic", skip_jax_distributed_system=True, **sizes,
    )  # fmt: skip
    mesh = maxtext_utils.get_mesh_from_config(config, jax.devices()[:1])
    tokens = jnp.asarray(rng.integers(0, 512, (2, 128)), jnp.int32)
    positions, segments = jnp.broadcast_to(jnp.arange(128), tokens.shape), jnp.ones_like(tokens)

    def model(quant):
        with mesh, jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return creation.get_transformer_model(config, mesh, quant, rngs=nnx.Rngs(params=0, dropout=1, aqt=2))

    def logits(model):
        with mesh, jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            run = nnx.jit(lambda it: it(tokens, positions, decoder_segment_ids=segments, enable_dropout=False))
            return np.asarray(run(model), np.float64)

    quant = MaxTextQuantization(BlockScaling())
    plain, quantized = model(None), model(quant)
    nnx.update(quantized, nnx.state(plain, nnx.Param))
    assert 1e-3 < relative_error(logits(quantized), logits(plain)) < 0.15
    routers = [layer.kind for layer in quant.report().skipped]
    assert routers == ([f"kernel (256, {experts})"] if experts > 1 else [])
