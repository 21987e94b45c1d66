"""te_jax.flax.convert through Flax's transforms, other libraries' layers, and its report. Else: tests/modules."""

import abc
import copy
import pickle
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as OVERWRITE
from flax_apis import normal

from te_jax.flax import convert, quantize_kernels, report
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
        scan = nn.scan(nn.remat(Mlp), variable_axes=axes, split_rngs={"params": True}, length=3)
        return scan(name="mlp")(x, None)[0]


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadDotProductAttention(4, qkv_features=64, name="mlp")(x[None])[0]


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
    "setup": (Setup(), {"mlp/up", "mlp/down"}),
    "jit": (Jit(), {"mlp/up", "mlp/down"}),
    "vmap": (Vmap(), {"mlp/up", "mlp/down"}),
    "scan": (Scan(), {"mlp/up", "mlp/down"}),
    "attention": (Attention(), {f"mlp/{name}" for name in ("query", "key", "value", "out")}),
    "share_scope": (Adapted(), {"lora"}),
}


def loss_of(model):
    return lambda variables, x: jnp.mean(jnp.square(model.apply(variables, x)))


def recipes(model):
    return {layer.path: layer.recipe for layer in report(model).layers}


def reasons(model):
    return {layer.path: layer.reason for layer in report(model).skipped}


def traced(model, *args):
    """A model that has run without values."""
    jax.eval_shape(model.init, jax.random.key(0), *args)
    return model


def program(apply, *args):
    """Its operations, without addresses of functions."""
    return re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(apply)(*args)))


def random_params(rng, model, x):
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
    return jax.tree.map(lambda leaf: normal(rng, leaf.shape) / leaf.shape[-1] ** 0.5, shapes)


def test_it_multiplies_in_fp8_with_the_same_parameters(rng):
    x = normal(rng, (16, 32))
    models = {name: convert(plain, BlockScaling()) for name, (plain, _) in MODELS.items()}
    params = {name: random_params(rng, plain, x) for name, (plain, _) in MODELS.items()}

    @jax.jit
    def results(params, x):
        return {
            name: (models[name].apply({"params": params[name]}, x), plain.apply({"params": params[name]}, x))
            for name, (plain, _) in MODELS.items()
        }

    for name, (found, expected) in results(params, x).items():
        assert 1e-3 < relative_error(found, expected) < 0.2, name
        assert {layer.path for layer in report(models[name]).converted} == MODELS[name][1]


def test_delayed_scaling_in_a_scan(rng):
    plain, model, x = Scan(), convert(Scan(), DELAYED), normal(rng, (16, 32))
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)
    variables = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), dict(shapes))
    variables["params"] = random_params(rng, plain, x)  # of a plain checkpoint
    gradients_of = jax.jit(jax.value_and_grad(loss_of(model)))
    for _ in range(4):  # the last layers are the last to see what they scale
        variables |= {OVERWRITE: gradients_of(variables, x)[1][OVERWRITE]}
    value, gradients = gradients_of(variables, x)
    assert jax.tree.structure(variables) == jax.tree.structure(gradients)
    exact, expected = jax.jit(jax.value_and_grad(loss_of(plain)))({"params": variables["params"]}, x)
    assert 1e-5 < abs(value / exact - 1) < 0.2
    for name in "up", "down":
        found, wanted = (tree["params"]["mlp"][name]["kernel"] for tree in (gradients, expected))
        assert 1e-3 < relative_error(found, wanted) < 0.3
    history = np.asarray(variables[OVERWRITE]["mlp"]["up"]["activation_amax_history"])
    assert history.shape == (3, 4)
    assert (history > 0).all()


WAYS = "use one of these or te_jax.ops.einsum in it, or give convert a KernelsLayer for it"
OTHERS = f"nn.Dense, nn.DenseGeneral and nn.Einsum: {WAYS}"


