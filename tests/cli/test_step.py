"""What a step of `te-jax train` computes: rates, gradients of microbatches, packed documents, and states of FP8."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import plan_of

from te_jax import ops, optim
from te_jax.cli import _memory, _placement, _plan, _step
from te_jax.cli._options import Options
from te_jax.cli._run_folder import RunFolder
from te_jax.cli._text import Tokens
from te_jax.layers import Router
from te_jax.models import PRESETS, Experts
from te_jax.optim import ScaleByAdamState
from te_jax.quantized import QuantizedArray
from te_jax.recipe import BlockScaling, DelayedScaling
from te_jax.testing import relative_error

pytestmark = pytest.mark.usefixtures("as_in_a_process_of_its_own")


@pytest.fixture(autouse=True)
def _one_layer(monkeypatch):
    monkeypatch.setitem(PRESETS, "nano", dataclasses.replace(PRESETS["nano"], num_layers=1))


@functools.cache
def learner_of(**options):
    plan = plan_of(**{"seq_len": 16, "batch": 4, "dtype": "float32", "clip_norm": 0.0, **options})
    return _step.build_learner(plan, *plan.models)


def drawn(rng, *shape, pack=False):
    """Windows [microbatches, batch, seq_len + 1] of random bytes. Of packed ones some have more documents."""
    ids = rng.integers(0, 256, shape).astype(np.uint8)
    often = rng.permuted(np.linspace(0.02, 0.7, shape[0] * shape[1])).reshape(*shape[:2], 1)
    return Tokens(ids, rng.random(shape) < often if pack else None)


def adam_of(optimizer_state):
    parts = jax.tree.leaves(optimizer_state, is_leaf=lambda part: isinstance(part, ScaleByAdamState))
    (adam,) = [part for part in parts if isinstance(part, ScaleByAdamState)]
    return adam


# -------------------------------------------------------------------------------------------------------- the optimizer


@pytest.mark.parametrize(("given", "warmup"), [({}, 2), ({"warmup_steps": 9}, 9), ({"warmup_steps": 0}, 0)])
def test_the_rate_rises_and_then_falls_along_a_cosine_to_a_twentieth_of_its_peak_at_the_last_step(given, warmup):
    """Parameters of zero do not decay, and Adam's step is the rate where gradients are always the same."""
    plan = plan_of(learning_rate=0.5, steps=40, **given)
    optimizer = _step.build_optimizer(plan, *plan.models)
    params, ones = np.zeros((2, 1), np.float32)[:1], np.ones((1, 1), np.float32)

    def take_step(state, _):
        updates, state = optimizer.update(ones, state, params)
        return state, -updates[0, 0] / 0.5

    rates = jax.jit(lambda: jax.lax.scan(take_step, optimizer.init(jnp.asarray(params)), length=41)[1])()
    fallen = np.minimum(np.maximum(np.arange(41) - warmup, 0) / (40 - warmup), 1)
    expected = 1 / 20 + 19 / 20 * (1 + np.cos(np.pi * fallen)) / 2
    expected[:warmup] = (np.arange(warmup) + 1) / (warmup + 1)
    np.testing.assert_allclose(rates, expected, rtol=1e-4)


@pytest.mark.parametrize(("clip_norm", "scale"), [(0.0, 1), (2.0, 2 / 5), (100.0, 1)])
def test_gradients_are_clipped_to_a_norm(clip_norm, scale):
    gradient = np.array([3.0, 4.0], np.float32)
    plan = plan_of(clip_norm=clip_norm)
    optimizer = _step.build_optimizer(plan, *plan.models)
    (_, state) = jax.jit(lambda x: optimizer.update(x, optimizer.init(x), x))(gradient)
    np.testing.assert_allclose(adam_of(state).mu, 0.1 * scale * gradient, rtol=1e-5)


def test_the_bias_of_a_choice_of_experts_does_not_decay(monkeypatch):
    experts = Experts(2, Router(top_k=1, score="sigmoid"), choice_bias=True)
    monkeypatch.setitem(PRESETS, "nano", dataclasses.replace(PRESETS["nano"], experts=experts))
    plan = plan_of(preset="nano")
    optimizer = _step.build_optimizer(plan, *plan.models)
    params = {"layers": [{"expert_bias": jnp.ones(2), "router": jnp.ones((4, 2))}]}
    updates, _ = jax.jit(lambda x: optimizer.update(jax.tree.map(jnp.zeros_like, x), optimizer.init(x), x))(params)
    assert not updates["layers"][0]["expert_bias"].any()
    assert (updates["layers"][0]["router"] < 0).all()


def test_moments_in_few_bytes_are_rounded_by_the_seed(rng):
    gradient = rng.standard_normal((4, 128)).astype(np.float32)

    def moments(seed):
        plan = plan_of(optimizer_state="fp8", seed=seed)
        optimizer = _step.build_optimizer(plan, *plan.models)
        (_, state) = jax.jit(lambda x: optimizer.update(x, optimizer.init(x), x))(gradient)
        return np.asarray(adam_of(state).mu, np.float32)

    np.testing.assert_array_equal(moments(3), moments(3))
    assert (moments(3) != moments(4)).any()


