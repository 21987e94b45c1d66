"""Output of a training run: the progress bar, the lines beneath it, and the figure of the losses."""

from __future__ import annotations

import contextlib
import importlib
import math
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tqdm

from te_jax._core.devices import bf16_peak
from te_jax.cli import _processes, _statistics
from te_jax.cli.errors import UserError

_INK, _MUTED, _BLUE, _ORANGE = "#1f2430", "#7a8294", "#2563c9", "#d9641e"


_LINE_EVERY_S = 60


class Progress:
    """A bar on a terminal, or else a line for the first step and one a minute. A line for every validation anywhere.

    Args:
      total: steps of the run.
      done: steps taken before this process.
      tokens_per_step: tokens trained on in one step, over all devices.
      flops_per_token: of all models that are trained.
      devices: jax devices whose memory is shown, and whose peak MFU is a part of.
    """

    def __init__(self, total: int, done: int, tokens_per_step: int, flops_per_token: int, devices: Sequence[Any]):
        # disable=None: no bar where stderr is a file, which would fill up with copies of it.
        self._bar = tqdm.tqdm(total=total, initial=done, unit="step", disable=None, dynamic_ncols=True)
        self._tokens_per_step = tokens_per_step
        self._flops_per_token = flops_per_token
        self._devices = devices
        self._timed_since: float | None = None
        self._timed_seconds = 0.0
        self._timed_steps = 0
        self._shown_at: float | None = None  # when a line for a step was written

    def time_steps(self) -> None:
        """Times the steps from here on. Call it when the last step, and what followed it, has ended."""
        self._timed_since = time.perf_counter()

    def stop_timing(self) -> None:
        """Times no steps until `time_steps`. Call it when the last step has ended."""
        self._timed_since = None

    def note(self, text: str) -> None:
        """Prints a sentence about something that is no error, above the bar."""
        self._bar.write(f"te-jax: note: {text}", file=sys.stderr)

    def step(self, step: int, losses: Mapping[str, float]) -> None:
        """A step has ended."""
        if self._timed_since is not None:
            now = time.perf_counter()
            self._timed_seconds += now - self._timed_since
            self._timed_since = now
            self._timed_steps += 1
        if self._bar.disable:
            if self._shown_at is None or time.perf_counter() - self._shown_at >= _LINE_EVERY_S:
                self._shown_at = time.perf_counter()
                self._write(f"step {step}", f"training {_format_losses(losses)}")
            return
        self._bar.set_postfix_str(" · ".join([_format_losses(losses), *self.speed_and_memory()]), refresh=False)
        self._bar.update()

    def validation(self, step: int, losses: Mapping[str, float]) -> None:
        """A validation has ended."""
        self._write(f"step {step}", f"validation {_format_losses(losses)}")

    def _write(self, *words: str) -> None:
        self._bar.write(" · ".join([*words, *self.speed_and_memory()]))  # without tearing the bar
        sys.stdout.flush()

    def close(self) -> None:
        """Leaves the bar as it stands, and a line with the speed of all steps that were timed."""
        self._bar.close()
        if self._timed_steps:
            print(" · ".join(self.speed_and_memory()))

    def speed_and_memory(self) -> list[str]:
        """For people: tokens/s and MFU of the steps that were timed, and the memory in use."""
        memory = f"{_memory_in_use(self._devices) / 2**20:,.0f} MiB"
        if not self._timed_steps:
            return [memory]
        speed = self._timed_steps * self._tokens_per_step / self._timed_seconds
        words = [f"{speed:,.0f} tokens/s"]
        if peak := bf16_peak(self._devices[0].device_kind):
            words.append(f"MFU {speed * self._flops_per_token / (peak * len(self._devices)):.1%} of bfloat16")
        return [*words, memory]


