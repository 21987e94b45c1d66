"""Checkpoints of a run, each complete or absent, and verified before it is restored.

    STEP/default/        the state, as orbax writes it
    STEP/checksums.json  CRC-32 of each file in default/; older versions of te_jax did not write it

A checkpoint is written to STEP.tmp, which is renamed when all of this is in it. STEP is a number without leading zeros;
entries of other names are left alone. Every process of a run writes and reads its parts of the arrays in default/, all
else is done by process 0.
"""

import contextlib
import functools
import json
import logging
import os
import re
import shutil
import sys
import warnings
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from te_jax._core.terminal import reason_of
from te_jax.cli import _processes
from te_jax.cli.errors import DamagedError, UserError, is_out_of_memory

__all__ = ["Checkpoints"]

_STATE = "default"
_CHECKSUMS = "checksums.json"
_STEP = "0|[1-9][0-9]*"
_KEPT = 2
_NEVER_AWAITED = "coroutine 'async_serialize"


class Checkpoints:
    """The two latest states of a run.

    Args:
      path: their folder. The first `save` removes unfinished checkpoints from it.
    """

    def __init__(self, path: Path):
        self._path = path.absolute()
        self._path.mkdir(exist_ok=True)
        _silence_orbax()
        # Named processes meet in the job's key-value store, and not in a program on the devices that train.
        processes = set(range(_processes.count())) if _processes.count() > 1 else None
        options = ocp.options.MultiprocessingOptions(active_processes=processes)
        self._orbax = ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(multiprocessing_options=options),
            multiprocessing_options=options,
            async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
        )

    @property
    def steps(self) -> list[int]:
        """Steps of the checkpoints, in order."""
        return sorted(int(path.name) for path in self._path.iterdir() if re.fullmatch(_STEP, path.name))

    def begin(self, step: int, state: Any) -> None:
        """Begins to write a checkpoint, and removes what is left of unfinished ones.

        Arrays on devices are copied, and may be donated when this returns.
        """
        if _processes.is_first():
            for path in self._path.iterdir():
                if re.fullmatch(rf"({_STEP})\.tmp", path.name):
                    _remove(path)
        with self._cleaning_up(step):
            self._orbax.save(self._path / f"{step}.tmp" / _STATE, args=ocp.args.PyTreeSave(state))

    def finish(self, step: int) -> None:
        """Waits until all processes have written a checkpoint, names it, and removes those before the latest two."""
        with self._cleaning_up(step):
            self._orbax.wait_until_finished()
        if not _processes.is_first():
            return
        unfinished = self._path / f"{step}.tmp"
        (unfinished / _CHECKSUMS).write_text(json.dumps(_checksums(unfinished / _STATE), indent=1))
        unfinished.rename(self._path / str(step))
        for former in self.steps[:-_KEPT]:
            _remove((self._path / str(former)).rename(self._path / f"{former}.tmp"))

    @contextlib.contextmanager
    def _cleaning_up(self, step: int) -> Iterator[None]:
        unfinished = self._path / f"{step}.tmp"
        try:
            yield
        except Exception as error:
            with contextlib.suppress(OSError):
                _remove(unfinished)  # which may be what fills the disk
            # What tensorstore makes of an error of the file system.
            if isinstance(error, ValueError) and (code := re.search(r"os_error_code='(\d+)'", str(error))):
                raise OSError(int(code[1]), os.strerror(int(code[1]))) from error
            raise

    def restore(self, step: int, like: Any) -> tuple[Any, bool]:
        """The state of a step, and whether it was verified: a checkpoint of an older te_jax has no checksums.

        Raises:
          DamagedError: the files are not those that were saved.
          UserError: the files are, but they cannot be restored.
        """
        path = self._path / str(step)
        verified = shared = False
        try:
            verified = _verify(path)
            if not verified and any(
                (self._path / str(former) / _CHECKSUMS).exists() for former in self.steps if former < step
            ):
                raise DamagedError(f"{_CHECKSUMS} is missing")
            _processes.from_first(lambda: step)  # which the others await in `restore_with_first`
            shared = _processes.count() > 1
            return self._read(path / _STATE, like), verified
        except PermissionError as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        except Exception as error:  # a damaged file raises errors of many types, some of them plain `Exception`
            if isinstance(error, DamagedError) or is_out_of_memory(error):
                raise
            reason = reason_of(error)
        if not verified and not shared:
            raise DamagedError(reason)
        verdict = "is intact, but" if verified else "has no checksums, and"
        way_out = "go on with the version of te_jax that wrote it, or start another run"
        raise UserError(f"{path} {verdict} cannot be restored ({reason}): {way_out}")

    def restore_with_first(self, like: Any) -> tuple[int, Any]:
        """The step that process 0 restores, and its state.

        Raises:
          UserError: this process cannot read it.
        """
        step = _processes.from_first(lambda: 0)
        path = self._path / str(step)
        try:
            return step, self._read(path / _STATE, like)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise UserError(f"process {_processes.index()} cannot restore {path}: {reason_of(error)}") from error

    def restore_part(self, step: int, like: Any) -> Any:
        """Some arrays of a checkpoint: of the whole state's dicts and tuples, those that `like` has.

        Raises:
          DamagedError: it is not what was saved.
        """
        path = self._path / str(step)
        _verify(path)
        return self._orbax.restore(path / _STATE, args=_restored(like, partial_restore=True))

    def _read(self, path: Path, like: Any) -> Any:
        """A state, less the quantized kernels that older versions saved beside the parameters."""
        metadata: Any = self._orbax.metadata(path).item_metadata
        saved = metadata.tree
        with_kernels = {
            name: state._replace(kernels=jax.tree.map(_on_one_device, saved[name]["kernels"]))
            for name, state in like.items()
            if getattr(state, "kernels", ()) is None and saved.get(name, {}).get("kernels") is not None
        }
        restored = self._orbax.restore(path, args=_restored(like | with_kernels))
        return restored | {name: restored[name]._replace(kernels=None) for name in with_kernels}

    def set_aside(self, step: int) -> None:
        """Renames a checkpoint to STEP.damaged."""
        aside = self._path / f"{step}.damaged"
        _remove(aside)
        (self._path / str(step)).rename(aside)

    def close(self) -> None:
        self._orbax.close()


