"""`te_jax.models.generate`: what is drawn, where texts end, and caches against whole sequences."""

import dataclasses
import functools
import math

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax import ops
from te_jax.hlo import collectives
from te_jax.layers import Router
from te_jax.layers.sampling import _drawn
from te_jax.models import PRESETS, Experts, TensorParallel, apply, apply_head, generate, init, param_specs
from te_jax.models.config import ATTENTION, MLP
from te_jax.recipe import BlockScaling, DelayedScaling

CONFIG = dataclasses.replace(PRESETS["nano"], num_layers=1)
MANY = np.tile([[7, 8, 9]], (2000, 1))


jit_init, jit_apply = (jax.jit(function, static_argnames="config") for function in (init, apply))


@pytest.fixture(scope="module")
def params():
    return jit_init(config=CONFIG, key=jax.random.key(0))


def by_whole_sequences(params, tokens, config, count):
    """The likeliest tokens, where every one begins anew."""
    tokens = jnp.asarray(tokens)
    for _ in range(count):
        logits = apply(params, tokens, config)
        tokens = jnp.concatenate([tokens, jnp.argmax(logits[:, -1:], axis=-1)], axis=1)
    return np.asarray(tokens[:, -count:])


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, {"window": 3}, {"recipe": BlockScaling(), "hidden_size": 64, "mlp_size": 128}, {"attention_sinks": True}],
    ids=["plain", "window", "FP8", "sinks"],
)
def test_a_cache_gives_what_whole_sequences_give(changes, rng):
    config = dataclasses.replace(CONFIG, num_layers=2, **changes)
    params = init(config, jax.random.key(1))
    tokens = rng.integers(0, 256, (2, 5))
    found = generate(params, tokens, config, max_new_tokens=6)
    np.testing.assert_array_equal(found, by_whole_sequences(params, tokens, config, 6))
    # One token at a time needs no prompt of several.
    one = generate(params, tokens[:, :1], config, max_new_tokens=3)
    np.testing.assert_array_equal(one, by_whole_sequences(params, tokens[:, :1], config, 3))


def test_a_text_that_has_ended_repeats_its_end(params):
    tokens = np.array([[1, 2, 3], [4, 5, 6]])
    free = np.asarray(generate(params, tokens, CONFIG, max_new_tokens=8))
    stop = int(free[0, 2])
    first = [int(np.argmax(row == stop)) if stop in row else 7 for row in free]
    found = np.asarray(generate(params, tokens, CONFIG, max_new_tokens=8, stop_tokens=[stop]))
    for row, other, end in zip(found, free, first, strict=True):
        np.testing.assert_array_equal(row[: end + 1], other[: end + 1])
        assert set(row[end:]) == {other[end]}


def test_tokens_are_drawn_by_their_probability_among_the_likeliest(params):
    logits = np.asarray(jit_apply(params, MANY[:1], config=CONFIG), np.float64)[0, -1]
    temperature, top_p = 0.5, 0.7
    scaled = np.exp(logits / temperature - (logits / temperature).max())
    scaled /= scaled.sum()
    order = np.argsort(-scaled)
    kept = order[: int(np.searchsorted(np.cumsum(scaled[order]), top_p)) + 1]
    wanted = np.zeros_like(scaled)
    wanted[kept] = scaled[kept] / scaled[kept].sum()
    options = {"max_new_tokens": 1, "temperature": temperature, "top_p": top_p}
    found = np.asarray(generate(params, MANY, CONFIG, key=jax.random.key(3), **options))[:, 0]
    assert set(found) <= set(kept)
    counts = np.bincount(found, minlength=256)
    assert np.all(np.abs(counts - 2000 * wanted) <= 5 * np.sqrt(2000 * wanted * (1 - wanted)) + 1)
    again = np.asarray(generate(params, MANY, CONFIG, key=jax.random.key(3), **options))[:, 0]
    np.testing.assert_array_equal(again, found)


@pytest.mark.parametrize(("temperature", "top_p"), [*((t, 1.0) for t in (1e-30, 1e-38, 1e-39, 1e-300)), (1.0, 1e-40)])
def test_the_likeliest_token_is_drawn_at_the_smallest_numbers(temperature, top_p, params):
    options = {"max_new_tokens": 1, "temperature": temperature, "top_p": top_p, "key": jax.random.key(1)}
    likeliest = np.argmax(jit_apply(params, MANY[:1], config=CONFIG)[0, -1])
    np.testing.assert_array_equal(generate(params, MANY, CONFIG, **options), likeliest)


