"""Every operation of the table on meshes: the values of one device, laid out and exchanged as the row says.

Auto and Explicit axes under jit, both in one mesh, and inside `shard_map`, over all axes or over some.
"""

import contextlib

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from operation import DEVICES, Layout, mesh_of, placed, specs_of, spread, stack, take, total
from operations import OPERATIONS
from parameters import in_turns

from te_jax.hlo import collectives

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@pytest.fixture(autouse=True)
def _four_devices(native_kernels, require_devices):
    require_devices(4)


def rows(wanted, *, kinds=1, turn=None):
    """A parameter for each row and layout. Layouts of a row take turns with the two kinds of axes; of a row that is no
    variant both occur where `kinds` is 2, also with its only layout. `make test` has every second layout, and of a
    variant the first; with `turn`, 0, 1 or 2, of every sixth variant."""
    parameters = []
    for i, operation in enumerate(OPERATIONS):
        layouts = [(name, layout) for name, layout in operation.layouts.items() if wanted(operation, layout)]
        both = kinds == 2 and len(layouts) == 1 and not operation.variant
        for j, (name, layout) in enumerate(layouts * 2 if both else layouts):
            axis_type = (AUTO, EXPLICIT)[(i + (j + 1) // 2) % 2]
            label = f"{operation.name}-{name}" + (f"-{axis_type.name}" if kinds else "")
            slow = (j or turn not in (None, i % 6)) if operation.variant else j % 2
            parameters.append(
                pytest.param(operation, layout, axis_type, id=label, marks=pytest.mark.slow if slow else ())
            )
    return pytest.mark.parametrize(("operation", "layout", "axis_type"), parameters)


# ------------------------------------------------------------------------------------------------------------------ jit


@rows(lambda operation, layout: True, kinds=2, turn=1)
def test_jit(operation, layout, axis_type, rng):
    mesh = mesh_of(axis_type)
    _check(operation, layout, mesh, operation.step_of(operation.on(mesh, layout)), rng, set_mesh=axis_type is EXPLICIT)


@rows(lambda operation, layout: layout.reference and not operation.variant, kinds=0)
def test_reference(operation, layout, axis_type, rng):
    """It is split by the types of an Explicit mesh as the kernels are, and inside shard_map."""
    del axis_type
    mesh = mesh_of(EXPLICIT)
    step = operation.step_of(operation.on(mesh, layout, "reference"))
    _check(operation, layout, mesh, step, rng, exchanged=False)
    if layout.options is not None and not operation.collective:
        case = operation.case(rng)
        step = operation.step_of(operation.inside(layout, mesh_of(AUTO), "reference"))
        operation.assert_agree(jax.jit(step)(*case), operation.alone()(*case))


def _first_over_both_axes(operation):
    return next((each for each in operation.layouts.values() if each.axes() == {"data", "model"}), None)


@rows(lambda operation, layout: layout is _first_over_both_axes(operation) and not operation.variant)
def test_mixed_mesh(operation, layout, axis_type, rng):
    """One axis Auto and the other Explicit."""
    mesh = mesh_of(AUTO, EXPLICIT) if axis_type is AUTO else mesh_of(EXPLICIT, AUTO)
    step = operation.step_of(operation.on(mesh, layout))
    _check(operation, layout, mesh, step, rng, set_mesh=True, laid_out=False, exchanged=False)


def _check(operation, layout, mesh, step, rng, *, set_mesh=False, laid_out=True, exchanged=True):
    """Values, layout of results and gradients, collectives, donation."""
    operands, cotangents = case = operation.case(rng)
    expected = operation.alone()(*case)
    specs = specs_of(layout, operands)
    donated = operation.donates if exchanged else ()

    def run(own, operands, cotangents):
        return step({**operands, **own}, cotangents)

    with jax.set_mesh(mesh) if set_mesh else contextlib.nullcontext():
        own = placed(mesh, _only(donated, specs), _only(donated, operands), donated=True)
        kept = [name for name in operands if name not in donated]
        operands = placed(mesh, _only(kept, specs), _only(kept, operands))
        cotangents = placed(mesh, operation.result_specs(layout), cotangents)
        compiled = jax.jit(run, donate_argnums=0, keep_unused=True).lower(own, operands, cotangents).compile()
        buffers = _pointers(own)
        size = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(own))
        found = results, gradients = compiled(own, operands, cotangents)
    operation.assert_agree(found, expected)
    jax.tree.map(_assert_same_bits_everywhere, results)
    if laid_out:
        _assert_laid_out(mesh, operation.result_specs(layout), results)
        # On Auto meshes XLA may leave the gradient of what lies on all devices as it likes.
        for name in operation.differentiable if mesh.explicit_axes else operation.differentiable[:1]:
            _assert_laid_out(mesh, specs[name], gradients[name])
    if donated:
        assert compiled.memory_analysis().alias_size_in_bytes == size
        assert buffers <= _pointers(found)
    if exchanged and not (operation.left_to_xla and mesh.auto_axes):
        _assert_exchanges(operation, layout, compiled)


def _only(names, operands):
    return {name: operands[name] for name in names}


def _pointers(tree):
    return {shard.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards}


def _assert_laid_out(mesh, specs, tree):
    for leaf, spec in zip(jax.tree.leaves(tree), jax.tree.leaves(spread(specs, tree)), strict=True):
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), leaf.ndim), (leaf.sharding, spec)


