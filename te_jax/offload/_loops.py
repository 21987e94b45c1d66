"""Loops and branches that residuals in host memory do not leave on a GPU."""

from __future__ import annotations

import inspect
from typing import TypeVar

import jax
from jax import Array

from te_jax._core.platforms import by_platform

_HOST = jax.memory.Space.Host

_Tree = TypeVar("_Tree")


def refuse_loops(residuals: _Tree, inside: bool = False) -> _Tree:
    """The residuals, of which those in host memory leave no loop and no branch of a GPU.

    XLA has no stack in host memory that a loop fills with arrays of host memory, and no zeros there for the branches
    that do not have these residuals.

    Args:
      residuals: a tree of arrays.
      inside: whether a loop around stacks them. Otherwise this looks for one.
    """

    def refused(leaf: Array) -> Array:
        if jax.typeof(leaf).memory_space != _HOST:
            return leaf
        same = lambda x: [x]  # noqa: E731
        return by_platform([leaf], cuda=same, default=same, refused=(("cuda", _IN_A_LOOP),))[0]

    return jax.tree.map(refused, residuals) if inside or _leave_a_loop() else residuals


def _leave_a_loop() -> bool:
    """Whether JAX differentiates a loop or a conditional around this call, and returns residuals from it.

    Only the functions that call this one know.
    """
    frame = inspect.currentframe()
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.endswith("ad_checkpoint.py"):  # recomputes them where the backward pass needs them
            return False
        if file.endswith(("loops.py", "conditionals.py")) and name in _DERIVATIVES:
            return True
        frame = frame.f_back
    return False


_DERIVATIVES = ("_scan_jvp", "_scan_linearize", "_cond_jvp", "_cond_linearize")

_IN_A_LOOP = (
    "the gradient of a loop or a conditional, such as lax.scan, scan_layers or lax.cond, whose body keeps residuals in "
    "host memory by an Offload: XLA for GPUs does not stack arrays of host memory. Take the gradient inside of the "
    "body, as accumulate_gradients of te_jax.layers does; or wrap the body of the loop, or each branch, in "
    "jax.checkpoint (remat=True of scan_layers), which runs it twice"
)
