"""Which collectives a compiled program runs, how much each one moves, and which of them nobody wrote.

    print(inspect.table(inspect.collectives(step, params, batch)))
    inspect.assert_no_resharding(step, params, batch, allowed=("all-reduce",))

Everything is read from the text of the optimized program (`compiled.as_text()`), on the CPU as on GPUs, and nothing is
run. Arguments may be arrays or `jax.ShapeDtypeStruct`s with shardings.

Who wrote a collective. The partitioner gives what it inserts the name of the operation that it serves, so a collective
counts as written where XLA's name for it (`op_name`) ends in a collective primitive of JAX (psum, psum_invariant, pmax,
pmin, ppermute, all_gather, reduce_scatter, all_to_all, …, as `jit(f)/shard_map/psum`), or in custom_partitioning, whose
rules write their own. One without a name counts as inserted. A name alone can mislead: what is resharded for a psum may
be called psum. So two more signs overrule it. From jaxlib 0.11 on, XLA marks what it inserts (is_spmd_generated).
Before, replica groups of written collectives are lists of devices, and those of inserted ones mostly a formula.

This leaves three gaps. `jax.sharding.reshard` and `with_sharding_constraint` count as inserted: no trace of who wished
for them is left. Before jaxlib 0.11 an inserted collective-permute that serves a written collective counts as written.
Where XLA merges an inserted and a written collective, the result is called as one of them.
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
from te_jax.inspect import _replica_groups
from te_jax.inspect._hlo import COLLECTIVES, Buffer, Instruction, arrays, split_at_commas, unquoted
from te_jax.inspect._program import Program, name_of

__all__ = ["KINDS", "Buffer", "Collective", "assert_no_resharding", "collectives", "parse", "table"]

_FUSED = {"te_all_gather_gemm": "all-gather-matmul", "te_gemm_reduce_scatter": "matmul-reduce-scatter"}
KINDS = (*COLLECTIVES, *_FUSED.values())
"""Every kind of collective: XLA's operations, and te_jax's own calls, which multiply too."""

_WRITTEN = (
    r"(?:psum|psum_invariant|psum_scatter|pmax|pmin|ppermute|pbroadcast|pbroadcast_dynamic|all_gather"
    r"|all_gather_invariant|all_gather_reduced|reduce_scatter|all_to_all|ragged_all_to_all|unreduced_psum|unreduced_pmax|unreduced_pmin"
    r"|unreduced_reduce_scatter)(?:_start|_done)?|custom_partitioning"
)
_WRITTEN_NAME = re.compile(rf"(?:.*/)?(?:{_WRITTEN})(?:\.\d+)?", re.DOTALL)
_MERGED_NAME = re.compile(r"(?:.*?/)?\((.*)\)", re.DOTALL)
_MARKED = re.compile(r'\bis_spmd_generated"?[=:]"?true\b')
_XLA_MARKS_WHAT_IT_INSERTS = tuple(int(part) for part in importlib.metadata.version("jaxlib").split(".")[:2]) >= (0, 11)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program. An asynchronous one, XLA's start and done, is one.

    Attributes:
      kind: one of `KINDS`.
      payload: the arrays that `bytes` counts, as they are on one device.
      groups: numbers of devices: those that exchange data, group by group, or for "collective-permute" pairs of source
        and target. A number is a place in the program's list of devices, which is `mesh.devices.flat`; te_jax's own
        calls name devices by 65536 times their process, plus their number in it. Empty where the text does not say.
      axis: names of the mesh axes along which members of a group differ, in the mesh's order: () for groups of one, and
        None where no mesh is known. A group may be a part of an axis.
      source: file and line that asked for it, such as "train.py:123", the file relative to the working directory where
        it lies inside. Lines of te_jax are passed over where it is known who called it. For an inserted collective,
        those of the operation that it serves: where XLA names none, of the first that reads it. None where there is
        none either.
      op_name: XLA's name of the operation, such as "jit(f)/shard_map/psum"; or "".
      times: how often it runs in a run of the program: n in a loop of n known iterations, and None where that is not
        known, as in `while_loop` or in a branch of `cond`.
      inserted: whether the partitioner inserted it, rather than somebody writing it; see the module.
    """

    kind: str
    payload: tuple[Buffer, ...]
    groups: tuple[tuple[int, ...], ...]
    axis: tuple[str, ...] | None
    source: str | None
    op_name: str
    times: int | None
    inserted: bool

    @property
    def bytes(self) -> int:
        """Bytes of the operands on one device, each time it runs; what crosses links depends on the algorithm.

        Operands are those that XLA compiled: its CPU backend, for one, exchanges bfloat16 as float32.

        This is the shard that is gathered (not the result), all that is reduced, all that is reduced and scattered (not
        the part that stays), all that is exchanged (with the part that stays), and what is permuted or broadcast. Of
        "ragged-all-to-all" it is the first operand, without offsets and sizes; of "all-gather-matmul" the first one,
        without scales and weights; of "matmul-reduce-scatter" the product before it is scattered.
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

    Where several processes drive the devices, all of them have to call it: they compile together.

    Args:
      fn: any callable, jitted or not, which is compiled for these arguments and not run; or a `jax.stages.Lowered` or
        `jax.stages.Compiled`, without further arguments.
      args, kwargs: of `fn`: arrays, or `jax.ShapeDtypeStruct`s with shardings, and what static arguments it has. One of
        its own that is called `mesh` has to be bound with `functools.partial`.
      mesh: names the axes, of all devices of the program. The default is the mesh on the shardings of arguments and
        results, or else that of `jax.set_mesh`; where several differ, none.

    Returns:
      One `Collective` for each that is in the program, whatever number of times it runs. XLA's point-to-point send and
      recv are not among them.

    Raises:
      TypeError: a compiled or lowered function comes with arguments.
      ValueError: `mesh` has another number of devices than the program; or the platform gives no text.

    Names and source lines are those of the program that was compiled first where JAX's persistent compilation cache
    answers, because its key leaves them out.
    """
    compiled = _compile(fn, args, kwargs)
    text = compiled.as_text()
    if text is None:
        raise ValueError("fn is compiled for a platform that gives no text of its programs; compile it for CPU or GPU")
    if mesh is not None:
        return parse(text, mesh=mesh)
    mesh = _mesh_of(compiled)
    return [
        found
        for program in _programs(text)
        for found in _collectives_of(program, mesh if _fits(mesh, program) else None)
    ]


