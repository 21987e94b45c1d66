"""Which implementation multiplies FP8 on the default backend's devices: native kernels, XLA's product or the reference.

The reference multiplies in float32. A CPU has nothing faster. On a GPU products in bfloat16 are faster, so that an
operation raises there rather than take the reference unasked.
"""

from __future__ import annotations

from te_jax import native
from te_jax.ops import _fa3_attention
from te_jax.quantized import OWN_KERNELS, SCALINGS, facts_of
from te_jax.recipe import Scaling

__all__ = ["attention_implementation", "fp8_implementation", "operands_implementation", "unsupported"]


def fp8_implementation(
    implementation: native.Implementation | None,
    scaling: Scaling,
    problem: str | None = None,
    *,
    by_xla: bool = True,
) -> native.Implementation:
    """The implementation of an FP8 product: without a name, native kernels before XLA's product.

    Args:
      implementation: of the operation; a named one never falls back.
      scaling: of lhs.
      problem: why the native kernels cannot multiply such operands, if so.
      by_xla: whether XLA has a product of this kind at all.

    Raises:
      ValueError: implementation has another name.
      NativeUnavailableError: it cannot run here, or, without a name, a GPU would multiply in float32.
    """
    native.validate_implementation(implementation)
    if implementation == "reference":
        return "reference"
    has_native = facts_of(scaling).native is not None
    if not has_native:
        problem = f"no native kernel multiplies FP8 with {scaling!r} scaling"
    capability = native.compute_capability()
    xla_problem = _xla_problem(scaling, capability) if by_xla else "XLA has no FP8 product of groups of rows"
    if implementation == "xla":
        if xla_problem:
            raise native.NativeUnavailableError(xla_problem)
        return "xla"
    if mixture := native.gpu_mixture():
        raise native.NativeUnavailableError(mixture)
    if implementation is None and capability is None:
        return "native" if has_native and native.use_native(None, problem, products=True) else "reference"
    try:
        native.use_native("native", problem, products=True)
    except native.NativeUnavailableError as error:
        if implementation == "native":
            raise
        if xla_problem:
            raise native.NativeUnavailableError(f"{error}. {xla_problem}") from None
        if capability == (9, 0):
            native.use_native(None, problem, products=True)  # warns: there are kernels for this GPU
        return "xla"
    return "native"


def operands_implementation(
    implementation: native.Implementation | None,
    scaling: Scaling | None,
    problem: str | None = None,
    *,
    by_xla: bool = True,
) -> native.Implementation:
    """`fp8_implementation` for operands that the user has quantized, or plain ones with scaling None."""
    if scaling is None:
        return "native" if native.use_native(implementation, problem, products=True) else "reference"
    try:
        return fp8_implementation(implementation, scaling, problem, by_xla=by_xla)
    except native.NativeUnavailableError as error:
        raise native.NativeUnavailableError(
            f"{error}; do not quantize, or use implementation='reference', which multiplies slowly, in float32"
        ) from None


def unsupported(scaling: Scaling | None, algorithm: str = "auto") -> str | None:
    """Why the native kernels cannot multiply FP8 with this scaling on the default backend's devices, if so."""
    capability = native.compute_capability()
    needed = facts_of(scaling).native
    if scaling is None or capability is None or needed is None:
        return None
    needed = OWN_KERNELS if algorithm == "te_jax" else needed
    exactly = needed == OWN_KERNELS
    if capability >= needed and (not exactly or capability[0] == needed[0]):
        return None
    have = f"this GPU has {capability[0]}.{capability[1]}"
    what, how = (f" with {scaling!r} scaling", "exactly") if exactly else ("", "or later")
    return f"FP8 products{what} need CUDA compute capability {needed[0]}.{needed[1]} {how}, and {have}"


def _xla_problem(scaling: Scaling, capability: tuple[int, int] | None) -> str | None:
    """Why XLA cannot multiply FP8 with this scaling, if so. On a CPU it converts operands to wider floats."""
    needed = facts_of(scaling).xla
    if needed is None:
        names = " or ".join(repr(name) for name in SCALINGS if facts_of(name).xla)
        return f"XLA multiplies FP8 with {names} scaling only, and this is {scaling!r}"
    if capability is not None and capability < needed:
        return f"XLA multiplies FP8 with {scaling!r} scaling on GPUs from compute capability {needed[0]}.{needed[1]} on"
    return None


def attention_implementation() -> str:
    """The libraries that attention takes, in order, or the reference."""
    if _fa3_attention.is_here():
        return "FlashAttention 3, cuDNN"
    return "reference" if native.compute_capability() is None else "cuDNN"
