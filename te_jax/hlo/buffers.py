"""Which arrays a compiled program makes, and how large they are."""

from __future__ import annotations

import re

import jax

from te_jax.hlo._hlo import Buffer, arrays

__all__ = ["Buffer", "buffers"]

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (?P<type>\S.*?) (?P<opcode>[a-z][\w\-]*)\(")


def buffers(program: jax.stages.Compiled | str, *opcodes: str) -> list[Buffer]:
    """Lists every array that an instruction of a compiled program results in, those inside fusions included.

        compiled = jax.jit(step, donate_argnums=0).lower(params, batch).compile()
        assert not [b for b in inspect.buffers(compiled, "copy", "copy-start") if b.bytes > 2**20]

    Args:
      program: what `jax.jit(f).lower(*args).compile()` returns, or its `as_text()`.
      opcodes: XLA operations such as "copy" or "custom-call", to list the results of these only.

    Returns:
      One entry for each array, in the order of the text.

    Raises:
      ValueError: the platform gives no text of its programs.
    """
    lines = text_of(program).splitlines()
    matches = [match for line in lines if (match := _INSTRUCTION.match(line))]
    return [array for match in matches if not opcodes or match["opcode"] in opcodes for array in arrays(match["type"])]


def text_of(program: jax.stages.Compiled | str) -> str:
    """The text of an optimized program."""
    text = program if isinstance(program, str) else program.as_text()
    if text is None:
        raise ValueError("the program is compiled for a platform that gives no text; compile it for CPU or GPU")
    return text
