"""The products by certain kernels in a function of somebody else, as te_jax multiplies.

The function is traced to a jaxpr, which is evaluated with other products in it. Kernels are followed through casts and
layouts to their products, also inside `jit`, `jax.checkpoint`, `scan`, `cond` and `shard_map`. All else runs as it is.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import JaxprEqn

from te_jax import ops
from te_jax._core import jaxprs
from te_jax._core.types import BLOCK, FLOAT_NAMES, FLOATS, PyTree
from te_jax.layers import linear
from te_jax.layers.convert import obstacle_in_einsum, obstacle_in_groups
from te_jax.recipe import DelayedScalingState


class KernelOptions(NamedTuple):
    """Options of the products by a kernel, with a recipe, and its state if that is `DelayedScaling`."""

    options: linear.Options
    scaling_state: DelayedScalingState | None


def call_with_products(
    function: Callable[..., PyTree],
    kernels: Mapping[str, Array],
    options: Mapping[str, KernelOptions],
    owner: str,
    way_out: str,
) -> PyTree:
    """function(*kernels), where each product of an array and one of the kernels is one of te_jax.

    These are `dot_general`, with or without batch dimensions, and `ragged_dot`. It is differentiated as any function.

    Args:
      function: of the values of kernels, in their order. Whatever else it reads it may close over.
      kernels: by name.
      options: how to multiply by each kernel.
      owner: the full name of the class that has the kernels, for errors.
      way_out: for errors.

    Raises:
      ValueError: the function multiplies by a kernel in no such product, or does something else with it too, or FP8
        cannot take the product. The message names the kernel.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*kernels.values())
    run = _Run(options, owner, way_out)
    operands = [_Kernel(frozenset({name}), value, value.dtype) for name, value in kernels.items()]
    results = run.evaluate(closed, operands)
    for name in kernels:
        if name not in run.multiplied:
            raise run.refusal({name}, "is in no product")
    return jax.tree.unflatten(jax.tree.structure(shapes), [run.plain("its results", result) for result in results])


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """Values of kernels.

    Attributes:
      names: of the kernels.
      value: in their own dtype, from which products quantize them.
      dtype: that the function has cast them to.
    """

    names: frozenset[str]
    value: Array
    dtype: jax.typing.DTypeLike

    def cast(self) -> Array:
        return self.value.astype(self.dtype)


_Operand = Array | _Kernel


