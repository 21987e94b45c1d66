"""The programs of all rows are those of golden/: a change that does not mean to change them does not.

A file has, for the step (results and gradients) on one device and on the mesh of the row's first layout, with Auto and
with Explicit axes:

    calls        custom calls with their attributes, and XLA's products: types of operands -> of results
    collectives  kind, and types of results on each device
    aliases      bytes of results that are written over donated operands
    names        of values for `jax.checkpoint` policies, and their types

`TE_JAX_WRITE_GOLDEN=1 pytest tests/conformance/test_golden.py` writes what there is now: commit the difference with the
change that made it. `TE_JAX_GOLDEN_BITS=FOLDER` writes hashes of all values there, to compare two versions.
"""

import collections
import contextlib
import hashlib
import os
import pathlib
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from operation import mesh_of, placed, specs_of
from operations import OPERATIONS

from te_jax.hlo import _hlo, collectives
from te_jax.hlo._program import Program
from te_jax.hlo.collectives import _type_of

FOLDER = pathlib.Path(__file__).with_name("golden")
JAX = (FOLDER / "jax").read_text().strip()
PRODUCTS = ("custom-call", "dot")

pytestmark = [
    pytest.mark.skipif(jax.__version__ != JAX, reason=f"other versions than {JAX} compile other programs"),
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="about programs for CPUs"),
]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_programs(operation, native_kernels):
    case = operation.case(np.random.default_rng(0))
    lines = [*_program("one device", operation.step(), operation, case)]
    for name, layout in list(operation.layouts.items())[:1]:
        for kind in (AxisType.Auto,) if operation.collective else (AxisType.Auto, AxisType.Explicit):
            mesh = mesh_of(kind)
            step = operation.step_of(operation.on(mesh, layout))
            lines += _program(f"{name}, {kind.name}", step, operation, case, layout, mesh)
    file = FOLDER / (re.sub(r"\W+", "-", operation.name) + ".txt")
    text = "\n".join(lines) + "\n"
    if os.environ.get("TE_JAX_WRITE_GOLDEN") == "1":
        file.write_text(text)
    assert text == file.read_text()
    if folder := os.environ.get("TE_JAX_GOLDEN_BITS"):
        leaves = jax.tree.leaves(operation.alone()(*case))
        hashes = (hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()[:16] for leaf in leaves)
        (pathlib.Path(folder) / file.name).write_text("\n".join(hashes) + "\n")


def test_every_file_is_of_a_row():
    files = {file.name for file in FOLDER.glob("*.txt")}
    assert files == {re.sub(r"\W+", "-", operation.name) + ".txt" for operation in OPERATIONS}


def _program(title, step, operation, case, layout=None, mesh=None):
    operands, cotangents = case
    donated = {name: operands[name] for name in operation.donates}
    kept = {name: value for name, value in operands.items() if name not in donated}

    def run(donated, kept, cotangents):
        return step({**kept, **donated}, cotangents)

    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        if mesh is not None:
            specs = specs_of(layout, operands)
            donated, kept = (placed(mesh, {name: specs[name] for name in part}, part) for part in (donated, kept))
            cotangents = placed(mesh, operation.result_specs(layout), cotangents)
        traced = jax.jit(run, donate_argnums=0, keep_unused=True).trace(donated, kept, cotangents)
        compiled = traced.lower().compile()
    yield f"== {title}"
    yield from _section("calls", _calls(compiled.as_text()))
    yield from _section("collectives", (f"{c.kind} {_arrays(c.results)}" for c in collectives(compiled)))
    yield f"aliases {compiled.memory_analysis().alias_size_in_bytes}"
    yield from _section("names", _names(traced.jaxpr.jaxpr))


def _section(name, lines):
    yield name
    for line, count in sorted(collections.Counter(lines).items()):
        yield f"  {line}" if count == 1 else f"  {count} x {line}"


def _arrays(arrays):
    return " ".join(f"{array.dtype}{list(array.shape)}".replace(" ", "") for array in arrays)


def _calls(text):
    program = Program(text)
    for computation, instructions in program.instructions(PRODUCTS).items():
        for instruction in instructions.values():
            target, attributes = "dot", ""
            if instruction.opcode == "custom-call":
                target = _hlo.unquoted(instruction.attributes["custom_call_target"])
                attributes = " " + instruction.attributes.get("backend_config", "")
            if instruction.opcode in PRODUCTS and (target == "dot" or target.startswith("te_")):
                types = (_type_of(operand, program.computations[computation]) for operand in instruction.operands)
                operands = ", ".join(_arrays(_hlo.arrays(type_)) for type_ in types)
                yield f"{target}{attributes}: {operands} -> {_arrays(_hlo.arrays(instruction.type))}"


def _names(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "name":
            yield f"{equation.params['name']} {equation.outvars[0].aval.str_short()}"
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from _names(inner)
