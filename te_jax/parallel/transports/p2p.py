"""Collective products by direct copies between devices: one custom call, in which copies hide behind products.

Devices of a group must be able to reach each other's memory. Where one process drives them all, they copy between XLA's
own buffers; where several do, between memory that these processes share.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, Mesh

from te_jax import native, sharding
from te_jax.ops._gemm_product import allowed_dtype, autotunes
from te_jax.parallel._collective.call import CollectiveSpec
from te_jax.parallel.transports import processes, xla
from te_jax.parallel.transports.exchange import GemmOperand, Scaling, with_bias

_FLOAT32 = np.dtype(np.float32)
_WORKSPACE_BYTES = 8 * 2**20 + 512
"""Of each product: 8 MiB for cuBLASLt, and before them 512 bytes for scalars and alignment."""
_GATHER_QUEUES = 2
"""Products of a gather that run at the same time: kProductQueues of cuda_ext/collective_gemm."""

_SHORTEST_PRODUCT = 48e-6
"""Seconds of multiplying for each device of a group, below which plain collectives are as fast: a call costs the host
more than theirs do. Measured on two and four H200s (docs/measurements.md), a guess for more."""
_SHORTEST_PRODUCT_OF_SEVERAL_PROCESSES = math.inf
"""The same for a group whose devices several processes drive. Infinite: "auto" leaves them to plain collectives."""
_HOST_SECONDS = 5e-6
"""Of a call of the driver: each index of the leading dimensions that is gathered takes one for each other device."""
_RATES = {1: 1.2e15, 2: 6.5e14, 4: 3.5e14}
"""Operations a second, by bytes of an operand's value: of FP8 and bfloat16 as measured, of float32 a guess at TF32."""
_LONGEST_TIMEOUT = 1e8
"""Seconds, three years: the extension counts in nanoseconds."""


def is_worthwhile(
    spec: CollectiveSpec, xs: Sequence[GemmOperand], kernels: Sequence[GemmOperand], *, gathers: bool
) -> bool:
    """Whether this transport can be used here and is expected to be faster than plain collectives, as far as a trace
    knows: whether one process drives a group is certain only when devices are known, see `_is_usable`.

    Args:
      spec: static arguments.
      xs, kernels: as of the transport's functions; one x where rows are gathered.
      gathers: whether rows are gathered; otherwise products are scattered.
    """
    if not spec.native or native.compute_capability() is None:
        return False
    if sharding.unmapped_axes() or sharding.axes_without_devices(spec.axis_name):
        return False
    seconds = _seconds_to_hide(spec, xs, kernels, gathers=gathers)
    return _hides(seconds, several_processes=jax.local_device_count() < spec.size)


def _hides(seconds: float, *, several_processes: bool) -> bool:
    """Whether that much multiplying for each device hides what a call costs: the rule of "auto"."""
    return seconds >= (_SHORTEST_PRODUCT_OF_SEVERAL_PROCESSES if several_processes else _SHORTEST_PRODUCT)


def _seconds_to_hide(
    spec: CollectiveSpec, xs: Sequence[GemmOperand], kernels: Sequence[GemmOperand], *, gathers: bool
) -> float:
    """For each device of a group, seconds of multiplying less those of the host's copies."""
    size, seconds = spec.size, 0.0
    for i, kernel in enumerate(kernels):
        x = xs[0 if gathers else i].data
        rows = math.prod(x.shape[:-1]) * (size if gathers else 1)
        seconds += 2 * rows * math.prod(kernel.data.shape) / _RATES[x.dtype.itemsize]
    copies = (xs[0].data.shape[0] - 1) * (size - 1) if gathers else 0
    return (seconds - _HOST_SECONDS * copies) / size


