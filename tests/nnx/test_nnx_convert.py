"""te_jax.nnx.convert: the same variables in other layers, what is left alone, and the way back. Else: tests/modules."""

import copy
import functools
import pickle
import re
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax_apis import NNX, normal
from jax.sharding import AxisType

import te_jax.nnx
from te_jax.nnx import OverwriteWithGradient, convert, overwrite_with_gradient, quantize_kernels, revert
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from te_jax.testing import relative_error

DELAYED = DelayedScaling(history_len=4)
WRT = nnx.DiffState(0, nnx.Any(nnx.Param, OverwriteWithGradient))


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(32, 48, rngs=rngs)
        self.down = nnx.Linear(48, 32, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


class Model(nnx.Module):
    """Layers in a list, one of them in two places, stacked ones, attention, an embedding, a router and a head."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(64, 32, rngs=rngs)
        self.layers = nnx.List([Mlp(rngs) for _ in range(2)])
        self.again = self.layers[0]
        self.attention = nnx.MultiHeadAttention(4, 32, 64, decode=False, rngs=rngs)
        self.stack = nnx.split_rngs(splits=3)(nnx.vmap(Mlp))(rngs)
        self.heads = nnx.Einsum("btd,dhk->bthk", (32, 4, 16), (4, 16), rngs=rngs)
        self.router = nnx.Linear(32, 16, rngs=rngs)
        self.lm_head = nnx.Linear(32, 64, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in (self.layers[1], self.again):
            x = layer(x)
        x = x + self.attention(x)
        x = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.stack)
        x = x + self.heads(x).sum(2).repeat(2, -1) * jax.nn.sigmoid(self.router(x)).repeat(2, -1)
        return self.lm_head(x)


IN_FP8 = {
    *("again/up", "again/down", "layers/1/up", "layers/1/down", "stack/up", "stack/down", "heads"),
    *(f"attention/{name}" for name in ("query", "key", "value", "out")),
}
TOKENS = np.arange(24).reshape(2, 12)


def made(rng, model=Model):
    return NNX.drawn(lambda rngs: model(rngs), rng)


def ones(*shape):
    return np.ones(shape, np.float32)


def variables(model):
    return dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))


def loss_fn(model, tokens):
    return jnp.mean(jnp.square(model(tokens)))


apply, gradients_of = nnx.jit(lambda model, x: model(x)), nnx.jit(nnx.grad(loss_fn, argnums=WRT))


def reasons(report):
    return {layer.path: layer.reason for layer in report.skipped}


def test_it_multiplies_in_fp8_with_the_same_variables(rng):
    model = made(rng)
    before = {id(variable): path for path, variable in nnx.iter_graph(model) if isinstance(variable, nnx.Variable)}
    expected = gradients_of(model, TOKENS)
    report = convert(model, DELAYED)
    assert {layer.path for layer in report.converted} == IN_FP8
    assert all(layer.recipe == DELAYED and not layer.reason for layer in report.converted)
    assert reasons(report) == {
        "embed": "an embedding",
        "router": "a router by its name",
        "lm_head": "an output head by its name: see ops.linear_cross_entropy",
    }
    assert type(model.lm_head) is type(model.router) is nnx.Linear
    after = {id(variable): path for path, variable in nnx.iter_graph(model) if isinstance(variable, nnx.Param)}
    assert {key: path for key, path in before.items() if key in after} == after
    assert set(map(str, after.values())) == {str(p) for p in before.values() if "rngs" not in str(p)}
    for _ in range(5):
        found = gradients_of(model, TOKENS)
        overwrite_with_gradient(model, found)
    found, expected = variables(found), variables(expected)
    for path in ("layers", 1, "up", "kernel"), ("stack", "down", "kernel"), ("attention", "value", "kernel"):
        assert 1e-3 < relative_error(found[path][...], expected[path][...]) < 0.35, path
    history = np.asarray(model.stack.up.activation_amax_history[...])
    assert history.shape == (3, 4)
    assert len(set(history[:, 0])) == 3  # each layer of a stack its own
    twice = nnx.eval_shape(lambda: nnx.vmap(nnx.vmap(Mlp))(nnx.Rngs(0).split((2, 3))))
    assert twice.up.kernel.shape == (2, 3, 32, 48)
    convert(twice, DELAYED)
    assert twice.up.uses.shape == (2, 3)


def test_experts_are_one_product_and_those_of_a_stack_by_nnx_vmap(rng, native_kernels):
    einsum = NNX.drawn(functools.partial(nnx.Einsum, "ecd,edf->ecf", (4, 32, 48), (4, 48)), rng)
    stacked = nnx.eval_shape(lambda: nnx.vmap(lambda rngs: nnx.Linear(32, 48, rngs=rngs))(nnx.Rngs(0).split(4)))
    nnx.update(stacked, nnx.state(einsum, nnx.Param))
    assert convert(nnx.List([stacked, einsum]), BlockScaling()).skipped == ()
    x = normal(rng, (4, 6, 32))

    def run(model, x):
        call = nnx.vmap(lambda layer, x: layer(x)) if model is not einsum else lambda layer, x: layer(x)
        graphdef, state = nnx.split(model)
        y, vjp = jax.vjp(lambda state, x: call(nnx.merge(graphdef, state), x), state, x)
        return y, *vjp(jnp.cos(y))

    jitted = [jax.jit(functools.partial(run, model)) for model in (stacked, einsum)]
    jax.tree.map(np.testing.assert_array_equal, *(jax.tree.leaves(run(x)) for run in jitted))
    for each in jitted:
        assert each.lower(x).as_text().count("custom_call @te_gemm(") == 3  # forward, dgrad and wgrad


@pytest.mark.parametrize(
    ("path", "skipped"),
    [
        *((path, True) for path in ("decoder/logitdense", "head/dense", "LM_head_0", "a/output", "a/router/b")),
        *((path, True) for path in ("block_sparse_moe/gate", "MoeBlock_0/gate")),
        *((path, False) for path in ("mlp/gate", "output/dense", "moe/experts/gate", "attention/heads", "out")),
    ],
)
def test_names_of_heads_and_routers(path, skipped):
    model = leaf = {}
    *parents, name = path.split("/")
    for parent in parents:
        leaf[parent] = leaf = {}
    leaf[name] = NNX.abstract(functools.partial(nnx.Linear, 32, 32))
    report = convert(model, BlockScaling())
    assert bool(report.skipped) is skipped
    assert convert(model, None, rules=[(path, BlockScaling())]).converted  # a rule overrides it


WAYS = "use one of these or te_jax.ops.einsum in it, or give convert a KernelsLayer for it"
OTHERS = f"nnx.Linear, nnx.LinearGeneral and nnx.Einsum: {WAYS}"


class OwnCall(nnx.Linear):
    def __call__(self, inputs, out_sharding=None):
        return 2 * super().__call__(inputs, out_sharding)


class OwnMethod(nnx.Linear):
    def norm(self):
        return jnp.linalg.norm(self.kernel[...])


class OwnKernel(nnx.Module):
    def __init__(self, rngs):
        self.kernel = nnx.Param(rngs.params.normal((32, 32)))
        self.token_embedding = nnx.Param(jnp.ones(32))


class Foreign:
    class Einsum(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(rngs.params.normal((32, 2, 16)))


class PackedKernel(NamedTuple):
    """A pytree in the place of a kernel, as qwix's WithAux is."""

    values: nnx.Param
    scales: nnx.Param
    shape: tuple[int, ...]


def linear_with(rngs, **attributes):
    layer = nnx.Linear(32, 32, rngs=rngs)
    for name, value in attributes.items():
        setattr(layer, name, value())
    return layer


def adapted(rngs):
    return linear_with(
        rngs,
        kernel_lora_a=lambda: nnx.LoRAParam(jnp.ones((32, 2))),
        stats=lambda: nnx.data({"absmax": nnx.BatchStat(jnp.ones(()))}),
        count=lambda: nnx.RngCount(jnp.uint32(0), tag="no obstacle"),
    )


def packed(rngs):
    values, scales = nnx.Param(jnp.ones((32, 32), jnp.int8)), nnx.Param(jnp.ones((1, 32)))
    return linear_with(rngs, kernel=lambda: nnx.data(PackedKernel(values, scales, (32, 32))))


layer_of = functools.partial
NO_PRODUCT = "einsum_str 'bd,ef->bdef' is no product of inputs and a kernel as te_jax's Einsum computes them"
ALONE = {
    "OwnCall has a __call__ of its own": layer_of(OwnCall, 32, 32),
    "it has a dot_general of its own": layer_of(nnx.Linear, 32, 32, dot_general=te_jax.nnx.DotGeneral(BlockScaling())),
    "it has a dot_general_cls of its own": layer_of(
        nnx.LinearGeneral, 32, 32, dot_general_cls=lambda: jax.lax.dot_general
    ),
    "it has a promote_dtype of its own": layer_of(nnx.Linear, 32, 32, promote_dtype=lambda arrays, *, dtype: arrays),
    "it has a einsum_op of its own": layer_of(
        nnx.Einsum, "ab,bc->ac", (32, 32), einsum_op=lambda *a, **k: jnp.einsum(*a, **k)
    ),
    "it has a preferred_element_type of its own": layer_of(nnx.Linear, 32, 32, preferred_element_type=jnp.float32),
    "it has a batch_axis": layer_of(nnx.LinearGeneral, 32, 32, axis=-1, batch_axis={0: 4}),
    NO_PRODUCT: layer_of(nnx.Einsum, "bd,ef->bdef", (32, 32)),
    "its dtype complex64 is none of FP8 layers": layer_of(nnx.Linear, 32, 32, dtype=jnp.complex64),
    f"{__name__}.OwnKernel is none of {OTHERS}": OwnKernel,
    "a convolution": layer_of(nnx.Conv, 32, 32, (2,)),
    f"{__name__}.Foreign.Einsum is none of {OTHERS}": Foreign.Einsum,
    "it has variables besides kernel and bias: kernel_lora_a, stats/absmax": adapted,
    "its kernel is no nnx.Variable": packed,
    "its model is one of qwix, which computes the products": layer_of(linear_with, qwix_path=lambda: ("layer",)),
}


@pytest.mark.parametrize("reason", ALONE)
def test_layers_that_are_something_else_are_left_alone_and_reported(reason):
    model = nnx.Dict(layer=nnx.eval_shape(lambda: ALONE[reason](rngs=nnx.Rngs(0))))
    before = nnx.graphdef(model)
    report = convert(model, CurrentScaling(), rules=[("layer", BlockScaling())])  # no rule overrides these
    assert reasons(report)["layer"] == reason
    assert not report.converted
    assert nnx.graphdef(model) == before


def test_a_subclass_that_inherits_the_call_is_converted_and_keeps_its_methods(rng):
    model = nnx.Dict(layer=NNX.drawn(functools.partial(OwnMethod, 32, 32), rng))
    norm = model.layer.norm()
    assert convert(model, DELAYED).converted
    assert isinstance(model.layer, OwnMethod)
    assert isinstance(model.layer, te_jax.nnx.Linear)
    # A pickle, a copy, and parts that are merged again have the same layer, and the way back.
    graphdef, state = pickle.loads(pickle.dumps(nnx.split(model)))
    x = normal(rng, (4, 32))
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), nnx.merge(graphdef, state)):
        assert type(again.layer) is type(model.layer)
        assert again.layer.norm() == norm
        assert nnx.graphdef(again) == nnx.graphdef(model)
        np.testing.assert_array_equal(apply(again.layer, x), apply(model.layer, x))
        revert(again)
        assert type(again.layer) is OwnMethod


