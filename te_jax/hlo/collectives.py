"""The collectives of a compiled program: what each moves, which line asked for it, and which the partitioner inserted.

    print(inspect.table(inspect.collectives(step, params, batch)))
    inspect.assert_no_resharding(step, params, batch, allowed=("all-reduce",))

All of this is read from the text of the optimized program (`compiled.as_text()`); nothing is run.

How `inserted` is decided. XLA's partitioner names a collective that it inserts after the operation that needs it, for
example `jit(f)/dot_general`. A collective counts as not inserted if its name (`op_name`) ends in one of JAX's
collective primitives, such as `jit(f)/shard_map/psum`, or in custom_partitioning, whose rules write collectives
themselves. Two more signs overrule the name: jaxlib 0.11 and later mark inserted collectives (is_spmd_generated); in
earlier versions the replica groups of an inserted collective are mostly a formula, and those of others a list.

This leaves three gaps. `jax.sharding.reshard` and `with_sharding_constraint` count as inserted: XLA keeps no trace of
them. Before jaxlib 0.11 a collective-permute that is inserted for a psum counts as not inserted. A collective that XLA
merges from an inserted and another one counts as either.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from te_jax._core.devices import place_of
from te_jax.hlo import _replica_groups
from te_jax.hlo._hlo import COLLECTIVES, Buffer, Instruction, arrays, split_at_commas, unquoted
from te_jax.hlo._program import Program, name_of
from te_jax.hlo.buffers import text_of

__all__ = ["KINDS", "Collective", "assert_no_resharding", "collectives", "parse", "table"]

_FUSED = {"te_all_gather_gemm": "all-gather-matmul", "te_gemm_reduce_scatter": "matmul-reduce-scatter"}
KINDS = (*COLLECTIVES, *_FUSED.values())
"""Every kind of collective: XLA's operations, and te_jax's own calls, which also multiply."""

_PRIMITIVES = (
    r"(?:psum|psum_invariant|psum_scatter|pmax|pmin|ppermute|pbroadcast|pbroadcast_dynamic|all_gather"
    r"|all_gather_invariant|all_gather_reduced|reduce_scatter|all_to_all|ragged_all_to_all|unreduced_psum|unreduced_pmax|unreduced_pmin"
    r"|unreduced_reduce_scatter)(?:_start|_done)?|custom_partitioning"
)
_NAME_OF_PRIMITIVE = re.compile(rf"(?:.*/)?(?:{_PRIMITIVES})(?:\.\d+)?", re.DOTALL)
_MERGED_NAME = re.compile(r"(?:.*?/)?\((.*)\)", re.DOTALL)
_MARK = re.compile(r'\bis_spmd_generated"?[=:]"?true\b')
_XLA_MARKS_INSERTED = tuple(int(part) for part in importlib.metadata.version("jaxlib").split(".")[:2]) >= (0, 11)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program. An asynchronous one, XLA's start and done, is one.

    Attributes:
      kind: one of `KINDS`.
      payload: the arrays that `bytes` counts, as they are on one device.
      results: the arrays that one device holds afterwards; several where XLA merged several collectives.
      groups: numbers of devices: those that exchange data, group by group, or for "collective-permute" pairs of source
        and target. A number is a place in `mesh.devices.flat`; where no mesh is known, te_jax's own calls number a
        device by 65536 times its process plus its number in it. Empty where the text does not say.
      axis: names of the mesh axes along which members of a group differ, in the mesh's order: () for groups of one,
        None without a mesh. A group may be a part of an axis.
      source: file and line that asked for it, such as "train.py:123", relative to the working directory where it lies
        inside, and outside of te_jax where the caller is known. For an inserted collective it is the line of the
        operation that it serves, or else of the first one that reads it. None if XLA names none.
      op_name: XLA's name of the operation, such as "jit(f)/shard_map/psum"; or "".
      times: how often it runs in a run of the program: n in a loop of n known iterations, and None where that is not
        known, as in `while_loop` or in a branch of `cond`.
      inserted: whether the partitioner inserted it; the module's docstring says how that is decided.
    """

    kind: str
    payload: tuple[Buffer, ...]
    results: tuple[Buffer, ...]
    groups: tuple[tuple[int, ...], ...]
    axis: tuple[str, ...] | None
    source: str | None
    op_name: str
    times: int | None
    inserted: bool

    @property
    def bytes(self) -> int:
        """Bytes of the operands on one device, each time it runs; the traffic on links depends on the algorithm.

        It counts the shard that is gathered, the whole array that is reduced or reduced and scattered, all that is
        exchanged (with the part that stays), and what is permuted or broadcast. "ragged-all-to-all" and
        "all-gather-matmul" count their first operand, "matmul-reduce-scatter" the product before it is scattered.
        XLA's CPU backend exchanges bfloat16 as float32, and this counts what XLA compiled.
        """
        return sum(array.bytes for array in self.payload)

    @property
    def dtype(self) -> str:
        """XLA's names of the payload's dtypes, each once: "bf16", or "bf16, f32"."""
        return ", ".join(dict.fromkeys(array.dtype for array in self.payload))

    @property
    def shape(self) -> str:
        """The payload as text: "bf16[8,128]", or "4 × f32[2,8], s32[8]" for several arrays."""
        texts = [f"{array.dtype}[{','.join(map(str, array.shape))}]" for array in self.payload]
        counts = {text: texts.count(text) for text in dict.fromkeys(texts)}
        return ", ".join(text if count == 1 else f"{count} × {text}" for text, count in counts.items())


