"""Muon, as an optax transform: momentum in few bytes, and matrices that devices share among them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import PartitionSpec

from te_jax import sharding
from te_jax._core.arguments import as_flag
from te_jax._core.types import PyTree
from te_jax.optim import _bounds, _moments, _rounding
from te_jax.optim._adam import ScalarOrSchedule, adamw, finished
from te_jax.optim._matrices import Matrices, is_numbers, matrices_of, muon_dimension_numbers
from te_jax.optim._orthogonal import MUON, Coefficients, orthogonalize
from te_jax.sharding import Axes, AxisName

_STACKED = 8
"""Matrices of one shape that a loop takes one after the other, at least: a program with each by itself would have
hundreds of times as many products, and with all in one array another copy of the model."""


class ScaleByMuonState(NamedTuple):
    """State of `scale_by_muon`: that of optax without its coefficients, and bounds as `ScaleByAdamState` has them."""

    count: Array  # int32 (): steps taken  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: PyTree  # of the parameters' structure and shapes, mu_dtype
    mu_bounds: PyTree  # float32 [..., ceil(n / 128)] for a parameter [..., n]; None where mu needs none


def scale_by_muon(
    beta: float | Array = 0.95,
    mu_dtype: jax.typing.DTypeLike | None = None,
    *,
    nesterov: bool = True,
    coefficients: Coefficients = MUON,
    dimension_numbers: PyTree | Callable[[PyTree], PyTree] = muon_dimension_numbers,
    axis_name: AxisName | None = None,
    specs: PyTree = None,
    stochastic_rounding: bool = True,
    seed: int | Array = 0,
) -> optax.GradientTransformationExtraArgs:
    """Rescales gradients as `optax.contrib.scale_by_muon` does: their momentum, with all singular values about 1.

        m ← beta·m + (1-beta)·g,  u = NewtonSchulz(m)

    Momentum is as that of `scale_by_adam`, its dtype and rounding included. Newton-Schulz iterations are products in
    float16, with sums in float32, in the form that needs fewest.

    Under `jit` each device orthogonalizes a share of the matrices, whole, where parameters are split over devices and
    where these have copies: it sends its parts of the others once, and gets its parts of the results once, 2 + 2 bytes
    for each value of its shard. No collective runs within the iterations. On CPUs updates have the same bits for
    every sharding.

    Args:
      beta: decay of the momentum.
      mu_dtype: see `scale_by_adam`.
      nesterov: u is of beta·m + (1-beta)·g, as in optax.
      coefficients: (a, b, c) of each iteration.
      dimension_numbers: of the parameters' structure or the beginning of it, an `optax.contrib.MuonDimensionNumbers`
        for each; or a function from the parameters to that. Dimensions that are neither rows nor columns stack
        matrices.
      axis_name, specs: in `shard_map`, the mesh axes over which devices divide the matrices; and a PartitionSpec for
        each parameter, or part of the tree, which says over which of them it is split. Over the others it has copies.
      stochastic_rounding, seed: see `scale_by_adam`.

    Returns:
      The transform. Updates have the gradients' dtypes.

    Raises:
      ValueError: what `scale_by_adam` does not take, a parameter that is no matrix by its dimension_numbers, or axes in
        `specs` that are not in axis_name.

    References:
      Jordan et al., https://kellerjordan.github.io/posts/muon. Liu et al., https://arxiv.org/abs/2502.16982.
    """
    dtype = _moments.checked_dtype("mu_dtype", mu_dtype)
    _rounding.check_seed(seed)
    nesterov = as_flag("nesterov", nesterov)
    stochastic_rounding = as_flag("stochastic_rounding", stochastic_rounding)
    coefficients = tuple((float(a), float(b), float(c)) for a, b, c in coefficients)

    def init(params: PyTree) -> ScaleByMuonState:
        matrices_of(dimension_numbers, params)
        mu = jax.tree.map(lambda p: _moments.zeros(p, dtype), params)
        return ScaleByMuonState(
            jnp.zeros([], jnp.int32), mu, _bounds.zeros(params) if _moments.is_scaled(dtype) else None
        )

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object):
        del params, extra_args
        if not isinstance(state, ScaleByMuonState):
            raise ValueError(
                f"state is a {type(state).__module__}.{type(state).__name__}; it must be a "
                "te_jax.optim.ScaleByMuonState, as init returns it: pass the state of another Muon through "
                "te_jax.optim.convert_state first"
            )
        matrices = matrices_of(dimension_numbers, updates)
        axes = _axes_of(matrices, updates, axis_name, specs)
        count = jnp.asarray(optax.safe_increment(state.count))
        t, t_next = (jnp.asarray(n).astype(float) for n in (count, optax.safe_increment(count)))
        base = jnp.asarray(beta, float)
        step = jnp.stack([base, 1 - base, 1 - base**t, 1 - base**t_next])
        gradients, structure = jax.tree.flatten(updates)
        bounds = [None] * len(gradients) if state.mu_bounds is None else jax.tree.leaves(state.mu_bounds)
        keys = _rounding.keys(seed, count, len(gradients)) if stochastic_rounding else [None] * len(gradients)
        columns: list[tuple[Array, Array, Array | None]] = []
        of_leaves = zip(gradients, structure.flatten_up_to(state.mu), bounds, keys, matrices, axes, strict=True)
        for gradient, mu, bound, key, of_leaf, split in of_leaves:
            _moments.check_shape(gradient, mu)
            columns.append(_momentum(of_leaf, split, gradient, mu, bound, key, step, nesterov=nesterov))
        momenta, mu, after = zip(*columns, strict=True) if columns else ((), (), ())
        orthogonal = _orthogonalized(momenta, axes, coefficients)
        changes = [
            sharding.Layout.of(gradient).apply(of_leaf.unfolded(x))
            for of_leaf, x, gradient in zip(matrices, orthogonal, gradients, strict=True)
        ]
        mu_bounds = None if state.mu_bounds is None else jax.tree.structure(state.mu_bounds).unflatten(after)
        return structure.unflatten(changes), ScaleByMuonState(count, structure.unflatten(mu), mu_bounds)

    return optax.GradientTransformationExtraArgs(init, update)


_Split = tuple[tuple[str, Axes], ...]
"""In `shard_map`: mesh axes by "m" and "n", for rows and columns that are split over them, and by "copies"."""


def _axes_of(matrices: Sequence[Matrices], updates: PyTree, axis_name: AxisName | None, specs: PyTree) -> list[_Split]:
    """Of each leaf; nothing outside of `shard_map`, where `sharding.per_shard` finds out.

    Raises:
      ValueError: `specs` do not fit, or leaves are parts of which nobody says how they were split.
    """
    leaves = jax.tree.leaves(updates)
    if axis_name is None:
        varying = {axis for x in leaves for axis in sharding.varying_axes(x)}
        if specs is not None or varying:
            problem = f"gradients vary over {sorted(varying)}" if specs is None else "specs are given"
            raise ValueError(
                f"axis_name is None, and {problem}: in shard_map name the mesh axes over which devices divide the "
                "matrices, and in specs how parameters are split over them; axis_name=() takes what each device has "
                "for whole matrices"
            )
        return [()] * len(leaves)
    names = sharding.mapped_axes(axis_name)[0] if axis_name else ()
    of_leaves: list[PartitionSpec] = []
    jax.tree.map(
        lambda spec, part: of_leaves.extend([spec or PartitionSpec()] * len(jax.tree.leaves(part))),
        PartitionSpec() if specs is None else specs,
        updates,
        is_leaf=lambda x: x is None or isinstance(x, PartitionSpec),
    )

    def split(of_leaf: Matrices, spec: PartitionSpec) -> _Split:
        entries = [sharding.axes_of_entry(entry) for entry in (*spec, *(None,) * (len(of_leaf.shape) - len(spec)))]
        used = [axis for entry in entries for axis in entry]
        behind = [axis for group in (of_leaf.rows, of_leaf.columns) for i in group[1:] for axis in entries[i]]
        if behind or not set(used) <= set(names):
            raise ValueError(
                f"specs has {spec} for a parameter whose part has shape {of_leaf.shape}: its axes must be in "
                f"axis_name, {names}, and split the first dimension of rows or of columns"
            )
        copies = tuple(axis for axis in names if axis not in used)
        found = {"m": entries[of_leaf.rows[0]], "n": entries[of_leaf.columns[0]], "copies": copies}
        return tuple((name, axes) for name, axes in found.items() if axes)

    return [split(*pair) for pair in zip(matrices, of_leaves, strict=True)]


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="nesterov", inline=sharding.INLINE)
def _momentum(
    of_leaf: Matrices,
    split: _Split,
    gradient: Array,
    mu: Array,
    bounds: Array | None,
    key: Array | None,
    step: Array,
    *,
    nesterov: bool,
) -> tuple[Array, Array, Array | None]:
    """Float16 matrices [count, m, n], each divided by its largest magnitude, and the next momentum and bounds."""
    dtype = np.promote_types(gradient.dtype, np.float32)
    decay, one_minus, correction, correction_next = step.astype(dtype)
    g = _moments.clipped(gradient.astype(dtype), mu.dtype)
    m = one_minus * g + _moments.decode(mu, bounds, dtype, times=decay)
    used = decay * (m / correction_next) + one_minus * (g / correction) if nesterov else m
    if bounds is not None:
        largest = _moments.clipped(_moments.maxima(g).astype(dtype), mu.dtype)
        bounds = (one_minus * largest + decay * bounds.astype(dtype)).astype(jnp.float32)
    bits = None if key is None else _rounding.random_bits(key, gradient.shape)
    matrices = of_leaf.folded(used)
    largest = jnp.max(jnp.abs(matrices), axis=(1, 2), keepdims=True)
    if axes := tuple(axis for name, axes in split if name != "copies" for axis in axes):
        largest = lax.pmax(largest, axes)
    # Now, since float16 lacks the range of gradients. It keeps three more bits than bfloat16, which small singular
    # values need: iterations make them 500 times as large, with what rounding added to them.
    narrow = (matrices / jnp.maximum(largest, jnp.finfo(dtype).tiny)).astype(jnp.float16)
    return narrow, _moments.encode(m, bounds, mu.dtype, bits), bounds


def _orthogonalized(momenta: Sequence[Array], axes: Sequence[_Split], coefficients: Coefficients) -> list[Array]:
    """Arrays [count, m, n] with each matrix orthogonalized."""
    groups: dict[tuple[tuple[int, ...], _Split], list[int]] = {}
    for i, (x, split) in enumerate(zip(momenta, axes, strict=True)):
        groups.setdefault((x.shape[1:], split), []).append(i)
    done: dict[int, Array] = {}
    mesh = jax.sharding.get_abstract_mesh()
    enough = max(_STACKED, jax.device_count() if mesh.empty else mesh.size)
    for (_, split), members in groups.items():
        while members:
            count = 0
            taken = [i for i in members if count < enough and (count := count + len(momenta[i]))]
            members = members[len(taken) :]
            stack = jnp.concatenate([momenta[i] for i in taken]) if len(taken) > 1 else momenta[taken[0]]
            (stack,) = _divided(stack, axes=dict(split), coefficients=coefficients)
            ends = np.cumsum([len(momenta[i]) for i in taken])
            done |= dict(zip(taken, jnp.split(stack, ends[:-1]), strict=True))
    return [done[i] for i in range(len(momenta))]


@sharding.per_shard("... m n -> ... m n", axes_of=("m", "n"), copies="copies")
def _divided(stack: Array, *, axes: Mapping[str, Axes], coefficients: Coefficients) -> tuple[Array]:
    """The matrices of a stack [..., m, n] orthogonalized, by devices that share them."""
    matrices = stack.reshape(-1, *stack.shape[-2:])
    if not axes:
        of_one = functools.partial(orthogonalize, coefficients=coefficients)
        done = lax.map(of_one, matrices) if len(matrices) > 1 else of_one(matrices[0])[None]
        return (done.reshape(stack.shape),)
    devices = {name: math.prod(lax.axis_size(axis) for axis in of_name) for name, of_name in axes.items()}
    padding = -len(matrices) % math.prod(devices.values())
    x = jnp.pad(matrices, ((0, padding), (0, 0), (0, 0)))
    copies, whole, first = axes.get("copies", ()), x, 0
    if copies:
        count = len(x) // devices["copies"]
        first = lax.axis_index(copies) * count
        x = lax.dynamic_slice_in_dim(x, first, count)
    # Dimensions that are split become whole, and the stack is split instead.
    exchanges = [(axes[name], dimension) for name, dimension in (("m", 1), ("n", 2)) if name in axes]
    for of_name, dimension in exchanges:
        x = lax.all_to_all(x, of_name, 0, dimension, tiled=True)
    (x,) = _divided(x, coefficients=coefficients)
    for of_name, dimension in reversed(exchanges):
        x = lax.all_to_all(x, of_name, dimension, 0, tiled=True)
    if copies and sharding.varying_axes(x) & set(copies):
        # JAX knows of a sum that it is the same everywhere, and not of a gathered array.
        x = lax.psum(lax.dynamic_update_slice_in_dim(jnp.zeros_like(whole), x, first, 0), copies)
    elif copies:
        x = lax.all_gather(x, copies, tiled=True)
    return (x[: len(matrices)].reshape(stack.shape),)


def _scale_by_shape(
    dimension_numbers: PyTree | Callable[[PyTree], PyTree],
    consistent_rms: float | None,
    axis_name: AxisName | None,
    specs: PyTree,
) -> optax.GradientTransformation:
    """Updates by the factor of their matrices' shape, as `optax.contrib.muon` has it."""

    def factor(of_leaf: Matrices, split: _Split) -> float:
        _, (rows,), (columns,) = of_leaf.folded_sizes
        shards = {name: math.prod(lax.axis_size(axis) for axis in axes) for name, axes in split}
        rows, columns = rows * shards.get("m", 1), columns * shards.get("n", 1)
        if consistent_rms is None:
            return math.sqrt(max(1, columns / rows))
        return consistent_rms * math.sqrt(max(rows, columns))

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        del params
        leaves, structure = jax.tree.flatten(updates)
        matrices = matrices_of(dimension_numbers, updates)
        axes = _axes_of(matrices, updates, axis_name, specs)
        of_leaves = zip(matrices, axes, leaves, strict=True)
        return structure.unflatten([factor(of_leaf, split) * x for of_leaf, split, x in of_leaves]), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def muon(
    learning_rate: ScalarOrSchedule,
    beta: float | Array = 0.95,
    weight_decay: ScalarOrSchedule = 0.0,
    mask: PyTree | Callable[[PyTree], PyTree] = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
    *,
    nesterov: bool = True,
    consistent_rms: float | None = None,
    coefficients: Coefficients = MUON,
    dimension_numbers: PyTree | Callable[[PyTree], PyTree] = muon_dimension_numbers,
    adam: optax.GradientTransformation | None = None,
    axis_name: AxisName | None = None,
    specs: PyTree = None,
    stochastic_rounding: bool = True,
    seed: int | Array = 0,
    master_dtype: jax.typing.DTypeLike | None = None,
    skip_nonfinite: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """`optax.contrib.muon` with momentum in few bytes, and with its matrices divided over devices.

    Args:
      learning_rate: a number, or a schedule: step → number.
      beta, mu_dtype, nesterov, coefficients, axis_name, specs, stochastic_rounding, seed: see `scale_by_muon`.
      weight_decay: this fraction of every matrix, times the learning rate, is subtracted from it.
      mask: which matrices decay: a tree of bools, or a function from the parameters to one.
      consistent_rms: updates [rows, columns] are multiplied by this · √max(rows, columns): 0.2 makes them as large as
        Adam's, whose learning rate and weight decay then serve both. None: by √max(1, columns / rows), with which
        learning rates are about 0.02.
      dimension_numbers: which parameters are matrices, as in `scale_by_muon`, and None for those of `adam`.
      adam: the optimizer of all other parameters. None: `adamw` with this learning rate, mu_dtype for both moments, and
        without weight decay.
      master_dtype: see `master_weights`; None where parameters are their own master.
      skip_nonfinite: see `te_jax.optim.skip_nonfinite`.

    Returns:
      The transform. Its arithmetic is in float32 up to the update, which has the gradients' dtypes, or float32 with a
      master_dtype; Newton-Schulz iterations are in float16.

    Raises:
      ValueError: what `scale_by_muon` or `master_weights` does not take.

    References:
      Jordan et al., https://kellerjordan.github.io/posts/muon. Liu et al., https://arxiv.org/abs/2502.16982.

    Examples:
      >>> import jax.numpy as jnp, optax, te_jax.optim
      >>> optimizer = te_jax.optim.muon(1e-3, consistent_rms=0.2, weight_decay=0.1, mu_dtype=jnp.bfloat16)
      >>> params = {"kernel": jnp.eye(64, 32), "bias": jnp.zeros(32)}
      >>> state = optimizer.init(params)
      >>> updates, state = optimizer.update(params, state, params)
      >>> -0.0025 < float(updates["kernel"][0, 0]) < -0.001
      True
    """

    def labels(params: PyTree) -> PyTree:
        given = dimension_numbers(params) if callable(dimension_numbers) else dimension_numbers
        return jax.tree.map(
            lambda numbers, part: jax.tree.map(lambda _: "adam" if numbers is None else "muon", part),
            given,
            params,
            is_leaf=is_numbers,
        )

    of_matrices = optax.chain(
        scale_by_muon(
            beta,
            mu_dtype,
            nesterov=nesterov,
            coefficients=coefficients,
            dimension_numbers=dimension_numbers,
            axis_name=axis_name,
            specs=specs,
            stochastic_rounding=stochastic_rounding,
            seed=seed,
        ),
        _scale_by_shape(dimension_numbers, consistent_rms, axis_name, specs),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    if adam is None:
        dtypes = {"mu_dtype": mu_dtype, "nu_dtype": mu_dtype}
        options = {"stochastic_rounding": stochastic_rounding, "seed": seed}
        adam = adamw(learning_rate, weight_decay=0.0, nesterov=nesterov, **dtypes, **options)
    chain = optax.partition({"muon": of_matrices, "adam": adam}, labels)
    return finished(chain, master_dtype, skip_nonfinite)
