"""te_jax.flax.DenseGeneral against Flax's own, and against the operation that it calls."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from parameters import in_turns

from te_jax import ops
from te_jax.flax import Dense, DenseGeneral, make_dot_general_cls
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from te_jax.testing import assert_close, relative_error

RECIPES = {
    "current": CurrentScaling(),
    "rowwise": RowwiseScaling(),
    "block": BlockScaling(),
    "delayed": DelayedScaling(history_len=4),
}
OVERWRITE = "_overwrite_with_gradient"

# Arguments of both modules, and the shape of an input.
LAYERS = {
    "matrix": ({"features": 48}, (3, 5, 32)),
    "no bias": ({"features": 48, "use_bias": False}, (3, 32)),
    "heads": ({"features": (4, 8)}, (3, 5, 32)),
    "from heads": ({"features": 32, "axis": (-2, -1)}, (3, 5, 4, 8)),
    "axes apart, out of order": ({"features": (2, 16), "axis": (-1, 0)}, (4, 3, 8)),
    "bfloat16 parameters": ({"features": 48, "param_dtype": jnp.bfloat16, "dtype": jnp.bfloat16}, (3, 32)),
    "other initializers": (
        {"features": 48, "kernel_init": nn.initializers.orthogonal(), "bias_init": nn.initializers.normal()},
        (3, 32),
    ),
}


def normal(rng, shape, dtype=jnp.float32):
    return jax.device_put(np.asarray(rng.standard_normal(shape), jnp.dtype(dtype)))


@pytest.mark.parametrize("name", LAYERS)
def test_parameters_are_those_of_flax(rng, name):
    arguments, shape = LAYERS[name]
    x, key = normal(rng, shape, arguments.get("dtype", jnp.float32)), jax.random.key(int(rng.integers(2**31)))
    ours, theirs = DenseGeneral(**arguments).init(key, x), nn.DenseGeneral(**arguments).init(key, x)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), ours, theirs)


def test_names_inside_a_model_are_those_of_flax(rng):
    class Model(nn.Module):
        dense: type
        general: type

        @nn.compact
        def __call__(self, x):
            return self.general((4, 8))(self.dense(32)(x))

    x, key = normal(rng, (3, 16)), jax.random.key(0)
    ours, theirs = Model(Dense, DenseGeneral).init(key, x), Model(nn.Dense, nn.DenseGeneral).init(key, x)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_positional_arguments_are_those_of_flax(rng):
    x, key = normal(rng, (3, 32, 32)), jax.random.key(0)
    assert "bias" not in Dense(32, False).init(key, x)["params"]
    np.testing.assert_array_equal(*(layer(32, False).init_with_output(key, x)[0] for layer in (Dense, nn.Dense)))
    with pytest.raises(TypeError, match="positional"):
        DenseGeneral(32, -1, False)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, jnp.float32) for name in LAYERS), ("matrix", jnp.bfloat16), ("heads", jnp.bfloat16)]
)
def test_without_recipe_it_computes_what_flax_does(rng, name, dtype):
    arguments, shape = LAYERS[name]
    arguments = arguments | {"dtype": dtype}
    x = normal(rng, shape, dtype)
    theirs = nn.DenseGeneral(**arguments)
    variables = jax.jit(theirs.init)(jax.random.key(int(rng.integers(2**31))), x)
    cotangent = normal(rng, jax.eval_shape(theirs.apply, variables, x).shape, dtype)

    def value_and_gradients(module):
        y, pullback = jax.vjp(jax.jit(module.apply), variables, x)
        return y, pullback(cotangent)

    actual, expected = value_and_gradients(DenseGeneral(**arguments)), value_and_gradients(theirs)
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-2  # gradients of float32 parameters went through bfloat16
    jax.tree.map(lambda a, e: assert_close(a, e, tolerance=tolerance), actual, expected)


@pytest.mark.parametrize("name", ["heads", "axes apart, out of order"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_it_is_the_operation(rng, name, recipe):
    arguments, shape = LAYERS[name]
    module = DenseGeneral(**arguments, recipe=recipe, activation="silu", dtype=jnp.bfloat16)
    x = normal(rng, shape, jnp.bfloat16)
    variables = jax.jit(module.init)(jax.random.key(int(rng.integers(2**31))), x)
    variables["params"]["bias"] = normal(rng, variables["params"]["bias"].shape)

    axes = sorted(axis % x.ndim for axis in np.atleast_1d(arguments.get("axis", -1)))
    moved = jnp.moveaxis(x, axes, range(x.ndim - len(axes), x.ndim))
    expected = ops.dense(
        moved,
        variables["params"]["kernel"],
        variables["params"]["bias"],
        recipe=recipe,
        contracting_ndim=len(axes),
        activation="silu",
        scaling_state=recipe.init() if isinstance(recipe, DelayedScaling) else None,
    )
    np.testing.assert_array_equal(module.apply(variables, x), expected, strict=True)


OPTIONS = {"recipe": CurrentScaling(), "axis_name": "data", "implementation": "reference"}


@pytest.mark.parametrize(
    "module",
    [DenseGeneral(16, **OPTIONS), nn.Dense(16, dot_general_cls=make_dot_general_cls(**OPTIONS))],
    ids=["DenseGeneral", "dot_general_cls"],
)
def test_options_reach_the_operation(rng, module, options_of_dense):
    module.init_with_output(jax.random.key(0), normal(rng, (3, 16)))
    assert options_of_dense.items() >= OPTIONS.items()


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_value_and_gradients_in_fp8(rng, recipe):
    module = DenseGeneral((4, 32), axis=(1, 2), recipe=recipe)
    x, cotangent = normal(rng, (64, 4, 48)), normal(rng, (64, 4, 32))
    variables = jax.jit(module.init)(jax.random.key(int(rng.integers(2**31))), x)

    @jax.jit
    def value_and_gradients(variables, x):
        y, pullback = jax.vjp(module.apply, variables, x)
        return y, *pullback(cotangent)

    if OVERWRITE in variables:  # the first step finds the scales
        variables |= {OVERWRITE: value_and_gradients(variables, x)[1][OVERWRITE]}
    y, gradients, dx = value_and_gradients(variables, x)

    kernel = np.asarray(variables["params"]["kernel"], np.float64)
    x64, g64 = np.asarray(x, np.float64), np.asarray(cotangent, np.float64)
    assert relative_error(y, np.einsum("bij,ijkl->bkl", x64, kernel)) < 0.055
    assert relative_error(dx, np.einsum("bkl,ijkl->bij", g64, kernel)) < 0.085
    assert relative_error(gradients["params"]["kernel"], np.einsum("bij,bkl->ijkl", x64, g64)) < 0.085
    assert_close(gradients["params"]["bias"], g64.sum(0), dtype=jnp.float32)


@pytest.mark.parametrize("recipe", [RECIPES["rowwise"], RECIPES["delayed"]], ids=["rowwise", "delayed"])
def test_scan_and_remat_over_layers(rng, recipe):
    """Stacked layers give what the same layers give one by one."""
    layers = 3

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + Dense(32, recipe=recipe, activation="gelu")(x), None

    stack = nn.scan(
        nn.remat(Block),
        variable_axes={"params": 0, OVERWRITE: 0},
        split_rngs={"params": True},
        length=layers,
    )()
    x = normal(rng, (16, 32))
    variables = stack.init(jax.random.key(int(rng.integers(2**31))), x, None)

    def loss(variables, x):
        return jnp.sum(stack.apply(variables, x, None)[0] ** 2)

    def loss_one_by_one(variables, x):
        for layer in range(layers):
            x, _ = Block().apply(jax.tree.map(lambda leaf, i=layer: leaf[i], variables), x, None)
        return jnp.sum(x**2)

    actual, expected = (jax.jit(jax.value_and_grad(f))(variables, x) for f in (loss, loss_one_by_one))
    jax.tree.map(lambda a, e: assert_close(a, e, tolerance=2e-3), actual, expected)
    assert variables["params"]["Dense_0"]["kernel"].shape == (layers, 32, 32)


@pytest.mark.parametrize(
    ("recipe", "module"), in_turns({"none": None, **RECIPES}, {"Dense": nn.Dense, "DenseGeneral": nn.DenseGeneral})
)
def test_dot_general_cls_of_flax_layers(rng, module, recipe):
    x = normal(rng, (16, 32), jnp.bfloat16)
    # Flax rounds kernels to the dtype of the computation before the product; these are rounded already.
    dtypes = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    theirs = module(48, **dtypes, dot_general_cls=make_dot_general_cls(recipe))
    ours = Dense(48, **dtypes, recipe=recipe)
    variables = jax.jit(theirs.init)(jax.random.key(int(rng.integers(2**31))), x)
    expected = ours.apply(ours.init(jax.random.key(0), x) | {"params": variables["params"]}, x)
    np.testing.assert_array_equal(theirs.apply(variables, x), expected, strict=True)
    gradients = jax.grad(lambda variables: jnp.sum(theirs.apply(variables, x).astype(jnp.float32) ** 2))(variables)
    assert jnp.linalg.norm(gradients["params"]["kernel"].astype(jnp.float32)) > 0
    if isinstance(recipe, DelayedScaling):
        (state,) = gradients[OVERWRITE].values()
        np.testing.assert_allclose(state["activation_amax_history"][0], np.abs(np.asarray(x, np.float32)).max())


@pytest.mark.parametrize(
    ("lhs_shape", "rhs_shape", "contracted"),
    [
        ((3, 32), (32, 16), ((1,), (0,))),
        ((32, 3), (16, 32), ((0,), (1,))),
        ((3, 4, 8, 5), (4, 16, 8), ((2, 1), (2, 0))),
        ((3, 4, 8), (16, 4, 8), ((1, 2), (1, 2))),
        ((4, 3, 8), (2, 4, 8, 8), ((0, 2), (1, -1))),
    ],
)
def test_dot_general_contracts_any_dimensions(rng, lhs_shape, rhs_shape, contracted):
    lhs, rhs = normal(rng, lhs_shape), normal(rng, rhs_shape)
    numbers = (contracted, ((), ()))
    (lhs_axes, rhs_axes), _ = numbers
    positive = (lhs_axes, tuple(axis % rhs.ndim for axis in rhs_axes))
    expected = np.tensordot(np.asarray(lhs, np.float64), np.asarray(rhs, np.float64), positive)

    exact = make_dot_general_cls(None)()
    assert_close(exact.apply({}, lhs, rhs, numbers), expected, dtype=jnp.float32)
    quantized = make_dot_general_cls(CurrentScaling())()
    y = quantized.apply({}, lhs, rhs, numbers, precision=None, preferred_element_type=jnp.bfloat16, mutable=[])[0]
    assert y.dtype == jnp.bfloat16
    assert relative_error(y, expected) < 0.08


def test_dot_general_cls_is_one_object_for_each_recipe():
    assert make_dot_general_cls(CurrentScaling()) is make_dot_general_cls(CurrentScaling())
    assert make_dot_general_cls(CurrentScaling()) is make_dot_general_cls(recipe=CurrentScaling(), axis_name=None)
    assert make_dot_general_cls(CurrentScaling()) is not make_dot_general_cls(BlockScaling())


RULES = (("embed", None), ("mlp", "model"), ("heads", "model"), ("kv", None))


def test_logical_axes_name_the_dimensions(rng):
    module = DenseGeneral((4, 8), kernel_axes=("embed", "heads", "kv"), bias_axes=("heads", "kv"))
    params = jax.jit(module.init)(jax.random.key(0), normal(rng, (3, 32)))["params"]
    assert isinstance(params["kernel"], meta.AxisMetadata)
    assert nn.get_partition_spec(params) == {"kernel": P("embed", "heads", "kv"), "bias": P("heads", "kv")}
    plain = DenseGeneral((4, 8)).init(jax.random.key(0), normal(rng, (3, 32)))["params"]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), nn.unbox(params), plain)


@pytest.mark.parametrize(
    ("recipe", "axis_type"), in_turns({"none": None, **RECIPES}, (AxisType.Auto, AxisType.Explicit))
)
def test_sharded_by_logical_axes(request, rng, make_mesh, axis_type, recipe):
    if axis_type == AxisType.Explicit and recipe is not None:
        request.getfixturevalue("native_kernels")  # the reference of FP8 products is written for other meshes
    mesh = make_mesh({"data": axis_type, "model": axis_type})
    module = Dense(512, kernel_axes=("embed", "mlp"), bias_axes=("mlp",), recipe=recipe)
    x = normal(rng, (512 if isinstance(recipe, BlockScaling) else 64, 256))  # whole blocks of tokens on each device
    boxed = jax.jit(module.init)(jax.random.key(int(rng.integers(2**31))), x)
    variables = nn.unbox(boxed)

    def loss(variables, x):
        y = module.apply(variables, x)
        return jnp.mean(jnp.square(y)), y

    value_and_gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    expected = value_and_gradients(variables, x)
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, RULES)
    assert shardings["params"]["kernel"].spec == P(None, "model")
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        sharded = jax.device_put(variables, shardings)
        actual = value_and_gradients(sharded, jax.device_put(x, NamedSharding(mesh, P("data", None))))
    (_, y), (gradients, dx) = actual
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)
    assert gradients["params"]["kernel"].sharding.is_equivalent_to(shardings["params"]["kernel"], 2)
    assert dx.sharding.is_equivalent_to(NamedSharding(mesh, P("data", None)), 2)
    jax.tree.map(lambda a, e: assert_close(a, e, tolerance=1e-5 if recipe is None else 5e-3), actual, expected)


def test_boxed_parameters_under_a_mesh(rng, make_mesh):
    """Parameters still in their boxes, as `init` under jit with out_shardings gives them."""
    mesh = make_mesh({"data": AxisType.Auto, "model": AxisType.Auto})
    module = Dense(512, kernel_axes=("embed", "mlp"), bias_axes=("mlp",), recipe=CurrentScaling())
    x, key = normal(rng, (64, 256)), jax.random.key(int(rng.integers(2**31)))
    expected = module.apply(module.init(key, x), x)
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        names = nn.get_partition_spec(jax.eval_shape(module.init, key, x))
        init = jax.jit(module.init, out_shardings=nn.logical_to_mesh_sharding(names, mesh, RULES))
        y = jax.jit(module.apply)(init(key, x), x)
    assert_close(y, expected, tolerance=5e-3)


def test_initializers_with_names_of_axes_under_an_explicit_mesh(rng, make_mesh):
    """Parameters lie where they belong: initializers, of which Flax takes the shapes alone, constrain nothing."""
    mesh = make_mesh({"data": AxisType.Explicit, "model": AxisType.Explicit})
    kernel_init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    x, key = normal(rng, (64, 32)), jax.random.key(int(rng.integers(2**31)))
    variables = nn.unbox(Dense(64, kernel_init=kernel_init).init(key, x))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(variables, {"params": {"kernel": P(None, "model"), "bias": P("model")}})
        for module in (nn.Dense, Dense):
            y = module(64, kernel_init=kernel_init).apply(sharded, x)
            assert_close(y, Dense(64).apply(variables, x), tolerance=1e-5)


def test_initializers_with_names_of_several_axes_under_a_mesh(rng, make_mesh):
    mesh = make_mesh({"data": AxisType.Auto, "model": AxisType.Auto})
    kernel_init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model", None))
    module = DenseGeneral((4, 16), kernel_init=kernel_init)
    x, key = normal(rng, (64, 32)), jax.random.key(int(rng.integers(2**31)))
    expected = module.apply(module.init(key, x), x)
    with jax.set_mesh(mesh):
        assert_close(jax.jit(module.apply)(jax.jit(module.init)(key, x), x), expected, tolerance=1e-5)


BAD = {
    "axis": (lambda: Dense(16, axis=2), (3, 16), "axis is .2,.; for an input with 2 dimensions"),
    "axis twice": (lambda: DenseGeneral(16, axis=(1, -1)), (3, 16), "must name different ones"),
    "names": (lambda: Dense(16, kernel_axes=("embed",)), (3, 16), r"kernel_axes is \('embed',\); for shape \(16, 16\)"),
    "bias names": (lambda: Dense(16, bias_axes=("a", "b")), (3, 16), "bias_axes is"),
    "no axis": (
        lambda: DenseGeneral(16, axis=()),
        (3, 16),
        r"axis is \(\); .* must name different ones of them, at least",
    ),
    "axis of float": (lambda: DenseGeneral(16, axis=1.0), (3, 16), r"axis is \(1.0,\); .* by integers in \[-2, 1\]"),
    "axis of bool": (lambda: DenseGeneral(16, axis=True), (3, 16), r"axis is \(True,\)"),
    "no features": (lambda: Dense(0), (3, 16), "features is 0; it must be an integer of at least 1, or several"),
    "negative features": (lambda: Dense(-1), (3, 16), "features is -1; it must be"),
    "features of float": (lambda: Dense(1.5), (3, 16), "features is 1.5; it must be"),
    "features of bool": (lambda: Dense(True), (3, 16), "features is True; it must be"),
    "None for features": (lambda: Dense(None), (3, 16), "features is None; it must be"),
    "one of the features": (lambda: DenseGeneral((16, 0)), (3, 16), r"features is \(16, 0\); it must be"),
    "features": (lambda: Dense(20, recipe=CurrentScaling()), (3, 16), "multiple of 16"),
    "activation": (lambda: Dense(16, activation="tanh"), (3, 16), "activation is 'tanh'"),
    "recipe": (lambda: Dense(16, recipe="fp8"), (3, 16), "recipe is 'fp8'"),
    "dtype": (lambda: Dense(16, dtype=jnp.int8), (3, 16), "dtype is int8; it must be float32"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(rng, name):
    make, shape, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        make().init(jax.random.key(0), normal(rng, shape))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((((2,), (1,)), ((0,), (0,))), "batch dimensions are not supported"),
        ((((1,), (0,)), ((), ())), "contracts dimensions of different sizes"),
        ((((3,), (0,)), ((), ())), "must name different ones"),
        ((((), ()), ((), ())), "must name different ones of them, at least one"),
        ((((1.0,), (0,)), ((), ())), "by integers in"),
        (None, r"dimension_numbers is None; it must be \(\(dimensions of lhs, dimensions of rhs\), "),
        (((2,), (1,)), "it must be .*as jax.lax.dot_general has it"),
        (((2, 1), ((), ())), "it must be .*as jax.lax.dot_general has it"),
    ],
)
def test_bad_dimension_numbers_are_named(rng, numbers, message):
    with pytest.raises(ValueError, match=message):
        make_dot_general_cls(None)().apply({}, normal(rng, (2, 3, 16)), normal(rng, (2, 16, 16)), numbers)


@pytest.mark.parametrize("widest", ["x", "kernel", "bias"])
def test_without_a_dtype_it_is_that_of_the_widest(widest, rng):
    shapes = {"x": (16, 32), "kernel": (32, 48), "bias": (48,)}
    dtypes = {name: jnp.float32 if name == widest else jnp.bfloat16 for name in shapes}
    x, kernel, bias = (normal(rng, shape, dtypes[name]) for name, shape in shapes.items())
    variables = {"params": {"kernel": kernel, "bias": bias}}
    for recipe in (None, CurrentScaling()):
        with jax.numpy_dtype_promotion("standard"):
            ours, theirs = (layer.apply(variables, x) for layer in (Dense(48, recipe=recipe), nn.Dense(48)))
        assert ours.dtype == theirs.dtype == jnp.float32


@pytest.mark.parametrize("dtype", [float, jnp.float64], ids=["float", "float64"])
def test_names_of_float32_without_64_bits(rng, dtype):
    x, kernel, numbers = normal(rng, (3, 16)), normal(rng, (16, 16)), (((1,), (0,)), ((), ()))
    y = make_dot_general_cls(CurrentScaling())().apply({}, x, kernel, numbers, preferred_element_type=dtype)
    assert y.dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float8_e4m3fn, "bf"])
def test_a_result_of_another_kind_is_refused(rng, dtype):
    x, kernel = normal(rng, (3, 16)), normal(rng, (16, 16))
    with pytest.raises(ValueError, match=r"preferred_element_type is .*; it must be float32, bfloat16 or float16"):
        make_dot_general_cls(CurrentScaling())().apply(
            {}, x, kernel, (((1,), (0,)), ((), ())), preferred_element_type=dtype
        )
