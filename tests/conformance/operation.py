"""What the conformance suite is told of an operation, and what it expects of one call of it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from te_jax.testing import assert_close

Operands = dict[str, Any]
"""The array arguments of an operation by name; a value may be a tree of arrays."""

DEVICES = {"data": 2, "model": 2}
"""The mesh of all layouts."""


WHOLE = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Layout:
    """How operands lie on the mesh of `DEVICES`, and what that costs.

    Attributes:
      operands: {name: PartitionSpec, or those of all its arrays in order}; others are whole on every device.
      results: the PartitionSpec of every array of the result, in order; one PartitionSpec for all of them.
      collectives: (kind, elements on a device) of every collective of matrices that the call and its gradients need.
        A reduce-scatter is an all-reduce of which each device keeps a part, and counts as that.
      small: in place of the operation's, {kind: elements in all} of collectives that are allowed beside those.
      options: keyword arguments with which the call, inside `shard_map` over this layout, computes its part of the
        whole result: {} where it needs none; None where there are no such arguments.
      own: mesh axes over which `shard_map` may also split without any, for calls of each device's own operands.
      reference: whether the reference is run in this layout on Explicit meshes too, where types must fit.
    """

    operands: Mapping[str, Any]
    results: PartitionSpec | tuple[PartitionSpec, ...] = WHOLE
    collectives: tuple[tuple[str, int], ...] = ()
    small: Mapping[str, int] | None = None
    options: Mapping[str, Any] | None = None
    own: tuple[str, ...] = ()
    reference: bool = False

    def axes(self) -> frozenset[str]:
        """The mesh axes that split something."""
        specs = jax.tree.leaves((dict(self.operands), self.results), is_leaf=_is_spec)
        entries = [entry for spec in specs for entry in spec if entry is not None]
        return frozenset(axis for entry in entries for axis in ((entry,) if isinstance(entry, str) else entry))


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """A row of the table in operations.py, which says how to write one.

    Attributes:
      name: of the row.
      draw: fresh random operands.
      call: `call(**operands, **options)`; options are `implementation` and those of a layout.
      oracle: the same in float64, as plain jax.numpy, from which all derivatives are taken; without `differentiable` it
        may be NumPy.
      dtypes: of the arrays of the result, in order.
      tolerance: relative L2 errors of results and of gradients against the oracle; None for those of their dtypes.
      agreement: the same between two runs of the operation, which differ in the order of sums at most.
      differentiable: names of the operands that have a cotangent.
      next_values: `next_values(operands, cotangents)` gives {name: cotangent} where the cotangent is no gradient.
      refuses: {implementation: pattern of the error} for derivatives beyond those that are defined: second ones, or all
        where nothing is differentiable.
      linear: operands on which no gradient depends, so that second derivatives are zero.
      policy: a `jax.checkpoint` policy that keeps all that the backward pass reads, so that no kernel runs twice.
      donates: names of the operands over which a result or cotangent is written where they are donated.
      merged: {operand: function of a list} where cotangents that are no gradients become one in another way than by
        their sum, when devices share the operand.
      unshared: operands of which every example of a vmap needs its own.
      layouts: {name: Layout}.
      small: {kind: elements in all} of collectives that are allowed beside those of matrices.
      left_to_xla: whether collectives on Auto meshes are XLA's choice, since the operation calls no kernel.
      collective: whether the call exists inside `shard_map` and `pmap` only; all layouts then have options.
      variant: whether it shares its rules for transformations with another row, and is spared those that do not depend
        on what differs.
      without: {test: reason} for what the operation does not do.
    """

    name: str
    draw: Callable[[np.random.Generator], Operands]
    call: Callable[..., Any]
    oracle: Callable[..., Any]
    dtypes: tuple[str, ...]
    tolerance: tuple[float | None, float | None] = (None, None)
    agreement: float | None = None
    differentiable: tuple[str, ...] = ()
    next_values: Callable[..., Operands] | None = None
    refuses: Mapping[str, str] = dataclasses.field(default_factory=dict)
    linear: tuple[str, ...] = ()
    policy: Callable[..., Any] | None = None
    donates: tuple[str, ...] = ()
    merged: Mapping[str, Callable[[list[Any]], Any]] = dataclasses.field(default_factory=dict)
    unshared: tuple[str, ...] = ()
    layouts: Mapping[str, Layout] = dataclasses.field(default_factory=dict)
    small: Mapping[str, int] = dataclasses.field(default_factory=dict)
    left_to_xla: bool = False
    collective: bool = False
    variant: bool = False
    without: Mapping[str, str] = dataclasses.field(default_factory=dict)

    # ------------------------------------------------------------------------------------------------------- arguments

    def case(self, rng: np.random.Generator) -> tuple[Operands, Any]:
        """(operands, cotangents of the result, None where nothing is differentiable)."""
        operands = self.draw(rng)
        if not self.differentiable:
            return operands, None
        return operands, jax.tree.map(lambda y: _normal(rng, y), self.result_types)

    def cases(self, rng: np.random.Generator, count: int):
        return [self.case(rng) for _ in range(count)]

    @functools.cached_property
    def result_types(self) -> Any:
        return jax.eval_shape(self.run(), self.draw(np.random.default_rng(0)))

    # ----------------------------------------------------------------------------------------------------------- calls

    @functools.cache  # noqa: B019, operations live as long as the process
    def run(self, implementation: str | None = None) -> Callable[[Operands], Any]:
        """The call as a function of whole operands; inside a shard_map over the first layout where it must be."""
        if self.collective:
            return self.inside(next(iter(self.layouts.values())), self.mesh, implementation)
        return lambda operands: self.call(**operands, implementation=implementation)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """That of a call that must be inside a shard_map."""
        return mesh_of(AxisType.Auto)

    def on(self, mesh: Mesh, layout: Layout | None, implementation: str | None = None) -> Callable[[Operands], Any]:
        """The same, of operands that lie on a mesh."""
        if self.collective:
            assert layout is not None
            return self.inside(layout, mesh, implementation)
        return lambda operands: self.call(**operands, implementation=implementation)

    def inside(self, layout: Layout, mesh: Mesh, implementation: str | None = None, **options):
        """The call inside a shard_map over a layout that has options, as a function of whole operands."""

        def mapped(operands: Operands):
            local = lambda operands: self.call(**operands, **layout.options, implementation=implementation)  # noqa: E731
            in_specs = (specs_of(layout, operands),)
            return jax.shard_map(
                local, mesh=mesh, in_specs=in_specs, out_specs=self.result_specs(layout), **options
            )(operands)  # fmt: skip

        return mapped

    def result_specs(self, layout: Layout) -> Any:
        """`layout.results` as the tree of the result."""
        # The result types of a collective operation follow from these, so this must not ask for its tree.
        return layout.results if _is_spec(layout.results) else _as_tree(layout.results, self.result_types)

    @functools.cache  # noqa: B019
    def step(self, implementation: str | None = None) -> Callable[..., tuple[Any, Operands]]:
        return self.step_of(self.run(implementation))

    def step_of(self, run: Callable[[Operands], Any]) -> Callable[..., tuple[Any, Operands]]:
        """`step(operands, cotangents)`: results, and cotangents of the differentiable operands."""

        def step(operands: Operands, cotangents: Any) -> tuple[Any, Operands]:
            if not self.differentiable:
                return run(operands), {}
            results, vjp = jax.vjp(lambda some: run({**operands, **some}), self.differentiated(operands))
            return results, vjp(cotangents)[0]

        return step

    def differentiated(self, operands: Operands) -> Operands:
        return {name: operands[name] for name in self.differentiable}

    @functools.cache  # noqa: B019
    def alone(self, implementation: str | None = None) -> Callable[..., tuple[Any, Operands]]:
        """The step under jit, without anything around it: what all transformations are compared with."""
        return jax.jit(self.step(implementation))

    # ------------------------------------------------------------------------------------------------ what is expected

    def expected(self, operands: Operands, cotangents: Any) -> tuple[Any, Operands]:
        """Results and cotangents by the oracle, in float64."""
        if not self.differentiable:
            return self.oracle(**operands), {}
        with jax.enable_x64(True):
            wide, cotangents = jax.tree.map(_as_float64, (operands, cotangents))
            results, gradients = jax.tree.map(np.asarray, self._wide_step(wide, cotangents))
        if self.next_values is not None:
            gradients |= self.next_values(operands, cotangents)
        return results, gradients

    def second_derivatives(self, operands: Operands, cotangents: Any) -> Operands:
        """Gradients of the sum of all squared gradients, by the oracle."""

        def norm(some: Operands, operands: Operands, cotangents: Any):
            _, gradients = self.step_of(lambda operands: self.oracle(**operands))({**operands, **some}, cotangents)
            return sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradients))

        with jax.enable_x64(True):
            wide, cotangents = jax.tree.map(_as_float64, (operands, cotangents))
            return jax.tree.map(np.asarray, jax.jit(jax.grad(norm))(self.differentiated(wide), wide, cotangents))

    @functools.cached_property
    def _wide_step(self):
        return jax.jit(self.step_of(lambda operands: self.oracle(**operands)))

    def assert_right(self, found: tuple[Any, Operands], operands: Operands, cotangents: Any) -> None:
        """Results, gradients and their dtypes against the oracle."""
        expected = self.expected(operands, cotangents)
        leaves = jax.tree.leaves(found[0])
        for leaf, wanted, dtype in zip(leaves, jax.tree.leaves(expected[0]), self.dtypes, strict=True):
            assert_close(leaf, wanted, dtype=dtype, tolerance=self._bound(self.tolerance[0], dtype))
        self.assert_gradients(found[1], expected[1], operands)

    def assert_gradients(self, found: Operands, expected: Operands, operands: Operands) -> None:
        for name in self.differentiable:
            tolerance = 1e-5 if name == "scaling_state" else self.tolerance[1]  # maxima are no sums in FP8
            places = zip(*map(jax.tree.leaves, (found[name], expected[name], operands[name])), strict=True)
            for leaf, wanted, operand in places:
                assert_close(leaf, wanted, dtype=operand.dtype, tolerance=tolerance)

    def assert_agree(self, found: Any, expected: Any) -> None:
        """Two runs of the operation with the same operands."""
        for leaf, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert_close(leaf, wanted, tolerance=self._bound(self.agreement, wanted.dtype))

    @staticmethod
    def _bound(tolerance: float | None, dtype: Any) -> float | None:
        return 0.0 if "float8" in str(dtype) else tolerance  # FP8 values are equal or wrong


# ---------------------------------------------------------------------------------------------------------------- trees


def specs_of(layout: Layout, operands: Operands) -> dict[str, Any]:
    """A PartitionSpec, or a tree of them, for every operand."""
    given = {name: layout.operands.get(name, WHOLE) for name in operands}
    return {name: _as_tree(spec, operands[name]) for name, spec in given.items()}


def _as_tree(specs: Any, tree: Any) -> Any:
    """Specs of all arrays in their order as a tree like theirs; one for all of them as it is."""
    return specs if _is_spec(specs) else jax.tree.unflatten(jax.tree.structure(tree), specs)


def spread(specs: Any, tree: Any) -> Any:
    """Specs for every array of a tree, from specs for parts of it."""
    return jax.tree.map(
        lambda spec, part: jax.tree.map(lambda _: spec, part), specs, tree, is_leaf=_is_spec
    )  # fmt: skip


def placed(mesh: Mesh, specs: Any, tree: Any, *, donated: bool = False) -> Any:
    """The tree, laid out on the mesh. From NumPy, since JAX compiles a program to cut its own arrays; but what NumPy
    holds is not donated."""
    if tree is None:
        return None
    if not donated:
        tree = jax.tree.map(np.asarray, tree)
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, spread(specs, tree))


def mesh_of(*types: AxisType) -> Mesh:
    """The mesh of layouts; one type for all axes, or one for each."""
    if len(types) == 1:
        types = types * len(DEVICES)
    count = math.prod(DEVICES.values())
    return Mesh(np.array(jax.devices()[:count]).reshape(*DEVICES.values()), tuple(DEVICES), axis_types=types)


# By NumPy: each shape of an operation of jax.numpy would be a compilation.


def stack(trees: list[Any], axis: int = 0) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves, axis), *trees)


def take(tree: Any, i: int) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf)[i], tree)


def total(trees: list[Any]) -> Any:
    """Their sum, rounded once."""

    def add(*leaves: Any) -> np.ndarray:
        return sum(np.asarray(leaf).astype(np.float64) for leaf in leaves).astype(leaves[0].dtype)

    return jax.tree.map(add, *trees)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _as_float64(x: Any) -> Any:
    return np.asarray(x).astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _normal(rng: np.random.Generator, like: Any) -> jax.Array:
    return jnp.asarray(rng.standard_normal(like.shape).astype(np.float32).astype(like.dtype))
