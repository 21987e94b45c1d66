"""Memory that the processes of one host share, for groups of devices that several of them drive.

Each process opens a space for each of its devices in a group, and tells the others of it through the key-value store of
`jax.distributed`, while a program is lowered: all processes lower the same programs in the same order. A space serves
all calls of its group that it is large enough for; where nothing is larger than before, nothing is exchanged.

Programs state how much they need, and calls take the first space of their group that has it: spaces only grow, so all
members find the same one, and the same program in all processes has the same text.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from te_jax import native

_PLACE_BITS = 16
_DEFAULT_SECONDS = 300.0

_sizes: dict[tuple[int, ...], list[int]] = {}
"""By group of which this process drives a member, the bytes of its spaces; the last is the largest."""
_attempts: dict[tuple[int, ...], int] = {}
_opening = threading.Lock()


def place_of(device: Any) -> int:
    """What kernels know a device by, in all processes: its process, and its number among the devices of that."""
    siblings = sorted(other.id for other in device.client.devices() if other.process_index == device.process_index)
    return device.process_index << _PLACE_BITS | siblings.index(device.id)


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
    return bool((groups >> _PLACE_BITS != groups[:, :1] >> _PLACE_BITS).any())


def ensure(groups: np.ndarray, bytes_needed: int, platform: str) -> None:
    """Makes sure that those of the groups that several processes drive, this one among them, share enough memory.

    Args:
      groups: places, int64 [groups, size].
      bytes_needed: on each device.
      platform: of the devices, as JAX names it.

    Raises:
      ValueError: there is no key-value store, because `jax.distributed` is not initialised.
      RuntimeError: the devices are not of one host, or a process did not take part in time.
    """
    index = jax.process_index()
    with _opening:
        for places in groups:
            group = tuple(int(place) for place in places)
            if span_processes(places[None]) and index in (place >> _PLACE_BITS for place in group):
                _open(group, bytes_needed, platform)


def _open(group: tuple[int, ...], bytes_needed: int, platform: str) -> None:
    sizes = _sizes.setdefault(group, [])
    if sizes and sizes[-1] >= bytes_needed:
        return
    # Not the number of spaces: what a failed attempt has left in the store must not be taken for that of the next one.
    number = _attempts[group] = _attempts.get(group, 0) + 1
    store, module = _store(), native.extension_module(platform)
    mine = [rank for rank, place in enumerate(group) if place >> _PLACE_BITS == jax.process_index()]
    key = f"te_jax/space/{'-'.join(map(str, group))}/{number}"
    milliseconds = int(_DEFAULT_SECONDS * 1e3)
    try:
        for rank in mine:
            store.key_value_set(f"{key}/{rank}", module.open_space(group, number, rank, bytes_needed))
        texts = [store.blocking_key_value_get(f"{key}/{rank}", milliseconds) for rank in range(len(group))]
        _join(module, group, mine, number, texts)
    finally:
        module.forget_opening(group, number)
    sizes.append(bytes_needed)


def _join(module: Any, group: tuple[int, ...], ranks: Sequence[int], number: int, texts: list[str]) -> None:
    """All of this process's devices at once, for each waits for the others."""
    problems: list[BaseException] = []

    def join(rank: int) -> None:
        try:
            module.join_space(group, number, rank, texts, _DEFAULT_SECONDS)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


def _store() -> Any:
    from jax._src import distributed  # the only way to the store that every process has

    if distributed.global_state.client is None:
        raise ValueError(
            "transport='p2p' over devices of several processes exchanges addresses through jax.distributed: call "
            "jax.distributed.initialize first, or use transport='ring' or 'xla'"
        )
    return distributed.global_state.client
