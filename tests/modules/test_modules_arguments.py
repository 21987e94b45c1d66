"""Arguments that modules hand on to their layers and operations, and those that they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_apis import LINEN, NNX, both, normal
from jax.sharding import PartitionSpec as P
from parameters import in_turns

from te_jax import ops
from te_jax.layers import Norm, Router
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling
from te_jax.testing import assert_close

X = jnp.ones((2, 6, 32))

MLP = {"kernel": ("embed", "mlp"), "bias": ("mlp",)}
MLP_OUT = {"kernel": ("mlp", "embed"), "bias": ("embed",)}
OF_EXPERTS = {"kernel": ("expert", "embed", "mlp"), "bias": ("expert", "mlp")}
OF_EXPERTS_OUT = {"kernel": ("expert", "mlp", "embed"), "bias": ("expert", "embed")}
SHARED = {"kernel": ("embed", "shared")}
PROJECTION = {"kernel": ("embed", "heads", "kv"), "bias": ("heads", "kv")}
PROJECTION_OUT = {"kernel": ("heads", "kv", "embed"), "bias": ("embed",)}
NORM = {"scale": ("norm",)}


def prefixed(prefix, names):
    return {f"{prefix}_{parameter}": value for parameter, value in names.items()}


# Class and sizes, arguments, names of dimensions by initializers, and those of the parameters.
NAMES = {
    "LinearGeneral": (("LinearGeneral", 32, (4, 8)), {}, PROJECTION, PROJECTION),
    "Einsum": (("Einsum", "btd,dhk->bhtk", (32, 4, 8), (4, 8)), {}, PROJECTION, PROJECTION),
    "RMSNorm": (("RMSNorm", 32), {}, NORM, NORM),
    "LayerNorm": (("LayerNorm", 32), {}, {**NORM, "bias": ("other",)}, {**NORM, "bias": ("other",)}),
    "NormLinear": (("NormLinear", 32, 16), {}, {**NORM, **MLP}, {"norm": NORM, "linear": MLP}),
    "GatedMLP": (
        ("GatedMLP", 32, 48),
        {"use_bias": True},
        {**NORM, **MLP, **prefixed("down", MLP_OUT)},
        {"norm": NORM, "gate_proj": MLP, "up_proj": MLP, "down_proj": MLP_OUT},
    ),
    "Attention": (
        ("Attention", 32, 4),
        {"use_bias": True},
        {**NORM, **PROJECTION, **prefixed("out", PROJECTION_OUT)},
        {"query": PROJECTION, "key": PROJECTION, "value": PROJECTION, "out": PROJECTION_OUT}
        | {"query_ln": NORM, "key_ln": NORM},
    ),
    "MoE": (
        ("MoE", 32, 8, 48, Router(2)),
        {"use_bias": True, "shared_features": 96},
        {**OF_EXPERTS, **prefixed("down", OF_EXPERTS_OUT), "router_kernel": ("embed", None)}
        | {"shared_kernel": ("embed", "shared"), "shared_down_kernel": ("shared", "embed")},
        {"gate_proj": OF_EXPERTS, "up_proj": OF_EXPERTS, "down_proj": OF_EXPERTS_OUT}
        | {"router": {"kernel": ("embed", None), "bias": ()}}
        | {"shared": {"gate_proj": SHARED, "up_proj": SHARED, "down_proj": {"kernel": ("shared", "embed")}}},
    ),
    "Embed": (("Embed", 64, 32), {}, {"embedding": ("vocab", "embed")}, {"embedding": ("vocab", "embed")}),
}


# Which argument of a layer is a norm.
OF_NORM = {"NormLinear": "norm", "GatedMLP": "norm", "Attention": "qk_norm"}


@pytest.mark.parametrize(("api", "name"), [(api, name) for name in NAMES for api in (LINEN, NNX)], ids=str)
def test_names_of_dimensions(api, name):
    layer, arguments, axes, expected = NAMES[name]
    if name == "MoE":
        arguments = {**arguments, "implementation": "reference"}  # float32 has no kernel on a GPU
    x = jnp.zeros((2, 6), jnp.int32) if name == "Embed" else X
    inits = {f"{parameter}_init": api.named(names) for parameter, names in axes.items()}
    if name in OF_NORM:
        inits[OF_NORM[name]] = Norm("rms", scale_init=inits.pop("scale_init"))
    found = api.names(api.layer(*layer, **arguments, **inits), x)
    assert found == jax.tree.map(lambda names: P(*names), expected, is_leaf=lambda names: isinstance(names, tuple))


OPTIONS = {"recipe": CurrentScaling(), "state_axis": "data", "implementation": "reference"}
INPUTS = ("Linear", "products of Flax's layers", "Einsum")
WITH_OPTIONS = {
    "Linear": lambda api: api.layer("Linear", 32, 16, **OPTIONS),
    "products of Flax's layers": lambda api: api.flax_with_products(OPTIONS, 32, 16),
    "Einsum": lambda api: api.layer("Einsum", "btd,df->btf", (32, 16), None, **OPTIONS),
    "NormLinear": lambda api: api.layer("NormLinear", 32, 16, **OPTIONS),
    "Attention": lambda api: api.layer("Attention", 32, 4, **OPTIONS),
    "TransformerBlock": lambda api: api.layer("TransformerBlock", 32, 48, 4, **OPTIONS),
}


@pytest.mark.parametrize(("api", "name"), [(api, name) for name in WITH_OPTIONS for api in (LINEN, NNX)], ids=str)
def test_options_reach_the_operation(api, name, options_of_dense, monkeypatch):
    monkeypatch.setattr(ops, "gated_mlp", lambda x, **options: seen.append(options) or jnp.zeros(x.shape, x.dtype))
    seen = []
    api.trace(WITH_OPTIONS[name](api), **{"inputs" if name in INPUTS else "x": X})
    assert all(given.items() >= OPTIONS.items() for given in (options_of_dense, *seen))
    assert bool(seen) == (name == "TransformerBlock")


@both
def test_options_of_attention(api, monkeypatch):
    seen = []
    monkeypatch.setattr(ops, "attention", lambda query, *_, **options: seen.append(options) or query)
    options = {"implementation": "reference", "max_score_bytes": 3, "window": 2}
    layer, ids = api.layer("Attention", 32, 4, **options), jnp.zeros(X.shape[:2], jnp.int32)
    api.trace(layer, x=X, segment_ids=ids, max_segments_per_seq=5)
    expected = {"implementation": "reference", "max_score_bytes": 3, "window": 2, "causal": True}
    assert seen[-1].items() >= (expected | {"max_segments_per_seq": 5}).items()


INIT = {"GatedMLP": ("GatedMLP", 32, 48), "Attention": ("Attention", 32, 4), "MoE": ("MoE", 32, 8, 48, Router(2))}


@pytest.mark.parametrize(("name", "api"), in_turns(list(INIT), [LINEN, NNX]))
def test_initializers_and_dtypes_of_parameters(rng, api, name):
    """Kernels begin with variance 1 / inputs, also those of experts, and each with numbers of its own."""
    ones, prefix = jax.nn.initializers.ones, "out" if name == "Attention" else "down"
    arguments = {"use_bias": True, "param_dtype": jnp.bfloat16, f"{prefix}_kernel_init": ones, "bias_init": ones}
    x = jnp.ones((2, 6, 128), jnp.bfloat16)
    kind, _, *sizes = INIT[name]
    parameters = api.parameters(api.make(api.layer(kind, 128, *sizes, **arguments), rng, x))
    assert {leaf.dtype for leaf in jax.tree.leaves(parameters)} == {jnp.dtype("bfloat16")}
    first, last = ("query", "out") if name == "Attention" else ("gate_proj", "down_proj")
    assert (parameters[last]["kernel"] == 1).all()
    assert all((layer["bias"] == 1).all() for layer in parameters.values())
    kernel = np.asarray(parameters[first]["kernel"], np.float32)
    np.testing.assert_allclose(kernel.std(), 128**-0.5, rtol=0.1)
    if name == "MoE":
        np.testing.assert_allclose(kernel.std(axis=(1, 2)), 128**-0.5, rtol=0.1)
        assert len({expert.tobytes() for expert in kernel}) == 8


@pytest.mark.parametrize(
    ("api", "part", "layer"), [(LINEN, "mlp", "down_proj"), (NNX, "attention", "out")], ids=["linen", "nnx"]
)
def test_dropout_of_a_block_is_of_both_parts(rng, api, part, layer):
    x = normal(rng, (2, 16, 32))
    model = api.make(api.layer("TransformerBlock", 32, 48, 4, dropout_rate=0.5), rng, x, deterministic=True)
    parameters = api.parameters(model)
    silent = {layer: {"kernel": np.zeros_like(parameters[part][layer]["kernel"])}}
    without = api.replaced(model, parameters | {part: parameters[part] | silent})
    y = api.jit(lambda model, x: model(x, deterministic=True))(without, x)
    assert 0.3 < np.mean(np.asarray(api.with_dropout(without, x, rng)) == np.asarray(x)) < 0.7
    assert not np.any(np.asarray(y) == np.asarray(x))


@both
def test_a_norm_adds_the_residual_first(rng, api):
    x, residual = normal(rng, (8, 32)), normal(rng, (8, 32))
    layers = (
        api.layer("RMSNorm", 32, zero_centered=True),
        api.layer("NormLinear", 32, 16),
        api.layer("GatedMLP", 32, 48, norm="rms"),
    )
    models = [api.drawn(layer, rng, x) for layer in layers]
    found = api.jit(lambda models, x, r: [(model(x, r), model(x + r)) for model in models])(models, x, residual)
    for (y, total), expected in found:
        np.testing.assert_array_equal(total, x + residual)
        assert_close(y, expected, tolerance=1e-6)
    assert not api.parameters(api.make(layers[0], rng, x))["scale"].any()


def test_layers_take_x_in_fp8(rng):
    """A norm of one's own before them gives what the norm within them does, and hands its gradient on."""
    api, recipe, x = LINEN, BlockScaling(), normal(rng, (2, 128, 32))
    norm = api.drawn(api.layer("RMSNorm", 32), rng, x)
    within, alone = (
        api.drawn(api.layer("GatedMLP", 32, 48, norm=kind, recipe=recipe), rng, x) for kind in ("rms", None)
    )
    within = api.replaced(within, {**api.parameters(alone), "norm": api.parameters(norm)})

    def behind(model, x):
        return model(norm(x, quantization=recipe.quantization("activation")))

    def of(run, model):
        def loss(model, x):
            y = run(model, x)
            return jnp.sum(jnp.sin(y)), y

        (_, y), (gradients, dx) = api.jit(api.value_and_grad(loss, argnums=(0, 1), has_aux=True))(model, x)
        return y, {name: api.parameters(gradients)[name] for name in ("gate_proj", "up_proj", "down_proj")}, dx

    actual, expected = of(behind, alone), of(lambda model, x: model(x), within)
    assert all(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(actual))
    jax.tree.map(lambda a, e: assert_close(a, e, tolerance=1e-3), actual, expected)