def test_a_second_call_changes_nothing_or_the_recipe(rng):
    model = made(rng)
    first = convert(model, DELAYED)
    overwrite_with_gradient(model, gradients_of(model, TOKENS))
    state, graphdef = jax.tree.leaves(nnx.state(model)), nnx.graphdef(model)
    assert repr(convert(model, DELAYED)) == repr(first)
    assert nnx.graphdef(model) == graphdef
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(nnx.state(model)), state)  # history too
    assert {layer.recipe for layer in convert(model, RowwiseScaling()).converted} == {RowwiseScaling()}
    assert model.layers[1].up.options.recipe == RowwiseScaling()
    assert not jax.tree.leaves(nnx.state(model, OverwriteWithGradient))
    report = convert(model, None, rules=[("layers/1/up", DELAYED)])
    assert [layer.path for layer in report.converted] == ["layers/1/up"]
    assert type(model.layers[1].down) is nnx.Linear  # what is no longer converted is Flax's again
    assert model.layers[1].up.activation_amax_history.shape == (4,)


def test_revert_restores_everything(rng):
    model = nnx.Dict(of_flax=made(rng), of_te_jax=te_jax.nnx.Linear(32, 32, recipe=DELAYED, rngs=nnx.Rngs(0)))
    graphdef, kept = nnx.graphdef(model), variables(model)
    convert(model, BlockScaling())
    assert not jax.tree.leaves(nnx.state(model, OverwriteWithGradient))
    convert(model, CurrentScaling(), rules=[("*/lm_head", DELAYED)])
    assert nnx.graphdef(model) != graphdef
    revert(nnx.clone(model))  # another model
    assert isinstance(model.of_flax.layers[1].up, te_jax.nnx.Linear)
    for _ in range(2):
        revert(model)
        assert nnx.graphdef(model) == graphdef
        assert all(variable is kept[path] for path, variable in variables(model).items())
    assert model.of_te_jax.uses[...] == 0


