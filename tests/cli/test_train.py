"""`te-jax train` as a user meets it: what it writes, what it refuses, and what a kill does to it (nothing)."""

import dataclasses
import itertools
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import processes
import pytest
from runs import (
    EVERY,
    SMALL,
    STEPS,
    Toy,
    defaults_of,
    plan_of,
    records,
    refused,
    train_slowly,
    without_last_checkpoint,
)

from te_jax import native, optim
from te_jax.cli import _options, _placement, _plan, _report, _step, _text, train
from te_jax.cli._report import draw_losses
from te_jax.cli._run_folder import RunFolder, new_path, newest_path, read_header
from te_jax.cli._text import Tokens
from te_jax.cli.errors import UserError
from te_jax.cli.main import main
from te_jax.models import Losses, init
from te_jax.native import extension

pytestmark = pytest.mark.usefixtures("as_in_a_process_of_its_own", "programs_of_equal_runs")

ROOT = Path(__file__).resolve().parents[2]
build_learner = _step.build_learner


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch):
    """The run `whole` has been drawn, and tests of figures call `draw_losses` themselves."""
    monkeypatch.setattr(_report, "draw_losses", lambda path, *_: path.touch())


@pytest.fixture
def toy(monkeypatch):
    """Runs whose subject is no model train an array."""
    toy = Toy()
    monkeypatch.setattr(_step, "build_learner", toy.build_learner)
    return toy


def shown_by(whole):
    return (whole.parent / "shown").read_text()


def test_a_run_learns_and_leaves_a_log_checkpoints_and_a_figure(whole):
    training, validation = records(whole, "train"), records(whole, "validation")
    assert [record["step"] for record in training] == list(range(1, STEPS + 1))
    assert [record["step"] for record in validation] == [0, 15, 30, STEPS]
    assert validation[-1]["loss"] < validation[0]["loss"] - 2
    header = read_header(whole)
    assert header["options"]["steps"] == STEPS
    assert header["options"]["dtype"] == "bfloat16"
    assert header["text"]["source"] == "pydoc_data.topics"
    assert header["versions"]["jax"] == jax.__version__
    assert header["implementation"] == ("native" if native.available() else "reference")
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == ["30", str(STEPS)]
    assert (whole / "loss.png").read_bytes().startswith(b"\x89PNG")
    shown = shown_by(whole)
    assert f"{validation[-1]['loss']:.6f} nats per byte" in shown
    assert "tokens/s" in shown
    assert "MiB" in shown


def test_the_twin_sees_the_same_data_and_ends_at_the_same_loss(out, capsys, monkeypatch):
    monkeypatch.setattr(_report, "draw_losses", draw_losses)
    assert main(["train", *SMALL, "--steps", str(STEPS), "--compare", "--dtype", "float32", "--out", str(out)]) == 0
    training = records(out, "train")
    assert abs(training[0]["loss"] - training[0]["optax_loss"]) < 1e-5
    assert abs(training[-1]["loss"] - training[-1]["optax_loss"]) < 1e-3
    last = records(out, "validation")[-1]
    shown = capsys.readouterr().out
    for name, label in {"loss": "te_jax", "optax_loss": "optax twin"}.items():
        assert re.search(rf"^{label} .* → {last[name]:.6f} nats per byte$", shown, re.MULTILINE)
    assert (out / "loss.png").stat().st_size > 0


def test_the_difference_is_a_part_of_the_twins_loss():
    training, validation = [{"loss": 3.0, "optax_loss": 2.0}], [{"loss": 1.0, "optax_loss": 4.0}]
    *_, difference = _report.summary("te_jax", training, validation).splitlines()
    assert re.findall(r"[+-][\d.]+%", difference) == ["+50.000%", "-75.000%"]
    assert "+nan%" in _report.summary("te_jax", training, [{"loss": 1.0, "optax_loss": 0.0}])


def test_the_figure_shows_means_in_the_middle_of_their_steps_and_how_far_above_the_twin(tmp_path, monkeypatch):
    """The mean around any step of a straight line lies on the line."""
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path: figures.append(figure))
    training = [{"step": step, "loss": 3.0 * step, "optax_loss": 2.0 * step} for step in range(1, 91)]
    draw_losses(tmp_path / "loss.png", "title", "te_jax", training, [training[0], training[-1]], "byte", "5 tokens/s")
    top, bottom = figures[0].axes
    assert top.get_title(loc="left") == "5 tokens/s"
    steps, means = top.lines[1].get_data()
    assert (steps[0], steps[-1]) == (2, 89)
    np.testing.assert_allclose(means, 3.0 * np.asarray(steps))
    np.testing.assert_allclose(bottom.lines[1].get_ydata(), range(1, 91))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"tp": 2, "devices": 2, "transport": "ring", "optimizer_state": "bf16", "compare": True, "learning_rate": 0.5},
        {"preset": "moe", "recipe": "current", "offload": "activations,optimizer", "deterministic": True},
        {"pack": True, "seq_len": 4096},
    ],
)
def test_the_options_that_a_run_records_decide_the_same_plan(given, require_devices):
    require_devices(2)
    plan = plan_of(**given)
    recorded = plan.recorded_options()
    assert {name for name, value in recorded.items() if value is None} == {"tokenizer", "warmup_steps", "from_", "lora"}
    again = plan_of(**recorded)
    assert again.recorded_options() == recorded
    again = dataclasses.replace(again, options=plan.options)
    assert (again, hash(again)) == (plan, hash(plan))