def test_every_token_is_drawn_alike_at_the_largest_temperature(params):
    """And by random numbers of its own: the second of a text tells nothing of the first."""
    found = np.asarray(generate(params, MANY, CONFIG, max_new_tokens=2, temperature=1e300, key=jax.random.key(2)))
    for drawn in (*found.T, (found[:, 0] - found[:, 1]) % CONFIG.vocab_size):
        counts = np.bincount(drawn, minlength=CONFIG.vocab_size)
        assert counts.max() < 40
        assert np.sum(counts == 0) < 10


@pytest.mark.parametrize(("top_p", "kept"), [(1.0, 8), (0.5, 4), (0.51, 5), (1e-40, 1)])
def test_as_few_tokens_as_have_top_p_are_drawn_among_equal_ones(top_p, kept):
    logits = np.tile(np.float32([-30.0, 20.125, *[20.125] * 7, 16.0]), (500, 1))
    found = jax.jit(_drawn)(logits, jnp.float32(1e-3), jnp.float32(top_p), jnp.int32(10), jax.random.key(0))
    assert found.dtype == jnp.int32
    assert set(found.tolist()) == set(range(1, 1 + kept))


@pytest.mark.parametrize("changes", [{}, {"window": 3}, {"recipe": BlockScaling(), "dtype": "bfloat16"}])
def test_prompts_of_several_lengths_go_on_as_each_by_itself(changes, params, rng):
    config, lengths = dataclasses.replace(CONFIG, **changes), [2, 5, 1]
    in_16_bits = 6e-2 if jax.default_backend() == "gpu" else 2e-2
    tokens = rng.integers(0, 256, (3, 5))
    run = jax.jit(functools.partial(generate, config=config, max_new_tokens=6, return_log_probs=True))
    found, log_probs = run(params, tokens, lengths=np.array(lengths))
    for row, length in enumerate(lengths):
        alone, of_alone = generate(
            params, tokens[row : row + 1, :length], config, max_new_tokens=6, return_log_probs=True
        )
        np.testing.assert_array_equal(found[row], alone[0])
        np.testing.assert_allclose(log_probs[row], of_alone[0], atol=in_16_bits if changes.get("dtype") else 1e-5)


@pytest.mark.parametrize("lengths", [None, np.array([2, 5])])
def test_samples_of_a_prompt_follow_each_other(lengths, params, rng):
    tokens = rng.integers(0, 256, (2, 5))
    options = {"config": CONFIG, "max_new_tokens": 6, "return_log_probs": True}
    found, log_probs = generate(params, tokens, lengths=lengths, samples=3, **options)
    wanted, of_wanted = generate(params, tokens, lengths=lengths, **options)
    np.testing.assert_array_equal(found, np.repeat(wanted, 3, axis=0))
    np.testing.assert_allclose(log_probs, np.repeat(of_wanted, 3, axis=0), atol=1e-5)
    drawn, _ = generate(params, tokens, lengths=lengths, samples=3, temperature=1.0, key=jax.random.key(0), **options)
    assert len({tuple(row) for row in np.asarray(drawn).tolist()}) == 6


def test_at_most_top_k_tokens_are_drawn(params):
    options = {"max_new_tokens": 1, "temperature": 1e3, "key": jax.random.key(0)}
    likeliest = np.argsort(-np.asarray(jit_apply(params, MANY[:1], config=CONFIG)[0, -1]))
    for top_k in (1, 5):
        assert set(np.asarray(generate(params, MANY, CONFIG, top_k=top_k, **options))[:, 0]) == set(likeliest[:top_k])


def log_probs_of_a_trainer(params, tokens, config, softmax):
    head = functools.partial(ops.linear_log_probs, tokens=tokens[:, 1:], softmax=softmax)
    return apply_head(params, tokens[:, :-1], config, head)


def test_log_probs_are_those_of_a_trainer_and_zero_after_the_end(params):
    prompt = np.array([[1, 2, 3], [4, 5, 6]])
    options = {"max_new_tokens": 8, "temperature": 0.7, "top_p": 0.9, "key": jax.random.key(0)}
    free = np.asarray(generate(params, prompt, CONFIG, **options))
    stop = int(free[0, 2])
    found, log_probs = generate(params, prompt, CONFIG, stop_tokens=[stop], return_log_probs=True, **options)
    whole = jnp.concatenate([prompt, found], axis=1)
    wanted = np.array(log_probs_of_a_trainer(params, whole, CONFIG, ops.Softmax(0.7)))[:, 2:]
    for row, values in zip(np.asarray(found), wanted, strict=True):
        if stop in row:
            values[np.argmax(row == stop) + 1 :] = 0.0
    assert np.any(wanted == 0.0)
    np.testing.assert_allclose(log_probs, wanted, atol=2e-5)


