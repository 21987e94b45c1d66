"""`te-jax train --statistics`: the same training, with records of its quantization, and faults named by their layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import EVERY, SMALL, STEPS, Toy, losses, plan_of, records, refused, without_last_checkpoint

from te_jax.cli import _report, _statistics, _step
from te_jax.cli._run_folder import read_header
from te_jax.cli._text import Tokens
from te_jax.cli.main import main
from te_jax.models import decoder

pytestmark = pytest.mark.usefixtures("as_in_a_process_of_its_own", "figures_of_twins_alone")

LAYERS = [
    f"layers/{i}/{name}" for i in (0, 1) for name in ("query", "key", "value", "out", "gate", "up", "down")
]  # of the preset nano


def run(out, *options):
    assert main(["train", *SMALL, *options, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def watched(tmp_path_factory, as_in_a_process_of_its_own):
    """A run with statistics. A checkpoint lies between two steps that have some."""
    out = tmp_path_factory.mktemp("watched") / "run"
    return run(out, *EVERY, "--steps", str(STEPS), "--recipe", "block", "--microbatches", "2", "--statistics", "4")


def test_every_n_steps_have_statistics_of_all_layers_and_the_loss_goes_on(watched, tmp_path):
    found = records(watched, "statistics")
    assert [record["step"] for record in found] == list(range(4, STEPS + 1, 4))
    for record in found:
        assert list(record["layers"]) == LAYERS
        for tensor in _statistics.tensors_of(record):
            assert 0.01 < tensor.values["error"] < 0.04, tensor
            assert tensor.values["saturation"] == tensor.values["nonfinite"] == 0
        assert _statistics.Watch().look(record) == []
    assert (watched / "statistics.png").read_bytes().startswith(b"\x89PNG")
    plain = run(tmp_path / "run", *EVERY, "--steps", str(STEPS), "--recipe", "block", "--microbatches", "2")
    np.testing.assert_array_equal(losses(watched, "train")[:3], losses(plain, "train")[:3])
    np.testing.assert_allclose(losses(watched, "train")[:8], losses(plain, "train")[:8], rtol=1e-2)
    np.testing.assert_allclose(losses(watched, "validation"), losses(plain, "validation"), rtol=2e-2)
    assert not (plain / "statistics.png").exists()


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_healthy_runs_are_silent(recipe, tmp_path, capsys):
    run(tmp_path / "run", "--steps", "24", "--recipe", recipe, "--statistics", "2", "--learning-rate", "0.003")
    assert "note" not in capsys.readouterr().err
    assert len(records(tmp_path / "run", "statistics")) == 12


def test_a_resumed_run_repeats_the_bits_and_may_look_more_often_or_no_more(watched, tmp_path):
    again = without_last_checkpoint(watched, tmp_path / "again")
    assert main(["train", "--resume", "--out", str(again)]) == 0
    assert (again / "log.jsonl").read_bytes() == (watched / "log.jsonl").read_bytes()
    for every, steps in {"5": [4, 8, 12, 16, 20, 24, 28, 35, 40], "0": [4, 8, 12, 16, 20, 24, 28]}.items():
        out = without_last_checkpoint(watched, tmp_path / every)
        assert main(["train", "--resume", "--statistics", every, "--out", str(out)]) == 0
        assert [record["step"] for record in records(out, "statistics")] == steps
        assert read_header(out)["options"]["statistics"] == int(every)
        assert len(losses(out, "train")) == STEPS


def test_the_step_without_statistics_is_the_same(monkeypatch):
    batch = Tokens(jax.ShapeDtypeStruct((1, 4, 17), np.uint8))

    def lowered(statistics):
        plan = plan_of(recipe="block", statistics=statistics)
        learner = _step.build_learner(plan, *plan.models)
        assert (learner.step_with_statistics is None) == (statistics == 0)
        return learner.step.lower(learner.abstract_state(), batch).as_text()

    assert lowered(0) == lowered(3)


def test_only_what_is_in_fp8_has_statistics(tmp_path, capsys):
    error = refused(["--preset", "nano", "--statistics", "3", "--out", str(tmp_path / "run")], capsys)
    assert "--statistics 3 has nothing to show, since no layer is in FP8: add --recipe, such as block" in error
    assert "--statistics is -1: it must be at least 1, or 0 for none" in refused(["--statistics", "-1"], capsys)
    compared = ["--head-recipe", "block", "--compare", "--statistics", "1", "--steps", "2"]
    (first, _) = records(run(tmp_path / "compared", *compared), "statistics")
    assert list(first["layers"]) == ["head"]
    assert "bfloat16_loss" in records(tmp_path / "compared", "train")[0]


def test_devices_that_share_a_model_have_the_statistics_of_one(tmp_path, require_devices):
    require_devices(4)
    options = ["--preset", "nano", "--seq-len", "32", "--batch", "4", "--recipe", "rowwise"]
    options += ["--steps", "1", "--statistics", "1"]
    found = []
    for name, devices in {"one": ["--devices", "1"], "four": ["--devices", "4", "--tp", "2"]}.items():
        out = tmp_path / name
        assert main(["train", *options, *devices, "--out", str(out)]) == 0
        (record,) = records(out, "statistics")
        found.append(record)
    one, four = ({str(t): t.values for t in _statistics.tensors_of(record)} for record in found)
    assert list(found[1]["layers"]) == LAYERS
    assert four.keys() <= one.keys()
    for name, values in four.items():
        assert values["amax"] == pytest.approx(one[name]["amax"], rel=0.3), name
        assert values["error"] == pytest.approx(one[name]["error"], rel=0.2), name


# -------------------------------------------------------------------------------------------------------------- faults


def test_a_kernel_with_an_outlier_is_named(tmp_path, capsys, monkeypatch):
    def init(config, key):
        params = decoder_init(config, key)
        kernel = params["layers"][1]["up"]
        params["layers"][1] = params["layers"][1] | {"up": kernel.at[0, 0].set(1e7)}
        return params

    decoder_init = decoder.init
    monkeypatch.setattr(decoder, "init", init)
    run(tmp_path / "run", "--recipe", "current", "--steps", "1", "--statistics", "1")
    notes = [line for line in capsys.readouterr().err.splitlines() if "become zero" in line]
    assert len(notes) == 1
    assert "% of the kernel of layers/1/up (" in notes[0]
    assert notes[0].startswith("te-jax: note: at step 1 9")


def test_a_gradient_that_is_not_finite_is_named_where_it_begins(tmp_path, capsys, monkeypatch):
    """Between the two blocks, so that the first has it in its last layer."""

    @jax.custom_vjp
    def broken(x):
        return x

    broken.defvjp(lambda x: (x, None), lambda _, dy: (dy * jnp.nan,))
    calls = []

    def run_block(x, *arguments):
        calls.append(None)
        return block(broken(x) if len(calls) % 2 == 0 else x, *arguments)

    block = decoder.run_block
    monkeypatch.setattr(decoder, "run_block", run_block)
    options = [*SMALL, "--recipe", "block", "--steps", "4", "--statistics", "1", "--out", str(tmp_path / "run")]
    assert main(["train", *options]) == 2
    assert len(calls) % 2 == 0
    sentence = "at step 1 layers/0/down is the first layer of the backward pass whose gradient is not finite"
    note, error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("te-jax: ")]
    assert note == f"te-jax: note: {sentence}"
    assert error == f"te-jax: error: the train loss is nan at step 2: try a smaller --learning-rate ({sentence})"


@pytest.mark.parametrize(
    ("given", "end"),
    [
        ({"recipe": "block"}, "a smaller --learning-rate; --resume --statistics 1 names the layer where it begins"),
        ({"head_recipe": "block", "statistics": 5}, "--resume --statistics 1 names the layer where it begins"),
        ({"recipe": "block", "statistics": 1}, "a smaller --learning-rate"),
        ({}, "a smaller --learning-rate"),
    ],
)
def test_a_loss_that_is_not_finite_says_how_to_find_the_layer(given, end, tmp_path, capsys, monkeypatch):
    toy = Toy()
    toy.factor = 1e30
    monkeypatch.setattr(_step, "build_learner", toy.build_learner)
    options = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    if given.get("statistics") == 1:
        toy_step = _step.build_learner

        def build_learner(plan, model):
            learner = toy_step(plan, model)
            return learner._replace(step_with_statistics=lambda *args: (*learner.step(*args), {}))

        monkeypatch.setattr(_step, "build_learner", build_learner)
    error = refused([*SMALL, *options, "--out", str(tmp_path / "run")], capsys)
    assert error.endswith(f"{end}\n")


# -------------------------------------------------------------------------------------------------------------- figure


def test_the_figure_names_the_worst_layer_of_each_role(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path: figures.append(figure))
    fields = ["amax", "smallest_scale", "largest_scale", "underflow", "saturation", "nonfinite", "error"]

    def record(step, underflow):
        of = {"up": [1.0, 1.0, 1.0, underflow, 0.0, 0.0, 0.03], "down": [1.0, 1.0, 1.0, 0.001, 0.0, 0.0, 0.03]}
        layers = {name: {"activation": {"forward": values, "wgrad": values}} for name, values in of.items()}
        return {"kind": "statistics", "step": step, "fields": fields, "layers": layers}

    _report.draw_statistics(tmp_path / "x.png", "title", [record(3, 0.0), record(6, 0.2), record(9, 0.1)])
    titles = [axes.get_title(loc="left") for axes in figures[0].axes]
    assert titles[:3] == ["activation", "underflow: up, 20.00% at step 6", "saturation: none"]
    _report.draw_statistics(tmp_path / "x.png", "title", [record(3, 0.0)])  # a run of few steps
