"""The network that fails in FP8: its page has the table and the figure of its results, and says what they say."""

import xml.etree.ElementTree

import jax
import pytest

from benchmarks import diverging, harness

PAGE = harness.ROOT / "docs" / "guides" / "diverging.md"


@pytest.fixture(scope="module")
def runs():
    return diverging.load()


def test_the_page_has_the_table_and_the_figure(runs):
    assert len(runs) == len(diverging.VARIANTS) * len(diverging.SEEDS)
    assert diverging.table(runs) in PAGE.read_text(encoding="utf-8")
    drawn = diverging.figure(runs)
    assert drawn == diverging.FIGURE.read_text(encoding="utf-8")
    lines = xml.etree.ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}polyline")
    assert len(list(lines)) == 5 * 2 + 5 * 2 + 3 * 2  # runs without FP8 have no statistics


@pytest.mark.parametrize("seed", diverging.SEEDS)
def test_the_runs_show_what_the_page_says(seed, runs):
    exact = runs["bfloat16", seed]
    for name in ("float32", "block", "current_but_embed", "block_tiny_epsilon"):
        assert runs[name, seed]["final"] < 1.15 * exact["final"], name
    stalled = runs["current", seed]
    assert stalled["final"] > 2 * exact["final"]
    assert stalled["final_by_decade"][0] > 4 * exact["final_by_decade"][0]
    assert stalled["final_by_decade"][-1] < 2 * exact["final_by_decade"][-1]
    assert min(found["embed/activation/forward/underflow"] for found in stalled["statistics"].values()) > 0.1
    broken = runs["current_tiny_epsilon", seed]
    assert not any(broken["losses"])
    first = broken["statistics"]["1"]
    assert [name for name, value in first.items() if name.endswith("/nonfinite") and value] == [
        "embed/gradient/dgrad/nonfinite",
        "embed/gradient/wgrad/nonfinite",
    ]


@pytest.mark.slow
def test_the_first_steps_repeat_the_results(runs):
    variant = diverging.VARIANTS["current"]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # JAX's defaults
        short = diverging.train(variant, 0, steps=2)
    assert short["losses"][0] == pytest.approx(runs["current", 0]["losses"][0], rel=2e-2)
    found, wanted = short["statistics"]["1"], runs["current", 0]["statistics"]["1"]
    assert found.keys() == wanted.keys()
    assert found["embed/activation/forward/underflow"] == pytest.approx(
        wanted["embed/activation/forward/underflow"], rel=1e-2
    )