def _assert_same_bits_everywhere(x):
    """All devices that hold the same part of an array hold the same bits."""
    parts = {}
    for shard in x.addressable_shards:
        parts.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
    assert all(len(bits) == 1 for bits in parts.values())


def _assert_exchanges(operation, layout, compiled):
    """The collectives of matrices that the layout names, and beside them few numbers."""
    wanted, small = list(layout.collectives), {}
    # For GPUs XLA concatenates the arrays of several collectives.
    joined = jax.default_backend() == "gpu"
    for entry in collectives(compiled):
        # Over one axis: of a sum, each of two devices keeps a half.
        kind, parts = ("all-reduce", 2) if entry.kind == "reduce-scatter" else (entry.kind, 1)
        for result in entry.results:
            if (kind, result.elements * parts) in wanted and not joined:
                wanted.remove((kind, result.elements * parts))
            else:
                small[kind] = small.get(kind, 0) + result.elements * (parts if joined else 1)
    for kind, elements in wanted if joined else ():
        small[kind] = small.get(kind, 0) - elements
    wanted = [(kind, elements) for kind, elements in wanted if not joined or small[kind] < 0]
    assert wanted == [], (wanted, collectives(compiled))
    allowed = operation.small if layout.small is None else layout.small
    too_much = {kind: count for kind, count in small.items() if count > allowed.get(kind, 0)}
    assert not too_much, (too_much, collectives(compiled))


@pytest.mark.parametrize(
    ("operation", "axis_type"),
    # In this order permute has an Auto axis: over an Explicit one jax 0.10 cannot map searchsorted.
    in_turns({row.name: row for row in OPERATIONS if not row.variant and not row.collective}, (EXPLICIT, AUTO)),
)
def test_vmap_of_a_split_dimension(operation, axis_type, rng):
    """Examples lie on different devices, and nothing of them is exchanged but what a layout over the other axis needs.
    Called eagerly too, where it is one operation of its own."""
    mesh = mesh_of(axis_type)
    layouts = [layout for layout in operation.layouts.values() if layout.axes() == {"model"}]
    layout = layouts[0] if layouts else Layout({}, small={})
    cases = operation.cases(rng, 2)
    operands, cotangents = cases[0]
    specs = spread(specs_of(layout, operands), operands), spread(operation.result_specs(layout), operation.result_types)
    specs = jax.tree.map(lambda spec: P("data", *spec), specs, is_leaf=_is_spec)
    together = tuple(
        placed(mesh, spec, None if of is None else stack(parts))
        for spec, of, parts in zip(specs, (operands, cotangents), zip(*cases, strict=True), strict=True)
    )
    compiled = jax.jit(jax.vmap(operation.step())).lower(*together).compile()
    _assert_exchanges(operation, layout, compiled)
    found = compiled(*together)
    eager = jax.vmap(operation.run())(together[0]) if operation.refuses else found[0]
    for i, case in enumerate(cases):
        expected = operation.alone()(*case)
        operation.assert_agree(take(found, i), expected)
        operation.assert_agree(take(eager, i), expected[0])


