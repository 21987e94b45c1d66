"""Activations in FP8 on a GPU: forward and backward against float64, with aligned and odd shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.activation_oracle import (
    GPT_OSS,
    GRADIENTS,
    KINDS,
    check_gradients,
    check_result,
    check_weighted_result,
    draw,
    draw_weights,
)
from ops.quantize_oracle import E5M2, assert_bits, quantization_of

from te_jax import ops
from te_jax.hlo import buffers
from te_jax.ops import Activation
from te_jax.ops._activation_kernels import activate_quantized, activation_gradients_quantized
from te_jax.ops._quantize_kernels import Request

pytestmark = pytest.mark.gpu

SHAPES = [(256, 384), (100, 48), (33, 17), (1, 130), (130, 4096)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])


@each_dtype
@each_shape
def test_results(shape, dtype, rng):
    gate, up = draw(rng, shape, dtype)
    for pair in ("tensor", "1x128", "128x128", "1x128 and square", "square and 1x128"):
        for copies in ("both", "data", "transposed"):
            check_result("silu", gate, up, quantization_of(pair), "native", copies=copies, **GPT_OSS)
        check_result("gelu", gate, None, quantization_of(pair, E5M2), "native")
    check_result("silu", gate, up, quantization_of("tensor"), "native", amax=jnp.float32(3))


@each_dtype
@pytest.mark.parametrize("shape", [(1, 14336), (16, 14336), (300, 2056)], ids=str)
def test_results_without_a_transposed_copy(shape, dtype, rng):
    """With a vector a thread or four, of which the last ones of a row are not all there."""
    gate, up = draw(rng, shape, dtype)
    for pair in ("tensor", "1x128"):
        check_result("silu", gate, up, quantization_of(pair), "native", copies="data", **GPT_OSS)
        check_result("gelu", gate, None, quantization_of(pair, E5M2, True), "native", copies="data")
    weights, function = draw_weights(rng, shape[0]), Activation("silu", **GPT_OSS)
    check_weighted_result(function, gate, up, weights, quantization_of("1x128"), True, copies="data")


@each_dtype
@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_have_the_bits_that_they_have_among_many(kind, dtype, rng):
    gate, up = draw(rng, (300, 2056), dtype)
    weights, request = draw_weights(rng, 300), Request(quantization_of("1x128"), 1, "data", (), (), False, False)
    run = jax.jit(activate_quantized, static_argnums=(0, 4, 5))
    for operands in ((gate, up, weights), (gate, up, None), (gate, None, None)):

        def of_rows(rows, operands=operands):
            gate, up, weights = (None if operand is None else operand[:rows] for operand in operands)
            return run(Activation(kind), gate, up, None, request, True, weights).array

        many = of_rows(300)
        for rows in (1, 4, 64):
            few = of_rows(rows)
            assert_bits(few.data, many.data[:rows])
            assert_bits(few.scale_inv, many.scale_inv[:, :rows])


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind, rng):
    gate, up, dy = draw(rng, (256, 400), count=3)
    for operands in ((gate, up), (gate, None)):
        for pair in ("tensor", "1x128 and square"):
            check_result(kind, *operands, quantization_of(pair), "native")
        for case in ("current", "blocks"):
            check_gradients(Activation(kind), *operands, dy, *GRADIENTS[case], True)


@each_dtype
@each_shape
def test_gradients(shape, dtype, rng):
    gate, up, dy = draw(rng, shape, dtype, count=3)
    function = Activation("silu", **GPT_OSS)
    for case in ("current", "blocks", "square blocks", "without y"):
        for copies in ("both", "data", "transposed"):
            check_gradients(function, gate, up, dy, *GRADIENTS[case], True, copies=copies)
        check_gradients(Activation("gelu"), gate, None, dy, *GRADIENTS[case], True)
    amaxes = tuple(jnp.float32(amax) for amax in (1.0, 20.0, 3.0))
    check_gradients(function, gate, up, dy, *GRADIENTS["current"], True, amaxes=amaxes)


@each_dtype
@each_shape
def test_weights_of_rows(shape, dtype, rng):
    """Into memory that held NaN."""
    gate, up, dy = draw(rng, shape, dtype, count=3)
    weights, function = draw_weights(rng, shape[0]), Activation("silu", **GPT_OSS)

    def poison():
        for size in (gate.size, weights.size * -(-shape[1] // 128)):
            jax.block_until_ready([jnp.full(size, jnp.nan, jnp.float32) for _ in range(8)])

    for pair in ("1x128", "128x128", "1x128 and square", "square and 1x128"):
        for copies in ("both", "data", "transposed"):
            poison()
            check_weighted_result(function, gate, up, weights, quantization_of(pair), True, copies=copies)
        check_weighted_result(Activation("gelu"), gate, None, weights, quantization_of(pair, E5M2), True)
    for case in ("blocks", "square blocks", "without y"):
        for copies in ("both", "data", "transposed"):
            poison()
            check_gradients(
                function, gate, up, dy, *GRADIENTS[case], True, copies=copies, weights=weights, with_amax=False
            )
        check_gradients(Activation("gelu"), gate, None, dy, *GRADIENTS[case], True, weights=weights, with_amax=False)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_with_kinds(kind, rng):
    gate, up, dy = draw(rng, (256, 400), count=3)
    weights = draw_weights(rng, 256)
    for operands in ((gate, up), (gate, None)):
        for copies in ("both", "data"):
            check_weighted_result(
                Activation(kind), *operands, weights, quantization_of("1x128 and square"), True, copies=copies
            )
        check_gradients(Activation(kind), *operands, dy, *GRADIENTS["blocks"], True, weights=weights, with_amax=False)


@pytest.mark.parametrize("shape", [(3, 200, 333), (5, 128, 256)], ids=str)
def test_weights_of_examples_of_a_vmap(shape, rng):
    gate, up, dy = draw(rng, shape, count=3)
    weights = draw_weights(rng, shape[:-1])
    gradient, activation = GRADIENTS["blocks"]

    def run(gate, up, dy, weights):
        return (
            activate_quantized(
                Activation("silu"), gate, up, None, Request(activation, 1, "data", (), (), False, False), True, weights
            ),
            activation_gradients_quantized(
                Activation("silu"), gate, up, dy, None, None, None, Request(gradient, 1, "both", (), (), False, True),
                activation, True, weights,
            ),
        )  # fmt: skip

    found = jax.jit(jax.vmap(run))(gate, up, dy, weights)
    again = jax.jit(jax.vmap(run))(gate, up, dy, weights)
    for first, second in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
        assert np.asarray(first).tobytes() == np.asarray(second).tobytes()
    for i in range(shape[0]):
        alone = jax.jit(run)(gate[i], up[i], dy[i], weights[i])
        for whole, part in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
            if part.dtype == np.float32 and part.shape == (shape[1],):  # partial sums, which XLA adds in another order
                np.testing.assert_allclose(np.asarray(whole[i]), np.asarray(part), atol=1e-3)
            else:
                assert np.asarray(whole[i]).tobytes() == np.asarray(part).tobytes()


def test_rows_that_hold_anything_leave_others_alone(rng):
    """In the copy as it is, and in the gradients of weights."""
    gate, up, dy = (np.array(x) for x in draw(rng, (200, 272), count=3))
    weights, function = np.array(draw_weights(rng, 200)), Activation("silu")
    request = Request(quantization_of("1x128"), 1, "data", (), (), False, False)

    def run():
        y = activate_quantized(function, gate, up, None, request, True, weights).array
        parts = activation_gradients_quantized(
            function, gate, up, dy, None, None, None, request, None, True, weights
        )  # fmt: skip
        copies = [array.data for array in (y, parts[0].array, parts[1].array)]
        return [*(np.asarray(copy).astype(np.float32) for copy in copies), np.asarray(parts[3])]

    before = run()
    gate[150:] = up[150:] = dy[150:] = weights[150:] = np.nan
    for found, wanted in zip(run(), before, strict=True):
        np.testing.assert_array_equal(found[:150], wanted[:150])


@pytest.mark.parametrize("shape", [(3, 200, 333), (5, 128, 256)], ids=str)
def test_examples_of_a_vmap(shape, rng):
    """Every example has scales of its own, and starts at any alignment."""
    gate, up, dy = draw(rng, shape, count=3)
    for gradient, activation in (GRADIENTS["current"], GRADIENTS["blocks"]):
        request = Request(gradient, 1, "both", (), (), True, True)

        def run(gate, up, dy, request=request, activation=activation):
            return (
                ops.gated_activation(gate, up, quantization=activation, with_amax=True, implementation="native"),
                activation_gradients_quantized(
                    Activation("silu"), gate, up, dy, None, None, None, request, activation, True
                ),
            )  # fmt: skip

        found = jax.jit(jax.vmap(run))(gate, up, dy)
        for i in range(shape[0]):
            alone = jax.jit(run)(gate[i], up[i], dy[i])
            for whole, part in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
                assert np.asarray(whole[i]).tobytes() == np.asarray(part).tobytes()


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_memory(weighted, rng):
    """Nothing but the results, amaxes and partial sums is allocated, and results are the same again."""
    gate, up, dy = draw(rng, (2048, 4096), count=3)
    weights = draw_weights(rng, 2048) if weighted else None
    for gradient, activation in (GRADIENTS["current"], GRADIENTS["blocks"])[weighted:]:
        request = Request(gradient, 1, "both", (), (), not weighted, True)

        def run(gate, up, dy, request=request, activation=activation):
            return activation_gradients_quantized(
                Activation("silu"), gate, up, dy, None, None, None, request, activation, True, weights
            )

        compiled = jax.jit(run).lower(gate, up, dy).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 0.05 * gate.nbytes
        assert [b for b in buffers(compiled, "copy", "copy-start", "transpose") if b.bytes > 1024] == []
        first = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(compiled(gate, up, dy))]
        for _ in range(5):
            assert [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(compiled(gate, up, dy))] == first