def summary_writer() -> type[Any]:
    """The class that writes for TensorBoard.

    Raises:
      UserError: no package has one.
    """
    for module in ("tensorboardX", "torch.utils.tensorboard"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(module).SummaryWriter
    raise UserError("--tensorboard needs the package tensorboardX: pip install tensorboardX")


def summary(
    label: str, training: Sequence[Mapping[str, Any]], validation: Sequence[Mapping[str, Any]], unit: str = "byte"
) -> str:
    """Where the losses of a log ended: a line for the run, for its twin, for the difference, and for experts' load.

    Args:
      label: name of the run.
      training: records with "step", "loss", of a twin "<its name>_loss", and with experts "largest_load".
      validation: the same.
      unit: what a token is called.
    """
    twin = _twin(training[-1])
    labels = {"loss": label} if twin is None else {"loss": label, f"{twin}_loss": f"{_words(twin)} twin"}
    width = max(12, *(len(label) + 2 for label in labels.values()))
    lines = [
        f"{label:<{width}}training {training[-1][name]:.6f}   validation {validation[0][name]:.6f} → "
        f"{validation[-1][name]:.6f} nats per {unit}"
        for name, label in labels.items()
    ]
    if twin is not None:
        trained, held_out = _excess(training[-1], twin), _excess(validation[-1], twin)
        lines.append(f"{'difference':<{width}}training {trained:+.3f}%   validation {held_out:+.3f}%")
    loads = [record["largest_load"] for record in (validation[0], validation[-1]) if "largest_load" in record]
    if len(loads) == 2:
        before, after = loads
        lines.append(f"{'experts':<{width}}largest load in validation {before:.2f} → {after:.2f} times the mean")
    return "\n".join(lines)


def draw_losses(
    path: Path,
    title: str,
    label: str,
    training: Sequence[Mapping[str, Any]],
    validation: Sequence[Mapping[str, Any]],
    unit: str = "byte",
    subtitle: str = "",
) -> None:
    """Draws the losses of a log as a PNG. With a twin, a second panel shows their difference.

    Args:
      path: PNG file to write.
      title: of the figure.
      label: name of the run.
      training: records with "step", "loss" and, of a twin, "<its name>_loss".
      validation: the same.
      unit: what a token is called.
      subtitle: speed and memory of the run.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    twin = _twin(training[0])
    ratios = [3] if twin is None else [3, 1]
    # Figure, not pyplot: no global state, and it draws without a display.
    figure = Figure(figsize=(8.0, 4.5 if twin is None else 6.0), dpi=150, layout="constrained")
    panels = list(figure.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0])
    steps, losses = _column(training, "step"), _column(training, "loss")
    held_out_steps, held_out = _column(validation, "step"), _column(validation, "loss")

    top = panels[0]
    top.plot(steps, losses, color=_BLUE, linewidth=0.8, alpha=0.3)
    width = max(1, len(steps) // 30)
    middles, mean = steps[width // 2 : len(steps) - (width - 1) // 2], _running_mean(losses, width)
    top.plot(
        middles,
        mean,
        color=_BLUE,
        linewidth=1.8,
        label="training" if width == 1 else f"training, mean of {width} steps",
    )
    # A line from the loss of random parameters would lie above everything that was learned between.
    later = slice(1 if held_out_steps[0] == 0 and len(held_out) > 2 else 0, None)
    marks: dict[str, Any] = {"color": _ORANGE, "marker": "o", "markersize": 4.5}
    top.plot(held_out_steps[:1], held_out[:1], linestyle="none", **marks)
    top.plot(held_out_steps[later], held_out[later], linewidth=1.8, label="validation", **marks)
    top.set_ylabel(f"cross-entropy (nats per {unit})")
    last, place = f"{held_out[-1]:.3f}", (held_out_steps[-1], held_out[-1])
    style: dict[str, Any] = {"ha": "right", "color": _ORANGE, "fontweight": "bold"}
    top.annotate(last, place, xytext=(0, 9), textcoords="offset points", **style)
    if twin is not None:
        name, words = f"{twin}_loss", _words(twin)
        style = {"color": _INK, "linewidth": 1.2, "linestyle": (0, (2, 3))}
        top.plot(held_out_steps[later], _column(validation, name)[later], label=f"validation, {words} twin", **style)
        differences = [ours - theirs for ours, theirs in zip(losses, _column(training, name), strict=True)]
        panels[1].axhline(0.0, color=_MUTED, linewidth=0.8)
        panels[1].plot(steps, differences, color=_BLUE, linewidth=0.8)
        panels[1].set_ylabel(f"{label} − {words}\n(nats per {unit})")
        panels[1].ticklabel_format(axis="y", style="sci", scilimits=(-2, 2), useMathText=True)
    top.legend(frameon=False, labelcolor=_INK)
    figure.suptitle(title, x=0.01, ha="left", color=_INK, fontsize=11, fontweight="bold")
    top.set_title(subtitle, loc="left", color=_MUTED, fontsize=10)
    for panel in panels:
        panel.grid(axis="y", color=_MUTED, alpha=0.25, linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["left", "bottom"]].set_color(_MUTED)
        panel.tick_params(colors=_MUTED, labelcolor=_INK)
        panel.margins(x=0.02)
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path)


def draw_statistics(path: Path, title: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Draws the statistics of a log as a PNG: for each role of a tensor the errors of all layers, and the shares of
    values that become zero or saturate, of which the largest is named.

    Args:
      path: PNG file to write.
      title: of the figure.
      records: of `_statistics.record_of`, at least one.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps, worst = [record["step"] for record in records], _worst_products(records)
    height = min(9.0, 1.2 + 0.16 * max(len(fields["error"]) for fields in worst.values()))
    figure = Figure(figsize=(4.2 * len(worst), height + 5.0), dpi=120, layout="constrained")
    grid: Any = figure.subplots(3, len(worst), squeeze=False, height_ratios=[height, 2.2, 2.2])
    errors = ScalarMappable(LogNorm(0.01, 1.0), colormaps["viridis"].with_extremes(bad="#d9d9d9"))
    gaps = [after - before for before, after in zip([0, *steps], steps, strict=False)]
    edges = [*(step - gap / 2 for step, gap in zip(steps, gaps, strict=True)), steps[-1] + gaps[-1] / 2]
    for (role, fields), (top, *panels) in zip(worst.items(), grid.T, strict=True):
        names = list(fields["error"])
        rows = range(len(names) + 1)
        top.pcolormesh(edges, rows, list(fields["error"].values()), norm=errors.norm, cmap=errors.cmap)
        every = -(-len(names) // 48)
        top.set_yticks([row + 0.5 for row in rows[:-1:every]], names[::every], fontsize=6)
        top.invert_yaxis()
        top.set_title(role, loc="left", color=_INK, fontsize=10)
        for panel, field in zip(panels, ("underflow", "saturation"), strict=True):
            _draw_shares(panel, field, steps, fields[field], _statistics.limit_of(field, role))
        for panel in (top, *panels):
            panel.tick_params(colors=_MUTED, labelcolor=_INK)
            panel.set_xlim(edges[0], edges[-1])
            panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        panels[-1].set_xlabel("step")
    figure.colorbar(errors, ax=grid[0, -1], label="relative error")
    figure.suptitle(title, x=0.01, ha="left", color=_INK, fontsize=11, fontweight="bold")
    figure.savefig(path)


def _worst_products(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """{role: {field: {layer: the largest value of its products in each record, NaN where one is}}}."""
    worst: dict[str, dict[str, dict[str, list[float]]]] = {}
    for place, record in enumerate(records):
        for layer, role, _, values in _statistics.tensors_of(record):
            for field in ("error", "underflow", "saturation"):
                column = worst.setdefault(role, {}).setdefault(field, {}).setdefault(layer, [0.0] * len(records))
                both = column[place], values[field]
                column[place] = math.nan if any(map(math.isnan, both)) else max(both)
    return {role: worst[role] for role in ("activation", "kernel", "gradient") if role in worst}


def _draw_shares(panel: Any, field: str, steps: Sequence[int], shares: Mapping[str, list[float]], limit: float) -> None:
    """A curve for each layer, and the limit above which a run warns."""
    from matplotlib.ticker import FuncFormatter

    largest, worst, step = max(
        (share, name, step) for name, column in shares.items() for step, share in zip(steps, column, strict=True)
    )
    for name, column in shares.items():
        panel.plot(steps, column, color=_ORANGE if name == worst else _BLUE, linewidth=0.9, alpha=0.45)
    panel.plot(steps, shares[worst], color=_ORANGE, linewidth=1.4, marker="o", markersize=2.0)
    panel.axhline(limit, color=_MUTED, linewidth=0.8, linestyle=(0, (2, 3)))
    panel.set_yscale("symlog", linthresh=1e-4)
    panel.set_ylim(0.0, 1.0)
    panel.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))
    words = f"{worst}, {largest:.2%} at step {step}" if largest else "none"
    panel.set_title(f"{field}: {words}", loc="left", color=_ORANGE, fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)


def _format_losses(losses: Mapping[str, float]) -> str:
    twin = _twin(losses)
    words = f"loss {losses['loss']:.4f}" + ("" if twin is None else f" ({_words(twin)} {losses[f'{twin}_loss']:.4f})")
    return words + (f" · largest expert load {losses['largest_load']:.2f}×" if "largest_load" in losses else "")


def _twin(record: Mapping[str, Any]) -> str | None:
    """The name of the twin whose losses a record holds beside the run's own."""
    return next((name.removesuffix("_loss") for name in record if name.endswith("_loss")), None)


def _words(twin: str) -> str:
    """A twin's name for people."""
    return twin.replace("_", " ")


def _excess(record: Mapping[str, Any], twin: str) -> float:
    """By how many per cent a loss lies above the twin's."""
    ours, theirs = record["loss"], record[f"{twin}_loss"]
    return 100 * (ours - theirs) / theirs if theirs else math.nan


def _column(records: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [record[name] for record in records]


def _running_mean(values: Sequence[float], width: int) -> list[float]:
    return [sum(values[start : start + width]) / width for start in range(len(values) - width + 1)]


def _memory_in_use(devices: Sequence[Any]) -> int:
    """Bytes: the most that a device of this process has held so far, or on a CPU what the process holds now."""
    local_devices = [device for device in devices if device.process_index == _processes.index()]
    peak = max((device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in local_devices)
    return peak or int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
