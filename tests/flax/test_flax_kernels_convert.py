"""te_jax.flax.convert for classes with kernels in a `__call__` of their own."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax_apis import normal

from te_jax.flax import KernelsLayer, convert, report
from te_jax.recipe import BlockScaling, DelayedScaling
from te_jax.testing import relative_error

INIT = nn.initializers.normal(0.2)


class Weight(nn.Module):
    """A kernel in a submodule, in a box, as that of gemma's MoERagged."""

    shape: tuple[int, ...]

    @nn.compact
    def __call__(self):
        return self.param("w", nn.with_partitioning(INIT, (None, None, None)), self.shape)


class Experts(nn.Module):
    """A router, a sort, `ragged_dot`, a layer of Flax, and state that a call changes."""

    top_k: int = 1

    @nn.compact
    def __call__(self, x, *, scale=1.0):
        expert = jnp.arange(len(x)) % 3  # one has no token
        order, sizes = jnp.argsort(expert), jnp.bincount(expert, length=4)
        hidden = nn.silu(jax.lax.ragged_dot(x[order], Weight((4, 32, 48), name="up")(), sizes))
        down = self.param("down", INIT, (4, 48, 32))
        calls = self.variable("state", "calls", lambda: jnp.zeros((), jnp.int32))
        calls.value += 1
        self.sow("intermediates", "hidden", hidden)
        y = jax.lax.ragged_dot(hidden, down, sizes)[jnp.argsort(order)]
        return scale * nn.Dense(32)(y) * nn.softmax(nn.Dense(4, name="router")(x))[:, :1]


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        scan = nn.scan(
            nn.remat(lambda layer, x, _: (x + layer(x), None), prevent_cse=False),
            variable_axes={"params": 0, "state": 0, "intermediates": 0},
            split_rngs={"params": True},
            length=2,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = scan(Experts(name="layers"), x, None)
        return Experts(name="last")(x, scale=0.5)


LAYERS = {Experts: KernelsLayer(("up/w", "down"), experts=("top_k", 4))}


def test_a_class_with_kernels_runs_as_it_is_but_for_its_products(rng):
    plain, recipe, x = Model(), BlockScaling(), normal(rng, (24, 32))
    converted = convert(plain, recipe, layers=LAYERS, rules=[("last/down", None)])
    shapes = jax.eval_shape(plain.init, jax.random.key(0), x)
    assert jax.eval_shape(converted.init, jax.random.key(0), x) == shapes
    variables = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), dict(shapes))
    variables["params"] = jax.tree.map(lambda leaf: normal(rng, leaf.shape, scale=0.2), shapes["params"])

    def results(model):
        @jax.jit
        def step(params, x):
            def loss(params, x):
                y, updates = model.apply({**variables, "params": params}, x, mutable=["state", "intermediates"])
                return jnp.sum(y @ jnp.cos(jnp.arange(32.0))), (y, updates)

            return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)

        return step(variables["params"], x)

    ((params, dx), (y, updates)), (expected, (exact, exact_updates)) = results(converted), results(plain)
    assert 1e-3 < relative_error(y, exact) < 0.15
    for layer in "layers", "last":
        del params[layer]["router"], expected[0][layer]["router"]  # gradients of a softmax nearly cancel
    jax.tree.map(lambda a, e: np.testing.assert_array_less(relative_error(a, e), 0.25), (params, dx), expected)
    np.testing.assert_array_equal(updates["state"]["layers"]["calls"], [1, 1])
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, exact_updates)
    rows = {layer.path: layer for layer in report(converted).layers}
    in_fp8 = {path for path, layer in rows.items() if layer.recipe == recipe}
    assert in_fp8 == {"layers/up", "layers", "layers/Dense_0", "last/up", "last/Dense_0"}
    assert rows["last"].reason == "rule 'last/down'"
    assert rows["layers/up"].flops == 2 * (2 * 32 * 48)  # of two layers, one of four experts


class OwnEinsum(nn.Module):
    """DeepMind's gemma has one like it: the subscripts come with the call, and the name of the kernel from outside."""

    shape: tuple[int, ...]
    weight_name: str = "w"

    @nn.compact
    def __call__(self, eqn, x):
        return jnp.einsum(eqn, x, self.param(self.weight_name, nn.initializers.lecun_normal(), self.shape))


