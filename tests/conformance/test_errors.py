"""What every operation of the table refuses: the error names the argument and the rule."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from operations import OPERATIONS

# Rows of one operation whose operands have the same names refuse them by the same lines.
_UNLIKE = {(row.name.split(",")[0], *row.draw(np.random.default_rng(0))): row for row in reversed(OPERATIONS)}
every = pytest.mark.parametrize("operation", _UNLIKE.values(), ids=lambda operation: operation.name)


@pytest.fixture(autouse=True)
def _enough_devices(request, require_devices):
    operation = request.node.callspec.params["operation"]
    if operation.collective:
        require_devices(4)
    if reason := operation.without.get(request.node.originalname.removeprefix("test_")):
        pytest.skip(reason)


def _call(operation, **options):
    """The call on operands; where it must be inside shard_map, whole ones there on every device."""

    def call(operands):
        return operation.call(**operands, **options)

    if operation.collective:
        return jax.shard_map(call, mesh=operation.mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return call


def _refused(operation, operands, message, **options):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(_call(operation, **options), operands)


def _arrays(operation, rng):
    """Operands, and the names of those that are plain arrays."""
    operands = operation.draw(rng)
    return operands, [name for name, x in operands.items() if isinstance(x, jax.Array)]


@every
def test_dtypes(operation, rng):
    operands, names = _arrays(operation, rng)
    for name in names:
        wrong = jnp.int8 if jnp.issubdtype(operands[name].dtype, jnp.floating) else jnp.float32
        changed = jax.ShapeDtypeStruct(operands[name].shape, wrong)
        message = rf"^{name}\b.* {jnp.dtype(wrong).name}\b.*must be"
        _refused(operation, {**operands, name: changed}, message)


@every
def test_shapes(operation, rng):
    """Another number of dimensions is refused by name. A dimension of another size is taken, or refused with its size;
    where there are several operands, some are."""
    operands, names = _arrays(operation, rng)
    refused = []
    for name in names:
        x = operands[name]
        changed = jax.ShapeDtypeStruct((2,) if x.ndim == 0 else (), x.dtype)
        _refused(operation, {**operands, name: changed}, rf"^(?=.*\b{name}\b).*{re.escape(str(changed.shape))}")
        for axis, size in enumerate(x.shape):
            changed = jax.ShapeDtypeStruct((*x.shape[:axis], 3 * size, *x.shape[axis + 1 :]), x.dtype)
            try:
                jax.eval_shape(_call(operation), {**operands, name: changed})
            except ValueError as error:
                refused.append((3 * size, str(error)))
    assert [message for size, message in refused if not re.search(rf"\b{size}\b", message)] == []
    assert refused or len(operands) == 1 or not all(x.ndim for x in operands.values())


@every
def test_what_is_no_array(operation, rng):
    operands, names = _arrays(operation, rng)
    for name in names:
        wrong = {"an": "array"}
        message = rf"^{name} is (of type dict|a dict|\{{'an': 'array'\}}).*must be an array"
        held = {key: x for key, x in operands.items() if key != name}
        _refused(operation, held, message, **{name: wrong})


@every
def test_implementations(operation, rng):
    operands = operation.draw(rng)
    message = r"^implementation is 'fast'; it must be None, 'native', 'xla' or 'reference'"
    _refused(operation, operands, message, implementation="fast")
