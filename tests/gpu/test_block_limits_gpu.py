"""What kernels take the GPU for: TE_JAX_TEST_SMALL_GPU=1 runs the tests of this folder as on one with less."""

import os

import pytest

from te_jax import native

pytestmark = pytest.mark.gpu


def test_block_limits():
    limits = native.extension_module("gpu").block_limits()
    if os.environ.get("TE_JAX_TEST_SMALL_GPU") == "1":
        assert limits == (99 * 1024, False)
    elif native.compute_capability() == (9, 0):
        assert limits == (227 * 1024, True)
