"""A call that fails while a pass of native offload is under way: no copy ends after it, when XLA gives memory away."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from late_copies import late_copies

from te_jax import native

LAYERS, ROW = 4, 512


def of_its_pass(token, slots):
    """An end without a pass."""
    return native.call_in_order("te_offload_end_store", [token], token, token, slots[:1], aliases={0: 0})


def of_another_operation(token, slots):
    """An operand of a dtype that the kernel does not have."""
    return native.call_in_order(
        "te_amax_tensor", [jax.ShapeDtypeStruct((1,), jnp.float32)], token, row_ndim=1, batch_ndim=0
    )


def of_its_operands(token, slots):
    """A call that XLA refuses before the handler sees its operands."""
    return native.call_in_order("te_gemm", [token], token)


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads the stack of a CPU")
@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        (of_its_pass, "te_offload_end_store: no pass was begun with these slots"),
        (of_another_operation, "te_amax_tensor: x is S32"),
        (of_its_operands, "Wrong number of arguments"),
    ],
)
def test_copies_have_ended_when_a_call_has_failed(fail, reason, rng):
    @jax.jit
    def run(x, stack):
        token = jnp.zeros(1, jnp.int32)
        rows = {"slots": LAYERS, "kept": 1, "stack": 0}
        results = {name: jax.ShapeDtypeStruct((count, ROW), jnp.uint8) for name, count in rows.items()}
        token, slots, kept, _ = native.call_once(
            "te_offload_begin_store", {"token_out": token, **results}, {"token": token}, stacked=LAYERS, sizes=(ROW,)
        )
        for layer in range(LAYERS):
            operands = {"x": x[layer], "token": token, "stack": stack, "slots": slots, "kept": kept}
            (token,) = native.call_once("te_offload_store", {"token_out": token}, operands, piece=0)
        return fail(token, slots)

    x = jax.device_put(rng.integers(0, 256, (LAYERS, ROW), np.uint8))
    stack = jax.device_put(np.zeros((LAYERS, ROW), np.uint8))
    with late_copies(100_000), pytest.raises(jax.errors.JaxRuntimeError, match=reason):
        jax.block_until_ready(run(x, stack))
    np.testing.assert_array_equal(np.array(stack), x)
