"""A donated training step holds little but its arguments, which its results take the place of."""

import functools

import jax
import pytest

from te_jax import optim
from te_jax.hlo import buffers

ROWS, COLS = 512, 1024


def compiled_step(optimizer, dtype):
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, g):
        updates, state = optimizer.update(g, state, params)
        return optim.apply_updates(params, updates), state

    params = {name: jax.ShapeDtypeStruct((ROWS, COLS), dtype) for name in ("a", "b")}
    return step.lower(params, jax.eval_shape(optimizer.init, params), params).compile()


def test_float32_states_need_no_temporary():
    memory = compiled_step(optim.adamw(0.1), "float32").memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * 3 * 4 * ROWS * COLS
    assert memory.temp_size_in_bytes < 0.05 * 4 * ROWS * COLS


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="is about loops with one result, as XLA makes them on CPUs")
def test_16_bit_states_are_never_wide_in_memory():
    """The update reads moments before they are rounded, in a loop of its own: a copy of them, but none in float32."""
    compiled = compiled_step(optim.adamw(0.1, mu_dtype="bfloat16", nu_dtype="bfloat16"), "float32")
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * (4 + 2 + 2) * ROWS * COLS
    assert memory.temp_size_in_bytes < 1.05 * 2 * (2 + 2) * ROWS * COLS
    copied = [b for b in buffers(compiled, "copy") if b.elements >= ROWS * COLS]
    assert {b.dtype for b in copied} == {"bf16"}
