"""What modules of Linen and NNX refuse when they are made, not when they run."""

import jax.numpy as jnp
import pytest
from flax import nnx

import te_jax.flax
import te_jax.nnx
from te_jax.layers import Router, moe

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
def test_recipe_and_implementation(library, name):
    arguments = dict(zip(("flax", "nnx"), MODULES[name], strict=True))[library]
    if arguments is None:
        assert not hasattr(getattr(te_jax, library), name)
        return

    def make(**others):
        rngs = {"rngs": nnx.Rngs(0)} if library == "nnx" and name != "DotGeneral" else {}
        getattr(getattr(te_jax, library), name)(**arguments, **{"recipe": None, **others}, **rngs)

    nnx.eval_shape(make)
    for argument, (value, message) in REFUSED.items():
        with pytest.raises(ValueError, match=message):
            nnx.eval_shape(lambda others={argument: value}: make(**others))


def test_router():
    message = r"router is 2; it must be a te_jax\.layers\.Router, such as Router\(top_k=2\)"
    flax, of_nnx = ({**arguments, "router": 2} for arguments in MODULES["MoE"])
    for make in (
        lambda: te_jax.flax.MoE(**flax),
        lambda: te_jax.nnx.MoE(**of_nnx, rngs=nnx.Rngs(0)),
        lambda: moe(jnp.ones((16, 32)), jnp.ones((32, 4)), (jnp.ones((4, 32, 32)),) * 3, 2),  # pyright: ignore
    ):
        with pytest.raises(ValueError, match=message):
            nnx.eval_shape(make)


@pytest.mark.parametrize("recipe", [{"attention": None}, {"attention": None, "mlp": "block"}], ids=str)
def test_other_recipes_of_a_block(recipe):
    with pytest.raises(ValueError, match="recipe "):
        te_jax.flax.TransformerBlock(num_heads=2, hidden_features=32, recipe=recipe)