def all_gather_gemm(
    spec: CollectiveSpec,
    x: GemmOperand,
    kernels: tuple[GemmOperand, ...],
    biases: tuple[Array | None, ...],
    extras: tuple[Array, ...],
    keep_gathered: bool,
) -> tuple[tuple[Array, ...], Array | None, tuple[Array, ...]]:
    """See `te_jax.parallel.transports.exchange.Transport`."""
    pieces, rows, summed = x.data.shape
    dtype = _product_dtype(spec, x)
    fused = [bias is not None and _fuses_bias(spec, x, dtype) for bias in biases]
    operands: list[Array | None] = [x.data, x.scale_inv]
    results = []
    for kernel, bias, is_fused in zip(kernels, biases, fused, strict=True):
        operands += [kernel.data, kernel.scale_inv, bias.astype(dtype) if bias is not None and is_fused else None]
        columns = kernel.data.shape[1 if kernel.summed_first else 0]
        results.append(jax.ShapeDtypeStruct((pieces, spec.size * rows, columns), dtype))
    results.append(jax.ShapeDtypeStruct((pieces, spec.size * rows, summed), x.data.dtype))
    travels = x.scale_inv if x.scaling in ("row", "block") else None
    scale_shape = (0,) if travels is None else (spec.size, *travels.shape)
    results.append(jax.ShapeDtypeStruct(scale_shape, _FLOAT32))
    operands += extras
    results += [jax.ShapeDtypeStruct((spec.size, *extra.shape), extra.dtype) for extra in extras]
    results.append(_workspace(x, _GATHER_QUEUES))
    attributes: dict[str, object] = {"keep_gathered": keep_gathered, "put": spec.protocol != "get"}
    attributes |= _attributes(spec, x, kernels)
    seconds = _seconds_to_hide(spec, (x,), kernels, gathers=True)
    outcome = _call(spec, "te_all_gather_gemm", results, operands, (x.data, travels, *extras), seconds, attributes)
    ys, (gathered, _, *others) = outcome[: len(kernels)], outcome[len(kernels) :]
    products = tuple(
        with_bias(y, None if is_fused else bias, spec.out_dtype)
        for y, bias, is_fused in zip(ys, biases, fused, strict=True)
    )
    return products, gathered if keep_gathered else None, tuple(others[: len(extras)])


def gemm_reduce_scatter(
    spec: CollectiveSpec, xs: tuple[GemmOperand, ...], kernels: tuple[GemmOperand, ...], bias: Array | None
) -> Array:
    """See `te_jax.parallel.transports.exchange.Transport`."""
    pieces, _, rows, _ = xs[0].data.shape
    dtype = _product_dtype(spec, xs[0])
    columns = kernels[0].data.shape[1 if kernels[0].summed_first else 0]
    operands: list[Array | None] = []
    for x, kernel in zip(xs, kernels, strict=True):
        operands += [x.data, x.scale_inv, kernel.data, kernel.scale_inv]
    operands.append(bias)
    block = (pieces, rows, columns)
    adds_up = bool(xs[1:]) and dtype != _FLOAT32  # several products, which are rounded together
    others = spec.size - 1
    received = others if adds_up else 1 if others <= 1 and bias is None else spec.size
    # Of two devices a product can write to the other one while it runs. Several would write to the same one whenever
    # they get out of step, and their products would wait for each other: copies do not keep them.
    results = [
        jax.ShapeDtypeStruct(block, dtype),
        jax.ShapeDtypeStruct((received, *block), dtype),
        jax.ShapeDtypeStruct((others, *block) if others > 1 or adds_up else (0,), dtype),
        jax.ShapeDtypeStruct((2, *block) if adds_up else (0,), _FLOAT32),
        _workspace(xs[0], 1),
    ]
    attributes = _attributes(spec, xs[0], kernels)
    seconds = _seconds_to_hide(spec, xs, kernels, gathers=False)
    z, *_ = _call(spec, "te_gemm_reduce_scatter", results, operands, results[1:2], seconds, attributes)
    return z.astype(spec.out_dtype)


def _product_dtype(spec: CollectiveSpec, x: GemmOperand) -> np.dtype:
    """Of a result that a product can write: of plain operands their own or float32, of quantized ones any."""
    return spec.out_dtype if x.scaling != "none" else allowed_dtype(x.data.dtype, spec.out_dtype)


def _fuses_bias(spec: CollectiveSpec, x: GemmOperand, dtype: np.dtype) -> bool:
    """Products of tensors in FP8 add no bias to float32, and what is cast afterwards is not yet to be rounded."""
    return dtype == spec.out_dtype and not (x.scaling == "tensor" and dtype == _FLOAT32)


def _workspace(x: GemmOperand, queues: int) -> jax.ShapeDtypeStruct:
    needed = native.has_gpu() and x.scaling != "block"
    return jax.ShapeDtypeStruct((queues * _WORKSPACE_BYTES if needed else 0,), jnp.uint8)


def _attributes(spec: CollectiveSpec, x: GemmOperand, kernels: Sequence[GemmOperand]) -> dict[str, object]:
    return {
        "name": spec.name,
        "timeout": min(float(spec.timeout), _LONGEST_TIMEOUT),
        "scaling": x.scaling,
        "summed_first": bool(kernels and kernels[0].summed_first),
        "fast_accumulation": spec.fast_accumulation,
        "autotune": autotunes(),
        "products": len(kernels),
    }


