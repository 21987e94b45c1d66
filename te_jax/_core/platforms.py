"""Branches by the platform that a program is lowered for, where `jax.lax.platform_dependent` would not do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir


def by_platform(
    arrays: Sequence[Array],
    *,
    cuda: Callable[..., Sequence[Array]],
    default: Callable[..., Sequence[Array]],
    refused: tuple[tuple[str, str], ...] = (),
) -> list[Array]:
    """The results of one of two functions, chosen when the program is lowered.

    `jax.lax.platform_dependent` leaves a conditional in the program, and lowers both functions for all platforms of a
    program that is exported for several.

    Args:
      arrays: positional arguments of both functions, which read no other traced value.
      cuda: runs on NVIDIA GPUs.
      default: runs elsewhere; its results have the same types.
      refused: ("cuda" or "default", message) where lowering raises ValueError with the message instead.

    Returns:
      The results; `vmap` applies, derivatives do not.
    """
    chosen = {"default": _traced(default, arrays)}
    chosen["cuda"] = chosen["default"] if cuda is default else _traced(cuda, arrays)
    return _by_platform_p.bind(*arrays, refused=refused, **chosen)


def _traced(function: Callable[..., Sequence[Array]], arrays: Sequence[Array]) -> ClosedJaxpr:
    return jax.make_jaxpr(function)(*arrays)


_by_platform_p = Primitive("te_by_platform")
_by_platform_p.multiple_results = True
_by_platform_p.def_abstract_eval(lambda *_, default, **__: tuple(default.out_avals))


def _batched(arrays: Sequence[Array], dims: Sequence[int | None], *, refused: Any, **chosen: ClosedJaxpr) -> Any:
    chosen = {
        platform: _traced(jax.vmap(jaxpr_as_fun(jaxpr), in_axes=tuple(dims)), arrays)
        for platform, jaxpr in chosen.items()
    }
    results = _by_platform_p.bind(*arrays, refused=refused, **chosen)
    return results, [0] * len(results)


def _lower(platform: str) -> Callable[..., Any]:
    def rule(ctx: mlir.LoweringRuleContext, *values: Any, refused: Any, **chosen: ClosedJaxpr) -> Any:
        if message := dict(refused).get(platform):
            raise ValueError(message)
        return mlir.lower_fun(jaxpr_as_fun(chosen[platform]), multiple_results=True)(ctx, *values)

    return rule


batching.primitive_batchers[_by_platform_p] = _batched
mlir.register_lowering(_by_platform_p, _lower("default"))
mlir.register_lowering(_by_platform_p, _lower("cuda"), platform="cuda")
