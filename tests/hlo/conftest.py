"""Programs of these tests say where their operations come from."""

import jax
import pytest

_LIMIT = jax.config.jax_traceback_in_locations_limit


@pytest.fixture(autouse=True)
def _locations():
    jax.config.update("jax_traceback_in_locations_limit", 10)  # JAX's own
    yield
    jax.config.update("jax_traceback_in_locations_limit", _LIMIT)
