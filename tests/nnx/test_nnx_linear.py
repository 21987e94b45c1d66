"""te_jax.nnx.Linear and LinearGeneral against the operation that they call, and on meshes. Else: tests/modules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_apis import NNX, normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax import ops
from te_jax.nnx import DotGeneral, Linear, LinearGeneral
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from te_jax.testing import assert_close

RECIPES = {
    "current": CurrentScaling(),
    "rowwise": RowwiseScaling(),
    "block": BlockScaling(),
    "delayed": DelayedScaling(history_len=4),
}


def test_sizes_are_those_of_flax():
    ours, theirs = Linear(32, 48, rngs=nnx.Rngs(0)), nnx.Linear(32, 48, rngs=nnx.Rngs(0))
    general = [layer(32, (4, 12), rngs=nnx.Rngs(0)) for layer in (LinearGeneral, nnx.LinearGeneral)]
    for actual, expected in ((ours, theirs), general):
        assert (actual.in_features, actual.out_features) == (expected.in_features, expected.out_features)
    with pytest.raises(ValueError, match=r"out_features is \(4, 12\); Linear takes one number: use LinearGeneral"):
        Linear(32, (4, 12), rngs=nnx.Rngs(0))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_it_is_the_operation(rng, recipe):
    layer = NNX.layer(
        "LinearGeneral", (4, 8), (2, 16), axis=(0, -1), recipe=recipe, activation="silu", dtype=jnp.bfloat16
    )
    module, x = NNX.drawn(layer, rng), normal(rng, (4, 3, 8), jnp.bfloat16)
    state = recipe.init() if isinstance(recipe, DelayedScaling) else None

    @nnx.jit
    def both(module, x):
        operands = x.transpose(1, 0, 2), module.kernel[...], module.bias[...]
        options = {"recipe": recipe, "contracting_ndim": 2, "activation": "silu", "scaling_state": state}
        return module(x), ops.dense(*operands, **options)

    np.testing.assert_array_equal(*both(module, x), strict=True)


def test_metadata_of_an_initializer_reaches_the_parameter():
    partitioned = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"), eager_sharding=False)
    module = NNX.abstract(NNX.layer("LinearGeneral", 32, (4, 12), kernel_init=partitioned))
    assert module.kernel.out_sharding == ("embed", "mlp")
    assert module.kernel.shape == (32, 4, 12)


@pytest.mark.parametrize("module", [Linear, nnx.Linear])
def test_out_sharding_on_an_explicit_mesh(rng, make_mesh, module):
    mesh = make_mesh({"data": AxisType.Explicit, "model": AxisType.Explicit})
    arguments = {"dot_general": DotGeneral(None)} if module is nnx.Linear else {}
    layer = module(32, 48, use_bias=False, **arguments, rngs=nnx.Rngs(0))
    x = rng.standard_normal((16, 32)).astype(np.float32)
    expected = x @ np.asarray(layer.kernel[...])
    with jax.set_mesh(mesh):
        y = nnx.jit(lambda layer, x: layer(x, out_sharding=P(None, "data")))(layer, jax.device_put(x, P("data", None)))
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "data")), 2)
    assert_close(y, expected, tolerance=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rngs: LinearGeneral((4, 8), 32, rngs=rngs), r"in_features is \(4, 8\) and axis is \(-1,\)"),
        (lambda rngs: LinearGeneral((16, -1), 32, rngs=rngs), r"in_features is \(16, -1\); it must be"),
        (lambda rngs: Linear(8, 32, rngs=rngs), r"the last ones of x .* must be the same"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        nnx.eval_shape(lambda: make(nnx.Rngs(0))(jnp.ones((3, 16))))


def test_batch_dimensions_are_refused():
    with pytest.raises(ValueError, match="batch dimensions are not supported"):
        DotGeneral(None)(np.ones((2, 3, 16)), np.ones((2, 16, 16)), (((2,), (1,)), ((0,), (0,))))
