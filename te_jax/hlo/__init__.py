"""Collectives and arrays of a compiled program."""

from te_jax.hlo.buffers import Buffer, buffers
from te_jax.hlo.collectives import KINDS, Collective, assert_no_resharding, collectives, parse, table

__all__ = ["KINDS", "Buffer", "Collective", "assert_no_resharding", "buffers", "collectives", "parse", "table"]
