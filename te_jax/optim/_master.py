"""Parameters in few bits, and the exact ones that steps are added to."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from te_jax._core.types import PyTree

_BFLOAT16, _INT16 = np.dtype(jnp.bfloat16), np.dtype(np.int16)


class MasterWeightsState(NamedTuple):
    """State of `master_weights`."""

    master: PyTree  # of the parameters' structure and shapes, master_dtype; optax.MaskedNode for float32 parameters
    inner: PyTree  # state of the wrapped transform


def master_weights(
    inner: optax.GradientTransformation, dtype: jax.typing.DTypeLike = jnp.float32
) -> optax.GradientTransformationExtraArgs:
    """Adds the updates of a transform to float32 weights; 16-bit parameters are these weights, rounded.

    Steps too small for a 16-bit parameter add up in its master until they show. The transform inside sees gradients in
    float32, and the masters as its parameters, so that weight decay acts on them too.

    With int16 the master costs two bytes: a bfloat16 parameter is the upper half of the float32 number, rounded to
    nearest (ties away from zero), and the state holds the lower half, as a signed number; with all bits inverted where
    the last bit of the parameter is 1. Both together are the master, bit for bit. (If a step takes a weight almost to
    zero, it can be off by one last digit of the weight before.) So pass parameters as the last update left them.

    Args:
      inner: the transform.
      dtype: float32, a float32 copy of each parameter of 16 bits; or int16, for bfloat16 parameters.

    Returns:
      The transform. Its update needs `params`. Updates are float32; with them `optax.apply_updates` turns the
      parameters into the new masters, rounded.

    Raises:
      ValueError: another dtype, parameters other than float32, bfloat16 and (not with int16) float16, or no `params`.
    """
    if dtype not in (np.float32, np.int16, "float32", "int16"):
        raise ValueError(
            f"master_dtype is {dtype}: choose float32, or int16 for the half of a float32 that bfloat16 lacks"
        )
    dtype = np.dtype(dtype)
    inner = optax.with_extra_args_support(inner)

    def master_of(param: Any) -> Array | optax.MaskedNode:
        param_dtype = jnp.result_type(param)
        if param_dtype == jnp.float32:
            return optax.MaskedNode()
        if param_dtype not in (_BFLOAT16, np.float16):
            raise ValueError(
                f"a parameter has dtype {param_dtype}: masters are for bfloat16 and float16 ones, and float32 is its "
                "own; mask it out, or use no master_dtype"
            )
        if dtype == _INT16 and param_dtype != _BFLOAT16:
            raise ValueError(
                f"a parameter has dtype {param_dtype}: master_dtype int16 completes bfloat16 ones; use float32"
            )
        if isinstance(param, jax.ShapeDtypeStruct):
            return jnp.zeros_like(param, dtype=dtype)
        return _reflected(np.int32(0), _bits(param)).astype(dtype) if dtype == _INT16 else param.astype(jnp.float32)

    def init(params: PyTree) -> MasterWeightsState:
        return MasterWeightsState(jax.tree.map(master_of, params), inner.init(_all_wide(params)))

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object):
        if params is None:
            raise ValueError("params is None: masters belong to parameters; call update(updates, state, params)")
        masters = jax.tree.map(_weight, params, state.master)
        steps, inner_state = inner.update(_all_wide(updates), state.inner, masters, **extra_args)
        structure = jax.tree.structure(updates)
        columns = (structure.flatten_up_to(tree) for tree in (params, state.master, masters, steps))
        pairs = [_step(*leaf) for leaf in zip(*columns, strict=True)]
        changes, left = (structure.unflatten(column) for column in (zip(*pairs, strict=True) if pairs else ((), ())))
        return changes, MasterWeightsState(left, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The transform on gradients and parameters in float32; updates get the gradients' dtypes at its end."""
    inner = optax.with_extra_args_support(inner)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object):
        steps, state = inner.update(
            _all_wide(updates), state, None if params is None else _all_wide(params), **extra_args
        )
        return jax.tree.map(lambda step, g: step.astype(g.dtype), steps, updates), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def weights(params: PyTree, state: PyTree) -> PyTree:
    """The float32 weights behind rounded parameters, for evaluation, checkpoints and other formats.

    Args:
      params: the parameters.
      state: of an optimizer with `master_weights` (or a master_dtype) in it; of any other, parameters are their own
        masters.

    Returns:
      float32 arrays of the parameters' structure; float64 parameters without a master, and leaves that are not
      floating-point, stay unchanged.

    Raises:
      ValueError: the state holds the masters of several optimizers.
    """
    states = [
        leaf
        for leaf in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, MasterWeightsState))
        if isinstance(leaf, MasterWeightsState)
    ]
    if len(states) > 1:
        raise ValueError(f"state holds the masters of {len(states)} optimizers: name one of their states")
    if not states:
        return _all_wide(params)
    return jax.tree.map(_weights, states[0].master, params, is_leaf=is_masked)


