"""`te-jax train` in FP8: every recipe learns as the run without one, and delayed scaling's state is kept apart."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import EVERY, SMALL, STEPS, losses, plan_of, without_last_checkpoint

from te_jax import ops
from te_jax.cli import _state, _step
from te_jax.cli._run_folder import RunFolder, read_header
from te_jax.cli._text import Tokens
from te_jax.cli.main import main
from te_jax.models import PRESETS, Losses
from te_jax.quantized import QuantizedArray
from te_jax.recipe import BlockScaling, DelayedScaling

pytestmark = pytest.mark.usefixtures("as_in_a_process_of_its_own", "figures_of_twins_alone", "programs_of_equal_runs")

RECIPES = ("block", "current", "rowwise", "delayed")


@pytest.fixture(scope="module")
def delayed(tmp_path_factory, as_in_a_process_of_its_own, programs_of_equal_runs):
    return run(tmp_path_factory.mktemp("delayed") / "run", "--recipe", "delayed")


@pytest.fixture(scope="module")
def block(tmp_path_factory, as_in_a_process_of_its_own, programs_of_equal_runs):
    return run(tmp_path_factory.mktemp("block") / "run", "--recipe", "block", "--microbatches", "2")


def run(out, *options):
    """A run like the one without a recipe, `whole`."""
    assert main(["train", *SMALL, *EVERY, "--steps", str(STEPS), *options, "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize(
    "recipe", ["current", "delayed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("block", "rowwise"))]
)
def test_every_recipe_ends_where_the_run_without_one_does(recipe, whole, tmp_path, capsys, request):
    compare = ["--compare"] if recipe == "current" else []
    if recipe in ("block", "delayed"):
        out = request.getfixturevalue(recipe)
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


@pytest.mark.slow
@pytest.mark.parametrize("logits", [(), ("--fp8-logits",)])
def test_the_head_has_a_recipe_of_its_own(logits, whole, tmp_path, capsys):
    out = run(tmp_path / "run", "--head-recipe", "block", *logits, "--compare")
    assert ("forward" in read_header(out)["model"]["head_fp8_products"]) == bool(logits)
    assert read_header(out)["model"]["head_recipe"]["name"] == "BlockScaling"
    assert read_header(out)["model"]["recipe"] is None
    np.testing.assert_allclose(losses(out, "validation"), losses(whole, "validation"), rtol=1e-2)
    assert (losses(out, "train")[1:] != losses(whole, "train")[1:]).any()
    _check_twin(out, whole, capsys.readouterr().out, "block head with logits" if logits else "block head")


def _check_twin(out, whole, shown, chosen="current scaling"):
    for kind in ("train", "validation"):
        np.testing.assert_allclose(losses(out, kind, name="bfloat16_loss"), losses(whole, kind), rtol=1e-4)
    for name, label in {"loss": chosen, "bfloat16_loss": "bfloat16 twin"}.items():
        assert re.search(
            rf"^{label} .* → {losses(out, 'validation', name=name)[-1]:.6f} nats per byte$", shown, re.MULTILINE
        )
    difference = re.search(r"^difference +training (.*)% +validation (.*)%$", shown, re.MULTILINE)
    for kind, found in zip(("train", "validation"), difference.groups(), strict=True):
        ratio = losses(out, kind)[-1] / losses(out, kind, name="bfloat16_loss")[-1]
        assert float(found) == pytest.approx(100 * (ratio - 1), abs=1e-3)


# ----------------------------------------------------------------------------------------- the state of delayed scaling


def learner_of(out):
    """What a run trained, and where: its programs are compiled."""
    plan = plan_of(**read_header(out)["options"])
    return _step.build_learner(plan, plan.models[0]), plan.placement


def histories(state):
    """By projection and role, float32 [layers, history_len]."""
    return {
        f"{name}/{role}": history
        for name, of_projection in jax.tree.map(lambda *layers: np.stack(layers), *state.scaling).items()
        for role, history in vars(of_projection).items()
        if role != "uses"
    }


def test_a_step_advances_the_state_and_an_evaluation_does_not(delayed, rng):
    learner, placement = learner_of(delayed)
    windows = rng.integers(0, 256, (3, 4, 17)).astype(np.uint8)
    state = learner.init(jax.random.key(0))
    seen = [histories(state)]
    for batch in windows:
        learner.evaluate(state, jax.device_put(Tokens(windows), placement.windows))
        former, (state, _) = state, learner.step(state, jax.device_put(Tokens(batch[None]), placement.windows))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(former.params))  # their memory is the next ones'
        seen.append(histories(state))
    assert all(
        (np.asarray(of_projection.uses) == 1).all() for layer in state.scaling for of_projection in layer.values()
    )
    kernels = state.params["layers"]
    for name, last in seen[-1].items():
        assert last.shape == (2, DelayedScaling().history_len)
        assert (last[:, :3] > 0).all(), name
        assert not last[:, 3:].any()
        for before, after in itertools.pairwise(seen):
            np.testing.assert_array_equal(after[name][:, 1:], before[name][:, :-1])
        if name.endswith("kernel"):  # of the step before the optimizer changed it
            largest = [np.abs(np.asarray(layer[name.partition("/")[0]])).max() for layer in kernels]
            np.testing.assert_allclose(last[:, 0], largest, rtol=0.2)
            assert (last[:, 0] != last[:, 1]).all()


def test_an_evaluation_is_the_mean_over_its_batches(delayed, rng):
    learner, placement = learner_of(delayed)
    state, windows = learner.init(jax.random.key(0)), rng.integers(0, 256, (3, 4, 17)).astype(np.uint8)

    def loss_of(windows):
        return float(learner.evaluate(state, jax.device_put(Tokens(windows), placement.windows)).cross_entropy)

    assert loss_of(windows) == pytest.approx(np.mean([loss_of(windows[i : i + 1]) for i in range(3)]))


def test_microbatches_start_from_one_state_and_their_maximum_follows(rng):
    """In a loss of one layer. The second microbatch has the largest x, and the first the largest gradient."""
    recipe, kernel = DelayedScaling(history_len=2), rng.normal(size=(16, 16)).astype(np.float32)

    def loss(params, scaling, tokens, targets, segments):
        y = ops.dense(tokens.astype(jnp.float32), params, recipe=recipe, scaling_state=scaling)
        value = jnp.mean(y * (100.0 - targets))
        return Losses(value, value, None)

    def after(windows):
        state = _state.TrainState(kernel, None, recipe.init(), None)
        return jax.jit(functools.partial(_step._value_and_gradients, loss))(state, Tokens(windows))

    windows = rng.integers(1, 50, (2, 4, 17)).astype(np.uint8) + np.array([0, 40], np.uint8)[:, None, None]
    losses, gradient, scaling = after(windows)
    (first_losses, first_gradient, first), (second_losses, second_gradient, second) = map(
        after, (windows[:1], windows[1:])
    )
    mean = float(first_losses.objective + second_losses.objective) / 2
    assert float(losses.objective) == pytest.approx(mean, rel=1e-5)
    np.testing.assert_allclose(gradient, (first_gradient + second_gradient) / 2, rtol=1e-5)
    for role in ("activation", "kernel", "gradient", "uses"):
        one, other = getattr(first, role), getattr(second, role)
        np.testing.assert_array_equal(getattr(scaling, role), np.maximum(one, other))
    assert first.activation[0] < second.activation[0]
    assert first.gradient[0] > second.gradient[0]


def test_the_optimizer_knows_nothing_of_the_state(delayed, whole):
    delayed, plain = (learner_of(out)[0].abstract_state() for out in (delayed, whole))
    assert delayed.optimizer == plain.optimizer
    assert delayed.params == plain.params
    assert plain.scaling is None


def test_a_checkpoint_holds_the_state(delayed, tmp_path, rng):
    learner, placement = learner_of(delayed)
    batch = jax.device_put(Tokens(rng.integers(0, 256, (1, 4, 17)).astype(np.uint8)), placement.windows)
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


@pytest.mark.parametrize("recipe", ["block", "delayed"])
def test_a_resumed_run_repeats_the_bits(recipe, tmp_path, request):
    whole = request.getfixturevalue(recipe)
    out = without_last_checkpoint(whole, tmp_path / "run")
    assert main(["train", "--resume", "--out", str(out)]) == 0
    assert (out / "log.jsonl").read_bytes() == (whole / "log.jsonl").read_bytes()


# ------------------------------------------------------------------------------------------------- quantized kernels


def test_a_step_leaves_the_kernels_of_the_next_one_in_fp8(block, whole, rng):
    learner, placement = learner_of(block)
    windows = jax.device_put(Tokens(rng.integers(0, 256, (2, 2, 17)).astype(np.uint8)), placement.windows)
    first = learner.init(jax.random.key(0))
    for state in (jax.device_get(first), learner.step(first, windows)[0]):
        assert len(jax.tree.leaves(state.kernels, is_leaf=is_quantized)) == 2 * 7  # none for embedding, head and norms
        for params, kernels in zip(state.params["layers"], state.kernels["layers"], strict=True):
            for name in ("query", "key", "value", "out", "gate", "up", "down"):
                expected = ops.quantize(params[name], BlockScaling().quantization("kernel"))
                for found, wanted in zip(*map(jax.tree.leaves, (kernels[name], expected)), strict=True):
                    np.testing.assert_array_equal(found.reshape(wanted.shape), wanted)
    assert jax.tree.leaves(learner_of(whole)[0].abstract_state().kernels) == []


def test_microbatches_read_kernels_that_are_quantized_already(block):
    """A step quantizes them after all microbatches, and the loop over these has none of them as an array."""
    learner, _ = learner_of(block)
    jaxpr = jax.make_jaxpr(learner.step)(
        learner.abstract_state(), Tokens(jax.ShapeDtypeStruct((2, 2, 17), np.uint8))
    ).jaxpr
    (step,) = jaxpr.eqns
    body = step.params["jaxpr"].jaxpr
    (loop,) = [eqn for eqn in body.eqns if eqn.primitive.name == "scan"]
    of_state = [var.aval for var in body.invars if var in loop.invars]
    kernel = PRESETS["nano"].hidden_size, PRESETS["nano"].mlp_size
    assert {aval.dtype for aval in of_state if aval.shape in (kernel, kernel[::-1])} == {jnp.dtype(jnp.float8_e4m3fn)}


def is_quantized(leaf):
    return isinstance(leaf, QuantizedArray)
