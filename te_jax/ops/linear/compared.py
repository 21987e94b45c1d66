"""Results and gradients of layers in FP8 beside those of plain operands, where that is asked for (`te_jax.debug`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from te_jax._core import observe
from te_jax._core.types import PyTree
from te_jax.ops.linear.products import Products, Wgrad
from te_jax.ops.linear.weight import Weight
from te_jax.quantized import Quantizable, QuantizedArray
from te_jax.recipe import Product, Recipe
from te_jax.sharding import Layout


class Observed(NamedTuple):
    """Values that a layer keeps for statistics, empty unless these are asked for.

    Attributes:
      links: of its kernels.
      x, kernels: plain, as the backward pass reads them; None unless results are compared.
    """

    links: tuple[Array, ...]
    x: Any = None
    kernels: Any = None

    def with_links_of(self, kernels: Sequence[Any]) -> Observed:
        """A copy with links of kernels in FP8, which FSDP gathers again: it computes no link a second time."""
        if not self.links:
            return self
        pairs = zip(kernels, self.links, strict=True)
        return self._replace(links=tuple(_link_of(kernel, link) for kernel, link in pairs))


def results_observed(
    products: Products,
    observed: Observed,
    ys: tuple[Array, ...],
    x: Quantizable,
    weights: Sequence[Weight],
    layouts: Sequence[Layout | None],
    group: PyTree,
) -> tuple[tuple[Array, ...], Observed]:
    """The results of a layer, with their errors, and what the backward pass needs for those of gradients.

    Args:
      products: of the layer.
      observed: with links.
      ys: results of operands in FP8.
      x, weights, layouts, group: operands, quantized or not, and layouts of the results.
    """
    request = observe.requested()
    if request is None or not request.results or products.is_plain:
        return ys, observed
    plain = products.plain()
    x = plain.quantize("activation", _dequantized(x), None, group, second_copy=True).array
    kernels = tuple(
        plain.quantize("kernel", _dequantized(weight.kernel), None, group, second_copy=True).array for weight in weights
    )
    biases = [weight.bias for weight in weights]
    expected, kept, _ = plain.forward(x, kernels, biases, layouts, group, differentiated=True)

    def beside(i: int, y: Array, other: Array) -> Array:
        other = _moved(products.activated(other), y)
        return compared("forward", products.name, y, other, observed.links[i : i + 1], products.token_ndim(y))

    ys = tuple(beside(i, *pair) for i, pair in enumerate(zip(ys, expected, strict=True)))
    kernels = tuple(plain.kept(kernel, "kernel", is_argument=True) for kernel in kernels)
    return ys, Observed(observed.links, kept, kernels)


def gradients_observed(
    products: Products,
    observed: Observed,
    used: Sequence[int],
    dys: Sequence[Array],
    dx: Array | None,
    wgrads: Sequence[Wgrad | None],
    group: PyTree,
    layout: Layout | None,
) -> tuple[Array | None, Sequence[Wgrad | None]]:
    """The gradients of a layer, with their errors where they are compared.

    Args:
      products: of the layer.
      observed: of the forward pass.
      used: which of the kernels have a gradient of their result.
      dys: these gradients, before activations.
      dx: the gradient of x, or None.
      wgrads: those of the used kernels.
      group: see `Products`.
      layout: of dx.
    """
    if observed.kernels is None:
        return dx, wgrads
    plain = products.plain()
    links = tuple(observed.links[i] for i in used)
    parts = tuple(plain.quantize("gradient", dy, None, group, second_copy=True).array for dy in dys)
    kernels = tuple(observed.kernels[i] for i in used)
    expected, parts = plain.dgrad(parts, kernels, group, layout or Layout(dys[0].dtype))
    if dx is not None:
        dx = compared("dgrad", products.name, dx, _moved(expected, dx), links, products.token_ndim(dx))
    plain_wgrads = plain.wgrads(observed.x, parts, group) if any(wgrad is not None for wgrad in wgrads) else wgrads

    def beside(place: int, wgrad: Wgrad | None) -> Wgrad | None:
        if wgrad is None:
            return None

        def product(*, out_dtype: jax.typing.DTypeLike, **options: Any) -> Array:
            value, other = wgrad.product(out_dtype=out_dtype, **options), plain_wgrads[place]
            if options or other is None:  # with an accumulator it is no gradient
                return value
            other = _moved(other.product(out_dtype=out_dtype), value)
            return compared("wgrad", products.name, value, other, links[place : place + 1], value.ndim - 1)

        return wgrad._replace(product=product)

    return dx, [beside(place, wgrad) for place, wgrad in enumerate(wgrads)]


def _link_of(kernel: Any, otherwise: Array) -> Array:
    return observe.links_of([kernel])[0] if jax.tree.leaves(kernel) else otherwise


def _dequantized(x: Quantizable) -> Array:
    if not isinstance(x, QuantizedArray):
        return x
    return dataclasses.replace(x, straight_through=None).dequantize()


def _moved(value: Array, like: Array) -> Array:
    return Layout.of(like).apply(value.reshape(like.shape) if value.shape != like.shape else value)


def compared(
    product: Product, operation: str, value: Array, expected: Array, links: Sequence[Array], row_ndim: int
) -> Array:
    """The value [*rows, *cols], with its relative errors."""
    wide, exact = (lax.stop_gradient(x).astype(jnp.float32) for x in (value, expected))
    finite = jnp.isfinite(wide) & jnp.isfinite(exact)
    wide_or_zero, exact = (jnp.where(finite, x, 0.0) for x in (wide, exact))
    rows, cols = tuple(range(row_ndim)), tuple(range(row_ndim, value.ndim))
    statistics: dict[str, Array] = {
        "nonfinite": jnp.sum(jnp.sum(~jnp.isfinite(wide), axis=cols, dtype=jnp.int32).astype(jnp.float32)),
        "count": jnp.full((), value.size, jnp.float32),
    }
    for name, axes in (("row", cols), ("col", rows)):
        factor = observe.power_of_two_for(jnp.max(jnp.abs(exact), axis=axes, keepdims=True, initial=0.0))
        differences = wide_or_zero * factor - exact * factor
        of_each, error = (jnp.sum(x**2, axis=axes) for x in (exact * factor, differences))
        counts = of_each > 0.0
        statistics[f"{name}_errors"] = jnp.sum(jnp.where(counts, error / jnp.where(counts, of_each, 1.0), 0.0))
        statistics[f"{name}s"] = jnp.sum(counts.astype(jnp.float32))
    static = observe.Tag(operation, "result", (observe.Entry((product,), tuple(statistics)),))
    return observe.tag([value], links, tuple(statistics.values()), static)[0]


# -------------------------------------------------------------------------------------------- layers without a recipe


def recipe_in_comparison(recipe: Recipe | None, validate: Callable[[Recipe], Any]) -> tuple[Recipe | None, str | None]:
    """The recipe of a layer, and why FP8 cannot take the layer if a comparison asks for it in vain.

    Args:
      recipe: of the layer. If it is None, that of the request.
      validate: raises ValueError if FP8 cannot take the layer.
    """
    request = observe.requested()
    if recipe is not None or request is None or request.recipe is None:
        return recipe, None
    try:
        validate(request.recipe)
    except ValueError as error:
        return None, str(error)
    return request.recipe, None


def left_plain(
    operation: str, ys: tuple[Array, ...], kernels: Sequence[Quantizable], obstacle: str | None
) -> tuple[Array, ...]:
    """The results of a layer with the obstacle of `recipe_in_comparison`, if there is one."""
    if obstacle is None:
        return ys
    static = observe.Tag(operation, "plain", (), obstacle)
    links = observe.links_of(kernels)
    return tuple(observe.tag([y], [link], (), static)[0] for y, link in zip(ys, links, strict=True))
