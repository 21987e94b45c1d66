"""The folder of a training run: a log that says what happened and checkpoints from which it can go on.

    log.jsonl      a header, then one record for every step and every validation, in order
    checkpoints/   the two latest states, each written aside and renamed when complete
    loss.png       the curves of the log

Every record up to a step is on disk before the checkpoint of that step is. When a run is resumed, the log is cut off
after the checkpoint that it goes on from, and what followed is written again, the same. A run that goes on with other
options gets another header there; the last header counts.
"""

import contextlib
import fcntl
import gc
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from te_jax._core.terminal import reason_of
from te_jax.cli.errors import UserError, is_out_of_memory, note

__all__ = ["RunFolder"]

_LOG = "log.jsonl"
_CHECKPOINTS = "checkpoints"
_RUNS = Path("runs")


class RunFolder:
    """A run on disk. One process at a time holds it.

    Args:
      path: the folder.
      log: its log, open for reading and writing and locked.
      header: a record with the run's "options".
    """

    def __init__(self, path: Path, log: BinaryIO, header: dict[str, Any]):
        import orbax.checkpoint as ocp

        self.path = path
        self.header = header
        self._log = log
        # Synchronous: when save() has returned, that step is what a resumed run starts from.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        # With its handler, a manager does not look at the newest checkpoint, which may be damaged, for what it holds.
        self._checkpoints = ocp.CheckpointManager(
            (path / _CHECKPOINTS).absolute(), options=options, item_handlers=ocp.StandardCheckpointHandler()
        )

    @classmethod
    def create(cls, path: Path, header: dict[str, Any]) -> "RunFolder":
        """Starts a run in a folder, which is made if it does not exist.

        Raises:
          UserError: the folder cannot be written, or holds a run that has taken a step.
        """
        if any(record["kind"] == "train" for _, record in _read(path)):
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
          UserError: the folder holds no run, cannot be written, or is in use.
        """
        stored = read_header(path)
        if stored is None:
            raise UserError(f"--out {path} holds no run to resume: leave --resume out to start one")
        with writing(path) as undo:
            log = undo.enter_context(_open_locked(path))
            folder = cls(path, log, header or stored)
            undo.callback(folder._checkpoints.close)
            folder._cut_after(folder.latest_step)
            undo.pop_all()
        return folder

    @property
    def latest_step(self) -> int:
        """Step of the latest complete checkpoint, 0 if there is none."""
        return self._checkpoints.latest_step() or 0

    def append(self, record: dict[str, Any]) -> None:
        """Adds a record to the log.

        Raises:
          UserError: the folder cannot be written any more.
        """
        with writing(self.path):
            self._log.write(json.dumps(record).encode() + b"\n")
            self._log.flush()

    def records(self, kind: str) -> list[dict[str, Any]]:
        """The records of one kind ("train" or "validation"), in order."""
        return [record for _, record in _read(self.path) if record["kind"] == kind]

    def save(self, step: int, state: Any) -> None:
        """Writes a checkpoint: complete when this returns, and not there at all if the process is killed before.

        Args:
          step: number of steps taken.
          state: pytree of jax arrays.

        Raises:
          UserError: the folder cannot be written any more.
        """
        import orbax.checkpoint as ocp

        with writing(self.path):
            os.fsync(self._log.fileno())
            try:
                self._checkpoints.save(step, args=ocp.args.StandardSave(state))
                self._checkpoints.wait_until_finished()
            except ValueError as error:
                # What tensorstore makes of an error of the file system.
                if (code := re.search(r"os_error_code='(\d+)'", str(error))) is None:
                    raise
                raise OSError(int(code[1]), os.strerror(int(code[1]))) from error

    def restore(self, like: Any) -> Any:
        """The state of the newest intact checkpoint, whose step `latest_step` then is.

        Damaged ones are renamed to STEP.damaged, the log is cut off after the intact one, and a note names both.

        Args:
          like: pytree of `jax.ShapeDtypeStruct` with shardings.

        Returns:
          The same pytree of jax arrays, placed by those shardings.

        Raises:
          UserError: no checkpoint is intact.
        """
        damaged: dict[int, str] = {}
        for step in sorted(self._checkpoints.all_steps(), reverse=True):
            try:
                state = self._read_checkpoint(step, like)
            except _DamagedError as error:
                damaged[step] = str(error)
                continue
            if damaged:
                self._set_aside(damaged, step)
            return state
        raise UserError(f"--out {self.path} holds no checkpoint that can be read ({_list(damaged)}): start another run")

    def close(self) -> None:
        """Lets go of the folder."""
        self._checkpoints.close()
        self._log.close()

    def _read_checkpoint(self, step: int, like: Any) -> Any:
        import orbax.checkpoint as ocp

        try:
            return self._checkpoints.restore(step, args=ocp.args.StandardRestore(like))
        except Exception as error:  # a damaged file raises errors of many types, some of them plain `Exception`
            if is_out_of_memory(error) or isinstance(error, PermissionError):
                raise
            reason = reason_of(error)
        # Reads that failed beside the first one tell this hook when they are freed, each with a traceback.
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        gc.collect()
        sys.unraisablehook = hook
        raise _DamagedError(reason)

    def _set_aside(self, damaged: dict[int, str], intact: int) -> None:
        with writing(self.path):
            for step in damaged:
                path = self.path / _CHECKPOINTS / str(step)
                shutil.rmtree(f"{path}.damaged", ignore_errors=True)
                path.rename(f"{path}.damaged")
            self._checkpoints.reload()
            self._cut_after(intact)
        note(f"--out {self.path} has a damaged checkpoint ({_list(damaged)}): the run goes on from step {intact}")

    def _cut_after(self, step: int) -> None:
        end, header = 0, None
        for offset, record in _read(self.path):
            if record.get("step", 0) > step or (step == 0 and record["kind"] != "header"):
                break
            end, header = offset, record if record["kind"] == "header" else header
        self._log.truncate(end)
        self._log.seek(end)
        if header is None or header["options"] != self.header["options"]:
            self.append(self.header)


class _DamagedError(Exception):
    """A checkpoint cannot be read."""


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
      UserError: the folder cannot be read, or its log is damaged.
    """
    headers = [record for _, record in _read(path) if record["kind"] == "header"]
    return headers[-1] if headers else None


def _read(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each record of a folder's log, if there is one, and the offset behind it.

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
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            try:
                yield offset, json.loads(line)
            except ValueError as error:  # no JSON, or no text
                raise UserError(f"{path / _LOG} is damaged at line {number}: the run cannot be continued") from error


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
