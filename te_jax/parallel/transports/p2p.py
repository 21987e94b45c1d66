"""Collective products by direct copies between devices: one custom call, in which copies hide behind products.

Devices of a group must be able to access each other's memory. Where one process drives them all, they copy between
XLA's own buffers; where several processes do, through shared memory segments.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh

from te_jax import native, sharding
from te_jax._core.types import PyTree
from te_jax.ops.gemm_product import algorithm_for, allowed_dtype
from te_jax.parallel._collective.call import CollectiveSpec
from te_jax.parallel.transports import processes, xla
from te_jax.parallel.transports.exchange import GemmOperand, with_bias

_FLOAT32 = np.dtype(np.float32)
_WORKSPACE_BYTES = 8 * 2**20 + 512
"""For each stream of GEMMs: 8 MiB for cuBLASLt, after 512 bytes for scalars and alignment."""
_GATHER_STREAMS = 2
"""GEMMs of a gather that run at the same time: kGemmStreams of cuda_ext/collective_gemm."""

_SHORTEST_PRODUCT = 48e-6
"""Seconds of multiplying for each device of a group, below which plain collectives are as fast: a call costs the host
more than theirs do. Measured on two and four H200s (docs/measurements.md), a guess for more."""
_SHORTEST_PRODUCT_OF_SEVERAL_PROCESSES = 180e-6
"""Seconds for a group whose devices several processes drive: the shortest that was measured on two H100s, and faster
than plain collectives (docs/measurements.md)."""
_HOST_SECONDS = 5e-6
"""One call of the driver. A gather makes one for each leading index and each other device."""
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
    if spec.codec.implementation != "native" or native.compute_capability() is None:
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
    gathered_rows = pieces, spec.size * rows
    travels = (x.data, x.scale_inv if x.scaling.has_several_scales else None, *extras)
    return _call(
        spec,
        "all_gather_gemm",
        (x, kernels, biases, extras),
        (
            tuple(jax.ShapeDtypeStruct((*gathered_rows, kernel.columns), spec.out_dtype) for kernel in kernels),
            jax.ShapeDtypeStruct((*gathered_rows, summed), x.data.dtype) if keep_gathered else None,
            tuple(jax.ShapeDtypeStruct((spec.size, *extra.shape), extra.dtype) for extra in extras),
        ),
        seconds=_seconds_to_hide(spec, (x,), kernels, gathers=True),
        shared_bytes=_bytes_shared(travels),
        keep_gathered=keep_gathered,
    )


def gemm_reduce_scatter(
    spec: CollectiveSpec, xs: tuple[GemmOperand, ...], kernels: tuple[GemmOperand, ...], bias: Array | None
) -> Array:
    """See `te_jax.parallel.transports.exchange.Transport`."""
    pieces, _, rows, _ = xs[0].data.shape
    received, *_ = _scatter_buffers(spec, xs, kernels, bias)
    return _call(
        spec,
        "gemm_reduce_scatter",
        (xs, kernels, bias),
        jax.ShapeDtypeStruct((pieces, rows, kernels[0].columns), spec.out_dtype),
        seconds=_seconds_to_hide(spec, xs, kernels, gathers=False),
        shared_bytes=_bytes_shared((received,)),
    )


# --------------------------------------------------------------------------------------------------- the custom calls


def _native_all_gather_gemm(
    spec: CollectiveSpec,
    group: dict[str, Any],
    x: GemmOperand,
    kernels: tuple[GemmOperand, ...],
    biases: tuple[Array | None, ...],
    extras: tuple[Array, ...],
    keep_gathered: bool,
):
    pieces, rows, summed = x.data.shape
    dtype = _product_dtype(spec, x)
    # GEMMs of tensors in FP8 add no bias to float32, and a product that is cast afterwards is not rounded before.
    fuses = dtype == spec.out_dtype and not (x.scaling.by_tensor and dtype == _FLOAT32)
    operands: list[Array | None] = [x.data, x.scale_inv]
    results = []
    for kernel, bias in zip(kernels, biases, strict=True):
        operands += [kernel.data, kernel.scale_inv, bias.astype(dtype) if bias is not None and fuses else None]
        results.append(jax.ShapeDtypeStruct((pieces, spec.size * rows, kernel.columns), dtype))
    results.append(jax.ShapeDtypeStruct((pieces, spec.size * rows, summed), x.data.dtype))
    scales = x.scale_inv if x.scaling.has_several_scales else None
    results.append(jax.ShapeDtypeStruct((0,) if scales is None else (spec.size, *scales.shape), _FLOAT32))
    operands += extras
    results += [jax.ShapeDtypeStruct((spec.size, *extra.shape), extra.dtype) for extra in extras]
    results.append(_workspace(x, _GATHER_STREAMS))
    # Other processes cannot write to arrays that XLA has allocated.
    put = spec.p2p.protocol != "get" and not group["shared_bytes"]
    attributes = _attributes(spec, x, kernels) | {"keep_gathered": keep_gathered, "put": put}
    arrays = native.call_in_order("te_all_gather_gemm", results, *map(_present, operands), **attributes, **group)
    ys, (gathered, _, *gathered_extras) = arrays[: len(kernels)], arrays[len(kernels) :]
    products = tuple(with_bias(y, None if fuses else bias, spec.out_dtype) for y, bias in zip(ys, biases, strict=True))
    return products, gathered if keep_gathered else None, tuple(gathered_extras[: len(extras)])


def _native_gemm_reduce_scatter(
    spec: CollectiveSpec,
    group: dict[str, Any],
    xs: tuple[GemmOperand, ...],
    kernels: tuple[GemmOperand, ...],
    bias: Array | None,
):
    pieces, _, rows, _ = xs[0].data.shape
    results = [
        jax.ShapeDtypeStruct((pieces, rows, kernels[0].columns), _product_dtype(spec, xs[0])),
        *_scatter_buffers(spec, xs, kernels, bias),
        _workspace(xs[0], 1),
    ]
    operands: list[Array | None] = []
    for x, kernel in zip(xs, kernels, strict=True):
        operands += [x.data, x.scale_inv, kernel.data, kernel.scale_inv]
    operands.append(bias)
    attributes = _attributes(spec, xs[0], kernels) | {"keep_gathered": False, "put": False}
    z, *_ = native.call_in_order("te_gemm_reduce_scatter", results, *map(_present, operands), **attributes, **group)
    return z.astype(spec.out_dtype)


_NATIVE = {"all_gather_gemm": _native_all_gather_gemm, "gemm_reduce_scatter": _native_gemm_reduce_scatter}


def _scatter_buffers(spec: CollectiveSpec, xs, kernels, bias: Array | None) -> list[jax.ShapeDtypeStruct]:
    """Buffers to receive, to send, and for sums in float32.

    With two devices, a GEMM can write to the other device while it runs. GEMMs of several devices would write to the
    same one whenever they get out of step, and would wait for each other; copies do not hold them up.
    """
    pieces, _, rows, _ = xs[0].data.shape
    dtype, block = _product_dtype(spec, xs[0]), (pieces, rows, kernels[0].columns)
    adds_up = bool(xs[1:]) and dtype != _FLOAT32  # several products, which are rounded together
    peers = spec.size - 1
    received = peers if adds_up else 1 if peers <= 1 and bias is None else spec.size
    return [
        jax.ShapeDtypeStruct((received, *block), dtype),
        jax.ShapeDtypeStruct((peers, *block) if peers > 1 or adds_up else (0,), dtype),
        jax.ShapeDtypeStruct((2, *block) if adds_up else (0,), _FLOAT32),
    ]


def _product_dtype(spec: CollectiveSpec, x: GemmOperand) -> np.dtype:
    """The dtype that a GEMM writes."""
    return allowed_dtype(x.data.dtype, spec.out_dtype)


def _workspace(x: GemmOperand, streams: int) -> jax.ShapeDtypeStruct:
    needed = native.has_gpu() and not x.scaling.native_blocks
    return jax.ShapeDtypeStruct((streams * _WORKSPACE_BYTES if needed else 0,), jnp.uint8)


def _attributes(spec: CollectiveSpec, x: GemmOperand, kernels: Sequence[GemmOperand]) -> dict[str, Any]:
    return {
        "name": spec.name,
        "timeout": float(min(spec.p2p.timeout, _LONGEST_TIMEOUT)),
        "scaling": x.scaling.product,
        "summed_first": bool(kernels and kernels[0].summed_first),
        "fast_accumulation": spec.fast_accumulation,
        "algorithm": algorithm_for("auto", x.scaling),
        "products": len(kernels),
    }


def _present(x: Array | None) -> Array:
    """An operand of a custom call, without elements where there is none."""
    return jnp.zeros((0,), jnp.float32) if x is None else x


def _bytes_shared(parts: Iterable[jax.ShapeDtypeStruct | Array | None]) -> int:
    """Bytes of a shared memory segment that a call takes: of the arrays that peers access, each padded to 256."""
    return sum(-(-math.prod(part.shape) * part.dtype.itemsize // 256) * 256 for part in parts if part is not None)


# ------------------------------------------------------------------------------------------------------- the primitive

# Which devices form a group is known only while the program is lowered: until then a mesh has no devices. Operands are
# the leaves of a transport's arguments. Arrays without elements are made while the program is lowered: as operands they
# would be constants, which differentiation takes out of a shard_map inside a loop, and XLA's Shardy of jax 0.11.2
# crashes on what is then passed in.
_collective_p = Primitive("te_collective")
_collective_p.multiple_results = True


def _call(spec: CollectiveSpec, function: str, arguments: tuple[PyTree, ...], results: PyTree, **params: Any) -> PyTree:
    """Binds one of the two functions.

    Args:
      spec: static arguments.
      function: its name, of this transport and of xla.
      arguments: after spec; None where there is no array.
      results: what it returns, as shapes and dtypes.
      params: seconds, of multiplying on each device, for `_hides`; shared_bytes; static arguments of the function.
    """
    if spec.codec.implementation != "native":
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
    leaves, tree = jax.tree.flatten(sharding.varying_together(arguments))
    expected, result_tree = jax.tree.flatten(results)
    avals = tuple(sharding.result_type(result.shape, result.dtype, *leaves) for result in expected)
    mesh = sharding.current_mesh()
    arrays = _collective_p.bind(*leaves, function=function, tree=tree, results=avals, spec=spec, mesh=mesh, **params)
    return jax.tree.unflatten(result_tree, arrays)


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
    ctx: mlir.LoweringRuleContext, *values, function, tree, results, spec, mesh, seconds, shared_bytes, **options
):
    del results
    devices = _devices(getattr(ctx.module_context.axis_context, "mesh", None), spec.axis_name)
    exported = ctx.module_context.lowering_parameters.for_export  # to run on devices that are not known yet
    run = functools.partial(getattr(xla, function), spec)
    if spec.transport != "auto" or (not exported and _is_usable(devices, seconds)):
        try:
            group = _group(devices, spec, shared_bytes, int(ctx.module_context.new_channel()), exported=exported)
            run = functools.partial(_NATIVE[function], spec, group)
        except RuntimeError as problem:  # which all processes of the group hear of
            if spec.transport != "auto":
                raise
            warnings.warn(f"transport='auto' uses plain collectives: {problem}", RuntimeWarning, stacklevel=2)

    def of_leaves(*leaves: Array) -> list[Array]:
        with jax.sharding.use_abstract_mesh(mesh):
            return jax.tree.leaves(run(*jax.tree.unflatten(tree, leaves), **options))

    return mlir.lower_fun(of_leaves, multiple_results=True)(ctx, *values)


def _group(
    devices: np.ndarray | None, spec: CollectiveSpec, shared_bytes: int, call: int, *, exported: bool
) -> dict[str, Any]:
    """The attributes of a custom call that name its devices, after processes share the memory that it needs."""
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
    if processes.span_processes(groups):
        patience = max(min(spec.p2p.timeout, _LONGEST_TIMEOUT), processes.SECONDS_TO_COMPILE)
        processes.ensure(groups, shared_bytes, devices.flat[0].platform, patience)
    else:
        shared_bytes = 0
    size = groups.shape[1]
    return {"groups": groups.reshape(-1), "group_size": size, "shared_bytes": shared_bytes, "call": call}


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
    other_axes = [axis for axis in range(mesh.devices.ndim) if axis not in order]
    size = math.prod(mesh.devices.shape[axis] for axis in order)
    return mesh.devices.transpose(*other_axes, *order).reshape(-1, size)


batching.primitive_batchers[_collective_p] = _batch
ad.primitive_jvps[_collective_p] = _jvp
mlir.register_lowering(_collective_p, _lower, cacheable=False)


def _require_devices() -> None:
    """Programs with this primitive are lowered for each assignment of devices anew. Without it JAX would take a program
    that it lowered for other devices of the same mesh shape, with their groups."""
    from jax._src import dispatch

    dispatch.prim_requires_devices_during_lowering.add(_collective_p)


_require_devices()
