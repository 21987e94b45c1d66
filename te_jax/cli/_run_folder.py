"""The folder of a training run: a log that says what happened and checkpoints from which it can go on.

    log.jsonl      a header, then one record for every step, every validation, and statistics, in order
    checkpoints/   the two latest states, each with checksums
    loss.png       the curves of the log
    statistics.png those of its statistics, if there are any

Every record up to a step is on disk before the checkpoint of that step is. When a run is resumed and its checkpoint is
restored, the log is cut off after that step, and what followed is written again, the same. A run that goes on with
other options gets another header there; the last header counts.

A record ends with the CRC-32 of the record without it, as "crc32"; older versions of te_jax did not write it. A line
that does not match is damaged and does not count.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import jax

from te_jax._core.terminal import reason_of
from te_jax.cli import _log, _processes
from te_jax.cli._log import LOG, line_of
from te_jax.cli.errors import DamagedError, UserError, is_out_of_memory, note

__all__ = ["RunFolder", "RunShare"]

_CHECKPOINTS = "checkpoints"
_RUNS = Path("runs")
_GO_ON = "while the run went on, so the run stops: continue from its last checkpoint with --resume"


class StoredRun(NamedTuple):
    """A run that can go on."""

    path: Path
    header: dict[str, Any]  # the last one of its log


class RunFolder:
    """A run on disk. One process at a time holds it.

    Args:
      path: the folder.
      header: a record with the run's "options".
      resources: lets go of the folder, and receives what else `close` has to close.
    """

    def __init__(self, path: Path, header: dict[str, Any], resources: contextlib.ExitStack):
        from te_jax.cli._checkpoints import Checkpoints

        self.path = path
        self.header = header
        self._resources = resources
        self._log = _open_locked_log(path, resources)
        self._checkpoints = Checkpoints(path / _CHECKPOINTS)
        resources.callback(self._checkpoints.close)
        self._writer = ThreadPoolExecutor(max_workers=1)
        self._saving: Future[None] | None = None

    @classmethod
    def create(cls, path: Path, header: dict[str, Any]) -> "RunFolder":
        """Starts a run in a folder, which is made if it does not exist.

        Raises:
          UserError: the folder cannot be written, or holds a run that has taken a step.
        """
        with writing(path) as undo:
            path.mkdir(parents=True, exist_ok=True)
            _lock_folder(path, undo)
            begun = any(record is None or record["kind"] == "train" for _, record in _log.read(path))
            if begun or _has_checkpoints(path):
                raise UserError(f"--out {path} already holds a run: continue it with --resume or choose another folder")
            folder = cls(path, header, undo)
            folder._log.truncate(0)
            folder.append(header)
            folder._resources = undo.pop_all()
        return folder

    @classmethod
    def resume(cls, path: Path, header: dict[str, Any] | None = None) -> "RunFolder":
        """Opens a run. A run with checkpoints is left as it is until `restore`; one without begins again.

        Args:
          path: the folder.
          header: that of a run which goes on with other options.

        Raises:
          UserError: the folder holds no run, its header is lost, it cannot be written, or it is in use.
        """
        with writing(path) as undo:
            if path.is_dir():
                _lock_folder(path, undo)
            stored = read_header(path)
            folder = cls(path, header or stored, undo)
            if not folder.latest_step:
                folder._cut_after(0)
            folder._resources = undo.pop_all()
        return folder

    @property
    def latest_step(self) -> int:
        """Step of the latest complete checkpoint, 0 if there is none."""
        return max(self._checkpoints.steps, default=0)

    def append(self, record: dict[str, Any]) -> None:
        """Adds a record to the log.

        Raises:
          UserError: the folder cannot be written any more, or another program has changed the log.
        """
        line = memoryview(line_of(record))
        with writing(self.path):
            self._check_log()
            if os.fstat(self._log.fileno()).st_size != self._log.tell():
                raise UserError(f"{self.path / LOG} was changed by another program {_GO_ON}")
            while line:
                line = line[self._log.write(line) :]

    def records(self, kind: str) -> list[dict[str, Any]]:
        """The records of one kind ("train", "validation" or "statistics"), in order.

        Raises:
          UserError: another program has replaced the log.
        """
        self._check_log()
        return _log.records(self.path, kind)

    def _check_log(self) -> None:
        """Raises UserError unless the log in the folder is the file that this run writes."""
        try:
            present = (self.path / LOG).stat()
        except FileNotFoundError:
            raise UserError(
                f"{self.path / LOG} was moved or removed while the run went on, so the run stops: continue it with "
                "--resume in its new place, or start another run"
            ) from None
        if not os.path.samestat(present, os.fstat(self._log.fileno())):
            raise UserError(f"{self.path / LOG} was replaced by another file {_GO_ON}")

    def _write_log(self) -> None:
        self._check_log()
        os.fsync(self._log.fileno())

    def save(self, step: int, state: Any) -> None:
        """Writes a checkpoint: complete when this returns, and not there at all if the process is killed before.

        Args:
          step: number of steps taken.
          state: pytree of jax arrays.

        Raises:
          UserError: the folder cannot be written any more, or another program has replaced or removed the log.
        """
        self._begin_saving(step, state)
        self._finish_saving(step)

    def _begin_saving(self, step: int, state: Any) -> None:
        with writing(self.path):
            self._check_log()
            self._checkpoints.begin(step, state)

    def _finish_saving(self, step: int) -> None:
        with writing(self.path):
            self._write_log()
            self._checkpoints.finish(step)
            self._check_log()

    def save_behind(self, step: int, state: Any) -> None:
        """Copies a state to host memory and writes it while training goes on; waits for the checkpoint before it.

        Args:
          step, state: see `save`. The arrays may be donated when this returns.

        Raises:
          UserError: the checkpoint before could not be written.
        """
        self.finish_saving()
        # What is written would be read where it is, and so could not be donated.
        state = jax.block_until_ready(jax.tree.map(_copied_on_host, state))
        if _processes.count() == 1:
            self._saving = self._writer.submit(self.save, step, jax.device_get(state))
        else:  # each process copies what it writes
            self._begin_saving(step, state)
            self._saving = self._writer.submit(self._finish_saving, step)

    def finish_saving(self) -> None:
        """Waits until the last checkpoint is written; raises UserError if it cannot be."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def restore(self, like: Any) -> Any:
        """The state of the newest intact checkpoint, whose step `latest_step` then is.

        The log is cut off after that step, and gets the header of `resume` if that has other options. Damaged
        checkpoints are renamed to STEP.damaged. Notes name them and damaged records.

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
            with writing(self.path):
                for former in damaged:
                    self._checkpoints.set_aside(former)
                problems = self._cut_after(step)
            if damaged:
                note(f"--out {self.path} has a damaged checkpoint ({_list(damaged)}): the run goes on from step {step}")
            if problems:
                note(f"--out {self.path} has a damaged log ({'; '.join(problems)}): the other records are kept")
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
        self._resources.close()

    def _cut_after(self, step: int) -> list[str]:
        """Cuts the log off after the records up to a step, and says what is wrong with them."""
        self._check_log()
        lines = list(_log.read(self.path))
        steps = [None if record is None or record["kind"] == "header" else record["step"] for _, record in lines]
        # A larger step before one of these had a digit changed, in a log without checksums. A run that begins again has
        # none: it repeats the validation of step 0 as well.
        within = [line for line, each in enumerate(steps, start=1) if each is not None and 0 < step >= each]
        beyond = (line for line in range(max(within, default=0), len(lines)) if steps[line] is not None)
        lines = lines[: next(beyond, len(lines))]
        records = [record for _, record in lines if record is not None]
        headers = [record for record in records if record["kind"] == "header"]
        recorded = {record["step"] for record in records if record["kind"] == "train" and record["step"] <= step}
        unreadable = [line for line, (_, record) in enumerate(lines, start=1) if record is None]

        end = lines[-1][0] if lines else 0
        if self._log.seek(0, os.SEEK_END) != end:  # a log that stays as it is stays older than its figures
            self._log.truncate(end)
            self._log.seek(0, os.SEEK_END)
        if not headers or headers[-1]["options"] != self.header["options"]:
            self.append(self.header)
        problems = [f"line {line} is unreadable" for line in unreadable]
        return problems + [f"{step - len(recorded)} of {step} steps have no record"] * (len(recorded) < step)


class RunShare(RunFolder):
    """The part of another process than the first, which has the lock and the log: its shards of the checkpoints.

    Args:
      path: the folder.
      latest_step: that of process 0.

    Raises:
      UserError: this process does not see the folder of process 0.
    """

    def __init__(self, path: Path, latest_step: int):
        from te_jax.cli._checkpoints import Checkpoints

        if not (path / LOG).exists():
            raise UserError(
                f"process {_processes.index()} does not see {path / LOG}, which process 0 has: --out must be on a "
                "file system that all processes share"
            )
        self.path = path
        self._latest_step = latest_step
        self._resources = contextlib.ExitStack()
        self._checkpoints = Checkpoints(path / _CHECKPOINTS)
        self._resources.callback(self._checkpoints.close)
        self._writer = ThreadPoolExecutor(max_workers=1)
        self._saving = None

    @property
    def latest_step(self) -> int:
        return self._latest_step

    def append(self, record: dict[str, Any]) -> None:
        pass

    def _check_log(self) -> None:
        pass

    def _write_log(self) -> None:
        pass

    def restore(self, like: Any) -> Any:
        self._latest_step, state = self._checkpoints.restore_with_first(like)
        return state


def _copied_on_host(leaf: Any) -> Any:
    """A copy of an array in host memory; other arrays as they are."""
    if leaf.sharding.memory_kind != "pinned_host":
        return leaf
    return jax.device_put(leaf, leaf.sharding, may_alias=False)


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


def newest_path(option: str = "--out") -> Path:
    """The latest of these folders.

    Args:
      option: that names another one, for the error.

    Raises:
      UserError: there is none.
    """
    numbered = {number: path for number, path in _numbered().items() if path.is_dir()}
    if not numbered:
        raise UserError(f"there is no {_RUNS}/train-… here: name the folder of the run with {option}")
    return numbered[max(numbered)]


def _numbered() -> dict[int, Path]:
    paths = {path.name.removeprefix("train-"): path for path in _RUNS.glob("train-*")}
    # "train-0001" and other digits than 0 to 9 are not names that `new_path` gives.
    return {int(number): path for number, path in paths.items() if number.isdecimal() and f"{int(number):03}" == number}


def read_header(path: Path, option: str = "--out") -> dict[str, Any]:
    """The last header of the run in a folder.

    Args:
      path: the folder.
      option: that names it, for errors.

    Raises:
      UserError: the folder holds no run or cannot be read, or its log has lost the header.
    """
    records = [record for _, record in _log.read(path, option)]
    headers = [record for record in records if record is not None and record["kind"] == "header"]
    if not headers and (records or _has_checkpoints(path)):
        raise UserError(f"{path / LOG} has lost its header, without which no run goes on: start another run")
    if not headers:
        way_out = "leave --resume out to start one" if option == "--out" else "name the --out of te-jax train"
        raise UserError(f"{option} {path} holds no run: {way_out}")
    return headers[-1]


def read_state(path: Path, like: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The last step that a run saved, and a part of the state of its model then. The run may go on meanwhile.

    Args:
      path: of the run.
      like: fields of `TrainState`, or parts of them, as pytrees of `jax.ShapeDtypeStruct` with shardings.

    Raises:
      UserError: no checkpoint is intact, or it cannot be read.
    """
    from te_jax.cli._checkpoints import Checkpoints

    if not _has_checkpoints(path):
        raise UserError(f"{path} holds no checkpoint yet: train for longer, or let the run end")
    with contextlib.closing(Checkpoints(path / _CHECKPOINTS)) as checkpoints:
        damaged: dict[int, str] = {}
        for step in reversed(checkpoints.steps):
            try:
                return step, checkpoints.restore_part(step, {"loss": like})["loss"]
            except DamagedError as error:
                damaged[step] = str(error)
            except Exception as error:  # a damaged file without checksums raises errors of many types
                if is_out_of_memory(error):
                    raise
                raise UserError(f"step {step} of {path} cannot be read ({reason_of(error)})") from error
    raise UserError(f"{path} holds no intact checkpoint ({_list(damaged)}): train it again")


def _has_checkpoints(path: Path) -> bool:
    return any((path / _CHECKPOINTS).glob("[0-9]*"))


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
            # The error of a file in the folder names that file.
            place = f"{error.filename}: " if error.filename not in (None, path, str(path)) else ""
            raise UserError(f"--out {path} cannot be written: {place}{error.strerror or error}") from error


def _lock_folder(path: Path, undo: contextlib.ExitStack) -> None:
    """Keeps out other processes of this host, also where an editor or a copy has replaced the log."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    undo.callback(os.close, folder)
    _lock(folder, path)


def _open_locked_log(path: Path, undo: contextlib.ExitStack) -> FileIO:
    """Keeps out those of other hosts, which see locks of files over NFS, but not those of folders."""
    log = FileIO(os.open(path / LOG, os.O_RDWR | os.O_CREAT, 0o666), "r+")
    _lock(undo.enter_context(log).fileno(), path)
    return log


def _lock(descriptor: int, path: Path) -> None:
    try:
        # The kernel drops this lock with the process, however that ends.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"--out {path} is in use by another te-jax train") from error
