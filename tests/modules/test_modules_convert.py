"""Conversion of Flax's layers: how they compute, which ones and why not, and the report."""

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx
from flax_apis import LINEN, NNX, both, normal

from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling

# Class, sizes and arguments, for an input [4, 3, 32].
LAYERS = {
    "Linear": (("Linear", 32, 48), {"bias_init": nn.initializers.normal()}),
    "LinearGeneral": (("LinearGeneral", (3, 32), (4, 12)), {"axis": (1, 2)}),
    "Einsum": (("Einsum", "btd,df->btf", (32, 16), (16,)), {}),
}
OPTIONS = {"state_axis": "data", "implementation": "reference"}


def recipes(report):
    return {layer.path: layer.recipe for layer in report.layers}


def reasons(report):
    return {layer.path: layer.reason for layer in report.layers if layer.reason}


@pytest.mark.parametrize(("api", "name"), [(api, name) for name in LAYERS for api in (LINEN, NNX)], ids=str)
def test_a_layer_computes_as_te_jaxs(rng, api, name, options_of_dense):
    (layer, arguments), recipe, x = LAYERS[name], CurrentScaling(), normal(rng, (4, 3, 32))
    plain = api.make(api.flax(*layer, **arguments), rng, x)
    ours = api.make(api.layer(*layer, recipe=recipe, **OPTIONS, **arguments), rng, x)
    expected = api.replaced(ours, api.parameters(plain))(x)
    model, report = api.convert(plain, recipe, x, **OPTIONS)
    assert recipes(report) == {"": recipe}
    options_of_dense.clear()
    np.testing.assert_array_equal(model(x), expected, strict=True)
    assert options_of_dense.items() >= {"recipe": recipe, **OPTIONS}.items()


def chain(api, rng):
    sizes = {"up": (32, 48), "down": (48, 32), "router": (32, 32), "logitdense": (32, 64), "odd": (64, 10)}
    layers = {name: api.flax("Linear", *size) for name, size in sizes.items()}
    x = normal(rng, (16, 32))
    return api.make(api.chain(**layers), rng, x), x


@both
def test_what_is_left_alone_by_default_and_why(rng, api):
    model, x = chain(api, rng)
    _, report = api.convert(model, BlockScaling(), x)
    assert {layer.path for layer in report.converted} == {"up", "down"}
    assert reasons(report) == {
        "router": "a router by its name",
        "logitdense": "an output head by its name",
        "odd": "64 features in, 10 out: FP8 products need multiples of 16",
    }
    _, report = api.convert(model, None, x, rules=[("up", BlockScaling())])
    assert [layer.path for layer in report.converted] == ["up"]
    assert reasons(report)["down"] == "recipe is None, and no rule names it"


@both
def test_the_first_rule_that_matches_holds(rng, api):
    rules = [("u*", RowwiseScaling()), ("*[pn]", None), ("logit*", CurrentScaling()), ("odd", BlockScaling())]
    model, x = chain(api, rng)
    _, report = api.convert(model, BlockScaling(), x, rules=[*rules, ("nothing", None)])
    expected = {"up": RowwiseScaling(), "down": None, "router": None, "logitdense": CurrentScaling(), "odd": None}
    assert recipes(report) == expected
    assert reasons(report)["down"] == "rule '*[pn]'"
    assert reasons(report)["odd"].startswith("64 features in, 10 out")  # no rule overrides it
    assert report.unused_rules == ("nothing",)
    lines = [line.split() for line in repr(report).splitlines()]
    kind = {LINEN: "Dense", NNX: "Linear"}[api]
    assert ["logitdense", kind, "(32,", "64)", "CurrentScaling()"] in lines
    share = 100 * (32 * 48 + 32 * 64) // (32 * 48 + 48 * 32 + 32 * 32 + 32 * 64 + 64 * 10)
    assert f"2 of 5 kernels, {share}% of the FLOPs of a token, in FP8" in repr(report).splitlines()


@both
def test_layers_of_te_jax_get_the_recipe_and_composites_keep_theirs(rng, api):
    """A recipe that someone gave to this very layer stays where the conversion has none for it."""
    delayed = DelayedScaling(history_len=4)
    layers = {"none": None, "delayed": delayed, "head": RowwiseScaling(), "off": RowwiseScaling()}
    layers = {name: api.layer("Linear", 32, 32, recipe=recipe) for name, recipe in layers.items()}
    mlp, x = api.layer("GatedMLP", 32, 48, recipe=CurrentScaling(), norm="rms"), normal(rng, (16, 32))
    einsum = api.layer("Einsum", "bd,df->bf", (32, 32), (32,), recipe=delayed)
    model = api.make(api.chain(**layers, einsum=einsum, mlp=mlp), rng, x)
    model, report = api.convert(model, BlockScaling(), x, rules=[("off", None)])
    parts = {f"mlp/{name}_proj": CurrentScaling() for name in ("gate", "up", "down")}
    expected = {"none": BlockScaling(), "delayed": BlockScaling(), "head": RowwiseScaling(), "off": None}
    assert recipes(report) == {**expected, "einsum": BlockScaling(), **parts}
    reason = "part of te_jax's GatedMLP, which has a recipe argument"
    assert {layer.reason for layer in report.layers if layer.path in parts} == {reason}
    assert not api.states(model)
    quantized = api.quantize_kernels(model, x)
    kernels = {name: layer.get("kernel") for name, layer in api.parameters(quantized).items()}
    with_scales = {name for name, kernel in kernels.items() if hasattr(kernel, "scale_inv")}
    assert with_scales == {"none", "delayed", "head", "einsum"}


@pytest.mark.parametrize(
    ("api", "precision", "note"),
    [
        (LINEN, "highest", "in place of precision highest"),
        (NNX, jax.lax.Precision.HIGH, "in place of precision high"),
        (NNX, (jax.lax.Precision.HIGHEST, None), "in place of precision highest"),
        (NNX, jax.lax.DotAlgorithmPreset.F32_F32_F32, "in place of precision f32_f32_f32"),
        (LINEN, "default", ""),
        (NNX, None, ""),
    ],
    ids=str,
)
def test_the_report_says_which_precision_fp8_replaces(rng, api, precision, note):
    x = normal(rng, (16, 32))
    layer = api.flax("Linear", 32, 32, precision=precision)
    _, report = api.convert(api.make(api.chain(fp8=layer, lm_head=layer), rng, x), BlockScaling(), x)
    assert {layer.path: layer.reason for layer in report.converted} == {"fp8": note}
    assert (f"BlockScaling() ({note})" in repr(report)) is bool(note)


@both
def test_arguments_that_do_not_fit_are_named(api):
    module = {LINEN: nn.Dense(3), NNX: nnx.Dict()}[api]
    with pytest.raises(
        ValueError, match=r"recipe is 'block'; it must be a recipe, such as te_jax\.recipe\.BlockScaling\(\)"
    ):
        api.library.convert(module, "block")
    model = {LINEN: nn.Dense(3), NNX: nnx.Linear(300, 3, rngs=nnx.Rngs(0))}[api]
    with pytest.raises(ValueError, match=r"recipe is of type \w+; it must be a recipe, .*; the model comes before it$"):
        api.library.convert(BlockScaling(), model)
    for rules in ([("*", 1)], "*"):
        with pytest.raises(ValueError, match=r"rules are .*; they must be pairs of a pattern"):
            api.library.convert(module, None, rules=rules)
    with pytest.raises(ValueError, match=r"mod(el|ule) is of type int"):
        api.library.convert(3, BlockScaling())
