"""Running a function of local arrays under every way that JAX has of splitting arrays over devices.

XLA cannot look into a custom call: on sharded operands it gathers them, silently. `per_shard` wraps a function whose
dimensions are named by an einsum-like rule, and looks at how the operands at hand are sharded:

  manual    inside `shard_map` or `pmap` the operands are local already: the function is called as it is;
  Auto      `custom_partitioning`, whose Shardy rule lets shardings flow through, calls it on the shards;
  Explicit  `shard_map` over the mesh axes that the operands' types name (`custom_partitioning` would hand its result
            back unsharded there).

Meshes that mix the three are taken apart: Explicit axes first, Auto axes inside.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import re
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from te_jax._version import __version__
from te_jax.sharding.axes import Axes, axes_of_entry, axes_of_type, mesh_of
from te_jax.sharding.local_call import Reuse, bind_local_call
from te_jax.sharding.rule import Rule

Results = tuple[Array, ...]
Shape = tuple[int, ...]


def per_shard(
    rule: str,
    *,
    axes_of: Sequence[str] = (),
    replicated: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
    reuse: Mapping[int, int] | None = None,
    copies: str | None = None,
):
    """Decorates `function(*operands, axes, reuse, **static)`, which computes on local arrays, for use on sharded ones.

    Args:
      rule: Shardy's einsum-like notation, for example "... v, ... -> ..., ...". Factors that start a term as "..."
        are batch dimensions: `vmap` adds its own there, so the function must accept any number of them. A compound
        dimension, such as "(kb ki)" in "m (kb ki), kb m -> m" for blocks of ki values that share a scale, is made of
        factors of which only the first may be split: over as many shards as divide it, else the dimension is gathered,
        as it is where its last block is short.
      axes_of: factors whose mesh axes the function must know: to find its place in them, or, where results lack them,
        to combine over them by collectives, so that what it returns does not vary over them.
      replicated: factors that must not be sharded; operands that are get gathered.
      sizes: {factor: size} of all factors of compound dimensions but the first of each.
      reuse: {operand index: result index}: results that may be written over an operand. The function is told to do so,
        by `reuse`, unless the operand is an argument of the whole program that is not donated, where sharing a buffer
        would cost a copy. Without it the function is not given `reuse`.
      copies: the name in `axes` of the mesh axes over which nothing is split, for a function that divides its work over
        devices that have the same operands; None for one that does not.

    Returns:
      A decorator. The decorated function takes the operands, the static keyword arguments, which must be hashable, and
      optionally `axes`, and returns a tuple. The original is given `axes`, {factor: mesh axes}, for the factors in
      `axes_of` that are split right here; it should then call the decorated function on its shard, handing on `reuse`
      but not `axes`, and combine what comes back. Where nothing is split `axes` is empty, and it makes its native call,
      with `aliases=reuse`. `decorated.observable` is the same for an evaluation of the jaxpr (`te_jax.debug`).
    """
    dispatch = _Dispatch(Rule.parse(rule), axes_of, replicated, sizes or {}, tuple((reuse or {}).items()), copies)
    undecided = {"reuse": None} if reuse else {}

    def decorate(function: Callable[..., Results]) -> Callable[..., Results]:
        # The same static arguments give the same object, by which eager calls find what is compiled.
        @functools.cache
        def bind(static: tuple[tuple[str, Hashable], ...]) -> Callable[..., Results]:
            return dispatch.bound(functools.partial(function, **dict(static)))

        @functools.wraps(function)
        def wrapper(*operands: Array, axes: Mapping[str, Axes] | None = None, **static: Any) -> Results:
            if axes:  # the caller is inside shard_map and says itself what is split
                return function(*operands, axes=axes, **undecided, **static)
            decided = static.pop("reuse", None)
            if decided is not None:
                return dispatch.run(functools.partial(function, **static), operands, {"reuse": decided})
            call = bind(tuple(sorted(static.items())))
            return call(*operands)

        def observable(*operands: Array, **static: Hashable) -> Results:
            return dispatch.observable(functools.partial(function, **undecided, **static), *operands)

        decorated: Any = wrapper
        decorated.observable = observable
        return decorated

    return decorate


class _Dispatch:
    """Calls a local function on operands that may be sharded in any way."""

    def __init__(
        self,
        rule: Rule,
        axes_of: Sequence[str],
        replicated: Sequence[str],
        sizes: Mapping[str, int],
        reuse: Reuse,
        copies: str | None,
    ):
        if set(rule.minor_factors) != set(sizes):
            raise ValueError(
                f"sizes names {sorted(sizes)}; the rule {rule.text!r} needs the sizes of {sorted(rule.minor_factors)}, "
                "the factors in brackets but the first of each"
            )
        self.rule = rule
        self.axes_of = tuple(axes_of)
        self.replicated = tuple(replicated)
        self.sizes = dict(sizes)
        self.reuse = reuse
        self.copies = copies

    def __call__(self, function: Callable[..., Results], *operands: Array) -> Results:
        def body(*operands: Array, **reuse: Reuse) -> Results:
            return self.run(function, operands, reuse)

        return bind_local_call(body, self.reuse, self.bound(function), operands)

    @functools.cache  # noqa: B019, dispatches live as long as the functions they decorate
    def bound(self, function: Callable[..., Results]) -> Callable[..., Results]:
        """The dispatch of one function; always the same object for it."""
        return functools.partial(self, function)

    def run(self, function: Callable[..., Results], operands: Sequence[Array], reuse: dict[str, Reuse]) -> Results:
        """Runs under the operands' shardings; `reuse` is empty, or {"reuse": …} as decided."""
        mesh = mesh_of(*operands)
        is_split = any(axis in mesh.explicit_axes for operand in operands for axis in axes_of_type(operand))
        if is_split or (self.copies and mesh.explicit_axes):
            return self._over_explicit_axes(function, mesh, operands, reuse)
        # XLA gives custom_partitioning no sharding that JAX can read where a shard_map leaves Auto axes of one device.
        if not mesh.empty and all(mesh.shape[axis] == 1 for axis in mesh.auto_axes):
            return function(*operands, axes={}, **reuse)
        return self._over_auto_axes(function, mesh, operands, reuse)

    def observable(self, function: Callable[..., Results], *operands: Array) -> Results:
        """Runs so that an evaluation of the jaxpr sees every equation: XLA splits what lies on Auto axes."""
        mesh = mesh_of(*operands)
        if any(axis in mesh.explicit_axes for operand in operands for axis in axes_of_type(operand)):
            return self._over_explicit_axes(function, mesh, operands, {})
        return function(*operands, axes={})

    def _assign(self, specs: Sequence[PartitionSpec], shapes: Sequence[tuple[int, ...]], mesh):
        rule, whole = self.rule.fitted(shapes, self.sizes)
        sizes = rule.factor_sizes(shapes, self.sizes)
        # Uneven shards are padded with anything: harmless, except to what is combined over shards or lies in blocks.
        exact = {*self.axes_of, *(term[0] for term in rule.compounds)}

        def divides(factor: str, axes: Sequence[str]) -> bool:
            return factor not in exact or sizes[factor] % math.prod(mesh.shape[axis] for axis in axes) == 0

        assignment = rule.assign(specs, [len(shape) for shape in shapes], (*self.replicated, *whole), divides)
        self._warn_of_cut_blocks(specs, shapes, mesh, assignment)
        axes = {factor: assignment.axes[factor] for factor in self.axes_of if factor in assignment.axes}
        if self.copies:
            taken = {axis for factor_axes in assignment.axes.values() for axis in factor_axes}
            mapped = mesh.explicit_axes or mesh.auto_axes  # the one kind that the function is local to
            if free := tuple(axis for axis in mapped if axis not in taken and mesh.shape[axis] > 1):
                axes[self.copies] = free
        return assignment, axes

    def _warn_of_cut_blocks(self, specs: Sequence[PartitionSpec], shapes: Sequence[Shape], mesh, assignment) -> None:
        """Warns of dimensions that are gathered because their shards would cut blocks."""
        for term, spec, shape in zip(self.rule.operands, specs, shapes, strict=True):
            named = term[1:] if term[:1] == ("...",) else term
            entries = (*spec, *(None,) * (len(shape) - len(spec)))[len(shape) - len(named) :]
            for dimension, entry, size in zip(named, entries, shape[len(shape) - len(named) :], strict=True):
                devices = math.prod(mesh.shape[axis] for axis in axes_of_entry(entry))
                if devices == 1 or not isinstance(dimension, tuple) or dimension[0] in assignment.axes:
                    continue
                block = math.prod(self.sizes[minor] for minor in dimension[1:])
                if size % (devices * block):  # else another dimension has taken the axes
                    warnings.warn(
                        f"a dimension of {size} values is split over {devices} devices, whose shards would cut blocks "
                        f"of {block}: each of them gathers it and computes all of it. Give every device a multiple of "
                        f"{block} values (tokens or features), or use a recipe without blocks",
                        RuntimeWarning,
                        stacklevel=2,
                    )

    def _over_explicit_axes(self, function, mesh, operands: Sequence[Array], reuse: dict[str, Reuse]) -> Results:
        specs = [jax.typeof(x).sharding.spec for x in operands]
        assignment, axes = self._assign(specs, [x.shape for x in operands], mesh)

        def shards(*local: Array) -> Results:
            return function(*local, axes=axes, **reuse) if axes else self.run(function, local, reuse)

        # Operands that already lie as they should are passed on as they are: their buffers may then be reused.
        moved = [
            x if jax.typeof(x).sharding.spec == spec else jax.reshard(x, NamedSharding(mesh, spec))
            for x, spec in zip(operands, assignment.operand_specs, strict=True)
        ]
        return jax.shard_map(
            shards,
            mesh=_with_devices(mesh) if mesh.auto_axes and not _is_entered(mesh) else mesh,
            in_specs=assignment.operand_specs,
            out_specs=assignment.result_specs,
            # Empty is all axes but those that a vmap around us is split over, which nothing else leaves out.
            axis_names=set() if mesh.are_all_axes_explicit else set(mesh.explicit_axes),
        )(*moved)

    def _over_auto_axes(self, function, trace_mesh, operands: Sequence[Array], reuse: dict[str, Reuse]) -> Results:
        body = jax.make_jaxpr(functools.partial(function, axes={}, **reuse))(*operands)

        # Inside a partly manual shard_map XLA counts devices in the order in which shards of the first result lie on
        # them, and says so nowhere. A scalar lies on all, which then count in the order of the mesh, as _decode does.
        scalars = 1 if trace_mesh.manual_axes else 0

        def after_scalars(results: Results) -> Results:
            return (*(jnp.zeros(()) for _ in range(scalars)), *results)

        @custom_partitioning
        def whole(*operands: Array) -> Results:
            return after_scalars(tuple(jaxpr_as_fun(body)(*operands)))

        def partition(mesh, operand_shapes, result_shapes):
            del result_shapes
            whole_mesh, mesh, specs = _decode(mesh, trace_mesh, operand_shapes)
            assignment, axes = self._assign(specs, [x.shape for x in operand_shapes], mesh)
            local = functools.partial(function, axes=axes, **reuse)
            return (
                whole_mesh,
                _without_mesh(lambda *operands: after_scalars(local(*operands))),
                tuple(NamedSharding(mesh, spec) for spec in ((PartitionSpec(),) * scalars + assignment.result_specs)),
                tuple(NamedSharding(mesh, spec) for spec in assignment.operand_specs),
            )

        shapes = [x.shape for x in operands]
        rule, short = self.rule.fitted(shapes, self.sizes)
        replicated = {*self.replicated, *short, *rule.minor_factors}
        factor_sizes: dict[str, int] = rule.shardy_sizes(rule.factor_sizes(shapes, self.sizes))
        whole.def_partition(
            partition,
            decode_shardings=False,  # _decode does it
            sharding_rule=rule.text.replace("->", "-> ,") if scalars else rule.text,
            need_replication_factors=tuple(factor for factor in rule.factors if factor in replicated),  # in order
            **factor_sizes,
        )
        if not getattr(jax.config, "jax_use_shardy_partitioner", True):
            operands = _on_one_device_p.bind(*operands)
        # XLA's text of the call has an address for what it consists of. With
        # jax_remove_custom_partitioning_ptr_from_cache_key the key of the persistent compilation cache is made of the
        # rest, which must therefore say what is called.
        with set_xla_metadata(te_jax=self._digest(function, reuse, body)):
            return whole(*operands)[scalars:]

    def _digest(self, function: Callable[..., Results], reuse: dict[str, Reuse], body: ClosedJaxpr) -> str:
        """A hash of the call and of how it is split, the same in every process."""
        settings = (self.rule.text, self.axes_of, self.replicated, sorted(self.sizes.items()), self.reuse, self.copies)
        static = _static_values(function)
        text = _ADDRESS.sub("", f"{__version__} {settings} {sorted(reuse.items())} {static} {body}")
        return hashlib.sha256(text.encode()).hexdigest()[:32]