def test_parameters_in_bfloat16_are_rounded_from_the_same_weights(rng):
    """Beside them the optimizer has the rest of float32 weights, bit for bit, which learn as float32 parameters do."""
    windows, weights, found = drawn(rng, 2, 2, 17), jax.jit(optim.weights), {}
    for dtype in ("float32", "bfloat16"):
        learner = learner_of(parameters=dtype, dtype="bfloat16", microbatches=2, learning_rate=0.01, warmup_steps=0)
        state = learner.init(jax.random.key(0))
        before = weights(state.params, state.optimizer)
        assert {param.dtype.name for param in jax.tree.leaves(state.params)} == {dtype}
        for _ in range(4):
            state, _ = learner.step(state, windows)
        found[dtype] = before, weights(state.params, state.optimizer)
    (before, after), (same, others) = found.values()
    for one, another in zip(*map(jax.tree.leaves, (before, same)), strict=True):
        np.testing.assert_array_equal(one, another)
    steps, wanted = (jax.tree.leaves(jax.tree.map(np.subtract, of, before)) for of in (others, after))
    # Adam's first steps are as long for a gradient that rounds to the other side of 0.
    for step, expected in zip(steps, wanted, strict=True):
        assert relative_error(step, expected) < 0.2
    of_all, of_all_wanted = (np.concatenate([np.ravel(step) for step in each]) for each in (steps, wanted))
    assert relative_error(of_all, of_all_wanted) < 0.03


def test_layers_quantize_their_own_kernels_where_copies_would_not_fit(monkeypatch, capsys, rng):
    """The state is without copies then, and losses are the same."""
    plan, data = _plan.decide(
        Options.of(
            {"preset": "nano", "devices": 1, "seq_len": 16, "batch": 4, "recipe": "block", "learning_rate": 0.01}
        )
    )
    learner, windows = _step.build_learner(plan, *plan.models), drawn(rng, 1, 4, 17)
    state = learner.init(jax.random.key(0))
    needed = learner.memory(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), windows))
    assert needed.kept > sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert needed.kernels == sum(leaf.nbytes for leaf in jax.tree.leaves(state.kernels))
    monkeypatch.setattr(_memory, "_WORTH_ASKING", 0)  # an embedding is most of a small model
    fitted = {}
    for present in (needed.total, int(needed.total / 0.94)):
        monkeypatch.setattr(_placement, "memory_of", lambda devices, present=present: present)
        fitted[present] = _memory.fitted(plan, {"loss": learner}, data[0])["loss"]
    small, large = fitted.values()
    assert large is learner
    assert "layers quantize their own kernels" in capsys.readouterr().err
    found = []
    for learner in (small, large):
        state = learner.init(jax.random.key(0))
        losses = []
        for _ in range(3):
            state, loss = learner.step(state, windows)
            losses.append(float(loss.objective))
        found.append(losses)
        assert bool(jax.tree.leaves(state.kernels)) is (learner is large)
    np.testing.assert_allclose(*found, rtol=1e-3)


# -------------------------------------------------------------------------------------------------------- microbatches