def assert_no_resharding(
    fn: Callable[..., Any] | jax.stages.Lowered | jax.stages.Compiled,
    *args: Any,
    allowed: Collection[str] = (),
    mesh: Mesh | AbstractMesh | None = None,
    **kwargs: Any,
) -> None:
    """Asserts that the partitioner inserts no collective of its own into a function; see the module for what that is.

    Args:
      fn, args, mesh, kwargs: as for `collectives`.
      allowed: kinds that the partitioner may insert, such as ("all-reduce",) for the gradients of a data-parallel step.

    Raises:
      AssertionError: it inserted others; the message lists each with its bytes and its source line.
      TypeError, ValueError: as for `collectives`, and for an unknown kind in `allowed`.
    """
    allowed = (allowed,) if isinstance(allowed, str) else tuple(allowed)
    for kind in allowed:
        if kind not in KINDS:
            raise ValueError(f"allowed has {kind!r}, which is no kind of collective; the kinds are {', '.join(KINDS)}")
    found = [c for c in collectives(fn, *args, mesh=mesh, **kwargs) if c.inserted and c.kind not in allowed]
    if found:
        kinds = tuple(dict.fromkeys(c.kind for c in found))
        raise AssertionError(
            f"the partitioner inserted {len(found)} collective{'s' * (len(found) > 1)} that nobody wrote:\n"
            + "\n".join(f"  {_sentence(c)}" for c in found)
            + "\nGive what meets there shardings that agree (jax.device_put, in_shardings, with_sharding_constraint), "
            f"or write the collective in jax.shard_map; where it is meant, pass allowed={kinds!r}."
        )


def table(collectives: Sequence[Collective]) -> str:
    """Renders collectives as an aligned table for the terminal, a line each.

    Bytes are those of one run on one device, "2 of 4" stands for two groups of four devices, "written" says whether
    somebody wrote it or the partitioner inserted it, and "?" what is not known.
    """
    if not collectives:
        return "no collectives"
    headings = ("kind", "times", "bytes", "payload", "axis", "groups", "written", "source")
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
      text: what `compiled.as_text()` returns, from the jaxlib that is installed: in text from others, other signs tell
        who wrote a collective.
      mesh: names the axes; None leaves them unknown.

    Returns:
      One `Collective` for each, in the order of the text.

    Raises:
      ValueError: `mesh` has another number of devices than the program; or the text is no program's.
    """
    found: list[Collective] = []
    for program in _programs(text):
        if mesh is not None and not _fits(mesh, program):
            raise ValueError(
                f"mesh has shape {dict(mesh.shape)}, but the program runs on {program.devices} devices; pass the mesh "
                "that it was compiled for"
            )
        found += _collectives_of(program, mesh)
    return found


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
        "no" if c.inserted else "yes",
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
    if own := kind in _FUSED.values():
        groups = _replica_groups.of_call(attributes.get("backend_config", ""))
        numbers = _numbers_of_places(mesh)
        if all(place in numbers for group in groups for place in group):
            groups = tuple(tuple(numbers[place] for place in group) for group in groups)
    else:
        groups = _replica_groups.of_collective(attributes, program.devices)
    return Collective(
        kind=kind,
        payload=_payload(kind, instruction, program.computations[computation], groups),
        groups=groups,
        axis=None if mesh is None else _replica_groups.axes_of(groups, mesh.shape),
        source=program.source(computation, name, instruction),
        op_name=op_name,
        times=times,
        inserted=not own and _is_inserted(instruction, op_name),
    )


def _numbers_of_places(mesh: Mesh | AbstractMesh | None) -> dict[int, int]:
    """XLA numbers devices as they come in the mesh; te_jax's calls know them by their processes. An abstract mesh is
    taken for one of a single process, in the order of its devices."""
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
    if any(_MARKED.search(attributes.get(name, "")) for name in ("frontend_attributes", "backend_config")):
        return True
    if not _XLA_MARKS_WHAT_IT_INSERTS and not attributes.get("replica_groups", "{").startswith("{"):
        return True
    # Where XLA merges collectives it joins their names: "f/a/psum;f/b/psum", or "f/(a/psum:b/psum)".
    merged = _MERGED_NAME.fullmatch(op_name)
    names = merged[1].split(":") if merged else op_name.split(";")
    return not all(_WRITTEN_NAME.fullmatch(name.strip(" ()")) for name in names)


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
