"""A stack of layers, one after the other: the loop where recomputation and offload belong."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from te_jax import sharding
from te_jax._core.types import PyTree
from te_jax.checkpoint_policies import Policy, save_attention
from te_jax.layers.microbatches import AccumulatedKernel
from te_jax.offload import Offload
from te_jax.offload.scan import run_scan
from te_jax.offload.stack import describe, run_layers
from te_jax.parallel.fsdp import FSDP, shard_specs, spread_specs, validate
from te_jax.parallel.shards import prepare

X = TypeVar("X")

Layer = Callable[[X, PyTree], X]

Remat = bool | Literal["attention"] | Policy | None
"""What the backward pass recomputes: see `apply_layers`."""


def apply_layers(
    layer: Layer[X] | Sequence[Layer[X]],
    params: PyTree,
    x: X,
    *,
    remat: Remat = None,
    offload: Offload | None = None,
    fsdp: FSDP | None = None,
) -> X:
    """Runs x through a stack of layers: x = layer(x, params[0]), then layer(x, params[1]), and so on.

    The loop is unrolled, and the layer is traced once for all parameters of one shape. A `lax.scan` would fill stacks
    of gradients and residuals with zeros, update them layer by layer, and hold them all at once: 15% of a training
    step. Compile time grows with the number of layers instead.

    Keep parameters in a list. XLA converts and copies the slices of a stack for all layers at once, and again for every
    layer if memory runs short.

    Args:
      layer: (x, parameters of one layer) -> x; or a list of such functions, one for each layer. They may close over
        arrays, whose gradients are sums over layers.
      params: a list or tuple of pytrees, one for each layer; or one pytree of arrays whose first dimension is the
        layer. A pytree may also hold the state of delayed scaling, whose gradient is the next state, and quantized
        kernels.
      x: a pytree.
      remat: what the backward pass recomputes. None: nothing. True: all of a layer except its input. "attention": that
        but attention, whose results stay. Or a policy of `jax.checkpoint`, such as those of
        `te_jax.checkpoint_policies`.
      offload: which residuals wait for the backward pass in host memory, among those that remat keeps; see
        `te_jax.offload.Offload`. There is no forward-mode derivative then.
      fsdp: how devices share the parameters; see `te_jax.parallel.FSDP`. There is no forward-mode derivative then.
        Under `jax.jit` with the mesh of `jax.set_mesh`, parameters that do not lie as `te_jax.parallel.shard_specs`
        says are moved first, and every leaf of x is split along its first dimension, the batch. The layer sees one
        device's part of x, as inside of `jax.shard_map`, where parameters and x are this device's parts. Devices draw
        random numbers for their parts of the batch: the same key gives each other ones.

    Returns:
      The result of the last layer; x if there are no layers.

    Raises:
      ValueError: `params` is one pytree, and its leaves do not have a first dimension of one size; or `remat` is none
        of the above; or offload names what a layer does not keep, or quantizes float64; or its residuals leave a loop
        or a conditional that a GPU differentiates as a whole; or fsdp fits neither mesh nor parameters, or a branch of
        a layer that devices choose by their own values reads a state of delayed scaling, or a layer closes over an
        array on a mesh with Explicit axes.

    Examples:
      >>> import jax, jax.numpy as jnp, te_jax
      >>> layers = [{"kernel": jnp.eye(4)}, {"kernel": 2 * jnp.eye(4)}]
      >>> def run(layers, x):
      ...     return te_jax.layers.apply_layers(lambda x, p: x @ p["kernel"], layers, x, remat=True)
      >>> run(layers, jnp.ones((1, 4))).tolist()
      [[2.0, 2.0, 2.0, 2.0]]
      >>> [gradient["kernel"].shape for gradient in jax.grad(lambda *a: run(*a).sum())(layers, jnp.ones((1, 4)))]
      [(4, 4), (4, 4)]
    """
    _check(remat, offload)
    if fsdp is not None:
        validate(fsdp)
    layers, params = _layers(layer, params, remat)
    if offload is not None and offload.implementation == "native":
        raise ValueError(
            "offload has implementation='native': apply_layers unrolls its loop, where XLA hides its own copies. "
            "te_jax.layers.scan_layers has native ones; leave implementation out here"
        )
    if fsdp is not None and layers:
        return _run_shared(layers, params, x, offload or Offload(names=()), fsdp)
    if offload is not None:
        return run_layers(layers, params, x, offload)
    for each, of_layer in zip(layers, params, strict=True):
        x = each(x, of_layer)
    return x


def _run_shared(layers: list[Layer[X]], params: Sequence[PyTree], x: X, offload: Offload, fsdp: FSDP) -> X:
    params = [_gradients_added(of_layer) for of_layer in params]

    def local(params: Sequence[PyTree], x: X) -> X:
        prepared, shards = prepare(fsdp, params, x)
        return run_layers(layers, prepared, x, offload, shards)

    if sharding.inside_shard_map():
        if fsdp.specs is None:
            raise ValueError(
                "fsdp has no specs, and inside of jax.shard_map nothing else says how parameters are split: pass FSDP "
                "with the specs of a layer, as te_jax.parallel.shard_specs returned them for shard_map"
            )
        return local(params, x)
    mesh = sharding.current_mesh()
    if missing := [axis for axis in fsdp.batch_axes if axis not in mesh.axis_names]:
        raise ValueError(
            f"fsdp names the axes {missing}, and the mesh has {mesh.axis_names}: enter a mesh that has them by "
            "jax.set_mesh"
        )
    if others := [axis for axis in sharding.unmapped_axes() if axis not in fsdp.batch_axes]:
        raise ValueError(
            f"the mesh has several devices along {others}, which fsdp does not name: call apply_layers inside of "
            "jax.shard_map over all axes"
        )
    devices = math.prod(mesh.shape[axis] for axis in fsdp.batch_axes)
    for path, leaf in jax.tree.leaves_with_path(x):
        if not jnp.shape(leaf) or jnp.shape(leaf)[0] % devices:
            raise ValueError(
                f"x{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}, and its first dimension, the batch, is "
                f"split over {devices} devices: pad it, or let the layer close over what is no part of the batch"
            )
    fsdp = dataclasses.replace(fsdp, specs=shard_specs(list(params), fsdp))
    in_specs, batch = spread_specs(fsdp.specs, list(params)), PartitionSpec(fsdp.batch_axes)
    try:
        return sharding.shard_map(local, mesh, (in_specs, batch), batch)(list(params), x)
    except NotImplementedError as error:
        if "Closing over inputs to shard_map" not in str(error):
            raise
        raise ValueError(
            f"layer closes over an array, and the mesh has Explicit axes, {mesh.axis_names}: JAX takes it into "
            "jax.shard_map along Auto axes alone. Pass it to each layer in params, or make a mesh of Auto axes"
        ) from None


def _gradients_added(params: PyTree) -> PyTree:
    """Parameters whose kernels have gradients of their own, where `accumulate_gradients` put its stand-ins."""
    is_leaf = lambda leaf: isinstance(leaf, AccumulatedKernel)  # noqa: E731
    return jax.tree.map(lambda leaf: leaf.added() if is_leaf(leaf) else leaf, params, is_leaf=is_leaf)


def scan_layers(
    layer: Layer[X],
    params: PyTree,
    x: X,
    *,
    remat: Remat = None,
    offload: Offload | None = None,
) -> X:
    """Runs x through a stack of layers in a `jax.lax.scan`: the program is as large as that of one layer.

    `apply_layers` is faster and compiles longer. A model that keeps its parameters stacked, as `flax.linen.scan` and
    `flax.nnx.scan` make them, passes them as they are.

    With offload, te_jax's own copies cross the iterations of the loop and hide behind its layers, and XLA's do not.
    JAX's checkpoint policies cannot have them, because `jax.lax.scan` stacks what a policy keeps by itself. So a
    `lax.scan`, `nn.scan` or `nnx.scan` of your own becomes this call.

    Args:
      layer: (x, parameters of one layer) -> x of the same structure, shapes and dtypes. It may close over arrays, whose
        gradients are sums over layers.
      params: a pytree of arrays whose first dimension is the layer. It may also hold the state of delayed scaling,
        whose gradient is the next state, and quantized kernels.
      x: a pytree.
      remat: what the backward pass recomputes; see `apply_layers`.
      offload: which residuals wait for the backward pass in host memory, among those that remat keeps; see
        `te_jax.offload.Offload`. There is no forward-mode derivative then, and no `jax.vmap` of te_jax's own copies. On
        a GPU take gradients inside of loops and branches around this call, or wrap their bodies in `jax.checkpoint`.

    Returns:
      The result of the last layer; x if there are no layers.

    Raises:
      ValueError: leaves of `params` have no first dimension of one size, or the layer returns an x of another type; or
        te_jax's own copies are compiled for arrays on several devices; or what `apply_layers` refuses.
      NotImplementedError: `jax.vmap` of te_jax's own copies.

    Examples:
      >>> import jax, jax.numpy as jnp, te_jax
      >>> from te_jax.offload import LAYER_INPUT, Offload
      >>> offload = Offload(names=[LAYER_INPUT], min_size=0)
      >>> def loss(kernels, x):
      ...     layer = lambda x, kernel: jnp.tanh(x @ kernel)
      ...     return te_jax.layers.scan_layers(layer, kernels, x, remat=True, offload=offload).sum()
      >>> jax.grad(loss)(jnp.ones((3, 2, 2)), jnp.ones((1, 2))).shape
      (3, 2, 2)
    """
    _check(remat, offload)
    if count := _count(params):
        if offload is not None:
            return run_scan(rematerialized(layer, remat), params, x, offload)
        run = rematerialized(layer, remat)
        return lax.scan(lambda x, of_layer: (run(x, of_layer), None), x, params, length=count)[0]
    return x


def residual_table(
    layer: Layer[X] | Sequence[Layer[X]],
    params: PyTree,
    x: X,
    *,
    remat: Remat = None,
    offload: Offload | None = None,
) -> str:
    """Lists the residuals of each layer, where they wait for the backward pass, and their bytes on all devices.

    The table leaves out parameters, values computed from parameters alone, and residuals for the gradients of arrays
    that the layer closes over.

    Args:
      layer, params, x, remat, offload: as `apply_layers` takes them; arrays may be `jax.ShapeDtypeStruct`.

    Returns:
      Lines of text. The last says how long the copies of a layer take over PCIe 5, where one device has whole arrays.

    Raises:
      ValueError: what `apply_layers` refuses.

    Examples:
      >>> import jax, jax.numpy as jnp, te_jax
      >>> kernels = [jnp.zeros((256, 256))] * 3
      >>> offload = te_jax.offload.Offload(names=[te_jax.offload.LAYER_INPUT])
      >>> layer = lambda x, kernel: jnp.sin(x @ kernel)
      >>> print(te_jax.layers.residual_table(layer, kernels, jnp.zeros((2048, 256)), remat=True, offload=offload))
      layers 0 to 1, each
        host         2.1 MB  layer_input: float32[2048, 256]
      layer 2
        device       2.1 MB  layer_input: float32[2048, 256]
      in all 4.2 MB on the host, 2.1 MB on the device
      copies hide behind a layer whose forward pass takes 0.0419 ms, at 50 GB/s
    """
    _check(remat, offload)
    layers, params = _layers(layer, params, remat)
    return describe(layers, params, x, offload)


def check_remat(remat: object) -> None:
    """Raises a ValueError unless it says what to recompute."""
    if not (remat is None or isinstance(remat, bool) or remat == "attention" or callable(remat)):
        raise ValueError(f"remat is {remat!r}: it must be None, True, 'attention', or a policy of jax.checkpoint")


def _check(remat: object, offload: object) -> None:
    check_remat(remat)
    if not (offload is None or isinstance(offload, Offload)):
        raise ValueError(f"offload is {offload!r}: it must be a te_jax.offload.Offload, or None")


def rematerialized(layer: Layer[X], remat: Remat) -> Layer[X]:
    """The layer, whose backward pass recomputes what remat says."""
    # jit, so that JAX traces and differentiates the layer once. XLA inlines the calls.
    run = jax.jit(layer)
    policy = save_attention if remat == "attention" else remat if callable(remat) else None
    return jax.checkpoint(run, policy=cast(Any, policy)) if remat else run


def _layers(layer: Any, params: PyTree, remat: Remat) -> tuple[list[Layer[X]], Sequence[PyTree]]:
    """One function and one pytree of parameters for each layer."""
    params = _unstacked(params)
    given = list(layer) if isinstance(layer, list | tuple) else [layer] * len(params)
    if len(given) != len(params):
        raise ValueError(f"layer has {len(given)} functions, and params has {len(params)} layers: give one for each")
    made: dict[Layer[X], Layer[X]] = {}
    for each in given:
        if each not in made:
            made[each] = rematerialized(each, remat)
    return [made[each] for each in given], params


def _unstacked(params: PyTree) -> Sequence[PyTree]:
    if isinstance(params, list | tuple) and not hasattr(params, "_fields"):  # a NamedTuple is a pytree of one layer
        return params
    count = _count(params)
    if count == 0:
        return []
    leaves, structure = jax.tree.flatten(params)
    # The gradient of split is one concatenation, which XLA fuses with what reads it; that of indices would be as many
    # padded arrays as layers, and their sum.
    parts = [[lax.squeeze(part, (0,)) for part in lax.split(jnp.asarray(leaf), (1,) * count)] for leaf in leaves]
    return [structure.unflatten(of_layer) for of_layer in zip(*parts, strict=True)]


def _count(params: PyTree) -> int:
    """The number of layers of stacked parameters."""
    leaves = jax.tree.leaves(params)
    sizes = {jnp.shape(leaf)[:1] for leaf in leaves}
    if len(sizes) != 1 or sizes == {()}:
        shapes = ", ".join(sorted({str(jnp.shape(leaf)) for leaf in leaves})) or "none"
        raise ValueError(
            f"params has leaves of shapes {shapes}: stacked parameters need a first dimension of one size, the number "
            "of layers; parameters of single layers need a list"
        )
    ((count,),) = sizes
    return count
