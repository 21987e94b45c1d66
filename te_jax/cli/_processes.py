"""The processes of a run: joined before JAX starts a backend, agreed on what they do, and ended together.

The environment says how many there are: JAX_NUM_PROCESSES and JAX_PROCESS_ID, or srun's or mpirun's variables. With one
process nothing here does anything. Process 0 holds the run's folder and prints; a process that fails prints as well.
"""

import contextlib
import ctypes
import functools
import itertools
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from te_jax._core.terminal import reason_of
from te_jax.cli.errors import UserError

__all__ = [
    "Vote",
    "count",
    "end",
    "from_first",
    "hosts",
    "index",
    "is_first",
    "joined",
    "leave",
    "tell_step",
    "told_steps",
]

_VARIABLES = (
    ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),  # srun's: a batch script has SLURM_NTASKS too, and is one process
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
)
_STEPS = "te_jax/step/"
_HEARTBEAT_S = 10  # without a sign of life, after which JAX ends the others
_GOODBYE_MS = 3000
_MOMENT_S = 0.5
_SILENCE_S = 10  # of processes that wait for others to start
_FOREVER_MS = 10**9

_T = TypeVar("_T")

_count, _index = 1, 0
_numbers = itertools.count()
_failed = False  # whether this process tells why the run ends


def count() -> int:
    """Number of processes."""
    return _count


def index() -> int:
    """Which of them this one is, from 0."""
    return _index


def is_first() -> bool:
    """Whether this process holds the folder of the run, and prints."""
    return _index == 0


def from_first(make: Callable[[], _T]) -> _T:
    """The result of a function that process 0 calls, in all processes. It must be JSON."""
    if _count == 1:
        return make()
    key = f"te_jax/{next(_numbers)}"
    if is_first():
        made = make()
        _store().key_value_set(key, json.dumps(made))
        return made
    return json.loads(_store().blocking_key_value_get(key, _FOREVER_MS))


@functools.cache
def hosts() -> list[int]:
    """The host of each process, which goes by the number of its first process."""
    every = _of_all("host", _host()) if _count > 1 else [""]
    return [every.index(each) for each in every]