def test_microbatches_of_packed_windows_have_the_gradient_of_the_batch(rng):
    """Each target counts alike, although microbatches have different numbers of them. Adam keeps a tenth of it."""
    windows = drawn(rng, 1, 4, 17, pack=True)
    found = []
    for count in (1, 4):
        learner = learner_of(pack=True, microbatches=count, implementation="reference")
        batch = jax.tree.map(lambda array, count=count: array.reshape(count, 4 // count, 17), windows)
        state = learner.init(jax.random.key(0))
        evaluated = float(learner.evaluate(state, batch).cross_entropy) if count == 4 else None
        state, losses = learner.step(state, batch)
        found.append((float(losses.objective), adam_of(state.optimizer).mu))
    (expected, gradient), (loss, other) = found
    assert evaluated == pytest.approx(expected, rel=1e-5)
    assert loss == pytest.approx(expected, rel=1e-5)
    for one, another in zip(*map(jax.tree.leaves, (gradient, other)), strict=True):
        assert np.abs(one).max() > 1e-5
        np.testing.assert_allclose(another, one, rtol=1e-3, atol=1e-6)


def histories(state):
    """By projection and role, float32 [layers, history_len]."""
    layers = jax.tree.map(lambda *each: np.stack(each), *state.scaling)
    return {
        f"{name}/{role}": history
        for name, projection in layers.items()
        for role, history in vars(projection).items()
        if role != "uses"
    }


def test_microbatches_in_delayed_scaling_begin_with_one_state_and_leave_the_largest_values_of_all(rng):
    """The second of two steps begins with the parameters and states that the first returned."""
    learner, halves = learner_of(recipe="delayed", batch=2, microbatches=2), drawn(rng, 2, 1, 17)
    alone, alone_mu = [], []
    for half in halves.ids:
        begun = learner.init(jax.random.key(0))
        state, _ = learner.step(begun, Tokens(np.stack([half, half])))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(begun.params))  # their memory is the next ones'
        alone.append(histories(state))
        alone_mu.append(jax.device_get(adam_of(state.optimizer).mu))
    state, _ = learner.step(learner.init(jax.random.key(0)), halves)
    found = histories(state)
    mean = jax.tree.map(lambda first, second: (first + second) / 2, *alone_mu)
    for value, wanted in zip(*map(jax.tree.leaves, (adam_of(state.optimizer).mu, mean)), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-3, atol=1e-7)
    state, _ = learner.step(state, halves)
    after = histories(state)
    for name, history in found.items():
        assert history.shape == (1, DelayedScaling().history_len)
        assert (history[:, 0] > 0).all(), name
        assert not history[:, 1:].any()
        np.testing.assert_allclose(history, np.maximum(alone[0][name], alone[1][name]), rtol=1e-5)
        np.testing.assert_array_equal(after[name][:, 1:], history[:, :-1])
    assert (after["up/kernel"][:, 0] != found["up/kernel"][:, 0]).all()  # which the optimizer has changed


# ---------------------------------------------------------------------------------------------------- packed documents


@pytest.mark.parametrize("options", [{}, {"recipe": "none", "compare": True}], ids=["te_jax", "optax"])
def test_a_packed_document_is_read_as_if_it_were_alone(options, rng):
    """Its loss is that of its own tokens at positions from 0. What follows it in the window below has no targets."""
    plan = plan_of(pack=True, dtype="float32", **options)
    model = plan.models[-1]
    config = dataclasses.replace(model.config, max_segments_per_seq=None)  # the window below has one for each token
    learner = _step.build_learner(plan, model._replace(config=config))
    ids, ends = rng.integers(0, 256, (2, 41)).astype(np.uint8), [[0, 7, 8, 24, 41], [0, 17, 33, 34, 41]]
    begins, alone = np.zeros((2, 41), bool), np.zeros((8, 41), np.uint8)
    starts_alone = np.ones((8, 41), bool)
    spans = [(row, span) for row in range(2) for span in itertools.pairwise(ends[row])]
    for i, (row, (first, last)) in enumerate(spans):
        begins[row, first] = True
        alone[i, : last - first] = ids[row, first:last]
        starts_alone[i, 1 : last - first] = False
    # The same numbers of windows, so that both are one program: the packed ones four times.
    together = Tokens(*(np.tile(array[None], (4, 1, 1)) for array in (ids, begins)))
    apart = Tokens(alone.reshape(4, 2, 41), starts_alone.reshape(4, 2, 41))
    state = learner.init(jax.random.key(0))
    found, expected = (float(learner.evaluate(state, windows).cross_entropy) for windows in (together, apart))
    assert found == pytest.approx(expected, rel=1e-5)


# --------------------------------------------------------------------------------------------------- quantized kernels


def is_quantized(leaf):
    return isinstance(leaf, QuantizedArray)


def test_a_step_leaves_the_kernels_of_the_next_one_in_fp8(rng):
    learner = learner_of(recipe="block", microbatches=2)
    state = learner.init(jax.random.key(0))
    first = jax.device_get(state)
    names = ("query", "key", "value", "out", "gate", "up", "down")
    quantization = BlockScaling().quantization("kernel")
    quantize = jax.jit(lambda layer: {name: ops.quantize(layer[name], quantization) for name in names})
    for each in (first, learner.step(state, drawn(rng, 2, 2, 17))[0]):
        quantized = jax.tree.leaves(each.kernels, is_leaf=is_quantized)
        assert len(quantized) == len(names)  # none of embedding, head and norms
        (params,), (kernels,) = each.params["layers"], each.kernels["layers"]
        expected = quantize(params)
        for name in names:
            for found, wanted in zip(*map(jax.tree.leaves, (kernels[name], expected[name])), strict=True):
                np.testing.assert_array_equal(found.reshape(wanted.shape), wanted)
    assert jax.tree.leaves(learner_of().abstract_state().kernels) == []


def test_a_checkpoint_of_an_older_version_that_holds_quantized_kernels_is_restored_without_them(tmp_path):
    learner = learner_of(recipe="block", microbatches=2)
    state = learner.init(jax.random.key(0))
    folder = RunFolder.create(tmp_path / "run", {"kind": "header", "options": {}})
    try:
        folder.save(1, {"loss": state})
        stored = folder.restore({"loss": learner.stored(learner.abstract_state())})["loss"]
    finally:
        folder.close()
    assert stored.kernels is None
    found = learner.resumed(stored, None)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(one, other)
