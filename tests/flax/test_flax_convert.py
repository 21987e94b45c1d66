"""te_jax.flax.convert through Flax's transforms, other libraries' layers, and its report. Else: tests/modules."""

import abc
import copy
import functools
import pickle
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as OVERWRITE
from flax.training.train_state import TrainState

import te_jax.flax
from te_jax.flax import accumulate_gradients, convert, quantize_kernels, report
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling
from te_jax.testing import relative_error

DELAYED = DelayedScaling(history_len=4)


class Mlp(nn.Module):
    """In the style of nn.compact. It has the second argument of a body of nn.scan."""

    @nn.compact
    def __call__(self, x, _=None):
        x = x + nn.Dense(32, use_bias=False, name="down")(nn.relu(nn.Dense(48, name="up")(x)))
        return x, None


class Compact(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Mlp(name="mlp")(x)[0]


class Setup(nn.Module):
    def setup(self):
        self.mlp = Mlp()

    def __call__(self, x):
        return self.mlp(x)[0]

    def up(self, x):
        return self.mlp(3 * x)[0]


class Field(nn.Module):
    mlp: nn.Module

    def __call__(self, x):
        return self.mlp(x)[0]


class Remat(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat(Mlp)(name="mlp")(x)[0]


class Jit(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.jit(Mlp)(name="mlp")(x)[0]


class Vmap(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, OVERWRITE: 0}
        vmap = nn.vmap(Mlp, in_axes=None, variable_axes=axes, split_rngs={"params": True}, axis_size=2)
        return vmap(name="mlp")(x)[0].sum(0)


class Scan(nn.Module):
    collections: tuple[str, ...] = ("params", OVERWRITE)

    @nn.compact
    def __call__(self, x):
        axes = dict.fromkeys(self.collections, 0)
        scan = nn.scan(Mlp, variable_axes=axes, split_rngs={"params": True}, length=3)
        return scan(name="mlp")(x, None)[0]


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadDotProductAttention(4, qkv_features=64, name="mlp")(x[None])[0]


class Einsum(nn.Module):
    @nn.compact
    def __call__(self, x):
        heads = nn.Einsum((32, 4, 16), "bd,dhk->bhk", name="heads")(x)
        return nn.Einsum((4, 16, 32), use_bias=False, name="out")(heads, einsum_str="bhk,hkd->bd")


class Lora(nn.Module):
    """It shares the scope of its layer."""

    def setup(self):
        self.child = nn.Dense(32)
        nn.share_scope(self, self.child)

    @nn.compact
    def __call__(self, x):
        a = self.param("a", nn.initializers.normal(), (32, 2))
        return self.child(x) + x @ a @ self.param("b", nn.initializers.zeros_init(), (2, 32))


class Adapted(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Lora(name="lora")(x)


MODELS = {
    "compact": (Compact(), {"mlp/up", "mlp/down"}),
    "setup": (Setup(), {"mlp/up", "mlp/down"}),
    "field": (Field(Mlp()), {"mlp/up", "mlp/down"}),
    "remat": (Remat(), {"mlp/up", "mlp/down"}),
    "jit": (Jit(), {"mlp/up", "mlp/down"}),
    "vmap": (Vmap(), {"mlp/up", "mlp/down"}),
    "scan": (Scan(), {"mlp/up", "mlp/down"}),
    "attention": (Attention(), {f"mlp/{name}" for name in ("query", "key", "value", "out")}),
    "einsum": (Einsum(), {"heads", "out"}),
    "share_scope": (Adapted(), {"lora"}),
    "a layer": (nn.Dense(32), {""}),
}


def normal(rng, shape, dtype=jnp.float32):
    return jax.device_put(np.asarray(rng.standard_normal(shape), jnp.dtype(dtype)))


def loss_of(model):
    return lambda variables, x: jnp.mean(jnp.square(model.apply(variables, x)))


def raveled(tree):
    return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])


def recipes(model):
    return {layer.path: layer.recipe for layer in report(model).layers}


def reasons(model):
    return {layer.path: layer.reason for layer in report(model).skipped}


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        (name, DELAYED if name in ("remat", "jit", "vmap", "scan", "attention", "a layer") else BlockScaling())
        for name in MODELS
    ],
)
def test_it_multiplies_in_fp8_with_the_same_parameters(rng, name, recipe):
    plain, layers = MODELS[name]
    model, x, key = convert(plain, recipe), normal(rng, (16, 32)), jax.random.key(int(rng.integers(2**31)))
    params = jax.jit(plain.init)(key, x)["params"]
    variables = jax.jit(model.init)(key, x)
    jax.tree.map(np.testing.assert_array_equal, variables["params"], params)
    assert {layer.path for layer in report(model).converted} == layers
    exact, expected = jax.jit(jax.value_and_grad(loss_of(plain)))({"params": params}, x)
    gradient = jax.jit(jax.value_and_grad(loss_of(model)))
    if recipe is DELAYED:
        for _ in range(5):  # the last layers of a scan are the last to see what they scale
            variables |= {OVERWRITE: gradient(variables, x)[1][OVERWRITE]}
        assert jax.tree.structure(variables) == jax.tree.structure(gradient(variables, x)[1])
    value, gradients = gradient(variables, x)
    assert 1e-5 < abs(value / exact - 1) < 0.2
    found, expected = (
        jnp.concatenate([g.ravel() for g in jax.tree.leaves(tree["params"])]) for tree in (gradients, expected)
    )
    assert 1e-3 < relative_error(found, expected) < 0.3


