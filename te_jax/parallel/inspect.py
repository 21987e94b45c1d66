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
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from te_jax.testing import Buffer

__all__ = ["KINDS", "Collective", "assert_no_resharding", "collectives", "parse", "table"]

_FUSED = {"te_all_gather_gemm": "all-gather-matmul", "te_gemm_reduce_scatter": "matmul-reduce-scatter"}
KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
    *_FUSED.values(),
)
"""Every kind of collective: XLA's operations, and te_jax's own calls, which multiply too."""

_WRITTEN = (
    r"(?:psum|psum_invariant|psum_scatter|pmax|pmin|ppermute|pbroadcast|all_gather|all_gather_invariant"
    r"|all_gather_reduced|reduce_scatter|all_to_all|ragged_all_to_all|unreduced_psum|unreduced_pmax|unreduced_pmin"
    r"|unreduced_reduce_scatter)(?:_start|_done)?|custom_partitioning"
)
_WRITTEN_NAME = re.compile(rf"(?:.*/)?(?:{_WRITTEN})(?:\.\d+)?", re.DOTALL)
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
        calls name devices by their local hardware id instead. Empty where the text does not say.
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
    return [found for module in _modules(text) for found in module.collectives(module.fitting(_mesh_of(compiled)))]


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
    for module in _modules(text):
        if mesh is not None and module.fitting(mesh) is None:
            raise ValueError(
                f"mesh has shape {dict(mesh.shape)}, but the program runs on {module.devices} devices; pass the mesh "
                "that it was compiled for"
            )
        found += module.collectives(mesh)
    return found


# From a function to text


def _modules(text: str) -> list[_Module]:
    modules = [module for module in re.split(r"^(?=HloModule )", text, flags=re.MULTILINE) if module.strip()]
    if not modules or not all(module.startswith("HloModule ") for module in modules):
        raise ValueError("text is no optimized program: it must begin with HloModule, as compiled.as_text() does")
    return [_Module(module) for module in modules]


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


# The program


@dataclasses.dataclass(frozen=True)
class _Instruction:
    """`%name = type opcode(operands), attribute=value, …`, all as text."""

    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> _Instruction:
        """Reads what follows "%name = "."""
        end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
        opening = text.index("(", end)
        closing = _closing(text, opening)
        attributes: dict[str, str] = {}
        for part in _split(text[closing + 1 :]):
            name, _, value = part.partition("=")
            attributes[name] = value
        return cls(text[:end], text[end:opening].strip(), _split(text[opening + 1 : closing]), attributes)

    @property
    def metadata(self) -> dict[str, str]:
        """From {op_name="…" source_file="…" source_line=3} or {op_name="…" stack_frame_id=7}."""
        return {name: _unquoted(value) for name, value in _FIELD.findall(self.attributes.get("metadata", ""))}


