"""The table and the figure of `benchmarks.accuracy`'s results, for `benchmarks.tables`."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.accuracy import VARIANTS

BASELINE = next(iter(VARIANTS))
_COLORS = dict(zip(VARIANTS, ("#24292f", "#0969da", "#bc4c00", "#1a7f37", "#8250df"), strict=True))
_MEAN_OF = 10  # points of a curve, for differences

Runs = dict[tuple[str, int], dict[str, Any]]
"""Results by variant and seed."""


def load(folder: Path) -> Runs:
    """The results in a folder.

    Raises:
      ValueError: they are of different models, texts, lengths, commits or versions.
    """
    runs = {(run["variant"], run["seed"]): run for run in map(_read, sorted(folder.glob("*.json")))}
    for key in ("parameters", "steps", "tokens", "text", "learning_rate", "every", "commit", "versions"):
        if len({json.dumps(run[key]) for run in runs.values()}) > 1:
            raise ValueError(f"{folder} has runs with different {key}: train them all again")
    return {
        (variant, seed): runs[variant, seed] for variant in VARIANTS for seed in _seeds(runs) if (variant, seed) in runs
    }


def table(runs: Runs, figure: str) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of a final loss ("final_training" or "final_validation"), in nats a token.

    Each run stands beside bfloat16 of the same seed, and the mean beside the mean of the same seeds.
    """
    seeds = _seeds(runs)
    rows = []
    for variant in dict.fromkeys(variant for variant, _ in runs):
        losses = {seed: runs[variant, seed][figure] for seed in seeds if (variant, seed) in runs}
        cells = [_beside(runs, figure, variant, losses, [seed]) for seed in seeds]
        rows.append([f"`{variant}`", *cells, _beside(runs, figure, variant, losses, list(losses))])
    return ["", *(f"seed {seed}" for seed in seeds), "mean"], rows


def _beside(runs: Runs, figure: str, variant: str, losses: dict[int, float], seeds: Sequence[int]) -> str:
    if not all(seed in losses for seed in seeds):
        return ""
    mean = fmean(losses[seed] for seed in seeds)
    if variant == BASELINE or not all((BASELINE, seed) in runs for seed in seeds):
        return f"{mean:.4f}"
    excess = 100 * (mean / fmean(runs[BASELINE, seed][figure] for seed in seeds) - 1)
    return f"{mean:.4f} ({excess:+.2f}%)"


def sentences(runs: Runs) -> str:
    """What was trained, how far seeds of bfloat16 differ, and which runs were stopped."""
    first = next(iter(runs.values()))
    read = 0.9 * first["text"]["tokens"]  # a tenth is held out
    words = [
        f"{first['parameters'] / 1e6:.1f} million parameters, {first['tokens'] / 1e6:.1f} million tokens in "
        f"{first['steps']:,} steps, from random places of {read / 1e6:.1f} million: each is met "
        f"{first['tokens'] / read:.1f} times in the mean. A training loss is the mean of the last "
        f"{first['final_steps']} steps."
    ]
    if len(_seeds_of(runs, BASELINE)) > 1:
        spread = [_spread(runs, figure) for figure in ("final_training", "final_validation")]
        words.append(
            f"From the smallest loss to the largest, seeds of `{BASELINE}` differ by {spread[0]:.2f}% in training and "
            f"{spread[1]:.2f}% in validation."
        )
    stopped = [
        f"`{variant}` with seed {seed} after step {', '.join(map(str, run['stopped_after']))}"
        for (variant, seed), run in runs.items()
        if run["stopped_after"]
    ]
    if stopped:
        words.append(f"Stopped and resumed from a checkpoint: {'; '.join(stopped)}.")
    return " ".join(words) + "\n"


def _spread(runs: Runs, figure: str) -> float:
    losses = [runs[BASELINE, seed][figure] for seed in _seeds_of(runs, BASELINE)]
    return 100 * (max(losses) - min(losses)) / fmean(losses)


def _seeds(runs: Runs) -> list[int]:
    return sorted({seed for _, seed in runs})


def _seeds_of(runs: Runs, variant: str) -> list[int]:
    return [seed for name, seed in runs if name == variant]


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


# The figure

_WIDTH, _MARGIN, _LEFT, _TOP, _HEIGHT, _BETWEEN = 720, 16, 56, 52, 220, 44
# White ground: an image does not know whether the page around it is dark, only whether the system is.
_STYLE = (
    "svg{background:#fff}text{font:12px system-ui,sans-serif;fill:#24292f}.title{font-weight:600;font-size:13px}"
    "polyline{fill:none;stroke-width:1.4}.axis{stroke:#d0d7de}"
)
LABEL = "Training loss in nats a token, and how far it is above bfloat16 with the same seed, in %, by step"


