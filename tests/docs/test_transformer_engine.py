"""docs/transformer_engine.md: functions that map parameters give the same results, and errors name what it names."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_jax.flax
import te_jax.nnx
import te_jax.optim
from te_jax import recipe
from te_jax._core.transformer_engine import NAMES
from te_jax.testing import assert_close
from tests.docs.test_examples import ROOT, examples
from tests.docs.test_names import resolve
from tests.docs.test_reference import MODULES

WIDTH, HIDDEN, HEADS, HEAD_DIM = 64, 96, 4, 16
KINDS = {"rms": ("scale",), "layer": ("scale", "ln_bias")}


@pytest.fixture(scope="module")
def page():
    """The functions that the page defines."""
    namespace = {"jax": jax, "jnp": jnp, "te_jax": te_jax}
    for example in examples(ROOT / "docs/transformer_engine.md"):
        if "def from_te" in example or "def block_from_torch" in example:
            exec(compile(example, "transformer_engine.md", "exec"), namespace)
    return namespace


def normal(rng, *shape):
    return rng.normal(size=shape) / 8


def linear_params(rng, bias, *shape):
    return {"kernel": normal(rng, *shape)} | ({"bias": normal(rng, *shape[1:])} if bias else {})


def norm_params(rng, kind):
    return {name: 1 + normal(rng, WIDTH) for name in KINDS[kind]}


def mlp_params(rng, kind, bias):
    layers = {"wi": linear_params(rng, bias, WIDTH, 2, HIDDEN), "wo": linear_params(rng, bias, HIDDEN, WIDTH)}
    flat = {f"{name}_{which}": array for name, layer in layers.items() for which, array in layer.items()}
    return norm_params(rng, kind) | flat


def linear(params, x, prefix=""):
    return np.tensordot(x, params[f"{prefix}kernel"], 1) + params.get(f"{prefix}bias", 0)


def normalized(params, x):
    x = x - x.mean(-1, keepdims=True) if "ln_bias" in params else x
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * params["scale"] + params.get("ln_bias", 0)


def te_mlp(params, x):
    """A LayerNormMLP with activations ("silu", "linear")."""
    h = linear(params, normalized(params, x), "wi_")
    gate, up = h[..., 0, :], h[..., 1, :]
    return linear(params, gate / (1 + np.exp(-gate)) * up, "wo_")


def te_rotary(x, group_method):
    angles = np.arange(x.shape[1])[:, None] / 10_000 ** (2 * np.arange(HEAD_DIM // 2) / HEAD_DIM)
    turn = np.exp(1j * angles)[:, None]
    if group_method == "alternate":
        first, second = np.split(x, 2, -1)
        turned = (first + 1j * second) * turn
        return np.concatenate([turned.real, turned.imag], -1)
    turned = (x[..., ::2] + 1j * x[..., 1::2]) * turn
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)


def te_layer(params, x, scale_attn_logits, rotary_pos_emb_group_method):
    """A TransformerLayer with rotary positions."""
    attention = params["attention"]
    y = normalized(attention["qkv" if "qkv" in attention else "query"], x)
    projected = {name: linear(attention[name], y) for name in attention if name != "out"}
    for packed in ("qkv", "kv"):
        if packed in projected:
            names = ("query", "key", "value")[-len(packed) :]
            projected |= dict(zip(names, np.moveaxis(projected[packed], -2, 0), strict=True))
    query, key, value = (projected[name].reshape(*x.shape[:2], -1, HEAD_DIM) for name in ("query", "key", "value"))
    query, key = (te_rotary(each, rotary_pos_emb_group_method) for each in (query, key))
    key, value = (np.repeat(each, HEADS // each.shape[2], 2) for each in (key, value))
    scores = np.einsum("bthd,bshd->bhts", query, key) * (HEAD_DIM**-0.5 if scale_attn_logits else 1.0)
    weights = np.exp(scores) * np.tri(x.shape[1])
    z = np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), value)
    x = x + linear(attention["out"], z.reshape(*x.shape[:2], -1))
    return x + te_mlp(params["mlp"], x)


def check(module, mapping, params, x, expected):
    params, x = jax.tree.map(np.float32, (params, x))
    y = jax.jit(lambda params, x: module.apply({"params": mapping(params)}, x))(params, x)
    assert_close(y, expected, dtype=jnp.float32, tolerance=1e-5)


@pytest.mark.parametrize(("kind", "bias"), [("rms", False), ("layer", True)])
def test_an_mlp_computes_the_same(page, rng, kind, bias):
    params, x = mlp_params(rng, kind, bias), normal(rng, 2, 8, WIDTH)
    module = te_jax.flax.GatedMLP(HIDDEN, norm=kind, use_bias=bias)
    check(module, page["from_te"], params, x, te_mlp(params, x))


def test_a_norm_and_a_linear_layer_compute_the_same(page, rng):
    params, x = norm_params(rng, "layer") | linear_params(rng, True, WIDTH, 32), normal(rng, 2, 8, WIDTH)
    module = te_jax.flax.NormLinear(32, norm="layer")
    check(module, page["from_te"], params, x, linear(params, normalized(params, x)))


@pytest.mark.parametrize("packed", ["qkv", "kv", "nothing"])
@pytest.mark.parametrize("group_method", ["consecutive", "alternate"])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_transformer_layer_computes_the_same(page, rng, packed, group_method, scaled):
    bias, kv_heads = packed != "nothing", HEADS if packed == "qkv" else HEADS // 2
    wide, kv = HEADS * HEAD_DIM, kv_heads * HEAD_DIM
    shapes = {
        "qkv": {"qkv": (3, wide)},
        "kv": {"query": (wide,), "kv": (2, kv)},
        "nothing": {"query": (wide,), "key": (kv,), "value": (kv,)},
    }[packed]
    attention = {name: linear_params(rng, bias, WIDTH, *out) for name, out in shapes.items()}
    attention[next(iter(attention))] |= norm_params(rng, "rms")
    attention["out"] = linear_params(rng, bias, wide, WIDTH)
    params, x = {"attention": attention, "mlp": mlp_params(rng, "rms", bias)}, normal(rng, 2, 8, WIDTH)
    with_bias = {"use_bias": bias}
    module = te_jax.flax.TransformerBlock(
        HIDDEN, HEADS, num_kv_heads=kv_heads, attention_arguments=with_bias, mlp_arguments=with_bias
    )
    arguments = {"scale_attn_logits": scaled, "rotary_pos_emb_group_method": group_method}
    mapping = functools.partial(page["block_from_te"], head_dim=HEAD_DIM, **arguments)
    check(module, mapping, params, x, te_layer(params, x, **arguments))


@pytest.mark.parametrize("bias", [False, True])
def test_a_transformer_layer_of_pytorch_computes_the_same(page, rng, bias):
    """Its kernels are the transposes of those of `transformer_engine.jax`, and gate and up are rows of one."""
    wide, kv = HEADS * HEAD_DIM, HEADS // 2 * HEAD_DIM
    kind = "layer" if bias else "rms"
    attention = {
        name: linear_params(rng, bias, WIDTH, out) for name, out in (("query", wide), ("key", kv), ("value", kv))
    }
    attention |= {"out": linear_params(rng, bias, wide, WIDTH)}
    mlp, norm, x = mlp_params(rng, kind, bias), norm_params(rng, kind), normal(rng, 2, 8, WIDTH)
    params = {"attention": attention | {"query": attention["query"] | norm}, "mlp": mlp}

    names = {"scale": "layer_norm_weight", "ln_bias": "layer_norm_bias", "kernel": "weight", "bias": "bias"}
    qkv = {f"{name}_{which}": attention[name][which] for name in ("query", "key", "value") for which in attention[name]}
    groups = {
        "self_attention.layernorm_qkv.": norm | qkv,
        "self_attention.proj.": attention["out"],
        "layernorm_mlp.": mlp,
    }
    state = {}
    for prefix, group in groups.items():
        for name, array in group.items():
            stem, _, which = name.rpartition("_") if name not in names else ("", "", name)
            layer = {"wi": "fc1_", "wo": "fc2_", "": ""}.get(stem, f"{stem}_")
            if stem == "wi":
                array = array.reshape(*array.shape[:-2], -1)
            state[prefix + layer + names[which]] = array.T
    expected = te_layer(params, x, scale_attn_logits=True, rotary_pos_emb_group_method="alternate")
    with_bias = {"use_bias": bias}
    module = te_jax.flax.TransformerBlock(
        HIDDEN, HEADS, num_kv_heads=HEADS // 2, norm=kind, attention_arguments=with_bias, mlp_arguments=with_bias
    )
    check(module, functools.partial(page["block_from_torch"], head_dim=HEAD_DIM), state, x, expected)


@pytest.mark.parametrize("module", MODULES)
def test_the_page_names_every_public_module(module):
    assert re.search(rf"`{module}\b", (ROOT / "docs/transformer_engine.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_names_of_transformer_engine_end_in_errors_that_name_ours(name):
    page, ours = (ROOT / "docs/transformer_engine.md").read_text(encoding="utf-8"), NAMES[name]
    assert re.search(rf"`(?:\w+\.)*{name}\b", page)
    for each in re.findall(r"te_jax(?:\.\w+)+", ours):
        resolve(each)
    modules = [module for module in (te_jax, recipe, te_jax.flax, te_jax.nnx, te_jax.optim) if name not in dir(module)]
    assert modules
    hint = re.escape(f": in place of TransformerEngine's {name} use {ours}; see docs/transformer_engine.md")
    for module in modules:
        assert not hasattr(module, name)
        with pytest.raises(AttributeError, match=hint):
            getattr(module, name)
        with pytest.raises(ImportError, match=f"^cannot import name '{name}' from '{module.__name__}'{hint}$"):
            exec(f"from {module.__name__} import {name}")


def test_other_names_end_in_pythons_own_errors():
    with pytest.raises(AttributeError, match=r"^module 'te_jax\.recipe' has no attribute 'BlokScaling'$"):
        recipe.BlokScaling  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ImportError, match=r"^cannot import name 'Danse' from 'te_jax\.flax' \(.*__init__\.py\)$"):
        from te_jax.flax import Danse  # noqa: F401  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("argument", "value", "ours"),
    [
        ("amax_history_len", 16, "history_len"),
        ("amax_compute_algo", "max", "algorithm"),
        ("fp8_format", "HYBRID", "gradient_dtype"),
        ("use_power_2_scales", True, "power_of_two_scales"),
        ("fp8_gemm_dgrad", None, "fast_accumulation"),
    ],
)
def test_arguments_of_its_recipes_end_in_errors_that_name_ours(argument, value, ours):
    for kind in (recipe.DelayedScaling, recipe.CurrentScaling):
        with pytest.raises(TypeError, match=f"in place of TransformerEngine's {argument} use {ours}"):
            kind(**{argument: value})  # pyright: ignore[reportArgumentType]
    assert hasattr(recipe.DelayedScaling(), ours)
    with pytest.raises(TypeError, match="unexpected keyword argument 'history'"):
        recipe.DelayedScaling(**{"history": 16})  # pyright: ignore[reportArgumentType]
