"""The log of a training run: one JSON record a line, each with its checksum."""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from te_jax.cli import _statistics
from te_jax.cli.errors import UserError

LOG = "log.jsonl"
_CRC = b', "crc32": '


def line_of(record: dict[str, Any]) -> bytes:
    """A record as it stands in a log."""
    text = json.dumps(record).encode()
    return b"%s%s%d}\n" % (text[:-1], _CRC, zlib.crc32(text))


def records(path: Path, kind: str) -> list[dict[str, Any]]:
    """The intact records of one kind ("header", "train", "validation" or "statistics") in a folder's log, in order."""
    return [record for _, record in read(path) if record is not None and record["kind"] == kind]


def read(path: Path, option: str = "--out") -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Each record of a folder's log, if there is one, and the offset behind it. None stands for a damaged line.

    A last line that a killed process left without its end does not count.
    """
    offset = 0
    try:
        if (path / LOG).exists() and not (path / LOG).is_file():  # a pipe would be waited for
            raise UserError(f"{option} {path} cannot be read: {LOG} is no regular file")
        lines = (path / LOG).open("rb")
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise UserError(f"{option} {path} cannot be read: {error.strerror or error}") from error
    with lines:
        for line in lines:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            yield offset, _parse(line)


def _parse(line: bytes) -> dict[str, Any] | None:
    text, separator, checksum = line.rpartition(_CRC)
    if separator and checksum != b"%d}\n" % zlib.crc32(text + b"}"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # no JSON, no text, or brackets that no record nests so deeply
        return None
    if not isinstance(record, dict):
        return None
    record.pop("crc32", None)
    return record if _is_record(record) else None


def _is_record(values: dict[str, Any]) -> bool:
    """Whether they are a header, or the losses or the statistics of a step."""
    if values.get("kind") == "header":
        return isinstance(values.get("options"), dict)
    if values.get("kind") == "statistics":
        return type(values.get("step")) is int and values["step"] >= 0 and _statistics.is_record(values)
    losses = {name: value for name, value in values.items() if name not in ("kind", "step")}
    return (
        values.get("kind") in ("train", "validation")
        and type(values.get("step")) is int
        and values["step"] >= 0
        and "loss" in losses
        and all(isinstance(value, float) for value in losses.values())
    )
