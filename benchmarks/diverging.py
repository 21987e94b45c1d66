"""A training that fails in FP8 and is saved: the runs, the figure and the table of docs/guides/diverging.md.

    JAX_PLATFORMS=cpu python -m benchmarks.diverging             # all runs that have no result, some minutes
    JAX_PLATFORMS=cpu python -m benchmarks.diverging --draw      # the figure again, from the results

A small network forecasts time series: 128 samples in, 32 samples out, as counts of visits, sales or prices come. A
series has any amplitude from 1 to 10^6, each power of ten as often as every other. The first layer reads the series as
they are, and a norm behind it takes the amplitude out. The loss compares the forecast with the series divided by its
root mean square: 1 is the loss of no forecast.

One scale for the tensor leaves no FP8 value for the small series beside the large ones. Runs of one seed have the same
initial parameters and the same batches.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks import harness
from te_jax import debug
from te_jax.nnx import convert
from te_jax.recipe import BlockScaling, CurrentScaling, Recipe

CONTEXT, AHEAD, HIDDEN, MLP, BATCH, STEPS, DECADES = 128, 32, 128, 256, 512, 500, 6
LEARNING_RATE = 3e-3
RESULTS = harness.RESULTS / "cpu" / "diverging"
FIGURE = harness.ROOT / "docs" / "images" / "diverging.svg"
_LOSS_EVERY, _STATISTICS_EVERY, _FINAL_SERIES = 10, 50, 4096


class Variant(NamedTuple):
    """How a run differs from others."""

    recipe: Recipe | None
    rules: tuple[tuple[str, Recipe | None], ...] = ()
    dtype: str = "float32"
    epsilon: float = 1e-6  # of the norm behind the first layer; Flax's default


VARIANTS = {
    "float32": Variant(None),
    "bfloat16": Variant(None, dtype="bfloat16"),
    "block": Variant(BlockScaling()),
    "current": Variant(CurrentScaling()),
    "current_but_embed": Variant(CurrentScaling(), rules=(("embed", None),)),
    "current_tiny_epsilon": Variant(CurrentScaling(), epsilon=1e-30),
    "block_tiny_epsilon": Variant(BlockScaling(), epsilon=1e-30),
}
SEEDS = (0, 1)


class Block(nnx.Module):
    """Two layers beside a residual stream."""

    def __init__(self, dtype: Any, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(HIDDEN, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(HIDDEN, MLP, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(MLP, HIDDEN, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Forecast(nnx.Module):
    """The next samples of series, as parts of their root mean square."""

    def __init__(self, variant: Variant, rngs: nnx.Rngs):
        dtype: Any = jnp.dtype(variant.dtype)
        self.embed = nnx.Linear(CONTEXT, HIDDEN, use_bias=False, dtype=dtype, rngs=rngs)
        self.embed_norm = nnx.RMSNorm(HIDDEN, epsilon=variant.epsilon, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(dtype, rngs) for _ in range(2)])
        self.norm = nnx.RMSNorm(HIDDEN, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(HIDDEN, AHEAD, dtype=dtype, rngs=rngs)

    def __call__(self, series: jax.Array) -> jax.Array:
        x = self.embed_norm(self.embed(series))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def series_of(key: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(series [count, CONTEXT], what follows divided by their root mean squares [count, AHEAD], amplitudes [count])."""
    keys = jax.random.split(key, 4)
    frequencies = jax.random.uniform(keys[0], (count, 3, 1), minval=0.02, maxval=0.5)
    phases = jax.random.uniform(keys[1], (count, 3, 1), maxval=2 * math.pi)
    heights = jax.random.uniform(keys[2], (count, 3, 1), minval=0.2)
    times = jnp.arange(CONTEXT + AHEAD, dtype=jnp.float32)
    values = jnp.sum(heights * jnp.sin(frequencies * times + phases), axis=1)
    values /= jnp.sqrt(jnp.mean(values[:, :CONTEXT] ** 2, axis=1, keepdims=True))
    amplitudes = 10.0 ** jax.random.uniform(keys[3], (count,), maxval=float(DECADES))
    return values[:, :CONTEXT] * amplitudes[:, None], values[:, CONTEXT:], amplitudes