_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[^\s(]+) (?:.*)?\{")
_LINE = re.compile(r"\s+(?:ROOT )?%?(?P<name>[^\s=]+) = (?P<rest>.*)")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_OPCODES = {kind: kind for kind in KINDS if kind not in _FUSED.values()}
_OPCODES |= {f"{kind}-start": kind for kind in _OPCODES}
# Names of computations, with how often each runs when the caller runs once and its loop has n iterations.
_CALLS: dict[str, Callable[[int | None], int | None]] = {
    "body": lambda n: n,
    "condition": lambda n: None if n is None else n + 1,
    "calls": lambda n: 1,
    "to_apply": lambda n: 1,
    "called_computations": lambda n: 1,
    "branch_computations": lambda n: None,
    "true_computation": lambda n: None,
    "false_computation": lambda n: None,
}
# Only lines with one of these are looked at closely: programs have tens of thousands.
_RELEVANT = re.compile(rf" (?:{'|'.join(_OPCODES)}|custom-call(?:-start)?)\(|\b(?:{'|'.join(_CALLS)})=")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"?(\d+)')


class _Module:
    """A program's text, split into the tables of source lines at its head and its computations."""

    def __init__(self, text: str):
        self.tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
        self.computations: dict[str, dict[str, str]] = {}
        self.entry = ""
        header, *lines = text.split("\n")
        count = {name: int(n) for name, n in re.findall(r"\b(num_partitions|replica_count)=(\d+)", header)}
        self.devices = count.get("num_partitions", 1) * count.get("replica_count", 1)
        rows: dict[int, str] | None = None
        instructions: dict[str, str] = {}
        for line in lines:
            if match := _LINE.fullmatch(line):
                instructions[match["name"]] = match["rest"]
            elif line in self.tables:
                rows = self.tables[line]
            elif match := _COMPUTATION.fullmatch(line):
                instructions = self.computations[match["name"]] = {}
                self.entry = match["name"] if match["entry"] else self.entry
            elif rows is not None and (match := re.fullmatch(r"(\d+) (.*)", line)):
                rows[int(match[1])] = match[2]

    def fitting(self, mesh: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh | None:
        """The mesh, or None where it has another number of devices than the program."""
        return mesh if mesh is not None and math.prod(mesh.shape.values()) == self.devices else None

    def collectives(self, mesh: Mesh | AbstractMesh | None) -> list[Collective]:
        relevant = {
            name: {key: _Instruction.parse(rest) for key, rest in lines.items() if _RELEVANT.search(rest)}
            for name, lines in self.computations.items()
        }
        times = self._times(relevant)
        return [
            self._collective(key, instruction, kind, self.computations[name], times[name], mesh)
            for name, instructions in relevant.items()
            for key, instruction in instructions.items()
            if (kind := _kind(instruction))
        ]

    def _collective(
        self,
        name: str,
        instruction: _Instruction,
        kind: str,
        lines: Mapping[str, str],
        times: int | None,
        mesh: Mesh | AbstractMesh | None,
    ) -> Collective:
        op_name = instruction.metadata.get("op_name", "")
        groups = _groups(kind, instruction.attributes, self.devices)
        return Collective(
            kind=kind,
            payload=_payload(kind, instruction, lines, groups),
            groups=groups,
            axis=None if mesh is None else _axes(groups, mesh.shape),
            source=self._source(instruction.metadata) or self._source_of_reader(name, lines),
            op_name=op_name,
            times=times,
            inserted=kind not in _FUSED.values() and _is_inserted(instruction, op_name),
        )

    def _times(self, relevant: Mapping[str, Mapping[str, _Instruction]]) -> dict[str, int | None]:
        """How often each computation runs when the program runs once; None where that is not known."""
        callers: dict[str, list[tuple[str, int | None]]] = {name: [] for name in relevant}
        for caller, instructions in relevant.items():
            for instruction in instructions.values():
                for called, times in _called(instruction):
                    if called in callers:
                        callers[called].append((caller, times))
        counts: dict[str, int | None] = {}

        def count(name: str) -> int | None:
            if name not in counts:
                counts[name] = _sum([_product(count(caller), times) for caller, times in callers[name]])
            return counts[name]

        counts[self.entry] = 1
        return {name: count(name) for name in relevant}

    def _source(self, metadata: Mapping[str, str]) -> str | None:
        if "source_file" in metadata:
            return _location(metadata["source_file"], metadata.get("source_line", ""))
        frames = list(self._frames(int(metadata.get("stack_frame_id", 0))))
        outside = [frame for frame in frames if not frame[0].startswith(_PACKAGE)]
        return _location(*(outside or frames)[0]) if frames else None

    def _frames(self, number: int) -> Iterator[tuple[str, str]]:
        """File and line of a stack frame and its callers."""
        # The first frame has no caller, 0; some versions print numbers of callers one too high.
        none = _numbers(self.tables["StackFrames"].get(1, "")).get("parent_frame_id", 0)
        while frame := _numbers(self.tables["StackFrames"].get(number, "")):
            place = _numbers(self.tables["FileLocations"].get(frame["file_location_id"], ""))
            if name := self.tables["FileNames"].get(place.get("file_name_id", 0)):
                yield _unquoted(name), str(place.get("line", ""))
            caller = frame.get("parent_frame_id", 0) - none
            number = caller if caller < number else 0

    def _source_of_reader(self, name: str, lines: Mapping[str, str]) -> str | None:
        """The source of the first instruction that reads this one, or what is made of it without a source."""
        made = {name}
        for reader, rest in lines.items():
            if any(each in rest for each in made):
                instruction = _Instruction.parse(rest)
                if made.intersection(_name_of(operand)[0] for operand in instruction.operands):
                    if source := self._source(instruction.metadata):
                        return source
                    made.add(reader)
        return None


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if counts and len(known) == len(counts) else None


def _product(outer: int | None, inner: int | None) -> int | None:
    return None if outer is None or inner is None else outer * inner


def _kind(instruction: _Instruction) -> str | None:
    if instruction.opcode in _OPCODES:
        return _OPCODES[instruction.opcode]
    if instruction.opcode in ("custom-call", "custom-call-start"):
        target = _unquoted(instruction.attributes.get("custom_call_target", ""))
        return next((kind for prefix, kind in _FUSED.items() if target.startswith(prefix)), None)
    return None


def _called(instruction: _Instruction) -> Iterator[tuple[str, int | None]]:
    """The computations that an instruction runs, with the number of times, None where that is not known."""
    if instruction.opcode.endswith(("-done", "-update")):  # names what its start has run
        return
    match = _TRIP_COUNT.search(instruction.attributes.get("backend_config", ""))
    for attribute, times in _CALLS.items():
        for name in re.findall(r"%?([^\s{},%]+)", instruction.attributes.get(attribute, "")):
            yield name, times(int(match[1]) if match else None)


def _is_inserted(instruction: _Instruction, op_name: str) -> bool:
    attributes = instruction.attributes
    if any(_MARKED.search(attributes.get(name, "")) for name in ("frontend_attributes", "backend_config")):
        return True
    if not _XLA_MARKS_WHAT_IT_INSERTS and not attributes.get("replica_groups", "{").startswith("{"):
        return True
    return not all(_WRITTEN_NAME.fullmatch(name.strip()) for name in op_name.split(";"))


def _payload(
    kind: str, instruction: _Instruction, lines: Mapping[str, str], groups: Sequence[Sequence[int]]
) -> tuple[Buffer, ...]:
    if kind == "matmul-reduce-scatter":
        type_ = instruction.type
        if instruction.opcode.endswith("-start"):
            type_ = _split(type_[1:-1])[1]  # of (operands, results, …)
        kept = _arrays(type_)[0]
        return (Buffer(kept.dtype, (len(groups[0]), *kept.shape)),) if groups else (kept,)
    operands = [_arrays(_type_of(operand, lines)) for operand in instruction.operands]
    if kind in ("all-gather-matmul", "ragged-all-to-all"):
        operands = operands[:1]
    return tuple(array for operand in operands for array in operand)


def _type_of(operand: str, lines: Mapping[str, str]) -> str:
    """The type of an operand that is printed as "%name", "type %name", or "%name#1" for an element of a tuple."""
    if "[" in operand:
        return operand
    name, element = _name_of(operand)
    if name not in lines:
        raise ValueError(f"operand {operand!r} is not in its computation; please report this, with jaxlib's version")
    type_ = _Instruction.parse(lines[name]).type
    return _split(type_[1:-1])[int(element)] if element else type_


def _name_of(operand: str) -> tuple[str, str]:
    """The name of an operand, and the number of its element of a tuple or ""."""
    name, _, element = operand.split(" ")[-1].removeprefix("%").partition("#")
    return name, element


_ARRAY = re.compile(r"\b(?P<dtype>pred|[a-z]+\d[a-z0-9]*)\[(?P<shape>[\d,<= ]*)\]")


def _arrays(type_: str) -> tuple[Buffer, ...]:
    """All arrays in a type, layouts aside; tokens are none."""
    return tuple(
        Buffer(match["dtype"], tuple(int(size) for size in re.findall(r"\d+", match["shape"])))
        for match in _ARRAY.finditer(type_)
    )


# Replica groups


def _groups(kind: str, attributes: Mapping[str, str], devices: int) -> tuple[tuple[int, ...], ...]:
    if kind in _FUSED.values():
        return _groups_of_call(attributes.get("backend_config", ""))
    if "source_target_pairs" in attributes:
        return _lists(attributes["source_target_pairs"])
    text = attributes.get("replica_groups", "{}")
    if text.startswith("mesh["):
        return _mesh_groups(text, attributes.get("device_ids", ""))
    if text.startswith("["):
        return _rows(np.atleast_2d(_iota(text)))
    return _lists(text) or (tuple(range(devices)),)


def _groups_of_call(config: str) -> tuple[tuple[int, ...], ...]:
    ids = re.search(r"\bgroups = (?:array<i64: |dense<\[?)([\d, ]+)", config)
    size = re.search(r"\bgroup_size = (\d+)", config)
    return _rows(np.reshape(_integers(ids[1]), (-1, int(size[1])))) if ids and size else ()


def _lists(text: str) -> tuple[tuple[int, ...], ...]:
    """Reads "{{0,1},{2,3}}"; nothing for "{}"."""
    return tuple(tuple(_integers(group)) for group in re.findall(r"\{([\d, ]+)\}", text))


def _iota(text: str) -> np.ndarray:
    """Reads "[2,4]<=[4,2]T(1,0)": 0, 1, 2, … as an array of shape [4,2], transposed, and reshaped to [2,4]."""
    match = re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if match is None:
        raise ValueError(f"replica groups {text!r} cannot be read; please report this, with jaxlib's version")
    dims = _integers(match[2])
    ids = np.arange(math.prod(dims)).reshape(dims).transpose(_integers(match[3] or "") or range(len(dims)))
    return ids.reshape(_integers(match[1]))


def _mesh_groups(text: str, device_ids: str) -> tuple[tuple[int, ...], ...]:
    """Reads "mesh['a'=4,'b'=2] {'a'}", groups along a, or "{'a':(2)2}", along a part of a: a is 2 × 2, its second 2.

    "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}" names the devices in another order than 0, 1, 2, …
    """
    sizes = {name: int(size) for name, size in re.findall(r"'(.*?)'=(\d+)", text)}
    devices, _, along = (device_ids or text).rpartition(" {")
    ids = np.arange(math.prod(sizes.values()))
    if device_ids:
        iota = f"[{len(ids)}]<={devices[1:-1]}"
        ids = _iota(iota) if devices.startswith("([") else np.array(_integers(devices))
    coordinates = dict(zip(sizes, np.unravel_index(np.arange(len(ids)), tuple(sizes.values())), strict=True))
    group = dict(coordinates)  # what is left of the coordinates without the parts that the groups run along
    member, members = np.zeros_like(ids), 1
    for name, before, size in re.findall(r"'(.*?)'(?::\((\d+)\)(\d+))?(?=,'|\})", along + "}"):
        size = int(size or sizes[name])
        after = sizes[name] // (int(before or 1) * size)
        part = coordinates[name] // after % size
        group[name] = group[name] - part * after
        member, members = member * size + part, members * size
    number = np.ravel_multi_index(tuple(group.values()), tuple(sizes.values()))
    return _rows(ids[np.lexsort((member, number))].reshape(-1, members))


def _axes(groups: Sequence[Sequence[int]], mesh: Mapping[str, int]) -> tuple[str, ...] | None:
    """The axes of a mesh along which members of a group differ; None for devices that are not in it."""
    if not groups or max(max(group) for group in groups) >= math.prod(mesh.values()):
        return None
    differ = set()
    for group in groups:
        coordinates = np.unravel_index(list(group), tuple(mesh.values()))
        differ.update(name for name, along in zip(mesh, coordinates, strict=True) if np.ptp(along))
    return tuple(name for name in mesh if name in differ)


def _rows(array: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(number) for number in row) for row in array)


def _integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


# Metadata


_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\d+)')


