"""te_jax.nnx.Linear and LinearGeneral against Flax's own, and against the operation that they call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
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

# Sizes, arguments of both modules, and the shape of an input.
LAYERS = {
    "heads": ((32, (4, 8)), {}, (3, 5, 32)),
    "from heads": (((4, 8), 32), {"axis": (-2, -1)}, (3, 5, 4, 8)),
    "axes out of order": (((4, 8), (2, 16)), {"axis": (-1, 0)}, (4, 3, 8)),
    "no bias": (((4, 8), (2, 16)), {"axis": (0, -1), "use_bias": False}, (4, 3, 8)),
    "bfloat16": ((32, 48), {"param_dtype": jnp.bfloat16, "dtype": jnp.bfloat16}, (3, 32)),
    "other initializers": (
        (32, 48),
        {"kernel_init": nnx.initializers.orthogonal(), "bias_init": nnx.initializers.normal()},
        (3, 32),
    ),
}


def normal(rng, shape, dtype=jnp.float32):
    return jax.device_put(np.asarray(rng.standard_normal(shape), jnp.dtype(dtype)))


def seeded(rng):
    seed = int(rng.integers(2**31))
    return lambda: nnx.Rngs(seed)


def assert_same_state(ours, theirs):
    ours, theirs = (dict(nnx.to_flat_state(nnx.state(module))) for module in (ours, theirs))
    assert ours.keys() == theirs.keys()
    for path, variable in ours.items():
        assert type(variable) is type(theirs[path])
        np.testing.assert_array_equal(variable[...], theirs[path][...], strict=True)


@pytest.mark.parametrize("name", LAYERS)
def test_parameters_are_those_of_flax(rng, name):
    sizes, arguments, _ = LAYERS[name]
    rngs = seeded(rng)
    assert_same_state(
        LinearGeneral(*sizes, **arguments, rngs=rngs()), nnx.LinearGeneral(*sizes, **arguments, rngs=rngs())
    )


@pytest.mark.parametrize("arguments", [{}, {"use_bias": False}, {"param_dtype": jnp.bfloat16}])
def test_parameters_of_linear_are_those_of_flax(rng, arguments):
    rngs = seeded(rng)
    ours, theirs = Linear(32, 48, **arguments, rngs=rngs()), nnx.Linear(32, 48, **arguments, rngs=rngs())
    assert_same_state(ours, theirs)
    ours.kernel[...] = jnp.zeros_like(ours.kernel[...])
    nnx.update(ours, nnx.state(theirs))  # a checkpoint of the one is one of the other
    assert_same_state(ours, theirs)


def test_sizes_are_those_of_flax():
    ours, theirs = Linear(32, 48, rngs=nnx.Rngs(0)), nnx.Linear(32, 48, rngs=nnx.Rngs(0))
    general = [layer(32, (4, 12), rngs=nnx.Rngs(0)) for layer in (LinearGeneral, nnx.LinearGeneral)]
    for actual, expected in ((ours, theirs), general):
        assert (actual.in_features, actual.out_features) == (expected.in_features, expected.out_features)
    with pytest.raises(ValueError, match=r"out_features is \(4, 12\); Linear takes one number: use LinearGeneral"):
        Linear(32, (4, 12), rngs=nnx.Rngs(0))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("name", "dtype"), [*((name, jnp.float32) for name in LAYERS), ("from heads", jnp.bfloat16)])
def test_without_recipe_it_computes_what_flax_does(rng, name, dtype):
    sizes, arguments, shape = LAYERS[name]
    arguments, rngs = arguments | {"dtype": dtype}, seeded(rng)
    x = normal(rng, shape, dtype)
    theirs = nnx.LinearGeneral(*sizes, **arguments, rngs=rngs())
    cotangent = normal(rng, theirs(x).shape, dtype)

    def value_and_gradients(module):
        def loss(module, x):
            return jnp.sum((module(x) * cotangent).astype(jnp.float32)), module(x)

        (_, y), gradients = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True))(module, x)
        return y, nnx.to_pure_dict(gradients[0]), gradients[1]

    ours = LinearGeneral(*sizes, **arguments, rngs=rngs())
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-2  # gradients of float32 parameters went through bfloat16
    jax.tree.map(
        lambda a, e: assert_close(a, e, tolerance=tolerance), value_and_gradients(ours), value_and_gradients(theirs)
    )


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
    np.testing.assert_array_equal(nnx.jit(lambda module, x: module(x))(module, x), expected, strict=True)


OPTIONS = {"recipe": CurrentScaling(), "axis_name": "data", "implementation": "reference"}


@pytest.mark.parametrize(
    "make",
    [
        lambda rngs: LinearGeneral(16, 16, **OPTIONS, rngs=rngs),
        lambda rngs: nnx.Linear(16, 16, dot_general=DotGeneral(**OPTIONS), rngs=rngs),
    ],
    ids=["LinearGeneral", "DotGeneral"],
)
def test_options_reach_the_operation(rng, make, options_of_dense):
    make(nnx.Rngs(0))(normal(rng, (3, 16)))
    assert options_of_dense.items() >= OPTIONS.items()


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


@pytest.mark.parametrize("name", ["block", "delayed"])
def test_scan_and_remat_over_layers(rng, name):
    layers, recipe = 3, RECIPES[name]

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear = Linear(32, 32, recipe=recipe, activation="gelu", rngs=rngs)

        def __call__(self, x):
            return x + self.linear(x)

    stack = nnx.split_rngs(splits=layers)(nnx.vmap(Block))(seeded(rng)())
    assert stack.linear.kernel.shape == (layers, 32, 32)
    x = normal(rng, (16, 32))
    wrt = nnx.DiffState(0, nnx.Any(nnx.Param, OverwriteWithGradient))

    def loss(stack, x):
        forward = nnx.scan(nnx.remat(lambda x, block: block(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return jnp.sum(forward(x, stack) ** 2)

    def loss_one_by_one(stack, x):
        graphdef, state = nnx.split(stack)
        for layer in range(layers):
            x = nnx.merge(graphdef, jax.tree.map(lambda leaf, i=layer: leaf[i], state))(x)
        return jnp.sum(x**2)

    actual, expected = (nnx.jit(nnx.value_and_grad(f, argnums=(wrt, 1)))(stack, x) for f in (loss, loss_one_by_one))
    actual, expected = ((loss, nnx.to_pure_dict(g), dx) for loss, (g, dx) in (actual, expected))
    jax.tree.map(lambda a, e: assert_close(a, e, tolerance=2e-3), actual, expected)


@pytest.mark.parametrize("recipe", [None, *RECIPES.values()], ids=["none", *RECIPES])
def test_dot_general_of_flax_layers(rng, recipe):
    rngs, x = seeded(rng), normal(rng, (16, 32), jnp.bfloat16)
    # Flax rounds kernels to the dtype of the computation before the product; these are rounded already.
    dtypes = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    theirs = nnx.Linear(32, 48, **dtypes, dot_general=DotGeneral(recipe), rngs=rngs())
    general = nnx.LinearGeneral(32, 48, **dtypes, dot_general=DotGeneral(recipe), rngs=rngs())
    ours = Linear(32, 48, **dtypes, recipe=recipe, rngs=rngs())
    np.testing.assert_array_equal(theirs(x), ours(x), strict=True)
    np.testing.assert_array_equal(general(x), ours(x), strict=True)

    wrt = nnx.DiffState(0, nnx.Any(nnx.Param, OverwriteWithGradient))
    gradients = nnx.grad(lambda module: jnp.sum(module(x).astype(jnp.float32) ** 2), argnums=wrt)(theirs)
    assert jnp.linalg.norm(gradients["kernel"][...].astype(jnp.float32)) > 0
    if isinstance(recipe, DelayedScaling):
        history = gradients["dot_general"]["activation_amax_history"][...]
        np.testing.assert_allclose(history[0], np.abs(np.asarray(x, np.float32)).max())


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


def test_metadata_reaches_the_parameters(rng):
    module = Linear(
        32,
        48,
        kernel_metadata={"out_sharding": ("embed", "mlp"), "eager_sharding": False},
        bias_metadata={"out_sharding": ("mlp",), "eager_sharding": False},
        rngs=seeded(rng)(),
    )
    assert nnx.get_partition_spec(nnx.state(module))["kernel"].get_value() == P("embed", "mlp")
    assert module.bias.out_sharding == ("mlp",)
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
        (lambda rngs: LinearGeneral(16, 32, axis=2, rngs=rngs), r"axis is \(2,\); for an input with 2 dimensions"),
        (lambda rngs: LinearGeneral((16, 16), 32, axis=(1, -1), rngs=rngs), "must name different ones"),
        (lambda rngs: LinearGeneral(16, 32, axis=1.0, rngs=rngs), r"axis is \(1.0,\); .* by integers in \[-2, 1\]"),
        (lambda rngs: Linear(64, 0, rngs=rngs), "out_features is 0; it must be an integer of at least 1, or several"),
        (lambda rngs: Linear(64, None, rngs=rngs), "out_features is None; it must be"),
        (lambda rngs: LinearGeneral((16, -1), 32, rngs=rngs), r"in_features is \(16, -1\); it must be"),
        (lambda rngs: Linear(8, 32, rngs=rngs), r"the last ones of x .* must be the same"),
        (lambda rngs: Linear(16, 20, recipe=CurrentScaling(), rngs=rngs), "multiple of 16"),
        (lambda rngs: Linear(16, 32, activation="tanh", rngs=rngs), "activation is 'tanh'"),
        (lambda rngs: Linear(16, 32, recipe="fp8", rngs=rngs), "recipe is 'fp8'"),
        (lambda rngs: Linear(16, 32, dtype=jnp.int8, rngs=rngs), "dtype is int8; it must be float32"),
    ],
)
def test_bad_arguments_are_named(rng, make, message):
    with pytest.raises(ValueError, match=message):
        make(nnx.Rngs(0))(normal(rng, (3, 16)))


def test_batch_dimensions_are_refused(rng):
    with pytest.raises(ValueError, match="batch dimensions are not supported"):
        DotGeneral(None)(normal(rng, (2, 3, 16)), normal(rng, (2, 16, 16)), (((2,), (1,)), ((0,), (0,))))