_ADDRESS = re.compile(r"\b0x[0-9a-f]+")


def _static_values(function: Callable[..., Results]) -> tuple[object, ...]:
    """Name, static arguments and closure of a local function."""
    bound = functools.partial(function)  # of a partial, the same function with the same arguments
    captured = inspect.getclosurevars(bound.func).nonlocals
    return bound.func.__module__, bound.func.__qualname__, sorted(bound.keywords.items()), sorted(captured.items())


def _without_mesh(function: Callable[..., Results]) -> Callable[..., Results]:
    """The function, traced and lowered outside of `jax.set_mesh`.

    Partitioning callbacks run while a program is compiled, in the context of who compiles it. Under a mesh with
    Explicit axes JAX would put sharding constraints into the operators of reductions, which XLA then does not know.
    """

    def call(*operands: Array) -> Results:
        if not jax.sharding.get_abstract_mesh().explicit_axes:
            return function(*operands)
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            jaxpr = jax.make_jaxpr(function)(*operands)
            return tuple(_without_mesh_p.bind(*operands, jaxpr=jaxpr))

    return call


_NO_MESH = jax.sharding.AbstractMesh((), ())
_without_mesh_p = Primitive("te_without_mesh")
_without_mesh_p.multiple_results = True


@_without_mesh_p.def_abstract_eval
def _(*_, jaxpr: ClosedJaxpr):
    return jaxpr.out_avals