def test_logical_axes_and_dtypes_of_the_plain_layer():
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    plain = nn.Dense(32, dtype=jnp.bfloat16, kernel_init=init)
    model, x = convert(plain, DELAYED), jnp.ones((16, 32))
    variables, expected = (jax.eval_shape(of.init, jax.random.key(0), x) for of in (model, plain))
    assert nn.get_partition_spec(variables["params"]) == nn.get_partition_spec(expected["params"])
    assert nn.get_partition_spec(variables["params"])["kernel"] == jax.P("embed", "mlp")
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
    model = traced(convert(Decoder(), BlockScaling()), np.arange(8).reshape(2, 4))
    assert reasons(model) == {
        "": "an embedding",
        "embed": "an embedding",
        "router": "a router by its name",
        "logitdense": "an output head by its name: see ops.linear_cross_entropy",
    }
    assert {layer.path for layer in report(model).converted} == {"layer/up", "layer/down", "odd"}


class OwnCall(nn.Dense):
    @nn.compact
    def __call__(self, inputs):
        return 2 * super().__call__(inputs)


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
    "dot_general": (nn.Dense(32, dot_general=lambda *a, **k: jax.lax.dot_general(*a, **k)), "it has a dot_general of"),
    "dot_general_cls": (
        nn.Dense(32, dot_general_cls=lambda: jax.lax.dot_general),
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
    "a convolution": (nn.Conv(32, (2,)), "a convolution"),
    "a class that qwix made": (by_qwix(nn.Dense)(32), "its model is one of qwix, which computes the products"),
}


@pytest.mark.parametrize("name", ALONE)
def test_layers_that_are_something_else_are_left_alone_and_reported(name):
    plain, reason = ALONE[name]
    model, x = convert(plain, CurrentScaling(), rules=[("*", BlockScaling())]), jnp.ones((16, 32))
    variables = jax.eval_shape(plain.init, jax.random.key(0), x)
    assert program(model.apply, variables, x) == program(plain.apply, variables, x)
    assert reasons(model)[""].startswith(reason)
    assert not report(model).converted


def test_a_converted_model_that_qwix_makes_its_own_is_left_alone():
    converted = convert(Compact(), BlockScaling())
    model = converted.copy()
    object.__setattr__(model, "__class__", by_qwix(type(converted)))
    traced(model, jnp.ones((16, 32)))
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
    variables = {"params": random_params(rng, inside, x)}
    assert program(inside.apply, variables, x) == program(Intercepting(True).apply, variables, x)
    assert reasons(inside) == {"up": "it runs in a nn.intercept_methods of the model"}
    assert quantize_kernels(inside, variables, x)["params"]["up"]["kernel"] is variables["params"]["up"]["kernel"]

    @jax.jit
    def both(variables, x):
        with nn.intercept_methods(added):  # calls what the conversion computes
            y = outside.apply(variables, x)
        return y, outside.apply(variables, x) + 1

    np.testing.assert_array_equal(*both(variables, x))
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


def test_what_pickle_stores_it_stores_after_the_conversion():
    model, x = convert(Abstract(), DELAYED), jnp.ones((16, 32))
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert again == model
        assert type(again) is type(model)
        assert recipes(traced(again, x)) == {"mlp/up": DELAYED, "mlp/down": DELAYED}
    with pytest.raises(pickle.PicklingError, match="by_qwix"):  # not stored as the class that it inherits from
        pickle.dumps(type("by_qwix", (type(model),), {}))


def test_a_subclass_that_inherits_the_call_is_converted():
    model = traced(convert(Inherited(32), BlockScaling()), jnp.ones((16, 32)))
    assert isinstance(model, Inherited)
    assert recipes(model) == {"": BlockScaling()}


def test_a_second_call_takes_the_place_of_the_first():
    x, first = jnp.ones((16, 32)), convert(Compact(), BlockScaling())
    again, other = convert(first, BlockScaling()), convert(first, None, rules=[("mlp/up", CurrentScaling())])
    assert again == first
    assert hash(again) == hash(first)
    assert type(other) is type(first)
    assert isinstance(other, Compact)
    variables = jax.eval_shape(first.init, jax.random.key(0), x)
    before, *of_converted, plain = (program(m.apply, variables, x) for m in (Compact(), first, other, Compact()))
    assert before == plain
    assert len({plain, *of_converted}) == 3
    assert recipes(other) == {"mlp/up": CurrentScaling(), "mlp/down": None}
    assert recipes(first) == {"mlp/up": BlockScaling(), "mlp/down": BlockScaling()}


