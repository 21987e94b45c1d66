"""Loops whose residuals XLA would stack in host memory."""

from __future__ import annotations

import inspect
from typing import TypeVar

import jax
from jax import Array

from te_jax._core.platforms import by_platform

_HOST = jax.memory.Space.Host

_Tree = TypeVar("_Tree")


def refuse_loops(residuals: _Tree, inside: bool = False) -> _Tree:
    """The residuals, of which those in host memory leave no loop of a GPU: XLA has no stack of them that a loop fills.

    Args:
      residuals: a tree of arrays.
      inside: whether a loop around stacks them. Otherwise this looks for one.
    """

    def refused(leaf: Array) -> Array:
        if jax.typeof(leaf).memory_space != _HOST:
            return leaf
        same = lambda x: [x]  # noqa: E731
        return by_platform([leaf], cuda=same, default=same, refused=(("cuda", _IN_A_LOOP),))[0]

    return jax.tree.map(refused, residuals) if inside or _leaves_a_loop() else residuals


def _leaves_a_loop() -> bool:
    """Whether JAX differentiates a loop around this call, and the loop keeps residuals of all iterations.

    Only the functions that call this one know.
    """
    frame = inspect.currentframe()
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.endswith("ad_checkpoint.py"):  # recomputes them in the iteration that needs them
            return False
        if file.endswith("loops.py") and name in ("_scan_jvp", "_scan_linearize"):
            return True
        frame = frame.f_back
    return False


_IN_A_LOOP = (
    "the gradient of a loop, lax.scan or scan_layers, whose body keeps residuals in host memory by an Offload: XLA "
    "does not stack arrays of host memory for a GPU. Take the gradient inside of the loop, as accumulate_gradients of "
    "te_jax.layers does; or wrap the body in jax.checkpoint (remat=True of scan_layers), which runs it twice"
)