WAYS = "use one of these or te_jax.ops.einsum in it, or give convert an EinsumLayer or a KernelsLayer for it"
OTHERS = f"nn.Dense, nn.DenseGeneral and nn.Einsum: {WAYS}"


class Experts(nn.Module):
    """On tokens that are sorted by expert. One kernel is multiplied by a function of JAX."""

    layer: Callable[..., nn.Module] = nn.Einsum

    @nn.compact
    def __call__(self, x):
        kernel = self.param("mix", nn.initializers.lecun_normal(batch_axis=(0,)), (4, 32, 32))
        x = jnp.einsum("...ecd,edf->...ecf", x, kernel)
        gate = self.layer((4, 32, 48), "becd,edf->becf", use_bias=False, name="gate")(x)
        up = self.layer((4, 32, 48), "becd,edf->becf", bias_init=nn.initializers.normal(), name="up")(x)
        return self.layer((4, 48, 32), "becf,efd->becd", use_bias=False, name="down")(nn.silu(gate) * up)


class Mixture(nn.Module):
    moe: Experts

    def __call__(self, x):
        return self.moe(x)


def test_einsums_of_experts(rng):
    recipe, x = BlockScaling(), normal(rng, (3, 4, 6, 32))
    plain, ours = Mixture(Experts()), Mixture(Experts(functools.partial(te_jax.flax.Einsum, recipe=recipe)))
    model = convert(plain, recipe)
    variables = jax.jit(plain.init)(jax.random.key(int(rng.integers(2**31))), x)
    assert jax.eval_shape(model.init, jax.random.key(0), x) == jax.eval_shape(lambda: variables)
    layers = {f"moe/{name}": recipe for name in ("gate", "up", "down")}
    assert recipes(model) == {**layers, "moe": None}
    assert reasons(model) == {"moe": f"{__name__}.Experts is none of {OTHERS}"}
    cotangent = normal(rng, x.shape)

    def value_and_gradients(model):
        y, vjp = jax.vjp(model.apply, variables, x)
        return y, *vjp(cotangent)

    found, expected, exact = (jax.jit(value_and_gradients, static_argnums=0)(m) for m in (model, ours, plain))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        assert 1e-3 < relative_error(one, other) < 0.15


