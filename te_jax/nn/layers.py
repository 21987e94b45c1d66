"""A stack of layers, one after the other: the loop where recomputation, and later offload and prefetch, belong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

X = TypeVar("X")

Policy = Callable[..., Any]


def apply_layers(layer: Callable[[X, Any], X], params: Any, x: X, *, remat: bool | Policy | None = None) -> X:
    """Runs x through a stack of layers: x = layer(x, params[0]), then layer(x, params[1]), and so on.

    The loop is unrolled, and the layer is traced once for all parameters of one shape. A `lax.scan` would fill stacks
    of gradients and residuals with zeros, update them layer by layer, and hold them all at once: 15% of a training
    step. Compile time grows with the number of layers instead.

    Keep parameters in a list. XLA converts and copies slices of a stack all together, for all layers, and again for
    every layer where memory runs short.

    Args:
      layer: (x, parameters of one layer) -> x. It may close over arrays, whose gradients are sums over layers.
      params: a list or tuple of pytrees, one for each layer; or one pytree of arrays whose first dimension is the
        layer. Whatever belongs to a layer may be part of it, such as the state of delayed scaling, whose gradient is
        the next state, and quantized kernels.
      x: a pytree.
      remat: what the backward pass recomputes. None: nothing. True: all of a layer but its input. Or a policy of
        `jax.checkpoint`, such as those of `te_jax.checkpoint_policies`.

    Returns:
      What the last layer returns; x without layers.

    Raises:
      ValueError: `params` is one pytree, and its leaves do not have a first dimension of one size; or `remat` is none
        of the above.

    Examples:
      >>> import jax, jax.numpy as jnp, te_jax
      >>> layers = [{"kernel": jnp.eye(4)}, {"kernel": 2 * jnp.eye(4)}]
      >>> def run(layers, x):
      ...     return te_jax.nn.apply_layers(lambda x, p: x @ p["kernel"], layers, x, remat=True)
      >>> run(layers, jnp.ones((1, 4))).tolist()
      [[2.0, 2.0, 2.0, 2.0]]
      >>> [gradient["kernel"].shape for gradient in jax.grad(lambda *a: run(*a).sum())(layers, jnp.ones((1, 4)))]
      [(4, 4), (4, 4)]
    """
    if not (remat is None or isinstance(remat, bool) or callable(remat)):
        raise ValueError(f"remat is {remat!r}: it must be None, True, or a policy of jax.checkpoint")
    # jit, so that JAX traces and differentiates the layer once. XLA inlines the calls.
    run = jax.jit(layer)
    if remat:
        run = jax.checkpoint(run, policy=remat if callable(remat) else None)
    for of_layer in _unstacked(params):
        x = run(x, of_layer)
    return x


def _unstacked(params: Any) -> Sequence[Any]:
    if isinstance(params, list | tuple) and not hasattr(params, "_fields"):  # a NamedTuple is a pytree of one layer
        return params
    leaves, structure = jax.tree.flatten(params)
    sizes = {jnp.shape(leaf)[:1] for leaf in leaves}
    if len(sizes) != 1 or sizes == {()}:
        shapes = ", ".join(sorted({str(jnp.shape(leaf)) for leaf in leaves})) or "none"
        raise ValueError(
            f"params has leaves of shapes {shapes}: stacked parameters need a first dimension of one size, the number "
            "of layers; parameters of single layers need a list"
        )
    ((count,),) = sizes
    if count == 0:
        return []
    # The gradient of split is one concatenation, which XLA fuses with what reads it; that of indices would be as many
    # padded arrays as layers, and their sum.
    parts = [[lax.squeeze(part, (0,)) for part in lax.split(jnp.asarray(leaf), (1,) * count)] for leaf in leaves]
    return [structure.unflatten(of_layer) for of_layer in zip(*parts, strict=True)]
