"""Every parameter of a recipe is checked where the recipe is made."""

import dataclasses
import inspect
import re

import jax.numpy as jnp
import numpy as np
import pytest

from te_jax.recipe import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXFP8Scaling,
    Quantization,
    RowwiseScaling,
    merge,
)

NAN = float("nan")
OF_NO_USE = {
    "forward_dtype": ["FP8", None, True, 1, NAN, [], jnp.float32],
    "gradient_dtype": ["FP8", None, True, 1, NAN, [], jnp.float32],
    "fast_accumulation": ["forward", b"", None, True, 1, NAN, ("forward", None), (True,)],
    "power_of_two_scales": ["a", None, 1, 0.0, NAN, ()],
}
OF_DELAYED_SCALING = {
    "history_len": ["a", None, True, 4.0, NAN, 0, -1, (4,)],
    "algorithm": ["mean", None, True, 1, NAN, ["max"]],
    "margin": ["a", None, True, NAN, 65, -65, np.True_],
}


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (kind, name, value)
        for kind in (CurrentScaling, RowwiseScaling, BlockScaling, MXFP8Scaling, DelayedScaling)
        for name, values in (OF_NO_USE | (OF_DELAYED_SCALING if kind is DelayedScaling else {})).items()
        for value in values
    ],
)
def test_values_of_no_use(kind, name, value):
    with pytest.raises(ValueError, match=rf"^{name} is .*; it must be "):
        kind(**{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"margin": "a"}, "margin is 'a'; it must be a number in [-64, 64], 0 for none"),
        ({"history_len": True}, "history_len is True; it must be a whole number of at least 1"),
        ({"power_of_two_scales": "no"}, "power_of_two_scales is 'no'; it must be True or False"),
    ],
)
def test_messages(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        DelayedScaling(**options)
    with pytest.raises(ValueError, match="power_of_two_scales is False; scales of MXFP8 are powers of two"):
        MXFP8Scaling(power_of_two_scales=False)


@pytest.mark.parametrize(
    ("kind", "gradient", "scaling"),
    [
        (CurrentScaling, jnp.float8_e5m2, ("tensor", "tensor")),
        (DelayedScaling, jnp.float8_e5m2, ("tensor", "tensor")),
        (RowwiseScaling, jnp.float8_e4m3fn, ("row", "row")),
        (BlockScaling, jnp.float8_e4m3fn, ("block_1x128", "block_128x128")),
        (MXFP8Scaling, jnp.float8_e4m3fn, ("block_1x32", "block_1x32", True)),
    ],
)
def test_gradients_and_sums_unless_the_user_says_otherwise(kind, gradient, scaling):
    recipe = kind()
    assert recipe.quantization("gradient") == Quantization(np.dtype(gradient), *scaling)
    assert recipe.quantization("activation").dtype == recipe.quantization("kernel").dtype == jnp.float8_e4m3fn
    assert recipe.fast_accumulation == ("forward",)


@pytest.mark.parametrize("kind", [CurrentScaling, RowwiseScaling, BlockScaling, MXFP8Scaling, DelayedScaling])
def test_a_recipe_prints_the_options_that_change_results(kind):
    without_effect = {
        BlockScaling: {"fast_accumulation"}, MXFP8Scaling: {"fast_accumulation", "power_of_two_scales"}
    }.get(kind, set())  # fmt: skip
    fields = {field.name for field in dataclasses.fields(kind)} - {"forward_dtype", *without_effect}
    assert set(re.findall(r"(\w+)=", repr(kind()))) == fields


def test_the_order_of_names_makes_no_other_recipe():
    one, other = (
        DelayedScaling(fast_accumulation=names) for names in (("dgrad", "wgrad"), ("wgrad", "dgrad", "wgrad"))
    )
    assert one == other
    assert hash(one) == hash(other)


def test_values_of_numpy_are_taken():
    recipe = DelayedScaling(
        history_len=np.int64(4), margin=np.int32(-2), power_of_two_scales=np.True_, fast_accumulation=["wgrad"]
    )
    assert recipe == DelayedScaling(history_len=4, margin=-2, power_of_two_scales=True, fast_accumulation=("wgrad",))
    assert recipe.power_of_two_scales is True  # as kernels take it
    assert recipe.init().kernel.shape == (4,)
    assert recipe.reference_amax(jnp.full(4, 8.0)) == 2.0
    for margin in (np.array(-2.0), jnp.float32(-2)):
        assert hash(DelayedScaling(margin=margin)) == hash(DelayedScaling(margin=-2))


@pytest.mark.parametrize("margin", [-64, 64])
def test_the_largest_margins(margin):
    assert DelayedScaling(margin=margin).reference_amax(jnp.ones(1)) == 2.0**margin


def test_states_that_do_not_belong_together_are_not_merged():
    one, other = (DelayedScaling(history_len=n).init() for n in (1, 4))
    with pytest.raises(ValueError, match=r"states have histories of shapes .*\(1,\).*\(4,\).*history_len"):
        merge(one, other)
    with pytest.raises(ValueError, match="states have histories of shapes"):
        merge(one, dataclasses.replace(one, activation=other.activation))
    with pytest.raises(ValueError, match=r"states have histories of shapes \[\]; pass one state at least"):
        merge()


@pytest.mark.parametrize("kind", [CurrentScaling, RowwiseScaling, BlockScaling, MXFP8Scaling, DelayedScaling])
def test_the_help_of_a_recipe_explains_each_of_its_parameters(kind):
    (parameters,) = re.findall(r"^Args:\n((?: {2}.*\n)+)", inspect.getdoc(kind) + "\n", re.MULTILINE)
    explained = re.findall(r"^ {2}(\w+): ", parameters, re.MULTILINE)
    assert set(explained) == {field.name for field in dataclasses.fields(kind)}
    assert len(explained) == len(set(explained))
