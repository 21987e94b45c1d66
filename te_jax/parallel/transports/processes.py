"""Shared memory segments of groups of devices that several processes of one host drive.

While a program is lowered, each process creates a segment for each of its devices in a group, and describes it to its
peers through the key-value store of `jax.distributed`: all processes lower the same programs in the same order. The
segments serve all calls of their group that they are large enough for; a program that needs no larger ones exchanges
nothing.

Programs state how many bytes they need, and calls take the first segments of their group that have them. Segments only
grow, so all ranks find the same ones, and the same program in all processes has the same text.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from te_jax import native
from te_jax._core.devices import PLACE_BITS, place_of

SECONDS_TO_COMPILE = 300.0
"""How much later than another a process may reach the same program."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
"""A file whose text differs between hosts, and is the same in all containers of one."""

_sizes: dict[tuple[int, ...], list[int]] = {}
"""Bytes of the segments of each group in which this process drives a device; the last is the largest."""
_attempts: dict[tuple[tuple[int, ...], int], int] = {}
"""By group and bytes, the number of this process's last attempt to share segments."""
_job: Any = None
"""The key-value store of the job that these belong to: another `jax.distributed.initialize` makes another one."""
_lock = threading.Lock()


def places_of(devices: np.ndarray) -> np.ndarray:
    """The place of each device, int64 of the same shape."""
    return np.vectorize(place_of, otypes=[np.int64])(devices)


def introduce(devices: Iterable[Any]) -> None:
    """Tells the extension XLA's ordinals of the devices that this process drives."""
    devices = list(devices)
    index = jax.process_index()
    cpu = devices[0].platform == "cpu"
    native.extension_module(devices[0].platform).introduce({
        place_of(device): device.id if cpu else device.local_hardware_id
        for device in devices
        if device.process_index == index
    })  # fmt: skip


def span_processes(groups: np.ndarray) -> bool:
    """Whether devices of one group, a row of places, are driven by several processes."""
    return bool((groups >> PLACE_BITS != groups[:, :1] >> PLACE_BITS).any())


def share_hosts(devices: np.ndarray) -> bool:
    """Whether the devices of each group, [groups, size], are of one host. Each process tells all others its own."""
    store = _store()
    store.key_value_set(f"te_jax/host/{jax.process_index()}", _BOOT.read_text(), allow_overwrite=True)
    patience = int(SECONDS_TO_COMPILE * 1000)
    hosts = {
        process: store.blocking_key_value_get(f"te_jax/host/{process}", patience)
        for process in sorted({device.process_index for device in devices.flat})
    }
    return all(len({hosts[device.process_index] for device in group}) == 1 for group in devices)


def ensure(groups: np.ndarray, bytes_needed: int, platform: str, seconds: float) -> None:
    """Shares segments that are large enough, in each group that this process and others drive together.

    Args:
      groups: places, int64 [groups, size].
      bytes_needed: on each device.
      platform: of the devices, as JAX names it.
      seconds: to wait for the other processes.

    Raises:
      ValueError: there is no key-value store, because `jax.distributed` is not initialised.
      RuntimeError: the devices are not of one host, a segment cannot be created or opened, here or in another process,
        or a process did not take part in time.
    """
    index = jax.process_index()
    with _lock:
        for places in groups:
            group = tuple(int(place) for place in places)
            if span_processes(places[None]) and index in (place >> PLACE_BITS for place in group):
                _share(group, bytes_needed, platform, seconds)


def _share(group: tuple[int, ...], bytes_needed: int, platform: str, seconds: float) -> None:
    global _job
    store, module = _store(), native.extension_module(platform)
    if store is not _job:
        _sizes.clear()
        _attempts.clear()
        module.forget_segments()
        _job = store
    sizes = _sizes.setdefault(group, [])
    if sizes and sizes[-1] >= bytes_needed:
        return
    attempt = _Attempt(store, group, bytes_needed)
    mine = [rank for rank, place in enumerate(group) if place >> PLACE_BITS == jax.process_index()]
    try:
        for rank in mine:
            attempt.post(rank, module.create_segment(group, attempt.number, rank, bytes_needed))
        _join(module, attempt, mine, attempt.wait_for_all(seconds), seconds)
    except PeerFailedError:
        raise  # the peer has posted it
    except BaseException as problem:
        failed = isinstance(problem, Exception) and not isinstance(problem, LateError)
        for rank in mine:
            attempt.post(rank, f"{_FAILED if failed else _GAVE_UP}{problem or type(problem).__name__}")
        if not failed:
            raise
        raise RuntimeError(
            f"transport='p2p' cannot share memory between {_names_of(group)} ('ring' and 'xla' need none): {problem}"
        ) from problem
    finally:
        module.forget_attempt(group, attempt.number)  # last: peers that this breaks look for the reason that was posted
    for rank in mine:
        attempt.remove(rank)
    sizes.append(bytes_needed)


