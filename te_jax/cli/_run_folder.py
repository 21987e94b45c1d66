"""The folder of a training run: a log that says what happened and checkpoints from which it can go on.

    log.jsonl      a header, then one record for every step and every validation, in order
    checkpoints/   the two latest states, each with checksums
    loss.png       the curves of the log

Every record up to a step is on disk before the checkpoint of that step is. When a run is resumed, the log is cut off
after the checkpoint that it goes on from, and what followed is written again, the same. A run that goes on with other
options gets another header there; the last header counts.

A record ends with the CRC-32 of the record without it, as "crc32"; older versions of te_jax did not write it. A line
that does not match is damaged and does not count.
"""

import contextlib
import fcntl
import json
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import jax

from te_jax.cli.errors import DamagedError, UserError, note

__all__ = ["RunFolder"]

_LOG = "log.jsonl"
_CHECKPOINTS = "checkpoints"
_CRC = b', "crc32": '
_RUNS = Path("runs")


class RunFolder:
    """A run on disk. One process at a time holds it.

    Args:
      path: the folder.
      log: its log, open for reading and writing and locked.
      header: a record with the run's "options".
    """

    def __init__(self, path: Path, log: BinaryIO, header: dict[str, Any]):
        from te_jax.cli._checkpoints import Checkpoints

        self.path = path
        self.header = header
        self._log = log
        self._checkpoints = Checkpoints(path / _CHECKPOINTS)
        self._writer = ThreadPoolExecutor(max_workers=1)
        self._saving: Future[None] | None = None

    @classmethod
    def create(cls, path: Path, header: dict[str, Any]) -> "RunFolder":
        """Starts a run in a folder, which is made if it does not exist.

        Raises:
          UserError: the folder cannot be written, or holds a run that has taken a step.
        """
        if any(record is None or record["kind"] == "train" for _, record in _read(path)) or _has_checkpoints(path):
            raise UserError(f"--out {path} already holds a run: continue it with --resume or choose another folder")
        with writing(path) as undo:
            path.mkdir(parents=True, exist_ok=True)
            log = undo.enter_context(_open_locked(path))
            log.truncate(0)
            folder = cls(path, log, header)
            folder.append(header)
            undo.pop_all()
        return folder

    @classmethod
    def resume(cls, path: Path, header: dict[str, Any] | None = None) -> "RunFolder":
        """Opens a run, cuts its log off after the latest checkpoint, and adds the header if it has other options.

        Raises:
          UserError: the folder holds no run, its header is lost, it cannot be written, or it is in use.
        """
        stored = read_header(path)
        if stored is None:
            raise UserError(f"--out {path} holds no run to resume: leave --resume out to start one")
        with writing(path) as undo:
            log = undo.enter_context(_open_locked(path))
            folder = cls(path, log, header or stored)
            undo.callback(folder._checkpoints.close)
            problems = folder._cut_after(folder.latest_step)
            undo.pop_all()
        if problems and folder.latest_step:
            note(f"--out {path} has a damaged log ({'; '.join(problems)}): the other records are kept")
        return folder

    @property
    def latest_step(self) -> int:
        """Step of the latest complete checkpoint, 0 if there is none."""
        return max(self._checkpoints.steps, default=0)

    def append(self, record: dict[str, Any]) -> None:
        """Adds a record to the log.

        Raises:
          UserError: the folder cannot be written any more.
        """
        with writing(self.path):
            text = json.dumps(record).encode()
            self._log.write(b"%s%s%d}\n" % (text[:-1], _CRC, zlib.crc32(text)))
            self._log.flush()

    def records(self, kind: str) -> list[dict[str, Any]]:
        """The records of one kind ("train" or "validation"), in order."""
        return [record for _, record in _read(self.path) if record is not None and record["kind"] == kind]

    def save(self, step: int, state: Any) -> None:
        """Writes a checkpoint: complete when this returns, and not there at all if the process is killed before.

        Args:
          step: number of steps taken.
          state: pytree of jax arrays.

        Raises:
          UserError: the folder cannot be written any more.
        """
        with writing(self.path):
            os.fsync(self._log.fileno())
            self._checkpoints.save(step, state)

    def save_behind(self, step: int, state: Any) -> None:
        """Copies a state to host memory and writes it while training goes on; waits for the checkpoint before it.

        Args:
          step, state: see `save`. The arrays may be donated when this returns.

        Raises:
          UserError: the checkpoint before could not be written.
        """
        self.finish_saving()
        self._saving = self._writer.submit(self.save, step, jax.device_get(state))

    def finish_saving(self) -> None:
        """Waits until the last checkpoint is written; raises UserError if it cannot be."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def restore(self, like: Any) -> Any:
        """The state of the newest intact checkpoint, whose step `latest_step` then is.

        Damaged ones are renamed to STEP.damaged, the log is cut off after the intact one, and a note names both.

        Args:
          like: pytree of `jax.ShapeDtypeStruct` with shardings.

        Returns:
          The same pytree of jax arrays, placed by those shardings.

        Raises:
          UserError: no checkpoint is intact, or the newest intact one cannot be restored.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self._checkpoints.steps):
            try:
                state, verified = self._checkpoints.restore(step, like)
            except DamagedError as error:
                damaged[step] = str(error)
                continue
            if damaged:
                with writing(self.path):
                    for former in damaged:
                        self._checkpoints.set_aside(former)
                    self._cut_after(step)
                note(f"--out {self.path} has a damaged checkpoint ({_list(damaged)}): the run goes on from step {step}")
            if not verified:
                note(f"--out {self.path}: the checkpoint of step {step} has no checksums, so damage would go unnoticed")
            return state
        raise UserError(
            f"--out {self.path} holds no intact checkpoint ({_list(damaged)}): start another run, or delete "
            f"{self.path / _CHECKPOINTS} to begin this one again at step 0"
        )

    def close(self) -> None:
        """Lets go of the folder."""
        self._writer.shutdown()
        self._checkpoints.close()
        self._log.close()

    def _cut_after(self, step: int) -> list[str]:
        """Cuts the log off after the records up to a step, and says what is wrong with them."""
        end, header, unreadable, recorded = 0, None, [], set[int]()
        for number, (offset, record) in enumerate(_read(self.path), start=1):
            if record is None:
                unreadable.append(number)
                continue
            if record.get("step", 0) > step or (step == 0 and record["kind"] != "header"):
                break
            end, header = offset, record if record["kind"] == "header" else header
            recorded |= {record["step"]} if record["kind"] == "train" else set()
        self._log.truncate(end)
        self._log.seek(end)
        if header is None or header["options"] != self.header["options"]:
            self.append(self.header)
        problems = [f"line {number} is unreadable" for number in unreadable]
        return problems + [f"{step - len(recorded)} of {step} steps have no record"] * (len(recorded) < step)