def test_experts_by_nn_vmap_are_those_of_an_einsum(rng):
    class Stacked(nn.Module):
        @nn.compact
        def __call__(self, x):
            experts = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True})
            return experts(48, bias_init=nn.initializers.normal(), name="experts")(x)

    stacked, einsum = (
        convert(Stacked(), BlockScaling()),
        convert(nn.Einsum((4, 32, 48), "ecd,edf->ecf"), BlockScaling()),
    )
    x = normal(rng, (4, 6, 32))
    params = jax.jit(Stacked().init)(jax.random.key(int(rng.integers(2**31))), x)["params"]["experts"]

    def loss(model, params, x):
        y = model.apply({"params": {"experts": params} if model is stacked else params}, x)
        return jnp.sum(jnp.sin(y)), y

    gradient = jax.jit(jax.value_and_grad(loss, argnums=(1, 2), has_aux=True), static_argnums=0)
    jax.tree.map(np.testing.assert_array_equal, gradient(stacked, params, x), gradient(einsum, params, x))
    assert recipes(stacked) == {"experts": BlockScaling()}
    (_, y), _ = gradient(stacked, params, x)
    assert 1e-3 < relative_error(y, Stacked().apply({"params": {"experts": params}}, x)) < 0.1


@pytest.mark.parametrize("recipe", [CurrentScaling(), DELAYED], ids=lambda recipe: type(recipe).__name__)
def test_logical_axes_and_dtypes_of_the_plain_layer(rng, recipe):
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    plain = nn.Dense(32, dtype=jnp.bfloat16, kernel_init=init)
    model, x = convert(plain, recipe), normal(rng, (16, 32))
    params = jax.jit(model.init)(jax.random.key(0), x)["params"]
    assert nn.get_partition_spec(params) == nn.get_partition_spec(plain.init(jax.random.key(0), x)["params"])
    assert nn.get_partition_spec(params)["kernel"] == jax.P("embed", "mlp")
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    assert jax.eval_shape(model.apply, variables, x).dtype == jnp.bfloat16


