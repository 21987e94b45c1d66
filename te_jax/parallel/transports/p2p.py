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
from te_jax.ops._gemm_product import algorithm_for, allowed_dtype
from te_jax.parallel.transports import processes, xla
from te_jax.parallel.transports.exchange import Exchange, Operand, Scaling, with_bias

_FLOAT32 = np.dtype(np.float32)
_WORKSPACE_BYTES = 8 * 2**20 + 512
"""Of each product: 8 MiB for cuBLASLt, and before them 512 bytes for scalars and alignment."""
_GATHER_QUEUES = 2
"""Products of a gather that run at the same time: kProductQueues of cuda_ext/collective_gemm."""

_SHORTEST_PRODUCT = 48e-6
"""Seconds of multiplying for each device of a group, below which plain collectives are as fast: a call costs the host
more than theirs do. Measured on two and four H200s (docs/measurements.md), a guess for more."""
_HOST_SECONDS = 5e-6
"""Of a call of the driver: each index of the leading dimensions that is gathered takes one for each other device."""
_RATES = {1: 1.2e15, 2: 6.5e14, 4: 3.5e14}
"""Operations a second, by bytes of an operand's value: of FP8 and bfloat16 as measured, of float32 a guess at TF32."""
_LONGEST_TIMEOUT = 1e8
"""Seconds, three years: the extension counts in nanoseconds."""


def is_worthwhile(exchange: Exchange, xs: Sequence[Operand], weights: Sequence[Operand], *, gathers: bool) -> bool:
    """Whether this transport can be used here and is expected to be faster than plain collectives.

    Args:
      exchange: what is static.
      xs, weights: as of the transport's functions; one x where rows are gathered.
      gathers: whether they are, or products scattered.
    """
    if not exchange.native or native.compute_capability() is None:
        return False
    if sharding.unmapped_axes() or sharding.axes_without_devices(exchange.axis_name):
        return False
    if jax.local_device_count() < exchange.size:  # a group of several processes: see _is_usable
        return False
    seconds = 0.0
    for i, weight in enumerate(weights):
        x = xs[0 if gathers else i].data
        rows = math.prod(x.shape[:-1]) * (exchange.size if gathers else 1)
        seconds += 2 * rows * math.prod(weight.data.shape) / _RATES[x.dtype.itemsize]
    pieces, size = xs[0].data.shape[0], exchange.size
    copies = (pieces - 1) * (size - 1) if gathers else 0
    return seconds >= _SHORTEST_PRODUCT * size + _HOST_SECONDS * copies


def all_gather_gemm(
    exchange: Exchange,
    x: Operand,
    weights: tuple[Operand, ...],
    biases: tuple[Array | None, ...],
    extras: tuple[Array, ...],
    keep_gathered: bool,
) -> tuple[tuple[Array, ...], Array | None, tuple[Array, ...]]:
    """See `te_jax.parallel.transports.exchange.Transport`."""
    pieces, rows, summed = x.data.shape
    dtype = _product_dtype(exchange, x)
    fused = [bias is not None and _fuses_bias(exchange, x, dtype) for bias in biases]
    operands: list[Array | None] = [x.data, x.scale_inv]
    results = []
    for weight, bias, is_fused in zip(weights, biases, fused, strict=True):
        operands += [weight.data, weight.scale_inv, bias.astype(dtype) if bias is not None and is_fused else None]
        columns = weight.data.shape[1 if weight.summed_first else 0]
        results.append(jax.ShapeDtypeStruct((pieces, exchange.size * rows, columns), dtype))
    results.append(jax.ShapeDtypeStruct((pieces, exchange.size * rows, summed), x.data.dtype))
    travels = x.scale_inv if x.scaling in ("row", "block") else None
    scale_shape = (0,) if travels is None else (exchange.size, *travels.shape)
    results.append(jax.ShapeDtypeStruct(scale_shape, _FLOAT32))
    operands += extras
    results += [jax.ShapeDtypeStruct((exchange.size, *extra.shape), extra.dtype) for extra in extras]
    results.append(_workspace(x, _GATHER_QUEUES))
    attributes: dict[str, object] = {"keep_gathered": keep_gathered, "put": exchange.protocol != "get"}
    attributes |= _attributes(exchange, x, weights)
    outcome = _call(exchange, "te_all_gather_gemm", results, operands, (x.data, travels, *extras), **attributes)
    ys, (gathered, _, *others) = outcome[: len(weights)], outcome[len(weights) :]
    products = tuple(
        with_bias(y, None if is_fused else bias, exchange.out_dtype)
        for y, bias, is_fused in zip(ys, biases, fused, strict=True)
    )
    return products, gathered if keep_gathered else None, tuple(others[: len(extras)])