def _join(module: Any, attempt: _Attempt, ranks: Sequence[int], texts: list[str], seconds: float) -> None:
    """Joins the segments of all of this process's devices at once, because each waits for the others."""
    problems: list[BaseException] = []

    def join(rank: int) -> None:
        try:
            module.join_segments(attempt.group, attempt.number, rank, texts, seconds)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for _ in _pauses():
        over = problems or not any(thread.is_alive() for thread in threads)
        attempt.read()
        if over:
            break
    if problems:
        raise problems[0]


class PeerFailedError(RuntimeError):
    """A peer has posted that it failed."""


class LateError(RuntimeError):
    """Peers did not take part in time."""


_FAILED, _GAVE_UP = "failed: ", "gave up: "


class _Attempt:
    """The texts that the ranks of a group post to share segments: each describes its own, or says why it failed.

    All ranks must take part in the same attempt. A failure stays in the store for ranks that come later, which it
    concerns too. After a rank gave up because its peers did not come, all start the next attempt.
    """

    def __init__(self, store: Any, group: tuple[int, ...], bytes_needed: int):
        self.group, self.number = group, _attempts.get((group, bytes_needed), 0) + 1
        self._store = store
        self._folder = f"te_jax/segments/{'-'.join(map(str, group))}/{bytes_needed}"
        while self._is_over():
            self.number += 1
        _attempts[group, bytes_needed] = self.number

    def post(self, rank: int, text: str) -> None:
        self._store.key_value_set(f"{self._folder}/{self.number}/{rank}", text, allow_overwrite=True)

    def remove(self, rank: int) -> None:
        self._store.key_value_delete(f"{self._folder}/{self.number}/{rank}")

    def read(self) -> dict[int, str]:
        """The texts posted so far, by rank.

        Raises:
          PeerFailedError: a rank failed.
        """
        texts = self._texts(self.number)
        for rank, text in sorted(texts.items()):
            if text.startswith((_FAILED, _GAVE_UP)):
                raise PeerFailedError(
                    f"transport='p2p' cannot share memory between {_names_of(self.group)}: "
                    f"{_names_of([self.group[rank]])} {text}"
                )
        return texts

    def wait_for_all(self, seconds: float) -> list[str]:
        """The texts of all ranks, in their order.

        Raises:
          PeerFailedError: a rank failed.
          LateError: it took longer.
        """
        begin, texts = time.monotonic(), {}
        for _ in _pauses():
            texts = self.read()
            if len(texts) == len(self.group) or time.monotonic() - begin > seconds:
                break
        if missing := [place for rank, place in enumerate(self.group) if rank not in texts]:
            raise LateError(
                f"transport='p2p' waited {seconds:g} s for {_names_of(missing)} to share memory between "
                f"{_names_of(self.group)}: all processes must lower the same programs in the same order; look for what "
                "failed there first, or give a longer timeout"
            )
        return [texts[rank] for rank in range(len(self.group))]

    def _is_over(self) -> bool:
        gave_up = any(text.startswith(_GAVE_UP) for text in self._texts(self.number).values())
        return gave_up or bool(self._texts(self.number + 1))

    def _texts(self, number: int) -> dict[int, str]:
        entries = self._store.key_value_dir_get(f"{self._folder}/{number}/")
        return {int(key.rpartition("/")[2]): text for key, text in entries}


def _names_of(places: Iterable[int]) -> str:
    names = []
    for place in places:
        process, number = divmod(place, 1 << PLACE_BITS)
        names.append(f"device {number} of process {process}")
    return ", ".join(names)


def _pauses() -> Iterator[None]:
    """Sleeps before each next step, from a millisecond to a tenth of a second."""
    pause = 1e-3
    while True:
        yield
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _store() -> Any:
    from jax._src import distributed  # the only way to the job's key-value store

    if distributed.global_state.client is None:
        raise ValueError(
            "transport='p2p' over devices of several processes exchanges addresses through jax.distributed: call "
            "jax.distributed.initialize first, or use transport='ring' or 'xla'"
        )
    return distributed.global_state.client