def _lower_without_mesh(ctx: mlir.LoweringRuleContext, *values, jaxpr: ClosedJaxpr):
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(ctx, *values)


mlir.register_lowering(_without_mesh_p, _lower_without_mesh, cacheable=False)


_on_one_device_p = Primitive("te_on_one_device")
_on_one_device_p.multiple_results = True


@_on_one_device_p.def_abstract_eval
def _(*operands):
    return operands


def _lower_on_one_device(ctx: mlir.LoweringRuleContext, *values):
    context: Any = ctx.module_context.axis_context
    devices = context.mesh.size if hasattr(context, "mesh") else getattr(context, "num_devices", 1)
    if devices > 1:
        raise NotImplementedError(
            f"jax_use_shardy_partitioner is False, and a native kernel is to be split over {devices} devices, which "
            "only Shardy can: set the option to True, JAX's default, call the operation inside jax.shard_map over all "
            "mesh axes, or use implementation='reference'"
        )
    return values


# Only lowering knows the devices; XLA would end the process.
mlir.register_lowering(_on_one_device_p, _lower_on_one_device, cacheable=False)


def _decode(mesh: Mesh, trace_mesh, operands) -> tuple[Mesh, Mesh, list[PartitionSpec]]:
    """(mesh of all devices, mesh that the shardings speak of, specs) of a partitioning callback's operands.

    Inside a partly manual shard_map JAX passes no mesh, and shardings over groups of devices that differ in the Auto
    axes only. The mesh is then the one seen while tracing. An operand that is split over a part of a mesh axis, as
    Shardy may do where the whole axis does not divide a dimension, has no PartitionSpec: it is gathered.
    """
    from jax._src.sharding_impls import parse_flatten_op_sharding

    if mesh.empty:
        # Only positions matter here: XLA numbers the devices of a mesh in the order of the mesh.
        group = _mesh_over([axis for axis in trace_mesh.axis_names if axis in trace_mesh.auto_axes], trace_mesh)
        mesh = _mesh_over(trace_mesh.axis_names, trace_mesh)
    else:
        group = mesh

    def spec_of(operand) -> PartitionSpec:
        try:
            return parse_flatten_op_sharding(operand.sharding._hlo_sharding, group)[0]
        except (KeyError, ValueError, NotImplementedError):  # JAX's ways to say that it knows no spec for it
            return PartitionSpec()

    return mesh, group, [spec_of(operand) for operand in operands]


def _mesh_over(axes: Sequence[str], mesh) -> Mesh:
    sizes = [mesh.shape[axis] for axis in axes]
    types = tuple(dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[axis] for axis in axes)
    return Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), tuple(axes), axis_types=types)


def _is_entered(mesh) -> bool:
    """Whether the mesh is that of `jax.set_mesh`, of which JAX knows the devices while it lowers."""
    from jax._src.mesh import get_concrete_mesh  # jax.sharding.get_mesh refuses to be called while tracing

    return get_concrete_mesh().shape == mesh.shape


def _with_devices(mesh) -> Mesh:
    """The mesh with devices, which custom_partitioning inside shard_map asks for and types do not name.

    They are JAX's first ones; should the operands live on others, JAX says so: the way out is `jax.set_mesh`.
    """
    return _mesh_over(mesh.axis_names, mesh)