# ------------------------------------------------------------------------------------------------------------ the call

# Which devices form a group is known only while the program is lowered: until then a mesh has no devices.
_collective_p = Primitive("te_collective")
_collective_p.multiple_results = True


def _call(
    spec: CollectiveSpec,
    target: str,
    results: Sequence[jax.ShapeDtypeStruct],
    operands: Sequence[Array | None],
    shared: Sequence[jax.ShapeDtypeStruct | Array | None],
    seconds: float,
    attributes: dict[str, object],
) -> tuple[Array, ...]:
    """Runs a target, for which None is an array without elements.

    Args:
      spec: static arguments.
      target, results, operands, attributes: of the custom call.
      shared: the arrays that other processes must be able to reach.
      seconds: of multiplying, for `_hides`.

    Such arrays are made while the program is lowered: as operands they would be constants, which differentiation takes
    out of a shard_map inside a loop, and XLA's Shardy of jax 0.11.2 crashes on what is then passed in.
    """
    if not spec.native:
        raise native.NativeUnavailableError(
            "transport='p2p' is a kernel of te_jax's extension, which is not loaded or was not asked for: leave "
            "implementation=None where `te-jax doctor` finds the extension, or use transport='ring' or 'xla'"
        )
    if axes := sharding.axes_without_devices(spec.axis_name):
        raise ValueError(
            f"transport='p2p' over {axes}, which shard_map or pmap did not map, and which therefore stand for no "
            "devices: map axes of a mesh, or use transport='ring' or 'xla'"
        )
    if axes := sharding.unmapped_axes():
        raise ValueError(
            f"transport='p2p' inside a shard_map that leaves {axes} to XLA, which could only gather all operands along "
            "them: map these axes too, or use transport='ring' or 'xla'"
        )
    present = [operand for operand in operands if operand is not None]
    present = sharding.varying_together(present)
    avals = tuple(sharding.result_type(result.shape, result.dtype, *present) for result in results)
    return tuple(
        _collective_p.bind(
            *present,
            target=target,
            present=tuple(operand is not None for operand in operands),
            results=avals,
            spec=spec,
            seconds=seconds,
            shared_bytes=_bytes_shared(shared),
            attributes=tuple(sorted(attributes.items())),
            mesh=sharding.current_mesh(),
        )
    )


@_collective_p.def_abstract_eval
def _(*_, results, **__):
    return results


def _batch(operands, dims, **params):
    """One call after another: a batch dimension is better made a dimension of x."""
    examples = sharding.batched_first(operands, dims)
    results = lax.map(lambda example: tuple(_collective_p.bind(*example, **params)), tuple(examples))
    return list(results), [0] * len(results)


def _jvp(*_, **__):
    raise NotImplementedError("collective products are differentiated once, by their own rules: use transport='xla'")


def _lower(
    ctx: mlir.LoweringRuleContext, *values, target, present, results, spec, seconds, shared_bytes, attributes, mesh
):
    devices = _devices(getattr(ctx.module_context.axis_context, "mesh", None), spec.axis_name)
    attributes = dict(attributes)
    exported = ctx.module_context.lowering_parameters.for_export  # to run on devices that are not known yet
    if spec.transport == "auto" and (exported or not _is_usable(devices, seconds)):
        stand_in = functools.partial(_with_plain_collectives, target, results, spec, attributes, mesh)
        return mlir.lower_fun(_given_all(stand_in, present), multiple_results=True)(ctx, *values)
    if exported:
        raise ValueError(
            "transport='p2p' must know the devices, and an exported program does not: use transport='auto', 'ring' or "
            "'xla'"
        )
    if devices is None:
        raise ValueError(
            "transport='p2p' must know the devices, and this program is lowered for an abstract mesh: pass the mesh to "
            "jax.shard_map, or, inside another shard_map, enter it with jax.set_mesh; or use transport='ring' or 'xla'"
        )
    processes.introduce(devices.flat)
    groups = processes.places_of(devices)
    if shares := processes.span_processes(groups):
        patience = max(attributes["timeout"], processes.SECONDS_TO_COMPILE)
        processes.ensure(groups, shared_bytes, devices.flat[0].platform, patience)
        if "put" in attributes:  # what XLA has allocated here other processes cannot write to
            attributes["put"] = False
    call = functools.partial(
        native.call,
        target,
        results,
        groups=groups.reshape(-1),
        group_size=groups.shape[1],
        shared_bytes=shared_bytes if shares else 0,
        call=int(ctx.module_context.new_channel()),
        **attributes,
    )
    return mlir.lower_fun(_given_all(call, present), multiple_results=True)(ctx, *values)


