"""`te-jax train --optimizer-state`: Adam's moments in fewer bytes, kept by the run, its twin and its checkpoints."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import losses, plan_of, refused, without_last_checkpoint

from te_jax.cli import _step, train
from te_jax.cli._run_folder import RunFolder, read_header
from te_jax.cli.main import main
from te_jax.optim import ScaleByAdamState

pytestmark = pytest.mark.usefixtures("as_in_a_process_of_its_own", "figures_of_twins_alone", "programs_of_equal_runs")

STEPS = 8
ARGV = ["train", "--preset", "nano", "--seq-len", "16", "--batch", "4", "--steps", str(STEPS), "--seed", str(2**32 - 1)]
DTYPES = {"f32": "float32", "bf16": "bfloat16", "fp8": "float8_e4m3fn"}


def run(out, *options, devices=1):
    """A run with checkpoints at steps 3, 6 and 8."""
    assert main([*ARGV, "--checkpoint-every", "3", "--devices", str(devices), *options, "--out", str(out)]) == 0
    return out


def resume(out, *options):
    assert main(["train", "--resume", "--out", str(out), *options]) == 0


def log(out):
    return (out / "log.jsonl").read_text().splitlines()


@pytest.fixture(scope="module")
def by_optax(tmp_path_factory, as_in_a_process_of_its_own):
    """A run whose optimizer is optax's own."""

    def build_optimizer(plan, model):
        peak = plan.learning_rate
        rates = optax.warmup_cosine_decay_schedule(peak, peak, 0, STEPS, peak / 20)
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rates, b2=0.95, weight_decay=0.1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_step, "build_optimizer", build_optimizer)
        return run(tmp_path_factory.mktemp("optax") / "run")


def test_few_bytes_learn_beside_a_float32_twin_and_resume_with_the_same_bits(by_optax, tmp_path, capsys):
    whole = run(tmp_path / "whole", "--optimizer-state", "fp8", "--compare")
    shown = capsys.readouterr().out
    assert read_header(whole)["options"]["optimizer_state"] == "fp8"
    found, expected = losses(whole), losses(by_optax)
    # Two programs: what XLA fuses, and so the last bit, is another on another CPU.
    np.testing.assert_allclose(losses(whole, name="f32_states_loss"), expected, rtol=1e-6)
    assert found[-1] != expected[-1]
    assert found[-1] == pytest.approx(expected[-1], rel=1e-2)
    assert found[-1] < found[0] - 1
    for loss, label in {"loss": "fp8 states", "f32_states_loss": "f32 states twin"}.items():
        assert re.search(rf"^{label} .* → {losses(whole, name=loss)[-1]:.6f} nats per byte$", shown, re.MULTILINE)

    _check_resuming(whole, tmp_path / "cut", {"loss": "fp8", "f32_states_loss": "f32"}, devices=1)
    error = refused(["--resume", "--out", str(whole), "--optimizer-state", "f32"], capsys)
    assert error.startswith(f"te-jax: error: --optimizer-state is f32, but the run in {whole} was started with fp8")


def test_bfloat16_on_two_devices_learns_the_same_and_resumes_with_the_same_bits(by_optax, tmp_path):
    whole = run(tmp_path / "whole", "--optimizer-state", "bf16", devices=2)
    assert read_header(whole)["device"]["count"] == 2
    np.testing.assert_allclose(losses(whole), losses(by_optax), rtol=5e-3)
    _check_resuming(whole, tmp_path / "cut", {"loss": "bf16"}, devices=2)


def _check_resuming(whole, out, states, devices):
    cut = without_last_checkpoint(whole, out)
    resume(cut, "--optimizer-state", states["loss"])
    assert log(cut) == log(whole)
    found, expected = checkpoint(cut, states, devices), checkpoint(whole, states, devices)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)
    for name, state in states.items():
        adam = adam_of(found[name])
        moments = jax.tree.leaves((adam.mu, adam.nu))
        assert {moment.dtype for moment in moments} == {jnp.dtype(DTYPES[state])}
        assert all(np.asarray(moment, np.float32).any() for moment in moments)
        assert adam.count == STEPS


