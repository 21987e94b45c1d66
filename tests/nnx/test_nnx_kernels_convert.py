"""te_jax.nnx.convert for classes with kernels in a `__call__` of their own, and LoRA beside products in FP8."""

import dataclasses
import functools
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_apis import NNX, normal
from jax.sharding import AxisType

from te_jax.nnx import KernelsLayer, OverwriteWithGradient, convert, overwrite_with_gradient, revert
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling
from te_jax.testing import assert_close, relative_error

DELAYED = DelayedScaling(history_len=4)
WRT = nnx.DiffState(0, nnx.Any(nnx.Param, OverwriteWithGradient))


class Experts(nnx.Module):
    """A router, a sort, `ragged_dot`, a loop over shared experts, and state that a call changes."""

    def __init__(self, rngs):
        self.router = nnx.Linear(32, 4, rngs=rngs)
        self.up, self.down = (nnx.Param(0.2 * rngs.params.normal(shape)) for shape in ((4, 32, 48), (4, 48, 32)))
        self.shared = nnx.Param(0.2 * rngs.params.normal((2, 32, 32)))
        self.calls, self.top_k = nnx.BatchStat(jnp.zeros((), jnp.int32)), 1

    def __call__(self, x, *, scaled=False):
        self.calls[...] += 1
        if not hasattr(self, "seen"):
            self.seen = nnx.Intermediate(jnp.zeros((), jnp.int32))
        self.seen[...] = jnp.asarray(x.size, jnp.int32)
        flat = x.reshape(-1, 32)
        expert = jnp.arange(len(flat)) % 3  # one has no token
        order, sizes = jnp.argsort(expert), jnp.bincount(expert, length=4)
        hidden = nnx.silu(jax.lax.ragged_dot(flat[order], self.up[...], sizes))
        y = jax.lax.ragged_dot(hidden, self.down[...], sizes)[jnp.argsort(order)]
        for i in range(2):
            y += jnp.dot(flat, self.shared[...][i].astype(flat.dtype))
        weights = jax.nn.softmax(self.router(flat))
        return {"y": (y * weights[:, :1] * (2.0 if scaled else 1.0)).reshape(x.shape), "weights": weights}


NAMES = ("up", "down", "shared")
LAYERS = {Experts: KernelsLayer(NAMES, experts=("top_k", 4))}


@nnx.jit
def value_and_gradients(model, x):
    def loss(model, x):
        result = model(x, scaled=True)
        return jnp.sum(result["y"] @ jnp.cos(jnp.arange(32.0))), result

    gradients, result = nnx.grad(loss, argnums=(0, 1), has_aux=True)(model, x)
    return result, gradients


def flat(state):
    return {"/".join(map(str, path)): variable[...] for path, variable in nnx.to_flat_state(state)}


def made(rng, make=Experts):
    return NNX.drawn(lambda rngs: make(rngs), rng)


def test_a_class_with_kernels_runs_as_it_is_but_for_its_products(rng):
    recipe, model, x = BlockScaling(), nnx.Dict(moe=made(rng)), normal(rng, (2, 24, 32))
    graphdef, kernel = nnx.graphdef(model), model.moe.up
    exact, (dmodel, dx) = value_and_gradients(model.moe, x)
    del model.moe.seen
    report = convert(model, recipe, layers=LAYERS, rules=[("moe/shared", None)])
    assert {layer.path: layer.recipe for layer in report.layers} == {
        "moe/up": recipe, "moe/down": recipe, "moe/shared": None, "moe/router": None,
    }  # fmt: skip
    assert {layer.path: layer.flops for layer in report.layers}["moe/up"] == 2 * 32 * 48  # one of four experts
    assert model.moe.up is kernel
    model = pickle.loads(pickle.dumps(model))
    y, (found, found_x) = value_and_gradients(model.moe, x)
    assert model.moe.calls[...] == 2
    assert model.moe.seen[...] == x.size
    np.testing.assert_array_equal(y["weights"], exact["weights"])
    assert 1e-3 < relative_error(y["y"], exact["y"]) < 0.08
    assert relative_error(found_x, dx) < 0.08
    found, expected = flat(found), flat(dmodel)
    assert found.keys() == expected.keys()
    for name in NAMES:
        assert relative_error(found[name], expected[name]) < 0.12, name
    assert not np.any(found["up"][3])
    np.testing.assert_array_equal(found["shared"], expected["shared"])  # in float32, and its input too
    convert(model, CurrentScaling())  # knows the class, though it is not told again
    revert(model)
    del model.moe.seen
    assert nnx.graphdef(model) == graphdef


