"""Collective products and their gradients in float64 NumPy, and what all tests of them share."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax import native
from te_jax.parallel import all_gather_matmul, matmul_reduce_scatter
from te_jax.testing import assert_close

TRANSPORTS = ["xla", "ring", *(["p2p"] if native.available() else [])]
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
PLAIN = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}  # XLA's CPU backend adds up some products in 16 bits
FUNCTIONS = {"all_gather_matmul": all_gather_matmul, "matmul_reduce_scatter": matmul_reduce_scatter}


def wide(x):
    return np.asarray(x).astype(np.float64)


def mesh_of(axes, axis_type=AxisType.Auto):
    """A mesh of as many devices as the sizes of the axes say; {"tp": 4}. Skips the test where there are fewer."""
    count = math.prod(axes.values())
    if jax.device_count() < count:
        pytest.skip(f"needs {count} devices, and there are {jax.device_count()}")
    return Mesh(
        np.array(jax.devices()[:count]).reshape(*axes.values()), tuple(axes), axis_types=(axis_type,) * len(axes)
    )


def place(x, mesh, spec):
    # From NumPy: JAX would compile a program that cuts the array.
    return jax.device_put(np.asarray(x), NamedSharding(mesh, spec))


@dataclasses.dataclass(frozen=True)
class Case:
    """The whole operands of a collective product, over the axis (or axes) `split` of a mesh.

    Attributes:
      name: of the function.
      x: [*lead, S, *mid, K]; `axis` is the position of S.
      weights: [K, *N] each; the bias of each, or None; the cotangent of each result [*lead, S, *mid, *N].
    """

    name: str
    x: jax.Array
    weights: tuple[jax.Array, ...]
    biases: tuple[jax.Array | None, ...]
    dys: tuple[jax.Array, ...]
    axis: int
    split: str | tuple[str, ...] = "tp"
    batch: str | None = None  # a mesh axis over which the first dimension of x is split

    @property
    def operands(self):
        return self.x, self.weights, self.biases

    @property
    def gathers(self):
        return self.name == "all_gather_matmul"

    def _rows(self, split):
        entries = [None] * (self.x.ndim - 1)
        entries[0] = self.batch
        if split:
            entries[self.axis] = self.split
        return entries

    @property
    def specs(self):
        """Of x, weights and biases, as shard_map takes them."""
        if self.gathers:
            x, weight, bias = P(*self._rows(True)), P(None, self.split), P(self.split)
        else:
            x, weight, bias = P(*self._rows(False), self.split), P(self.split), P()
        return x, (weight,) * len(self.weights), tuple(None if b is None else bias for b in self.biases)

    @property
    def result_specs(self):
        spec = P(*self._rows(False), self.split) if self.gathers else P(*self._rows(True))
        return (spec,) * len(self.weights)

    def call(self, x, weights, biases, **options):
        """The function on the local operands: a tuple of results."""
        name = "gather_dimension" if self.gathers else "scatter_dimension"
        axis = {name: options.pop("axis", self.axis), "axis_name": self.split}
        if self.gathers and len(weights) > 1:
            return all_gather_matmul(x, weights, bias=biases, **axis, **options)
        return (FUNCTIONS[self.name](x, weights[0], bias=biases[0], **axis, **options),)

    def mapped(self, mesh, *, check_vma=True, axis_names=None, **options):
        """The function on whole operands."""
        return jax.shard_map(
            lambda *operands: self.call(*operands, **options),
            mesh=mesh, in_specs=self.specs, out_specs=self.result_specs, check_vma=check_vma,
            **({} if axis_names is None else {"axis_names": axis_names}),
        )  # fmt: skip

    def placed(self, mesh):
        """The same, laid out on the mesh."""
        x, weights, biases = self.specs
        return dataclasses.replace(
            self,
            x=place(self.x, mesh, x),
            weights=tuple(place(w, mesh, spec) for w, spec in zip(self.weights, weights, strict=True)),
            biases=tuple(
                None if b is None else place(b, mesh, spec) for b, spec in zip(self.biases, biases, strict=True)
            ),
            dys=tuple(place(dy, mesh, spec) for dy, spec in zip(self.dys, self.result_specs, strict=True)),
        )


@dataclasses.dataclass(frozen=True)
class Results:
    """Results and gradients, in float64 from the oracle or as computed."""

    ys: tuple
    dx: object
    dweights: tuple
    dbiases: tuple


def random_case(
    rng,
    name,
    size,
    *,
    lead=(),
    rows=3,
    mid=(),
    inner=5,
    outers=((3,),),
    dtype="float32",
    weight_dtype=None,
    y_dtype=None,
    with_bias=True,
    split="tp",
    batch=None,
):
    """Random normal values, weights scaled so that results are normal too.

    Args:
      rng: where from.
      name: of the function.
      size: number of devices that the operands are split over.
      lead, mid: dimensions of x before and after the one that is split, whose size is rows · size.
      inner: K, and
      outers: N of each of the weights: those of one device where they are split.
      dtype, weight_dtype, y_dtype: names; of weights and results that of x, if None.
      with_bias: whether every product has a bias.
      split, batch: see `Case`.
    """
    gathers = name == "all_gather_matmul"
    if gathers:
        outers = tuple((outer[0] * size, *outer[1:]) for outer in outers)
    else:
        inner *= size
    weight_dtype, y_dtype = weight_dtype or dtype, y_dtype or dtype
    tokens = (*lead, rows * size, *mid)

    def draw(*shape, dtype, scale=1.0):
        return jax.device_put((scale * rng.standard_normal(shape)).astype(DTYPES[dtype]))

    return Case(
        name,
        draw(*tokens, inner, dtype=dtype),
        tuple(draw(inner, *outer, dtype=weight_dtype, scale=inner**-0.5) for outer in outers),
        tuple(draw(*outer, dtype=weight_dtype) if with_bias else None for outer in outers),
        tuple(draw(*tokens, *outer, dtype=y_dtype) for outer in outers),
        len(lead),
        split,
        batch,
    )


def oracle(case: Case) -> Results:
    inner = case.x.shape[-1]
    x = wide(case.x).reshape(-1, inner)
    ys, dx, dweights, dbiases = [], 0.0, [], []
    for weight, bias, dy in zip(case.weights, case.biases, case.dys, strict=True):
        matrix = wide(weight).reshape(inner, -1)
        y = x @ matrix + (0.0 if bias is None else wide(bias).reshape(-1))
        g = wide(dy).reshape(len(x), -1)
        dx = dx + g @ matrix.T
        ys.append(y.reshape(dy.shape))
        dweights.append((x.T @ g).reshape(weight.shape))
        dbiases.append(None if bias is None else g.sum(axis=0).reshape(bias.shape))
    return Results(tuple(ys), dx.reshape(case.x.shape), tuple(dweights), tuple(dbiases))


def computed(case: Case, mesh, **options) -> Results:
    """Results and gradients, taken outside of shard_map, under jit."""
    function = case.mapped(mesh, **options)

    @jax.jit
    def run(operands, dys):
        ys, vjp = jax.vjp(function, *operands)
        return ys, vjp(dys)

    placed = case.placed(mesh)
    ys, gradients = run(placed.operands, placed.dys)
    return Results(ys, *gradients)


def assert_matches(found: Results, expected: Results, case: Case, *, forward, gradient) -> None:
    """Errors and dtypes: results have that of their cotangents, gradients that of what they belong to."""
    for y, wanted, dy in zip(found.ys, expected.ys, case.dys, strict=True):
        assert_close(y, wanted, tolerance=forward, dtype=dy.dtype)
    assert_close(found.dx, expected.dx, tolerance=gradient, dtype=case.x.dtype)
    for dw, wanted, weight in zip(found.dweights, expected.dweights, case.weights, strict=True):
        assert_close(dw, wanted, tolerance=gradient, dtype=weight.dtype)
    for db, wanted, bias in zip(found.dbiases, expected.dbiases, case.biases, strict=True):
        assert (db is None) == (bias is None)
        if bias is not None:
            assert_close(db, wanted, tolerance=gradient, dtype=bias.dtype)


def check(case: Case, mesh, *, tolerance=None, **options) -> Results:
    """Against the oracle. Returns what was found."""
    found = computed(case, mesh, **options)
    plain = max(PLAIN[array.dtype.name] for array in (case.x, *case.weights, *case.dys))
    forward, gradient = tolerance or (plain, plain)
    assert_matches(found, oracle(case), case, forward=forward, gradient=gradient)
    return found
