"""A QuantizedArray as a user meets it: in NumPy, in comparisons, printed, and its size."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax import ops, recipe
from te_jax.quantized import _of_children
from te_jax.testing import assert_close


@pytest.fixture
def quantized(rng):
    x = jax.device_put(np.asarray(rng.standard_normal((256, 384)), jnp.bfloat16))
    return ops.quantize(x, recipe.Quantization(jnp.float8_e4m3fn, "block_1x128", "block_128x128"))


@pytest.mark.parametrize("copies", ["both", "data", "transposed"])
def test_numpy_gets_the_values(copies, rng):
    x = jax.device_put(np.asarray(rng.standard_normal((48, 3, 32)), jnp.bfloat16))
    quantized = ops.quantize(x, recipe.CurrentScaling().quantization("activation"), row_ndim=2, copies=copies)
    values = np.asarray(quantized)
    assert values.dtype == x.dtype
    np.testing.assert_array_equal(values, np.asarray(quantized.dequantize()))
    assert_close(values, x, tolerance=0.045)
    assert np.asarray(quantized, np.float32).dtype == np.float32
    with pytest.raises(ValueError, match="cannot read it without a copy"):
        np.asarray(quantized, copy=False)
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.eval_shape(np.asarray, quantized)


def test_comparison_is_identity(quantized):
    same = jax.tree.map(lambda x: x, quantized)
    assert quantized == quantized
    assert quantized != same
    assert len({quantized, same, quantized}) == 2

    @jax.jit
    def identity(traced):
        assert traced == traced
        assert hash(traced) == hash(traced)
        return traced

    assert identity(quantized) != quantized


def test_repr_is_short(quantized):
    text = "QuantizedArray(shape=(256, 384), dtype=bfloat16, format=float8_e4m3fn, "
    assert repr(quantized) == f"{text}data: block_1x128, transposed: block_128x128)"
    assert repr(quantized.without_data()) == f"{text}transposed: block_128x128)"
    assert repr(quantized.without_transposed()) == f"{text}data: block_1x128)"
    traced = []
    jax.eval_shape(lambda q: traced.append(repr(q)), quantized)
    assert traced == [repr(quantized)]
    assert repr(jax.eval_shape(lambda q: q, quantized)) == repr(quantized)


def test_repr_shows_what_stands_in_the_place_of_the_arrays(quantized):
    """Trees of shardings, shapes or gradients are QuantizedArrays too."""
    shapes = jax.tree.map(jnp.shape, quantized.without_transposed())
    assert repr(shapes) == (
        "QuantizedArray(data=(256, 384), scale_inv=(3, 256), transposed=None, transposed_scale_inv=None)"
    )


def test_nbytes_are_those_of_all_arrays(quantized):
    data, transposed = 256 * 384 + 4 * 3 * 256, 256 * 384 + 4 * 3 * 2
    assert quantized.nbytes == data + transposed
    assert quantized.without_transposed().nbytes == data
    assert quantized.without_data().nbytes == transposed
    assert jax.eval_shape(lambda q: q, quantized).nbytes == quantized.nbytes


# ---------------------------------------------------------------------------------------------------- straight_through


@pytest.fixture
def with_gradient(rng):
    x = jax.device_put(np.asarray(rng.standard_normal((256, 384)), jnp.bfloat16))
    return ops.quantize(x, recipe.CurrentScaling().quantization("activation"), straight_through=True)


def test_straight_through_is_a_leaf_where_it_is_there(with_gradient):
    without = dataclasses.replace(with_gradient, straight_through=None)
    assert len(jax.tree.leaves(with_gradient)) == 5
    assert len(jax.tree.leaves(without)) == 4
    assert repr(with_gradient) == repr(without)[:-1] + ", straight_through)"
    assert with_gradient.nbytes == without.nbytes + 2 * with_gradient.size
    assert with_gradient.shape == with_gradient.straight_through.shape
    np.testing.assert_array_equal(np.asarray(with_gradient), np.asarray(without))
    shapes = jax.tree.map(jnp.shape, with_gradient.without_transposed())
    assert repr(shapes).endswith("transposed=None, transposed_scale_inv=None, straight_through=(256, 384))")


def test_copies_keep_straight_through(with_gradient):
    for kept in (with_gradient.without_data(), with_gradient.without_transposed(), with_gradient.named("name")):
        assert kept.straight_through is not None
        np.testing.assert_array_equal(kept.straight_through, 0.0)


@pytest.mark.parametrize("part", ["all", "without straight_through", "transposed"])
def test_export(part, with_gradient):
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
    q = with_gradient if part == "all" else dataclasses.replace(with_gradient, straight_through=None)
    q = q.without_data() if part == "transposed" else q
    exported = jax.export.export(jax.jit(lambda q: q))(q)
    after = jax.export.deserialize(exported.serialize()).call(q)
    assert jax.tree.structure(after) == jax.tree.structure(q)
    jax.tree.map(np.testing.assert_array_equal, after, q)


def test_programs_exported_before_it_are_read(quantized):
    """They have a child fewer."""
    children, meta = [quantized.data, quantized.scale_inv, None, None], _meta(quantized)
    assert repr(_of_children(meta, children)) == repr(quantized.without_transposed())
    assert repr(_of_children(meta, [*children, None])) == repr(quantized.without_transposed())


def _meta(q):
    return tuple(getattr(q, name) for name in ("row_ndim", "col_ndim", "scaling", "transposed_scaling", "dtype"))
