"""The figure of the first screen of README.md and docs/index.md, and how old the results of that screen are."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.harness import run_of

DEVICE = "nvidia-h200"
"""Whose result of flax_models the figure shows."""

CASE = "8b-8x1x8192"
LABEL = "Train step of a Llama in plain Flax NNX, 8 layers of Llama 3 8B, 8192 tokens, AdamW"
BARS = (
    ("plain JAX, bfloat16", "nnx"),
    ("plain JAX, Flax's FP8", "flax_fp8"),
    ("te_jax: one change", "nnx_convert"),
    ("te_jax: three changes", "nnx_loss"),
    ("te_jax: six changes", "nnx_attention"),
)
"""In words, and names of implementations; the first is the one compared with, and what its run lacks has no bar."""

_WIDTH, _MARGIN, _TOP, _BAR, _GAP = 720, 16, 62, 26, 12
_SPEED, _MEMORY, _LENGTH = 190, 440, 150
# White ground: an image does not know whether the page around it is dark, only whether the system is.
_STYLE = (
    "svg{background:#fff}text{font:16px system-ui,sans-serif;fill:#24292f}.title{font-weight:600}"
    ".small{font-size:13px;fill:#57606a}.te{fill:#0969da}.peer{fill:#8c959f}"
)


def two_panels(document: dict[str, Any]) -> str:
    """An SVG with a bar for each of `BARS` in two panels, speed and memory, and the last loss beside it."""
    rows = {row["implementation"]: row for row in document["rows"] if row["case"] == CASE}
    plain = rows.get(BARS[0][1])
    if plain is None:
        raise ValueError(f"{document['family']} has no {BARS[0][1]} of {CASE}, which the first screen's figure shows")
    run = run_of(document, plain)
    bars = [(words, rows[name]) for words, name in BARS if name in rows and run_of(document, rows[name]) == run]
    styles = ["te" if words.startswith("te_jax") else "peer" for words, _ in bars]
    speeds = [plain["median_ms"] / row["median_ms"] for _, row in bars]
    gigabytes = [row["peak_bytes"] / 1e9 for _, row in bars]
    losses = [row["losses"] for _, row in bars if row.get("losses")]
    middles = [_TOP + place * (_BAR + _GAP) + 19 for place in range(len(bars))]
    shapes = [
        *(_text(_SPEED - 10, y, words, anchor="end") for y, (words, _) in zip(middles, bars, strict=True)),
        *_panel("× as fast", "higher is better", _SPEED, styles, speeds, "{:.2f}×"),
        *_panel("GB of memory", "lower is better", _MEMORY, styles, gigabytes, "{:.1f}"),
    ]
    if len(losses) == len(bars):
        shapes += [
            _text(_WIDTH, 16, "loss", "title", "end"),
            _text(_WIDTH, 38, f"step {len(losses[0])}", "small", "end"),
        ]
        shapes += [_text(_WIDTH, y, f"{each[-1]:.2f}", anchor="end") for y, each in zip(middles, losses, strict=True)]
    bottom = _TOP + len(bars) * (_BAR + _GAP) + 14
    measured = f"{document['device']['kind']}, {run['date'][:10]}"
    shapes += [_text(0, bottom, LABEL, "small"), _text(0, bottom + 18, measured, "small")]
    width, height, body = _WIDTH + 2 * _MARGIN, bottom + 18 + 2 * _MARGIN, "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{-_MARGIN} {-_MARGIN // 2} {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{escape(LABEL)}: speed and memory">\n'
        f"<style>{_STYLE}</style>\n{body}\n</svg>\n"
    )


def _panel(title: str, better: str, x: int, styles: Sequence[str], values: Sequence[float], form: str) -> list[str]:
    """Headings, and bars as long as their values."""
    shapes = [_text(x, 16, title, "title"), _text(x, 38, better, "small")]
    for place, (style, value) in enumerate(zip(styles, values, strict=True)):
        length = _LENGTH * value / max(values)
        y = _TOP + place * (_BAR + _GAP)
        shapes.append(f'<rect class="{style}" x="{x}" y="{y}" width="{length:.1f}" height="{_BAR}" rx="2"/>')
        shapes.append(_text(round(x + length + 6), y + 19, form.format(value)))
    return shapes


def _text(x: int, y: int, words: str, style: str = "label", anchor: str = "start") -> str:
    return f'<text class="{style}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'


def age(root: Path, document: dict[str, Any]) -> str:
    """The date of a result, and how many commits changed te_jax or its kernels since, where git can tell."""
    command = ["git", "-C", str(root), "rev-list", "--count", f"{document['commit']}..HEAD", "--", "te_jax", "cuda_ext"]
    try:
        counted = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, no history, or a shallow one
        return document["date"][:10]
    return f"{document['date'][:10]}, {counted} commits of te_jax/ and cuda_ext/ ago"
