"""Whether a function is being traced as a branch of `jax.lax.cond` or `jax.lax.switch`."""

from __future__ import annotations

from jax._src import core  # no public module has the stack of traces


def in_branch_differentiated_outside() -> bool:
    """Whether the code that runs now is traced as a branch, without a gradient that is taken in the branch.

    JAX makes the gradient of whatever a branch reads zero where the branch is not taken. A branch that holds a jitted
    function traced before, outside of it, is not seen.
    """
    for trace in reversed(core.unsafe_get_trace_stack(core.trace_ctx.trace)):
        if type(trace).__name__ in ("JVPTrace", "LinearizeTrace"):
            return False
        if getattr(getattr(trace, "frame", None), "debug_info", None) is None:
            continue
        if trace.frame.debug_info.traced_for in ("cond", "switch"):
            return True
    return False
