"""Programs that XLA compiles for an H200 on a machine without a GPU: when they copy, and how much memory they need."""

import dataclasses
import re

from xla_targets import compiled, know_handlers, mesh, needs_compiler, without_autotuning

__all__ = ["compiled", "copies", "know_handlers", "mesh", "needs_compiler", "without_autotuning"]


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy between device and host: where it begins and ends in the schedule, and the GEMMs in between."""

    to_host: bool
    start: int
    done: int
    gemms: int


def copies(program):
    """All copies between device and host, in the order in which they begin."""
    entry = program.as_text().split("\nENTRY ")[1]
    lines = [match for match in map(_INSTRUCTION.match, entry.splitlines()) if match]
    gemms = [place for place, line in enumerate(lines) if "dot" in line["name"]]
    starts = {line["name"]: (place, line["type"]) for place, line in enumerate(lines) if line["op"] == "copy-start"}
    found = []
    for done, line in enumerate(lines):
        if line["op"] != "copy-done":
            continue
        start, type_ = starts[line["operand"]]
        result, operand = re.findall(r"\[[\d,]*\]\{([^}]*)\}", type_)[:2]
        if ("S(5)" in result) != ("S(5)" in operand):
            found.append(Copy("S(5)" in result, start, done, sum(start < place < done for place in gemms)))
    return sorted(found, key=lambda copy: copy.start)


_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<type>.*?) (?P<op>[\w-]+)\(%?(?P<operand>[\w.-]*)")