class _Run:
    """One evaluation.

    Attributes:
      multiplied: the names of the kernels that a product has met.
    """

    def __init__(self, options: Mapping[str, KernelOptions], owner: str, way_out: str):
        self.options, self.owner, self.way_out = options, owner, way_out
        self.multiplied: set[str] = set()

    def evaluate(self, jaxpr: jaxprs.Program, operands: Sequence[_Operand]) -> list[_Operand]:
        """The results of a jaxpr. Equations without kernels run together, up to the next one with a kernel."""
        values = jaxprs.Values(jaxpr, operands)
        for eqn in values.jaxpr.eqns:
            if _names(values.known(eqn.invars)):
                arguments = values.read(eqn.invars)
                with eqn.ctx.manager:
                    values.write(eqn, self._apply(eqn, arguments))
            else:
                values.postpone(eqn)
        return values.read(values.jaxpr.outvars)

    def _apply(self, eqn: JaxprEqn, arguments: list[_Operand]) -> Sequence[_Operand]:
        """The results of an equation with kernels."""
        rule = _RULES.get(eqn.primitive.name)
        if rule is None:
            raise self.refusal(_names(arguments), f"is an operand of {eqn.primitive.name}")
        return rule(self, eqn, arguments)

    def plain(self, place: str, value: _Operand) -> Array:
        if isinstance(value, _Kernel):
            raise self.refusal(value.names, f"is one of {place}")
        return value

    def refusal(self, names: Collection[str], problem: str) -> ValueError:
        kernels = " and ".join(sorted(names))
        return ValueError(
            f"{kernels} {problem} in the __call__ of {self.owner}, where a kernel in FP8 can only be multiplied, by "
            f"jnp.dot, jnp.einsum or jax.lax.ragged_dot: {self.way_out}"
        )

    # ------------------------------------------------------------------------------------------------- layouts

    def _laid_out(self, eqn: JaxprEqn, arguments: list[_Operand]) -> list[_Kernel]:
        """Values of kernels, somewhere else."""
        joined = [argument for argument in arguments if isinstance(argument, _Kernel)]
        name = eqn.primitive.name
        if not (joined == arguments if name in ("concatenate", "stack") else isinstance(arguments[0], _Kernel)):
            raise self.refusal(_names(arguments), f"is an operand of {name} beside other arrays")
        names, dtype = frozenset(_names(joined)), joined[0].dtype
        # Moves are in the dtype of the cast.
        same = len({kernel.value.dtype for kernel in joined}) == 1 and name not in jaxprs.MOVES
        values = [k.value if same else k.cast() for k in joined]
        results = eqn.primitive.bind(*values, *arguments[len(joined) :], **eqn.params)
        return [_Kernel(names, value, dtype) for value in (results if eqn.primitive.multiple_results else [results])]

    def _cast(self, eqn: JaxprEqn, arguments: list[_Kernel]) -> list[_Kernel]:
        (kernel,), dtype = arguments, eqn.params["new_dtype"]
        if dtype not in FLOATS:
            raise self.refusal(kernel.names, f"is cast to {jnp.dtype(dtype).name}, not {FLOAT_NAMES},")
        return [dataclasses.replace(kernel, dtype=dtype)]

    def _scaled(self, eqn: JaxprEqn, arguments: list[Any]) -> list[_Kernel]:
        """A kernel times a number."""
        kernel, *numbers = sorted(arguments, key=lambda argument: not isinstance(argument, _Kernel))
        division = eqn.primitive.name == "div" and kernel is not arguments[0]
        if isinstance(numbers[0], _Kernel) or jnp.ndim(numbers[0]) or division:
            raise self.refusal(_names(arguments), f"is an operand of {eqn.primitive.name}")
        number = jnp.asarray(numbers[0], kernel.value.dtype)
        return [dataclasses.replace(kernel, value=eqn.primitive.bind(kernel.value, number, **eqn.params))]

    # ------------------------------------------------------------------------------------------------ products

    def _options(self, kernel: _Kernel) -> KernelOptions:
        first, *others = (self.options[name] for name in kernel.names)
        if any(other.options != first.options for other in others):
            raise self.refusal(kernel.names, "have different recipes and share a product")
        if others and first.scaling_state is not None:
            raise self.refusal(kernel.names, "have states of their own and share a product")
        self.multiplied |= kernel.names
        return first

    def _operands(self, eqn: JaxprEqn, lhs: Any, rhs: Any) -> tuple[Array, _Kernel]:
        x, kernel = (lhs, rhs) if isinstance(rhs, _Kernel) else (rhs, lhs)
        if isinstance(x, _Kernel):
            raise self.refusal(_names((lhs, rhs)), "are multiplied with each other")
        if x.dtype not in FLOATS or jaxprs.type_of(eqn.outvars[0]).dtype not in FLOATS:
            raise self.refusal(kernel.names, f"is multiplied by {x.dtype.name}, not {FLOAT_NAMES},")
        return x, kernel

    def _dot_general(self, eqn: JaxprEqn, arguments: list[_Operand]) -> list[Array]:
        x, kernel = self._operands(eqn, *arguments)
        subscripts = _subscripts(eqn.params["dimension_numbers"], *(jaxprs.type_of(var).ndim for var in eqn.invars))
        if kernel is arguments[0]:
            subscripts = subscripts[1], subscripts[0], subscripts[2]
        string = "{},{}->{}".format(*subscripts)
        if obstacle := obstacle_in_einsum(string, kernel.value.shape, "its product"):
            raise self.refusal(kernel.names, f"is in a product that FP8 cannot take ({obstacle})")
        names = linear.Einsum.parse(string, kernel.value.shape)
        dtype, sharding = jaxprs.type_of(eqn.outvars[0]).dtype, eqn.params.get("out_sharding")
        options, state = self._options(kernel)
        y = linear.einsum(names, x, kernel.value, None, state, dtype=dtype, options=options)
        return [y if sharding is None else jax.reshard(y, sharding)]

    def _ragged_dot(self, eqn: JaxprEqn, arguments: list[Any]) -> list[Array]:
        x, kernel = self._operands(eqn, *arguments[:2])
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (lhs_axes, rhs_axes), batch = numbers.dot_dimension_numbers
        axes = [tuple(a) for a in (*batch, numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions)]
        supported = kernel is arguments[1] and eqn.params.get("group_offset") is None and len(arguments) == 3
        supported &= (x.ndim, kernel.value.ndim, len(lhs_axes)) == (2, 3, 1) and axes[:2] == [(), ()]
        if not (supported and axes[2] == (1 - lhs_axes[0],) and len(axes[3]) == 1):
            raise self.refusal(
                kernel.names, "is in a ragged_dot of other dimensions than [rows, in] and [experts, in, out]"
            )
        (group,), inner = axes[3], rhs_axes[0]
        outer = 3 - group - inner
        sizes = kernel.value.shape[inner], kernel.value.shape[outer]
        if obstacle := obstacle_in_groups(*sizes):
            raise self.refusal(kernel.names, f"is in a product that FP8 cannot take ({obstacle})")
        options, state = self._options(kernel)
        if state is not None:
            raise self.refusal(kernel.names, "is in a ragged_dot, which takes no recipe with state,")
        last = (group, outer, inner) == (0, 1, 2)
        y = _product_of_groups(
            (x if lhs_axes[0] == 1 else x.T).astype(jaxprs.type_of(eqn.outvars[0]).dtype),
            kernel.value if last else kernel.value.transpose(group, inner, outer),
            arguments[2],
            kernel_contracting="last" if last else "first",
            **vars(options),
        )
        sharding = eqn.params.get("out_sharding")
        return [y if sharding is None else jax.reshard(y, sharding)]

    # ---------------------------------------------------------------------------------- functions in the function

    def _inlined(self, eqn: JaxprEqn, arguments: list[_Operand]) -> list[_Operand]:
        return self.evaluate(jaxprs.called(eqn), arguments)

    def _inside(self, eqn: JaxprEqn, jaxpr: jaxprs.Program, arguments: Sequence[_Operand]):
        """A function of a jaxpr's results, of arrays that take the place of the arguments."""

        def function(*arrays: Array) -> list[Array]:
            inner = [
                dataclasses.replace(argument, value=array) if isinstance(argument, _Kernel) else array
                for argument, array in zip(arguments, arrays, strict=True)
            ]
            return [self.plain(f"the results of {eqn.primitive.name}", x) for x in self.evaluate(jaxpr, inner)]

        return function

    def _remade(self, eqn: JaxprEqn, arguments: list[_Operand]) -> list[Array]:
        if eqn.primitive.name == "scan":
            for argument in arguments[slice(*jaxprs.scan_parts(eqn))]:
                self.plain("the carried values of scan", argument)
        return jaxprs.remade(eqn, self._inside(eqn, eqn.params["jaxpr"], arguments), _arrays(arguments))

    def _cond(self, eqn: JaxprEqn, arguments: list[_Operand]) -> list[Array]:
        index, *operands = arguments
        branches = [self._inside(eqn, branch, operands) for branch in eqn.params["branches"]]
        return lax.switch(index, branches, *_arrays(operands))


