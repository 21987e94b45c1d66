"""Copies of native offload that come late, through slots that hold NaN before."""

import contextlib

import jax

from te_jax import native


@contextlib.contextmanager
def late_copies():
    """Every copy begins up to 2 ms late, and slots hold NaN before."""
    disturb = native.extension_module("cuda" if jax.default_backend() == "gpu" else "cpu").disturb_offload
    disturb(2000)
    try:
        yield
    finally:
        disturb(0)
