"""`te-jax train` in FP8: every recipe learns as the run without one, and delayed scaling's state is kept apart."""

import dataclasses
import itertools
import json
import re
import shutil

import jax
import numpy as np
import pytest
from runs import EVERY, SMALL, STEPS

from te_jax.cli import _options, _step, train
from te_jax.cli._run_folder import RunFolder, read_header
from te_jax.cli.main import main
from te_jax.recipe import DelayedScaling

pytestmark = pytest.mark.usefixtures("as_in_a_process_of_its_own", "figures_of_twins_alone", "programs_of_equal_runs")

RECIPES = ("block", "current", "rowwise", "delayed")


def losses(out, kind, name="loss"):
    lines = (out / "log.jsonl").read_text().splitlines()
    return np.array([record[name] for record in map(json.loads, lines) if record["kind"] == kind])


@pytest.fixture(scope="module")
def delayed(tmp_path_factory, as_in_a_process_of_its_own, programs_of_equal_runs):
    return run(tmp_path_factory.mktemp("delayed") / "run", "--recipe", "delayed")


def run(out, *options):
    """A run like the one without a recipe, `whole`."""
    assert main(["train", *SMALL, *EVERY, "--steps", str(STEPS), *options, "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize(
    "recipe", ["current", "delayed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("block", "rowwise"))]
)
def test_every_recipe_ends_where_the_run_without_one_does(recipe, whole, tmp_path, capsys, request):
    compare = ["--compare"] if recipe == "current" else []
    if recipe == "delayed":
        out = request.getfixturevalue("delayed")
    else:
        out = run(tmp_path / "run", "--recipe", recipe, *compare)
    assert read_header(out)["options"]["recipe"] == recipe
    assert read_header(out)["model"]["recipe"]["forward_dtype"] == "float8_e4m3fn"
    validation, expected = losses(out, "validation"), losses(whole, "validation")
    np.testing.assert_allclose(validation, expected, rtol=2e-2)
    assert validation[-1] < validation[0] - 2
    training, expected = losses(out, "train"), losses(whole, "train")
    assert (training != expected).all()
    # Single batches may go astray for a step, depending on what XLA makes of sums.
    assert np.mean(np.isclose(training, expected, rtol=5e-2)) >= 0.9
    np.testing.assert_allclose(np.mean(training), np.mean(expected), rtol=2e-2)
    if compare:
        _check_twin(out, whole, capsys.readouterr().out)


def _check_twin(out, whole, shown):
    for kind in ("train", "validation"):
        np.testing.assert_allclose(losses(out, kind, "float32_loss"), losses(whole, kind), rtol=1e-4)
    for name, label in {"loss": "current scaling", "float32_loss": "float32 twin"}.items():
        assert re.search(
            rf"^{label} .* → {losses(out, 'validation', name)[-1]:.6f} nats per byte$", shown, re.MULTILINE
        )
    difference = re.search(r"^difference +training (.*)% +validation (.*)%$", shown, re.MULTILINE)
    for kind, found in zip(("train", "validation"), difference.groups(), strict=True):
        ratio = losses(out, kind)[-1] / losses(out, kind, "float32_loss")[-1]
        assert float(found) == pytest.approx(100 * (ratio - 1), abs=1e-3)


# ----------------------------------------------------------------------------------------- the state of delayed scaling


def learner_of(out):
    """What a run trained, and where: its programs are compiled."""
    options = train.Options(**read_header(out)["options"])
    config = dataclasses.replace(_options.build_config(options), dtype=options.dtype)
    placement = _step.build_placement(jax.devices()[:1])
    return train._learners(options, config, placement, train._implementation(options))["loss"], placement


def histories(state):
    """By projection and role, float32 [layers, history_len]."""
    return {
        f"{name}/{role}": np.asarray(history)
        for name, of_projection in state.scaling.items()
        for role, history in vars(of_projection).items()
        if role != "uses"
    }


def test_a_step_advances_the_state_and_an_evaluation_does_not(delayed, rng):
    learner, placement = learner_of(delayed)
    windows = rng.integers(0, 256, (3, 4, 17)).astype(np.uint8)
    state = learner.init(jax.random.key(0))
    seen = [histories(state)]
    for batch in windows:
        learner.evaluate(state, jax.device_put(windows, placement.evaluation))
        former, (state, _) = state, learner.step(state, jax.device_put(batch, placement.windows))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(former.params))  # their memory is the next ones'
        seen.append(histories(state))
    assert all((np.asarray(of_projection.uses) == 1).all() for of_projection in state.scaling.values())
    kernels = state.params["layers"]
    for name, last in seen[-1].items():
        assert last.shape == (2, DelayedScaling().history_len)
        assert (last[:, :3] > 0).all(), name
        assert not last[:, 3:].any()
        for before, after in itertools.pairwise(seen):
            np.testing.assert_array_equal(after[name][:, 1:], before[name][:, :-1])
        if name.endswith("kernel"):  # of the step before the optimizer changed it
            largest = np.abs(np.asarray(kernels[name.partition("/")[0]])).max(axis=(1, 2))
            np.testing.assert_allclose(last[:, 0], largest, rtol=0.2)
            assert (last[:, 0] != last[:, 1]).all()


def test_an_evaluation_is_the_mean_over_its_batches(delayed, rng):
    learner, placement = learner_of(delayed)
    state, windows = learner.init(jax.random.key(0)), rng.integers(0, 256, (3, 4, 17)).astype(np.uint8)

    def loss_of(windows):
        return float(learner.evaluate(state, jax.device_put(windows, placement.evaluation)))

    assert loss_of(windows) == pytest.approx(np.mean([loss_of(windows[i : i + 1]) for i in range(3)]))


def test_the_optimizer_knows_nothing_of_the_state(delayed, whole):
    delayed, plain = (learner_of(out)[0].abstract_state() for out in (delayed, whole))
    assert delayed.optimizer == plain.optimizer
    assert delayed.params == plain.params
    assert plain.scaling is None


def test_a_checkpoint_holds_the_state(delayed, tmp_path, rng):
    learner, placement = learner_of(delayed)
    batch = jax.device_put(rng.integers(0, 256, (4, 17)).astype(np.uint8), placement.windows)
    state, _ = learner.step(learner.init(jax.random.key(0)), batch)
    folder = RunFolder.create(tmp_path / "run", {"kind": "header"})
    try:
        folder.save(1, {"loss": state})
        restored = folder.restore({"loss": learner.abstract_state()})["loss"]
    finally:
        folder.close()
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for found, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert all(history.any() for history in histories(restored).values())


def test_a_resumed_run_repeats_the_bits(delayed, tmp_path):
    out = shutil.copytree(delayed, tmp_path / "run")
    shutil.rmtree(out / "checkpoints" / str(STEPS))
    assert main(["train", "--resume", "--out", str(out)]) == 0
    assert (out / "log.jsonl").read_bytes() == (delayed / "log.jsonl").read_bytes()