# ------------------------------------------------------------------------------------------------------------ shard_map


@rows(lambda operation, layout: layout.options is not None and layout.axes(), kinds=2, turn=0)
def test_part_of_the_whole(operation, layout, axis_type, rng):
    """With the names of axes each device computes its part; gradients are taken outside."""
    mesh, case = mesh_of(AUTO), operation.case(rng)
    expected = operation.alone()(*case)
    # In turn, as kinds of axes elsewhere. Untracked, JAX would add up the next values of what devices share.
    tracked = axis_type is AUTO or operation.next_values is not None
    step = jax.jit(operation.step_of(operation.inside(layout, mesh, check_vma=tracked)))
    results = operation.result_specs(layout)
    case = placed(mesh, specs_of(layout, case[0]), case[0]), placed(mesh, results, case[1])
    compiled = step.lower(*case).compile()
    operation.assert_agree(compiled(*case), expected)
    if tracked:  # elsewhere JAX sums cotangents of what devices share
        _assert_exchanges(operation, layout, compiled)
    if operation.collective and operation.donates:
        donated = _only(operation.donates, case[0])
        run = jax.jit(lambda donated, operands, dys: step({**operands, **donated}, dys), donate_argnums=0)
        parts = (leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(donated))
        assert run.lower(donated, *case).compile().memory_analysis().alias_size_in_bytes == sum(parts)


def _part(mesh, spec, x, device):
    """What the device holds of an array."""
    return np.asarray(x)[NamedSharding(mesh, spec).devices_indices_map(np.shape(x))[device]]


def _parts(mesh, specs, tree, devices):
    """What each of the devices holds of a tree."""
    return [
        jax.tree.map(lambda x, spec, device=device: _part(mesh, spec, x, device), tree, spread(specs, tree))
        for device in devices
    ]


def _along(axes, specs):
    """The specs as they are on a mesh of these axes alone."""
    return jax.tree.map(lambda spec: P(*(e if e in axes else None for e in spec)), specs, is_leaf=_is_spec)


def _is_spec(x):
    return isinstance(x, P)


@rows(
    lambda operation, layout: (
        not operation.variant and layout.options is not None and (operation.collective or layout.axes() == {"model"})
    ),
    kinds=0,
)
def test_part_of_the_whole_in_pmap(operation, layout, axis_type, rng):
    del axis_type
    operands, cotangents = case = operation.case(rng)
    results, gradients = operation.alone()(*case)
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    devices = [*mesh.devices]
    specs = _along(("model",), spread(specs_of(layout, operands), operands))
    result_specs = _along(("model",), spread(operation.result_specs(layout), results))
    if operation.differentiable:
        # JAX differentiates the sum of what all devices return.
        cotangents = jax.tree.map(
            lambda dy, spec: dy if "model" in spec else dy / 2, cotangents, spread(result_specs, cotangents)
        )
    step = operation.step_of(lambda operands: operation.call(**operands, **layout.options))
    own = [
        (part, None if cotangents is None else dy)
        for part, dy in zip(
            _parts(mesh, specs, operands, devices),
            _parts(mesh, result_specs, results if cotangents is None else cotangents, devices),
            strict=True,
        )
    ]
    found, found_gradients = jax.pmap(step, axis_name="model", devices=devices)(*stack(own))
    for i, expected in enumerate(_parts(mesh, result_specs, results, devices)):
        operation.assert_agree(take(found, i), expected)
    for leaf, spec in zip(jax.tree.leaves(found), jax.tree.leaves(result_specs, is_leaf=_is_spec), strict=True):
        if "model" not in spec:
            np.testing.assert_array_equal(*np.asarray(leaf))  # the same bits
    for name in operation.differentiable:
        parts = [take(found_gradients[name], i) for i in range(2)]
        if "model" in jax.tree.leaves(specs[name], is_leaf=_is_spec)[0]:
            for part, expected in zip(parts, _parts(mesh, specs[name], gradients[name], devices), strict=True):
                operation.assert_agree(part, expected)
        else:
            operation.assert_agree(total(parts), gradients[name])