def curves(runs: Runs) -> str:
    """An SVG of two panels: training losses by step, and how far each run is above bfloat16 of the same seed.

    Seeds after the first have dashes. Written without a plotting library, so that the same results give the same bytes.
    """
    losses = {key: _points(run["training"], run["every"]) for key, run in runs.items()}
    differences = {}
    for (variant, seed), run in runs.items():
        if variant != BASELINE and (BASELINE, seed) in runs:
            baseline = _means(runs[BASELINE, seed]["training"])
            excess = [100 * (a / b - 1) for a, b in zip(_means(run["training"]), baseline, strict=True)]
            differences[variant, seed] = _points(excess, run["every"] * _MEAN_OF)
    steps = max(run["steps"] for run in runs.values())
    # The first losses would leave no height for the rest.
    late = [loss for points in losses.values() for step, loss in points if step > steps / 20]
    shapes = [f'<text class="title" x="0" y="16">{LABEL}</text>', *_legend(runs)]
    shapes += _panel(losses, _TOP, steps, (min(late), max(late)))
    around = [0.0, *(excess for points in differences.values() for step, excess in points if step > steps / 20)]
    second = _TOP + _HEIGHT + _BETWEEN
    if differences:
        shapes += _panel(differences, second, steps, (min(around), max(around)))
    height = (second + _HEIGHT if differences else _TOP + _HEIGHT) + 40
    body = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{-_MARGIN} {-_MARGIN // 2} {_WIDTH + 2 * _MARGIN} {height}" '
        f'width="{_WIDTH + 2 * _MARGIN}" height="{height}" role="img" aria-label="{LABEL}">\n'
        f"<style>{_STYLE}</style>\n{body}\n</svg>\n"
    )


def _legend(runs: Runs) -> Iterator[str]:
    for place, variant in enumerate(dict.fromkeys(variant for variant, _ in runs)):
        x = _LEFT + 160 * place
        yield f'<line x1="{x}" y1="34" x2="{x + 20}" y2="34" stroke="{_COLORS[variant]}" stroke-width="3"/>'
        yield f'<text x="{x + 26}" y="38">{variant}</text>'


def _panel(
    lines: dict[tuple[str, int], list[tuple[float, float]]], top: int, steps: int, bounds: tuple[float, float]
) -> Iterator[str]:
    """A grid, its labels, and a line for each run; what is beyond the bounds is cut off."""
    low, high = bounds
    room = 0.05 * (high - low) or 1e-3
    low, high = low - room, high + room

    def x(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT) * step / steps

    def y(value: float) -> float:
        return top + _HEIGHT * (high - value) / (high - low)

    for value in _ticks(low, high):
        yield f'<line class="axis" x1="{_LEFT}" y1="{y(value):.1f}" x2="{_WIDTH}" y2="{y(value):.1f}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>'
    for step in _ticks(0, steps):
        anchor = "end" if x(step) > _WIDTH - 20 else "middle"
        yield f'<text x="{x(step):.1f}" y="{top + _HEIGHT + 16}" text-anchor="{anchor}">{step:g}</text>'
    if low < 0 < high:
        yield f'<line x1="{_LEFT}" y1="{y(0):.1f}" x2="{_WIDTH}" y2="{y(0):.1f}" stroke="{_COLORS[BASELINE]}"/>'
    for (variant, seed), points in lines.items():
        shown = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points if low <= value <= high)
        dashes = f' stroke-dasharray="{6 - min(seed, 4)} 3"' if seed else ""
        yield f'<polyline stroke="{_COLORS[variant]}"{dashes} points="{shown}"/>'


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between two, at least three."""
    power = 10.0 ** math.floor(math.log10((high - low) / 3))
    size = max(factor * power for factor in (1, 2, 5) if factor * power <= (high - low) / 3)
    first, last = math.ceil(low / size), math.floor(high / size)
    return [round(size * tick, 9) for tick in range(first, last + 1)]


def _points(values: Sequence[float], every: int) -> list[tuple[float, float]]:
    """Each value at the middle of its steps."""
    return [(every * (place + 0.5), value) for place, value in enumerate(values)]


def _means(values: Sequence[float]) -> list[float]:
    count = min(_MEAN_OF, len(values))
    return [fmean(values[start : start + count]) for start in range(0, len(values) - count + 1, count)]
