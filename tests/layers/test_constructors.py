"""What modules of Linen and NNX refuse when they are made, not when they run."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import te_jax.flax
import te_jax.nnx
from te_jax.layers import Router, moe
from te_jax.recipe import CurrentScaling

# The arguments that make each module: of Linen, and what NNX needs besides.
MODULES = {
    "Dense": ({"features": 32}, None),
    "DenseGeneral": ({"features": 32}, None),
    "Linear": (None, {"in_features": 32, "out_features": 32}),
    "LinearGeneral": (None, {"in_features": 32, "out_features": 32}),
    "Einsum": ({"shape": (32, 32)}, {"einsum_str": "ab,bc->ac", "kernel_shape": (32, 32)}),
    "Embed": ({"num_embeddings": 32, "features": 32},) * 2,
    "NormLinear": ({"features": 32}, {"in_features": 32, "out_features": 32}),
    "GatedMLP": ({"hidden_features": 32}, {"in_features": 32, "hidden_features": 32}),
    "Attention": ({"num_heads": 2}, {"in_features": 32, "num_heads": 2}),
    "TransformerBlock": (
        {"num_heads": 2, "hidden_features": 32},
        {"in_features": 32, "num_heads": 2, "hidden_features": 32},
    ),
    "MoE": (
        {"num_experts": 4, "hidden_features": 32, "router": Router(2)},
        {"in_features": 32, "num_experts": 4, "hidden_features": 32, "router": Router(2)},
    ),
    "DotGeneral": ({}, {}),
}
REFUSED = {
    "recipe": ("block", "recipe is 'block'; it must be a Recipe, such as"),
    "implementation": ("fast", "implementation is 'fast'; it must be None, 'native', 'xla' or 'reference'"),
}


@pytest.mark.parametrize("library", ["flax", "nnx"])
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("argument", REFUSED)
def test_recipe_and_implementation(library, name, argument):
    arguments = dict(zip(("flax", "nnx"), MODULES[name], strict=True))[library]
    if arguments is None:
        assert not hasattr(getattr(te_jax, library), name)
        return
    module = getattr(getattr(te_jax, library), name)
    others = {"recipe": None} | ({"rngs": nnx.Rngs(0)} if library == "nnx" and name != "DotGeneral" else {})
    made = module(**arguments, **others)
    assert isinstance(made, nn.Module if library == "flax" else nnx.Module)
    value, message = REFUSED[argument]
    with pytest.raises(ValueError, match=message):
        module(**arguments, **{**others, argument: value})


def test_router():
    message = r"router is 2; it must be a te_jax\.layers\.Router, such as Router\(top_k=2\)"
    flax, of_nnx = ({**arguments, "router": 2} for arguments in MODULES["MoE"])
    with pytest.raises(ValueError, match=message):
        te_jax.flax.MoE(**flax)
    with pytest.raises(ValueError, match=message):
        te_jax.nnx.MoE(**of_nnx, rngs=nnx.Rngs(0))
    kernel = jnp.ones((4, 32, 32))
    with pytest.raises(ValueError, match=message):
        moe(jnp.ones((16, 32)), jnp.ones((32, 4)), (kernel,) * 3, 2)  # pyright: ignore[reportArgumentType]


def test_other_recipes_of_a_block():
    for made in (
        te_jax.flax.TransformerBlock(
            num_heads=2, hidden_features=32, recipe={"attention": None, "mlp": CurrentScaling()}
        ),
        te_jax.flax.TransformerBlock(num_heads=2, hidden_features=32, recipe=CurrentScaling()),
    ):
        jax.eval_shape(made.init, jax.random.key(0), jnp.ones((1, 16, 32)))
    for recipe in ({"attention": None}, {"attention": None, "mlp": "block"}):
        with pytest.raises(ValueError, match="recipe "):
            te_jax.flax.TransformerBlock(num_heads=2, hidden_features=32, recipe=recipe)