def train(variant: Variant, seed: int, steps: int = STEPS) -> dict[str, Any]:
    """A run up to a step: losses, statistics of layers in FP8, and losses at the end by the amplitude of series."""
    model = Forecast(variant, nnx.Rngs(seed))
    if variant.recipe is not None:
        convert(model, variant.recipe, rules=variant.rules)
    graph, params = nnx.split(model, nnx.Param)
    adam = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, STEPS))

    def errors(params: Any, series: jax.Array, following: jax.Array) -> jax.Array:
        return jnp.mean((nnx.merge(graph, params)(series).astype(jnp.float32) - following) ** 2, axis=1)

    def gradient(params: Any, series: jax.Array, following: jax.Array) -> Any:
        return jax.value_and_grad(lambda params: jnp.mean(errors(params, series, following)))(params)

    def step(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        params, moments = state
        series, following, _ = series_of(key, BATCH)
        loss, gradients = gradient(params, series, following)
        updates, moments = adam.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    several = jax.jit(lambda state, keys: jax.lax.scan(step, state, keys))
    observed = jax.jit(debug.with_statistics(gradient))
    keys = jax.random.split(jax.random.key(100 + seed), STEPS)
    state, losses, statistics = (params, adam.init(params)), [], {}
    for first in range(0, steps, _LOSS_EVERY):
        if variant.recipe is not None and first % _STATISTICS_EVERY == 0:
            series, following, _ = series_of(keys[first], BATCH)
            _, found = observed(state[0], series, following)
            statistics[str(first + 1)] = _condensed(found)
        state, losses_of_steps = several(state, keys[first : first + _LOSS_EVERY])
        losses.append(_number(jnp.mean(losses_of_steps)))
    series, following, amplitudes = series_of(jax.random.key(7), _FINAL_SERIES)
    final, decade = np.asarray(errors(state[0], series, following)), np.log10(np.asarray(amplitudes)).astype(int)
    return {
        "losses": losses,
        "final": _number(np.mean(final)),
        "final_by_decade": [_number(np.mean(final[decade == d])) for d in range(DECADES)],
        "statistics": statistics,  # by the step that they are of
    }


def _condensed(statistics: Any) -> dict[str, float | None]:
    """Numbers of the first layer, and the largest of all others together, named "others"."""
    found: dict[str, float] = {}
    for name, value in debug.scalars(statistics).items():
        layer, role, product, field = name.rsplit("/", 3)
        if field in ("underflow", "saturation", "nonfinite", "error"):
            key = "/".join((layer if layer == "embed" else "others", role, product, field))
            found[key] = max(found.get(key, 0.0), math.inf if math.isnan(value) else value)
    return {name: _number(value) for name, value in found.items()}


def _number(value: Any) -> float | None:
    number = float(value)
    return float(f"{number:.4g}") if math.isfinite(number) else None


# ------------------------------------------------------------------------------------------------------------- results

Runs = dict[tuple[str, int], dict[str, Any]]


def load(folder: Path = RESULTS) -> Runs:
    """Results by variant and seed."""
    paths = {(name, seed): folder / f"{name}-{seed}.json" for name in VARIANTS for seed in SEEDS}
    return {key: json.loads(path.read_text(encoding="utf-8")) for key, path in paths.items() if path.exists()}


def table(runs: Runs) -> str:
    """Final losses in Markdown: of all series, and of those of the smallest and the largest amplitudes,
    the mean of both seeds."""
    smallest, largest = "amplitudes of 1 to 10", f"amplitudes above 10^{DECADES - 1}"
    lines = [f"| loss | seed 0 | seed 1 | {smallest} | {largest} |", "| --- | ---: | ---: | ---: | ---: |"]
    for name in dict.fromkeys(name for name, _ in runs):
        of_seeds = [runs[name, seed] for seed in SEEDS if (name, seed) in runs]
        by_decade = [[run["final_by_decade"][decade] for run in of_seeds] for decade in (0, DECADES - 1)]
        cells = [*(run["final"] for run in of_seeds), *(None if None in each else fmean(each) for each in by_decade)]
        lines.append(f"| `{name}` | {' | '.join('NaN' if cell is None else f'{cell:.3f}' for cell in cells)} |")
    return "\n".join(lines) + "\n"


# -------------------------------------------------------------------------------------------------------------- figure

_WIDTH, _LEFT, _TOP, _HEIGHT, _BETWEEN = 720, 48, 52, 170, 52
_COLORS = dict(
    zip(VARIANTS, ("#24292f", "#8c959f", "#0969da", "#cf222e", "#1a7f37", "#8250df", "#bf8700"), strict=True)
)
_STYLE = (
    "svg{background:#fff}text{font:12px system-ui,sans-serif;fill:#24292f}.title{font-weight:600;font-size:13px}"
    "polyline{fill:none;stroke-width:1.4}.axis{stroke:#d0d7de}"
)
LABEL = (
    "Loss by step, loss by amplitude of the series, and values that become zero in FP8, of a network in five precisions"
)


def figure(runs: Runs) -> str:
    """An SVG of three panels, in which the second seed has dashes. The same results give the same bytes."""
    shown = {key: run for key, run in runs.items() if VARIANTS[key[0]].epsilon == Variant(None).epsilon}
    losses = {
        key: [(_LOSS_EVERY * (place + 0.5), loss) for place, loss in enumerate(run["losses"])]
        for key, run in shown.items()
    }
    # An amplitude between 10^d and 10^(d + 1).
    by_decade = {key: [(d + 0.5, loss) for d, loss in enumerate(run["final_by_decade"])] for key, run in shown.items()}
    zeros = {
        key: [
            (float(step), 100 * values.get("embed/activation/forward/underflow", 0.0)) for step, values in found.items()
        ]
        for key, run in shown.items()
        if (found := run["statistics"])
    }
    shapes = list(_legend(shown))
    shapes += _panel(losses, 0, "loss, by step", (0, STEPS, 100), (0.0, 1.0, 0.2))
    shapes += _panel(by_decade, 1, "loss at the end, by log10 of the amplitude", (0, DECADES, 1), (0.0, 1.0, 0.2))
    shapes += _panel(
        zeros, 2, "input of embed: values that become zero, in %, by step", (0, STEPS, 100), (0.0, 20.0, 5.0)
    )
    body, height = "\n".join(shapes), _TOP + 3 * (_HEIGHT + _BETWEEN)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-16 -8 {_WIDTH + 32} {height}" width="{_WIDTH + 32}" '
        f'height="{height}" role="img" aria-label="{LABEL}">\n<style>{_STYLE}</style>\n{body}\n</svg>\n'
    )