def collectives(
    fn: Callable[..., Any] | jax.stages.Lowered | jax.stages.Compiled,
    *args: Any,
    mesh: Mesh | AbstractMesh | None = None,
    **kwargs: Any,
) -> list[Collective]:
    """Lists every collective of a compiled function, in the order of the program's text.

    Where several processes drive the devices, all of them must call it: they compile together. Where JAX's persistent
    compilation cache answers, names and source lines are those of the program that was compiled first.

    Args:
      fn: any callable, jitted or not, which is compiled for these arguments and not run; or a `jax.stages.Lowered` or
        `jax.stages.Compiled`, without further arguments.
      args, kwargs: of `fn`: arrays, or `jax.ShapeDtypeStruct` with shardings, and static arguments. Bind an argument
        of `fn` that is called `mesh` with `functools.partial`.
      mesh: names the axes, of all devices of the program. The default is the mesh on the shardings of arguments and
        results, or else that of `jax.set_mesh`; none if several differ.

    Returns:
      One `Collective` for each in the program, however often it runs; XLA's point-to-point send and recv are left out.

    Raises:
      TypeError: a compiled or lowered function comes with arguments.
      ValueError: `mesh` has another number of devices than the program; or the platform gives no text.
    """
    compiled = _compile(fn, args, kwargs)
    text = text_of(compiled)
    if mesh is not None:
        return parse(text, mesh=mesh)
    mesh = _mesh_of(compiled)
    return [
        collective
        for program in _programs(text)
        for collective in _collectives_of(program, mesh if _fits(mesh, program) else None)
    ]


def assert_no_resharding(
    fn: Callable[..., Any] | jax.stages.Lowered | jax.stages.Compiled,
    *args: Any,
    allowed: Collection[str] = (),
    mesh: Mesh | AbstractMesh | None = None,
    **kwargs: Any,
) -> None:
    """Asserts that the partitioner inserts no collective into a function.

    Args:
      fn, args, mesh, kwargs: as for `collectives`.
      allowed: kinds that the partitioner may insert, such as ("all-reduce",) for the gradients of a data-parallel step.

    Raises:
      AssertionError: it inserted others; the message lists each with its bytes and source line.
      TypeError, ValueError: as for `collectives`, and for an unknown kind in `allowed`.
    """
    allowed = (allowed,) if isinstance(allowed, str) else tuple(allowed)
    for kind in allowed:
        if kind not in KINDS:
            raise ValueError(f"allowed has {kind!r}, which is no kind of collective; the kinds are {', '.join(KINDS)}")
    inserted = [c for c in collectives(fn, *args, mesh=mesh, **kwargs) if c.inserted and c.kind not in allowed]
    if inserted:
        kinds = tuple(dict.fromkeys(c.kind for c in inserted))
        raise AssertionError(
            f"the partitioner inserted {len(inserted)} collective{'s' * (len(inserted) > 1)}:\n"
            + "\n".join(f"  {_sentence(c)}" for c in inserted)
            + "\nGive the operands shardings that agree (jax.device_put, in_shardings, with_sharding_constraint), or "
            f"write the collective in jax.shard_map; if it is meant, pass allowed={kinds!r}."
        )


