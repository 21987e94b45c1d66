"""Errors of `te-jax` on stderr: one sentence, without a traceback."""

import difflib
import sys
from collections.abc import Collection


class UserError(Exception):
    """One sentence about something that the user can put right. `te-jax` prints it and exits with status 2."""


class DamagedError(Exception):
    """A checkpoint is not what was saved, and in what."""


def note(text: str) -> None:
    """Prints a sentence about something that is no error."""
    print(f"te-jax: note: {text}", file=sys.stderr)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of the host or of a device was exhausted. XLA has no error type of its own for that."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)


def choose(option: str, value: str, known: Collection[str]) -> None:
    """Raises UserError unless an option's value is one of those that there are."""
    if value not in known:
        raise UserError(f"--{option} {value} is unknown{guess(value, known)}: choose one of {', '.join(known)}")


def guess(word: str, known: Collection[str]) -> str:
    """What may have been meant by a word, for the middle of a sentence."""
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