def _legend(runs: Runs) -> Iterator[str]:
    x = _LEFT
    for name in dict.fromkeys(name for name, _ in runs):
        yield f'<line x1="{x}" y1="10" x2="{x + 18}" y2="10" stroke="{_COLORS[name]}" stroke-width="3"/>'
        yield f'<text x="{x + 23}" y="14">{name}</text>'
        x += 44 + 7 * len(name)


def _panel(
    lines: dict[tuple[str, int], list[tuple[float, float]]],
    place: int,
    title: str,
    across: tuple[float, float, float],
    up: tuple[float, float, float],
) -> Iterator[str]:
    """A grid with labels, and a line for each run. `across` and `up` are the first, the last and the distance of grid
    lines."""
    top = _TOP + place * (_HEIGHT + _BETWEEN)

    def x(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT) * (value - across[0]) / (across[1] - across[0])

    def y(value: float) -> float:
        return top + _HEIGHT * (up[1] - min(value, up[1])) / (up[1] - up[0])

    yield f'<text class="title" x="0" y="{top - 12}">{title}</text>'
    for value in np.arange(up[0], up[1] + up[2] / 2, up[2]):
        yield f'<line class="axis" x1="{_LEFT}" y1="{y(value):.1f}" x2="{_WIDTH}" y2="{y(value):.1f}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>'
    for value in np.arange(across[0], across[1] + across[2] / 2, across[2]):
        anchor = "end" if value == across[1] else "middle"
        yield f'<text x="{x(value):.1f}" y="{top + _HEIGHT + 16}" text-anchor="{anchor}">{value:g}</text>'
    for (name, seed), points in lines.items():
        dashes = ' stroke-dasharray="5 3"' if seed else ""
        shown = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
        yield f'<polyline stroke="{_COLORS[name]}"{dashes} points="{shown}"/>'


def main(argv: Sequence[str] | None = None) -> int:
    """Trains what has no result, and draws all; see the module's docstring. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diverging", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--draw", action="store_true", help="train nothing")
    parser.add_argument("--commit", help="recorded in the place of what git says")
    args = parser.parse_args(argv)
    if not args.draw:
        record = harness.environment(args.commit)
        RESULTS.mkdir(parents=True, exist_ok=True)
        for name, variant in VARIANTS.items():
            for seed in SEEDS:
                path = RESULTS / f"{name}-{seed}.json"
                if not path.exists():
                    run = train(variant, seed)
                    path.write_text(json.dumps(record | {"variant": name, "seed": seed} | run, indent=1) + "\n")
                    print(f"{name}-{seed}: {run['final']}", flush=True)
    runs = load()
    FIGURE.write_text(figure(runs), encoding="utf-8")
    print(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