def test_shared_modules_stay_shared_and_are_reported_once(rng):
    model = made(rng)
    report = convert(model, DELAYED)
    assert model.again is model.layers[0]
    assert model.again.up.uses is model.layers[0].up.uses
    (shared,) = [layer for layer in report.layers if layer.path == "again/up"]
    assert shared.other_paths == ("layers/0/up",)
    assert not [layer for layer in report.layers if layer.path == "layers/0/up"]
    by_other_path = convert(made(rng), BlockScaling(), rules=[("layers/0/up", None)])
    assert {layer.path: layer.recipe for layer in by_other_path.layers}["again/up"] is None
    tied = nnx.Dict({name: NNX.abstract(functools.partial(nnx.Linear, 32, 32)) for name in "ab"})
    tied.b.kernel = tied.a.kernel
    convert(tied, BlockScaling())
    assert tied.b.kernel is tied.a.kernel


def test_an_optimizer_and_a_jitted_step_go_on(rng):
    """The optimizer of the plain model, its momentum and its step count, with a step that was compiled before."""
    model, x = made(rng, Mlp), normal(rng, (16, 32))
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss, gradients = nnx.value_and_grad(loss_fn, argnums=WRT)(model, x)
        optimizer.update(model, gradients)
        overwrite_with_gradient(model, gradients)
        return loss

    losses = [step(model, optimizer, x) for _ in range(3)]
    convert(model, DELAYED)
    losses += [step(model, optimizer, x) for _ in range(6)]
    assert optimizer.step[...] == 9
    assert losses[-1] < losses[2] < losses[0]
    assert all((np.asarray(layer.activation_amax_history) > 0).all() for layer in (model.up, model.down))