def fp8(*shape):
    return ops.quantize(jnp.ones(shape), CurrentScaling().quantization("activation"), row_ndim=len(shape) - 1)


MOE = ("MoE", 32, 4, 16)

# Class and sizes, arguments, arguments of the call, and the message.
REFUSED = {
    "axis": (("Linear", 32, 16), {"axis": 3}, {}, r"axis is \(3,\); for an input with 3 dimensions"),
    "axis twice": (("LinearGeneral", (32, 32), 16), {"axis": (2, -1)}, {}, "must name different ones"),
    "axis of float": (("LinearGeneral", 32, 16), {"axis": 1.0}, {}, r"axis is \(1.0,\); .* by integers in \[-3, 2\]"),
    "axis of bool": (("LinearGeneral", 32, 16), {"axis": True}, {}, r"axis is \(True,\)"),
    "no features": (("Linear", 32, 0), {}, {}, "features is 0; it must be an integer of at least 1, or several"),
    "features of float": (("Linear", 32, 1.5), {}, {}, "features is 1.5; it must be"),
    "None for features": (("Linear", 32, None), {}, {}, "features is None; it must be"),
    "one of the features": (("LinearGeneral", 32, (16, 0)), {}, {}, r"features is \(16, 0\); it must be"),
    "activation": (("Linear", 32, 16), {"activation": "tanh"}, {}, "activation is 'tanh'"),
    "recipe": (("Linear", 32, 16), {"recipe": "fp8"}, {}, "recipe is 'fp8'"),
    "dtype": (("Linear", 32, 16), {"dtype": jnp.int8}, {}, "dtype is int8; it must be float32"),
    "einsum": (("Einsum", "bti,bti->bt", (2, 6, 32), None), {}, {}, "einsum_str is .*: use jnp.einsum for other sums"),
    "dtype of an einsum": (("Einsum", "bti,io->bto", (32, 16), None), {"dtype": jnp.int8}, {}, "dtype is int8"),
    "x in FP8 without a recipe": (("Linear", 32, 16), {}, {"inputs": fp8(6, 32)}, "recipe is None, but x is a Quanti"),
    "x of attention in FP8": (("Attention", 32, 4), {}, {"x": fp8(2, 6, 32)}, "recipe is None, but x is a Quantized"),
    "norm": (("GatedMLP", 32, 48), {"norm": "batch"}, {}, "norm is 'batch'; it must be 'rms', 'layer' or a te_"),
    "residual": (("GatedMLP", 32, 48), {}, {"residual": X}, "residual is given, and there is no norm that adds it"),
    "x in FP8 before a norm": (
        ("NormLinear", 32, 16),
        {"recipe": BlockScaling()},
        {"x": fp8(128, 32)},
        "x is a QuantizedArray, and there is a norm",
    ),
    "state of an embedding": (("Embed", 48, 32), {"recipe": DelayedScaling()}, {}, "whose state Embed does not hold"),
    "floats for an embedding": (("Embed", 48, 32), {}, {}, "inputs have dtype float32; they must be integers"),
    "heads": (("Attention", 32, 4), {"num_kv_heads": 3}, {}, r"num_kv_heads is 3 and num_heads 4; .* must divide"),
    "dimensions": (("Attention", 32, 4), {}, {"x": X[0]}, r"x has shape \(6, 32\); it must be \[batch, time"),
    "features of a norm": (("RMSNorm", 48), {}, {}, r"x has shape \(2, 6, 32\); the norm needs 48 features"),
    "axis behind a norm": (("NormLinear", 32, 64), {"axis": 0}, {}, "axis is 0, and the norm is of the last one"),
    "axis of x in FP8": (
        ("LinearGeneral", 6, 32),
        {"axis": 0, "recipe": CurrentScaling()},
        {"inputs": fp8(6, 32)},
        r"inputs are a QuantizedArray, and the layer has axis \(0,\)",
    ),
    "norm of x in FP8": (
        ("RMSNorm", 32),
        {},
        {"x": fp8(6, 32)},
        "x is a QuantizedArray, which linear layers take, and",
    ),
    "einsum of x in FP8": (
        ("Einsum", "td,df->tf", (32, 48), None),
        {"recipe": CurrentScaling()},
        {"inputs": fp8(6, 32)},
        "inputs is a QuantizedArray, which linear layers take",
    ),
    "norm of a block": (("TransformerBlock", 32, 48, 4), {"norm": "batch"}, {}, "norm is 'batch'; it must be 'rms'"),
    "roles": (
        ("TransformerBlock", 32, 48, 4),
        {"recipe": {"mlp": None}},
        {},
        r"recipe has the keys \['mlp'\]; it must be .* 'mlp'",
    ),
    "experts": (("MoE", 32, 0, 16, Router(2)), {}, {}, "num_experts is 0"),
    "hidden features": (("MoE", 32, 4, -1, Router(2)), {}, {}, "hidden_features is -1"),
    "router": ((*MOE, 2), {}, {}, "router is 2; it must be a te_jax.layers.Router, such as"),
    "top_k": ((*MOE, Router(5)), {}, {}, "top_k is 5"),
    "recipe of experts": ((*MOE, Router(2)), {"recipe": DelayedScaling()}, {}, "recipe is DelayedScaling"),
    "dtype of experts": ((*MOE, Router(2)), {"dtype": jnp.int32}, {}, "dtype is int32"),
}