def _given_all(function: Callable[..., Any], present: tuple[bool, ...]) -> Callable[..., Any]:
    """The function of all operands as one of those that are present."""

    def of_present(*operands: Array) -> Any:
        given = iter(operands)
        return function(*(next(given) if is_present else jnp.zeros((0,), jnp.float32) for is_present in present))

    return of_present


def _is_usable(devices: np.ndarray | None, seconds: float) -> bool:
    """Whether "auto" keeps to this transport now that devices are known, [groups, size]; None of an abstract mesh.

    All processes of a program must come to the same answer.
    """
    if devices is None or devices.flat[0].platform == "cpu":
        return False
    several_processes = processes.span_processes(processes.places_of(devices))
    return _hides(seconds, several_processes=several_processes) and (
        not several_processes or processes.share_hosts(devices)
    )


def _devices(mesh: object, axis_name: tuple[str, ...]) -> np.ndarray | None:
    """The devices of all groups, [groups, size], in the order of their ranks; None of an abstract mesh."""
    if not isinstance(mesh, Mesh):
        return None
    order = [mesh.axis_names.index(name) for name in axis_name]
    others = [axis for axis in range(mesh.devices.ndim) if axis not in order]
    size = math.prod(mesh.devices.shape[axis] for axis in order)
    return mesh.devices.transpose(*others, *order).reshape(-1, size)


def _with_plain_collectives(
    target: str,
    results: Sequence[jax.ShapeDtypeStruct],
    spec: CollectiveSpec,
    attributes: dict[str, object],
    mesh: AbstractMesh,
    *operands: Array,
) -> list[Array]:
    """The results of a target; zeros for its workspace, and for what it gathers for itself alone."""
    scaling = cast(Scaling, attributes["scaling"])
    spec = dataclasses.replace(spec, out_dtype=np.dtype(results[0].dtype))

    def operand(data: Array, scale_inv: Array, *, summed_first: bool = False) -> GemmOperand:
        return GemmOperand(data, None if scaling == "none" else scale_inv, scaling, summed_first)

    def kernel(data: Array, scale_inv: Array) -> GemmOperand:
        return operand(data, scale_inv, summed_first=bool(attributes["summed_first"]))

    found: list[Array | None] = [None] * len(results)
    with jax.sharding.use_abstract_mesh(mesh):
        if target == "te_gemm_reduce_scatter":
            *parts, bias = operands
            xs = tuple(operand(*pair) for pair in zip(parts[::4], parts[1::4], strict=True))
            kernels = tuple(kernel(*pair) for pair in zip(parts[2::4], parts[3::4], strict=True))
            found[0] = xla.gemm_reduce_scatter(spec, xs, kernels, bias if bias.size else None)
        else:
            count = cast(int, attributes["products"])
            (x, scale_inv), parts, extras = operands[:2], operands[2 : 2 + 3 * count], operands[2 + 3 * count :]
            kernels = tuple(kernel(*pair) for pair in zip(parts[::3], parts[1::3], strict=True))
            biases = tuple(bias if bias.size else None for bias in parts[2::3])
            keep = bool(attributes["keep_gathered"])
            ys, gathered, others = xla.all_gather_gemm(spec, operand(x, scale_inv), kernels, biases, extras, keep)
            found[:count], found[count] = ys, gathered
            found[count + 2 : count + 2 + len(extras)] = others
        return [
            jnp.zeros(result.shape, result.dtype) if one is None else one
            for one, result in zip(found, results, strict=True)
        ]


def _bytes_shared(parts: Iterable[jax.ShapeDtypeStruct | Array | None]) -> int:
    """What a call takes of memory that processes share: each part on a multiple of 256 bytes."""
    return sum(-(-math.prod(part.shape) * part.dtype.itemsize // 256) * 256 for part in parts if part is not None)


batching.primitive_batchers[_collective_p] = _batch
ad.primitive_jvps[_collective_p] = _jvp
mlir.register_lowering(_collective_p, _lower, cacheable=False)


def _require_devices() -> None:
    """Programs with this primitive are lowered for each assignment of devices anew. Without it JAX would take a program
    that it lowered for other devices of the same mesh shape, with their groups."""
    from jax._src import dispatch

    dispatch.prim_requires_devices_during_lowering.add(_collective_p)


_require_devices()