@rows(
    lambda operation, layout: layout.own and not (operation.variant and layout.axes() - {*layout.own}),
    kinds=2,
    turn=2,
)
def test_operands_of_its_own(operation, layout, axis_type, rng):
    """Without names each device's operands are arrays of their own. JAX sums gradients of what devices share: inside of
    shard_map where it tracks what they share, outside also where it does not. An axis that shard_map leaves out is
    XLA's to split, or the types'."""
    own, partly = layout.own, bool(layout.axes() - {*layout.own})
    inside = axis_type is AUTO  # in turn, as kinds of axes elsewhere
    differentiable = operation.differentiable if inside or not partly else ()
    mesh = mesh_of(*(AUTO if axis in own else axis_type for axis in DEVICES)) if partly else mesh_of(AUTO)
    operands, _ = operation.case(rng)
    specs = _along(own, spread(specs_of(layout, operands), operands))
    # One device of each group that holds the same.
    devices = list(mesh.devices[tuple(slice(None if axis in own else 1) for axis in DEVICES)].flat)
    parts = _parts(mesh, specs, operands, devices)
    cotangents = None
    if differentiable:
        types = jax.eval_shape(operation.run(), parts[0])
        cotangents = jax.tree.map(lambda y: rng.standard_normal((len(parts), *y.shape)).astype(y.dtype), types)
    each = P(own)

    def run(operands):
        return jax.tree.map(lambda y: y[None], operation.run()(operands))

    if inside:
        out_specs = (each, {name: specs[name] for name in differentiable})
        step = jax.shard_map(
            operation.step_of(run), mesh=mesh, in_specs=(specs, each), out_specs=out_specs, axis_names={*own}
        )
    else:
        # XLA for CPUs aborts where it sums bfloat16 over some of the axes of an unchecked shard_map.
        wide = partly or not any(leaf.dtype == "bfloat16" for leaf in jax.tree.leaves(operands))
        names = {*(own if wide else DEVICES)}
        mapped = jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=each, axis_names=names, check_vma=partly)
        step = operation.step_of(mapped) if differentiable else lambda operands, _: (mapped(operands), {})
    with jax.set_mesh(mesh):
        case = placed(mesh, specs_of(layout, operands), operands), placed(mesh, each, cotangents)
        compiled = jax.jit(step).lower(*case).compile()
        results, gradients = compiled(*case)
    if inside:
        _assert_exchanges(operation, layout, compiled)
    run_alone = operation.alone() if differentiable else jax.jit(lambda operands, _: (operation.run()(operands), {}))
    alone = [run_alone(part, None if cotangents is None else take(cotangents, i)) for i, part in enumerate(parts)]
    for i, (expected, _) in enumerate(alone):
        operation.assert_agree(take(results, i), expected)
    for name in differentiable:
        merge = operation.merged.get(name, total)
        if merge is not total and not inside:
            continue  # JAX sums outside what only the operation could merge
        leaves = zip(*map(jax.tree.leaves, (gradients[name], operands[name], specs[name])), strict=True)
        values = zip(*(jax.tree.leaves(gradient[name]) for _, gradient in alone), strict=True)
        for (found, operand, spec), parts in zip(leaves, values, strict=True):
            places = [NamedSharding(mesh, spec).devices_indices_map(operand.shape)[device] for device in devices]
            _assert_merged(operation, found, operand, places, parts, merge)


def _assert_merged(operation, found, operand, places, values, merge):
    """A gradient: of each part of its operand, the values of all devices that share it, merged."""
    shared = {}
    for index, value in zip(places, values, strict=True):
        shared.setdefault(str(index), (index, []))[1].append(np.asarray(value))
    expected = np.zeros(operand.shape, operand.dtype)
    for index, parts in shared.values():
        expected[index] = merge(parts)
    operation.assert_agree(found, expected)