def table(collectives: Sequence[Collective]) -> str:
    """Renders collectives as an aligned table for the terminal, a line each.

    Bytes are those of one run on one device, "2 of 4" stands for two groups of four devices, and "?" for unknown.
    """
    if not collectives:
        return "no collectives"
    headings = ("kind", "times", "bytes", "payload", "axis", "groups", "inserted", "source")
    rows = [headings, *(_cells(c) for c in collectives)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, tuple("-" * width for width in widths))
    right = (1, 2)
    return "\n".join(
        "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        .rstrip()
        for row in rows
    )  # fmt: skip


def parse(text: str, *, mesh: Mesh | AbstractMesh | None = None) -> list[Collective]:
    """Reads the collectives from the text of an optimized program, as `collectives` does after compiling.

    Args:
      text: what `compiled.as_text()` returns. `inserted` is right for text of the installed jaxlib only.
      mesh: names the axes; None leaves them unknown.

    Returns:
      One `Collective` for each, in the order of the text.

    Raises:
      ValueError: `mesh` has another number of devices than the program; or the text is no program's.
    """
    parsed: list[Collective] = []
    for program in _programs(text):
        if mesh is not None and not _fits(mesh, program):
            raise ValueError(
                f"mesh has shape {dict(mesh.shape)}, but the program runs on {program.devices} devices; pass the mesh "
                "that it was compiled for"
            )
        parsed += _collectives_of(program, mesh)
    return parsed


# From a function to text


def _programs(text: str) -> list[Program]:
    modules = [module for module in re.split(r"^(?=HloModule )", text, flags=re.MULTILINE) if module.strip()]
    if not modules or not all(module.startswith("HloModule ") for module in modules):
        raise ValueError("text is no optimized program: it must begin with HloModule, as compiled.as_text() does")
    return [Program(module) for module in modules]


def _fits(mesh: Mesh | AbstractMesh | None, program: Program) -> bool:
    return mesh is not None and math.prod(mesh.shape.values()) == program.devices


def _compile(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if isinstance(fn, jax.stages.Compiled | jax.stages.Lowered):
        if args or kwargs:
            raise TypeError(f"fn is a jax.stages.{type(fn).__name__}: it takes no arguments here; pass it alone")
        return fn.compile() if isinstance(fn, jax.stages.Lowered) else fn
    return (fn if hasattr(fn, "lower") else jax.jit(fn)).lower(*args, **kwargs).compile()


def _mesh_of(compiled: jax.stages.Compiled) -> Mesh | AbstractMesh | None:
    """The only mesh on the shardings of a program's arguments and results, or that of `jax.set_mesh`, or None."""
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, jax.sharding.NamedSharding)]
    meshes = meshes or [jax.sharding.get_abstract_mesh()]
    different = {tuple(mesh.shape.items()): mesh for mesh in meshes if not mesh.empty}
    return next(iter(different.values())) if len(different) == 1 else None


# To text


def _cells(c: Collective) -> tuple[str, ...]:
    return (
        c.kind,
        "?" if c.times is None else str(c.times),
        f"{c.bytes:,}",
        c.shape,
        "?" if c.axis is None else ", ".join(c.axis) or "-",
        _groups_in_words(c),
        "yes" if c.inserted else "no",
        c.source or "?",
    )


def _groups_in_words(c: Collective) -> str:
    if not c.groups:
        return "?"
    if c.kind == "collective-permute":
        return f"{len(c.groups)} pairs"
    sizes = sorted({len(group) for group in c.groups})
    return f"{len(c.groups)} of {' or '.join(map(str, sizes))}"


def _sentence(c: Collective) -> str:
    over = f" over {', '.join(map(repr, c.axis))}" if c.axis else ""
    times = {1: "", None: ", an unknown number of times"}.get(c.times, f", {c.times} times")
    operation = f"for {c.op_name!r} " if c.op_name else ""
    return f"{c.kind} of {c.shape}, {c.bytes:,} bytes{over}{times}, {operation}at {c.source or 'an unknown line'}"


# From text to collectives