def _numbers(text: str) -> dict[str, int]:
    """Reads {file_name_id=1 line=58}."""
    return {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", text)}


def _unquoted(text: str) -> str:
    """Undoes C's escapes, where bytes beyond ASCII are octal."""
    if not text.startswith('"'):
        return text
    return text[1:-1].encode().decode("unicode_escape").encode("latin-1", "replace").decode("utf-8", "replace")


def _location(path: str, line: str) -> str:
    relative = os.path.relpath(path) if os.path.isabs(path) else path
    shown = path if relative.startswith(os.pardir) else relative
    return f"{shown}:{line}" if line else shown


# Brackets


_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\],]')
_COMMENT = re.compile(r"/\*.*?\*/")


def _closing(text: str, opening: int) -> int:
    """The place of the bracket that closes the one at `opening`; brackets within double quotes do not count."""
    depth = 0
    for match in _BRACKET.finditer(text, opening):
        depth += (match[0] in "([{") - (match[0] in ")]}")
        if depth == 0:
            return match.start()
    raise ValueError(f"a bracket is never closed in {text[:200]!r}")


def _split(text: str) -> tuple[str, ...]:
    """The parts between the commas outside all brackets and double quotes, without comments and blanks around."""
    parts, depth, begin = [], 0, 0
    for match in _BRACKET.finditer(text):
        depth += (match[0] in "([{") - (match[0] in ")]}")
        if match[0] == "," and depth == 0:
            parts.append(text[begin : match.start()])
            begin = match.end()
    parts.append(text[begin:])
    return tuple(part for part in (_COMMENT.sub("", part).strip() for part in parts) if part)
