"""The identity of a device for kernels and programs, the same in all processes of a job; and its peak speed."""

from __future__ import annotations

from typing import Any

PLACE_BITS = 16


def place_of(device: Any) -> int:
    """The device's process, shifted by PLACE_BITS, plus its number among the devices of that process."""
    siblings = sorted(other.id for other in device.client.devices() if other.process_index == device.process_index)
    return device.process_index << PLACE_BITS | siblings.index(device.id)


_BF16_PEAKS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA B200": 2250e12,
}
"""FLOP/s of dense bfloat16 GEMMs in NVIDIA's data sheets, by how a device's name begins; the first that fits counts."""


def bf16_peak(kind: str) -> float | None:
    """FLOP/s of a device of this kind (`jax.Device.device_kind`), None where it is not known."""
    return next((peak for name, peak in _BF16_PEAKS.items() if kind.startswith(name)), None)
