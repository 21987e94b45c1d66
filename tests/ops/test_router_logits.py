"""Logits of routers on GPUs: float32 by tensor cores of bfloat16. tests/layers/test_moe.py tests the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax.ops import router_logits
from te_jax.testing import assert_close


@pytest.mark.parametrize("tokens", [(40,), (2, 3, 8)])
def test_logits_of_bfloat16_have_the_precision_of_float32(rng, tokens, monkeypatch):
    """As on a GPU, by products in bfloat16; also of kernels and gradients whose values differ much in size."""
    dot = router_logits._dot  # XLA has none of bfloat16 with a float32 result on CPUs
    wide = lambda a, b, axes: dot(a.astype(jnp.float32), b.astype(jnp.float32), axes)  # noqa: E731
    monkeypatch.setattr(router_logits, "_dot", wide)
    x = jnp.asarray(rng.standard_normal((*tokens, 96)), jnp.bfloat16)
    kernel = jnp.asarray(rng.standard_normal((96, 8)) * 10.0 ** rng.integers(-3, 2, (96, 8)), jnp.float32)
    dlogits = jnp.asarray(rng.standard_normal((*tokens, 8)) * 10.0 ** rng.integers(-3, 2, 8), jnp.float32)
    logits = jax.jit(router_logits._product_in_parts)(x, kernel)
    dx, dkernel = jax.jit(router_logits._gradients_in_parts)(x, kernel, dlogits)
    wide, k, d = (np.asarray(each, np.float64) for each in (x, kernel, dlogits))
    assert_close(logits, wide @ k, dtype="float32", tolerance=1e-6)
    assert_close(dkernel, wide.reshape(-1, 96).T @ d.reshape(-1, 8), dtype="float32", tolerance=1e-6)
    np.testing.assert_allclose(np.asarray(dx, np.float64), d @ k.T, rtol=2**-8, atol=1e-4 * np.abs(d @ k.T).max())