def test_one_recipe_for_trainer_and_sampler_gives_the_same_log_probs():
    """Beside one in bfloat16, block scaling is another policy. XLA's excess precision rounds each program otherwise.

    On a GPU products of one row and of many add in another order.
    """
    prompt = np.arange(32).reshape(4, 8)
    recipes = {"bfloat16": None, "block": BlockScaling()}
    configs = {name: dataclasses.replace(CONFIG, dtype="bfloat16", recipe=each) for name, each in recipes.items()}
    params = jax.tree.map(lambda x: 3 * x, jit_init(config=CONFIG, key=jax.random.key(0)))
    jit = functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
    sampled = functools.partial(generate, max_new_tokens=24, temperature=1.0, return_log_probs=True)
    of_trainer = functools.partial(log_probs_of_a_trainer, softmax=ops.Softmax())
    gaps = {}
    for sampler, config in configs.items():
        found, log_probs = jit(functools.partial(sampled, config=config))(params, prompt, key=jax.random.key(1))
        whole = np.concatenate([prompt, found], axis=1)
        for trainer, other in configs.items():
            values = np.asarray(jit(functools.partial(of_trainer, config=other))(params, whole))[:, 7:]
            gaps[sampler, trainer] = np.mean(np.abs(np.asarray(log_probs) - values))
    bound = 1e-2 if jax.default_backend() == "gpu" else 1e-3
    assert gaps["bfloat16", "bfloat16"] < bound
    assert gaps["block", "block"] < bound
    assert min(gaps["bfloat16", "block"], gaps["block", "bfloat16"]) > 1e-2


def test_logits_are_not_rounded_to_16_bits_before_the_largest_is_taken():
    """Two tokens whose logits differ by less than bfloat16 has digits."""
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    params = jax.tree.map(lambda x: np.asarray(x, jnp.bfloat16), jit_init(config=config, key=jax.random.key(0)))
    tokens = np.array([[1, 2, 3]])
    width, vocab_size = params["head"].shape
    eye = np.eye(width, vocab_size, dtype=jnp.bfloat16)
    x = jit_apply(params | {"head": eye}, tokens, config=config)[0, -1, :width]
    likely = np.asarray(x, np.float32) / 4
    more = likely.copy()
    more[np.argsort(abs(likely))[width // 2]] *= 1 + 2**-7
    head = np.zeros((width, vocab_size), np.float32)
    head[:, 5], head[:, 9] = likely, more
    params["head"] = np.asarray(head, jnp.bfloat16)
    logits = np.asarray(jit_apply(params, tokens, config=config)[0, -1])
    assert logits[5] == logits[9] > 4
    assert generate(params, tokens, config, max_new_tokens=1) == 9


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0: it needs to be a whole number of at least 1"),
        ({"temperature": -1.0}, "temperature is -1.0: it needs to be a finite number of at least 0"),
        ({"temperature": float("nan")}, "temperature is nan: it needs to be a finite number of at least 0"),
        ({"temperature": 1.0}, "key is None, and temperature is not 0"),
        ({"lengths": np.array([3])}, r"lengths is \[3\]: each needs to be from 1 to 2"),
        ({"lengths": np.array([1, 1])}, r"lengths is int\d+\[2\]: it needs to be integers, one a prompt"),
        ({"samples": 0}, "samples is 0: it needs to be a whole number of at least 1"),
        ({"top_k": 0}, "top_k is 0: it needs to be a whole number of at least 1, or None for all tokens"),
        ({"top_p": 0.0}, "top_p is 0.0: it needs to be a number above 0 and at most 1"),
        ({"max_new_tokens": 3 * 10**9}, "max_new_tokens is 3000000000: a prompt of 2 and what follows must be fewer"),
        ({"stop_tokens": [1.5]}, r"stop_tokens is \[1.5\]: it needs to be whole numbers"),
        ({"stop_tokens": [2**31]}, r"stop_tokens is \[2147483648\]: .* from 0 to vocab_size - 1, 255"),
        ({"stop_tokens": 2}, "stop_tokens is 2: it needs to be whole numbers"),
        ({"tokens": np.array([[1, -1]])}, "tokens has -1, and the model knows tokens from 0 to 255"),
        ({"tokens": np.array([[1, 256]])}, "tokens has 256, and the model knows tokens from 0 to 255"),
        ({"tokens": np.array([[1, 2**32 + 5]])}, "tokens has 4294967301, and the model knows tokens from 0 to 255"),
        ({"config": dataclasses.replace(CONFIG, recipe=DelayedScaling())}, "config.recipe is DelayedScaling"),
        ({"tokens": np.array([1, 2])}, "tokens has shape"),
    ],
)
def test_what_cannot_be_generated_is_refused(options, sentence, params):
    given = {"tokens": np.array([[1, 2]]), "config": CONFIG, "max_new_tokens": 1, **options}
    with pytest.raises(ValueError, match=sentence):
        generate(params, **given)