class Decoder(nn.Module):
    """What is skipped by default."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(64, 32, name="embed")
        position = self.param("position_embedding", nn.initializers.normal(), (4, 32))
        x = embed(tokens) + position[None]
        x = Mlp(name="layer")(x)[0] * nn.sigmoid(nn.Dense(32, name="router")(nn.LayerNorm(name="norm")(x)))
        return nn.Dense(64, name="logitdense")(x), nn.Dense(10, name="odd")(x), embed.attend(x)


def test_what_is_left_alone_by_default_and_why():
    model, tokens = convert(Decoder(), BlockScaling()), jnp.arange(8).reshape(2, 4)
    jax.eval_shape(model.init, jax.random.key(0), tokens)
    assert reasons(model) == {
        "": "an embedding",
        "embed": "an embedding",
        "router": "a router by its name",
        "logitdense": "an output head by its name",
        "odd": "32 features in, 10 out: FP8 products need multiples of 16",
    }
    assert {layer.path for layer in report(model).converted} == {"layer/up", "layer/down"}


class OwnCall(nn.Dense):
    @nn.compact
    def __call__(self, inputs):
        return 2 * super().__call__(inputs)


class OtherSignature(nn.Dense):
    @nn.compact
    def __call__(self, first, second):
        return (first + second) @ self.param("w", self.kernel_init, (32, 32))


class Inherited(nn.Dense):
    pass


class OwnKernel(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", nn.initializers.normal(), (32, 32))


class Foreign:
    class Einsum(OwnKernel):
        pass


def by_qwix(base):
    """A class as `qwix.quantize_model` makes it."""
    return type(base.__name__, (base,), {"_unquantized_type": base})


def promote(*arrays, dtype):
    return arrays


ALONE = {
    "own call": (OwnCall(32), "OwnCall has a __call__ of its own"),
    "other signature": (OtherSignature(32), "OtherSignature has a __call__ of its own"),
    "dot_general": (nn.Dense(32, dot_general=lambda *a, **k: jax.lax.dot_general(*a, **k)), "it has a dot_general of"),
    "dot_general_cls": (
        nn.Dense(32, dot_general_cls=te_jax.flax.make_dot_general_cls(BlockScaling())),
        "it has a dot_general_cls of its own",
    ),
    "promote_dtype": (nn.Dense(32, promote_dtype=promote), "it has a promote_dtype of its own"),
    "preferred_element_type": (
        nn.Einsum((32, 32), "ab,bc->ac", preferred_element_type=jnp.float32),
        "it has a preferred_element_type of its own",
    ),
    "batch_dims": (nn.DenseGeneral(32, axis=-1, batch_dims=0), "it has batch_dims"),
    "dtype": (nn.Dense(32, dtype=jnp.complex64), "its dtype complex64 is none of FP8 layers"),
    "no contraction": (nn.Einsum((32, 32), "ab,cd->abcd"), "einsum_str 'ab,cd->abcd' is no product of inputs"),
    "another class": (OwnKernel(), f"{__name__}.OwnKernel is none of {OTHERS}"),
    "a foreign class of the same name": (Foreign.Einsum(), f"{__name__}.Foreign.Einsum is none of {OTHERS}"),
    "a class that qwix made": (by_qwix(nn.Dense)(32), "its model is one of qwix, which computes the products"),
}


@pytest.mark.parametrize("name", ALONE)
def test_layers_that_are_something_else_are_left_alone_and_reported(name, rng):
    plain, reason = ALONE[name]
    model, xs = convert(plain, CurrentScaling(), rules=[("*", BlockScaling())]), [normal(rng, (16, 32))]
    xs *= 2 if name == "other signature" else 1
    variables = jax.jit(plain.init)(jax.random.key(0), *xs)
    np.testing.assert_array_equal(model.apply(variables, *xs), plain.apply(variables, *xs))
    assert reasons(model)[""].startswith(reason)
    assert not report(model).converted


@pytest.mark.parametrize("last", ["convert", "qwix"])
def test_layers_of_a_model_that_qwix_made_keep_their_products(rng, last):
    qwix, x = by_qwix(Compact)(), normal(rng, (16, 32))
    model = convert(qwix, BlockScaling())
    if last == "qwix":
        converted = convert(Compact(), BlockScaling())
        model = converted.copy()
        object.__setattr__(model, "__class__", by_qwix(type(converted)))
    variables = jax.jit(Compact().init)(jax.random.key(0), x)
    np.testing.assert_array_equal(model.apply(variables, x), Compact().apply(variables, x))
    assert set(reasons(model).values()) == {"its model is one of qwix, which computes the products"}
    assert not report(model).converted


def test_interceptors_in_the_model_keep_their_layers(rng):
    def added(call, args, kwargs, context):
        return call(*args, **kwargs) + (1 if context.module.name == "up" else 0)

    class Intercepting(nn.Module):
        inside: bool

        @nn.compact
        def __call__(self, x):
            mlp = nn.Dense(32, name="up")
            if not self.inside:
                return mlp(x)
            with nn.intercept_methods(added):
                return mlp(x)

    x = normal(rng, (16, 32))
    inside, outside = (convert(Intercepting(inside), BlockScaling()) for inside in (True, False))
    variables = jax.jit(inside.init)(jax.random.key(0), x)
    np.testing.assert_array_equal(inside.apply(variables, x), Intercepting(True).apply(variables, x))
    assert reasons(inside) == {"up": "it runs in a nn.intercept_methods of the model"}
    quantize_kernels(inside, variables, x)
    with nn.intercept_methods(added):  # calls what the conversion computes
        y = outside.apply(variables, x)
    np.testing.assert_array_equal(y, outside.apply(variables, x) + 1)
    assert recipes(outside) == {"up": BlockScaling()}


class SharingScope(nn.Module):
    """As FeedForward of Gemma: both kernels are in its own scope."""

    @nn.compact
    def __call__(self, x):
        for name, shape in {"gating": (2, 32, 48), "linear": (48, 32)}.items():
            layer = Named(name, shape)
            nn.share_scope(self, layer)
            x = layer(x)
        return x


class Named(nn.Module):
    weight_name: str
    shape: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        kernel = self.param(self.weight_name, nn.initializers.normal(), self.shape)
        return x @ (kernel if kernel.ndim == 2 else kernel.sum(0))


class Patches(nn.Module):
    """A convolution has no experts, nothing multiplies by a class token, and a scan has several layers."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(32, (2, 2), name="projection")(x).reshape(x.shape[0], -1, 32)
        x = x + self.param("cls_token", nn.initializers.zeros, (1, 1, 32))
        layers = nn.scan(Mlp, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return layers(name="layers")(x, None)[0]


def test_convolutions_and_tokens_and_scans():
    model, x = convert(Patches(), BlockScaling()), jax.ShapeDtypeStruct((2, 4, 4, 16), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    expected = [
        ("projection", "Conv (2, 2, 16, 32)", 2 * 4 * 16 * 32),
        *(
            (f"layers/{name}", f"Dense {shape}", 2 * 3 * 32 * 48)
            for name, shape in (("up", (3, 32, 48)), ("down", (3, 48, 32)))
        ),
    ]
    for _ in range(2):
        layers = report(model).layers
        assert sorted((layer.path, layer.kind, layer.flops) for layer in layers) == sorted(expected)
        assert not any(layer.all_experts for layer in layers)
        jax.eval_shape(model.apply, variables, x)


def test_the_report_has_a_row_for_each_kernel():
    x = jnp.ones((16, 32))
    model = convert(SharingScope(), BlockScaling())
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    jax.eval_shape(model.apply, variables, x)
    expected = {"gating": "Named (2, 32, 48)", "linear": "Named (48, 32)"}
    assert {layer.path: layer.kind for layer in report(model).layers} == expected
    assert repr(report(model)).splitlines()[-2].startswith("0 of 2 kernels, 0% of the FLOPs of a token")
    model = convert(Adapted(), BlockScaling())
    jax.eval_shape(model.init, jax.random.key(0), x)
    expected = {"lora": "Dense (32, 32)", "lora/a": "Lora (32, 2)", "lora/b": "Lora (2, 32)"}
    assert {layer.path: layer.kind for layer in report(model).layers} == expected


class Abstract(Compact, abc.ABC):
    """A class with a metaclass of its own."""


@pytest.mark.parametrize("plain", [Compact(), Abstract()], ids=["compact", "abstract"])
@pytest.mark.parametrize("recipe", [BlockScaling(), DELAYED], ids=lambda recipe: type(recipe).__name__)
def test_what_pickle_stores_it_stores_after_the_conversion(rng, plain, recipe):
    model, x = convert(plain, recipe), normal(rng, (16, 32))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert again == model
        assert type(again) is type(model)
        np.testing.assert_array_equal(again.apply(variables, x), model.apply(variables, x))
        assert recipes(again) == {"mlp/up": recipe, "mlp/down": recipe}
    with pytest.raises(pickle.PicklingError, match="by_qwix"):  # not stored as the class that it inherits from
        pickle.dumps(type("by_qwix", (type(model),), {}))


def test_a_subclass_that_inherits_the_call_is_converted(rng):
    model, x = convert(Inherited(32), BlockScaling()), normal(rng, (16, 32))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    np.testing.assert_array_equal(model.apply(variables, x), convert(nn.Dense(32), BlockScaling()).apply(variables, x))
    assert isinstance(model, Inherited)
    assert recipes(model) == {"": BlockScaling()}


def test_a_second_call_takes_the_place_of_the_first(rng):
    first = convert(Compact(), BlockScaling())
    again, other = convert(first, BlockScaling()), convert(first, None, rules=[("mlp/up", CurrentScaling())])
    assert again == first
    assert hash(again) == hash(first)
    assert type(other) is type(first)
    assert isinstance(other, Compact)
    x = normal(rng, (16, 32))
    variables = first.init(jax.random.key(0), x)
    np.testing.assert_array_equal(first.apply(variables, x), again.apply(variables, x))
    other.apply(variables, x)
    assert recipes(other) == {"mlp/up": CurrentScaling(), "mlp/down": None}
    assert recipes(first) == {"mlp/up": BlockScaling(), "mlp/down": BlockScaling()}
    plain = Compact().apply(variables, x)
    assert relative_error(first.apply(variables, x), plain) > 1e-3  # also after the plain model ran
    np.testing.assert_array_equal(Compact().apply(variables, x), plain)


def test_nn_jit_traces_the_plain_and_each_converted_model_anew(rng):
    x = normal(rng, (16, 32))
    variables = Jit().init(jax.random.key(0), x)
    models = [Jit(), convert(Jit(), BlockScaling()), convert(Jit(), None, rules=[("mlp/up", BlockScaling())])]
    results = [[np.asarray(model.apply(variables, x)) for model in models] for _ in range(2)]
    for first, second in zip(*results, strict=True):
        np.testing.assert_array_equal(first, second)
    errors = [relative_error(result, results[0][0]) for result in results[0]]
    assert errors[0] == 0 < errors[2] < errors[1]


@pytest.mark.parametrize("how", ["method", "function", "bind", "part", "parent's rules", "bridge"])
def test_however_it_is_called(rng, how):
    x, key = normal(rng, (16, 32)), jax.random.key(0)
    model = convert(Setup(), BlockScaling())
    variables = Setup().init(key, x)
    exact = Setup().apply(variables, x, method="up")
    if how == "method":
        y = model.apply(variables, x, method="up")
    elif how == "function":
        y = model.apply(variables, x, method=lambda model, x: model.mlp(3 * x)[0])
    elif how == "bind":
        y = model.bind(variables).up(x)
    elif how == "bridge":
        wrapped = nnx.bridge.ToNNX(model, rngs=nnx.Rngs(0)).lazy_init(x)
        exact = Setup().apply({"params": nnx.to_pure_dict(nnx.state(wrapped, nnx.Param))}, x, method="up")
        y = wrapped(3 * x)
    else:

        class Outer(nn.Module):
            inner: nn.Module

            def __call__(self, x):
                return self.inner(3 * x)

        outer = Outer(model)
        if how == "parent's rules":
            outer = convert(outer, CurrentScaling(), rules=[("inner/mlp/up", None)])
        y = outer.apply({"params": {"inner": variables["params"]}}, x)
        if how == "parent's rules":
            assert recipes(outer) == {"inner/mlp/up": None, "inner/mlp/down": CurrentScaling()}
            return
    assert 1e-3 < relative_error(y, exact) < 0.2
    assert recipes(model) == {"mlp/up": BlockScaling(), "mlp/down": BlockScaling()}  # paths begin at this module


def test_intermediates_and_tables_are_those_of_the_plain_model(rng):
    x = normal(rng, (16, 32))
    model = convert(Compact(), BlockScaling())
    variables = jax.jit(model.init)(jax.random.key(0), x)
    kept = [m.apply(variables, x, capture_intermediates=True)[1] for m in (model, Compact())]
    assert jax.tree.map(jnp.shape, kept[0]) == jax.tree.map(jnp.shape, kept[1])
    assert len(jax.tree.leaves(kept[0])) == 4  # and not twice
    tables = [m.tabulate(jax.random.key(0), x, console_kwargs={"width": 200}) for m in (model, Compact())]
    assert tables[0] == tables[1]


def test_delayed_scaling_trains_from_a_plain_checkpoint(rng):
    x, target = normal(rng, (16, 32)), normal(rng, (16, 32))
    plain, model = Scan(), convert(Scan(), DELAYED)
    params = jax.jit(plain.init)(jax.random.key(0), x)["params"]
    variables = jax.jit(model.init)(jax.random.key(1), x) | {"params": params}
    state = TrainState.create(apply_fn=model.apply, params=variables, tx=optax.sgd(0.02))

    @jax.jit
    def step(state):
        loss, gradients = jax.value_and_grad(lambda v: jnp.mean(jnp.square(state.apply_fn(v, x) - target)))(
            state.params
        )
        return state.apply_gradients(grads=gradients), loss

    losses = []
    for _ in range(6):
        state, loss = step(state)
        losses.append(loss)
    assert losses[-1] < losses[0]
    history = state.params[OVERWRITE]["mlp"]["up"]["activation_amax_history"]
    assert history.shape == (3, 4)
    assert (history > 0).all()


def test_delayed_scaling_without_a_place_for_its_state_says_what_to_do(rng):
    x = normal(rng, (16, 32))
    model = convert(Scan(("params",)), DELAYED)
    message = (
        rf'mlp/up has no place for the state of DelayedScaling: name "{OVERWRITE}" beside "params" in the variable_'
    )
    with pytest.raises(ValueError, match=message):
        model.init(jax.random.key(0), x)
    other = convert(Scan(("params",)), DELAYED, rules=[("mlp/*", BlockScaling())])
    jax.eval_shape(other.init, jax.random.key(0), x)
    model = convert(Compact(), DELAYED)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    with pytest.raises(ValueError, match=rf'variables have no state in "{OVERWRITE}" for mlp/up'):
        model.apply({"params": variables["params"]}, x)


@pytest.mark.parametrize("name", ["scan", "attention"])
def test_converted_kernels_are_quantized_once(rng, name):
    plain, layers = MODELS[name]
    model, xs = convert(plain, CurrentScaling()), normal(rng, (2, 16, 32))
    variables = jax.jit(model.init)(jax.random.key(0), xs[0])

    @jax.jit
    def accumulated(variables, xs):
        quantized = quantize_kernels(model, variables, xs[0])
        gradients = jax.tree.map(jnp.zeros_like, variables)
        for x in xs:
            _, gradients = accumulate_gradients(loss_of(model))(quantized, gradients, x)
        return gradients, sum(hasattr(kernel, "scale_inv") for kernel in jax.tree.leaves(quantized, is_leaf=_quantized))

    gradients, count = accumulated(variables, xs)
    assert count == len(layers)
    gradient = jax.jit(jax.grad(loss_of(model)))
    expected = [gradient(variables, x) for x in xs]
    for found, *each in zip(*map(jax.tree.leaves, (gradients, *expected)), strict=True):
        assert relative_error(found, sum(each)) < 1e-3
    assert {layer.path for layer in report(model).converted} == layers


def _quantized(x):
    return hasattr(x, "scale_inv")


def test_the_report_needs_a_run():
    model = convert(Compact(), BlockScaling())
    with pytest.raises(ValueError, match="module has not run, and Linen makes layers when they run: call its init or"):
        report(model)
    with pytest.raises(ValueError, match=r"module is of type Compact; it must be what te_jax\.flax\.convert returned"):
        report(Compact())
    jax.eval_shape(model.init, jax.random.key(0), jnp.ones((4, 32)))
    assert len(report(model).converted) == 2


class OwnEinsum(nn.Module):
    """DeepMind's gemma has one like it: the subscripts come with the call, and the name of the kernel from outside."""

    shape: tuple[int, ...]
    weight_name: str = "w"

    @nn.compact
    def __call__(self, eqn, x):
        return jnp.einsum(eqn, x, self.param(self.weight_name, nn.initializers.lecun_normal(), self.shape))


class OwnMlp(nn.Module):
    """Two kernels in the scope of a module, and one in a scope of its own."""

    @nn.compact
    def __call__(self, x):
        up, down = OwnEinsum((2, 32, 48), "gating_einsum"), OwnEinsum((48, 32), "linear")
        nn.share_scope(self, up)
        gate = up("...F,NFH->...NH", x)
        nn.share_scope(self, down)
        y = down("...H,HF->...F", nn.gelu(gate[..., 0, :]) * gate[..., 1, :])
        return OwnEinsum((32, 40), name="odd")("bd,df->bf", y)


OWN = te_jax.flax.EinsumLayer("weight_name", "eqn")


@pytest.mark.parametrize("recipe", [BlockScaling(), DELAYED], ids=lambda recipe: type(recipe).__name__)
def test_einsum_layers_of_another_class(rng, recipe):
    model, x = convert(OwnMlp(), recipe, layers={OwnEinsum: OWN}), normal(rng, (16, 32))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    params = jax.jit(OwnMlp().init)(jax.random.key(0), x)["params"]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), variables["params"], params)
    assert recipes(model) == {"gating_einsum": recipe, "linear": recipe, "odd": None}
    assert report(model).skipped[0].reason.startswith("32 features in, 40 out: FP8 products need multiples of 16")

    def loss(apply):
        return jax.value_and_grad(lambda variables: jnp.sum(jnp.square(apply(variables, x))))

    (value, gradients), (exact, plain) = loss(model.apply)(variables), loss(OwnMlp().apply)({"params": params})
    assert value != exact
    assert abs(value / exact - 1) < 0.1
    errors = jax.tree.map(relative_error, gradients["params"], plain["params"])
    assert max(jax.tree.leaves(errors)) < 0.15
    if recipe is DELAYED:
        after = gradients[OVERWRITE]
        assert {name for name in after if name.endswith("uses")} == {"gating_einsum_uses", "linear_uses"}
        assert after["linear_uses"] == 1
        assert after["linear_kernel_amax_history"][0] == jnp.max(jnp.abs(params["linear"]))