def test_layers_stacked_along_another_dimension(rng):
    axes = nnx.StateAxes({nnx.Param: 1, ...: 0})

    def make(rngs):
        stack = nnx.split_rngs(splits=3)(
            nnx.vmap(out_axes=axes)(lambda rngs: nnx.Linear(32, 48, use_bias=False, rngs=rngs))
        )
        return stack(rngs)

    model = NNX.drawn(lambda rngs: make(rngs), rng)
    assert model.kernel.shape == (32, 3, 48)
    message = "stacked along another dimension than the first, where DelayedScaling has no place for its state"
    assert reasons(convert(model, DELAYED)) == {"": message}
    assert convert(model, BlockScaling()).converted
    x = normal(rng, (4, 32))
    y = nnx.jit(nnx.vmap(lambda model, x: model(x), in_axes=(axes, None)))(model, x)
    expected = np.einsum("bd,dsf->sbf", x, model.kernel[...])
    assert 1e-3 < relative_error(y, expected) < 0.1


def test_sharding_metadata_and_explicit_meshes(rng, make_mesh):
    mesh = make_mesh({"data": AxisType.Explicit, "model": AxisType.Explicit})
    with jax.set_mesh(mesh):
        model = nnx.Linear(
            32, 64, kernel_metadata={"out_sharding": (None, "model")}, bias_metadata={"out_sharding": ("model",)},
            rngs=nnx.Rngs(0),
        )  # fmt: skip
        sharding = model.kernel[...].sharding
        convert(model, DELAYED)
        assert model.kernel.out_sharding == (None, "model")
        assert model.kernel[...].sharding == sharding
        count = mesh.shape["data"]
        x = normal(rng, (4 * count, 32))
        y = nnx.jit(lambda model, x: model(x, out_sharding=jax.P("data", "model")))(
            model, jax.reshard(x, jax.P("data"))
        )
        assert y.sharding.spec == jax.P("data", "model")
        expected = x @ np.asarray(model.kernel[...])
        assert relative_error(np.asarray(y), expected) < 0.3