_RULES: dict[str, Callable[[_Run, JaxprEqn, list[Any]], Sequence[_Operand]]] = {
    **dict.fromkeys((*jaxprs.IDENTITIES, *jaxprs.LAYOUTS, *jaxprs.MOVES, "copy_p", "stop_gradient"), _Run._laid_out),
    **dict.fromkeys(("slice", "dynamic_slice", "gather", "concatenate", "stack", "split"), _Run._laid_out),
    "convert_element_type": _Run._cast,
    **dict.fromkeys(("mul", "div"), _Run._scaled),
    "dot_general": _Run._dot_general,
    "ragged_dot_general": _Run._ragged_dot,
    **dict.fromkeys(jaxprs.CALLS, _Run._inlined),
    **dict.fromkeys((*jaxprs.CHECKPOINTS, "scan", "shard_map"), _Run._remade),
    "cond": _Run._cond,
}


def _names(arguments: Sequence[_Operand]) -> set[str]:
    return {name for argument in arguments if isinstance(argument, _Kernel) for name in argument.names}


def _arrays(arguments: Sequence[_Operand]) -> list[Array]:
    return [argument.value if isinstance(argument, _Kernel) else argument for argument in arguments]


def _subscripts(dimension_numbers: Any, lhs_ndim: int, rhs_ndim: int) -> tuple[str, str, str]:
    """The letters of both operands of a dot_general and of its result."""
    (lhs_axes, rhs_axes), (lhs_batch, rhs_batch) = dimension_numbers
    letters = iter(string.ascii_letters)
    lhs = [next(letters) for _ in range(lhs_ndim)]
    rhs = [next(letters) for _ in range(rhs_ndim)]
    for left, right in zip((*lhs_axes, *lhs_batch), (*rhs_axes, *rhs_batch), strict=True):
        rhs[right] = lhs[left]
    batch = [lhs[axis] for axis in lhs_batch]
    free = [name for axis, name in enumerate(lhs) if axis not in (*lhs_axes, *lhs_batch)]
    free += [name for axis, name in enumerate(rhs) if axis not in (*rhs_axes, *rhs_batch)]
    return "".join(lhs), "".join(rhs), "".join(batch + free)


def _product_of_groups(x: Array, kernel: Array, group_sizes: Array, **options: Any) -> Array:
    """`lax.ragged_dot` in FP8. Groups begin at blocks of rows in between, as block-scaled weight gradients need."""
    rows, experts = jnp.arange(x.shape[0], dtype=jnp.int32), kernel.shape[0]
    ends = jnp.cumsum(group_sizes)
    expert = jnp.searchsorted(ends, rows, side="right", method="scan_unrolled").astype(jnp.int32)
    aligned = ops.group_by_expert(expert[:, None], experts, align=BLOCK)
    y = ops.grouped_dense(ops.permute(x, aligned), kernel, aligned.group_sizes, **options)
    return ops.unpermute(y, aligned)