def _list(damaged: dict[int, str]) -> str:
    return "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())


def new_path() -> Path:
    """A folder, made here, for a run that names none: runs/train-001, or one number above all that are there."""
    with writing(_RUNS):
        _RUNS.mkdir(exist_ok=True)
        while True:
            path = _RUNS / f"train-{max(_numbered(), default=0) + 1:03}"
            try:
                path.mkdir()
            except FileExistsError:  # another run has just taken it
                continue
            return path


def newest_path() -> Path:
    """The latest of these folders.

    Raises:
      UserError: there is none.
    """
    numbered = {number: path for number, path in _numbered().items() if path.is_dir()}
    if not numbered:
        raise UserError(f"--resume finds no {_RUNS}/train-…: name the folder of the run with --out")
    return numbered[max(numbered)]


def _numbered() -> dict[int, Path]:
    found = {path.name.removeprefix("train-"): path for path in _RUNS.glob("train-*")}
    return {int(number): path for number, path in found.items() if number.isdecimal()}


def read_header(path: Path) -> dict[str, Any] | None:
    """The last header of the run in a folder, None where there is no run.

    Raises:
      UserError: the folder cannot be read, or its log has lost the header.
    """
    records = [record for _, record in _read(path)]
    headers = [record for record in records if record is not None and record["kind"] == "header"]
    if not headers and (records or _has_checkpoints(path)):
        raise UserError(f"{path / _LOG} has lost its header, without which no run goes on: start another run")
    return headers[-1] if headers else None


def _has_checkpoints(path: Path) -> bool:
    return any((path / _CHECKPOINTS).glob("[0-9]*"))


def _read(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Each record of a folder's log, if there is one, and the offset behind it. None stands for a damaged line.

    A last line that a killed process left without its end does not count.
    """
    offset = 0
    try:
        lines = (path / _LOG).open("rb")
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise UserError(f"--out {path} cannot be read: {error.strerror or error}") from error
    with lines:
        for line in lines:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            yield offset, _parse(line)


def _parse(line: bytes) -> dict[str, Any] | None:
    text, found, checksum = line.rpartition(_CRC)
    if found and checksum != b"%d}\n" % zlib.crc32(text + b"}"):
        return None
    try:
        record = json.loads(line)
    except ValueError:  # no JSON, or no text
        return None
    if not isinstance(record, dict) or "kind" not in record:
        return None
    record.pop("crc32", None)
    return record


@contextlib.contextmanager
def writing(path: Path) -> Iterator[contextlib.ExitStack]:
    """A stack that is unwound on every way out, and an error of the file system told as one sentence.

    Raises:
      UserError: the folder `path` cannot be written.
    """
    with contextlib.ExitStack() as undo:
        try:
            yield undo
        except OSError as error:
            raise UserError(f"--out {path} cannot be written: {error.strerror or error}") from error


def _open_locked(path: Path) -> BinaryIO:
    log = os.fdopen(os.open(path / _LOG, os.O_RDWR | os.O_CREAT, 0o666), "rb+")
    try:
        # The kernel drops this lock with the process, however that ends.
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        log.close()
        raise UserError(f"--out {path} is in use by another te-jax train") from error
    return log
