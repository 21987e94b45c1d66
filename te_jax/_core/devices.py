"""What kernels, and the programs that call them, know a device by in all processes of a job."""

from __future__ import annotations

from typing import Any

PLACE_BITS = 16


def place_of(device: Any) -> int:
    """The device's process, shifted by PLACE_BITS, plus its number among the devices of that process."""
    siblings = sorted(other.id for other in device.client.devices() if other.process_index == device.process_index)
    return device.process_index << PLACE_BITS | siblings.index(device.id)