def _restored(like: Any, **options: Any) -> ocp.args.PyTreeRestore:
    return ocp.args.PyTreeRestore(item=like, restore_args=ocp.checkpoint_utils.construct_restore_args(like), **options)


def _on_one_device(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    )


@functools.cache
def _silence_orbax() -> None:
    """Omits the tracebacks that orbax prints beside the one error that it raises, until this process ends.

    Its threads log the error of each array. Reads and writes that end after the first error find their event loop
    closed, and tell Python so at any later time, as do those that never began.
    """

    def is_of_others(record: logging.LogRecord) -> bool:
        return "orbax" not in Path(record.pathname).parts

    def is_no_lost_write(record: logging.LogRecord) -> bool:
        return "orbax" not in record.getMessage()

    def report(unraisable: "sys.UnraisableHookArgs") -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    hook, sys.unraisablehook = sys.unraisablehook, report
    logging.getLogger("absl").addFilter(is_of_others)
    logging.getLogger("asyncio").addFilter(is_no_lost_write)
    warnings.filterwarnings("ignore", _NEVER_AWAITED, RuntimeWarning)


def _remove(path: Path) -> None:
    """Removes an entry of the folder, whatever it is; of a link only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _verify(path: Path) -> bool:
    """Whether a checkpoint has checksums, which its files then match."""
    if not (path / _STATE).is_dir():
        raise DamagedError(f"{_STATE}/ is missing")
    if (path / _CHECKSUMS).exists() and not (path / _CHECKSUMS).is_file():  # a pipe would be waited for
        raise DamagedError(f"{_CHECKSUMS} is unreadable")
    try:
        expected = json.loads((path / _CHECKSUMS).read_text())
    except FileNotFoundError:
        return False
    except (ValueError, RecursionError):  # no text, or no JSON
        expected = None
    if not isinstance(expected, dict):
        raise DamagedError(f"{_CHECKSUMS} is unreadable")
    if not expected:
        raise DamagedError(f"{_CHECKSUMS} lists no file")
    checksums = _checksums(path / _STATE)
    for name, checksum in expected.items():
        if name not in checksums:
            raise DamagedError(f"{_STATE}/{name} is missing")
        if checksum != checksums[name]:
            raise DamagedError(f"{_STATE}/{name} does not match its checksum")
    for name in sorted(checksums.keys() - expected.keys()):
        raise DamagedError(f"{_STATE}/{name} has no checksum")
    return True


def _checksums(folder: Path) -> dict[str, int]:
    # File managers and NFS add hidden files, and orbax writes none.
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    with ThreadPoolExecutor() as threads:  # a large state is several files, and CRC-32 runs without Python's lock
        checksums = threads.map(_crc32, files)
    return {path.relative_to(folder).as_posix(): crc for path, crc in zip(files, checksums, strict=True)}


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            checksum = zlib.crc32(block, checksum)
    return checksum
