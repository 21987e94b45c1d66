"""Names of JAX's primitives, in all versions that te_jax supports."""

CALLS = ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr")
"""They run a jaxpr as it is. The last is jax 0.11's for closed_call."""

CHECKPOINTS = ("checkpoint", "remat", "remat2")
