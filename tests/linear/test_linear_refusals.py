"""What layers of every kind refuse, since gradients, sums or states would silently be lost or wrong."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from linear_layers import FALLS_BACK, KINDS, MORE, every_kind, layers, without

from te_jax import ops, parallel
from te_jax.layers import Router, moe
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, Fake, MXFP8Scaling, products

pytestmark = pytest.mark.usefixtures("native_kernels")

DELAYED = DelayedScaling(history_len=2)


def total(ys):
    return sum(map(jnp.sum, ys))


@pytest.fixture
def case(layer, rng):
    return layer.draw(rng)


@every_kind
def test_an_accumulator_has_to_be_differentiated(layer, case):
    """It would swallow the gradient of the kernel."""
    x, kernels, before, _ = case

    def loss(x, kernels):
        return total(layer(x, kernels, before))

    with pytest.raises(ValueError, match="differentiate with respect to wgrad_accumulator"):
        jax.eval_shape(jax.grad(loss, argnums=1), x, kernels)
    jax.eval_shape(jax.grad(loss), x, kernels)


@every_kind
def test_second_derivatives(layer, case):
    """As those of a gradient penalty are."""
    x, kernels, before, _ = case

    def penalty(x):
        return jnp.sum(jax.grad(lambda x: total(map(jnp.sin, layer(x, kernels, before))))(x) ** 2)

    with pytest.raises(NotImplementedError, match=r"differentiated once|first derivatives in reverse mode"):
        jax.eval_shape(jax.grad(penalty), x)


BRANCHES = {name: (KINDS | MORE)[name] for name in ("dense", "dense, none", "grouped_dense", "gated_mlp")}


@layers(BRANCHES)
def test_an_accumulator_in_a_branch(layer, case):
    """Its gradient would be zeros where the branch is not taken, and the sum of earlier microbatches lost."""
    x, kernels, before, _ = case

    def run(before):
        return total(layer(x, kernels, before))

    def of_cond(before, run=run):
        return lax.cond(x[0, 0] > 0, run, lambda _: 0.0, before)

    for function in (of_cond, functools.partial(of_cond, run=jax.jit(run)), jax.checkpoint(of_cond)):
        with pytest.raises(ValueError, match=r"wgrad_accumulator.* is given in a branch.*Take the gradient in"):
            jax.eval_shape(jax.grad(function), before)
    with pytest.raises(ValueError, match="in a branch"):
        jax.eval_shape(jax.grad(lambda before: lax.switch(1, [lambda: run(before), lambda: 0.0])), before)
    jax.eval_shape(lambda before: lax.cond(x[0, 0] > 0, jax.grad(run), lambda before: before, before), before)


@layers(BRANCHES)
def test_an_accumulator_of_a_vmap_without_examples(layer, case):
    x, kernels, before, _ = case

    def sum_of(before):
        return jnp.sum(jax.vmap(lambda x: total(layer(x, kernels, before)))(jnp.zeros((0, *x.shape))))

    with pytest.raises(ValueError, match="wgrad_accumulator is shared by the 0 examples of a vmap"):
        jax.eval_shape(jax.grad(sum_of), before)


WITH_ACCUMULATOR = {
    "dense": lambda x, kernel, sums: ops.dense(x, kernel[0], wgrad_accumulator=sums[0]),
    "gated_mlp": lambda x, kernel, sums: ops.gated_mlp(x, (*kernel, kernel[0]), wgrad_accumulator=(*sums, sums[0])),
    "grouped_dense": lambda x, kernel, sums: ops.grouped_dense(x, kernel, np.full(2, 8), wgrad_accumulator=sums),
    "moe": lambda x, kernel, sums: moe(x, x[:, :2], (kernel,) * 3, Router(1), wgrad_accumulator=(sums,) * 3).y,
    "linear_cross_entropy": lambda x, kernel, sums: ops.linear_cross_entropy(
        x, kernel[0], np.zeros(16, int), wgrad_accumulator=sums[0]
    ),
}


@pytest.mark.parametrize("run", WITH_ACCUMULATOR.values(), ids=WITH_ACCUMULATOR)
@FALLS_BACK
def test_an_accumulator_that_devices_share_inside_shard_map(run, make_mesh):
    """JAX would sum over devices what each has added up already."""
    mesh = make_mesh({"data": AxisType.Auto})
    gradient = jax.grad(lambda sums, x, kernel: lax.psum(run(x, kernel, sums).sum(), "data"))
    mapped = jax.shard_map(gradient, mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=P())
    with pytest.raises(ValueError, match=r"wgrad_accumulator\S* is the same on all devices along \['data'\]"):
        jax.eval_shape(mapped, jnp.zeros((2, 16, 16)), jnp.ones((16 * mesh.size, 16)), jnp.ones((2, 16, 16)))


@every_kind
def test_quantized_operands_without_a_way_for_their_gradients(layer, case):
    x, kernels, _, _ = case
    with pytest.raises(NotImplementedError, match=r"kernel\S* is a QuantizedArray without straight_through"):
        jax.eval_shape(jax.grad(lambda kernels: total(layer.of_quantized(x, kernels))), kernels)
    jax.eval_shape(jax.grad(lambda x: total(layer.of_quantized(x, kernels))), x)
    one = "data" if layer.transposed else "transposed"
    with pytest.raises(ValueError, match=r"kernel\S* has no (data|transposed) copy, which the gradient"):
        jax.eval_shape(jax.grad(lambda x: total(layer.of_quantized(x, kernels, copies=one))), x)


@without("experts_mlp")  # it takes no x in FP8
def test_an_x_in_fp8_without_a_way_for_its_gradient(layer, case):
    x, kernels, _, _ = case

    def loss(x, kernels, **options):
        by_blocks = layer.by(BlockScaling())  # where a gather does not transpose the data
        return total(by_blocks.of_quantized_x(x, kernels, straight_through=False, **options))

    with pytest.raises(NotImplementedError, match=r"x is a QuantizedArray without straight_through"):
        jax.eval_shape(jax.grad(loss), x, kernels)
    jax.eval_shape(jax.grad(loss, argnums=1), x, kernels)
    with pytest.raises(ValueError, match=r"x has no transposed copy, which the gradient with respect to kernel"):
        jax.eval_shape(jax.grad(functools.partial(loss, copies="data"), argnums=1), x, kernels)


@without("experts_mlp")  # whose recipe has no state
def test_training_without_the_next_state(layer, case):
    """A loop that forgets the state would keep scales of 1 for ever."""
    x, kernels, before, _ = case
    layer, states = layer.by(DELAYED), (DELAYED.init(),) * len(kernels)

    def gradient(argnums, before=None):
        def loss(x, kernels, before, states):
            return total(layer(x, kernels, before, states))

        jax.eval_shape(jax.grad(loss, argnums), x, kernels, before, states)

    for argnums, accumulators in ((1, None), (2, before)):
        with pytest.raises(ValueError, match="the kernel is differentiated and scaling_state is not"):
            gradient(argnums, accumulators)
    gradient(0)  # frozen kernels
    gradient((1, 3))


@without("experts_mlp", "gated_mlp", "parallel.gated_mlp", "matmul_reduce_scatter")
def test_errors_name_one_of_several_kernels(layer, case):
    x, kernels, before, _ = case

    def refused(message, kernels=kernels, before=None, states=None, recipe=layer.recipe):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(lambda *operands: layer.by(recipe)(*operands), x, kernels, before, states)

    refused(r"kernel\[1\] has shape", kernels=(kernels[0], np.swapaxes(kernels[1], -1, -2)[..., :32, :]))
    refused(r"wgrad_accumulator\[1\] has shape", before=(before[0], before[0][..., :16]))
    refused(r"kernel is a tuple of 2, so scaling_state must be one too", states=(DELAYED.init(),), recipe=DELAYED)
    refused(r"scaling_state\[0\] is None; DelayedScaling needs", recipe=DELAYED)
    refused(r"scaling_state\S* is given, but recipe is", states=(DELAYED.init(),) * 2)
    refused(r"scaling_state\S* has activation of shape \(8,\) and dtype float32; for history_len=2 it must be float32",
            states=(DelayedScaling(history_len=8).init(),) * 2, recipe=DELAYED)  # fmt: skip


def test_recipes_of_products():
    x, kernel, recipe = np.ones((32, 64), np.float32), np.ones((64, 32), np.float32), products(forward=CurrentScaling())
    quantize = functools.partial(ops.quantize, quantization=CurrentScaling().quantization("kernel"))

    def gathered(x, kernel, recipe=recipe):
        mesh = jax.make_mesh((1,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
        local = functools.partial(parallel.all_gather_matmul, axis_name="tp", recipe=recipe)
        return jax.shard_map(local, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P("tp"))(x, kernel)

    quantized = r"(x|kernel) is a QuantizedArray, and recipe is ProductRecipes"
    for message, call in (
        (quantized, lambda: ops.grouped_dense(x, jax.vmap(quantize)(kernel[None]), np.int32([32]), recipe=recipe)),
        (quantized, lambda: gathered(x, quantize(kernel))),
        (quantized + r".*: pass x unquantized", lambda: ops.dense(quantize(x), kernel, recipe=recipe)),
        ("collective products have no blocks of 32", lambda: gathered(x, kernel, products(wgrad=MXFP8Scaling()))),
        ("collective products have no blocks of 32", lambda: gathered(x, kernel, MXFP8Scaling())),
        ("one recipe for all three products is needed here",
         lambda: ops.linear_cross_entropy(x, kernel, np.zeros(32, np.int32), recipe=recipe)),
        ("only DelayedScaling has a state",
         lambda: ops.dense(x, kernel, recipe=recipe, scaling_state=DELAYED.init())),
        ("forward, dgrad and wgrad are None; for a layer without FP8 pass recipe=None", products),
        ("dgrad is DelayedScaling.*, whose state belongs to all products of a layer", lambda: products(dgrad=DELAYED)),
        (r"wgrad is ProductRecipes.*; it must be one recipe", lambda: products(wgrad=recipe)),
        ("recipe is 3; it must be one recipe", lambda: Fake(3)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(lambda call=call: call() and None)
