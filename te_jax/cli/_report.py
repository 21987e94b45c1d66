"""What a training run shows: the progress bar, the lines beneath it, and the figure of the losses."""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Progress", "draw_losses", "memory_in_use"]

_INK, _MUTED, _BLUE, _ORANGE = "#1f2430", "#7a8294", "#2563c9", "#d9641e"


class Progress:
    """A bar on a terminal, and a line for every validation anywhere.

    Args:
      total: steps of the run.
      done: steps taken before this process.
      tokens_per_step: tokens trained on in one step, over all devices.
      devices: jax devices whose memory is shown.
    """

    def __init__(self, total: int, done: int, tokens_per_step: int, devices: Sequence[Any]):
        import tqdm

        self._tqdm = tqdm.tqdm
        # disable=None: no bar where stderr is a file, which would fill up with copies of it.
        self._bar = tqdm.tqdm(total=total, initial=done, unit="step", disable=None, dynamic_ncols=True)
        self._tokens_per_step = tokens_per_step
        self._devices = devices
        self._first: float | None = None
        self._last = 0.0
        self._timed_steps = 0

    @property
    def tokens_per_second(self) -> float | None:
        """Since the end of the first step, which waits for the compiler; None before the second."""
        if self._first is None or not self._timed_steps:
            return None
        return self._timed_steps * self._tokens_per_step / (self._last - self._first)

    def step(self, losses: Mapping[str, float]) -> None:
        """A step has ended."""
        self._last = time.perf_counter()
        if self._first is None:
            self._first = self._last
        else:
            self._timed_steps += 1
        self._bar.set_postfix_str(" · ".join([_format_losses(losses), *self._speed_and_memory()]), refresh=False)
        self._bar.update()

    def validation(self, step: int, losses: Mapping[str, float]) -> None:
        """A validation has ended."""
        self.line(" · ".join([f"step {step}", f"validation {_format_losses(losses)}", *self._speed_and_memory()]))

    def line(self, text: str) -> None:
        """Prints a line without tearing the bar."""
        self._tqdm.write(text)
        sys.stdout.flush()

    def close(self) -> None:
        """Leaves the bar as it stands."""
        self._bar.close()

    def _speed_and_memory(self) -> list[str]:
        speed = self.tokens_per_second
        return ([] if speed is None else [f"{speed:,.0f} tokens/s"]) + [
            f"{memory_in_use(self._devices) / 2**20:,.0f} MiB"
        ]


def memory_in_use(devices: Sequence[Any]) -> int:
    """Bytes: the most that one device has held so far, or on a CPU what this process holds now."""
    statistics = [device.memory_stats() or {} for device in devices]
    peak = max((entry.get("peak_bytes_in_use", 0) for entry in statistics), default=0)
    return peak or _resident_bytes()


def draw_losses(
    path: Path, title: str, training: Sequence[Mapping[str, Any]], validation: Sequence[Mapping[str, Any]]
) -> None:
    """Draws the losses of a log. Where a twin was trained too, a second panel shows how far apart the two are.

    Args:
      path: PNG file to write.
      title: of the figure.
      training: records with "step", "loss" and, of a twin, "optax_loss".
      validation: the same.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    compared = "optax_loss" in training[0]
    # Figure, not pyplot: no global state, and it draws without a display.
    figure = Figure(figsize=(8.0, 6.0 if compared else 4.5), dpi=150, layout="constrained")
    axes = figure.subplots(
        2 if compared else 1, 1, sharex=True, squeeze=False, height_ratios=[3, 1] if compared else None
    )
    panels = list(axes[:, 0])
    steps, losses = _column(training, "step"), _column(training, "loss")
    held_out_steps, held_out = _column(validation, "step"), _column(validation, "loss")

    top = panels[0]
    top.plot(steps, losses, color=_BLUE, linewidth=0.8, alpha=0.3)
    width = max(1, len(steps) // 30)
    middles = steps[width // 2 : len(steps) - (width - 1) // 2]
    top.plot(
        middles, _running_mean(losses, width), color=_BLUE, linewidth=1.8, label=f"training, mean of {width} steps"
    )
    top.plot(held_out_steps, held_out, color=_ORANGE, linewidth=1.8, marker="o", markersize=4.5, label="validation")
    top.set_ylabel("cross-entropy (nats per byte)")
    top.annotate(
        f"{held_out[-1]:.3f}",
        (held_out_steps[-1], held_out[-1]),
        xytext=(0, 9),
        textcoords="offset points",
        ha="right",
        color=_ORANGE,
        fontweight="bold",
    )
    if compared:
        twin = _column(validation, "optax_loss")
        top.plot(held_out_steps, twin, color=_INK, linewidth=1.2, linestyle=(0, (2, 3)), label="validation, optax twin")
        differences = [ours - theirs for ours, theirs in zip(losses, _column(training, "optax_loss"), strict=True)]
        panels[1].axhline(0.0, color=_MUTED, linewidth=0.8)
        panels[1].plot(steps, differences, color=_BLUE, linewidth=0.8)
        panels[1].set_ylabel("te_jax − optax\n(nats per byte)")
        panels[1].ticklabel_format(axis="y", style="sci", scilimits=(-2, 2), useMathText=True)
    top.legend(frameon=False, labelcolor=_INK)
    top.set_title(title, loc="left", color=_INK, fontsize=11, fontweight="bold")
    for panel in panels:
        panel.grid(axis="y", color=_MUTED, alpha=0.25, linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["left", "bottom"]].set_color(_MUTED)
        panel.tick_params(colors=_MUTED, labelcolor=_INK)
        panel.margins(x=0.02)
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path)


def _format_losses(losses: Mapping[str, float]) -> str:
    twin = f" (optax {losses['optax_loss']:.4f})" if "optax_loss" in losses else ""
    return f"loss {losses['loss']:.4f}{twin}"


def _column(records: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [record[name] for record in records]


def _running_mean(values: Sequence[float], width: int) -> list[float]:
    return [sum(values[start : start + width]) / width for start in range(len(values) - width + 1)]


def _resident_bytes() -> int:
    import resource

    with open("/proc/self/statm") as statistics:
        return int(statistics.read().split()[1]) * resource.getpagesize()
