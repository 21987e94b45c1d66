"""Dtype promotion for tests in which optax computes: its own arithmetic is not written for the strict kind."""

import jax
import pytest


@pytest.fixture
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield
