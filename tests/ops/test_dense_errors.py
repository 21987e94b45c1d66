"""Every refused argument is named, with its value and the rule."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from quantize_oracle import quantize

from te_jax import native, ops, recipe
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, DelayedScalingState, Recipe

CURRENT, BLOCK, DELAYED = CurrentScaling(), BlockScaling(), DelayedScaling(history_len=4)
X = np.zeros((32, 64), jnp.bfloat16)
KERNEL = np.zeros((64, 48), jnp.bfloat16)
BIAS = np.zeros(48, jnp.bfloat16)
QUANTIZED = quantize(KERNEL, CURRENT.quantization("kernel"))
HISTORY = np.zeros(4, np.float32)
STATE_OF_BFLOAT16 = DelayedScalingState(HISTORY, HISTORY.astype(jnp.bfloat16), HISTORY, np.ones((), np.float32))
SHORT_STATE = DelayedScalingState(HISTORY, HISTORY, HISTORY[:1], np.ones((), np.float32))


@pytest.mark.parametrize(
    ("x", "kernel", "bias", "options", "message"),
    [
        (X.astype(jnp.int32), KERNEL, None, {}, "x has dtype int32; it must be float32, bfloat16 or float16"),
        (X.astype(jnp.float8_e4m3fn), KERNEL, None, {}, "x has dtype float8_e4m3fn"),
        (X, KERNEL.astype(jnp.complex64), None, {}, "kernel has dtype complex64"),
        (X, KERNEL, BIAS.astype(jnp.int8), {}, "bias has dtype int8"),
        (X, KERNEL, BIAS[:16], {}, "bias has shape (16,); for a kernel of shape (64, 48) it must be (48,)"),
        (X, KERNEL[:32], None, {}, "kernel has shape (32, 48), whose first dimensions (32,) are contracted"),
        (X, KERNEL, None, {"kernel_contracting": "last"},
         "kernel has shape (64, 48), whose last dimensions (48,) are contracted; the last ones of x (the inputs) must "
         "be the same, and x has shape (32, 64): pass kernel_contracting='first'"),
        (X, KERNEL.T, None, {}, "x has shape (32, 64): pass kernel_contracting='last'"),
        (X, KERNEL, None, {"kernel_contracting": "rows"}, "kernel_contracting is 'rows'; it must be 'first' or 'last'"),
        (X, KERNEL, None, {"contracting_ndim": 0}, "contracting_ndim is 0; it must be an integer of at least 1"),
        (X, KERNEL, None, {"contracting_ndim": True}, "contracting_ndim is True; it must be an integer of at least 1"),
        (X, KERNEL, None, {"contracting_ndim": 1.0}, "contracting_ndim is 1.0; it must be an integer of at least 1"),
        (X, KERNEL, None, {"contracting_ndim": 2}, "kernel has shape (64, 48); beside its 2 contracted dimensions"),
        (X[0, 0], KERNEL, None, {}, "x has shape (); contracting_ndim=1 needs at least as many dimensions"),
        (X, KERNEL[:, :0], None, {}, "kernel has shape (64, 0); only the batch may be empty"),
        (X, KERNEL, None, {"activation": "tanh"}, "activation is 'tanh'; it must be one of ('silu', 'gelu', 'relu',"),
        (X, KERNEL, None, {"activation": ops.Activation("silu", limit=7.0)},
         "limit=7.0, offset=0.0); limit and offset are for gated functions: leave them out"),
        (X, KERNEL, None, {"wgrad_accumulator": KERNEL.T}, "wgrad_accumulator has shape (48, 64)"),
        (X, KERNEL, None, {"wgrad_accumulator": KERNEL.astype(jnp.int32)}, "wgrad_accumulator has dtype int32"),
        (X, KERNEL, None, {"implementation": "cuda"}, "implementation is 'cuda'; it must be None"),
        (X, KERNEL, None, {"recipe": CURRENT, "implementation": "cuda"}, "implementation is 'cuda'"),
        (X, KERNEL, None, {"recipe": "current"}, "recipe is 'current'; it must be a Recipe"),
        (X, KERNEL, None, {"recipe": CurrentScaling}, "it must be a Recipe, such as te_jax.recipe.CurrentScaling()"),
        (None, KERNEL, None, {}, "x is None; it must be an array"),
        (X, None, None, {}, "kernel is None; it must be an array"),
        (X, KERNEL, QUANTIZED, {}, "bias is a QuantizedArray"),
        (X, KERNEL, None, {"wgrad_accumulator": QUANTIZED}, "wgrad_accumulator is a QuantizedArray"),
        (X, KERNEL, None, {"accumulate": "no"}, "accumulate is 'no'; it must be True or False"),
        (X, KERNEL, None, {"recipe": DELAYED, "scaling_state": DELAYED.init(), "state_axis": 3},
         "state_axis is 3; it must be the name of a mesh axis, a tuple of several, or None"),
        (X, dataclasses.replace(QUANTIZED, transposed_scale_inv=np.ones(3, np.float32)), None, {"recipe": CURRENT},
         "kernel has scales of shape (3,) and dtype float32; for transposed of shape (48, 64) and 'tensor' scaling"),
        (X, dataclasses.replace(QUANTIZED, scale_inv=np.ones((), jnp.bfloat16)), None, {"recipe": CURRENT},
         "kernel has scales of shape () and dtype bfloat16; for data of shape (64, 48)"),
        (X, dataclasses.replace(QUANTIZED, scale_inv=None), None, {"recipe": CURRENT}, "kernel has no scales; for"),
        (X, dataclasses.replace(QUANTIZED, data=QUANTIZED.data[:32]), None, {"recipe": CURRENT},
         "kernel has data of shape (32, 48) and transposed of shape (48, 64), which are not of one array; quantize"),
        (X, QUANTIZED.without_data().without_transposed(), None, {"recipe": CURRENT},
         "kernel has neither a data nor a transposed copy; quantize it with copies='both'"),
        (X, jax.tree.map(lambda x: np.stack([x] * 3), QUANTIZED), None, {"recipe": CURRENT},
         "kernel has data of shape (3, 64, 48) for 1 outer and 1 summed dimensions; a batch of products is written "
         "with jax.vmap, and layers that are stacked with jax.lax.scan"),
        (X, QUANTIZED, None, {}, "recipe is None, but kernel is a QuantizedArray"),
        (X, QUANTIZED.without_transposed(), None, {"recipe": CURRENT}, "kernel has no transposed copy"),
        (X, quantize(KERNEL, recipe.Quantization(np.dtype(jnp.float8_e5m2), "tensor", "tensor")), None,
         {"recipe": CURRENT}, "kernel was quantized to float8_e5m2, and kernels of CurrentScaling"),
        (X, QUANTIZED, None, {"recipe": BLOCK}, "kernel has 'tensor' and 'tensor' scaling, but recipe is BlockScaling"),
        (np.zeros((8, 4, 16), jnp.bfloat16), quantize(np.zeros((4, 16, 48), jnp.bfloat16),
         CURRENT.quantization("kernel"), row_ndim=1), None, {"recipe": CURRENT, "contracting_ndim": 2},
         "kernel was quantized as 1 rows and 2 cols, shape (4, 16, 48); in and out have sizes (4, 16) and (48,)"),
        (X, KERNEL, None, {"recipe": DELAYED}, "scaling_state is None; DelayedScaling needs a DelayedScalingState"),
        (X, KERNEL, None, {"recipe": DELAYED, "scaling_state": {"kernel": KERNEL}},
         "scaling_state is of type dict; DelayedScaling needs a DelayedScalingState, first recipe.init()"),
        (X, KERNEL, None, {"scaling_state": DELAYED.init()}, "scaling_state is given, but recipe is None"),
        (X, KERNEL, None, {"recipe": CURRENT, "scaling_state": DELAYED.init()}, "only DelayedScaling has a state"),
        (X, KERNEL, None, {"recipe": DELAYED, "scaling_state": DelayedScaling(history_len=8).init()},
         "scaling_state has activation of shape (8,) and dtype float32; for history_len=4 it must be float32 (4,): "
         "make it with recipe.init()"),
        (X, KERNEL, None, {"recipe": DELAYED, "scaling_state": STATE_OF_BFLOAT16},
         "scaling_state has kernel of shape (4,) and dtype bfloat16; for history_len=4 it must be float32 (4,)"),
        (X, KERNEL, None, {"recipe": DELAYED, "scaling_state": SHORT_STATE},
         "scaling_state has gradient of shape (1,) and dtype float32; for history_len=4 it must be float32 (4,)"),
    ],
)  # fmt: skip
def test_message_names_argument_value_and_rule(x, kernel, bias, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ops.dense(x, kernel, bias, **options)


@pytest.mark.parametrize("recipe", [CURRENT, None], ids=["current", "none"])
def test_integers_of_numpy_are_taken(recipe):
    assert ops.dense(X, KERNEL, recipe=recipe, contracting_ndim=np.int64(1)).shape == (32, 48)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (CurrentScaling, {"forward_dtype": "E4M3"}, "forward_dtype is 'E4M3'; it must be float8_e4m3fn or float8_e5m2"),
        (CurrentScaling, {"gradient_dtype": None}, "gradient_dtype is None; it must be float8_e4m3fn or float8_e5m2"),
        (CurrentScaling, {"gradient_dtype": jnp.bfloat16}, "gradient_dtype is bfloat16; it must be float8_e4m3fn or"),
        (CurrentScaling, {"forward_dtype": jnp.float8_e5m2}, "forward_dtype is float8_e5m2; no GPU multiplies E5M2"),
        (BlockScaling, {"fast_accumulation": None}, "fast_accumulation is None; it must be a tuple of names out of"),
        (BlockScaling, {"fast_accumulation": True}, "fast_accumulation is True; it must be a tuple of names out of"),
        (BlockScaling, {"fast_accumulation": "wgrad"}, "fast_accumulation is 'wgrad'; it must be a tuple of names"),
        (BlockScaling, {"fast_accumulation": (["wgrad"],)}, "fast_accumulation is (['wgrad'],); it must be a tuple"),
        (DelayedScaling, {"history_len": 0}, "history_len is 0; it must be a whole number of at least 1"),
        (DelayedScaling, {"history_len": 4.0}, "history_len is 4.0; it must be a whole number of at least 1"),
        (DelayedScaling, {"algorithm": "mean"}, "algorithm is 'mean'; it must be 'max' or 'most_recent'"),
        (Recipe, {}, "Recipe does not say which values share a scale; use a recipe that does, such as te_jax.recipe."),
    ],
)
def test_message_of_a_recipe_names_parameter_value_and_rule(kind, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        kind(**options)


def test_roles_of_a_recipe():
    with pytest.raises(ValueError, match="role is 'x'; it must be one of 'activation', 'kernel', 'gradient'"):
        CURRENT.quantization("x")


def test_an_axis_that_is_not_mapped_is_named():
    """By the gradient: modules are initialised and evaluated outside of `pmap` too."""

    def loss(state):
        y = ops.dense(X, KERNEL, recipe=DELAYED, scaling_state=state, state_axis=("data",))
        return jnp.sum(y.astype(jnp.float32))

    assert loss(DELAYED.init()) == 0.0
    with pytest.raises(
        ValueError, match=r"state_axis is \('data',\), but no axis 'data' is mapped here; call it inside"
    ):
        jax.grad(loss)(DELAYED.init())


@pytest.mark.parametrize("mapped", ["shard_map", "pmap"])
def test_a_misspelt_axis_is_named_where_others_are_mapped(mapped, make_mesh):
    run = functools.partial(ops.dense, recipe=DELAYED, scaling_state=DELAYED.init(), state_axis="dat")
    if mapped == "pmap":
        run, x = jax.pmap(run, axis_name="data", in_axes=(0, None)), X[None]
    else:
        mesh = make_mesh({"data": AxisType.Auto})
        run, x = jax.shard_map(run, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False), X
    with pytest.raises(ValueError, match=r"state_axis is \('dat',\), but no axis 'dat' is mapped here"):
        jax.eval_shape(run, x, KERNEL)


def test_named_implementation_that_is_not_there(monkeypatch):
    from te_jax.native import extension

    monkeypatch.setattr(extension, "_problem_on_default_backend", lambda *_: ("there is none", False))
    monkeypatch.setattr(native, "compute_capability", lambda: None)
    with pytest.raises(native.NativeUnavailableError, match="there is none"):
        ops.dense(X, KERNEL, recipe=CURRENT, implementation="native")
    assert ops.dense(X, KERNEL, recipe=CURRENT).shape == (32, 48)


def test_a_gpu_without_the_kernels_of_a_recipe(monkeypatch, native_kernels):
    """A GPU that the extension does not know: the reference would multiply in float32. test_gpus.py has all layers."""
    from te_jax.native import extension

    def layer(implementation=None):
        return jax.eval_shape(
            functools.partial(ops.dense, recipe=CURRENT, implementation=implementation), X, KERNEL
        )  # fmt: skip

    problem = "te_jax._te_cuda holds code for 90a, and this GPU has 8.0"
    monkeypatch.setattr(extension, "_problem_on_default_backend", lambda *_: (problem, True))
    monkeypatch.setattr(native, "compute_capability", lambda: (8, 0))
    for implementation in (None, "native"):
        with pytest.raises(native.NativeUnavailableError, match=rf"recipe is Current.*{problem}\.? .*recipe=None"):
            layer(implementation)
    layer("reference")
    monkeypatch.setattr(native, "compute_capability", lambda: None)
    extension._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="te_jax runs no native kernel"):
        layer()  # a CPU has nothing faster
    extension._warn_once.cache_clear()


@pytest.mark.parametrize("recipe", [None, CURRENT, BLOCK])
def test_state_axis_is_for_the_state_of_delayed_scaling(recipe):
    """It was ignored, and a result that lacked the sum over devices looked like one."""
    for layer, kernels in ((ops.dense, KERNEL), (ops.gated_mlp, (KERNEL, KERNEL, KERNEL.T))):
        with pytest.raises(ValueError, match=r"state_axis is 'tensor', and recipe is .* sums no result.*psum"):
            layer(X, kernels, recipe=recipe, state_axis="tensor")
