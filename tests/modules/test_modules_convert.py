"""Conversion of Flax's layers: how they compute, which ones and why not, and the report."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_apis import LINEN, NNX, both, mean_square, normal, observed, quantized_paths, value_and_gradients
from parameters import in_turns

from te_jax import ops
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from te_jax.testing import assert_close, relative_error

DELAYED = DelayedScaling(history_len=4)

# Class, sizes and arguments, for an input [4, 3, 32].
LAYERS = {
    "Linear": (("Linear", 32, 48), {"bias_init": nn.initializers.normal()}),
    "LinearGeneral": (("LinearGeneral", (3, 32), (4, 12)), {"axis": (1, 2)}),
    "Einsum": (("Einsum", "btd,dhk->bhtk", (32, 4, 8), (4, 8)), {"bias_init": nn.initializers.normal()}),
}
OPTIONS = {"state_axis": "data", "implementation": "reference"}


def recipes(report):
    return {layer.path: layer.recipe for layer in report.layers}


def reasons(report):
    return {layer.path: layer.reason for layer in report.layers if layer.reason}


@pytest.mark.parametrize(("layer", "api"), in_turns(LAYERS, {"linen": LINEN, "nnx": NNX}))
def test_a_layer_computes_as_te_jaxs(rng, api, layer, options_of_dense):
    (layer, arguments), recipe, x = layer, CurrentScaling(), normal(rng, (4, 3, 32))
    plain = api.drawn(api.flax(*layer, **arguments), rng, x)
    ours = api.drawn(api.layer(*layer, recipe=recipe, **OPTIONS, **arguments), rng, x)
    ours = api.replaced(ours, api.parameters(plain))
    model, report = api.convert(plain, recipe, x, **OPTIONS)
    assert recipes(report) == {"": recipe}
    options_of_dense.clear()
    found, expected = value_and_gradients(api, model, x), value_and_gradients(api, ours, x)
    jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), found, expected)
    assert options_of_dense.items() >= {"recipe": recipe, **OPTIONS}.items()


# Layers of another library: names of their own, a dtype for the product, and a bias. Their attributes are the same.


class LinenOwn(nn.Module):
    subscripts: str
    shape: tuple[int, ...]
    bias_shape: tuple[int, ...] | None = None

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.lecun_normal(), self.shape)
        y = jnp.einsum(self.subscripts, x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))
        if self.bias_shape is None:
            return y
        bias = self.param("bias", nn.initializers.normal(), self.bias_shape)
        return y + jnp.broadcast_to(bias.astype(jnp.bfloat16), y.shape)


class NnxOwn(nnx.Module):
    def __init__(self, subscripts, shape, bias_shape=None, *, rngs):
        self.subscripts = subscripts
        self.w = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), shape))
        self.bias = nnx.Param(rngs.params.normal(bias_shape)) if bias_shape else None

    def __call__(self, x):
        y = jnp.einsum(self.subscripts, x.astype(jnp.bfloat16), self.w[...].astype(jnp.bfloat16))
        return y if self.bias is None else y + jnp.broadcast_to(self.bias[...].astype(jnp.bfloat16), y.shape)


OWN = {LINEN: LinenOwn, NNX: NnxOwn}


@pytest.mark.parametrize(
    ("api", "recipe"),
    [(LINEN, DELAYED), (NNX, DELAYED), (NNX, BlockScaling())],
    ids=["linen", "nnx", "nnx without state"],
)
def test_classes_of_other_libraries_multiply_like_ops_einsum(rng, api, recipe):
    own, x = OWN[api], normal(rng, (2, 8, 32))
    layer = api.chain(
        up=functools.partial(own, "btd,dhk->bthk", (32, 3, 16), (3, 16)),
        down=functools.partial(own, "...hk, hkd -> ...d", (3, 16, 32)),
        lm_head=functools.partial(own, "btd,dv->btv", (32, 64)),
    )
    plain = api.drawn(layer, rng, x)
    model, report = api.convert(plain, recipe, x, layers={own: api.library.KernelsLayer(("w",))})
    assert {layer.path: layer.kind for layer in report.converted} == {
        "up": f"{own.__name__} (32, 3, 16)",
        "down": f"{own.__name__} (3, 16, 32)",
    }
    assert reasons(report) == {"lm_head": "an output head by its name: see ops.linear_cross_entropy"}
    assert not any(layer.all_experts for layer in report.layers)
    w, bias = (api.parameters(model)["up"][name] for name in ("w", "bias"))
    state = recipe.init() if recipe is DELAYED else None
    expected = ops.einsum("btd,dhk->bthk", x.astype(jnp.bfloat16), w, recipe=recipe, scaling_state=state)
    expected += jnp.broadcast_to(bias.astype(jnp.bfloat16), expected.shape)
    np.testing.assert_array_equal(api.jit(lambda model, x: model(x, last="up"))(model, x), expected, strict=True)
    cotangent = normal(rng, (2, 8, 64), jnp.bfloat16)
    y, found, states, _ = value_and_gradients(api, model, x, cotangent=cotangent)
    exact, wanted, *_ = value_and_gradients(api, plain, x, cotangent=cotangent)
    assert y.dtype == exact.dtype == jnp.bfloat16
    assert relative_error(y, exact) < 0.1
    for path in ("up", "w"), ("up", "bias"), ("down", "w"):
        assert relative_error(found[path[0]][path[1]], wanted[path[0]][path[1]]) < 0.2, path
    assert bool(states) is (recipe is DELAYED)


def test_converted_kernels_are_quantized_once(rng):
    api, x = LINEN, normal(rng, (16, 32))
    model = api.drawn(api.stack(api.flax("Linear", 32, 32), 2, remat=True), rng, x)
    model, _ = api.convert(model, DELAYED, x)
    model = observed(api, model, x)

    @api.jit
    def both(model, x):
        quantized = api.quantize_kernels(model, x)
        assert quantized_paths(api.parameters(quantized)) == {"layer/kernel"}
        _, gradients = api.accumulate_gradients(mean_square)(quantized, api.zeros(model), x)
        return api.parameters(gradients), api.parameters(api.value_and_grad(mean_square)(model, x)[1])

    jax.tree.map(functools.partial(assert_close, tolerance=5e-3), *both(model, x))


def chain(api):
    sizes = {"up": (32, 48), "down": (48, 32), "router": (32, 32), "logitdense": (32, 64), "odd": (64, 10)}
    layers = {name: api.flax("Linear", *size) for name, size in sizes.items()}
    x = jnp.ones((16, 32))
    return api.abstract(api.chain(**layers), x), x


@both
def test_what_is_left_alone_by_default_and_why(api):
    model, x = chain(api)
    _, report = api.convert(model, BlockScaling(), x)
    assert {layer.path for layer in report.converted} == {"up", "down", "odd"}
    assert reasons(report) == {
        "router": "a router by its name",
        "logitdense": "an output head by its name: see ops.linear_cross_entropy",
    }
    _, report = api.convert(model, None, x, rules=[("up", BlockScaling())])
    assert [layer.path for layer in report.converted] == ["up"]
    assert reasons(report)["down"] == "recipe is None, and no rule names it"


@both
def test_the_first_rule_that_matches_holds(api):
    rules = [("u*", RowwiseScaling()), ("*[pn]", None), ("logit*", CurrentScaling()), ("odd", BlockScaling())]
    model, x = chain(api)
    _, report = api.convert(model, BlockScaling(), x, rules=[*rules, ("nothing", None)])
    expected = {"up": RowwiseScaling(), "down": None, "router": None, "logitdense": CurrentScaling()}
    expected["odd"] = BlockScaling()
    assert recipes(report) == expected
    assert reasons(report)["down"] == "rule '*[pn]'"
    assert report.unused_rules == ("nothing",)
    lines = [line.split() for line in repr(report).splitlines()]
    kind = {LINEN: "Dense", NNX: "Linear"}[api]
    assert ["logitdense", kind, "(32,", "64)", "CurrentScaling()"] in lines
    in_fp8 = 32 * 48 + 32 * 64 + 64 * 10
    share = 100 * in_fp8 // (32 * 48 + 48 * 32 + 32 * 32 + 32 * 64 + 64 * 10)
    *_, total, padding, _ = repr(report).splitlines()
    assert total == f"3 of 5 kernels, {share}% of the FLOPs of a token, in FP8"
    more = -(-100 * 64 * (16 - 10) // in_fp8)
    assert padding.endswith(f"multiples of 16 are padded in 1 of these, with {more}% more FLOPs in FP8")


@both
def test_layers_of_te_jax_get_the_recipe_and_composites_keep_theirs(api):
    """A recipe that someone gave to this very layer stays where the conversion has none for it."""
    layers = {"none": None, "delayed": DELAYED, "head": RowwiseScaling(), "off": RowwiseScaling()}
    layers = {name: api.layer("Linear", 32, 32, recipe=recipe) for name, recipe in layers.items()}
    mlp, x = api.layer("GatedMLP", 32, 48, recipe=CurrentScaling(), norm="rms"), jnp.ones((16, 32))
    einsum = api.layer("Einsum", "bd,df->bf", (32, 32), (32,), recipe=DELAYED)
    model = api.drawn(api.chain(**layers, einsum=einsum, mlp=mlp), np.random.default_rng(0), x)
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
def test_the_report_says_which_precision_fp8_replaces(api, precision, note):
    x = jnp.ones((16, 32))
    layer = api.flax("Linear", 32, 32, precision=precision)
    _, report = api.convert(api.abstract(api.chain(fp8=layer, lm_head=layer), x), BlockScaling(), x)
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
    for layers in ({OWN[api]: "w"}, {3: api.library.KernelsLayer(("w",))}, [(OWN[api], "w")]):
        with pytest.raises(ValueError, match=r"layers is .*; it must give a KernelsLayer for"):
            api.library.convert(module, None, layers=layers)
    for rules in ([("*", 1)], "*"):
        with pytest.raises(ValueError, match=r"rules are .*; they must be pairs of a pattern"):
            api.library.convert(module, None, rules=rules)
    with pytest.raises(ValueError, match=r"mod(el|ule) is of type int"):
        api.library.convert(3, BlockScaling())