def checkpoint(out, states, devices):
    """The last one, by the names of losses."""

    folder = RunFolder.resume(out)
    try:
        return folder.restore({name: like(state, devices) for name, state in states.items()})
    finally:
        folder.close()


@functools.cache
def like(state, devices):
    """Shapes and shardings of what a checkpoint holds."""
    plan = plan_of(optimizer_state=state, devices=devices)
    learner = _step.build_learner(plan, *plan.models)
    return learner.stored(learner.abstract_state())


def adam_of(state):
    parts = jax.tree.leaves(state.optimizer, is_leaf=lambda part: isinstance(part, ScaleByAdamState))
    (adam,) = [part for part in parts if isinstance(part, ScaleByAdamState)]
    return adam


@pytest.mark.parametrize(
    ("recipe", "state", "twin", "twin_state"),
    [
        ("none", "f32", "optax_loss", "f32"),
        ("none", "bf16", "f32_states_loss", "f32"),
        ("none", "fp8", "f32_states_loss", "f32"),
        ("current", "f32", "bfloat16_loss", "f32"),
        ("current", "fp8", "bfloat16_loss", "fp8"),
    ],
)
def test_a_twin_differs_in_one_thing(recipe, state, twin, twin_state):
    """The recipe first, and then the moments. Beside both there is the loss."""
    own, other = plan_of(dtype="bfloat16", recipe=recipe, optimizer_state=state, compare=True).models
    assert (own.loss_name, other.loss_name) == ("loss", twin)
    assert (own.state_dtype, other.state_dtype) == (DTYPES[state], DTYPES[twin_state])
    assert (own.config.recipe is None, other.config.recipe) == (recipe == "none", None)
    assert (own.by_optax, other.by_optax) == (False, twin == "optax_loss")


def test_a_run_is_called_by_what_its_twin_lacks(tmp_path, capsys):
    record = {"step": 1, "loss": 2.0, "bfloat16_loss": 2.0}
    folder = types.SimpleNamespace(path=tmp_path, records=lambda kind: [record] * (kind != "statistics"))
    train._conclude(plan_of(recipe="current", optimizer_state="fp8", compare=True), folder, "")
    assert capsys.readouterr().out.startswith("current scaling ")


def optimizer_of(**options):
    plan = plan_of(learning_rate=0.5, steps=40, **options)
    return _step.build_optimizer(plan, *plan.models)


def test_the_rate_rises_for_a_twentieth_of_the_run_and_then_falls_to_a_twentieth_of_its_peak():
    """Parameters of zero do not decay, and Adam's step is the rate where gradients are always the same."""
    optimizer, params = optimizer_of(), jnp.zeros(1)
    update, state, rates = jax.jit(optimizer.update), optimizer.init(params), []
    for _ in range(41):
        updates, state = update(jnp.ones(1), state, params)
        rates.append(-float(updates[0]) / 0.5)
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1], rel=1e-4)
    assert rates[2 + 38 // 2] == pytest.approx((1 + 1 / 20) / 2, rel=1e-4)
    assert rates[40] == pytest.approx(1 / 20, rel=1e-4)


def test_the_rate_rises_for_as_many_steps_as_are_asked_for():
    optimizer, params = optimizer_of(warmup_steps=9), jnp.zeros(1)
    state, rates = optimizer.init(params), []
    for _ in range(11):
        updates, state = jax.jit(optimizer.update)(jnp.ones(1), state, params)
        rates.append(-float(updates[0]) / 0.5)
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)], rel=1e-4)
    assert rates[10] < 1


@pytest.mark.parametrize(("clip_norm", "scale"), [(0.0, 1), (1.0, 1 / 5), (2.0, 2 / 5), (100.0, 1)])
def test_gradients_are_clipped_to_a_norm(clip_norm, scale):
    gradient = jnp.array([3.0, 4.0])
    optimizer = optimizer_of(clip_norm=clip_norm)
    _, state = optimizer.update(gradient, optimizer.init(gradient), gradient)
    np.testing.assert_allclose(adam_of(types.SimpleNamespace(optimizer=state)).mu, 0.1 * scale * gradient, rtol=1e-5)
