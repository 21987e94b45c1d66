"""te_jax.flax.Dense in models and on meshes with names of axes, and products for Flax's layers. Else: tests/modules."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax_apis import normal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from te_jax.flax import Dense, DenseGeneral, make_dot_general_cls
from te_jax.recipe import BlockScaling, CurrentScaling
from te_jax.testing import assert_close, relative_error


def test_names_inside_a_model_are_those_of_flax():
    class Model(nn.Module):
        dense: type
        general: type

        @nn.compact
        def __call__(self, x):
            return self.general((4, 8))(self.dense(32, False)(x))

    ours, theirs = (
        jax.eval_shape(Model(*layers).init, jax.random.key(0), jnp.ones((3, 16)))
        for layers in ((Dense, DenseGeneral), (nn.Dense, nn.DenseGeneral))
    )
    assert ours == theirs
    assert "bias" not in ours["params"]["Dense_0"]  # the second positional argument
    with pytest.raises(TypeError, match="positional"):
        DenseGeneral(32, -1, False)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("lhs_shape", "rhs_shape", "contracted"),
    [
        ((3, 32), (32, 16), ((1,), (0,))),
        ((3, 4, 8, 5), (4, 16, 8), ((2, 1), (2, 0))),
        ((4, 3, 8), (2, 4, 8, 8), ((0, 2), (1, -1))),
    ],
)
def test_dot_general_contracts_any_dimensions(rng, lhs_shape, rhs_shape, contracted):
    lhs, rhs = normal(rng, lhs_shape), normal(rng, rhs_shape)
    numbers = (contracted, ((), ()))
    (lhs_axes, rhs_axes), _ = numbers
    positive = (lhs_axes, tuple(axis % rhs.ndim for axis in rhs_axes))
    expected = np.tensordot(np.asarray(lhs, np.float64), np.asarray(rhs, np.float64), positive)

    exact, quantized = (make_dot_general_cls(recipe)() for recipe in (None, CurrentScaling()))

    @jax.jit
    def products(lhs, rhs):
        options = {"precision": None, "preferred_element_type": jnp.bfloat16, "mutable": []}
        return exact.apply({}, lhs, rhs, numbers), quantized.apply({}, lhs, rhs, numbers, **options)[0]

    in_float32, y = products(lhs, rhs)
    assert_close(in_float32, expected, dtype=jnp.float32)
    assert y.dtype == jnp.bfloat16
    assert relative_error(y, expected) < 0.08


def test_dot_general_cls_is_one_object_for_each_recipe():
    assert make_dot_general_cls(CurrentScaling()) is make_dot_general_cls(CurrentScaling())
    assert make_dot_general_cls(CurrentScaling()) is make_dot_general_cls(recipe=CurrentScaling(), state_axis=None)
    assert make_dot_general_cls(CurrentScaling()) is not make_dot_general_cls(BlockScaling())


def test_initializers_with_names_of_axes_under_an_explicit_mesh(rng, make_mesh):
    """Parameters lie where they belong: initializers, of which Flax takes the shapes alone, constrain nothing."""
    mesh = make_mesh({"data": AxisType.Explicit, "model": AxisType.Explicit})
    kernel_init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    x, kernel, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, 32), (32, 64), (64,)))
    specs = {"params": {"kernel": P(None, "model"), "bias": P("model")}}
    with jax.set_mesh(mesh):
        variables = jax.device_put({"params": {"kernel": kernel, "bias": bias}}, specs)
        for module in (nn.Dense, Dense):
            y = jax.jit(module(64, kernel_init=kernel_init).apply)(variables, x)
            assert y.sharding.spec == P(None, "model")
            assert_close(y, x @ kernel + bias, tolerance=1e-5)


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