def test_stacked_layers_scan_and_remat():
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def scanned(x, layer):
        return nnx.remat(lambda layer, x: x + layer(x)["y"])(layer, x)

    def run(x):
        stack = nnx.split_rngs(splits=2)(nnx.vmap(Experts))(nnx.Rngs(0))
        assert len(convert(stack, BlockScaling(), layers=LAYERS).converted) == 3
        return scanned(x, stack), stack.calls[...]

    y, calls = nnx.eval_shape(run, jnp.ones((16, 32)))
    assert y.shape == (16, 32)
    assert calls.shape == (2,)


class Mlp(nnx.Module):
    """Two kernels, of which one has two products; and a method besides `__call__`."""

    def __init__(self, rngs):
        self.up = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (32, 2, 48)))
        self.down = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (48, 32)))

    def __call__(self, x):
        hidden = nnx.silu(x @ self.up[:, 0]) * (x @ self.up[:, 1])
        return jnp.einsum("...h,hd->...d", hidden, self.down[...])

    def size(self):
        return self.up.size + self.down.size


MLP = {Mlp: KernelsLayer(("up", "down"))}


def test_each_kernel_has_a_state(rng):
    model, x = made(rng, Mlp), normal(rng, (16, 32))
    graphdef, kernel = nnx.graphdef(model), model.up
    _, expected = gradients_of_all(model, x)
    assert len(convert(model, DELAYED, layers=MLP).converted) == 2
    for _ in range(4):
        _, gradients = gradients_of_all(model, x)
        overwrite_with_gradient(model, gradients)
    found = flat(nnx.state(gradients, nnx.Param))
    for path, gradient in flat(expected).items():
        assert 1e-3 < relative_error(found[path], gradient) < 0.15, path
    states = flat(nnx.state(model, OverwriteWithGradient))
    assert states["te_jax_states/up/uses"] == 2
    assert states["te_jax_states/down/uses"] == 1
    assert states["te_jax_states/down/kernel_amax_history"][0] == np.abs(model.down[...]).max()
    assert len(convert(model, DELAYED, rules=[("up", None)]).converted) == 1  # it knows the class
    assert flat(nnx.state(model, OverwriteWithGradient)).keys() == {path for path in states if "/down/" in path}
    np.testing.assert_array_equal(model.te_jax_states.down.uses[...], 1)
    assert (model.up, model.size()) == (kernel, 32 * 48 * 3)
    revert(model)
    assert nnx.graphdef(model) == graphdef


def test_states_of_a_stack_of_flax_or_of_converted_layers(rng):
    lora = nnx.eval_shape(
        lambda: nnx.vmap(lambda rngs: nnx.LoRALinear(32, 64, lora_rank=4, rngs=rngs))(nnx.Rngs(0).split(3))
    )
    assert len(convert(lora, DELAYED).converted) == 1
    assert lora.te_jax_states.kernel.uses.shape == (3,)

    def make(rngs):
        layer = Mlp(rngs)
        convert(layer, DELAYED, layers={f"{Mlp.__module__}.Mlp": KernelsLayer(("up", "down"))})
        return layer

    stack, x = NNX.drawn(lambda rngs: nnx.split_rngs(splits=3)(nnx.vmap(make))(rngs), rng), normal(rng, (16, 32))
    run = nnx.jit(nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry))
    np.testing.assert_array_equal(run(x, pickle.loads(pickle.dumps(stack))), run(x, stack))
    convert(stack, dataclasses.replace(DELAYED, history_len=8))
    assert stack.te_jax_states.up.activation_amax_history.shape == (3, 8)


def test_the_result_is_sharded_as_that_of_the_class(make_mesh):
    class Sharded(Mlp):
        def __call__(self, x):
            return jax.reshard(super().__call__(x), jax.P("data", "model"))

    mesh = make_mesh({"data": AxisType.Explicit, "model": AxisType.Explicit})
    with jax.set_mesh(mesh):
        layer = NNX.abstract(Sharded)
        convert(layer, CurrentScaling(), layers={Sharded: KernelsLayer(("up", "down"))})
        sharding = jax.NamedSharding(mesh, jax.P("data"))
        x = jax.ShapeDtypeStruct((8 * mesh.shape["data"], 32), jnp.float32, sharding=sharding)
        graphdef, state = nnx.split(layer)
        y = jax.eval_shape(lambda state, x: nnx.merge(graphdef, state)(x), state, x)
    assert y.sharding.spec == jax.P("data", "model")