_OPCODES = {kind: kind for kind in COLLECTIVES} | {f"{kind}-start": kind for kind in COLLECTIVES}
_CUSTOM_CALLS = ("custom-call", "custom-call-start")


def _collectives_of(program: Program, mesh: Mesh | AbstractMesh | None) -> list[Collective]:
    instructions = program.instructions((*_OPCODES, *_CUSTOM_CALLS))
    times = program.times(instructions)
    return [
        _collective(program, computation, name, instruction, kind, times[computation], mesh)
        for computation, its in instructions.items()
        for name, instruction in its.items()
        if (kind := _kind(instruction))
    ]


def _collective(
    program: Program,
    computation: str,
    name: str,
    instruction: Instruction,
    kind: str,
    times: int | None,
    mesh: Mesh | AbstractMesh | None,
) -> Collective:
    op_name, attributes = instruction.metadata.get("op_name", ""), instruction.attributes
    if is_fused := kind in _FUSED.values():
        groups = _replica_groups.of_call(attributes.get("backend_config", ""))
        numbers = _numbers_of_places(mesh)
        if all(place in numbers for group in groups for place in group):
            groups = tuple(tuple(numbers[place] for place in group) for group in groups)
    else:
        groups = _replica_groups.of_collective(attributes, program.devices)
    return Collective(
        kind=kind,
        payload=_payload(kind, instruction, program.computations[computation], groups),
        results=arrays(instruction.result_type),
        groups=groups,
        axis=None if mesh is None else _replica_groups.axes_of(groups, mesh.shape),
        source=program.source(computation, name, instruction),
        op_name=op_name,
        times=times,
        inserted=not is_fused and _is_inserted(instruction, op_name),
    )


def _numbers_of_places(mesh: Mesh | AbstractMesh | None) -> dict[int, int]:
    """Places of devices in the mesh by the numbers that te_jax's calls give them. An abstract mesh is taken for that
    of one process, in the order of its devices."""
    if isinstance(mesh, Mesh):
        return {place_of(device): number for number, device in enumerate(mesh.devices.flat)}
    return {number: number for number in range(mesh.size if mesh is not None else 0)}


def _kind(instruction: Instruction) -> str | None:
    if instruction.opcode in _OPCODES:
        return _OPCODES[instruction.opcode]
    if instruction.opcode in _CUSTOM_CALLS:
        target = unquoted(instruction.attributes.get("custom_call_target", ""))
        return next((kind for prefix, kind in _FUSED.items() if target.startswith(prefix)), None)
    return None


def _is_inserted(instruction: Instruction, op_name: str) -> bool:
    attributes = instruction.attributes
    if any(_MARK.search(attributes.get(name, "")) for name in ("frontend_attributes", "backend_config")):
        return True
    if not _XLA_MARKS_INSERTED and not attributes.get("replica_groups", "{").startswith("{"):
        return True
    # Where XLA merges collectives it joins their names: "f/a/psum;f/b/psum", or "f/(a/psum:b/psum)".
    merged = _MERGED_NAME.fullmatch(op_name)
    names = merged[1].split(":") if merged else op_name.split(";")
    return not all(_NAME_OF_PRIMITIVE.fullmatch(name.strip(" ()")) for name in names)


def _payload(
    kind: str, instruction: Instruction, lines: Mapping[str, str], groups: Sequence[Sequence[int]]
) -> tuple[Buffer, ...]:
    if kind == "matmul-reduce-scatter":
        kept = arrays(instruction.result_type)[0]
        return (Buffer(kept.dtype, (len(groups[0]), *kept.shape)),) if groups else (kept,)
    operands = [arrays(_type_of(operand, lines)) for operand in instruction.operands]
    if kind in ("all-gather-matmul", "ragged-all-to-all"):
        operands = operands[:1]
    return tuple(array for operand in operands for array in operand)


def _type_of(operand: str, lines: Mapping[str, str]) -> str:
    """The type of an operand that is printed as "%name", "type %name", or "%name#1" for an element of a tuple."""
    if "[" in operand:
        return operand
    name, element = name_of(operand)
    if name not in lines:
        raise ValueError(f"operand {operand!r} is not in its computation; please report this, with jaxlib's version")
    type_ = Instruction.parse(lines[name]).type
    return split_at_commas(type_[1:-1])[int(element)] if element else type_
