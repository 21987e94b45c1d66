"""Random operands of grouped GEMMs, and what comes out of them in float64, by NumPy, one group after the other."""

import jax
import jax.numpy as jnp
import numpy as np
from ops.gemm_oracle import E4M3, SCALINGS, matrix, random_array, random_quantized, wide

from te_jax.quantized import QuantizedArray


def random_operands(rng, rows, k, n, groups, kind, form, *, dtype="float32", lhs_dtype=E4M3, rhs_dtype=E4M3):
    """lhs and rhs of the product "forward", "dgrad" or "wgrad"; "plain" or of a scaling of `gemm_oracle`."""
    if form == "wgrad":
        shapes = (rows, k), (rows, n)
    else:
        shapes = (rows, k), (groups, k, n) if form == "forward" else (groups, n, k)
    if kind == "plain":
        return tuple(random_array(rng, shape, dtype) for shape in shapes)
    options = {"stands_for": dtype}
    left, right = SCALINGS[kind]
    lhs = random_quantized(rng, shapes[0][:1], shapes[0][1:], left, dtype=lhs_dtype, **options)
    if form == "wgrad":
        return lhs, random_quantized(rng, (rows,), (n,), right, dtype=rhs_dtype, **options)
    (rows_of_b, cols_of_b) = shapes[1][1:]
    members = [
        random_quantized(rng, (rows_of_b,), (cols_of_b,), right, dtype=rhs_dtype, **options) for _ in range(groups)
    ]
    return lhs, jax.tree.map(lambda *leaves: jax.device_put(np.stack(leaves)), *members)


def options_of(form):
    return {"forward": {}, "dgrad": {"rhs_contracting": "cols"}, "wgrad": {"lhs_contracting": "rows"}}[form]


def values(x, contracting):
    """The copy that a product over rows or cols reads, [*groups, rows, cols] in float64."""
    if x.ndim == 3:
        return np.stack(
            [values(jax.tree.map(lambda leaf, g=g: np.asarray(leaf)[g], x), contracting) for g in range(x.shape[0])]
        )
    value, _ = matrix(x, contracting)
    return value if contracting == "cols" else value.T


def bounds_of(sizes, offset, groups, rows):
    ends = np.minimum(np.cumsum([0, *np.asarray(sizes)]), rows)
    return [(ends[offset + g], ends[offset + g + 1]) for g in range(groups)]


def product(form, lhs, rhs, sizes, *, bias=None, accumulator=None, offset=0, groups=None):
    a = values(lhs, "rows" if form == "wgrad" else "cols")
    b = values(rhs, "cols" if form == "dgrad" else "rows")
    groups = groups or (len(sizes) if form == "wgrad" else len(b))
    bounds = bounds_of(sizes, offset, groups, len(a))
    if form == "wgrad":
        d = np.stack([a[begin:end].T @ b[begin:end] for begin, end in bounds])
        return d if accumulator is None else d + wide(accumulator)
    d = np.zeros((len(a), b.shape[2 if form == "forward" else 1]))
    for g, (begin, end) in enumerate(bounds):
        d[begin:end] = a[begin:end] @ (b[g] if form == "forward" else b[g].T)
        if bias is not None:
            d[begin:end] += wide(bias)[g]
    return d


def with_nan_in(x, rows):
    """The operand, with NaN in all copies of these rows; scales of blocks of other rows too stay as they are."""
    code = lambda values: jnp.full((), jnp.nan, values.dtype)  # noqa: E731
    if not isinstance(x, QuantizedArray):
        return x.at[rows].set(code(x))
    data = None if x.data is None else x.data.at[rows].set(code(x.data))
    transposed = None if x.transposed is None else x.transposed.at[:, rows].set(code(x.transposed))
    return QuantizedArray(data, x.scale_inv, transposed, x.transposed_scale_inv, x.row_ndim, x.col_ndim, x.scaling,
                          x.transposed_scaling, x.dtype)  # fmt: skip
