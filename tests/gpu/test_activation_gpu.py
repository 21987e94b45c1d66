"""Activations in FP8 on a GPU: forward and backward against float64, with aligned and odd shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.activation_oracle import GPT_OSS, GRADIENTS, KINDS, check_gradients, check_result, draw
from ops.quantize_oracle import E5M2, quantization_of

from te_jax import ops
from te_jax.inspect import buffers
from te_jax.ops._activation_kernels import activation_gradients_quantized
from te_jax.ops._quantize_kernels import Request
from te_jax.reference.activation import Function

pytestmark = pytest.mark.gpu

SHAPES = [(256, 384), (100, 48), (33, 17), (1, 130), (130, 4096)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])


@each_dtype
@each_shape
def test_results(shape, dtype, rng):
    gate, up = draw(rng, shape, dtype)
    for pair in ("tensor", "1x128", "128x128", "1x128 and square", "square and 1x128"):
        for copies in ("both", "data", "transposed"):
            check_result("silu", gate, up, quantization_of(pair), "native", copies=copies, **GPT_OSS)
        check_result("gelu", gate, None, quantization_of(pair, E5M2), "native")
    check_result("silu", gate, up, quantization_of("tensor"), "native", amax=jnp.float32(3))


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind, rng):
    gate, up, dy = draw(rng, (256, 400), count=3)
    for operands in ((gate, up), (gate, None)):
        for pair in ("tensor", "1x128 and square"):
            check_result(kind, *operands, quantization_of(pair), "native")
        for case in ("current", "blocks"):
            check_gradients(Function(kind), *operands, dy, *GRADIENTS[case], True)


@each_dtype
@each_shape
def test_gradients(shape, dtype, rng):
    gate, up, dy = draw(rng, shape, dtype, count=3)
    function = Function("silu", **GPT_OSS)
    for case in ("current", "blocks", "square blocks", "without y"):
        for copies in ("both", "data", "transposed"):
            check_gradients(function, gate, up, dy, *GRADIENTS[case], True, copies=copies)
        check_gradients(Function("gelu"), gate, None, dy, *GRADIENTS[case], True)
    amaxes = tuple(jnp.float32(amax) for amax in (1.0, 20.0, 3.0))
    check_gradients(function, gate, up, dy, *GRADIENTS["current"], True, amaxes=amaxes)


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
                    Function("silu"), gate, up, dy, None, None, None, request, activation, True
                ),
            )  # fmt: skip

        found = jax.jit(jax.vmap(run))(gate, up, dy)
        for i in range(shape[0]):
            alone = jax.jit(run)(gate[i], up[i], dy[i])
            for whole, part in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
                assert np.asarray(whole[i]).tobytes() == np.asarray(part).tobytes()


def test_memory(rng):
    """Nothing but the results, amaxes and partial sums is allocated."""
    gate, up, dy = draw(rng, (2048, 4096), count=3)
    for gradient, activation in (GRADIENTS["current"], GRADIENTS["blocks"]):
        request = Request(gradient, 1, "both", (), (), True, True)

        def run(gate, up, dy, request=request, activation=activation):
            return activation_gradients_quantized(
                Function("silu"), gate, up, dy, None, None, None, request, activation, True
            )

        compiled = jax.jit(run).lower(gate, up, dy).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 0.05 * gate.nbytes
        assert [b for b in buffers(compiled, "copy", "copy-start", "transpose") if b.bytes > 1024] == []
        first = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(compiled(gate, up, dy))]
        for _ in range(5):
            assert [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(compiled(gate, up, dy))] == first