def gemm_reduce_scatter(
    exchange: Exchange, xs: tuple[Operand, ...], weights: tuple[Operand, ...], bias: Array | None
) -> Array:
    """See `te_jax.parallel.transports.exchange.Transport`."""
    pieces, _, rows, _ = xs[0].data.shape
    dtype = _product_dtype(exchange, xs[0])
    columns = weights[0].data.shape[1 if weights[0].summed_first else 0]
    operands: list[Array | None] = []
    for x, weight in zip(xs, weights, strict=True):
        operands += [x.data, x.scale_inv, weight.data, weight.scale_inv]
    operands.append(bias)
    block = (pieces, rows, columns)
    adds_up = bool(xs[1:]) and dtype != _FLOAT32  # several products, which are rounded together
    others = exchange.size - 1
    received = others if adds_up else 1 if others <= 1 and bias is None else exchange.size
    # Of two devices a product can write to the other one while it runs. Several would write to the same one whenever
    # they get out of step, and their products would wait for each other: copies do not keep them.
    results = [
        jax.ShapeDtypeStruct(block, dtype),
        jax.ShapeDtypeStruct((received, *block), dtype),
        jax.ShapeDtypeStruct((others, *block) if others > 1 or adds_up else (0,), dtype),
        jax.ShapeDtypeStruct((2, *block) if adds_up else (0,), _FLOAT32),
        _workspace(xs[0], 1),
    ]
    attributes = _attributes(exchange, xs[0], weights)
    z, *_ = _call(exchange, "te_gemm_reduce_scatter", results, operands, results[1:2], **attributes)
    return z.astype(exchange.out_dtype)


def _product_dtype(exchange: Exchange, x: Operand) -> np.dtype:
    """Of a result that a product can write: of plain operands their own or float32, of quantized ones any."""
    return exchange.out_dtype if x.scaling != "none" else allowed_dtype(x.data.dtype, exchange.out_dtype)


def _fuses_bias(exchange: Exchange, x: Operand, dtype: np.dtype) -> bool:
    """Products of tensors in FP8 add no bias to float32, and what is cast afterwards is not yet to be rounded."""
    return dtype == exchange.out_dtype and not (x.scaling == "tensor" and dtype == _FLOAT32)


def _workspace(x: Operand, queues: int) -> jax.ShapeDtypeStruct:
    needed = native.has_gpu() and x.scaling != "block"
    return jax.ShapeDtypeStruct((queues * _WORKSPACE_BYTES if needed else 0,), jnp.uint8)


def _attributes(exchange: Exchange, x: Operand, weights: Sequence[Operand]) -> dict[str, object]:
    return {
        "name": exchange.name,
        "timeout": min(float(exchange.timeout), _LONGEST_TIMEOUT),
        "scaling": x.scaling,
        "summed_first": bool(weights and weights[0].summed_first),
        "fast_accumulation": exchange.fast_accumulation,
        "algorithm": algorithm_for("auto", x.scaling),
        "products": len(weights),
    }


# ------------------------------------------------------------------------------------------------------------ the call

# Which devices form a group is known only while the program is lowered: until then a mesh has no devices.
_collective_p = Primitive("te_collective")
_collective_p.multiple_results = True


