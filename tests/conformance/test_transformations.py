"""Every operation of the table under every transformation of JAX: the same values and gradients as under jit alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from operation import placed, specs_of, stack, take, total
from operations import OPERATIONS

from te_jax import native
from te_jax.hlo import buffers
from te_jax.testing import assert_close

pytestmark = pytest.mark.usefixtures("native_kernels")

every = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)


def in_turn(turn, *, variants=True):
    """Every row; but `make test` has a fourth of them, each in one of four tests, and of the variants a tenth: of two
    one is in one of five tests. `make test-all` has the others."""
    parameters = []
    for variant in (False, True)[: 1 + variants]:
        for i, row in enumerate(row for row in OPERATIONS if row.variant == variant):
            taken = i % 10 == 5 + turn if variant else i % 4 == turn % 4
            parameters.append(pytest.param(row, id=row.name, marks=() if taken else pytest.mark.slow))
    return pytest.mark.parametrize("operation", parameters)


no_variants = pytest.mark.parametrize(
    "operation", [row for row in OPERATIONS if not row.variant], ids=lambda operation: operation.name
)


@pytest.fixture(autouse=True)
def _what_the_operation_does(request, require_devices):
    """Skips what the row of the table says that the operation does not do."""
    operation = request.node.callspec.params["operation"]
    if operation.collective:
        require_devices(4)
    if reason := operation.without.get(request.node.originalname.removeprefix("test_")):
        pytest.skip(reason)


@every
def test_jit(operation, rng):
    """Values and gradients against the oracle, and types as they are promised before anything runs."""
    case = operation.case(rng)
    found = operation.alone()(*case)
    operation.assert_right(found, *case)
    types = jax.eval_shape(operation.step(), *case)
    for leaf, promised in zip(jax.tree.leaves(found), jax.tree.leaves(types), strict=True):
        assert (leaf.shape, leaf.dtype, leaf.weak_type) == (promised.shape, promised.dtype, False)


@in_turn(0, variants=False)
def test_reference(operation, rng):
    case = operation.case(rng)
    operation.assert_right(operation.alone("reference")(*case), *case)


@in_turn(1, variants=False)
def test_integers_of_any_dtype(operation, rng):
    """They count as the same integers in int32; what that cannot hold counts as its largest: nothing wraps."""
    operands, cotangents = operation.case(rng)
    arrays = {name: x for name, x in operands.items() if isinstance(x, jax.Array)}
    integers = {name: np.clip(x, 0, 127) for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.integer)}
    if not integers:
        pytest.skip("no operand is an array of integers")

    def found(dtype, last=None):
        cast = {name: np.array(x, dtype) for name, x in integers.items()}
        for x in cast.values():
            x.flat[-1] = x.flat[-1] if last is None else last
        with jax.enable_x64(dtype == "int64"):
            return jax.jit(operation.step())({**operands, **cast}, cotangents)

    small, large = found("int32"), found("int32", 2**31 - 1)
    others = [(small, found("int8")), (small, found("uint8"))]
    others += [(large, found("uint32", 2**32 - 1)), (large, found("int64", 2**32))]
    for expected, of_dtype in others:
        for leaf, wanted in zip(jax.tree.leaves(of_dtype), jax.tree.leaves(expected), strict=True):
            assert_close(leaf, wanted, equal_nan=True)


@in_turn(3, variants=False)
def test_eager(operation, monkeypatch, rng):
    """And a second call runs what was compiled for the first."""
    case = operation.case(rng)
    results, _ = found = operation.step()(*case)
    operation.assert_agree(found, operation.alone()(*case))
    operation.assert_agree(operation.run()(case[0]), results)
    if not operation.collective:  # JAX traces an eager shard_map anew
        with jax.no_tracing():
            operation.run()(operation.case(rng)[0])
        monkeypatch.setattr(native, "call", lambda *_, **__: pytest.fail("traced again"))
        operation.step()(*operation.case(rng))


@in_turn(2, variants=False)
def test_value_and_grad(operation, rng):
    """By `jax.value_and_grad` of a scalar, with respect to one operand at a time: a choice changes no gradient."""
    if not operation.differentiable:
        pytest.skip("it has no gradient")
    operands, cotangents = operation.case(rng)
    results, gradients = operation.alone()(operands, cotangents)
    total = jax.value_and_grad(functools.partial(_total, operation.run()))

    def one_by_one(operands, cotangents):
        return {name: total({name: operands[name]}, operands, cotangents) for name in wanted}

    wanted = [name for name in operation.differentiable if operation.next_values is None] or operation.differentiable[
        :1
    ]
    for name, (value, gradient) in jax.jit(one_by_one)(operands, cotangents).items():
        operation.assert_agree(gradient[name], gradients[name])
        terms = jax.tree.map(lambda y, dy: jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32)), results, cotangents)
        np.testing.assert_allclose(value, sum(jax.tree.leaves(terms)), rtol=1e-2, atol=1.0)


def _total(run, some, operands, cotangents):
    """A scalar whose gradients are the cotangents that `step` gives."""
    terms = jax.tree.map(
        lambda y, dy: jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32)), run({**operands, **some}), cotangents
    )
    return sum(jax.tree.leaves(terms))


# ------------------------------------------------------------------------------------------------- vmap, pmap and scan


@in_turn(0)
def test_vmap_of_gradients(operation, rng):
    """Every example is a call of its own."""
    cases = operation.cases(rng, 2)
    found = jax.jit(jax.vmap(operation.step()))(*stack(cases))
    for i, case in enumerate(cases):
        operation.assert_agree(take(found, i), operation.alone()(*case))


@in_turn(1)
def test_gradients_of_vmap(operation, rng):
    """One operand mapped, along its last dimension, inside a vmap of one example; the other operands are shared. It is
    the first one, and of variants and where there are several results the last."""
    cases = operation.cases(rng, 2)
    shareable = [name for name in cases[0][0] if name not in operation.unshared]
    mapped = {name: 0 for name in cases[0][0] if name in operation.unshared}
    mapped[shareable[-1 if operation.variant or len(operation.dtypes) > 1 else 0]] = -1
    operands = {
        name: stack([case[0][name] for case in cases], mapped[name]) if name in mapped else x
        for name, x in cases[0][0].items()
    }
    cotangents = stack([case[1] for case in cases])
    axes = {name: mapped.get(name) for name in operands}
    run = jax.vmap(jax.vmap(operation.run(), in_axes=(axes,)), in_axes=(dict.fromkeys(operands, 0),))
    one = [jax.tree.map(lambda x: np.asarray(x)[None], tree) for tree in (operands, cotangents)]
    results, gradients = take(jax.jit(operation.step_of(run))(*one), 0)

    alone = []
    for i, (own, dy) in enumerate(cases):
        alone.append(operation.alone()({**cases[0][0], **{name: own[name] for name in mapped}}, dy))
        operation.assert_agree(take(results, i), alone[i][0])
    for name in operation.differentiable:
        parts = [gradient[name] for _, gradient in alone]
        operation.assert_agree(gradients[name], stack(parts, mapped[name]) if name in mapped else total(parts))


@in_turn(2)
def test_scan(operation, rng):
    """As the layers of a stack, whose gradients go back through the loop, and as a loop over whole steps."""
    cases = operation.cases(rng, 2)

    def layers(operands):
        return lax.scan(lambda carry, own: (carry, operation.run()(own)), 0, operands)[1]

    def steps(operands, cotangents):
        return lax.scan(lambda carry, own: (carry, operation.step()(*own)), 0, (operands, cotangents))[1]

    loops = [operation.step_of(layers), *([] if operation.variant else [steps])]
    for found in jax.jit(lambda *a: [loop(*a) for loop in loops])(*stack(cases)):
        for i, case in enumerate(cases):
            operation.assert_agree(take(found, i), operation.alone()(*case))


@in_turn(0, variants=False)
def test_pmap(operation, require_devices, rng):
    """Each device has a call of its own. Axes that an operation names are in test_meshes.py."""
    if operation.collective:
        pytest.skip("it has none of its own")
    require_devices(2)
    cases = operation.cases(rng, 2)
    found = jax.pmap(operation.step(), devices=jax.devices()[:2])(*stack(cases))
    for i, case in enumerate(cases):
        operation.assert_agree(take(found, i), operation.alone()(*case))


# ---------------------------------------------------------------------------------------------------------------- remat


def _inexact(x):
    return jnp.issubdtype(x.dtype, jnp.floating) and "float8" not in x.dtype.name


@in_turn(3)
def test_remat(operation, rng):
    """Under its policy and under none the same values; and kernels run again only where what they computed was not
    kept."""
    if not operation.differentiable:
        pytest.skip("it has no gradient")
    case = operation.case(rng)

    # The operands are made inside: as arguments of the program they would be there anyway.
    def from_scratch(operands):
        return operation.run()({name: jax.tree.map(_unchanged, x) for name, x in operands.items()})

    def under(policy):
        return jax.jit(operation.step_of(jax.checkpoint(from_scratch, policy=policy))).lower(*case)

    plain, nothing = jax.jit(operation.step()).lower(*case), under(jax.checkpoint_policies.nothing_saveable)
    kept = under(operation.policy or jax.checkpoint_policies.everything_saveable)
    assert _kernels(kept) == _kernels(plain)
    for lowered in (nothing, kept) if operation.policy else (nothing,):
        operation.assert_agree(lowered.compile()(*case), operation.alone()(*case))
    if operation.policy and _kernels(plain):
        assert _kernels(nothing) > _kernels(plain)


def _unchanged(x):
    """The same values from an operation that remat runs again."""
    return lax.optimization_barrier(x) if _inexact(x) else x


def _kernels(lowered):
    """How many calls of native kernels the program has before XLA merges equal ones."""
    return lowered.as_text().count("custom_call @te_")


@no_variants
def test_implementations(operation, rng):
    """Kernels run unless the reference is asked for."""
    case = operation.case(rng)
    native, default, reference = (
        _kernels(jax.jit(operation.step(name)).lower(*case)) for name in ("native", None, "reference")
    )
    assert native == default
    assert reference == 0


# ------------------------------------------------------------------------------------------------- donation and export


@every
def test_donation(operation, rng):
    """What an operation claims to write over an operand is written there; operands that are kept keep their values."""
    if not operation.donates or operation.collective:
        pytest.skip("it claims nothing, or on a mesh")
    operands, cotangents = case = operation.case(rng)
    before = jax.tree.map(np.array, case)
    expected = operation.alone()(*case)
    jax.tree.map(np.testing.assert_array_equal, case, before)

    def step(donated, operands, cotangents):
        return operation.step()({**operands, **donated}, cotangents)

    own = {name: operands.pop(name) for name in operation.donates}
    compiled = jax.jit(step, donate_argnums=0, keep_unused=True).lower(own, operands, cotangents).compile()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(own))
    assert compiled.memory_analysis().alias_size_in_bytes == size
    assert [b for b in buffers(compiled, "copy", "copy-start") if b.bytes >= size] == []
    for _ in range(2):  # nothing is left over from the run before
        copies = jax.tree.map(lambda x: jnp.array(x, copy=True), own)
        pointers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(copies)}
        found = compiled(copies, operands, cotangents)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(copies))
        assert pointers <= {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(found)}
        operation.assert_agree(found, expected)


@in_turn(1, variants=False)
def test_export(operation, rng):
    """A serialized program runs as the one that it was made of."""
    case = operation.case(rng)
    if operation.collective:
        (layout, *_) = operation.layouts.values()
        case = placed(operation.mesh, specs_of(layout, case[0]), case[0]), case[1]
    checks = [export.DisabledSafetyCheck.custom_call(target) for target in native.register()]
    program = export.export(jax.jit(operation.run()), disabled_checks=checks)(case[0]).serialize()
    found = jax.jit(export.deserialize(program).call)(case[0])
    operation.assert_agree(found, operation.alone()(*case)[0])
    if operation.differentiable:
        export.export(jax.jit(operation.step()), disabled_checks=checks)(*case)


# ---------------------------------------------------------------------------------------------------- other derivatives


@pytest.mark.parametrize("implementation", ["native", "reference"])
@in_turn(4)
def test_derivatives_that_are_not_defined(implementation, operation, rng):
    """They are right, or refused with the error that the row names, whatever surrounds them."""
    if implementation == "reference" and operation.variant:
        pytest.skip("a variant")
    operands, cotangents = operation.case(rng)
    message = operation.refuses.get(implementation)
    if message is None:
        if operation.differentiable:
            _assert_second_derivatives(operation, implementation, operands, cotangents)
        return
    function = _gradient_norm if operation.differentiable else _norm
    floats = [name for name, x in operands.items() if all(map(_inexact, jax.tree.leaves(x)))]
    places = list(operation.differentiable or floats or operands)
    wraps = (lambda f: f, jax.jit, jax.checkpoint)
    for i, name in enumerate([name for name in places if name not in operation.linear]):
        run = functools.partial(_of_one, function(operation, implementation), name)
        with pytest.raises(NotImplementedError, match=message):
            jax.eval_shape(jax.grad(wraps[i % 3](run)), operands[name], operands, cotangents)
    if operation.differentiable:
        of_cotangents = wraps[len(places) % 3](function(operation, implementation))
        with pytest.raises(NotImplementedError, match=message):
            jax.eval_shape(jax.grad(of_cotangents, argnums=1), operands, cotangents)
        name = places[0]
        run = functools.partial(_of_one, function(operation, implementation), name)
        run = functools.partial(run, operands=operands, cotangents=cotangents)
        with pytest.raises(NotImplementedError, match=message):
            jax.eval_shape(lambda x: jax.jvp(run, (x,), (x,)), operands[name])


def _of_one(function, name, x, operands, cotangents):
    return function({**operands, name: x}, cotangents)


def _norm(operation, implementation):
    def norm(operands, _):
        leaves = jax.tree.leaves(operation.run(implementation)(operands))
        return sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in leaves)

    return norm


def _gradient_norm(operation, implementation):
    """What a gradient penalty is: its derivatives are second ones of the operation."""

    def norm(operands, cotangents):
        _, gradients = operation.step(implementation)(operands, cotangents)
        return sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(gradients))

    return norm


def _assert_second_derivatives(operation, implementation, operands, cotangents):
    found = jax.jit(jax.grad(lambda some: _gradient_norm(operation, implementation)({**operands, **some}, cotangents)))
    found = found(operation.differentiated(operands))
    expected = operation.second_derivatives(operands, cotangents)
    operation.assert_gradients(found, expected, operands)


@no_variants
def test_forward_mode(operation, rng):
    """It is refused where derivatives are the operation's own."""
    if "native" not in operation.refuses:
        pytest.skip("its derivatives are JAX's")
    operands, _ = operation.case(rng)
    some = {name: x for name, x in operands.items() if all(map(_inexact, jax.tree.leaves(x)))} or operands

    def forwards(some):
        return jax.jvp(lambda some: operation.run("native")({**operands, **some}), (some,), (some,))

    with pytest.raises(NotImplementedError):
        jax.jit(forwards).lower(some)


@in_turn(2, variants=False)
def test_derivatives_of_what_surrounds(operation, rng):
    """An outer derivative that does not pass the operation is none of its business."""
    if not operation.differentiable:
        pytest.skip("it has no gradient")
    case = operation.case(rng)

    def outer(factor):
        return factor * _gradient_norm(operation, None)(*case)

    value, slope = jax.jit(jax.value_and_grad(outer))(2.0)
    np.testing.assert_allclose(value, 2 * slope, rtol=1e-6)
    assert slope > 0


# ------------------------------------------------------------------------------------------------------------ debugging


@in_turn(2, variants=False)
def test_without_jit(operation, rng):
    """Under disable_jit, and with debug_nans, which stops at a NaN and nowhere else."""
    case = operation.case(rng)
    with jax.disable_jit(), jax.debug_nans(True):
        found = operation.step()(*case)
        name, x = next(iter(case[0].items()))
        poisoned = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan) if _inexact(leaf) else leaf, x)
        with pytest.raises(FloatingPointError):
            jax.block_until_ready(operation.run()({**case[0], name: poisoned}))
    operation.assert_agree(found, operation.alone()(*case))
