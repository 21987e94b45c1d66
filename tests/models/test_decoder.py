"""The decoder against an independent one in float64 NumPy, and the promises of its docstrings."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax import models
from te_jax.layers import Router
from te_jax.models import PRESETS, DecoderConfig, Experts, Factors, RopeScaling, Softcaps, apply, init, loss
from te_jax.ops import Activation
from te_jax.testing import relative_error

SMALL = DecoderConfig(
    vocab_size=19, num_layers=2, hidden_size=24, num_heads=6, num_kv_heads=2, head_dim=8, mlp_size=40, norm_eps=1e-3
)


jit_init = jax.jit(init, static_argnums=0)
jit_apply = jax.jit(apply, static_argnums=2)


def random_params(config, rng):
    """Kernels of the sizes that `init` gives them; norms that are not 1, biases and sinks that are not 0."""

    def draw(path, leaf):
        name, values = path[-1].key, rng.standard_normal(leaf.shape, np.float32)
        if name.endswith("norm"):
            return jax.device_put(1 + 0.3 * values)
        of_vector = leaf.ndim == 1 or name.endswith("_bias")
        scale = 0.3 if of_vector else 1.0 if name == "embedding" else leaf.shape[-2] ** -0.5
        return jax.device_put(np.float32(scale) * values)

    return jax.tree.map_with_path(draw, jax.eval_shape(functools.partial(init, config), jax.random.key(0)))


def random_tokens(config, rng, shape):
    return jax.device_put(np.asarray(rng.integers(0, config.vocab_size, shape), jnp.int32))


def numpy_logits(params, tokens, config, routed=None):
    """One sequence, one head and one query at a time; rotations as complex numbers. routed gets logits of routers."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    group = config.num_heads // config.num_kv_heads
    half = config.head_dim // 2
    frequencies, magnitude = numpy_frequencies(config)
    factors = config.factors
    softcaps = config.softcaps
    of_scores = config.head_dim**-0.5 if factors.scores is None else factors.scores

    def norm(x, scale):
        scale = scale + 1 if config.zero_centered_norms else scale
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config.norm_eps) * scale

    def capped(x, cap):
        return x if cap is None else cap * np.tanh(x / cap)

    def rotate(vector, position):
        turned = (vector[:half] + 1j * vector[half:]) * magnitude * np.exp(1j * position * frequencies)
        return np.concatenate([turned.real, turned.imag])

    def head_of(x, layer, name, head):
        columns = slice(head * config.head_dim, (head + 1) * config.head_dim)
        y = x @ layer[name] + layer.get(f"{name}_bias", 0)
        if config.qk_norm and name != "value":
            if config.qk_norm == "projection":
                return norm(y, layer[f"{name}_norm"])[:, columns]
            return norm(y[:, columns], layer[f"{name}_norm"])
        return y[:, columns]

    sequences = []
    for sequence in np.asarray(tokens):
        x = params["embedding"][sequence]
        x = factors.embedding * (x * np.sqrt(config.hidden_size) if config.scaled_embedding else x)
        for layer, window in zip(params["layers"], config.windows, strict=True):
            h, heads = x if config.norms == "after" else norm(x, layer["attention_norm"]), []
            for head in range(config.num_heads):
                query = head_of(h, layer, "query", head)
                key, value = (head_of(h, layer, name, head // group) for name in ("key", "value"))
                mixed = []
                for t in range(len(x)):
                    seen = range(0 if window is None else max(t + 1 - window, 0), t + 1)
                    scores = np.array([rotate(query[t], t) @ rotate(key[s], s) for s in seen])
                    weights = np.exp(capped(of_scores * scores, softcaps.scores))
                    beside = np.exp(layer["sinks"][head]) if config.attention_sinks else 0
                    mixed.append(weights @ value[seen] / (weights.sum() + beside))
                heads.append(np.stack(mixed))
            y = np.concatenate(heads, axis=-1) @ layer["out"] + layer.get("out_bias", 0)
            x = x + factors.residual * (y if config.norms == "before" else norm(y, layer["attention_post_norm"]))
            h = x if config.norms == "after" else norm(x, layer["mlp_norm"])
            mlp = numpy_mlp if config.experts is None else numpy_experts
            if routed is not None:
                routed.append(h @ layer["router"] + layer.get("router_bias", 0))
            y = np.stack([mlp(token, layer, config) for token in h])
            x = x + factors.residual * (y if config.norms == "before" else norm(y, layer["mlp_post_norm"]))
        head = params["embedding"].T if config.tied_head else params["head"]
        logits = norm(x, params["final_norm"]) @ head / factors.logits_divisor
        sequences.append(capped(logits, softcaps.logits))
    return np.stack(sequences)


def numpy_frequencies(config):
    """The frequencies of the pairs of a head, and the length of their turning vectors."""
    plain, scaling = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim), config.rope_scaling
    if scaling is None:
        return plain, 1
    if scaling.kind == "linear":
        return plain / scaling.factor, 1
    if scaling.kind == "llama3":
        wavelengths = 2 * np.pi / plain
        longest, shortest = (scaling.original_length / x for x in (scaling.low_freq_factor, scaling.high_freq_factor))
        smooth = (scaling.original_length / wavelengths - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        between = (1 - smooth) * plain / scaling.factor + smooth * plain
        long_or_short = np.where(wavelengths > longest, plain / scaling.factor, plain)
        return np.where((wavelengths > longest) | (wavelengths < shortest), long_or_short, between), 1

    def pair(turns):
        """The one that turns so often within a sequence of pre-training."""
        wavelength = scaling.original_length / turns
        return config.head_dim / 2 * np.log(wavelength / (2 * np.pi)) / np.log(config.rope_theta)

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = np.floor(first), np.ceil(last)
    first, last = max(first, 0), min(last, config.head_dim - 1)
    scaled = np.clip((np.arange(config.head_dim // 2) - first) / (last - first), 0, 1)
    magnitude = scaling.attention_factor or 0.1 * np.log(scaling.factor) + 1
    return plain * (1 - scaled + scaled / scaling.factor), magnitude


def numpy_mlp(x, layer, config):
    function = Activation.of(config.activation)
    gate, up = (x @ layer[name] + layer.get(f"{name}_bias", 0) for name in ("gate", "up"))
    gate, up = np.minimum(gate, function.limit), np.clip(up, -function.limit, function.limit)
    if function.kind == "gelu":
        gate = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    else:
        gate = gate / (1 + np.exp(-function.alpha * gate))
    return (gate * (up + function.offset)) @ layer["down"] + layer.get("down_bias", 0)


def numpy_experts(x, layer, config):
    scores = np.exp(x @ layer["router"] + layer.get("router_bias", 0))
    chosen = np.argsort(-scores)[: config.experts.router.top_k]
    total = scores[chosen].sum() if config.experts.router.normalize else scores.sum()
    of_mlp = {name: leaf for name, leaf in layer.items() if name.startswith(("gate", "up", "down"))}
    return sum(
        scores[e] / total * numpy_mlp(x, {name: leaf[e] for name, leaf in of_mlp.items()}, config) for e in chosen
    )


def numpy_losses(params, tokens, targets, config):
    """The objective, the cross-entropy, and the largest load of experts in one layer."""
    routed = None if config.experts is None else []
    logits = numpy_logits(params, tokens, config, routed).reshape(tokens.size, -1)
    cross_entropy = np.mean(np.log(np.exp(logits).sum(axis=-1)) - logits[np.arange(tokens.size), targets.ravel()])
    if routed is None:
        return cross_entropy, cross_entropy, None
    experts, scores = config.experts, np.exp(np.concatenate(routed))
    total = scores.sum(axis=-1, keepdims=True)
    chosen = np.argsort(-scores)[:, : experts.router.top_k]
    loads = np.bincount(chosen.ravel(), minlength=experts.num_experts) / chosen.size * experts.num_experts
    balance, z = loads @ np.mean(scores / total, axis=0), np.mean(np.log(total) ** 2)
    return cross_entropy + experts.balance_weight * balance + experts.z_weight * z, cross_entropy, loads.max()


SCALED = {
    "linear": RopeScaling("linear", factor=3.0),
    "llama3": RopeScaling("llama3", factor=8.0, original_length=32),
    "yarn": RopeScaling("yarn", factor=4.0, original_length=32, beta_fast=4.0, beta_slow=0.5),
    "yarn, not truncated": RopeScaling("yarn", 4.0, 32, beta_fast=4.0, beta_slow=0.5, truncate=False),
    "yarn, of a magnitude": RopeScaling("yarn", 4.0, 32, attention_factor=0.7),
}
CLIPPED = Activation("silu", alpha=1.702, limit=0.5, offset=1.0)
EXPERTS = Experts(num_experts=4, router=Router(top_k=2), balance_weight=0.1, z_weight=0.01, biases=True)
ALL = {
    **{"window": (1, 3), "rope_scaling": SCALED["yarn"], "activation": CLIPPED, "attention_sinks": True},
    **{"attention_biases": ("query", "key", "value", "out"), "qk_norm": True, "zero_centered_norms": True},
    **{"scaled_embedding": True, "tied_head": True, "factors": Factors(2.0, 0.5, 0.3, 3.0)},
    **{"norms": "both", "softcaps": Softcaps(0.7, 2.0)},
}
# "all" and "experts" have every variant.
VARIANTS = {
    "all": ALL,
    "experts": {"experts": EXPERTS, "activation": CLIPPED},
    "experts, not normalized": {"experts": dataclasses.replace(EXPERTS, router=Router(top_k=2, normalize=False))},
    "one key head": {
        **{"num_kv_heads": 1, "activation": "gelu", "rope_scaling": SCALED["linear"]},
        **{"norms": "after", "qk_norm": "projection"},
    },
    "all key heads": {"num_kv_heads": 6, "rope_scaling": SCALED["llama3"]},
    **{name: {"rope_scaling": SCALED[name]} for name in SCALED if name.startswith("yarn,")},
}
# GPUs have no grouped GEMM of float32.
IMPLEMENTATION = "reference" if jax.default_backend() == "gpu" else None


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_variants_are_those_of_numpy(variant, rng):
    config = dataclasses.replace(SMALL, num_layers=2 if variant == "all" else 1, **VARIANTS[variant], rope_theta=500.0)
    params, tokens = random_params(config, rng), random_tokens(config, rng, (2, 7))
    logits = jax.jit(apply, static_argnums=2, static_argnames="implementation")(
        params, tokens, config, implementation=IMPLEMENTATION
    )
    assert logits.dtype == jnp.float32
    assert relative_error(logits, numpy_logits(params, tokens, config)) < 1e-5


@pytest.mark.parametrize("variant", ["all", "experts"])
def test_losses_and_gradients_of_variants_are_values_and_slopes_of_numpy(variant, rng):
    """Along a random direction of each parameter, by differences in float64."""
    config = dataclasses.replace(SMALL, **{"num_layers": 1} | VARIANTS[variant] | {"window": 3})
    params, tokens, targets = random_params(config, rng), *(random_tokens(config, rng, (2, 5)) for _ in range(2))
    tokens, targets = np.asarray(tokens), np.asarray(targets)

    def objective(params):
        losses = models.losses(params, tokens, targets, config, implementation=IMPLEMENTATION)
        return losses.objective, losses

    (_, losses), gradients = jax.jit(jax.value_and_grad(objective, has_aux=True))(params)
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    expected = numpy_losses(params, tokens, targets, config)
    found = losses.objective, losses.cross_entropy, losses.largest_load
    for value, wanted in zip(found, expected, strict=True):
        assert value is wanted is None or float(value) == pytest.approx(wanted, rel=1e-5)
    for path, gradient in jax.tree.leaves_with_path(gradients):
        direction = rng.standard_normal(gradient.shape)

        def moved(step, path=path, direction=direction):
            there = jax.tree.map_with_path(lambda at, leaf: leaf + step * direction if at == path else leaf, params)
            return numpy_losses(there, tokens, targets, config)[0]

        gradient = np.asarray(gradient, np.float64)
        slope, size = (moved(1e-6) - moved(-1e-6)) / 2e-6, np.linalg.norm(gradient)
        assert size > 1e-6, path
        assert abs(slope - np.sum(gradient * direction)) < 1e-3 * size, path


def test_bfloat16_computes_in_bfloat16_and_stays_close(rng):
    plain = dataclasses.replace(SMALL, num_layers=1)
    config = dataclasses.replace(plain, dtype="bfloat16")
    params, tokens = random_params(config, rng), random_tokens(config, rng, (2, 16))
    with jax.numpy_dtype_promotion("standard"):  # the attention of jax.nn needs it
        logits = jit_apply(params, tokens, config)
        gradients = jax.jit(jax.grad(functools.partial(loss, config=config)))(params, tokens, tokens)
    assert logits.dtype == jnp.bfloat16
    assert 1e-4 < relative_error(logits, numpy_logits(params, tokens, plain)) < 5e-2
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}


def test_packed_documents_are_those_of_their_own(rng):
    config = dataclasses.replace(SMALL, max_segments_per_seq=3)
    params, tokens = random_params(SMALL, rng), random_tokens(SMALL, rng, (2, 9))
    segment_ids = jax.device_put(np.asarray([[1] * 4 + [2] * 5, [1] * 2 + [2] * 6 + [0]], np.int32))
    for each in (SMALL, config):
        logits = jit_apply(params, tokens, each, segment_ids=segment_ids)
        for row, start, stop in ((0, 0, 4), (0, 4, 9), (1, 0, 2), (1, 2, 8)):
            expected = numpy_logits(params, tokens[row : row + 1, start:stop], SMALL)
            assert relative_error(logits[row : row + 1, start:stop], expected) < 1e-5


def test_loss_is_the_mean_over_tokens_that_have_a_target(rng):
    params, tokens = random_params(SMALL, rng), random_tokens(SMALL, rng, (2, 9))
    targets, ignored = np.asarray(random_tokens(SMALL, rng, (2, 9))), rng.random((2, 9)) < 0.3
    segments = np.asarray([[1] * 4 + [2] * 5] * 2, np.int32)
    logits = np.asarray(jit_apply(params, tokens, SMALL, segment_ids=segments), np.float64)
    chosen = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    expected = (np.log(np.exp(logits).sum(-1)) - chosen)[~ignored].mean()
    for implementation in (None, "reference"):
        run = jax.jit(functools.partial(loss, config=SMALL, implementation=implementation))
        value = run(params, tokens, np.where(ignored, np.int32(-100), targets), segment_ids=segments)
        assert value.dtype == jnp.float32
        np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_recomputation_of_blocks_and_of_all_but_attention():
    """Scores and weighted values are two products a layer."""
    config, tokens = dataclasses.replace(PRESETS["nano"], num_layers=1), jnp.zeros((2, 16), jnp.int32)
    params = jax.eval_shape(functools.partial(init, config), jax.random.key(0))

    def products(remat):
        kept = dataclasses.replace(config, remat=remat)
        gradient = jax.jit(jax.grad(lambda params: loss(params, tokens, tokens, kept)))
        return gradient.lower(params).as_text().count("dot_general")

    nothing, attention, all_of_it = (products(remat) for remat in (False, "attention", True))
    assert nothing < attention == all_of_it - 2
    with pytest.raises(ValueError, match=r"remat is 'attention' and attention 'reference', whose .* choose True"):
        dataclasses.replace(config, remat="attention", attention="reference")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_count_their_parameters(name):
    config = PRESETS[name]
    params = jax.eval_shape(functools.partial(init, config), jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == config.num_parameters
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}


def test_8b_is_llama_3_8b():
    assert PRESETS["8b"].num_parameters == 8_030_261_248
    assert PRESETS["8b"].rope_theta == 500_000.0
    assert PRESETS["8b"].norm_eps == 1e-5


def test_flops_are_those_of_gemms_and_of_half_the_scores():
    """Llama 3 8B has 7.5e9 parameters in GEMMs, and 32 layers of 4096 features in attention."""
    gemms = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128_256
    attention = 32 * 2 * 2 * 4096 * 8192 / 2
    assert PRESETS["8b"].flops_per_token(8192) == 3 * (2 * gemms + attention)


def test_init_keeps_the_residual_stream_of_one_size():
    config = dataclasses.replace(PRESETS["nano"], num_layers=4, hidden_size=64)
    params = jit_init(config, jax.random.key(1))
    kernels = {"head": params["head"], **jax.tree.map(lambda *layers: np.stack(layers), *params["layers"])}
    for name, fan_in in (("head", 64), ("gate", 64), ("out", 2 * 4 * 32), ("down", 2 * 4 * 96)):
        assert abs(float(np.std(kernels[name])) * fan_in**0.5 - 1) < 0.05
    assert not np.array_equal(kernels["key"][0], kernels["value"][0])
    assert not np.array_equal(kernels["key"][0], kernels["key"][1])


def test_deeper_decoders_have_no_more_generators_to_compile():
    """With one for every kernel of every layer, XLA took minutes for the parameters of 18 layers on a GPU."""

    def generators(layers):
        config = dataclasses.replace(PRESETS["nano"], num_layers=layers)
        return str(jax.make_jaxpr(functools.partial(init, config))(jax.random.key(0))).count(" random_bits[")

    assert 0 < generators(1) == generators(3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_layers": 1.5}, "num_layers is 1.5"),
        ({"num_kv_heads": 4}, "num_kv_heads is 4: .* divides 6"),
        ({"head_dim": 7}, "head_dim is 7: .* even"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rope_theta": (1.0,)}, "rope_theta has 1 entries, and num_layers is 2"),
        ({"rope_theta": (1.0, -1.0)}, r"rope_theta is \(1.0, -1.0\): it needs"),
        ({"rope_theta": None}, "rope_theta is None"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0"),
        ({"offload": "activations"}, "offload is 'activations': it needs to be a te_jax.offload.Offload, or None"),
        ({"dtype": "float16"}, "dtype is 'float16': choose one of float32, bfloat16"),
        ({"attention": "flash"}, "attention is 'flash': choose 'native', 'fa3', 'reference' or None"),
        ({"window": 0}, "window is 0: it needs whole numbers of at least 1, or None"),
        ({"window": (1, 2, 3)}, "window has 3 entries, and num_layers is 2"),
        ({"rope_scaling": 8.0}, "rope_scaling is 8.0: it needs to be a te_jax.models.RopeScaling"),
        ({"rope_scaling": RopeScaling("yarn", 2.0, 32), "rope_theta": 1.0}, "rope_theta is 1.0: with yarn"),
        ({"factors": 2.0}, "factors is 2.0: it needs to be a te_jax.models.Factors"),
        ({"softcaps": 30.0}, "softcaps is 30.0: it needs to be a te_jax.models.Softcaps"),
        ({"softcaps": Softcaps(50.0), "attention": "fa3"}, "softcaps.scores is 50.0 and attention 'fa3', which has no"),
        ({"activation": "swish"}, "activation is 'swish'; it must be one of"),
        ({"attention_biases": ("gate",)}, r"attention_biases is \('gate',\): .* out of \('query'"),
        ({"attention_biases": "query"}, "attention_biases is 'query'"),
        ({"qk_norm": 1}, "qk_norm is 1: it needs to be True, False or 'projection'"),
        ({"norms": None}, "norms is None: choose 'before', 'after' or 'both'"),
        ({"attention_sinks": 1}, "attention_sinks is 1: it needs to be True or False"),
        ({"tied_head": "False"}, "tied_head is 'False': it needs to be True or False"),
    ],
)
def test_config_refuses_what_cannot_be_built(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(SMALL, **change)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kind": "dynamic", "factor": 2.0}, "kind is 'dynamic': choose 'linear', 'llama3' or 'yarn'"),
        ({"kind": "linear", "factor": 0.5}, "factor is 0.5: it needs to be at least 1"),
        ({"kind": "linear", "factor": float("nan")}, "factor is nan: it needs to be a finite number"),
        ({"kind": "llama3", "factor": 2.0}, "original_length is None: kind 'llama3' needs a whole number"),
        ({"kind": "yarn", "factor": 2.0, "original_length": 10**400}, "original_length is 1000"),
        ({"kind": "yarn", "factor": 2.0, "original_length": 8, "attention_factor": 0}, "attention_factor is 0"),
        (
            {"kind": "llama3", "factor": 2.0, "original_length": 8, "low_freq_factor": 4.0},
            "low_freq_factor is 4.0 and high_freq_factor 4.0: the first needs to be the smaller one",
        ),
    ],
)
def test_rotary_scaling_refuses_what_it_cannot_do(arguments, words):
    with pytest.raises(ValueError, match=words):
        RopeScaling(**arguments)


CONFIG = PRESETS["nano"]


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (init, (CONFIG, jax.random.key(0))),
        (models.init_scaling_state, (CONFIG,)),
        (models.requantize, (CONFIG,)),
        (lambda params, tokens, config: apply(params, tokens, config), ({}, np.zeros((1, 8), np.int32), CONFIG)),
        (loss, ({}, *[np.zeros((1, 8), np.int32)] * 2, CONFIG)),
        (models.losses, ({}, *[np.zeros((1, 8), np.int32)] * 2, CONFIG)),
        (functools.partial(models.param_specs, parallel=models.TensorParallel(2)), (CONFIG,)),
        (models.TensorParallel(2).check, (CONFIG,)),
        (
            lambda config: models.parallel_loss(
                jax.make_mesh((2,), ("tensor",), devices=jax.devices("cpu")[:2]), config, models.TensorParallel(2)
            ),
            (CONFIG,),
        ),
    ],
)
def test_a_traced_config_is_refused_with_the_way_out(function, arguments):
    message = (
        "config is .*: it needs to be a te_jax.models.DecoderConfig: jax.jit traces it; name it in static_argnames"
    )
    with pytest.raises(ValueError, match=message):
        jax.jit(function)(*arguments)


def test_config_takes_numbers_of_numpy():
    same = dataclasses.replace(SMALL, num_layers=np.int64(SMALL.num_layers), norm_eps=np.float32(0.5))
    assert same == dataclasses.replace(SMALL, norm_eps=0.5)
    assert type(same.num_layers) is int  # as logs in JSON take it
    for number in (np.array(0.5), jnp.float32(0.5)):
        assert hash(dataclasses.replace(SMALL, rope_theta=number, norm_eps=number)) == hash(
            dataclasses.replace(SMALL, rope_theta=0.5, norm_eps=0.5)
        )


@pytest.mark.parametrize(
    ("tokens", "targets", "words"),
    [
        (np.zeros(4, np.int32), np.zeros(4, np.int32), "targets has shape .* leading axis"),
        (np.zeros((1, 4), np.float32), np.zeros((1, 4), np.int32), "tokens has shape .* integers"),
        (np.zeros((1, 4), np.int32), np.zeros((1, 3), np.int32), "one target for each token"),
        (np.zeros((0, 4), np.int32), np.zeros((0, 4), np.int32), r"has shape \(0, 4\): .* at least one sequence"),
        (np.zeros((2, 0), np.int32), np.zeros((2, 0), np.int32), r"has shape \(2, 0\): .* of one token"),
    ],
)
def test_loss_refuses_tokens_it_cannot_read(tokens, targets, words):
    params = jax.eval_shape(functools.partial(init, SMALL), jax.random.key(0))
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(functools.partial(loss, config=SMALL), params, tokens, targets)
