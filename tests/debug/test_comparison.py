"""Planted faults are found by the name of their layer, and errors are those of NumPy."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from te_jax import debug, ops, parallel
from te_jax.debug import compare
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling


def normal(rng, *shape, scale=1.0):
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def model(recipe=None, states=None):
    def loss(params, x):
        for i, kernel in enumerate(params["layers"]):
            state = params.get("states", [None] * 8)[i]
            x = jnp.tanh(ops.dense(x, kernel["up"], recipe=recipe, scaling_state=state))
        return jnp.mean(x**2)

    return loss


def params_of(rng, layers=2):
    return {"layers": [{"up": normal(rng, 64, 64, scale=0.1)} for _ in range(layers)]}


def test_a_layer_with_outliers_is_found(rng):
    """The recipe is that of the comparison: the model has none."""
    params, fault = params_of(rng), int(rng.integers(2))
    params["layers"][fault]["up"][3, 5] = 1e4
    x = normal(rng, 96, 64)
    found = compare(model(), params, x, recipe=CurrentScaling())
    # By y: a gradient that passed through the outlier may have outliers too, and harm a layer before.
    worst, second = sorted(found.layers, key=lambda row: -row.y)
    assert worst.layer == f"layers/{fault}/up"
    assert worst.y > 3 * second.y
    assert worst.tensor.startswith("kernel, ")
    assert worst.tensor.endswith("underflow")
    assert found.forward == tuple(f"layers/{i}/up" for i in range(2))
    assert found.first_nonfinite is None
    # Each row has a scale of its own: the outlier harms one of 64.
    (of_rows,) = compare(model(), {"layers": [params["layers"][fault]]}, x, recipe=RowwiseScaling()).layers
    assert of_rows.y < 0.5 * worst.y


def test_a_stale_scale_is_found(rng):
    """The history of delayed scaling is far too small in one layer, as after a restart from another checkpoint."""
    recipe, fault = DelayedScaling(history_len=2), int(rng.integers(2))

    def state(amax):
        history, of_gradients = (np.full(2, value, np.float32) for value in (amax, 1e-2))
        return type(recipe.init())(history, history, of_gradients, np.float32(1))

    states = [state(0.05 if i == fault else 4.0) for i in range(2)]
    found = compare(model(recipe), params_of(rng) | {"states": states}, normal(rng, 96, 64))
    assert found.layers[0].layer == f"layers/{fault}/up"
    assert found.layers[0].y > 3 * found.layers[1].y
    assert found.layers[0].tensor.endswith("saturated")


def stack_loss(kernels, x):
    block = jax.checkpoint(lambda x, kernel: jnp.tanh(ops.dense(x, kernel, recipe=BlockScaling())))
    return jnp.mean(jax.lax.scan(lambda x, kernel: (block(x, kernel), None), x, kernels)[0])


def test_the_first_gradient_that_is_not_finite_is_found(rng):
    """In a scan with remat, whose backward pass goes from the last layer to the first."""
    kernels, x = normal(rng, 4, 64, 64, scale=0.1), normal(rng, 32, 64)
    kernels[2, 7, 7] = np.nan
    found = compare(lambda params, x: stack_loss(params["stack"], x), {"stack": kernels}, x)
    assert found.first_nonfinite == "stack[3]"  # it gets NaN, for layer 2 gave it some
    assert found.layers[0].nonfinite > 0
    assert "the backward pass is not finite from stack[3] on" in str(found)


@functools.partial(jax.jit, static_argnames="recipe")
def result_and_gradients(x, kernel, dy, recipe):
    y, vjp = jax.vjp(lambda x, kernel: ops.dense(x, kernel, recipe=recipe), x, kernel)
    return y, *vjp(dy)


@pytest.mark.parametrize("scale", [1e-18, 1e18])
def test_errors_are_those_of_numpy(scale, rng):
    x, kernel, dy = np.float32(scale) * normal(rng, 48, 64), normal(rng, 64, 32), normal(rng, 48, 32)
    recipe = CurrentScaling()

    def loss(params, x, dy):
        return jnp.sum(ops.dense(x, params["up"], recipe=recipe) * dy)

    (row,) = compare(loss, {"up": kernel}, x, dy).layers
    values = dict(zip(("y", "dx", "dkernel"), result_and_gradients(x, kernel, dy, recipe), strict=True))
    x, kernel, dy = (a.astype(np.float64) for a in (x, kernel, dy))
    exact = {"y": x @ kernel, "dx": dy @ kernel.T, "dkernel": x.T @ dy}
    for name, value in values.items():
        squares, errors = exact[name] ** 2, (np.asarray(value, np.float64) - exact[name]) ** 2
        wanted = max(np.sqrt(np.mean(errors.sum(axis) / squares.sum(axis))) for axis in (0, 1))
        assert getattr(row, name) == pytest.approx(wanted, rel=1e-4)
        assert 0.01 < wanted < 0.1


@pytest.mark.parametrize(("products", "contracting"), [(("forward", "wgrad"), "first"), (("dgrad", "wgrad"), "last")])
def test_errors_of_the_head_are_those_of_numpy(products, contracting, rng):
    x, kernel, labels = normal(rng, 48, 64), normal(rng, 64, 32, scale=0.1), rng.integers(0, 32, 48)
    recipe, is_last = CurrentScaling(), contracting == "last"

    def loss(params, x, **options):
        options |= {"recipe": recipe, "fp8_products": products, "kernel_contracting": contracting}
        return ops.linear_cross_entropy(x, params["head"], labels, **options)

    params = {"head": kernel.T if is_last else kernel}
    (row,) = compare(loss, params, x, argnums=(0, 1)).layers
    assert row.layer == "head"
    in_fp8 = "forward" in products
    logits = result_and_gradients(x, kernel, normal(rng, 48, 32), recipe)[0] if in_fp8 else x @ kernel
    logits = np.asarray(logits, np.float64)
    gradients, dx = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x)
    shares = np.exp(logits - logits.max(1, keepdims=True))
    dy = (shares / shares.sum(1, keepdims=True) - np.eye(32)[labels]) / 48
    x64, kernel64 = x.astype(np.float64), kernel.astype(np.float64)
    found = {
        "y": ("forward", logits, x64 @ kernel64),
        "dx": ("dgrad", dx, dy @ kernel64.T),
        "dkernel": ("wgrad", gradients["head"], dy.T @ x64 if is_last else x64.T @ dy),
    }
    for name, (product, value, exact) in found.items():
        if product not in products:
            assert np.isnan(getattr(row, name))
            continue
        errors = (np.asarray(value, np.float64) - exact) ** 2
        wanted = max(np.sqrt(np.mean(errors.sum(axis) / (exact**2).sum(axis))) for axis in (0, 1))
        assert getattr(row, name) == pytest.approx(wanted, rel=1e-3)
        assert 0.01 < wanted < 0.1


def test_layers_that_fp8_cannot_take_are_named_below_the_table(rng, tmp_path, monkeypatch):
    """Those with a bias and an activation are compared by their products."""
    params = {"up": normal(rng, 64, 64), "bias": normal(rng, 64), "odd": normal(rng, 2, 64, 3)}

    def loss(params, x):
        h = ops.dense(x, params["up"], params["bias"], activation="gelu")
        sizes = np.array([8, 8], np.int32)
        return jnp.sum(ops.grouped_dense(h, params["odd"], sizes, implementation="reference"))

    found = compare(loss, params, normal(rng, 16, 64), recipe=CurrentScaling(), argnums=(0, 1))
    (row,) = found.layers
    assert row.layer == "up"
    assert all(0.005 < error < 0.15 for error in (row.y, row.dx, row.dkernel)), row
    assert list(found.plain) == ["odd"]
    assert "kernel has 3 values of `out`" in found.plain["odd"]
    lines = str(found).splitlines()
    assert lines[0].split() == ["layer", "y", "dx", "dkernel", "nonfinite", "worst", "tensor"]
    assert lines[2].startswith("up ")
    assert lines[-1].startswith("odd stays as it is: kernel has 3 values")
    assert hash(found) == hash(found)
    pytest.importorskip("matplotlib")
    found.plot(tmp_path / "errors.png")
    assert (tmp_path / "errors.png").stat().st_size > 1000
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(ImportError, match="a plot needs matplotlib"):
        found.plot(tmp_path / "again.png")


def test_experts_and_mlps(rng):
    """Gated MLPs and experts are compared product by product."""
    x, sizes = normal(rng, 256, 64), np.array([128, 128], np.int32)
    params = {"gate": normal(rng, 64, 32), "up": normal(rng, 64, 32), "down": normal(rng, 32, 64)}
    params |= {"experts": normal(rng, 2, 64, 32)}
    # GPUs have plain products of experts in this dtype alone.
    params, x = jax.tree.map(lambda value: value.astype(jnp.bfloat16), (params, x))

    def loss(params, x):
        kernels = tuple(params[name] for name in ("gate", "up", "down"))
        y = ops.gated_mlp(x, kernels, recipe=BlockScaling()) * 0.01
        return jnp.mean(ops.grouped_dense(y, params["experts"], sizes, recipe=BlockScaling()) ** 2)

    found = compare(loss, params, x, argnums=(0, 1))
    assert {row.layer for row in found.layers} == {"gate", "up", "down", "experts"}
    for row in found.layers:
        for error in (row.y, row.dx, row.dkernel):
            assert 0.005 < error < 0.15, row


def test_collective_products(rng, require_devices):
    """Plain ones gather and scatter too."""
    require_devices(2)
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    params = {"up": normal(rng, 64, 128), "down": normal(rng, 128, 64)}

    def local(params, x):
        options = {"axis_name": "tp", "recipe": CurrentScaling()}
        h = parallel.all_gather_matmul(x, params["up"], gather_dimension=0, **options)
        return parallel.matmul_reduce_scatter(jnp.tanh(h), params["down"], scatter_dimension=0, **options)

    specs = {"up": P(None, "tp"), "down": P("tp")}, P("tp")
    function = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("tp"))
    found = compare(lambda params, x: jnp.mean(function(params, x) ** 2), params, normal(rng, 32, 64), argnums=(0, 1))
    assert {row.layer for row in found.layers} == {"up", "down"}
    for row in found.layers:
        for error in (row.y, row.dx, row.dkernel):
            assert 0.005 < error < 0.15, row


def test_refusals(rng):
    x = normal(rng, 16, 64)
    with pytest.raises(ValueError, match="it must be a recipe without a state"):
        compare(model(), params_of(rng), x, recipe=DelayedScaling())
    with pytest.raises(ValueError, match="loss has no layer in FP8: give its layers a recipe"):
        compare(lambda params, x: jnp.sum(x), np.ones(3, np.float32), x)
    assert debug.compare is compare
