"""Calling a target: result types, aliases, attributes, and what handlers refuse."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax import native, sharding
from te_jax.hlo import buffers
from te_jax.testing import assert_close

pytestmark = pytest.mark.usefixtures("native_kernels")

STATISTICS = "te_softmax_cross_entropy_statistics"
GRADIENT = "te_softmax_cross_entropy_gradient"


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def bf16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def statistics(logits, labels, results=None, **attributes):
    attributes = {"softcap": 0.0, "padding": 0, "with_total": True, **attributes}
    rows = f32(*labels.shape)
    return native.call_in_order(STATISTICS, results or (rows, rows, rows), logits, labels, **attributes)


def gradient(logits, labels, lse, weight, results=None, **options):
    attributes = {"softcap": 0.0, "padding": 0, "label_smoothing": 0.0, "uniform": 0.0, "z_loss": 0.0, **options}
    return native.call_in_order(GRADIENT, results or (logits,), logits, labels, lse, weight, **attributes)[0]


def random(rng, *shape, dtype=jnp.float32):
    values = np.asarray(rng.standard_normal(shape), jnp.dtype(dtype))
    return jnp.array(values)  # a copy: XLA does not write over what NumPy holds


LABELS = jnp.asarray([1, -1, 3], jnp.int32)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_results_come_in_order(wrap, rng):
    logits = random(rng, 3, 5)
    lse, target, total = wrap(statistics)(logits, LABELS)
    x = np.asarray(logits, np.float64)
    counted = np.array([1.0, 0.0, 1.0])  # the row of label -1 is not read
    assert_close(lse, counted * np.log(np.exp(x).sum(axis=1)), dtype="float32")
    assert_close(target, counted * x[np.arange(3), LABELS], dtype="float32")
    assert_close(total, counted * x.sum(axis=1), dtype="float32")


def test_float_attributes_of_python_and_numpy(rng):
    logits = random(rng, 3, 5)
    expected = jnp.log(jnp.sum(jnp.exp(2 * jnp.tanh(logits / 2)), axis=1))[0]
    for softcap in (2.0, np.float32(2.0)):
        assert_close(statistics(logits, LABELS, softcap=softcap)[0][0], expected)


def test_vmap_calls_once_for_each(rng):
    logits = random(rng, 4, 3, 5)
    batched = jax.vmap(statistics, in_axes=(0, None))(logits, LABELS)
    for i in range(4):
        for whole, one in zip(batched, statistics(logits[i], LABELS), strict=True):
            np.testing.assert_array_equal(whole[i], one)


# -------------------------------------------------------------------------------------------------------------- aliases


def test_aliased_result_takes_over_a_donated_operand(rng):
    logits, row = random(rng, 64, 128), jnp.zeros(64)
    labels = jnp.zeros(64, jnp.int32)
    expected = gradient(logits, labels, row, row + 1)
    aliased = jax.jit(lambda *a: gradient(*a, aliases={0: 0}), donate_argnums=0)
    compiled = aliased.lower(logits, labels, row, row + 1).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == logits.nbytes
    assert buffers(compiled, "copy") == []
    pointer = logits.unsafe_buffer_pointer()
    result = compiled(logits, labels, row, row + 1)
    assert logits.is_deleted()
    assert result.unsafe_buffer_pointer() == pointer
    assert_close(result, expected)


def test_aliased_operand_that_is_not_donated_is_copied(rng):
    logits, row = random(rng, 64, 128), jnp.zeros(64)
    labels, before = jnp.zeros(64, jnp.int32), np.array(logits)
    result = jax.jit(lambda *a: gradient(*a, aliases={0: 0}))(logits, labels, row, row + 1)
    np.testing.assert_array_equal(logits, before)
    assert_close(result, gradient(logits, labels, row, row + 1))


# ------------------------------------------------------------------------------------------------- what handlers refuse


LOGITS = jnp.zeros((3, 5))
ROW = jnp.zeros(3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: statistics(LOGITS, LABELS.astype(jnp.uint32)), "labels is U32[3]; it must be of type S32"),
        (lambda: statistics(LOGITS, LABELS.astype(jnp.float32)), "labels is F32[3]; it must be of type S32"),
        (lambda: statistics(LOGITS, LABELS[:2]), "labels is S32[2]; it must have 3 elements"),
        (lambda: statistics(LOGITS.astype(jnp.int32), LABELS), "logits is S32[3,5]; it must be float32 or bfloat16"),
        (lambda: statistics(jnp.zeros((3, 0)), LABELS), "logits is F32[3,0]; it must have a vocabulary"),
        (lambda: statistics(jnp.float32(0), LABELS), "logits is F32[]; it must have a vocabulary"),
        (lambda: statistics(LOGITS, LABELS, (f32(3), f32(4), f32(3))), "target is F32[4]; it must have 3 elements"),
        (lambda: statistics(LOGITS, LABELS, (f32(3), f32(3), bf16(3))), "total is BF16[3]; it must be of type F32"),
        (lambda: gradient(LOGITS, LABELS, ROW.astype(jnp.bfloat16), ROW), "lse is BF16[3]; it must be of type F32"),
        (lambda: gradient(LOGITS, LABELS, ROW, ROW[:1]), "weight is F32[1]; it must have 3 elements"),
        (lambda: gradient(LOGITS, LABELS, ROW, ROW, (bf16(3, 5),)), "gradient is BF16[3,5]; it must be of type F32"),
        (lambda: gradient(LOGITS, LABELS, ROW, ROW, (f32(3, 4),)), "gradient is F32[3,4]; it must have 15 elements"),
    ],
    ids=lambda value: value.split(";")[0] if isinstance(value, str) else "",
)
def test_refusal_names_operation_operand_dtype_and_dimensions(call, message):
    operation = GRADIENT if message.split()[0] in ("lse", "weight", "gradient") else STATISTICS
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(f"INVALID_ARGUMENT: {operation}: {message}")):
        jax.block_until_ready(call())


def test_refusal_of_missing_attributes():
    rows = f32(3)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"softcap|attributes"):
        jax.block_until_ready(native.call_in_order(STATISTICS, (rows, rows, rows), LOGITS, LABELS, with_total=True))


def test_process_survives_refusals():
    for _ in range(3):
        with pytest.raises(jax.errors.JaxRuntimeError):
            jax.block_until_ready(statistics(LOGITS, LABELS[:2]))
    np.testing.assert_allclose(statistics(LOGITS, LABELS)[0][0], np.log(5.0), rtol=1e-6)


# --------------------------------------------------------------------------------------------------------- result types


def test_result_type_outside_of_shard_map():
    weak = jnp.full(4, 1.0)
    assert weak.weak_type
    type_ = sharding.result_type((2, 3), jnp.bfloat16, weak, jnp.zeros((), jnp.int32))
    assert (type_.shape, type_.dtype, type_.weak_type) == ((2, 3), jnp.bfloat16, False)


def test_result_type_keeps_all_varying_axes(make_mesh):
    mesh = make_mesh({"x": AxisType.Auto, "y": AxisType.Auto})
    seen = []

    def local(a, b, c):
        for operands in ((a,), (c, a), (a, b), (c, b, a), (c,)):
            seen.append(set(sharding.result_type((7,), jnp.int32, *operands).manual_axis_type.varying))
        return a

    jax.shard_map(local, mesh=mesh, in_specs=(P("x"), P("y"), P()), out_specs=P("x"))(*(jnp.zeros(8),) * 3)
    assert seen[:5] == [{"x"}, {"x"}, {"x", "y"}, {"x", "y"}, set()]


def test_results_vary_over_what_any_operand_varies_over(make_mesh, rng):
    """out_specs that leave out an axis are refused, as they are for JAX's own operations."""
    mesh = make_mesh({"x": AxisType.Auto, "y": AxisType.Auto})
    columns = mesh.shape["y"]
    logits = random(rng, mesh.shape["x"], 6)
    labels = jax.device_put(np.asarray(rng.integers(0, 6, (mesh.shape["x"], columns)), jnp.int32))

    def mapped(out_specs):
        def local(logits, labels):
            return statistics(logits, labels[:, 0])[1][:, None]

        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P("x"), P("x", "y")), out_specs=out_specs))

    target = mapped(P("x", "y"))(logits, labels)
    np.testing.assert_array_equal(target, np.take_along_axis(np.asarray(logits), np.asarray(labels), axis=1))
    with pytest.raises(ValueError, match="out_specs"):
        mapped(P("x"))(logits, labels)


def test_call_on_a_manual_shard_with_explicit_types(make_mesh, rng):
    mesh = make_mesh({"x": AxisType.Explicit})
    logits = jax.device_put(random(rng, 4 * mesh.size, 6), NamedSharding(mesh, P("x")))
    labels = jax.device_put(jnp.zeros(4 * mesh.size, jnp.int32), NamedSharding(mesh, P("x")))
    with jax.set_mesh(mesh):
        target = jax.jit(jax.shard_map(lambda *a: statistics(*a)[1], in_specs=P("x"), out_specs=P("x")))(logits, labels)
    np.testing.assert_array_equal(target, logits[:, 0])
