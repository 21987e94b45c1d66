"""The text of XLA's optimized programs, `compiled.as_text()`: instructions, the arrays in their types, and brackets."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
"""XLA's operations that exchange data between devices."""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array in a compiled program: on every device, its local shard.

    Attributes:
      dtype: XLA's name of it, for example "bf16", "f32", "s32" or "pred".
      shape: its dimensions.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size without padding; elements of less than a byte are packed."""
        return (self.elements * _bits(self.dtype) + 7) // 8


def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    digits = re.search(r"\d+", dtype)
    if digits is None:
        raise ValueError(f"{dtype!r} is no XLA dtype")
    return int(digits[0])


_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\d+)')


@dataclasses.dataclass(frozen=True)
class Instruction:
    """`%name = type opcode(operands), attribute=value, …`, all as text."""

    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> Instruction:
        """Reads what follows "%name = "."""
        end = closing_bracket(text, 0) + 1 if text.startswith("(") else text.index(" ")
        opening = text.index("(", end)
        closing = closing_bracket(text, opening)
        attributes: dict[str, str] = {}
        for part in split_at_commas(text[closing + 1 :]):
            name, _, value = part.partition("=")
            attributes[name] = value
        return cls(text[:end], text[end:opening].strip(), split_at_commas(text[opening + 1 : closing]), attributes)

    @property
    def result_type(self) -> str:
        """The type of what it results in: most asynchronous starts are typed (operands, results, …). That of an
        all-reduce is typed as its results, and by newer XLA as ((operands), results)."""
        pair = self.type.startswith("((" if self.opcode == "all-reduce-start" else "(")
        if self.opcode.endswith("-start") and pair:
            return split_at_commas(self.type[1:-1])[1]
        return self.type

    @property
    def metadata(self) -> dict[str, str]:
        """From {op_name="…" source_file="…" source_line=3} or {op_name="…" stack_frame_id=7}."""
        return {name: unquoted(value) for name, value in _FIELD.findall(self.attributes.get("metadata", ""))}


_ARRAY = re.compile(r"\b(?P<dtype>pred|[a-z]+\d[a-z0-9]*)\[(?P<shape>[\d,<= ]*)\]")


def arrays(type_: str) -> tuple[Buffer, ...]:
    """All arrays in a type, layouts aside; tokens are none."""
    return tuple(
        Buffer(match["dtype"], tuple(int(size) for size in re.findall(r"\d+", match["shape"])))
        for match in _ARRAY.finditer(type_)
    )


def unquoted(text: str) -> str:
    """Undoes C's escapes, where bytes beyond ASCII are octal."""
    if not text.startswith('"'):
        return text
    return text[1:-1].encode().decode("unicode_escape").encode("latin-1", "replace").decode("utf-8", "replace")


_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\],]')
_COMMENT = re.compile(r"/\*.*?\*/")


def closing_bracket(text: str, opening: int) -> int:
    """The place of the bracket that closes the one at `opening`; brackets within double quotes do not count."""
    depth = 0
    for match in _BRACKET.finditer(text, opening):
        depth += (match[0] in "([{") - (match[0] in ")]}")
        if depth == 0:
            return match.start()
    raise ValueError(f"a bracket is never closed in {text[:200]!r}")


def split_at_commas(text: str) -> tuple[str, ...]:
    """The parts between the commas outside all brackets and double quotes, without comments and blanks around."""
    parts, depth, begin = [], 0, 0
    for match in _BRACKET.finditer(text):
        depth += (match[0] in "([{") - (match[0] in ")]}")
        if match[0] == "," and depth == 0:
            parts.append(text[begin : match.start()])
            begin = match.end()
    parts.append(text[begin:])
    return tuple(part for part in (_COMMENT.sub("", part).strip() for part in parts) if part)