OF_NNX = ("features of a norm", "axis behind a norm")  # what Linen's modules take from x, or have no argument for


@pytest.mark.parametrize(("name", "api"), in_turns(list(REFUSED), [LINEN, NNX]))
def test_refusals(api, name):
    api = NNX if name in OF_NNX else api
    (kind, *sizes), arguments, call, message = REFUSED[name]
    first = {"Linear": "inputs", "LinearGeneral": "inputs", "Einsum": "inputs", "Embed": "inputs"}.get(kind, "x")
    call = {first: X, **call}
    with pytest.raises(ValueError, match=message):
        api.trace(api.layer(kind, *sizes, **arguments), **call)


# Sizes with which a module is made, which refuses a wrong recipe and implementation before it runs.
MADE = {
    "Linear": (32, 32), "LinearGeneral": (32, 32), "Einsum": ("ab,bc->ac", (32, 32), None), "Embed": (32, 32),
    "NormLinear": (32, 32), "GatedMLP": (32, 32), "Attention": (32, 2), "TransformerBlock": (32, 32, 2),
    "MoE": (32, 4, 32, Router(2)), "DotGeneral": None,
}  # fmt: skip


def make(api, name, **arguments):
    if name == "DotGeneral":
        return getattr(api.library, name)(**{"recipe": None, **arguments})
    layer = api.layer(name, *MADE[name], **arguments)
    return layer() if api is LINEN else nnx.eval_shape(lambda: layer(rngs=nnx.Rngs(0)))


@both
@pytest.mark.parametrize("name", MADE)
def test_what_is_refused_when_a_module_is_made(api, name):
    make(api, name)
    with pytest.raises(ValueError, match="recipe is 'block'; it must be a Recipe, such as"):
        make(api, name, recipe="block")
    message = "implementation is 'fast'; it must be None, 'native', 'xla' or 'reference'"
    with pytest.raises(ValueError, match=message):
        make(api, name, implementation="fast")
    if name == "MoE":
        with pytest.raises(
            ValueError, match=r"router is 2; it must be a te_jax\.layers\.Router, such as Router\(top_k=2"
        ):
            api.layer("MoE", 32, 4, 32, 2)(**({} if api is LINEN else {"rngs": nnx.Rngs(0)}))
    if name == "TransformerBlock":
        for recipe in ({"attention": None}, {"attention": None, "mlp": "block"}):
            with pytest.raises(ValueError, match="recipe "):
                make(api, name, recipe=recipe)


def test_names_are_those_of_each_library():
    absent = {LINEN: ("Linear", "LinearGeneral"), NNX: ("Dense", "DenseGeneral")}
    assert not any(hasattr(api.library, name) for api, names in absent.items() for name in names)