def quantized_shapes(jaxpr, in_loop=False):
    """Shapes of what is quantized in loops."""
    for equation in jaxpr.eqns:
        inside = in_loop or equation.primitive.name == "while"
        if inside and "quantize" in equation.params.get("target_name", ""):
            yield equation.invars[0].aval.shape
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from quantized_shapes(inner, inside)


def test_prompts_of_one_token_may_have_lengths(params):
    """Rows that are added to three prompts are not looked up by them."""
    run = jax.jit(functools.partial(generate, config=CONFIG, max_new_tokens=2))
    one = np.array([[1], [2], [3]], np.int32)
    np.testing.assert_array_equal(run(params, one, lengths=np.ones(3, np.int32)), run(params, one))


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, AxisType.Explicit),
        ({"recipe": BlockScaling()}, AxisType.Auto),
        ({"recipe": BlockScaling()}, AxisType.Explicit),
    ],
    ids=["plain, Explicit", "FP8, Auto", "FP8, Explicit"],
)
def test_devices_that_share_kernels_leave_them_where_they_are(changes, kind, require_devices, rng):
    """No token makes devices exchange more than some features of it. Others have other prompts, or all of them all."""
    require_devices(4)
    sizes = {"hidden_size": 256, "num_heads": 2, "num_kv_heads": 2, "head_dim": 128, "mlp_size": 256}
    config = dataclasses.replace(CONFIG, **sizes, **changes)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"), axis_types=(kind,) * 2)
    specs = param_specs(config, TensorParallel(2))
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))
    params, tokens = jit_init(config=config, key=jax.random.key(1)), rng.integers(0, 256, (2, 5), np.int32)
    # With top_k=1 the likeliest token is drawn.
    options = {"temperature": 1.0, "top_k": 1, "key": jax.random.key(2), "samples": 2, "lengths": np.int32([5, 3])}
    run = jax.jit(functools.partial(generate, config=config, max_new_tokens=6, return_log_probs=True, **options))
    wanted, expected = run(params, tokens)
    given = jax.device_put(tokens, NamedSharding(mesh, P("data"))) if changes else tokens
    operands = jax.device_put(params, places), given
    with jax.set_mesh(mesh):
        compiled = run.lower(*operands).compile()
    found, log_probs = compiled(*operands)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_allclose(log_probs, expected, atol=1e-5)
    in_loop = [collective for collective in collectives(compiled) if collective.times != 1]
    assert any(collective.kind == "all-reduce" for collective in in_loop)
    assert max(math.prod(part.shape) for collective in in_loop for part in collective.payload) <= 4 * 256


@pytest.mark.parametrize(("experts", "batch", "rows"), [(False, 1, {1}), (False, 10, {12}), (True, 1, {1, 2, 128})])
def test_kernels_are_quantized_once_for_all_tokens(experts, batch, rows, native_kernels):
    """On a GPU a loop would quantize each one again for every token. Those that come quantized stay as they are.

    Rows of dense layers are padded before they are quantized, where products would pad codes and scales, each by
    itself: products of few rows take any number of them.
    """
    mixture = Experts(num_experts=4, router=Router(top_k=2)) if experts else None
    config = dataclasses.replace(CONFIG, recipe=BlockScaling(), experts=mixture)
    params = jax.eval_shape(lambda: init(config, jax.random.key(0)))
    run = functools.partial(generate, tokens=np.ones((batch, 5), np.int32), config=config, max_new_tokens=3)
    found = set(quantized_shapes(jax.make_jaxpr(run)(params).jaxpr))
    kernels = {params["layers"][0][name].shape for name in (*ATTENTION, *MLP)}
    assert found
    assert not found & kernels
    assert {shape[0] for shape in found if len(shape) == 2} <= rows  # or groups of them
