"""te_jax.nnx.Linear and LinearGeneral against the operation that they call, and on meshes. Else: tests/modules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_apis import normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax import ops
from te_jax.flax import make_dot_general_cls
from te_jax.nnx import DotGeneral, Linear, LinearGeneral, OverwriteWithGradient
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from te_jax.testing import assert_close, relative_error

RECIPES = {
    "current": CurrentScaling(),
    "rowwise": RowwiseScaling(),
    "block": BlockScaling(),
    "delayed": DelayedScaling(history_len=4),
}


def seeded(rng):
    seed = int(rng.integers(2**31))
    return lambda: nnx.Rngs(seed)


def test_sizes_are_those_of_flax():
    ours, theirs = Linear(32, 48, rngs=nnx.Rngs(0)), nnx.Linear(32, 48, rngs=nnx.Rngs(0))
    general = [layer(32, (4, 12), rngs=nnx.Rngs(0)) for layer in (LinearGeneral, nnx.LinearGeneral)]
    for actual, expected in ((ours, theirs), general):
        assert (actual.in_features, actual.out_features) == (expected.in_features, expected.out_features)
    with pytest.raises(ValueError, match=r"out_features is \(4, 12\); Linear takes one number: use LinearGeneral"):
        Linear(32, (4, 12), rngs=nnx.Rngs(0))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_it_is_the_operation(rng, recipe):
    module = LinearGeneral(
        (4, 8), (2, 16), axis=(0, -1), recipe=recipe, activation="silu", dtype=jnp.bfloat16, rngs=seeded(rng)()
    )
    module.bias[...] = normal(rng, (2, 16))
    x = normal(rng, (4, 3, 8), jnp.bfloat16)
    expected = ops.dense(
        x.transpose(1, 0, 2),
        module.kernel[...],
        module.bias[...],
        recipe=recipe,
        contracting_ndim=2,
        activation="silu",
        scaling_state=recipe.init() if isinstance(recipe, DelayedScaling) else None,
    )
    np.testing.assert_array_equal(module(x), expected, strict=True)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_value_and_gradients_in_fp8(rng, recipe):
    module = Linear(48, 64, recipe=recipe, rngs=seeded(rng)())
    x, cotangent = normal(rng, (96, 48)), normal(rng, (96, 64))

    @nnx.jit
    def value_and_gradients(module, x):
        def loss(module, x):
            y = module(x)
            return jnp.sum(y * cotangent), y

        wrt = nnx.DiffState(0, nnx.Any(nnx.Param, OverwriteWithGradient))
        return nnx.value_and_grad(loss, argnums=(wrt, 1), has_aux=True)(module, x)

    if isinstance(recipe, DelayedScaling):  # the first step finds the scales
        nnx.update(module, nnx.state(value_and_gradients(module, x)[1][0], OverwriteWithGradient))
    (_, y), (gradients, dx) = value_and_gradients(module, x)
    kernel, x64, g64 = (np.asarray(a, np.float64) for a in (module.kernel[...], x, cotangent))
    assert relative_error(y, x64 @ kernel) < 0.055
    assert relative_error(dx, g64 @ kernel.T) < 0.085
    assert relative_error(gradients["kernel"][...], x64.T @ g64) < 0.085
    assert_close(gradients["bias"][...], g64.sum(0), dtype=jnp.float32)


def test_linen_products_inside_nnx(rng):
    """As bridges between the two APIs use them: the state becomes variables of the module."""
    x, kernel = normal(rng, (16, 32)), normal(rng, (32, 48))
    numbers = (((1,), (0,)), ((), ()))
    product = nnx.bridge.ToNNX(make_dot_general_cls(DelayedScaling(history_len=4))(), rngs=nnx.Rngs(0))
    product.lazy_init(x, kernel, numbers)
    assert_close(product(x, kernel, numbers), x @ kernel, tolerance=0.06)
    linen = make_dot_general_cls(DelayedScaling(history_len=4))()
    variables = linen.init(jax.random.key(0), x, kernel, numbers)
    assert_close(product(x, kernel, numbers), linen.apply(variables, x, kernel, numbers), tolerance=1e-6)


def test_metadata_of_an_initializer_reaches_the_parameter(rng):
    partitioned = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"), eager_sharding=False)
    module = LinearGeneral(32, (4, 12), kernel_init=partitioned, rngs=seeded(rng)())
    assert module.kernel.out_sharding == ("embed", "mlp")
    assert module.kernel.shape == (32, 4, 12)


@pytest.mark.parametrize(("name", "axis_type"), [("none", AxisType.Explicit), ("delayed", AxisType.Auto)])
def test_sharded_parameters(request, rng, make_mesh, axis_type, name):
    recipe = RECIPES.get(name)
    if axis_type == AxisType.Explicit and recipe is not None:
        request.getfixturevalue("native_kernels")  # the reference of FP8 products is written for other meshes
    mesh, rngs = make_mesh({"data": axis_type, "model": axis_type}), seeded(rng)
    x = normal(rng, (64, 256))
    wrt = nnx.DiffState(0, nnx.Any(nnx.Param, OverwriteWithGradient))

    @nnx.jit
    def value_and_gradients(module, x):
        def loss(module, x):
            y = module(x)
            return jnp.mean(jnp.square(y)), y

        return nnx.value_and_grad(loss, argnums=(wrt, 1), has_aux=True)(module, x)

    expected = value_and_gradients(Linear(256, 512, recipe=recipe, rngs=rngs()), x)
    with jax.set_mesh(mesh):
        module = Linear(
            256,
            512,
            recipe=recipe,
            kernel_metadata={"out_sharding": (None, "model")},
            bias_metadata={"out_sharding": ("model",)},
            rngs=rngs(),
        )
        columns = NamedSharding(mesh, P(None, "model"))
        assert module.kernel[...].sharding.is_equivalent_to(columns, 2)
        actual = value_and_gradients(module, jax.device_put(x, NamedSharding(mesh, P("data", None))))
    (_, y), (gradients, dx) = actual
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)
    assert gradients["kernel"][...].sharding.is_equivalent_to(columns, 2)
    assert dx.sharding.is_equivalent_to(NamedSharding(mesh, P("data", None)), 2)
    tolerance = 1e-5 if recipe is None else 5e-3
    actual, expected = ((value, nnx.to_pure_dict(g), dx) for value, (g, dx) in (actual, expected))
    jax.tree.map(lambda a, e: assert_close(a, e, tolerance=tolerance), actual, expected)


@pytest.mark.parametrize("module", [Linear, nnx.Linear])
def test_out_sharding_on_an_explicit_mesh(rng, make_mesh, module):
    mesh = make_mesh({"data": AxisType.Explicit, "model": AxisType.Explicit})
    arguments = {"dot_general": DotGeneral(None)} if module is nnx.Linear else {}
    layer, x = module(32, 48, use_bias=False, **arguments, rngs=seeded(rng)()), normal(rng, (16, 32))
    expected = layer(x)
    with jax.set_mesh(mesh):
        y = nnx.jit(lambda layer, x: layer(x, out_sharding=P(None, "data")))(layer, jax.device_put(x, P("data", None)))
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "data")), 2)
    assert_close(y, expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rngs: LinearGeneral((4, 8), 32, rngs=rngs), r"in_features is \(4, 8\) and axis is \(-1,\)"),
        (lambda rngs: LinearGeneral((16, -1), 32, rngs=rngs), r"in_features is \(16, -1\); it must be"),
        (lambda rngs: Linear(8, 32, rngs=rngs), r"the last ones of x .* must be the same"),
    ],
)
def test_bad_arguments_are_named(rng, make, message):
    with pytest.raises(ValueError, match=message):
        make(nnx.Rngs(0))(normal(rng, (3, 16)))


def test_batch_dimensions_are_refused(rng):
    with pytest.raises(ValueError, match="batch dimensions are not supported"):
        DotGeneral(None)(normal(rng, (2, 3, 16)), normal(rng, (2, 16, 16)), (((2,), (1,)), ((0,), (0,))))