@pytest.mark.parametrize(("platform", "dtype", "steps"), [("cpu", "float32", 100), ("gpu", "bfloat16", 1000)])
def test_the_platform_decides_what_is_left_open(platform, dtype, steps, monkeypatch):
    monkeypatch.setattr(_placement, "take_devices", lambda *_: [types.SimpleNamespace(platform=platform)])
    monkeypatch.setattr(_placement, "build_placement", lambda *_, **__: None)
    monkeypatch.setattr(_placement, "defaults_of", defaults_of)
    plan, chosen = plan_of(preset="8b"), plan_of(dtype="float32", checkpoint_every=7)
    assert (plan.config.dtype, plan.checkpoint_every) == (dtype, steps)
    assert (chosen.config.dtype, chosen.checkpoint_every) == ("float32", 7)


def test_the_seed_is_that_of_parameters_data_and_rounding(toy_run, toy, out, monkeypatch):
    def record_seed(module, name, function):
        def recorded(*args, seed, **options):
            seen.add((name, int(seed)))
            return function(*args, seed=seed, **options)

        monkeypatch.setattr(module, name, recorded)

    def build_learner(plan, model):
        _step.build_optimizer(plan, model)
        return toy.build_learner(plan, model)

    seen = set()
    monkeypatch.setattr(_step, "build_learner", build_learner)
    record_seed(_text, "training_starts", _text.training_starts)
    record_seed(optim, "adamw", optim.adamw)
    whole, argv = toy_run
    assert main([*argv, "--seed", "7", "--out", str(out)]) == 0
    assert seen == {("training_starts", 7), ("adamw", 7)}
    before, after = (records(run, "validation")[0]["loss"] for run in (whole, out))
    assert abs(after - before) > 1e-3


def test_the_dtype_is_heeded(whole, out, monkeypatch):
    monkeypatch.setattr(optim, "adamw", lambda *_, **__: optax.identity())  # which compiles faster
    assert main(["train", *SMALL, "--steps", "1", "--dtype", "float32", "--out", str(out)]) == 0
    found, expected = (records(run, "train")[0]["loss"] for run in (out, whole))
    assert 0 < abs(found - expected) < 5e-2


@pytest.mark.parametrize(("before", "after"), [(None, "0"), ("1", "1")])
def test_gemms_are_tuned_unless_the_run_is_deterministic(before, after, out, paths, monkeypatch):
    """A resumed run could otherwise choose others, with other bits. What the user has set stays."""

    def forget():
        monkeypatch.setenv("TE_JAX_AUTOTUNE", before or "")
        if before is None:
            monkeypatch.delenv("TE_JAX_AUTOTUNE")

    forget()
    assert main(["train", *SMALL, "--out", str(out)]) == 0
    assert os.environ.get("TE_JAX_AUTOTUNE") == before
    assert read_header(out)["options"]["deterministic"] is False
    for argv in (["--deterministic"], []):
        forget()
        assert main(["train", "--resume", *argv, "--out", str(out)]) == 0
        assert os.environ["TE_JAX_AUTOTUNE"] == after
        assert read_header(out)["options"]["deterministic"] is True


@pytest.mark.parametrize(
    ("deterministic", "platform", "expected"),
    [
        (False, "gpu", None),
        (True, "gpu", {"xla_gpu_deterministic_ops": True}),
        (True, "cpu", None),
    ],
)
def test_xla_is_told_to_be_deterministic(deterministic, platform, expected, monkeypatch):
    told, plan = [], plan_of(deterministic=deterministic)
    monkeypatch.setattr(jax, "jit", lambda function, compiler_options, **_: told.append(compiler_options))
    monkeypatch.setattr(_placement.Placement, "devices", [types.SimpleNamespace(platform=platform)])
    build_learner(plan, *plan.models)
    assert told == [expected] * 6


