"""How the devices of a collective product exchange what they compute: values for `transport` and `residual`."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np

from te_jax._core.arguments import as_flag

TRANSPORTS = ("auto", "xla", "ring", "p2p")

TransportName = Literal["auto", "xla", "ring", "p2p"]
Residual = Literal["gathered", "shard"]


@dataclasses.dataclass(frozen=True)
class Ring:
    """Devices pass rows on by `ppermute`, step by step, beside the products of what has arrived; on every platform.

    Args:
      bidirectional: whether halves of the rows travel both ways.
    """

    bidirectional: bool = False

    def __post_init__(self):
        as_flag("bidirectional", self.bidirectional)


@dataclasses.dataclass(frozen=True)
class P2P:
    """GPUs copy from each other beside the products, in one custom call. It needs the extension, and a `shard_map` over
    all axes.

    Args:
      timeout: seconds after which a call gives up on a device that does not arrive.
      protocol: of a gather: devices "get" from their peers or "put" to them; None for the faster one.
    """

    timeout: float = 60.0
    protocol: Literal["get", "put"] | None = None

    def __post_init__(self):
        timeout = self.timeout
        is_number = isinstance(timeout, int | float | np.integer | np.floating) and not isinstance(timeout, bool)
        if not is_number or not 0 < timeout < math.inf:
            raise ValueError(f"timeout is {timeout!r}; it must be a positive, finite number of seconds, such as 60.0")
        if self.protocol not in (None, "get", "put"):
            raise ValueError(f"protocol is {self.protocol!r}; it must be 'get', 'put' or None")


Transport = TransportName | Ring | P2P


def as_transport(transport: Transport) -> Literal["auto", "xla"] | Ring | P2P:
    """The argument `transport` of collective products; names are those of defaults.

    Raises:
      ValueError: it is none.
    """
    if isinstance(transport, Ring | P2P):
        return transport
    if transport not in TRANSPORTS:
        raise ValueError(
            f"transport is {transport!r}; it must be one of {TRANSPORTS}, or te_jax.parallel.Ring(…) or P2P(…)"
        )
    return {"ring": Ring(), "p2p": P2P()}.get(transport, transport)


def validate_residual(residual: object) -> None:
    """Raises ValueError unless it says what is kept of a gathered x."""
    if residual not in ("gathered", "shard"):
        raise ValueError(f"residual is {residual!r}; it must be 'gathered' or 'shard'")
