"""Memory that the processes of one host share, for groups of devices that several of them drive.

Each process opens a space for each of its devices in a group, and tells the others of it through the key-value store of
`jax.distributed`, while a program is lowered: all processes lower the same programs in the same order. A space serves
all calls of its group that it is large enough for; where nothing is larger than before, nothing is exchanged.

Programs state how much they need, and calls take the first space of their group that has it: spaces only grow, so all
members find the same one, and the same program in all processes has the same text.
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
"""By how much one process may compile longer than another before it gets to the same program."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Names a host, as long as it runs; also in containers."""

_sizes: dict[tuple[int, ...], list[int]] = {}
"""By group of which this process drives a member, the bytes of its spaces; the last is the largest."""
_attempts: dict[tuple[tuple[int, ...], int], int] = {}
"""By group and bytes, the last attempt to open a space that this process took part in."""
_job: Any = None
"""The key-value store of the job that this is known of: another `jax.distributed.initialize` makes another one."""
_opening = threading.Lock()


def places_of(devices: np.ndarray) -> np.ndarray:
    """The place of each device, int64 of the same shape."""
    return np.vectorize(place_of, otypes=[np.int64])(devices)


def introduce(devices: Iterable[Any]) -> None:
    """Tells the extension what XLA calls those of the devices that this process drives."""
    devices = list(devices)
    index = jax.process_index()
    ordinals = {place_of(device): _ordinal_of(device) for device in devices if device.process_index == index}
    native.extension_module(devices[0].platform).introduce(ordinals)


def _ordinal_of(device: Any) -> int:
    """What kernels are told to be run on."""
    return device.id if device.platform == "cpu" else device.local_hardware_id


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
    """Makes sure that those of the groups that several processes drive, this one among them, share enough memory.

    Args:
      groups: places, int64 [groups, size].
      bytes_needed: on each device.
      platform: of the devices, as JAX names it.
      seconds: to wait for the other processes.

    Raises:
      ValueError: there is no key-value store, because `jax.distributed` is not initialised.
      RuntimeError: the devices are not of one host, memory cannot be had or opened, here or in another process, or a
        process did not take part in time.
    """
    index = jax.process_index()
    with _opening:
        for places in groups:
            group = tuple(int(place) for place in places)
            if span_processes(places[None]) and index in (place >> PLACE_BITS for place in group):
                _open(group, bytes_needed, platform, seconds)


def _open(group: tuple[int, ...], bytes_needed: int, platform: str, seconds: float) -> None:
    global _job
    store, module = _store(), native.extension_module(platform)
    if store is not _job:
        _sizes.clear()
        _attempts.clear()
        module.forget_spaces()
        _job = store
    sizes = _sizes.setdefault(group, [])
    if sizes and sizes[-1] >= bytes_needed:
        return
    attempt = _Attempt(store, group, bytes_needed)
    mine = [rank for rank, place in enumerate(group) if place >> PLACE_BITS == jax.process_index()]
    try:
        for rank in mine:
            attempt.say(rank, module.open_space(group, attempt.number, rank, bytes_needed))
        _join(module, attempt, mine, attempt.hear_all(seconds), seconds)
    except PeerFailedError:
        raise  # who has said so itself
    except BaseException as problem:
        failed = isinstance(problem, Exception) and not isinstance(problem, LateError)
        for rank in mine:
            attempt.say(rank, f"{_FAILED if failed else _GAVE_UP}{problem or type(problem).__name__}")
        if not failed:
            raise
        raise RuntimeError(
            f"transport='p2p' cannot share memory between {_names_of(group)} ('ring' and 'xla' need none): {problem}"
        ) from problem
    finally:
        module.forget_opening(group, attempt.number)  # last: peers that lose what is not joined look for the reason
    for rank in mine:
        attempt.take_back(rank)
    sizes.append(bytes_needed)


def _join(module: Any, attempt: _Attempt, ranks: Sequence[int], texts: list[str], seconds: float) -> None:
    """All of this process's devices at once, for each waits for the others."""
    problems: list[BaseException] = []

    def join(rank: int) -> None:
        try:
            module.join_space(attempt.group, attempt.number, rank, texts, seconds)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for _ in _pauses():
        over = problems or not any(thread.is_alive() for thread in threads)
        attempt.hear()
        if over:
            break
    if problems:
        raise problems[0]


class PeerFailedError(RuntimeError):
    """A member of another process has said that it failed."""


class LateError(RuntimeError):
    """Members of other processes did not come in time."""


_FAILED, _GAVE_UP = "failed: ", "gave up: "


class _Attempt:
    """What the members of a group say while they open a space together: of what they share, or why they cannot.

    All are to talk of the same attempt. A failure stays in the store for those that come later, which it concerns too;
    but where a member gave up because others did not come, it may have called alone, and they begin the next attempt.
    """

    def __init__(self, store: Any, group: tuple[int, ...], bytes_needed: int):
        self.group, self.number = group, _attempts.get((group, bytes_needed), 0) + 1
        self._store = store
        self._folder = f"te_jax/space/{'-'.join(map(str, group))}/{bytes_needed}"
        while self._is_over():
            self.number += 1
        _attempts[group, bytes_needed] = self.number

    def say(self, rank: int, text: str) -> None:
        self._store.key_value_set(f"{self._folder}/{self.number}/{rank}", text, allow_overwrite=True)

    def take_back(self, rank: int) -> None:
        self._store.key_value_delete(f"{self._folder}/{self.number}/{rank}")

    def hear(self) -> dict[int, str]:
        """By rank, what the members say so far.

        Raises:
          PeerFailedError: one of them failed.
        """
        texts = self._texts(self.number)
        for rank, text in sorted(texts.items()):
            if text.startswith((_FAILED, _GAVE_UP)):
                raise PeerFailedError(
                    f"transport='p2p' cannot share memory between {_names_of(self.group)}: "
                    f"{_names_of([self.group[rank]])} {text}"
                )
        return texts

    def hear_all(self, seconds: float) -> list[str]:
        """What the members say, in order of rank, once all of them have.

        Raises:
          PeerFailedError: one of them failed.
          LateError: it took longer.
        """
        begin, texts = time.monotonic(), {}
        for _ in _pauses():
            texts = self.hear()
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
        found = self._store.key_value_dir_get(f"{self._folder}/{number}/")
        return {int(key.rpartition("/")[2]): text for key, text in found}


def _names_of(places: Iterable[int]) -> str:
    names = []
    for place in places:
        process, number = divmod(place, 1 << PLACE_BITS)
        names.append(f"device {number} of process {process}")
    return ", ".join(names)


def _pauses() -> Iterator[None]:
    """Longer and longer ones, from a millisecond to a tenth of a second."""
    pause = 1e-3
    while True:
        yield
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _store() -> Any:
    from jax._src import distributed  # the only way to the store that every process has

    if distributed.global_state.client is None:
        raise ValueError(
            "transport='p2p' over devices of several processes exchanges addresses through jax.distributed: call "
            "jax.distributed.initialize first, or use transport='ring' or 'xla'"
        )
    return distributed.global_state.client
