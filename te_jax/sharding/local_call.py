"""A primitive around calls of local functions, for the two things that custom_partitioning and ffi_call cannot do.

It has a vmap rule: one more leading dimension. And it knows, while it is lowered, where its operands come from, which
decides whether a result may take over an operand's buffer. XLA can be told only that it must; where the operand is an
argument that the caller keeps, it then copies it first.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jaxlib.mlir import ir

# For jit around an operation: a function of its own would hide from _is_borrowed where its arguments come from.
INLINE: Any = getattr(jax, "Inline").JAX_EARLY if hasattr(jax, "Inline") else True  # noqa: B009, jax < 0.11

Reuse = tuple[tuple[int, int], ...]

_local_call_p = Primitive("te_local_call")
_local_call_p.multiple_results = True


def bind_local_call(
    body: Callable[..., tuple[Array, ...]],
    reuse: Reuse,
    again: Callable[..., tuple[Array, ...]],
    operands: Sequence[Array],
) -> tuple[Array, ...]:
    """Calls body(*operands), or body(*operands, reuse={operand: result}) where any reuse is possible.

    Args:
      body: what to run; its results have the operands' leading dimensions.
      reuse: (operand index, result index) pairs that may share a buffer.
      again: this same call for other operands: under vmap they all have one more leading dimension, and outside jit it
        is what is compiled. Equal calls must bring the same object.
      operands: arrays.
    """
    fresh = functools.partial(body, reuse={}) if reuse else body
    variants = (jax.make_jaxpr(fresh)(*operands),)
    if reuse:
        variants += (jax.make_jaxpr(functools.partial(body, reuse=dict(reuse)))(*operands),)
    return tuple(_local_call_p.bind(*operands, variants=variants, reuse=reuse, again=again))


@_local_call_p.def_impl
def _(*operands, again, **_):
    # Without jit, and to find a NaN in what is compiled, JAX would call this function again.
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        results = _compiled(again)(*operands)
    for wanted, is_invalid, kind in (
        (getattr(jax.config, "jax_debug_nans", False), jnp.isnan, "nan"),
        (getattr(jax.config, "jax_debug_infs", False), jnp.isinf, "inf"),
    ):
        if wanted and any(is_invalid(x).any() for x in results if jnp.issubdtype(x.dtype, jnp.floating)):
            raise FloatingPointError(f"invalid value ({kind}) encountered in a native kernel")
    return results


@functools.cache
def _compiled(again: Callable[..., tuple[Array, ...]]) -> Callable[..., tuple[Array, ...]]:
    return jax.jit(again)


@_local_call_p.def_abstract_eval
def _(*_, variants: tuple[ClosedJaxpr, ...], **__):
    return variants[0].out_avals


def batched_first(operands: Sequence[Array], dims: Sequence[int | None]) -> list[Array]:
    """Operands of a vmap, all with the examples as their first dimension."""
    (size,) = {x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None}
    return [
        jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(operands, dims, strict=True)
    ]


def _batch(operands, dims, *, again, **_):
    results = again(*batched_first(operands, dims))
    return results, (0,) * len(results)


def _jvp(*_, variants: tuple[ClosedJaxpr, ...], **__):
    kernels = " and ".join(dict.fromkeys(re.findall(r"\btarget_name=(\w+)", str(variants[0])))) or "this call"
    raise NotImplementedError(
        f"native kernels have no derivatives of their own, here {kernels}: layers and losses define first ones in "
        "reverse mode; for others use implementation='reference' (FP8 layers: recipe=None)"
    )


def _lower(ctx: mlir.LoweringRuleContext, *values: ir.Value, variants, reuse: Reuse, **_):
    free = bool(reuse) and not any(_is_borrowed(values[operand]) for operand, _ in reuse)
    # JAX prints this attribute of the call where it refuses to export it.
    exporting = ctx.module_context.lowering_parameters.for_export
    hint = {"to_export": "pass disabled_checks=te_jax.native.export_checks()"} if exporting else {}
    with set_xla_metadata(**hint):
        return mlir.lower_fun(jaxpr_as_fun(variants[free]), multiple_results=True)(ctx, *values)


def _is_borrowed(value: ir.Value) -> bool:
    """Whether the value is an argument of the whole program that its caller keeps.

    Arguments of loop bodies, of called functions and of the body of a shard_map, which JAX lowers as a function, count
    as free: XLA finds out, and copies where it must.
    """
    if not isinstance(value, ir.BlockArgument):
        return False
    attributes = value.owner.owner.attributes
    if "sym_visibility" not in attributes or ir.StringAttr(attributes["sym_visibility"]).value != "public":
        return False
    marks = ir.DictAttr(ir.ArrayAttr(attributes["arg_attrs"])[value.arg_number])
    return not any(donated in marks for donated in ("tf.aliasing_output", "jax.buffer_donor"))


batching.primitive_batchers[_local_call_p] = _batch
ad.primitive_jvps[_local_call_p] = _jvp
# Not cacheable: a cached rule is lowered into a function of its own, where every operand is an argument.
mlir.register_lowering(_local_call_p, _lower, cacheable=False)