def test_nn_jit_traces_the_plain_and_each_converted_model_anew():
    x = jnp.ones((16, 32))
    variables = jax.eval_shape(Jit().init, jax.random.key(0), x)
    models = [Jit(), convert(Jit(), BlockScaling()), convert(Jit(), None, rules=[("mlp/up", BlockScaling())])]
    first, second = ([program(model.apply, variables, x) for model in models] for _ in range(2))
    assert first == second
    assert len(set(first)) == 3
    assert "f8" not in first[0]


HOW = {
    "method": lambda model, variables, x: model.apply(variables, x, method="up"),
    "function": lambda model, variables, x: model.apply(variables, x, method=lambda model, x: model.mlp(3 * x)[0]),
    "bind": lambda model, variables, x: model.bind(variables).up(x),
    "bridge": lambda model, variables, x: nnx.bridge.ToNNX(model, rngs=nnx.Rngs(0)).lazy_init(x)(x),
    "part": lambda model, variables, x: Outer(model).apply({"params": {"inner": variables["params"]}}, x),
}


class Outer(nn.Module):
    inner: nn.Module

    def __call__(self, x):
        return self.inner(3 * x)


@pytest.mark.parametrize("how", HOW)
def test_however_it_is_called(how):
    x, model = jnp.ones((16, 32)), convert(Setup(), BlockScaling())
    variables = jax.eval_shape(Setup().init, jax.random.key(0), x)
    jax.eval_shape(lambda variables: HOW[how](model, variables, x), variables)
    assert recipes(model) == {"mlp/up": BlockScaling(), "mlp/down": BlockScaling()}  # paths begin at this module


def test_rules_of_a_parent_hold_for_a_converted_part():
    outer = convert(Outer(convert(Setup(), BlockScaling())), CurrentScaling(), rules=[("inner/mlp/up", None)])
    traced(outer, jnp.ones((16, 32)))
    assert recipes(outer) == {"inner/mlp/up": None, "inner/mlp/down": CurrentScaling()}


def test_intermediates_and_tables_are_those_of_the_plain_model():
    x, model = jnp.ones((16, 32)), convert(Compact(), BlockScaling())
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    kept = [
        jax.eval_shape(lambda v, m=m: m.apply(v, x, capture_intermediates=True)[1], variables)
        for m in (model, Compact())
    ]
    assert kept[0] == kept[1]
    assert len(jax.tree.leaves(kept[0])) == 4  # and not twice
    tables = [m.tabulate(jax.random.key(0), x, console_kwargs={"width": 200}) for m in (model, Compact())]
    assert tables[0] == tables[1]


def test_delayed_scaling_without_a_place_for_its_state_says_what_to_do():
    x = jnp.ones((16, 32))
    message = (
        rf'mlp/up has no place for the state of DelayedScaling: name "{OVERWRITE}" beside "params" in the variable_'
    )
    with pytest.raises(ValueError, match=message):
        traced(convert(Scan(("params",)), DELAYED), x)
    traced(convert(Scan(("params",)), DELAYED, rules=[("mlp/*", BlockScaling())]), x)
    model = convert(Compact(), DELAYED)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    with pytest.raises(ValueError, match=rf'variables have no state in "{OVERWRITE}" for mlp/up'):
        jax.eval_shape(model.apply, {"params": variables["params"]}, x)


def test_the_report_needs_a_run():
    model = convert(Compact(), BlockScaling())
    with pytest.raises(ValueError, match="module has not run, and Linen makes layers when they run: call its init or"):
        report(model)
    with pytest.raises(ValueError, match=r"module is of type Compact; it must be what te_jax\.flax\.convert returned"):
        report(Compact())
    jax.eval_shape(model.init, jax.random.key(0), jnp.ones((4, 32)))
    assert len(report(model).converted) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, BlockScaling()), r"module is of type int; it must be a flax\.linen\.Module"),
        ((nn.Dense(16).bind({}), None), "module Dense is bound or was made inside of another module; convert"),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        convert(*arguments)