def _call(
    exchange: Exchange,
    target: str,
    results: Sequence[jax.ShapeDtypeStruct],
    operands: Sequence[Array | None],
    shared: Sequence[jax.ShapeDtypeStruct | Array | None],
    **attributes,
) -> tuple[Array, ...]:
    """Runs a target, for which None is an array without elements. Other processes must be able to reach `shared`.

    Such arrays are made while the program is lowered: as operands they would be constants, which differentiation takes
    out of a shard_map inside a loop, and XLA's Shardy of jax 0.11.2 crashes on what is then passed in.
    """
    if not exchange.native:
        raise native.NativeUnavailableError(
            "transport='p2p' is a kernel of te_jax's extension, which is not loaded or was not asked for: leave "
            "implementation=None where `te-jax doctor` finds the extension, or use transport='ring' or 'xla'"
        )
    if axes := sharding.axes_without_devices(exchange.axis_name):
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
            exchange=exchange,
            shared_bytes=_bytes_shared(shared),
            attributes=tuple(sorted(attributes.items())),
            mesh=jax.sharding.get_abstract_mesh(),
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


def _lower(ctx: mlir.LoweringRuleContext, *values, target, present, results, exchange, shared_bytes, attributes, mesh):
    devices = _devices(getattr(ctx.module_context.axis_context, "mesh", None), exchange.axis_name)
    attributes = dict(attributes)
    exported = ctx.module_context.lowering_parameters.for_export  # to run on devices that nobody knows yet
    if exchange.automatic and (exported or not _is_usable(devices)):
        stand_in = functools.partial(_with_plain_collectives, target, results, exchange, attributes, mesh)
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


def _is_usable(devices: np.ndarray | None) -> bool:
    """Whether "auto" may keep to this transport: between processes it needs what only some jobs allow."""
    if devices is None or devices.flat[0].platform == "cpu":
        return False
    return not processes.span_processes(processes.places_of(devices))


def _devices(mesh: object, axis_name: tuple[str, ...]) -> np.ndarray | None:
    """Those that exchange with each other, [groups, size], in the order of their ranks; None of an abstract mesh."""
    if not isinstance(mesh, Mesh):
        return None
    order = [mesh.axis_names.index(name) for name in axis_name]
    others = [axis for axis in range(mesh.devices.ndim) if axis not in order]
    size = math.prod(mesh.devices.shape[axis] for axis in order)
    return mesh.devices.transpose(*others, *order).reshape(-1, size)


def _with_plain_collectives(
    target: str,
    results: Sequence[jax.ShapeDtypeStruct],
    exchange: Exchange,
    attributes: dict[str, object],
    mesh: AbstractMesh,
    *operands: Array,
) -> list[Array]:
    """The results of a target, and zeros where it keeps what it has gathered for itself, and its workspace."""
    scaling = cast(Scaling, attributes["scaling"])
    exchange = dataclasses.replace(exchange, out_dtype=np.dtype(results[0].dtype))

    def operand(data: Array, scale_inv: Array, *, summed_first: bool = False) -> Operand:
        return Operand(data, None if scaling == "none" else scale_inv, scaling, summed_first)

    def weight(data: Array, scale_inv: Array) -> Operand:
        return operand(data, scale_inv, summed_first=bool(attributes["summed_first"]))

    found: list[Array | None] = [None] * len(results)
    with jax.sharding.use_abstract_mesh(mesh):
        if target == "te_gemm_reduce_scatter":
            *parts, bias = operands
            xs = tuple(operand(*pair) for pair in zip(parts[::4], parts[1::4], strict=True))
            weights = tuple(weight(*pair) for pair in zip(parts[2::4], parts[3::4], strict=True))
            found[0] = xla.gemm_reduce_scatter(exchange, xs, weights, bias if bias.size else None)
        else:
            count = cast(int, attributes["products"])
            (x, scale_inv), parts, extras = operands[:2], operands[2 : 2 + 3 * count], operands[2 + 3 * count :]
            weights = tuple(weight(*pair) for pair in zip(parts[::3], parts[1::3], strict=True))
            biases = tuple(bias if bias.size else None for bias in parts[2::3])
            keep = bool(attributes["keep_gathered"])
            ys, gathered, others = xla.all_gather_gemm(exchange, operand(x, scale_inv), weights, biases, extras, keep)
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
