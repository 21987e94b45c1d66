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
from parameters import in_turns

from te_jax import ops
from te_jax.parallel import P2P, Ring
from te_jax.recipe import BlockScaling, CurrentScaling, RowwiseScaling

functions = pytest.mark.parametrize("name", FUNCTIONS)
GATHER, SCATTER = FUNCTIONS
CURRENT, ROWWISE, BLOCK = CurrentScaling(), RowwiseScaling(), BlockScaling()


def inside(function, *operands, size=2, varying=True):
    """Runs a function of local operands, which are the same on all devices only where JAX is to know that."""

    def local(*operands):
        if varying:
            operands = [jax.lax.pcast(operand, "tp", to="varying") for operand in operands]
        return jax.tree.leaves(function(*operands))[0][None]

    mapped = jax.shard_map(local, mesh=mesh_of({"tp": size}), in_specs=P(), out_specs=P("tp"))
    return jax.eval_shape(mapped, *operands)


def zeros(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def quantized(x, recipe=CURRENT, role="activation", **options):
    return ops.quantize(x, recipe.quantization(role), **options)


def of_kernel(w, **options):
    return quantized(w, role="kernel", **options)


# What either function says of a call f with x [4, 16] and kernel [16, 16] on each of two devices.
EITHER = {
    "transport is 'nccl'; it must be one of": lambda f, x, w: f(x, w, transport="nccl"),
    "out_dtype is int32; it must be float32, bfloat16 or float16": lambda f, x, w: f(x, w, out_dtype=jnp.int32),
    "out_dtype is 'foo'; it must be float32, bfloat16 or float16": lambda f, x, w: f(x, w, out_dtype="foo"),
    "axis_name is 3; it must be the name of a mesh axis": lambda f, x, w: f(x, w, axis_name=3),
    r"axis_name is \(\); it must be": lambda f, x, w: f(x, w, axis_name=()),
    r"axis_name is \('tp', 'tp'\); it must be .* a tuple of several, each once": lambda f, x, w: f(
        x, w, axis_name=("tp", "tp")
    ),
    "no axis 'dp' is mapped here; call it inside shard_map or pmap over a mesh with": lambda f, x, w: f(
        x, w, axis_name="dp"
    ),
    "x has dtype int32; it must be float32, bfloat16 or float16: cast it": lambda f, x, w: f(x.astype(jnp.int32), w),
    "kernel has dtype int8; it must be float32, bfloat16 or float16: cast it": lambda f, x, w: f(x, w.astype(jnp.int8)),
    r"kernel has shape \(8, 16\); it must be \[16, …\]": lambda f, x, w: f(x, w[:8]),
    r"kernel has shape \(16, 8\); it must be \[…, 16\]": lambda f, x, w: f(x, w[:, :8], kernel_contracting="last"),
    "kernel_contracting is 'rows'; it must be 'first' or 'last'": lambda f, x, w: f(x, w, kernel_contracting="rows"),
    r"kernel has shape \(16,\); it must be \[16, …\]": lambda f, x, w: f(x, w[0]),
    r"kernel has shape \(16, 0\); no dimension may be 0: leave out the call": lambda f, x, w: f(x, w[:, :0]),
    r"x has shape \(0, 16\); no dimension may be 0: leave out the call": lambda f, x, w: f(x[:0], w),
    r"x has shape \(16,\); it needs a dimension before the last": lambda f, x, w: f(x[0], w),
    "bias has dtype int32; it must be": lambda f, x, w: f(x, w, bias=jnp.zeros(16, jnp.int32)),
    r"bias has shape \(8,\); for a kernel of shape \(16, 16\) it must be \(16,\)": lambda f, x, w: f(
        x, w, bias=jnp.zeros(8)
    ),
    "bias is a tuple, but kernel is not": lambda f, x, w: f(x, w, bias=(None,)),
    "bias is of type dict; it must be an array": lambda f, x, w: f(x, w, bias={}),
    "recipe is 'fp8'; it must be a Recipe": lambda f, x, w: f(x, w, recipe="fp8"),
    "kernel has shape .*, 8 features out on this device; FP8 products need a multiple of 16": lambda f, x, w: f(
        x, w[:, :8], recipe=CURRENT
    ),
    "kernel has shape .*, 8 features in on this device; FP8 products need a multiple of 16": lambda f, x, w: f(
        x[:, :8], w[:8], recipe=ROWWISE
    ),
    "^x is None; it must be an array": lambda f, x, w: f(None, w),
    "^x is of type str; it must be an array": lambda f, x, w: f("x", w),
    "^kernel is None; it must be an array": lambda f, x, w: f(x, None),
    "^kernel is of type dict; it must be an array": lambda f, x, w: f(x, {"a": 1.0}),
    "recipe is None, but x is a QuantizedArray": lambda f, x, w: f(quantized(x), w),
    "recipe is None, but kernel is a QuantizedArray": lambda f, x, w: f(x, of_kernel(w)),
    "x has no data copy, which the forward pass reads": lambda f, x, w: f(
        quantized(x, copies="transposed"), w, recipe=CURRENT
    ),
    "kernel has no transposed copy, which the forward pass reads": lambda f, x, w: f(
        x, of_kernel(w, copies="data"), recipe=CURRENT
    ),
    "x has 'tensor' and 'tensor' scaling, but recipe is Rowwise": lambda f, x, w: f(
        quantized(x, amax_axis="tp"), w, recipe=ROWWISE
    ),
    "kernel has 'tensor' and 'tensor' scaling, but recipe is Block": lambda f, x, w: f(x, of_kernel(w), recipe=BLOCK),
    "x was quantized as 1 rows and 2 cols": lambda f, x, w: f(
        quantized(x[None], row_ndim=1, amax_axis="tp"), w, recipe=CURRENT
    ),
    r"kernel was quantized as 2 rows and 1 cols, .* with row_ndim=1": lambda f, x, w: f(
        x, of_kernel(w.reshape(16, 2, 8).repeat(2, -1), row_ndim=2), recipe=CURRENT
    ),
    "x was quantized to float8_e5m2, and activations of": lambda f, x, w: f(
        quantized(x, role="gradient", amax_axis="tp"), w, recipe=CURRENT
    ),
    # What scales and rounding make of parts is no part of what they make of the sum.
    r"x is unreduced over \['tp'\], a part of a sum on each device: sum it first": lambda f, x, w: f(
        jax.lax.pcast(x, "tp", to="unreduced"), w
    ),
    r"^x is unreduced over \['tp'\], a part of a sum on each device: sum it first": lambda f, x, w: f(
        jax.lax.pcast(x, "tp", to="unreduced"), w, recipe=CURRENT
    ),
}
OF_GATHER = {
    "residual is 'none'; it must be 'gathered' or 'shard'": lambda f, x, w: f(x, w, residual="none"),
    "kernel is an empty tuple": lambda f, x, w: f(x, ()),
    r"^kernel\[1\] is of type str; it must be an array": lambda f, x, w: f(x, (w, "w")),
    r"kernel\[1\] has shape \(8, 16\); it must be \[16, …\]": lambda f, x, w: f(x, (w, w[:8])),
    "kernel is a tuple of 2, so bias must be one too": lambda f, x, w: f(x, (w, w), bias=w[0]),
    "kernel is a tuple of 2, so bias must be one": lambda f, x, w: f(x, (w, w), bias=(w[0],)),
    "kernel is a tuple of 2, so bias must be": lambda f, x, w: f(x, (w, w), bias=(w[0], None, None)),
    r"bias\[1\] has shape \(8,\); for a kernel of shape": lambda f, x, w: f(x, (w, w), bias=(None, w[0, :8])),
    # Quantized without amax_axis.
    r"x has another scale on each device along \['tp'\].*quantize it with amax_a": lambda f, x, w: f(
        quantized(x), w, recipe=CURRENT
    ),
}
OF_SCATTER = {
    r"x has shape \(3, 16\); dimension 0, scatter_dimension, must be a multiple of the 2 devices": lambda f, x, w: f(
        x[:3], w
    ),
    "kernel is a tuple; matmul_reduce_scatter takes one": lambda f, x, w: f(x, (w, w)),
}
for table, argument in ((OF_GATHER, "gather_dimension"), (OF_SCATTER, "scatter_dimension")):
    rule = r"for x of shape \(4, 16\) it must be an integer that names a dimension before the last"
    for value in (2, -3, 0.5, -1, 1, True):
        table[f"{argument} is {value}; {rule}"] = lambda f, x, w, given={argument: value}: f(x, w, **given)


def rows(table, *names):
    return in_turns({message: (message, call) for message, call in table.items()}, names)


@pytest.mark.parametrize(
    ("row", "name"), [*rows(EITHER, GATHER, SCATTER), *rows(OF_GATHER, GATHER), *rows(OF_SCATTER, SCATTER)]
)
def test_what_is_refused(row, name):
    message, call = row
    function = lambda *operands, **options: FUNCTIONS[name](*operands, **{"axis_name": "tp", **options})  # noqa: E731
    with pytest.raises(ValueError, match=message):
        inside(functools.partial(call, function), zeros(4, 16), zeros(16, 16))


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


@functions
def test_outside_of_a_mesh(name):
    with pytest.raises(ValueError, match="no axis 'tp' is mapped here; call it inside shard_map"):
        FUNCTIONS[name](jnp.zeros((4, 16)), jnp.zeros((16, 16)), axis_name="tp")


@pytest.mark.parametrize(("name", "recipe"), [(GATHER, CURRENT), (SCATTER, None), (SCATTER, CURRENT)], ids=str)
def test_operands_that_are_the_same_on_all_devices(recipe, name):
    """A gather would repeat the rows of x, and a sum would have the same product once for each device."""

    def call(x, w, *, varying=(), quantize=False):
        x, w = (jax.lax.pcast(a, "tp", to="varying") if key in varying else a for key, a in (("x", x), ("w", w)))
        x = quantized(x, amax_axis="tp") if quantize else x
        return FUNCTIONS[name](x, w, axis_name="tp", recipe=recipe)

    def refuses(what, **options):
        rule = rf"^{what} is the same on all devices along \['tp'\].*pass {what} split over .* te_jax.ops.dense"
        with pytest.raises(ValueError, match=rule):
            inside(functools.partial(call, **options), zeros(4, 16), zeros(16, 16), varying=False)

    refuses("x")
    refuses("x", varying=("w",))
    if recipe is not None:
        refuses("x", quantize=True)
    if name == SCATTER:
        refuses("kernel", varying=("x",))
    else:
        inside(functools.partial(call, varying=("x",)), zeros(4, 16), zeros(16, 16), varying=False)


@functions
def test_one_of_several_axes_along_which_x_is_the_same(name):
    function = functools.partial(FUNCTIONS[name], axis_name=("a", "b"))
    mapped = jax.shard_map(
        function, mesh=mesh_of({"a": 2, "b": 2}), in_specs=(P("a"), P(("a", "b"))), out_specs=P("a", "b")
    )
    with pytest.raises(ValueError, match=r"^x is the same on all devices along \['b'\]"):
        jax.eval_shape(mapped, zeros(8, 16), zeros(64, 16))


@functions
def test_axes_that_shard_map_leaves_out(name):
    mesh = mesh_of({"dp": 2, "tp": 2}, AxisType.Explicit)
    function = functools.partial(FUNCTIONS[name], axis_name="tp")
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(P(), P()), out_specs=P("tp"), axis_names={"tp"})
    x, w = jnp.zeros((2, 4, 16)), jnp.zeros((16, 16))
    split = jax.NamedSharding(mesh, P("dp"))
    for operand, operands in (("x", (jax.device_put(x, split), w)), ("kernel", (x, jax.device_put(w, split)))):
        message = rf"^{operand} is split over \['dp'\], Explicit axes that shard_map left out"
        with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
            jax.jit(mapped)(*operands)


@functions
def test_rows_of_blocks(name):
    """Products take 4 rows at a time, and the weight gradient whole blocks of each shard."""
    rows, w = 1 if name == GATHER else 2, zeros(16, 16)
    function = functools.partial(FUNCTIONS[name], axis_name="tp", recipe=BLOCK)
    few = r"3 rows for each device along .*_dimension; block scaling needs a multiple of 4"
    with pytest.raises(ValueError, match=few):
        inside(function, zeros(3 * rows, 16), w)
    inside(lambda x, w: jax.vjp(lambda x: function(x, w), x)[0], zeros(64 * rows, 16), w)

    def of_w(x, w):
        return jax.vjp(lambda w: function(x, w), w)[0]

    rule = "64 rows for each device; the gradient of kernel with block scaling needs a multiple of 128"
    for x, size in ((zeros(64 * rows, 16), 2), (zeros(2, 64, 16), 1)):
        with pytest.raises(ValueError, match=rule):
            inside(of_w, x, w, size=size)
    inside(of_w, zeros(1, 64, 16), w, size=1)
