"""Which devices exchange data with each other, from the replica groups of a program's text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np

Groups = tuple[tuple[int, ...], ...]


def of_call(config: str) -> Groups:
    """The groups of one of te_jax's own calls; nothing where its configuration does not say."""
    ids = re.search(r"\bgroups = (?:array<i64: |dense<\[?)([\d, ]+)", config)
    size = re.search(r"\bgroup_size = (\d+)", config)
    return _rows(np.reshape(_integers(ids[1]), (-1, int(size[1])))) if ids and size else ()


def of_collective(attributes: Mapping[str, str], devices: int) -> Groups:
    """The groups of one of XLA's collectives in a program for so many devices, or the pairs of a permutation."""
    if "source_target_pairs" in attributes:
        return _lists(attributes["source_target_pairs"])
    text = attributes.get("replica_groups", "{}")
    if text.startswith("mesh["):
        return _mesh_groups(text, attributes.get("device_ids", ""))
    if text.startswith("["):
        return _rows(_iota(text))
    return _lists(text) or (tuple(range(devices)),)


def _lists(text: str) -> Groups:
    """Reads "{{0,1},{2,3}}"; nothing for "{}"."""
    return tuple(tuple(_integers(group)) for group in re.findall(r"\{([\d, ]+)\}", text))


def _iota(text: str) -> np.ndarray:
    """Reads "[2,4]<=[4,2]T(1,0)": 0, 1, 2, … as an array of shape [4,2], transposed, and reshaped to [2,4]."""
    match = re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if match is None:
        raise ValueError(f"replica groups {text!r} cannot be read; please report this, with jaxlib's version")
    dims = _integers(match[2])
    ids = np.arange(math.prod(dims)).reshape(dims).transpose(_integers(match[3] or "") or range(len(dims)))
    return ids.reshape(_integers(match[1]))


def _mesh_groups(text: str, device_ids: str) -> Groups:
    """Reads "mesh['a'=4,'b'=2] {'a'}", groups along a, or "{'a':(2)2}", along a part of a: a is 2 × 2, its second 2.

    "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}" names the devices in another order than 0, 1, 2, …
    """
    sizes = {name: int(size) for name, size in re.findall(r"'(.*?)'=(\d+)", text)}
    devices, _, along = (device_ids or text).rpartition(" {")
    ids = np.arange(math.prod(sizes.values()))
    if device_ids:
        iota = f"[{len(ids)}]<={devices[1:-1]}"
        ids = _iota(iota) if devices.startswith("([") else np.array(_integers(devices))
    coordinates = dict(zip(sizes, np.unravel_index(np.arange(len(ids)), tuple(sizes.values())), strict=True))
    group = dict(coordinates)  # what is left of the coordinates without the parts that the groups run along
    member, members = np.zeros_like(ids), 1
    for name, before, size in re.findall(r"'(.*?)'(?::\((\d+)\)(\d+))?(?=,'|\})", along + "}"):
        size = int(size or sizes[name])
        after = sizes[name] // (int(before or 1) * size)
        part = coordinates[name] // after % size
        group[name] = group[name] - part * after
        member, members = member * size + part, members * size
    number = np.ravel_multi_index(tuple(group.values()), tuple(sizes.values()))
    return _rows(ids[np.lexsort((member, number))].reshape(-1, members))


def axes_of(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...] | None:
    """The axes of a mesh along which members of a group differ; None for devices that are not in it."""
    if not groups or max(max(group) for group in groups) >= math.prod(mesh.values()):
        return None
    differ = set()
    for group in groups:
        coordinates = np.unravel_index(list(group), tuple(mesh.values()))
        differ.update(name for name, along in zip(mesh, coordinates, strict=True) if np.ptp(along))
    return tuple(name for name in mesh if name in differ)


def _rows(array: np.ndarray) -> Groups:
    return tuple(tuple(int(number) for number in row) for row in array)


def _integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
