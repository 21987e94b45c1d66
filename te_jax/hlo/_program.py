"""An optimized program's text as computations that call each other, with the lines of source that asked for them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from te_jax.hlo._hlo import Instruction, unquoted

_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[^\s(]+) (?:.*)?\{")
_LINE = re.compile(r"\s+(?:ROOT )?%?(?P<name>[^\s=]+) = (?P<rest>.*)")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
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
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"?(\d+)')


class Program:
    """A program's text, split into the tables of source lines at its head and its computations.

    Attributes:
      devices: how many it runs on.
      computations: by name, the text of each instruction by its name.
    """

    def __init__(self, text: str):
        self._tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
        self.computations: dict[str, dict[str, str]] = {}
        self._entry = ""
        header, *lines = text.split("\n")
        count = {name: int(n) for name, n in re.findall(r"\b(num_partitions|replica_count)=(\d+)", header)}
        self.devices = count.get("num_partitions", 1) * count.get("replica_count", 1)
        rows: dict[int, str] | None = None
        instructions: dict[str, str] = {}
        for line in lines:
            if match := _LINE.fullmatch(line):
                instructions[match["name"]] = match["rest"]
            elif line in self._tables:
                rows = self._tables[line]
            elif match := _COMPUTATION.fullmatch(line):
                instructions = self.computations[match["name"]] = {}
                self._entry = match["name"] if match["entry"] else self._entry
            elif rows is not None and (match := re.fullmatch(r"(\d+) (.*)", line)):
                rows[int(match[1])] = match[2]

    def instructions(self, opcodes: Collection[str]) -> dict[str, dict[str, Instruction]]:
        """By computation and name, those with one of the opcodes, and those that run another computation."""
        # Programs have tens of thousands of lines: only these are read closely.
        pattern = re.compile(rf" (?:{'|'.join(map(re.escape, opcodes))})\(|\b(?:{'|'.join(_CALLS)})=")
        return {
            name: {key: Instruction.parse(rest) for key, rest in lines.items() if pattern.search(rest)}
            for name, lines in self.computations.items()
        }

    def times(self, instructions: Mapping[str, Mapping[str, Instruction]]) -> dict[str, int | None]:
        """How often each computation runs when the program runs once, by what `instructions` gave; None: not known."""
        callers: dict[str, list[tuple[str, int | None]]] = {name: [] for name in instructions}
        for caller, its in instructions.items():
            for instruction in its.values():
                for called, times in _called(instruction):
                    if called in callers:
                        callers[called].append((caller, times))
        counts: dict[str, int | None] = {}

        def count(name: str) -> int | None:
            if name not in counts:
                counts[name] = _sum([_product(count(caller), times) for caller, times in callers[name]])
            return counts[name]

        counts[self._entry] = 1
        return {name: count(name) for name in instructions}

    def source(self, computation: str, name: str, instruction: Instruction) -> str | None:
        """File and line of an instruction, outside of te_jax if there is one; or else of what reads its result."""
        return self._source(instruction.metadata) or self._source_of_reader(name, self.computations[computation])

    def _source(self, metadata: Mapping[str, str]) -> str | None:
        if "source_file" in metadata:
            return _location(metadata["source_file"], metadata.get("source_line", ""))
        frames = list(self._frames(int(metadata.get("stack_frame_id", 0))))
        outside = [frame for frame in frames if not frame[0].startswith(_PACKAGE)]
        return _location(*(outside or frames)[0]) if frames else None

    def _frames(self, number: int) -> Iterator[tuple[str, str]]:
        """File and line of a stack frame and its callers."""
        # The first frame has no caller, 0; some versions print numbers of callers one too high.
        none = _numbers(self._tables["StackFrames"].get(1, "")).get("parent_frame_id", 0)
        while frame := _numbers(self._tables["StackFrames"].get(number, "")):
            place = _numbers(self._tables["FileLocations"].get(frame["file_location_id"], ""))
            if name := self._tables["FileNames"].get(place.get("file_name_id", 0)):
                yield unquoted(name), str(place.get("line", ""))
            caller = frame.get("parent_frame_id", 0) - none
            number = caller if caller < number else 0

    def _source_of_reader(self, name: str, lines: Mapping[str, str]) -> str | None:
        """The source of the first instruction that reads this one, or what is made of it without a source."""
        made = {name}
        for reader, rest in lines.items():
            if any(each in rest for each in made):
                instruction = Instruction.parse(rest)
                if made.intersection(name_of(operand)[0] for operand in instruction.operands):
                    if source := self._source(instruction.metadata):
                        return source
                    made.add(reader)
        return None


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if counts and len(known) == len(counts) else None


def _product(outer: int | None, inner: int | None) -> int | None:
    return None if outer is None or inner is None else outer * inner


def _called(instruction: Instruction) -> Iterator[tuple[str, int | None]]:
    """The computations that an instruction runs, with the number of times, None where that is not known."""
    if instruction.opcode.endswith(("-done", "-update")):  # names what its start has run
        return
    match = _TRIP_COUNT.search(instruction.attributes.get("backend_config", ""))
    for attribute, times in _CALLS.items():
        for name in re.findall(r"%?([^\s{},%]+)", instruction.attributes.get(attribute, "")):
            yield name, times(int(match[1]) if match else None)


def name_of(operand: str) -> tuple[str, str]:
    """The name of an operand, and the number of its element of a tuple or ""."""
    name, _, element = operand.split(" ")[-1].removeprefix("%").partition("#")
    return name, element


_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


def _numbers(text: str) -> dict[str, int]:
    """Reads {file_name_id=1 line=58}."""
    return {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", text)}


def _location(path: str, line: str) -> str:
    relative = os.path.relpath(path) if os.path.isabs(path) else path
    shown = path if relative.startswith(os.pardir) else relative
    return f"{shown}:{line}" if line else shown
