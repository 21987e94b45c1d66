"""What XLA makes of offload on an H200: that every copy hides behind products, and that memory is saved."""

import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from h200 import compiled, copies, know_handlers, needs_compiler
from jax.ad_checkpoint import checkpoint_name

import te_jax.optim
from te_jax.layers import apply_layers, scan_layers
from te_jax.offload import LAYER_INPUT, Offload, stack

LAYERS, HIDDEN, MLP, TOKENS = 10, 1024, 4096, 8192
INPUT, WIDE = 2 * TOKENS * HIDDEN, 2 * TOKENS * MLP  # bytes
KEEP_WIDE = jax.checkpoint_policies.save_only_these_names("wide")


def layer(x, params):
    wide = checkpoint_name(x @ params["up"], "wide")
    return x + jax.nn.silu(wide) @ params["down"]


def gradient(remat, offload):
    def loss(params, x):
        return jnp.sum(jnp.square(apply_layers(layer, params, x, remat=remat, offload=offload).astype(jnp.float32)))

    up, down = jnp.zeros((HIDDEN, MLP), jnp.bfloat16), jnp.zeros((MLP, HIDDEN), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((TOKENS, HIDDEN), jnp.bfloat16)
    return compiled(jax.grad(loss, argnums=(0, 1)), [{"up": up, "down": down}] * LAYERS, x)


@needs_compiler
@pytest.mark.parametrize(
    ("remat", "names", "each", "fp8"),
    [
        (True, [LAYER_INPUT], INPUT, False),
        (KEEP_WIDE, ["wide"], WIDE, False),
        (KEEP_WIDE, ["wide"], WIDE // 2, True),
        (KEEP_WIDE, ["wide", LAYER_INPUT], INPUT + WIDE, False),
    ],
    ids=["input", "wide", "wide in FP8", "both"],
)
def test_copies_hide_and_memory_is_saved(remat, names, each, fp8, monkeypatch):
    monkeypatch.setattr("te_jax.native.use_native", lambda *_, **__: False)  # there is no GPU to load kernels on
    program = gradient(remat, Offload(names=names, quantize=fp8))
    found = copies(program)
    count = (LAYERS - 1) * len(names)
    assert [copy.to_host for copy in found] == [True] * count + [False] * count
    assert all(copy.gemms > 0 for copy in found)
    memory, without = program.memory_analysis(), gradient(remat, None).memory_analysis()
    assert memory.host_temp_size_in_bytes == (LAYERS - 1) * each
    kept = (LAYERS - 1) * (INPUT * (LAYER_INPUT in names) + WIDE * ("wide" in names))
    # Some are on the device at any time: what leaves while the next layer runs, or comes.
    assert without.temp_size_in_bytes - memory.temp_size_in_bytes > kept * (LAYERS - 8) / (LAYERS - 1)


@needs_compiler
@pytest.mark.parametrize("slots", [1, 3])
def test_a_copy_has_the_time_of_as_many_layers_as_there_are_slots(slots, monkeypatch):
    monkeypatch.setattr("te_jax.native.use_native", lambda *_, **__: False)
    found = copies(gradient(KEEP_WIDE, Offload(names=["wide"], keep=4, slots=slots)))
    to_host = [copy.gemms for copy in found if copy.to_host]
    assert len(to_host) == LAYERS - 4
    of_layer = 2
    assert all(of_layer * slots <= gemms <= of_layer * (slots + 1) for gemms in to_host[:-1])


@needs_compiler
@pytest.mark.parametrize(
    ("remat", "names", "each"),
    [(True, [LAYER_INPUT], INPUT), (KEEP_WIDE, ["wide", LAYER_INPUT], INPUT + WIDE)],
    ids=["input", "both"],
)
def test_a_scan_has_one_stack_in_host_memory_and_no_copy_of_it(remat, names, each, monkeypatch):
    """XLA copies neither the stack nor the slots, which te_jax's calls write unseen by it."""
    know_handlers()
    monkeypatch.setattr("te_jax.native.use_native", lambda *_, **__: True)

    def scan(offload, stacks=1):
        def loss(params, x):
            runs = [scan_layers(layer, params, x + i, remat=remat, offload=offload) for i in range(stacks)]
            # A product, so that every stack is there before the first backward pass.
            return math.prod(jnp.sum(jnp.square(y.astype(jnp.float32))) for y in runs)

        up, down = (jnp.zeros((LAYERS, *shape), jnp.bfloat16) for shape in ((HIDDEN, MLP), (MLP, HIDDEN)))
        x = jax.ShapeDtypeStruct((TOKENS, HIDDEN), jnp.bfloat16)
        return compiled(jax.grad(loss, argnums=(0, 1)), {"up": up, "down": down}, x)

    offload = Offload(names=names)
    for stacks in (1, 2):
        program = scan(offload, stacks)
        text = program.as_text()
        assert not re.search(r"S\(5\).* copy(-start)?\(|u8\[\d+,\d+\].* copy\(", text)
        assert text.count('"AllocateBuffer"') == stacks
        memory = program.memory_analysis()
        assert memory.host_temp_size_in_bytes == stacks * (LAYERS - 1) * each
    without = scan(None).memory_analysis()
    saved = without.temp_size_in_bytes - scan(offload).memory_analysis().temp_size_in_bytes
    # Without the slots and the last row, and what is on its way.
    assert saved > LAYERS * each - (2 + 2) * each


@needs_compiler
def test_many_residuals_of_a_layer_hide_too(monkeypatch):
    """One copy for each layer: XLA begins a third only when the first has ended, and the GPU waits for that."""
    names = ("a", "b", "c", "d")
    monkeypatch.setattr(stack, "is_whole", lambda: True)  # as where JAX has one device

    def run(x, params):
        for name in names:
            x = x + jnp.sin(checkpoint_name(x @ params, name))
        return x

    def loss(params, x):
        offload = Offload(names=names, min_size=0)
        keep = jax.checkpoint_policies.save_only_these_names(*names)
        return jnp.sum(jnp.square(apply_layers(run, params, x, remat=keep, offload=offload).astype(jnp.float32)))

    kernel = jnp.zeros((HIDDEN, HIDDEN), jnp.bfloat16)
    program = compiled(
        jax.grad(loss, argnums=(0, 1)), [kernel] * LAYERS, jax.ShapeDtypeStruct((TOKENS, HIDDEN), jnp.bfloat16)
    )
    found = copies(program)
    assert [copy.to_host for copy in found] == [True] * (LAYERS - 1) + [False] * (LAYERS - 1)
    assert all(copy.gemms >= len(names) for copy in found)


@needs_compiler
@pytest.mark.parametrize("moments", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_state_comes_while_state_leaves(moments):
    """The state comes from the host in this program, for XLA does not learn here that an operand lies there."""
    count = 6
    optimizer = te_jax.optim.offload(te_jax.optim.adamw(1e-3, mu_dtype=moments, nu_dtype=moments))
    params = {str(i): jax.ShapeDtypeStruct((2048, 1024), jnp.float32) for i in range(count)}
    state = jax.eval_shape(optimizer.init, params)

    def step(gradients, state, params):
        state = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host) if x.ndim else x, state)
        state, gradients = jax.lax.optimization_barrier((state, gradients))
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    program = compiled(step, params, state, params, donate_argnums=2)
    found = copies(program)[2 * count :]  # without those that bring it there
    assert [copy.to_host for copy in found].count(True) == [copy.to_host for copy in found].count(False) == 2 * count
    for place, copy in enumerate(found):
        beside = [other for other in found if other is not copy and other.start < copy.done and copy.start < other.done]
        assert all(other.to_host != copy.to_host for other in beside)  # one each way
        if 4 <= place < len(found) - 4:
            assert len(beside) == 1
    one = 2048 * 1024 * jnp.dtype(moments).itemsize * 2  # both moments of a parameter
    assert program.memory_analysis().temp_size_in_bytes < 4 * one + 2048 * 1024 * 4 * count  # and the updates