class Mlp(nn.Module):
    """Two kernels in the scope of a module, and one in a scope of its own."""

    @nn.compact
    def __call__(self, x):
        up, down = OwnEinsum((2, 32, 48), "gating_einsum"), OwnEinsum((48, 32), "linear")
        nn.share_scope(self, up)
        gate = up("...F,NFH->...NH", x)
        nn.share_scope(self, down)
        y = down("...H,HF->...F", nn.gelu(gate[..., 0, :]) * gate[..., 1, :])
        return OwnEinsum((32, 40), name="odd")("bd,df->bf", y)


def test_each_kernel_of_a_scope_has_a_state(rng):
    recipe = DelayedScaling(history_len=4)
    model, x = convert(Mlp(), recipe, layers={OwnEinsum: KernelsLayer(("weight_name",))}), normal(rng, (16, 32))
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)
    variables = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), dict(shapes))
    variables["params"] = jax.tree.map(lambda leaf: normal(rng, leaf.shape, scale=0.2), shapes["params"])
    rows = {layer.path: layer.recipe for layer in report(model).layers}
    assert rows == {"gating_einsum": recipe, "linear": recipe, "odd": recipe}

    def step(model, variables):
        return jax.jit(jax.value_and_grad(lambda v: jnp.mean(jnp.square(model.apply(v, x)))))(variables)

    (value, gradients), (exact, plain) = step(model, variables), step(Mlp(), {"params": variables["params"]})
    assert 0 < abs(value / exact - 1) < 0.1
    errors = jax.tree.map(relative_error, gradients["params"], plain["params"])
    assert max(jax.tree.leaves(errors)) < 0.25
    states = gradients[OVERWRITE_WITH_GRADIENT]
    states |= states.pop("odd")  # in the scope of its own
    assert {name: state["uses"] for name, state in states.items()} == {"gating_einsum": 1, "linear": 1, "w": 1}
    assert states["linear"]["kernel_amax_history"][0] == np.abs(variables["params"]["linear"]).max()


def test_a_kernel_with_another_use_is_an_error_in_the_call():
    class Regularized(Experts):
        @nn.compact
        def __call__(self, x):
            return super().__call__(x), jnp.sum(self.get_variable("params", "down"))

    x = jnp.ones((16, 32))
    model = convert(Regularized(), BlockScaling(), layers={Regularized: KernelsLayer(("down",))})
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    with pytest.raises(
        ValueError, match=r"down is an operand of reduce_sum in .*Regularized, .* give the class a rule"
    ):
        jax.eval_shape(lambda v: model.apply(v, x, mutable="state"), variables)


@pytest.mark.parametrize(
    ("kernel", "recipe", "reason"),
    [
        ("gate", BlockScaling(), "it has no gate, which its KernelsLayer names as the kernel"),
        ("up/v", BlockScaling(), "it has no up/v, which its KernelsLayer names as the kernel"),
        ("router/kernel", BlockScaling(), "a router by its name"),
        ("Dense_0/bias", BlockScaling(), "its shape is (32,): FP8 products need features in and out"),
        ("down", DelayedScaling(), "DelayedScaling has no place for the state of experts"),
    ],
)
def test_kernels_that_fp8_cannot_take_are_reported(kernel, recipe, reason):
    x = jnp.ones((16, 32))
    model = convert(Experts(), recipe, layers={Experts: KernelsLayer((kernel,), ("top_k", 4))})
    jax.eval_shape(model.init, jax.random.key(0), x)
    assert any(layer.reason.startswith(reason) for layer in report(model).skipped)


def test_in_an_interceptor_of_the_model_it_is_left_alone():
    class Intercepting(nn.Module):
        @nn.compact
        def __call__(self, x):
            with nn.intercept_methods(lambda call, args, kwargs, context: call(*args, **kwargs)):
                return Experts()(x)

    model = convert(Intercepting(), BlockScaling(), layers=LAYERS)
    jax.eval_shape(model.init, jax.random.key(0), jnp.ones((16, 32)))
    reasons = {layer.reason for layer in report(model).layers}
    assert "it runs in a nn.intercept_methods of the model" in reasons
    assert not report(model).converted
