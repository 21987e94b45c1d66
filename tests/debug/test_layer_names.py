"""Layers are called as `convert` calls them, and found through what models do with kernels. Nothing is compiled."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from te_jax import layers, models, ops
from te_jax.debug import with_statistics
from te_jax.recipe import BlockScaling, CurrentScaling

KERNEL, X = jax.ShapeDtypeStruct((128, 128), jnp.float32), jax.ShapeDtypeStruct((128, 128), jnp.float32)
ALL = {"activation": {"forward", "wgrad"}, "kernel": {"forward", "dgrad"}, "gradient": {"dgrad", "wgrad"}}
dense = functools.partial(ops.dense, recipe=CurrentScaling())


def statistics_of(function, *args):
    return jax.eval_shape(with_statistics(function), *args)[1]


def names_of(function, *args):
    return list(statistics_of(function, *args))


def products(of):
    return {role: set(each) for role, each in of.items()}


def test_decoder():
    config = models.DecoderConfig(
        vocab_size=64, num_layers=2, hidden_size=128, num_heads=2, num_kv_heads=2, head_dim=64, mlp_size=256,
        recipe=BlockScaling(), remat=True, head_recipe=BlockScaling(), head_fp8_products=("dgrad", "wgrad"),
    )  # fmt: skip
    params = jax.eval_shape(functools.partial(models.init, config), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((2, 64), jnp.int32)
    loss = lambda params, tokens: models.loss(params, tokens, tokens, config)  # noqa: E731
    found = statistics_of(jax.value_and_grad(loss), params, tokens)
    names = ("query", "key", "value", "out", "gate", "up", "down")
    assert set(found) == {"head", *(f"layers/{i}/{name}" for i in range(2) for name in names)}
    assert products(found.pop("head")) == {"activation": {"wgrad"}, "kernel": {"dgrad"}, "gradient": {"dgrad", "wgrad"}}
    assert all(products(of) == ALL for of in found.values())


def test_decoder_with_experts():
    config = models.DecoderConfig(
        vocab_size=64, num_layers=1, hidden_size=128, num_heads=2, num_kv_heads=2, head_dim=64, mlp_size=128,
        recipe=BlockScaling(), experts=models.Experts(num_experts=2, router=layers.Router(top_k=1)),
    )  # fmt: skip
    params = jax.eval_shape(functools.partial(models.init, config), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((2, 64), jnp.int32)
    loss = lambda params, tokens: models.loss(params, tokens, tokens, config)  # noqa: E731
    found = statistics_of(jax.grad(loss), params, tokens)
    assert set(found) == {f"layers/0/{name}" for name in ("query", "key", "value", "out", "gate", "up", "down")}
    assert all(products(of) == ALL for of in found.values())


def test_layers_of_a_stack():
    """`apply_layers` of stacked parameters takes them apart, `scan_layers` does not."""
    params = {"up": {"kernel": jax.ShapeDtypeStruct((3, 128, 128), jnp.float32)}}
    layer = lambda x, params: dense(x, params["up"]["kernel"])  # noqa: E731
    for run, names in ((layers.apply_layers, [f"up[{i}]" for i in range(3)]), (layers.scan_layers, ["up"])):
        loss = lambda params, x, run=run: jnp.sum(run(layer, params, x, remat=True))  # noqa: E731
        found = statistics_of(jax.grad(loss), params, X)
        assert sorted(found) == names
        assert all(products(of) == ALL for of in found.values())
        shape = (3,) if run is layers.scan_layers else ()
        assert found[names[0]]["gradient"]["dgrad"].error.shape == shape


def test_kernels_are_followed():
    """Through casts, layouts, slices, loops that carry them, and shard_map."""
    params = {
        "layers": [{"attention": {"query": {"kernel": KERNEL}}}],
        "stack": jax.ShapeDtypeStruct((2, 128, 128), jnp.float32),
        "halves": {
            "a": jax.ShapeDtypeStruct((128, 64), jnp.float32),
            "b": jax.ShapeDtypeStruct((128, 64), jnp.float32),
        },
        "carried": KERNEL,
        "mapped": KERNEL,
        "scaled": KERNEL,
    }
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])

    def loss(params, x):
        x = dense(x, params["layers"][0]["attention"]["query"]["kernel"].astype(jnp.bfloat16).T)
        x = dense(dense(x, params["stack"][1]), params["stack"][0].reshape(128, 128))
        x = dense(x, jnp.concatenate([params["halves"]["a"], params["halves"]["b"]], axis=1))
        x = dense(x, params["scaled"] * 0.5)
        (x, _), _ = jax.lax.scan(lambda carry, _: ((dense(*carry), carry[1]), None), (x, params["carried"]), length=2)
        mapped = jax.shard_map(dense, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
        return jnp.sum(mapped(x, params["mapped"]))

    found = statistics_of(jax.grad(lambda variables, x: loss(variables["params"], x)), {"params": params}, X)
    assert set(found) == {
        "layers/0/attention/query", "stack[1]", "stack[0]", "halves/a + halves/b", "scaled", "carried", "mapped",
    }  # fmt: skip
    assert all(products(of) == ALL for of in found.values())


def test_kernels_that_come_from_nowhere():
    """They have a number, behind the user's scopes, and one name for the forward and the backward pass."""

    def loss(x):
        with jax.named_scope("tower"):
            x = dense(dense(x, jnp.sin(X_LIKE)), jnp.cos(X_LIKE))
        kernel = jnp.tan(X_LIKE)
        return jnp.sum(jax.checkpoint(lambda x: dense(x, kernel))(x))

    X_LIKE = jnp.ones((128, 128))
    found = statistics_of(jax.grad(loss), X)
    assert set(found) == {"tower/dense 0", "tower/dense 1", "dense 0"}
    assert all(set(of) == set(ALL) for of in found.values())


def test_arguments_with_equal_paths():
    found = names_of(
        lambda first, second, x: dense(dense(x, first["up"]), second["up"]), {"up": KERNEL}, {"up": KERNEL}, X
    )
    assert set(found) == {"up", "second/up"}
    assert names_of(lambda kernel, x: dense(x, kernel), KERNEL, X) == ["kernel"]


def test_modules():
    nnx = pytest.importorskip("flax.nnx")
    import te_jax.flax
    import te_jax.nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([te_jax.nnx.Linear(128, 128, recipe=CurrentScaling(), rngs=rngs) for _ in range(2)])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    graph, state = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))
    found = names_of(jax.grad(lambda state, x: jnp.sum(nnx.merge(graph, state)(x))), state, X)
    assert found == ["layers/0", "layers/1"]
    model = te_jax.flax.GatedMLP(128, recipe=BlockScaling())
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    found = names_of(jax.grad(lambda variables, x: jnp.sum(jnp.asarray(model.apply(variables, x)))), variables, X)
    assert set(found) == {"gate_proj", "up_proj", "down_proj"}