@pytest.mark.parametrize(("every", "steps"), [("1", range(8)), ("3", (0, 3, 6, 7))])
def test_only_steps_are_timed(every, steps, out, capsys, toy, monkeypatch):
    """By a clock on which a step takes a second, the compiler five, and validations and checkpoints a hundred."""

    def takes(*seconds):
        def pass_time(*_):
            clock[0] += next(durations)

        durations = itertools.chain(seconds, itertools.repeat(seconds[-1]))
        return pass_time

    clock = [0.0]
    toy.step, toy.evaluate = takes(5, 1), takes(100)
    monkeypatch.setattr(_report, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(RunFolder, "save_behind", takes(100))
    argv = ["train", *SMALL, "--steps", "7", "--eval-every", every, "--checkpoint-every", "4", "--out", str(out)]
    assert main(argv) == 0
    shown = [line.split(" · ") for line in capsys.readouterr().out.splitlines() if " · validation " in line]
    assert [words[0] for words in shown] == [f"step {step}" for step in steps]
    for (_, _, *speed, _), step in zip(shown, steps, strict=True):
        # 4 windows of 16 bytes in a second, which the second step is the first to show.
        assert speed == ([] if step < 2 else ["64 tokens/s"])


def test_the_speed_is_shown_as_part_of_the_peak_of_the_devices(capsys, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(_report, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    device = types.SimpleNamespace(
        device_kind="NVIDIA H100 80GB HBM3", memory_stats=lambda: {"peak_bytes_in_use": 2**30}, process_index=0
    )
    progress = _report.Progress(2, 0, 1000, 989_000_000, [device] * 2)
    progress.time_steps()
    progress.step(1, {"loss": 1.0})
    capsys.readouterr()
    progress.close()
    assert capsys.readouterr().out == "1,000 tokens/s · MFU 0.1% of bfloat16 · 1,024 MiB\n"
    device.device_kind = "NVIDIA H100 PCIe"
    progress.validation(1, {"loss": 1.0})
    device.device_kind = "cpu"
    progress.validation(1, {"loss": 1.0})
    shown = capsys.readouterr().out
    assert "MFU 0.1% of" in shown.splitlines()[0]
    assert "MFU" not in shown.splitlines()[1]


@pytest.mark.parametrize(("seconds", "steps"), [(1, [1, 61]), (40, [1, 3, 5, 7]), (100, [*range(1, 8)])])
def test_without_a_terminal_the_first_step_and_one_a_minute_are_shown(seconds, steps, capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(_report, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    progress = _report.Progress(100, 0, 1000, 1, jax.devices()[:1])
    for step in range(1, 70 if seconds == 1 else 8):
        progress.step(step, {"loss": 0.5})
        clock[0] += seconds
    shown = capsys.readouterr().out.splitlines()
    assert [line.partition(" · training loss 0.5000 · ")[0] for line in shown] == [f"step {step}" for step in steps]


def packed(rng, *shape):
    """Windows of random bytes, in which some have many documents and others few."""
    often = rng.permuted(np.linspace(0.02, 0.7, shape[-2] * shape[-3])).reshape(*shape[:-1], 1)
    return Tokens(rng.integers(0, 256, shape).astype(np.uint8), rng.random(shape) < often)


@pytest.mark.parametrize("pack", [False, True])
def test_microbatches_have_the_gradient_of_the_batch(pack, rng, monkeypatch):
    """A step of 1 against the gradient shows it."""
    monkeypatch.setattr(_step, "build_optimizer", lambda *_: optax.sgd(1.0))
    plan = plan_of(implementation="reference", pack=pack, seq_len=16, dtype="float32")
    learner = _step.build_learner(plan, *plan.models)
    windows = packed(rng, 1, 4, 17) if pack else Tokens(rng.integers(0, 256, (1, 4, 17)).astype(np.uint16))
    before = jax.device_get(learner.init(jax.random.key(0)).params)
    batches = [jax.tree.map(lambda array, n=n: array.reshape(n, 4 // n, 17), windows) for n in (1, 4)]
    one, four = (float(learner.evaluate(learner.init(jax.random.key(0)), batch).cross_entropy) for batch in batches)
    assert four == pytest.approx(one, rel=1e-6)
    steps = [learner.step(learner.init(jax.random.key(0)), batch) for batch in batches]
    (expected, expected_loss), (found, found_loss) = steps
    assert float(found_loss.objective) == pytest.approx(float(expected_loss.objective), rel=1e-6)
    for start, one, other in zip(*map(jax.tree.leaves, (before, expected.params, found.params)), strict=True):
        assert np.abs(one - start).max() > 1e-4
        np.testing.assert_allclose(other - start, one - start, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"recipe": "none", "compare": True}, {"preset": "moe"}])
def test_a_packed_document_is_read_as_if_it_were_alone(options, rng):
    """Its loss is that of its own tokens at positions from 0, and what follows its end does not count."""
    plan = plan_of(pack=True, dtype="float32", **options)
    ids, lengths = rng.integers(0, 256, (2, 41)), [[7, 1, 16, 17], [17, 16, 1, 7]]
    begins = np.array([np.isin(np.arange(41), np.cumsum(of_row)) for of_row in lengths])
    for model in plan.models:
        loss = _step.build_loss(plan, model)
        params = init(model.config, jax.random.key(0))

        def cross_entropy(*tokens, params=params, loss=loss):
            return float(loss(params, None, *_step._operands(Tokens(*map(jnp.asarray, tokens)))).cross_entropy)

        total = 0
        for row, of_row in zip(ids, lengths, strict=True):
            for document in np.split(row, np.cumsum(of_row)[:-1]):
                if document.size > 1:
                    total += (document.size - 1) * cross_entropy(document[None])
        assert cross_entropy(ids, begins) == pytest.approx(total / (2 * 41 - 8), rel=1e-5)


def test_a_packed_run_reads_the_windows_of_one_without_and_can_be_resumed(tmp_path, out, capsys, monkeypatch):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(9):
        (text / f"{number}.txt").write_text(f"Document {number} is a text of its own. " * 5)
    argv = [*SMALL, "--seq-len", "128", "--text", str(text), "--checkpoint-every", "2", "--steps"]
    seen = []

    def windows(*args):
        seen.append(jax.device_get(make(*args)))
        return seen[-1]

    make = train._windows
    monkeypatch.setattr(train, "_windows", windows)
    assert main(["train", *argv, "4", "--pack", "--out", str(out)]) == 0
    assert "9 documents, packed\n" in capsys.readouterr().out
    header = read_header(out)
    assert header["text"]["documents"] == 9
    assert header["model"]["max_segments_per_seq"] == 2
    ids, seen = [tokens.ids for tokens in seen], []
    assert main(["train", *argv, "4", "--out", str(tmp_path / "plain")]) == 0
    for found, expected in zip(seen, ids, strict=True):
        assert found.begins is None
        np.testing.assert_array_equal(found.ids, expected)
    assert "documents" not in read_header(tmp_path / "plain")["text"]

    resumed = without_last_checkpoint(out, tmp_path / "resumed")
    assert main(["train", "--resume", "--out", str(resumed)]) == 0
    assert (resumed / "log.jsonl").read_bytes() == (out / "log.jsonl").read_bytes()
    joined = (text / "0.txt").read_text() + "\n\n" + (text / "1.txt").read_text()
    (text / "0.txt").unlink()
    (text / "1.txt").write_text(joined)  # the same bytes, and other documents
    assert "is not, or no longer, what the run" in refused(["--resume", "--out", str(resumed)], capsys)
    assert main(["train", "--resume", "--steps", "5", "--out", str(tmp_path / "plain")]) == 0


def test_the_bound_of_documents_holds_for_every_window_and_is_left_out_where_a_mask_is_needed(monkeypatch):
    def bound(*begins, capability=None):
        monkeypatch.setattr(native, "compute_capability", lambda: capability)
        return _plan._max_segments(np.isin(np.arange(1000), begins), 256)

    assert bound(0) == 1
    assert bound(0, 700) == 2
    assert bound(0, 700, 954) == 4  # three, of which one has a single token
    assert bound(0, 700, 955) == 2
    assert bound(0, 700, 800, 900) == 4
    assert bound(*range(600, 607)) == 8
    assert bound(*range(600, 608)) is None
    assert bound(0, 700, capability=(9, 0)) == 2
    assert bound(0, 700, capability=(8, 0)) is None


def test_microbatches_are_parts_of_the_same_batch(toy_run, toy, out, monkeypatch):
    """The toy learns from the mean of its windows. A resumed run may divide the batch otherwise."""

    def make_array(shape, sharding, callback):
        shapes.add(shape)
        return make(shape, sharding, callback)

    shapes, make = set(), jax.make_array_from_callback
    monkeypatch.setattr(jax, "make_array_from_callback", make_array)
    whole, argv = toy_run
    assert main([*argv, "--microbatches", "2", "--out", str(out)]) == 0
    assert shapes == {(2, 2, 17), (32, 2, 17)}  # of the training, and of validations
    losses = [[record["loss"] for record in records(run, "train")] for run in (whole, out)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert main(["train", "--resume", "--microbatches", "4", "--steps", "13", "--out", str(out)]) == 0
    assert read_header(out)["options"]["microbatches"] == 4
    assert (4, 1, 17) in shapes


def test_offload_changes_where_the_state_is_and_no_number(whole, out, monkeypatch):
    monkeypatch.setattr(_plan, "OFFLOAD_MIN_SIZE", 1)
    kinds, save = [], RunFolder.save_behind

    def saved(self, step, state):
        kinds.append({leaf.sharding.memory_kind for leaf in jax.tree.leaves(state["loss"].optimizer) if leaf.ndim})
        return save(self, step, state)

    monkeypatch.setattr(RunFolder, "save_behind", saved)
    argv = ["train", *SMALL, *EVERY, "--steps", str(STEPS), "--out", str(out)]
    assert main([*argv, "--offload", "activations,optimizer"]) == 0
    for found, expected in zip(records(out, "train"), records(whole, "train"), strict=True):
        assert abs(found["loss"] - expected["loss"]) < 1e-4
    assert main(["train", "--resume", "--steps", str(STEPS + 1), "--out", str(out)]) == 0
    assert len(kinds) >= 3
    assert all(kind == {"pinned_host"} for kind in kinds)


def test_the_optimizer_is_the_one_that_was_asked_for(out, paths, monkeypatch):
    def build_optimizer(plan, model):
        asked.append((plan.learning_rate, plan.warmup_steps, plan.options.clip_norm))
        return optax.identity()

    asked = []
    monkeypatch.setattr(_step, "build_optimizer", build_optimizer)
    argv = ["train", "--preset", "nano", "--seq-len", "16", "--batch", "8", "--devices", "1"]
    assert main([*argv, "--out", str(out)]) == 0
    assert main([*argv, "--warmup-steps", "0", "--clip-norm", "0", "--steps", "60", "--out", f"{out}2"]) == 0
    assert asked == [(0.012, 10, 1.0), (0.012, 0, 0.0)]


@pytest.mark.parametrize("batch", ["1", "65"])
def test_one_step_on_the_shortest_text(batch, tmp_path, out, request, monkeypatch):
    """A batch larger than a validation, and, with a real model, a batch of one."""
    monkeypatch.setattr(optim, "adamw", lambda *_, **__: optax.identity())  # which compiles faster
    if batch == "65":
        request.getfixturevalue("toy")
    (tmp_path / "text").write_text("abcd")
    argv = ["--preset", "nano", "--steps", "1", "--batch", batch, "--seq-len", "1", "--devices", "1"]
    assert main(["train", "--text", str(tmp_path / "text"), *argv, "--out", str(out)]) == 0
    assert [record["step"] for record in records(out, "validation")] == [0, 1]


def test_a_finished_run_can_be_resumed_and_stays_as_it_is(whole, out, capsys, monkeypatch):
    monkeypatch.setattr(_report, "draw_losses", draw_losses)
    shutil.copytree(whole, out)
    assert main(["train", "--resume", "--out", str(out)]) == 0
    assert (out / "log.jsonl").read_bytes() == (whole / "log.jsonl").read_bytes()
    summary = shown_by(whole).replace(str(whole), str(out)).splitlines()[-2:]
    assert capsys.readouterr().out.splitlines() == summary
    assert (out / "loss.png").read_bytes() == (whole / "loss.png").read_bytes()
    (out / "loss.png").unlink()
    assert main(["train", "--resume", "--out", str(out)]) == 0
    assert (out / "loss.png").stat().st_size > 0


@pytest.fixture
def toy_run(toy, tmp_path):
    """A run of the toy that has ended, and the arguments that start it."""
    argv = ["train", *SMALL, "--steps", "12", "--eval-every", "5", "--checkpoint-every", "7"]
    assert main([*argv, "--out", str(tmp_path / "toy")]) == 0
    return tmp_path / "toy", argv


def told(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("te-jax: ")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_step_and_says_how_to_continue(number, toy_run, toy, out, capsys):
    def step():
        if next(count) == 5:
            signal.raise_signal(number)
            time.sleep(0.1)  # another thread hears of it

    whole, argv = toy_run
    toy.step, count = step, itertools.count(1)
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    assert main([*argv, "--out", str(out)]) == 128 + number
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["5"]
    command = f"te-jax train --resume --out {out}"
    assert told(capsys) == [
        "te-jax: saving after this step; interrupt again to end at once",
        f"te-jax: {number.name}: step 5 of 12 is saved; continue with {command}",
    ]
    assert main(command.split()[1:]) == 0
    assert (out / "log.jsonl").read_bytes() == (whole / "log.jsonl").read_bytes()


@pytest.mark.parametrize(("at", "saved"), [(1, "no step"), (10, "step 7 of 12")])
def test_a_signal_that_ends_a_compiler_of_xla_too_is_no_traceback(at, saved, toy_run, toy, out, capsys):
    def step():
        if next(count) == at:
            signal.raise_signal(signal.SIGINT)
            raise jax.errors.JaxRuntimeError("INTERNAL: ptxas exited with non-zero error code 2")

    _, argv = toy_run
    toy.step, count = step, itertools.count(1)
    assert main([*argv, "--out", str(out)]) == 130
    reason = "JaxRuntimeError: INTERNAL: ptxas exited with non-zero error code 2"
    command = f"te-jax train --resume --out {out}"
    last = f"te-jax: SIGINT: stopped in a step ({reason}); {saved} is saved; continue with {command}"
    assert told(capsys)[-1] == last
    toy.step = lambda: None
    assert main(command.split()[1:]) == 0


def test_an_error_without_a_signal_keeps_its_traceback(toy_run, toy, out):
    def step():
        raise jax.errors.JaxRuntimeError("INTERNAL")

    _, argv = toy_run
    toy.step = step
    with pytest.raises(jax.errors.JaxRuntimeError):
        main([*argv, "--out", str(out)])


def test_a_second_interruption_ends_the_process_at_once_and_one_that_is_sent_twice_does_not():
    """While the main thread hears of nothing, as in a compilation of XLA."""
    program = (
        "import ctypes\n"
        "from te_jax.cli._interruption import watching\n"
        "with watching():\n"
        "    print('ready', flush=True)\n"
        "    while True: ctypes.CDLL(None).sleep(600)\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert "interrupt again to end at once" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        time.sleep(0.7)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 128 + signal.SIGINT


def test_a_longer_run_goes_on_where_the_shorter_one_ended(toy_run, capsys):
    out, _ = toy_run
    shorter = (out / "log.jsonl").read_bytes()
    longer = ["--resume", "--out", str(out), "--steps", "17"]
    assert main(["train", *longer]) == 0
    words = "te-jax: note: --steps changed from 12 to 17: the learning rate continues on the schedule of 17 steps\n"
    assert words in capsys.readouterr().err
    assert [record["step"] for record in records(out, "train")] == list(range(1, 18))
    assert (out / "log.jsonl").read_bytes().startswith(shorter)
    assert main(["train", "--resume", "--out", str(out)]) == 0  # which knows that it has become longer
    assert main(["train", *longer]) == 0
    assert "note" not in capsys.readouterr().err
    assert len(records(out, "header")) == 2
    assert "--steps is 12, but the run" in refused([*longer[:-1], "12"], capsys)


def test_a_damaged_checkpoint_is_passed_over(toy_run, capsys):
    path, _ = toy_run
    whole = (path / "log.jsonl").read_bytes()
    largest = max((path / "checkpoints" / "12").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    os.truncate(largest, largest.stat().st_size // 2)
    assert main(["train", "--resume", "--out", str(path)]) == 0
    assert (path / "log.jsonl").read_bytes() == whole
    (noted,) = told(capsys)
    assert re.search(r"has a damaged checkpoint \(step 12: .*\): the run goes on from step 7$", noted)


def test_a_device_that_is_out_of_memory_is_one_sentence_with_the_way_out(out, toy, capsys):
    toy.evaluate = lambda: jax.jit(lambda: jnp.ones((2**60,), "uint8"))()
    error = refused([*SMALL, "--out", str(out)], capsys)
    assert error.startswith("te-jax: error: --preset nano with --batch 4 and --seq-len 16 is out of memory (JaxRuntime")
    way_out = "or --remat, --optimizer-state fp8, --offload activations,optimizer, a larger --microbatches or --tp\n"
    assert error.endswith(f"choose a smaller --preset, --batch or --seq-len, {way_out}")


def test_a_host_that_is_out_of_memory_is_one_sentence(out, capsys):
    all_measures = ["--remat", "--optimizer-state", "fp8", "--offload", "activations,optimizer"]
    error = refused([*SMALL, "--batch", str(2**50), *all_measures, "--out", str(out)], capsys)
    assert "is out of memory (MemoryError: Unable to allocate " in error
    assert error.endswith("choose a smaller --preset, --batch or --seq-len, or a larger --microbatches or --tp\n")


def test_a_model_that_no_device_holds_is_refused_before_anything_is_written(out, capsys, monkeypatch):
    monkeypatch.setattr(_placement, "memory_of", lambda devices: 2**30)
    error = refused(["--preset", "8b", "--devices", "1", "--out", str(out)], capsys)
    assert "--preset 8b needs 89.75 GiB on each device for parameters and Adam's moments" in error
    ways_out = "a smaller --preset, --optimizer-state fp8, --offload optimizer, or more devices, which share them"
    assert f"has 1.00 GiB: choose {ways_out}" in error
    error = refused(
        ["--preset", "8b", "--tp", "2", "--devices", "2", "--optimizer-state", "fp8", "--out", str(out)], capsys
    )
    assert "--preset 8b needs 22.67 GiB on each device" in error
    assert not out.exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--steps", "0"], "--steps is 0"),
        (["--steps", "2147483648"], "--steps is 2147483648"),
        (["--batch", "-4"], "--batch is -4"),
        (["--seq-len", "0"], "--seq-len is 0"),
        (["--seq-len", "1000000000"], "--seq-len 1000000000 needs at least"),
        (["--devices", "0"], "--devices is 0"),
        (["--devices", "1000", "--batch", "1000"], "--devices 1000 is more than"),
        (["--devices", "3", "--batch", "4"], "--batch 4 does not divide over 3 devices: choose a multiple of 3"),
        (["--microbatches", "0"], "--microbatches is 0"),
        (
            ["--devices", "2", "--batch", "6", "--microbatches", "2"],
            "--batch 6 does not divide over --microbatches 2 on 2 devices: choose a multiple of 4",
        ),
        (["--warmup-steps", "-1"], "--warmup-steps is -1: it must be at least 0 and below --steps, 200"),
        (["--warmup-steps", "9", "--steps", "9"], "--warmup-steps is 9: it must be at least 0 and below --steps, 9"),
        (["--clip-norm", "-1"], "--clip-norm is -1.0: it must be a finite number of at least 0"),
        (["--clip-norm", "inf"], "--clip-norm is inf"),
        (["--tokenizer", ""], "--tokenizer: is empty"),
        (["--eval-every", "0"], "--eval-every is 0"),
        (["--checkpoint-every", "0"], "--checkpoint-every is 0"),
        (["--seed", "-1"], "--seed is -1"),
        (["--seed", "4294967296"], "--seed is 4294967296: it must lie between 0 and 4294967295"),
        (["--learning-rate", "nan"], "--learning-rate is nan"),
        (["--learning-rate", "inf"], "--learning-rate is inf"),
        (["--learning-rate", "0"], "--learning-rate is 0"),
        (["--preset", "giant"], "--preset giant is unknown: choose one of nano, tiny, small, moe, moe-3b, 8b"),
        (["--recipe", "fp8"], "--recipe fp8 is unknown: choose one of block, current, rowwise, delayed, mxfp8, none"),
        (
            ["--offload", "moments"],
            "--offload is moments: choose activations, optimizer, activations,optimizer or none",
        ),
        (["--recipe", ""], "--recipe  is unknown: choose one of block"),
        (
            ["--head-recipe", "delayed"],
            "--head-recipe delayed is unknown: choose one of block, current, rowwise, mxfp8, none",
        ),
        (["--fp8-logits"], "--fp8-logits needs a recipe of the output head: add --head-recipe"),
        (["--optimizer-state", "float32"], "--optimizer-state float32 is unknown: choose one of f32, bf16, fp8\n"),
        (
            ["--preset", "moe", "--recipe", "delayed"],
            "--recipe delayed keeps no state for the experts of --preset moe: choose block",
        ),
        (
            ["--preset", "moe", "--compare"],
            "--compare has no twin for --preset moe, since optax has no loss of experts: add --recipe",
        ),
        (["--text", "nowhere.txt"], "--text nowhere.txt does not exist"),
        (["--text", ""], "--text: is empty"),
        (["--resume"], "holds no run: leave --resume out"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_written(argv, words, out, capsys):
    assert words in refused([*argv, "--out", str(out)], capsys)
    assert not out.exists()


def test_a_text_too_short_for_its_windows_is_refused(tmp_path, out, capsys):
    (tmp_path / "text").write_text("much too short")
    argv = ["--text", str(tmp_path / "text"), "--out", str(out)]
    assert "14 bytes and --seq-len 128 needs at least 258" in refused(argv, capsys)


def test_an_output_folder_that_cannot_be_written_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused([*SMALL, "--out", str(tmp_path / "file" / "run")], capsys)
    assert "cannot be written" in refused([*SMALL, "--out", str(tmp_path / "file")], capsys)
    assert "--out: is empty" in refused([*SMALL, "--out", ""], capsys)


def test_native_where_there_is_none_is_refused(out, capsys, monkeypatch):
    def use_native(implementation, **_):
        raise native.NativeUnavailableError("the extension is missing")

    monkeypatch.setattr(native, "use_native", use_native)
    error = refused([*SMALL, "--implementation", "native", "--out", str(out)], capsys)
    assert "--implementation native cannot run here: the extension is missing" in error
    assert not out.exists()


@pytest.fixture
def paths(monkeypatch):
    """Folders of runs that take no step."""
    paths = []
    monkeypatch.setattr(
        train, "_train", lambda plan, folder, *_: paths.append(folder.path.as_posix()) or (plan.options.steps, "")
    )
    monkeypatch.setattr(train, "_conclude", lambda *_: None)
    return paths


def test_each_run_has_a_fresh_folder_and_the_newest_is_resumed(paths, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "there is no runs/train-… here: name the folder of the run with --out" in refused(["--resume"], capsys)
    assert not (tmp_path / "runs").exists()
    for seed in ("0", "1"):
        assert main(["train", *SMALL, "--seed", seed]) == 0
    assert main(["train", "--resume"]) == 0
    assert main(["train", "--resume", "--out", "runs/train-001"]) == 0
    assert paths == ["runs/train-001", "runs/train-002", "runs/train-002", "runs/train-001"]
    assert capsys.readouterr().out.splitlines() == [f"run in {path}" for path in paths[:3]]
    error = refused(["--resume", "--seed", "0"], capsys)
    assert "--seed is 0, but the run in runs/train-002 was started with 1" in error

    (tmp_path / "runs" / "train-009").mkdir()
    (tmp_path / "runs" / "train-last").mkdir()
    (tmp_path / "runs" / "train-010").touch()
    assert "--out runs/train-009 holds no run: leave --resume out" in refused(["--resume"], capsys)
    assert main(["train", *SMALL]) == 0
    assert paths[-1] == "runs/train-011"


def test_whether_kernels_can_run_is_asked_once(out, paths, monkeypatch):
    def use_native(implementation, **_):
        asked.append(implementation)
        return False

    asked = []
    monkeypatch.setattr(native, "use_native", use_native)
    assert main(["train", *SMALL, "--out", str(out)]) == 0
    assert asked == [None]
    assert read_header(out)["implementation"] == "reference"


@pytest.mark.usefixtures("native_kernels")
def test_a_recipe_that_the_gpu_cannot_multiply_is_refused(out, capsys, monkeypatch):
    monkeypatch.setattr(native, "compute_capability", lambda: (8, 0))
    for recipe in ("current", "rowwise", "block"):
        error = refused([*SMALL, "--recipe", recipe, "--out", str(out)], capsys)
        assert re.search(rf"--recipe {recipe} cannot run here: recipe is .*: FP8 products .* this GPU has 8.0", error)
    monkeypatch.setattr(extension, "_problem_on_default_backend", lambda *_: ("there is no extension", False))
    error = refused([*SMALL, "--recipe", "block", "--out", str(out)], capsys)
    assert "--recipe block cannot run here" in error
    assert "there is no extension. XLA multiplies FP8 with 'tensor' or 'block_1x32' scaling" in error
    assert not out.exists()


@pytest.mark.parametrize(
    ("capability", "options", "expected"),
    [
        ("8.0", {}, None),
        ("8.9", {"recipe": "current"}, None),
        ("12.0", {"recipe": "delayed", "head_recipe": "current"}, None),
        ("9.0", {"recipe": "block"}, "native"),
        ("8.9", {"recipe": "current", "implementation": "reference"}, "reference"),
    ],
)
def test_gpus_without_kernels_train_by_xla(capability, options, expected, report_gpus):
    report_gpus(capability)
    assert plan_of(**options).implementation == expected


def test_experts_that_no_gpu_multiplies_are_refused(report_gpus):
    report_gpus("8.9")
    with pytest.raises(UserError, match=r"--recipe current cannot run here: .* XLA has no FP8 product of groups"):
        plan_of(preset="moe", recipe="current")


def test_missing_packages_are_named_as_the_extra_names_them(out, capsys, monkeypatch):
    monkeypatch.setattr("te_jax.cli.main.find_spec", lambda name: None)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [requirement.partition(">")[0] for requirement in project["optional-dependencies"]["train"]]
    error = refused(["--out", str(out)], capsys)
    assert error == f"te-jax: error: te-jax train needs {', '.join(names)}: pip install {' '.join(names)}\n"


def test_a_loss_that_is_not_finite_ends_the_run(toy_run, toy, out, capsys):
    _, argv = toy_run
    toy.factor = 1e30
    error = refused([*argv[1:], "--out", str(out)], capsys)
    assert "the train loss is inf at step 3: try a smaller --learning-rate" in error


def test_a_twins_loss_that_is_not_finite_is_named():
    records = train._Records(None, None)
    losses = {"loss": Losses(1.0, 1.0, None), "optax_loss": Losses(math.nan, 1.0, None)}
    records.add("train", 5, losses)
    with pytest.raises(UserError, match="the train optax loss is nan at step 5: try a smaller --learning-rate"):
        records.flush()


def test_a_run_is_resumed_only_as_it_was_started(tmp_path, out, toy, capsys):
    (tmp_path / "text").write_text("All happy families are alike. " * 20)
    text = ["--text", str(tmp_path / "text")]
    assert main(["train", *SMALL, *text, "--steps", str(STEPS), "--out", str(out)]) == 0
    capsys.readouterr()
    kept = {_options.flag(field.name) for field in dataclasses.fields(_options.Options)}
    for option, value in {
        "--preset": "tiny",
        "--steps": str(STEPS - 1),
        "--batch": "8",
        "--seq-len": "8",
        "--seed": "1",
        "--learning-rate": "0.1",
        "--eval-every": "7",
        "--recipe": "block",
        "--head-recipe": "block",
        "--implementation": "reference",
        "--dtype": "float32",
        "--warmup-steps": "3",
        "--clip-norm": "0.5",
        "--optimizer-state": "fp8",
        "--lora": "4",
    }.items():
        kept.discard(option)
        error = refused(["--resume", "--out", str(out), option, value], capsys)
        assert error.startswith(f"te-jax: error: {option} is "), error
    for option in ("--compare", "--pack", "--fp8-logits"):
        kept.discard(option)
        error = refused(["--resume", "--out", str(out), option], capsys)
        assert error.startswith(f"te-jax: error: {option} is True, but the run in {out} was started with False")
    # test_train_parallel.py shows that a checkpoint fits whatever these are.
    assert kept == set(map(_options.flag, _options._CHANGEABLE))
    assert "already holds a run" in refused([*SMALL, "--out", str(out)], capsys)
    same = [*SMALL, *text, "--steps", str(STEPS), "--checkpoint-every", "2", "--dtype", "auto"]
    assert main(["train", "--resume", "--out", str(out), *same]) == 0
    (tmp_path / "text").write_text("Every unhappy family is unhappy in its own way. " * 20)
    assert "is not, or no longer, what the run" in refused(["--resume", "--out", str(out)], capsys)


def test_a_tokenizer_decides_the_vocabulary_and_its_tokens_are_compared(tmp_path, out, toy, capsys, monkeypatch):
    class Letters:
        def __init__(self, path):
            self.shift = int(Path(path).read_text())

        def get_vocab(self, with_added_tokens):
            return {"z": 1000}

        def encode_batch(self, texts, add_special_tokens):
            return [types.SimpleNamespace(ids=[ord(letter) % 97 + self.shift for letter in text]) for text in texts]

    package = types.SimpleNamespace(Tokenizer=types.SimpleNamespace(from_file=Letters))
    monkeypatch.setitem(sys.modules, "tokenizers", package)
    (tmp_path / "tokenizer.json").write_text("3")
    argv = ["train", *SMALL, "--steps", "2", "--tokenizer", str(tmp_path / "tokenizer.json"), "--out", str(out)]
    assert main(argv) == 0
    assert " nats per token\n" in capsys.readouterr().out
    header = read_header(out)
    assert header["model"]["vocab_size"] == 1024
    assert header["text"].keys() == {"source", "tokens", "sha256"}
    resume = ["train", "--resume", "--steps", "3", "--out", str(out)]
    assert main(resume) == 0
    capsys.readouterr()
    (tmp_path / "tokenizer.json").write_text("4")
    error = refused(resume[1:], capsys)
    assert f"with --tokenizer {tmp_path}/tokenizer.json is not, or no longer, what the run" in error
    (tmp_path / "tokenizer.json").write_text("3")
    monkeypatch.setattr(Letters, "get_vocab", lambda self, with_added_tokens: {"z": 2000})
    error = refused(resume[1:], capsys)
    assert f"tokenizer.json needs a vocabulary of 2048, and the model of the run in {out} has 1024" in error


def test_other_software_is_noted_on_resuming(whole, out, capsys):
    shutil.copytree(whole, out)
    log = out / "log.jsonl"
    implementation = read_header(out)["implementation"]
    changed = re.sub(r', "crc32": \d+', "", log.read_text()).replace(f'"jax": "{jax.__version__}"', '"jax": "0.1.0"')
    log.write_text(changed.replace(f'"implementation": "{implementation}"', '"implementation": "another"'))
    assert main(["train", "--resume", "--out", str(out)]) == 0
    noted = capsys.readouterr().err
    assert "note: versions changed" in noted
    assert f"note: implementation changed from another to {implementation}: " in noted


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('"steps": 40', '"stfps": 40', r"has options that te_jax \S+ does not know \(stfps\): go on with the version"),
        ('"dtype": "bfloat16", "det', '"dtype": "bfloat17", "det', "is damaged, dtype is 'bfloat17': start another"),
        ('"steps": 40', '"steps": "40"', "is damaged, steps is '40': start another run"),
        ('"tp": 1, "cp"', '"tp": 0, "cp"', "--tp is 0"),
        ('"text": {"source', '"texu": {"source', "is not, or no longer, what the run in"),
        ('"sha256"', '"sha257"', "is not, or no longer, what the run in"),
    ],
)
def test_a_header_of_another_version_or_with_damage_is_one_sentence(before, after, words, whole, out, capsys):
    shutil.copytree(whole, out)
    log = out / "log.jsonl"
    text = re.sub(r', "crc32": \d+', "", log.read_text())
    assert text.count(before) == 1
    log.write_text(text.replace(before, after))
    assert re.search(words, refused(["--resume", "--out", str(out)], capsys))


def test_a_run_of_a_version_without_a_subject_of_the_header_goes_on(toy_run, capsys):
    out, _ = toy_run
    log = out / "log.jsonl"
    without_checksums = re.sub(r', "crc32": \d+', "", log.read_text())
    log.write_text(without_checksums.replace('"parallel"', '"parrallel"'))
    assert main(["train", "--resume", "--steps", "13", "--out", str(out)]) == 0
    (noted,) = told(capsys)
    assert "--steps changed from 12 to 13" in noted


def test_a_record_that_has_lost_its_twin_is_left_out(tmp_path, monkeypatch, capsys):
    drawn = []
    monkeypatch.setattr(_report, "draw_losses", lambda path, title, label, *of_steps: drawn.extend(of_steps[:2]))
    records = {
        "train": [{"step": 1, "loss": 2.0, "optax_loss": 2.0}, {"step": 2, "loss": 1.0}],
        "validation": [{"step": 0, "loss": 3.0}, {"step": 2, "loss": 1.0, "optax_loss": 1.0}],
    }
    folder = types.SimpleNamespace(path=tmp_path, records=records.get)
    train._conclude(plan_of(compare=True), folder, "")
    assert drawn == [records["train"][:1], records["validation"][1:]]
    assert "difference" in capsys.readouterr().out


def kill_at(step, process, log):
    marker, deadline = f'"step": {step},'.encode(), time.monotonic() + 120
    while not (log.exists() and marker in log.read_bytes()):
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_a_run_killed_at_random_steps_ends_with_the_same_bits(tmp_path):
    """The run trains a toy. test_train_parallel.py resumes a real model in another process, and test_train_recipes.py
    one with delayed scaling."""

    def start(out, *argv):
        return processes.start(["train", "--out", str(out), *argv], tmp_path / "shown", train_slowly)

    options = [*SMALL[:-1], "2", "--steps", "36", "--eval-every", "15", "--checkpoint-every", "12"]
    whole, out = tmp_path / "whole", tmp_path / "killed"
    processes.finish(start(whole, *options), tmp_path / "shown")
    expected = (whole / "log.jsonl").read_bytes()

    before, after = random.randint(1, 11), random.randint(13, 30)
    print("killed at", before, "and", after)  # pytest shows it if the test fails
    kill_at(before, start(out, *options), out / "log.jsonl")
    assert (out / "log.jsonl").read_bytes() != expected
    kill_at(after, start(out, "--resume"), out / "log.jsonl")
    assert (out / "log.jsonl").read_bytes() != expected
    processes.finish(start(out, "--resume"), tmp_path / "shown")
    assert (out / "log.jsonl").read_bytes() == expected


def test_runs_that_begin_at_the_same_time_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/train-050").touch()  # no folder
    first, second = new_path(), new_path()
    assert (first.name, second.name) == ("train-051", "train-052")
    assert newest_path() == second