def test_quantized_kernels_keep_their_recipe(rng):
    model = made(rng, Mlp)
    convert(model, CurrentScaling())
    quantized = quantize_kernels(model)
    for recipe, rules in ((BlockScaling(), ()), (None, [("*", None)])):
        for layer in convert(quantized, recipe, rules=rules).layers:
            assert (layer.recipe, layer.reason) == (CurrentScaling(), "its kernel is quantized already")
    with pytest.raises(ValueError, match="the kernel of down is quantized; revert the model that quantize_kernels was"):
        revert(quantized)


def test_the_report_is_a_table(rng):
    report = convert(made(rng), DELAYED, rules=[("layers/1/up", None), ("nothing", None)])
    lines = [re.sub(" {2,}", " | ", line) for line in repr(report).splitlines()]
    assert lines[0] == "layer | kind | recipe"
    assert "layers/1/up | Linear (32, 48) | - (rule 'layers/1/up')" in lines
    assert "again/up = layers/0/up | Linear (32, 48) | DelayedScaling(history_len=4)" in lines
    assert len({line.index("Linear (32, 48)") for line in repr(report).splitlines() if "Linear (32, 48)" in line}) == 1
    assert any(line.startswith(f"{len(IN_FP8) - 1} of {len(IN_FP8) + 2} kernels, ") for line in lines)  # no embedding
    assert lines[-1] == "no layer has a path that matches the rule 'nothing'"
    many = nnx.eval_shape(lambda: nnx.List([Mlp(nnx.Rngs(0)) for _ in range(3)]))
    assert "*/up ×3    Linear (32, 48)  BlockScaling()" in repr(convert(many, BlockScaling())).splitlines()
    assert repr(convert(many[0].up, BlockScaling())).splitlines()[1].startswith("(the model)  Linear (32, 48) ")


class Mixture(nnx.Module):
    """Kernels of its own, in attributes and in a list."""

    def __init__(self, rngs):
        self.gate, self.down = (nnx.Param(rngs.params.normal(shape)) for shape in ((4, 32, 48), (4, 48, 32)))
        self.shared = nnx.data([nnx.Param(rngs.params.normal((32, 32))), nnx.Param(jnp.ones(32))])
        self.inner = nnx.Linear(32, 32, rngs=rngs)


def test_the_report_has_a_row_for_each_kernel():
    mixture, one = nnx.eval_shape(lambda: (Mixture(nnx.Rngs(0)), Foreign.Einsum(nnx.Rngs(0))))
    report = convert(nnx.Dict(moe=mixture, same=mixture, one=one), BlockScaling())
    kinds = {layer.path: layer.kind for layer in report.layers}
    assert kinds == {
        "moe/gate": "Mixture (4, 32, 48)",
        "moe/down": "Mixture (4, 48, 32)",
        "moe/shared/0": "Mixture (32, 32)",
        "moe/inner": "Linear (32, 32)",
        "one": "Einsum (32, 2, 16)",
    }
    assert {layer.path: layer.other_paths for layer in report.layers}["moe/shared/0"] == ("same/shared/0",)
    flops = {layer.path: (layer.flops, layer.all_experts) for layer in report.layers}
    assert flops["moe/inner"] == (2 * 2 * 32 * 32, False)  # in two places
    assert flops["moe/gate"] == (2 * 2 * 4 * 32 * 48, True)
    assert repr(report).splitlines()[-2].startswith("1 of 5 kernels, 6% of the FLOPs of a token, in FP8")
    assert repr(report).endswith("not known how many a token meets: 3")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (3, r"model is of type int and holds no flax\.nnx\.Module; pass one"),
        ({"w": jnp.ones((32, 32))}, "model is of type dict and holds no flax"),
        (nn.Dense(32), r"model is of type Dense and .* te_jax\.flax\.convert takes models of flax.linen"),
    ],
)
def test_arguments_that_do_not_fit_are_named(model, message):
    with pytest.raises(ValueError, match=message):
        convert(model, BlockScaling())