def test_einsum_layers_are_ops_einsum(rng):
    model, x = convert(OwnEinsum((4, 32, 16)), BlockScaling(), layers={OwnEinsum: OWN}), normal(rng, (16, 32))
    variables = jax.jit(functools.partial(model.init, eqn="bd,hdk->bhk"))(jax.random.key(0), x=x)
    expected = te_jax.ops.einsum("bd,hdk->bhk", x, variables["params"]["w"], recipe=BlockScaling())
    np.testing.assert_array_equal(model.apply(variables, "bd,hdk->bhk", x), expected)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (te_jax.flax.EinsumLayer("v", "eqn"), "it has no v, which its EinsumLayer names as the kernel"),
        (te_jax.flax.EinsumLayer("w", "bd,dh->bh"), "it is called with x beside its input"),
        (te_jax.flax.EinsumLayer("w", "subscripts"), "it is called with x beside its input"),
    ],
)
def test_einsum_layers_that_are_something_else_are_left_alone_and_reported(rng, how, reason):
    model, x = convert(OwnEinsum((32, 16)), BlockScaling(), layers={OwnEinsum: how}), normal(rng, (16, 32))
    variables = OwnEinsum((32, 16)).init(jax.random.key(0), "bd,df->bf", x)
    np.testing.assert_array_equal(
        model.apply(variables, "bd,df->bf", x), OwnEinsum((32, 16)).apply(variables, "bd,df->bf", x)
    )
    assert report(model).skipped[0].reason == reason


def test_einsum_layers_with_another_result_say_so(rng):
    class Transposed(OwnEinsum):
        @nn.compact
        def __call__(self, x):
            return super().__call__("bd,df->fb", x)

    how = te_jax.flax.EinsumLayer("w", "bd,df->bf")
    model = convert(Transposed((32, 48)), BlockScaling(), layers={Transposed: how})
    with pytest.raises(ValueError, match=r"Transposed computes 'bd,df->bf', which gives shape \(16, 48\) where its"):
        model.init(jax.random.key(0), normal(rng, (16, 32)))
    with pytest.raises(ValueError, match=r"layers is .*; it must give an EinsumLayer or a KernelsLayer for"):
        convert(model, BlockScaling(), layers={Transposed: "w"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, BlockScaling()), r"module is of type int; it must be a flax\.linen\.Module"),
        (
            (nn.Dense(16).bind({}), None),
            "module Dense is bound or was made inside of another module; convert",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        convert(*arguments)