class Vote:
    """The largest number that a process gives in a step, which all of them learn in the same step.

    With several processes this is two calls later, so that none waits for its devices.

    Args:
      mesh: of all devices of the run.
    """

    _BEHIND = 2

    def __init__(self, mesh: Mesh):
        self._ballots = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._pending: deque[jax.Array] = deque()

    def __call__(self, number: int) -> int:
        if _count == 1:
            return number
        ballots = jax.make_array_from_callback(
            (self._ballots.mesh.size,), self._ballots, lambda _: np.full(1, number, np.int32)
        )
        self._pending.append(self._largest(ballots))
        return int(self._pending.popleft()) if len(self._pending) > self._BEHIND else 0


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Joins the processes of a run. An error in one of them ends all; the first to fail raises it, the others wait.

    Raises:
      UserError: the environment is incomplete, or the processes do not find each other.
    """
    global _count, _index, _failed
    _count, _index = _from_environment()
    if _count == 1:
        yield
        return
    with contextlib.ExitStack() as undo:
        if not is_first():
            nowhere = undo.enter_context(open(os.devnull, "w"))
            undo.enter_context(contextlib.redirect_stdout(nowhere))
            undo.enter_context(contextlib.redirect_stderr(nowhere))
        try:
            _initialize()
            watcher = threading.Thread(target=_watch, daemon=True)
            watcher.start()
            _divide_gpus()
            yield
            _store().wait_at_barrier("te_jax/done", _FOREVER_MS)
        except BaseException:
            if jax.distributed.is_initialized() and not _is_first_to_fail():
                threading.Event().wait()  # the watcher ends this process
            _failed = True
            raise
    if is_first():
        _store().key_value_set("te_jax/ended", "")
    watcher.join()
    jax.distributed.shutdown()


def leave(status: int) -> None:
    """Ends all processes with a status, if this one has left `joined` by an error. What it says of it is said."""
    if not _failed:
        return
    if sys.exc_info()[1] is not None:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    if jax.distributed.is_initialized():
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 is gone
            _store().key_value_set("te_jax/ended", str(status))
            _say_goodbye()
    os._exit(status)  # Python's own end would wait for steps that never end


def end(status: int, message: str) -> None:
    """Ends all processes with a status, from a thread. The first that asks says why; the watcher ends the others."""
    global _failed
    if _count > 1 and not _is_first_to_fail():
        return
    _failed = True
    print(f"te-jax: error: {message}", file=sys.__stderr__, flush=True)
    leave(status)


def tell_step(step: int) -> None:
    """Tells the other processes how far this one is."""
    if _count > 1:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 is gone
            _store().key_value_set(f"{_STEPS}{_index}", str(step), allow_overwrite=True)


def told_steps() -> dict[int, int]:
    """How far each process is, by what it told last; nothing where process 0 is gone."""
    if _count > 1:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            return {int(key.rpartition("/")[2]): int(step) for key, step in _store().key_value_dir_get(_STEPS)}
    return {}


def _watch() -> None:
    """Ends this process when another has failed, whatever its main thread waits for."""
    try:
        status = _store().blocking_key_value_get("te_jax/ended", _FOREVER_MS)
    except jax.errors.JaxRuntimeError:  # process 0 is gone, and JAX ends this one
        return
    if status and not _failed:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            _say_goodbye()
        os._exit(int(status))


def _say_goodbye() -> None:
    """Process 0 keeps the store, and stays until all have read there that they end, and a moment longer: JAX aborts a
    process that sees the store go."""
    _store().wait_at_barrier("te_jax/goodbye", _GOODBYE_MS)
    if is_first():
        time.sleep(_MOMENT_S)


def _is_first_to_fail() -> bool:
    try:
        _store().key_value_set("te_jax/failed", str(_index))
    except jax.errors.JaxRuntimeError as error:
        return "ALREADY_EXISTS" not in str(error)
    return True


def _from_environment() -> tuple[int, int]:
    """Number of processes, and which of them this one is."""
    for names in _VARIABLES:
        values = [os.environ[name] for name in names if name in os.environ]
        if len(values) < len(names):
            continue
        if not all(value.isdecimal() for value in values) or not int(values[1]) < int(values[0]):
            described = ", ".join(f"{name} is {value}" for name, value in zip(names, values, strict=True))
            raise UserError(f"{described}: they must be the number of processes and that of this one, from 0")
        return int(values[0]), int(values[1])
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        raise UserError("JAX_COORDINATOR_ADDRESS is set: set JAX_NUM_PROCESSES and JAX_PROCESS_ID as well")
    return 1, 0


def _initialize() -> None:
    # JAX would handle SIGTERM in a way that Python does not see.
    jax.config.update("jax_enable_preemption_service", False)
    waiting = threading.Timer(_SILENCE_S, _say_that_it_waits)
    waiting.daemon = True
    waiting.start()
    try:
        # Without the address JAX looks for srun's and mpirun's. It would give each process one GPU.
        jax.distributed.initialize(
            os.environ.get("JAX_COORDINATOR_ADDRESS"),
            _count,
            _index,
            local_device_ids=[],
            heartbeat_timeout_seconds=_HEARTBEAT_S,
        )
    except (ValueError, IndexError, RuntimeError) as error:
        raise UserError(
            f"process {_index} of {_count} does not reach the others ({reason_of(error)}): set JAX_COORDINATOR_ADDRESS "
            "to HOST:PORT in all of them, with the host of process 0 and a port that is free there"
        ) from error
    finally:
        waiting.cancel()


def _say_that_it_waits() -> None:
    """On stderr of each process, also of those that print nothing else: those that do not say so are missing."""
    other_processes = f"processes 1 to {_count - 1}" if _count > 2 else "process 1"
    awaited = other_processes if is_first() else "process 0 and all others"
    print(
        f"te-jax: note: process {_index} of {_count} is waiting for {awaited} at {_coordinator()}: start {_count} "
        "processes, all with this number and this address",
        file=sys.__stderr__,
        flush=True,
    )


def _divide_gpus() -> None:
    """Processes that see the same GPUs take equal parts of them."""
    visible = _visible_gpus()
    every = _of_all("gpus", visible)
    sharing = [each for each in range(_count) if every[each] == visible]
    gpus = len(visible.split())
    if not gpus or len(sharing) == 1 or jax.config.read("jax_cuda_visible_devices") != "all":
        return
    if gpus % len(sharing):
        raise UserError(
            f"{len(sharing)} processes share {gpus} GPUs, which they cannot divide: start another number of processes"
        )
    part = gpus // len(sharing)
    first = sharing.index(_index) * part
    jax.config.update("jax_cuda_visible_devices", ",".join(map(str, range(first, first + part))))


def _of_all(name: str, value: str) -> list[str]:
    """What each process says of itself."""
    _store().key_value_set(f"te_jax/{name}/{_index}", value)
    return [_store().blocking_key_value_get(f"te_jax/{name}/{each}", _FOREVER_MS) for each in range(_count)]


def _host() -> str:
    """What only processes of this host have in common: containers of one have names of their own."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def _visible_gpus() -> str:
    """UUIDs of the GPUs that CUDA shows this process, with spaces between; starts no GPU context."""
    config: Any = jax.config
    if config.jax_platforms == "cpu":
        return ""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    number, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(number)):
        return ""
    uuids = []
    for device in range(number.value):
        cuda.cuDeviceGetUuid_v2(uuid, ctypes.c_int(device))
        uuids.append(bytes(uuid).hex())
    return " ".join(uuids)


def _coordinator() -> str | None:
    """HOST:PORT of process 0."""
    from jax._src import distributed

    return distributed.global_state.coordinator_address


def _store() -> Any:
    from jax._src import distributed  # the only way to the job's key-value store

    return distributed.global_state.client