def test_classes_of_libraries_are_known_by_name():
    class Einsum(nnx.Module):
        locals().update(__module__="tunix.models.llama3.model", __qualname__="Einsum")

        def __init__(self, rngs):
            self.einsum_str, self.w = "BTD,DF->BTF", nnx.Param(rngs.params.normal((32, 48)))

        def __call__(self, x):
            return jnp.einsum(self.einsum_str, x, self.w[...])

    class MoELayer(Experts):
        locals().update(__module__="tunix.models.qwen3.model", __qualname__="MoELayer")

        def __init__(self, rngs):
            super().__init__(rngs)
            self.gate_proj, self.up_proj, self.down_proj, self.experts_per_tok = self.up, self.up, self.down, 2
            self.num_experts = 4

        def __call__(self, x):
            return jnp.einsum("td,edf->tef", x, self.gate_proj[...])

    inherits = type("Inherits", (Einsum,), {})
    model = nnx.eval_shape(lambda: nnx.List([Einsum(nnx.Rngs(0)), inherits(nnx.Rngs(0))]))
    assert {layer.path for layer in convert(model, BlockScaling()).converted} == {"0", "1"}
    report = convert(nnx.eval_shape(lambda: MoELayer(nnx.Rngs(0))), BlockScaling())
    flops = {layer.path: layer.flops for layer in report.converted}
    assert flops == dict.fromkeys(("gate_proj", "up_proj", "down_proj"), 2 * 2 * 32 * 48)
    assert "its KernelsLayer does not name it as a kernel" in {layer.reason for layer in report.skipped}


