"""Statistics for TensorBoard, or for a file of JSON lines."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from te_jax.debug.statistics import LayerStatistics, scalars


class Writer(Protocol):
    """Any object with this method: `SummaryWriter` of torch.utils.tensorboard and of tensorboardX, `JSONLinesWriter`,
    or one of your own for another service."""

    def add_scalar(self, name: str, value: float, step: int, /) -> Any:
        """Writes a number.

        Args:
          name: of the curve.
          value: may be NaN or infinite.
          step: of the training.
        """


def write(statistics: Mapping[str, LayerStatistics], writer: Writer, step: int) -> None:
    """Writes all numbers of statistics by the names of `scalars`.

    Args:
      statistics: of `with_statistics`, on the host or on devices.
      writer: has a method add_scalar(name, value, step).
      step: of the training.

    Raises:
      ValueError: writer has no such method.

    Examples:
      >>> import jax, jax.numpy as jnp, te_jax
      >>> def loss(params, x):
      ...     return te_jax.ops.dense(x, params["up"], recipe=te_jax.recipe.CurrentScaling()).sum()
      >>> step = jax.jit(te_jax.debug.with_statistics(jax.grad(loss)))
      >>> _, statistics = step({"up": jnp.ones((32, 16))}, jnp.ones((4, 32)))
      >>> with te_jax.debug.JSONLinesWriter("statistics.jsonl") as writer:  # doctest: +SKIP
      ...     te_jax.debug.write(statistics, writer, step=100)
    """
    if not callable(getattr(writer, "add_scalar", None)):
        raise ValueError(
            f"writer is {writer!r}; it must have a method add_scalar(name, value, step), as SummaryWriter of "
            "TensorBoard and te_jax.debug.JSONLinesWriter have"
        )
    for name, value in scalars(statistics).items():
        writer.add_scalar(name, value, step)


class JSONLinesWriter:
    """Appends a line {"step": 100, "name": "layers/0/up/gradient/dgrad/error", "value": 0.05} for each number.

    A value that is not finite is null. pandas reads the file with `pandas.read_json(path, lines=True)`.

    Args:
      path: file to append to, made if it does not exist.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115, open until `close`

    def add_scalar(self, name: str, value: float, step: int, /) -> None:
        """Writes a number.

        Args:
          name: of the curve.
          value: of it.
          step: of the training.
        """
        number = float(value)
        line = {"step": int(step), "name": name, "value": number if math.isfinite(number) else None}
        self._file.write(json.dumps(line) + "\n")

    def flush(self) -> None:
        """Hands what is written to the operating system, for those who read the file meanwhile."""
        self._file.flush()

    def close(self) -> None:
        """Closes the file. The end of a `with` block does so, too."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
