"""What collective products refuse, and what they say."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collective_oracle import FUNCTIONS, mesh_of
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from te_jax import ops
from te_jax.parallel import P2P, Ring, all_gather_matmul, matmul_reduce_scatter
from te_jax.recipe import BlockScaling, CurrentScaling, RowwiseScaling

functions = pytest.mark.parametrize("name", FUNCTIONS)
GATHER, SCATTER = FUNCTIONS


def inside(function, *operands, size=2, varying=True):
    """Runs a function of local operands, which are the same on all devices only where JAX is to know that."""

    def local(*operands):
        if varying:
            operands = [jax.lax.pcast(operand, "tp", to="varying") for operand in operands]
        return jax.tree.leaves(function(*operands))[0][None]

    mapped = jax.shard_map(local, mesh=mesh_of({"tp": size}), in_specs=P(), out_specs=P("tp"))
    return jax.eval_shape(mapped, *operands)


def zeros(*shape, dtype=jnp.bfloat16):
    return jnp.zeros(shape, dtype)


def refuses(message, name, x=(4, 16), w=(16, 16), *, x_dtype=jnp.bfloat16, w_dtype=jnp.bfloat16, size=2, **options):
    function = functools.partial(FUNCTIONS[name], **{"axis_name": "tp", **options})
    with pytest.raises(ValueError, match=message):
        inside(function, zeros(*x, dtype=x_dtype), zeros(*w, dtype=w_dtype), size=size)


@pytest.fixture(autouse=True)
def _two_devices(require_devices):
    require_devices(2)


@functions
@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("transport is 'nccl'; it must be one of", {"transport": "nccl"}),
        ("out_dtype is int32; it must be float32, bfloat16 or float16", {"out_dtype": jnp.int32}),
        ("out_dtype is 'foo'; it must be float32, bfloat16 or float16", {"out_dtype": "foo"}),
        ("axis_name is 3; it must be the name of a mesh axis", {"axis_name": 3}),
        (r"axis_name is \(\); it must be", {"axis_name": ()}),
        (r"axis_name is \('tp', 'tp'\); it must be .* a tuple of several, each once", {"axis_name": ("tp", "tp")}),
        ("no axis 'dp' is mapped here; call it inside shard_map or pmap over a mesh with", {"axis_name": "dp"}),
        ("x has dtype int32; it must be float32, bfloat16 or float16: cast it", {"x_dtype": jnp.int32}),
        ("kernel has dtype int8; it must be float32, bfloat16 or float16: cast it", {"w_dtype": jnp.int8}),
        (r"kernel has shape \(8, 16\); it must be \[16, …\]", {"w": (8, 16)}),
        (r"kernel has shape \(16, 8\); it must be \[…, 16\]", {"w": (16, 8), "kernel_contracting": "last"}),
        ("kernel_contracting is 'rows'; it must be 'first' or 'last'", {"kernel_contracting": "rows"}),
        (r"kernel has shape \(16,\); it must be \[16, …\]", {"w": (16,)}),
        (r"kernel has shape \(16, 0\); no dimension may be 0: leave out the call", {"w": (16, 0)}),
        (r"x has shape \(0, 16\); no dimension may be 0: leave out the call", {"x": (0, 16)}),
        (r"x has shape \(16,\); it needs a dimension before the last", {"x": (16,)}),
        ("bias has dtype int32; it must be", {"bias": jnp.zeros((16,), jnp.int32)}),
        (r"bias has shape \(8,\); for a kernel of shape \(16, 16\) it must be \(16,\)", {"bias": jnp.zeros((8,))}),
        ("bias is a tuple, but kernel is not", {"bias": (None,)}),
        ("bias is of type dict; it must be an array", {"bias": {}}),
        ("recipe is 'fp8'; it must be a Recipe", {"recipe": "fp8"}),
        ("kernel has shape .*, 8 features out on this device; FP8 products need a multiple of 16", {
            "w": (16, 8), "recipe": CurrentScaling(),
        }),
        ("kernel has shape .*, 8 features in on this device; FP8 products need a multiple of 16", {
            "x": (4, 8), "w": (8, 16), "recipe": RowwiseScaling(),
        }),
    ],
)  # fmt: skip
def test_arguments(message, options, name):
    refuses(message, name, **options)


@functions
@pytest.mark.parametrize(("value", "kind"), [(None, "None"), ({"a": 1.0}, "of type dict"), ("x", "of type str")])
def test_what_is_no_array(value, kind, name):
    call = functools.partial(FUNCTIONS[name], axis_name="tp")
    x, w = zeros(4, 16), zeros(16, 16)
    rule = f"is {kind}; it must be an array"
    with pytest.raises(ValueError, match=f"^x {rule}"):
        inside(lambda w: call(value, w), w)
    with pytest.raises(ValueError, match=f"^kernel {rule}"):
        inside(lambda x: call(x, value), x)
    if name == GATHER:
        with pytest.raises(ValueError, match=rf"^kernel\[1\] {rule}"):
            inside(lambda x, w: call(x, (w, value)), x, w)


@functions
def test_numbers_and_flags_of_numpy(name):
    axis = {"gather_dimension" if name == GATHER else "scatter_dimension": np.int64(0)}
    call = functools.partial(FUNCTIONS[name], axis_name="tp", accumulate=np.True_, **axis)
    inside(call, zeros(4, 16), zeros(16, 16))


def test_transports():
    assert P2P(np.float32(3)).timeout == 3
    assert Ring(np.True_).bidirectional
    with pytest.raises(ValueError, match="bidirectional is 'no'; it must be True or False"):
        Ring(bidirectional="no")
    for value in (0, -1.0, float("nan"), float("inf"), "60", True, np.float32(np.inf)):
        rule = "; it must be a positive, finite number of seconds, such as 60.0"
        with pytest.raises(ValueError, match=re.escape(f"timeout is {value!r}{rule}")):
            P2P(timeout=value)
    with pytest.raises(ValueError, match="protocol is 'push'; it must be 'get', 'put' or None"):
        P2P(protocol="push")


@pytest.mark.parametrize(("name", "axis"), [(GATHER, "gather_dimension"), (SCATTER, "scatter_dimension")])
def test_axes(name, axis):
    rule = r"for x of shape \(4, 16\) it must be an integer that names a dimension before the last"
    for value in (2, -3, 0.5, -1, 1, True):
        refuses(f"{axis} is {value}; {rule}", name, **{axis: value})


def test_arguments_of_a_gather():
    refuses("residual is 'none'; it must be 'gathered' or 'shard'", GATHER, residual="none")
    x, w = zeros(4, 16), zeros(16, 16)
    gather = functools.partial(all_gather_matmul, axis_name="tp")
    with pytest.raises(ValueError, match="kernel is an empty tuple"):
        inside(lambda x: gather(x, ()), x)
    with pytest.raises(ValueError, match=r"kernel\[1\] has shape \(8, 16\); it must be \[16, …\]"):
        inside(lambda x, w: gather(x, (w, w[:8])), x, w)
    for bias_of in (lambda w: w[0], lambda w: (w[0],), lambda w: (w[0], None, None)):
        with pytest.raises(ValueError, match="kernel is a tuple of 2, so bias must be one too"):
            inside(lambda x, w, bias_of=bias_of: gather(x, (w, w), bias=bias_of(w)), x, w)
    with pytest.raises(ValueError, match=r"bias\[1\] has shape \(8,\); for a kernel of shape"):
        inside(lambda x, w: gather(x, (w, w), bias=(None, w[0, :8])), x, w)


def test_arguments_of_a_scatter():
    rule = r"x has shape \(3, 16\); dimension 0, scatter_dimension, must be a multiple of the 2 devices"
    refuses(rule, SCATTER, x=(3, 16))
    with pytest.raises(ValueError, match="kernel is a tuple; matmul_reduce_scatter takes one"):
        inside(lambda x, w: matmul_reduce_scatter(x, (w, w), axis_name="tp"), zeros(4, 16), zeros(16, 16))


@functions
def test_outside_of_a_mesh(name):
    with pytest.raises(ValueError, match="no axis 'tp' is mapped here; call it inside shard_map"):
        FUNCTIONS[name](zeros(4, 16), zeros(16, 16), axis_name="tp")


@functions
@pytest.mark.parametrize("recipe", [None, CurrentScaling()], ids=["plain", "fp8"])
def test_parts_of_a_sum(recipe, name):
    """What scales and rounding make of parts is no part of what they make of the sum."""

    def product(x, w):
        x = jax.lax.pcast(x, "tp", to="unreduced")
        return FUNCTIONS[name](x, w, axis_name="tp", recipe=recipe)

    with pytest.raises(ValueError, match=r"x is unreduced over \['tp'\], a part of a sum on each device: sum it first"):
        inside(product, zeros(4, 16), zeros(16, 16))


@functions
@pytest.mark.parametrize("recipe", [None, CurrentScaling()], ids=["plain", "fp8"])
def test_operands_that_are_the_same_on_all_devices(recipe, name):
    """A gather would repeat the rows of x, and a sum would have the same product once for each device."""

    def call(x, w, *, varying=(), quantized=False):
        x, w = (jax.lax.pcast(a, "tp", to="varying") if key in varying else a for key, a in (("x", x), ("w", w)))
        if quantized:
            x = ops.quantize(x, recipe.quantization("activation"), amax_axis="tp")
        return FUNCTIONS[name](x, w, axis_name="tp", recipe=recipe)

    def refuses(what, **options):
        rule = rf"^{what} is the same on all devices along \['tp'\].*pass {what} split over .* te_jax.ops.dense"
        with pytest.raises(ValueError, match=rule):
            inside(functools.partial(call, **options), zeros(4, 16), zeros(16, 16), varying=False)

    refuses("x")
    refuses("x", varying=("w",))
    if recipe is not None:
        refuses("x", quantized=True)
    if name == SCATTER:
        refuses("kernel", varying=("x",))
    else:
        inside(functools.partial(call, varying=("x",)), zeros(4, 16), zeros(16, 16), varying=False)


@functions
def test_one_of_several_axes_along_which_x_is_the_same(name, require_devices):
    require_devices(4)
    function = functools.partial(FUNCTIONS[name], axis_name=("a", "b"))
    mapped = jax.shard_map(
        function, mesh=mesh_of({"a": 2, "b": 2}), in_specs=(P("a"), P(("a", "b"))), out_specs=P("a", "b")
    )
    with pytest.raises(ValueError, match=r"^x is the same on all devices along \['b'\]"):
        jax.eval_shape(mapped, zeros(8, 16), zeros(64, 16))


@functions
def test_axes_that_shard_map_leaves_out(name, require_devices):
    require_devices(4)
    mesh = mesh_of({"dp": 2, "tp": 2}, AxisType.Explicit)
    function = functools.partial(FUNCTIONS[name], axis_name="tp")
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(P(), P()), out_specs=P("tp"), axis_names={"tp"})
    x, w = zeros(2, 4, 16), zeros(16, 16)
    split = jax.NamedSharding(mesh, P("dp"))
    for operand, operands in (("x", (jax.device_put(x, split), w)), ("kernel", (x, jax.device_put(w, split)))):
        message = rf"^{operand} is split over \['dp'\], Explicit axes that shard_map left out"
        with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
            jax.jit(mapped)(*operands)


@functions
def test_rows_of_blocks(name):
    """Products take 4 rows at a time, and the weight gradient whole blocks of each shard."""
    rows = 1 if name == GATHER else 2
    function = functools.partial(FUNCTIONS[name], axis_name="tp", recipe=BlockScaling())
    with pytest.raises(
        ValueError, match=r"3 rows for each device along .*_dimension; block scaling needs a multiple of 4"
    ):
        inside(function, zeros(3 * rows, 16), zeros(16, 16))
    x, w = zeros(64 * rows, 16), zeros(16, 16)
    inside(function, x, w)
    inside(lambda x, w: jax.vjp(lambda x: function(x, w), x)[0], x, w)

    def of_w(x, w):
        return jax.vjp(lambda w: function(x, w), w)[0]

    rule = "64 rows for each device; the gradient of kernel with block scaling needs a multiple of 128"
    with pytest.raises(ValueError, match=rule):
        inside(of_w, x, w)
    with pytest.raises(ValueError, match=rule):
        inside(of_w, zeros(2, 64, 16), w, size=1)
    inside(of_w, zeros(1, 64, 16), w, size=1)


# --------------------------------------------------------------------------------------------------- quantized operands


def quantized(x, recipe, role, **options):
    return ops.quantize(x, recipe.quantization(role), **options)


@functions
@pytest.mark.parametrize(
    ("message", "recipe", "of_x", "of_w"),
    [
        ("recipe is None, but x is a QuantizedArray", None, {}, None),
        ("recipe is None, but kernel is a QuantizedArray", None, None, {}),
        ("x has no data copy, which the forward pass reads", CurrentScaling(), {"copies": "transposed"}, None),
        ("kernel has no transposed copy, which the forward pass reads", CurrentScaling(), None, {"copies": "data"}),
        ("x has 'tensor' and 'tensor' scaling, but recipe is Rowwise", RowwiseScaling(), {"amax_axis": "tp"}, None),
        ("kernel has 'tensor' and 'tensor' scaling, but recipe is Block", BlockScaling(), None, {}),
        ("x was quantized as 1 rows and 2 cols", CurrentScaling(), {"row_ndim": 1, "amax_axis": "tp"}, None),
    ],
)
def test_quantized_operands(message, recipe, of_x, of_w, name):
    def call(x, w):
        x = x if of_x is None else quantized(x, CurrentScaling(), "activation", **of_x)
        w = w if of_w is None else quantized(w, CurrentScaling(), "kernel", **of_w)
        return FUNCTIONS[name](x, w, axis_name="tp", recipe=recipe)

    with pytest.raises(ValueError, match=message):
        inside(call, zeros(2, 8, 16), zeros(16, 16))


@functions
def test_rows_and_cols_of_quantized_weights(name):
    def call(x, w):
        w = quantized(w, CurrentScaling(), "kernel", row_ndim=2)
        return FUNCTIONS[name](x, w, axis_name="tp", recipe=CurrentScaling())

    with pytest.raises(ValueError, match=r"kernel was quantized as 2 rows and 1 cols, .* with row_ndim=1"):
        inside(call, zeros(4, 16), zeros(16, 2, 16))


@functions
def test_formats_of_quantized_operands(name):
    def call(x, w):
        x = quantized(x, CurrentScaling(), "gradient", amax_axis="tp")
        return FUNCTIONS[name](x, w, axis_name="tp", recipe=CurrentScaling())

    with pytest.raises(ValueError, match="x was quantized to float8_e5m2, and activations of"):
        inside(call, zeros(4, 16), zeros(16, 16))


def test_scales_that_differ():
    """Quantized without amax_axis, each device has a scale of its own."""

    def call(x, w):
        return all_gather_matmul(
            quantized(x, CurrentScaling(), "activation"), w, axis_name="tp", recipe=CurrentScaling()
        )

    with pytest.raises(ValueError, match=r"x has another scale on each device along \['tp'\].*quantize it with amax_a"):
        inside(call, zeros(4, 16), zeros(16, 16))