LEFT_ALONE = {
    "no kernel": (BlockScaling(), ("w",), "it has no w, which its KernelsLayer names as the kernel"),
    "no variable": (BlockScaling(), ("top_k",), "its top_k is no nnx.Variable"),
    "sizes": (BlockScaling(), ("odd",), "32 features in, 20 out: FP8 products of experts need multiples of 16"),
    "state": (DelayedScaling(), ("up",), "DelayedScaling has no place for the state of experts"),
    "dtype": (BlockScaling(), ("whole",), "its dtype int32 is none of FP8 layers"),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_kernels_that_fp8_cannot_take_are_reported(name):
    recipe, kernels, reason = LEFT_ALONE[name]
    model = nnx.eval_shape(lambda: Experts(nnx.Rngs(0)))
    model.odd, model.whole = nnx.Param(jnp.ones((32, 20))), nnx.Param(jnp.ones((32, 32), jnp.int32))
    report = convert(model, recipe, layers={Experts: KernelsLayer(kernels, ("top_k", 4))})
    assert type(model) is Experts
    assert {layer.reason for layer in report.skipped if layer.reason.startswith(reason)}
    assert not report.converted


def test_a_kernel_with_another_use_is_an_error_in_the_call():
    class Regularized(Experts):
        def __call__(self, x):
            return super().__call__(x)["y"], jnp.sum(self.up[...])

    def run():
        model = Regularized(nnx.Rngs(0))
        assert not convert(model, BlockScaling(), layers=LAYERS).converted  # the entry is not for this __call__
        convert(model, BlockScaling(), layers={Regularized: KernelsLayer(("up", "down"))})
        return model(jnp.ones((4, 32)))

    with pytest.raises(ValueError, match=r"up is an operand of reduce_sum in .*Regularized, .* give the class a rule"):
        nnx.eval_shape(run)
    for kernels in ((), "up", (3,)):
        with pytest.raises(ValueError, match=r"kernels is .*; it must be the names of kernels in a tuple"):
            KernelsLayer(kernels)


# ------------------------------------------------------------------------------------------------------------- LoRA


class WithLora(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.LoRALinear(32, 64, lora_rank=4, rngs=rngs)
        self.down = nnx.LoRA(64, 4, 32, base_module=nnx.Linear(64, 32, rngs=rngs), rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class FlaxMlp(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Einsum("td,df->tf", (64, 32), rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


def with_random_adapters(model, seed=0):
    rng = np.random.default_rng(seed)
    for _, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        variable.set_value(normal(rng, variable.shape, scale=0.2))
    return model


@nnx.jit
def gradients_of_all(model, x):
    dy = jnp.cos(jnp.arange(32.0))
    return nnx.value_and_grad(lambda model: jnp.sum(model(x) @ dy), argnums=WRT)(model)


def test_lora_of_flax_stays_beside_products_in_fp8(rng):
    model, x = with_random_adapters(made(rng, WithLora)), normal(rng, (16, 32))
    _, expected = gradients_of_all(model, x)
    report = convert(model, BlockScaling())
    assert {layer.path for layer in report.converted} == {"up", "down/base_module"}
    assert {layer.path: layer.reason for layer in report.skipped} == dict.fromkeys(
        ("up/lora/lora_a", "up/lora/lora_b", "down/lora_a", "down/lora_b"), "an adapter of LoRA, which stays as it is"
    )
    share = 100 * 2 * 32 * 64 // (2 * 32 * 64 + 2 * 4 * 96)
    assert repr(report).endswith(f"2 of 2 kernels, {share}% of the FLOPs of a token, in FP8")
    _, found = gradients_of_all(model, x)
    for path, gradient in flat(expected).items():
        assert relative_error(flat(found)[path], gradient) < 0.12, path
    assert relative_error(flat(found)["up/kernel"], flat(expected)["up/kernel"]) > 1e-3


def test_a_frozen_base_has_no_weight_gradients_in_the_program(native_kernels):
    model = nnx.eval_shape(lambda: WithLora(nnx.Rngs(0)))
    convert(model, BlockScaling())

    def products(*trained):
        graphdef, *states = nnx.split(model, *trained, ...)

        def loss(trained, *others):
            return jnp.sum(nnx.merge(graphdef, trained, *others)(jnp.ones((16, 32))) ** 2)

        text = jax.jit(jax.value_and_grad(loss)).lower(*states).compile().as_text()
        return len(re.findall('custom_call_target="te_gemm"', text))

    assert products(nnx.LoRAParam) == 3  # two forward, and dgrad of the second
    assert products(nnx.Param) == 5


OF_QWIX = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@OF_QWIX
def test_lora_of_qwix_before_or_after(rng):
    recipe = BlockScaling()
    qwix = pytest.importorskip("qwix", exc_type=ImportError)
    plain, x = made(rng, FlaxMlp), normal(rng, (16, 32))

    def adapted(model):
        provider = qwix.LoraProvider(module_path=".*", rank=4, alpha=8.0)
        return with_random_adapters(qwix.apply_lora_to_model(model, provider, x, rngs=nnx.Rngs(0)))

    before, after = adapted(plain), nnx.clone(plain)
    _, exact = gradients_of_all(before, x)
    assert len(convert(before, recipe).converted) == len(convert(after, recipe).converted) == 2
    after = adapted(after)
    results = [gradients_of_all(model, x) for model in (before, after)]
    jax.tree.map(np.testing.assert_array_equal, *results)
    for path, gradient in flat(results[0][1]).items():
        assert relative_error(gradient, flat(exact)[path]) < 0.12, path
    assert all(np.any(gradient) for path, gradient in flat(results[0][1]).items() if "lora" in path)
    assert len(convert(after, DELAYED).converted) == 2
    _, gradients = gradients_of_all(after, x)
    overwrite_with_gradient(after, gradients)
    assert after.up.activation_amax_history[0] == np.abs(x).max()


@OF_QWIX
@pytest.mark.parametrize("kind", ["qlora", "ptq"])
def test_what_qwix_quantizes_is_left_alone_before_and_refused_after(kind):
    qwix = pytest.importorskip("qwix", exc_type=ImportError)
    x = jnp.ones((16, 32))

    def quantized(model):
        if kind == "qlora":
            provider = qwix.LoraProvider(module_path=".*", rank=4, alpha=8.0, weight_qtype="nf4", tile_size=32)
            return qwix.apply_lora_to_model(model, provider, x, rngs=nnx.Rngs(0))
        provider = qwix.PtqProvider([qwix.QuantizationRule(module_path=".*", weight_qtype=jnp.int8)])
        return qwix.quantize_model(model, provider, x)

    report = convert(quantized(FlaxMlp(nnx.Rngs(0))), BlockScaling())
    assert {layer.reason for layer in report.layers if "lora" not in layer.path} == {"qwix has quantized its kernel"}
    model = FlaxMlp(nnx.Rngs(0))
    convert(model, BlockScaling())
    with pytest.raises(ValueError, match=r"kernel is an operand of .*: apply qwix before te_jax\.nnx\.convert"):
        quantized(model)


def test_a_converted_layer_that_qwix_marks_runs_as_that_of_flax(rng):
    """Without qwix: its products are then in the call of Flax's class, where qwix finds them, and in FP8."""
    model, x = made(rng, FlaxMlp), normal(rng, (16, 32))
    convert(model, BlockScaling())
    expected = gradients_of_all(model, x)
    for path, module in nnx.iter_modules(model):
        module.qwix_path = path
    seen = []

    def dot_general(*operands, **options):
        seen.append(operands[1].shape)
        return jax.lax.dot_general(*operands, **options)

    model.up.dot_general = dot_general
    jax.tree.map(functools.partial(assert_close, tolerance=1e-3), gradients_of_all(model, x), expected)
    assert seen[0] == (32, 64)
    reasons = {layer.reason for layer in convert(model, BlockScaling()).layers}
    assert reasons == {"its model is one of qwix, which computes the products"}  # it may quantize them
    assert type(model.up) is nnx.Linear
    model.up.kernel_lora_a = nnx.LoRAParam(jnp.ones((32, 4)))
    assert [layer.path for layer in convert(model, BlockScaling()).converted] == ["down"]  # up has a dot_general