def _wide(x: Any) -> Any:
    if not jnp.issubdtype(x_dtype := jnp.result_type(x), jnp.floating):
        return x
    dtype = np.promote_types(x_dtype, np.float32)
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
    return jnp.asarray(x).astype(dtype)


def _all_wide(tree: PyTree) -> PyTree:
    return jax.tree.map(_wide, tree)


def convert_masters(target: PyTree, source: PyTree, params: PyTree) -> PyTree:
    """The masters `source` in the form of the masters `target`; both belong to `params`."""

    def convert(new: Any, old: Any, param: Array) -> Array | optax.MaskedNode:
        if is_masked(new) or is_masked(old):
            return new
        if new.dtype == old.dtype:
            return old
        weight = _weight(param, old)
        if new.dtype != _INT16:
            return weight
        upper = _bits(param)
        # The parameter was rounded to even where both neighbours are as near: there the last digit may be lost.
        return _reflected(jnp.clip(_bits(weight) - upper, -0x8000, 0x7FFF), upper).astype(jnp.int16)

    return jax.tree.map(convert, target, source, params, is_leaf=is_masked)


def is_masked(master: object) -> bool:
    return isinstance(master, optax.MaskedNode)


def _weights(master: Any, params: PyTree) -> PyTree:
    """The weights of a parameter, or of as many as a mask or label of another optimizer stands for."""
    return _all_wide(params) if is_masked(master) else _weight(params, master)


def _weight(param: Array, master: Any) -> Array:
    """The float32 number that a parameter stands for."""
    if is_masked(master):
        return param
    if master.dtype != _INT16:
        return master
    upper = _bits(param)
    return lax.bitcast_convert_type(upper + _reflected(master.astype(jnp.int32), upper), jnp.float32)


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def _reflected(remainder: Array | np.int32, upper: Array) -> Array:
    """A remainder as its code, and a code as its remainder: all bits are inverted where `upper` is odd.

    So neighbours on both sides of the border between two parameters have nearly equal codes. XLA may compute a sum
    twice, once with a fused multiply-add, and take the parameter from one and the remainder from the other: both
    together are then one of the float32 numbers around the two sums, and not one that is a bfloat16 digit away.
    """
    return remainder ^ (upper << 15 >> 31)


def _step(param: Array, master: Any, weight: Array, step: Array) -> tuple[Array, Array | optax.MaskedNode]:
    """The update of a parameter, and its next master."""
    if is_masked(master):
        return step, master
    weight = weight + step.astype(jnp.float32)
    before = param.astype(jnp.float32)
    if master.dtype != _INT16:
        return weight.astype(param.dtype).astype(jnp.float32) - before, weight
    bits = _bits(weight)
    upper = (bits + 0x8000) & ~0xFFFF
    change = lax.bitcast_convert_type(upper, jnp.float32) - before + (weight - weight)  # NaN where it is not finite
    # Where a parameter all but vanishes in one step the sum can miss the image; the weight is then what the sum gives.
    # Without this what is stored is the lower half of a float32 sum's bits, and XLA on GPUs stores the sum itself, cut
    # to an integer (docs/measurements.md).
    reached = _bits((before + change).astype(_BFLOAT16))
    remainder = jnp.where(reached == upper, bits - upper, 0)
    return change, _reflected(remainder, reached).astype(jnp.int16)
