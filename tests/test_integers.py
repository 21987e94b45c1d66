"""Integers of every dtype against those of Python: no cast wraps."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax import ops, sharding
from te_jax._core.integers import as_int32, in_one_dtype
from te_jax.layers import attention, embed

DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
NUMBERS = sorted({sign * 2**power + more for power in range(65) for sign in (1, -1) for more in (-2, -1, 0, 1)})


def all_of(dtype):
    """The numbers above that the dtype holds."""
    limits = np.iinfo(dtype)
    return [number for number in NUMBERS if limits.min <= number <= limits.max]


def test_as_int32():
    with jax.enable_x64(True):
        for dtype in DTYPES:
            expected = np.clip(np.array(all_of(dtype), object), -(2**31), 2**31 - 1).astype(np.int32)
            found = as_int32(jnp.asarray(all_of(dtype), dtype))
            assert found.dtype == jnp.int32
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("x64", [False, True], ids=["32 bits", "64 bits"])
def test_in_one_dtype(x64):
    dtypes = [name for name in DTYPES if x64 or "64" not in name]
    pairs = list(itertools.product(dtypes, repeat=2))

    @jax.jit
    def all_pairs(arrays):
        return [in_one_dtype(arrays[first], arrays[second]) for first, second in pairs]

    with jax.enable_x64(x64):
        found = all_pairs({dtype: np.array(all_of(dtype), dtype) for dtype in dtypes})
    for (a, b), pair in zip(found, pairs, strict=True):
        assert a.dtype == b.dtype
        numbers = [np.array(all_of(dtype), object) for dtype in pair]
        np.testing.assert_array_equal(
            np.asarray(a)[:, None] == np.asarray(b)[None], numbers[0][:, None] == numbers[1][None], err_msg=str(pair)
        )


def test_int32_costs_nothing():
    ids = jnp.zeros(4, jnp.int32)
    assert not jax.make_jaxpr(lambda ids: (as_int32(ids), in_one_dtype(ids, ids)))(ids).eqns


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int32"])
def test_rows_of_a_table(dtype):
    """More rows than the dtype counts; negative indices count from the end, others out of bounds are NaN."""
    indices = [0, 5, np.iinfo(dtype).max, -1 if np.iinfo(dtype).min else 1]
    table = jnp.arange(300.0)[:, None]
    found = sharding.take_rows(table, jnp.asarray(np.array(indices, dtype)))[:, 0]
    np.testing.assert_array_equal(found, [i % 300 if i < 300 else np.nan for i in indices])


def test_what_jax_would_wrap():
    """Arrays of NumPy have 64 bits, and JAX makes 32 of them."""
    x, large = jnp.ones((1, 2, 1, 8)), np.array([2**32])
    message = r"^{} has dtype int64 and contains 4294967296, and without jax_enable_x64 .* enable x64$"
    calls = {
        "key_lengths": lambda: ops.attention(x, x, x, key_lengths=large),
        "experts": lambda: ops.expert_counts(large[None], 2),
        "inputs": lambda: embed.rows(x[0, :, 0], large, None),
        "positions": lambda: attention._as_positions(large.repeat(2), x),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=re.compile(message.format(name), re.DOTALL)):
            call()
    np.testing.assert_array_equal(ops.expert_counts(np.array([[1], [-1]]), 2), [0, 1])
