"""Adam with moments in few bytes, as an optax transform."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from te_jax._core.arguments import as_flag
from te_jax._core.types import PyTree
from te_jax.optim import _bounds, _moments, _rounding
from te_jax.optim._master import in_float32, master_weights
from te_jax.optim._nonfinite import skip_nonfinite as skip_nonfinite_steps

ScalarOrSchedule = optax.ScalarOrSchedule


class ScaleByAdamState(NamedTuple):
    """State of `scale_by_adam`: that of optax, and a bound for every block of a moment in float16 or FP8."""

    count: Array  # int32 (): steps taken  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: PyTree  # of the parameters' structure and shapes, mu_dtype
    nu: PyTree  # of the parameters' structure and shapes, nu_dtype
    mu_bounds: PyTree  # float32 [..., ceil(n / 128)] for a parameter [..., n]; None where mu needs none
    nu_bounds: PyTree  # the same for nu


class _Step(NamedTuple):
    """Numbers of a step, the same for every parameter; float32 scalars."""

    b1: Array
    b2: Array
    one_minus_b1: Array
    one_minus_b2: Array
    correction1: Array
    correction1_next: Array
    correction2: Array
    eps: Array
    eps_root: Array | None  # None for zero


def scale_by_adam(
    b1: float | Array = 0.9,
    b2: float | Array = 0.999,
    eps: float | Array = 1e-8,
    eps_root: float | Array = 0.0,
    mu_dtype: jax.typing.DTypeLike | None = None,
    *,
    nu_dtype: jax.typing.DTypeLike | None = None,
    nesterov: bool = False,
    stochastic_rounding: bool = True,
    seed: int | Array = 0,
) -> optax.GradientTransformationExtraArgs:
    """Rescales gradients as `optax.scale_by_adam` does, with a dtype of your choice for each moment.

    All arithmetic is in float32, and for float64 gradients in float64. Finite gradients are clipped to ±2^63 (float64
    moments: ±2^511), so that no moment overflows. The update uses the moments before they are rounded:

        m ← b1·m + (1-b1)·g,  v ← b2·v + (1-b2)·g²,  u = m/(1-b1^t) / (√(v/(1-b2^t) + eps_root) + eps)

    Rounding to nearest would stop a second moment in bfloat16: a step of b2 = 0.999 changes it by less than half of its
    last digit. So moments are rounded up or down at random, with probabilities that make them right on average. The
    random bits are a hash of seed, step, parameter and place: the same after a restart and for every sharding under
    `jit`. In `shard_map` places count within a shard.

    float16 and FP8 moments form blocks of 128 values along the last dimension, each with a power of two as scale. There
    second moments stay above zero, in FP8 at 2^-16 of the power of two above their block's bound or more.

    Args:
      b1, b2: decay of the first and of the second moment.
      eps, eps_root: added outside and inside of the square root.
      mu_dtype, nu_dtype: float32, bfloat16, float16 or float8_e4m3fn. None: the parameter's own, as in optax, but
        float32 for a float16 parameter.
      nesterov: Nesterov's momentum, as in `optax.nadam`.
      stochastic_rounding: at random. False rounds to nearest.
      seed: of the random bits, from 0 to 2^32 - 1.

    Returns:
      The transform. Updates have the gradients' dtypes.

    Raises:
      ValueError: a dtype that moments or parameters cannot have, a seed out of range, or a flag that is none.

    References:
      Kingma and Ba, https://arxiv.org/abs/1412.6980. Dozat, https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ.
      Low-precision moments: Dettmers et al., https://arxiv.org/abs/2110.02861; optax issue 1552.
    """
    dtypes = _moments.checked_dtype("mu_dtype", mu_dtype), _moments.checked_dtype("nu_dtype", nu_dtype)
    _rounding.check_seed(seed)
    nesterov = as_flag("nesterov", nesterov)
    stochastic_rounding = as_flag("stochastic_rounding", stochastic_rounding)

    def init(params: PyTree) -> ScaleByAdamState:
        mu, nu = (jax.tree.map(lambda p, dtype=dtype: _moments.zeros(p, dtype), params) for dtype in dtypes)
        bounds = (_bounds.zeros(params) if _moments.is_scaled(d) else None for d in dtypes)
        return ScaleByAdamState(jnp.zeros([], jnp.int32), mu, nu, *bounds)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object):
        del params, extra_args
        if not isinstance(state, ScaleByAdamState):
            raise ValueError(
                f"state is a {type(state).__module__}.{type(state).__name__}; it must be a "
                "te_jax.optim.ScaleByAdamState, as init returns it: pass the state of another Adam through "
                "te_jax.optim.convert_state first"
            )
        count = jnp.asarray(optax.safe_increment(state.count))
        t, t_next = (jnp.asarray(n).astype(float) for n in (count, optax.safe_increment(count)))
        base1, base2 = (jnp.asarray(b, float) for b in (b1, b2))
        numbers = (
            *(b1, b2, 1 - b1, 1 - b2),
            *(1 - base1**t, 1 - base1**t_next, 1 - base2**t),
            *(eps, None if isinstance(eps_root, float) and eps_root == 0 else eps_root),
        )
        step = _Step(*jax.tree.map(lambda value: jnp.asarray(value, jnp.float32), numbers))
        gradients, structure = jax.tree.flatten(updates)
        moments = [
            *(structure.flatten_up_to(tree) for tree in (state.mu, state.nu)),
            # Boxes of Flax may name other axes than those of parameters.
            *([None] * len(gradients) if tree is None else jax.tree.leaves(tree) for tree in state[3:]),
        ]
        keys = _rounding.keys(seed, count, len(gradients)) if stochastic_rounding else None
        after = []
        for leaf, (gradient, *of_leaf) in enumerate(zip(gradients, *moments, strict=True)):
            _moments.check_shape(gradient, of_leaf[0])
            change, new_mu, *rest = _update(
                gradient, *of_leaf, None if keys is None else keys[leaf], step, nesterov=nesterov
            )
            # One leaf after the other: XLA would make one loop of several, which then runs short of registers.
            new_mu, step, keys = lax.optimization_barrier((new_mu, step, keys))
            after.append((change, new_mu, *rest))
        columns = list(zip(*after, strict=True)) if after else [()] * 5
        changes, mu, nu = (structure.unflatten(column) for column in columns[:3])
        bounds = (
            None if old is None else jax.tree.structure(old).unflatten(new)
            for old, new in zip(state[3:], columns[3:], strict=True)
        )
        return changes, ScaleByAdamState(count, mu, nu, *bounds)

    return optax.GradientTransformationExtraArgs(init, update)


@functools.partial(jax.jit, static_argnames="nesterov")
def _update(
    gradient: Array,
    mu: Array,
    nu: Array,
    mu_bounds: Array | None,
    nu_bounds: Array | None,
    key: Array | None,
    step: _Step,
    *,
    nesterov: bool,
):
    """One parameter: its update, both moments, and the bounds of their blocks."""
    dtype = np.promote_types(gradient.dtype, np.float32)
    step = jax.tree.map(lambda value: value.astype(dtype), step)
    g = _moments.clipped(gradient.astype(dtype), mu.dtype, nu.dtype)

    def corrected(moment: Array, correction: Array) -> Array:
        # optax divides, and float32 states repeat its bits. Loops that move fewer bytes have no time to.
        return moment / correction if mu.dtype == nu.dtype == dtype else moment * (1 / correction)

    m = step.one_minus_b1 * g + _moments.decode(mu, mu_bounds, dtype, times=step.b1)
    v = step.one_minus_b2 * (g * g) + _moments.decode(nu, nu_bounds, dtype, times=step.b2)
    momentum = corrected(m, step.correction1)
    if nesterov:
        momentum = step.b1 * corrected(m, step.correction1_next) + step.one_minus_b1 * corrected(g, step.correction1)
    variance = corrected(v, step.correction2)
    if step.eps_root is not None:
        variance = variance + step.eps_root
    update = momentum / (jnp.sqrt(variance) + step.eps)

    if mu_bounds is not None or nu_bounds is not None:
        largest = _moments.maxima(g if dtype == np.float64 else gradient).astype(dtype)
        largest = _moments.clipped(largest, mu.dtype, nu.dtype)
        if mu_bounds is not None:
            mu_bounds = (step.one_minus_b1 * largest + step.b1 * mu_bounds.astype(dtype)).astype(jnp.float32)
        if nu_bounds is not None:
            squared = step.one_minus_b2 * (largest * largest)
            nu_bounds = (squared + step.b2 * nu_bounds.astype(dtype)).astype(jnp.float32)
    bits = None if key is None else _rounding.random_bits(key, gradient.shape)
    mu = _moments.encode(m, mu_bounds, mu.dtype, bits)
    nu = _moments.encode(v, nu_bounds, nu.dtype, bits, positive=True)
    return update.astype(gradient.dtype), mu, nu, mu_bounds, nu_bounds


def adam(
    learning_rate: ScalarOrSchedule,
    b1: float | Array = 0.9,
    b2: float | Array = 0.999,
    eps: float | Array = 1e-8,
    eps_root: float | Array = 0.0,
    mu_dtype: jax.typing.DTypeLike | None = None,
    *,
    nu_dtype: jax.typing.DTypeLike | None = None,
    nesterov: bool = False,
    stochastic_rounding: bool = True,
    seed: int | Array = 0,
    master_dtype: jax.typing.DTypeLike | None = None,
    skip_nonfinite: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """`optax.adam` with moments in few bytes.

    Args:
      learning_rate: a number, or a schedule: step → number.
      b1, b2, eps, eps_root, mu_dtype, nu_dtype, nesterov, stochastic_rounding, seed: see `scale_by_adam`.
      master_dtype: see `master_weights`; None where parameters are their own master.
      skip_nonfinite: see `te_jax.optim.skip_nonfinite`.

    Returns:
      The transform. Its arithmetic is in float32 up to the update, which has the gradients' dtypes, or float32 with a
      master_dtype.

    Raises:
      ValueError: what `scale_by_adam` or `master_weights` does not take.

    Examples:
      >>> import jax.numpy as jnp, optax, te_jax.optim
      >>> optimizer = te_jax.optim.adam(0.1, mu_dtype=jnp.bfloat16, nu_dtype=jnp.float8_e4m3fn)
      >>> params = {"w": jnp.ones(4)}
      >>> state = optimizer.init(params)
      >>> updates, state = optimizer.update({"w": jnp.full(4, 2.0)}, state, params)
      >>> round(float(optax.apply_updates(params, updates)["w"][0]), 3)
      0.9
    """
    scaled = scale_by_adam(
        *(b1, b2, eps, eps_root, mu_dtype),
        nu_dtype=nu_dtype,
        nesterov=nesterov,
        stochastic_rounding=stochastic_rounding,
        seed=seed,
    )
    chain = optax.chain(scaled, optax.scale_by_learning_rate(learning_rate))
    return finished(chain, master_dtype, skip_nonfinite)


def adamw(
    learning_rate: ScalarOrSchedule,
    b1: float | Array = 0.9,
    b2: float | Array = 0.999,
    eps: float | Array = 1e-8,
    eps_root: float | Array = 0.0,
    mu_dtype: jax.typing.DTypeLike | None = None,
    weight_decay: ScalarOrSchedule = 1e-4,
    mask: PyTree | Callable[[PyTree], PyTree] = None,
    *,
    nu_dtype: jax.typing.DTypeLike | None = None,
    nesterov: bool = False,
    stochastic_rounding: bool = True,
    seed: int | Array = 0,
    master_dtype: jax.typing.DTypeLike | None = None,
    skip_nonfinite: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """`optax.adamw` with moments in few bytes.

    Args:
      learning_rate: a number, or a schedule: step → number.
      b1, b2, eps, eps_root, mu_dtype, nu_dtype, nesterov, stochastic_rounding, seed: see `scale_by_adam`.
      weight_decay: this fraction of every parameter, times the learning rate, is subtracted from it.
      mask: which parameters decay: a tree of bools, or a function from the parameters to one.
      master_dtype: see `master_weights`; None where parameters are their own master.
      skip_nonfinite: see `te_jax.optim.skip_nonfinite`.

    Returns:
      The transform; see `adam`.

    Raises:
      ValueError: what `scale_by_adam` or `master_weights` does not take.

    References:
      Loshchilov and Hutter, https://arxiv.org/abs/1711.05101.
    """
    scaled = scale_by_adam(
        *(b1, b2, eps, eps_root, mu_dtype),
        nu_dtype=nu_dtype,
        nesterov=nesterov,
        stochastic_rounding=stochastic_rounding,
        seed=seed,
    )
    chain = optax.chain(
        scaled, optax.add_decayed_weights(weight_decay, mask), optax.scale_by_learning_rate(learning_rate)
    )
    return finished(chain, master_dtype, skip_nonfinite)


def finished(
    chain: optax.GradientTransformation, master_dtype: jax.typing.DTypeLike | None, skip: bool
) -> optax.GradientTransformationExtraArgs:
    """The optimizer of a chain: its arithmetic in float32, with masters or without, and skipped steps if asked for."""
    optimizer = in_float32(chain) if master_dtype is None else master_weights(chain, master_dtype)
    return skip_nonfinite_steps(optimizer) if as_flag("skip_nonfinite", skip) else optimizer
