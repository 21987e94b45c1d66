"""A decoder-only transformer of the Llama family as pure functions: `init`, `apply` and `loss`.

RMSNorm before each block, rotary positions, grouped-query or latent attention, a gated MLP, and what `DecoderConfig`
names of other models of the family. Each layer has parameters of its own, in a list, and `te_jax.layers.apply_layers`
runs them. Its blocks compute by the functions of `te_jax.layers`, as those of `te_jax.flax` and `te_jax.nnx` do.

With a recipe, the projections of attention and MLP run in FP8. The output head stays in `dtype`, where the rounding of
FP8 would reach every logit directly; the GEMMs of its gradients, or all of them, run in FP8 where `head_recipe` and
`head_fp8_products` say so. `loss` never holds all logits.

The output head is a projection of the same layout as the others, and split over devices in the same way. Where it is
tied to the embedding, its part is made of that of the embedding.

Inside `shard_map`, `apply` and `loss` take `parallel`, and run on a part of every parameter: see
`te_jax.models.TensorParallel`. `te_jax.models.parallel_loss` is the same for whole arrays on a mesh.

With `config.experts`, every MLP is a mixture of experts (`te_jax.layers.moe`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from te_jax import native, ops
from te_jax._core.types import PyTree, T
from te_jax.layers import linear
from te_jax.layers.microbatches import dense_kernels
from te_jax.layers.sampling import check_tokens
from te_jax.layers.stack import apply_layers, rematerialized
from te_jax.models import tensor_parallel
from te_jax.models.block import Balance, Block, capped, final_norm, rotary_of
from te_jax.models.config import MLP, DecoderConfig, Params, Rope, kernel_facts
from te_jax.models.parallel import TensorParallel, head_spec, loop_specs, param_specs
from te_jax.ops.linear.kernels import Requantize
from te_jax.parallel import FSDP, ring_attention
from te_jax.parallel.ring_attention import positions_here
from te_jax.recipe import DelayedScaling, DelayedScalingState

__all__ = ["Losses", "apply", "init", "init_scaling_state", "loss", "losses", "requantize"]

Implementation = native.Implementation
ScalingState = list[dict[str, DelayedScalingState]]


class Losses(NamedTuple):
    """The result of `losses`.

    Attributes:
      objective: float32 scalar, what training minimises: the cross-entropy, and the experts' auxiliary losses times
        their factors.
      cross_entropy: float32 scalar, the mean in nats per token.
      largest_load: float32 scalar, the load of the experts that most tokens choose: their number over the mean of all
        experts of a block, the largest of all blocks. None without experts.
    """

    objective: jax.Array
    cross_entropy: jax.Array
    largest_load: jax.Array | None


def init(config: DecoderConfig, key: jax.Array) -> Params:
    """Random parameters.

    Kernels are normal with variance 1 / fan_in, and 1 / (2 · num_layers · fan_in) for the two projections of a block
    that write to the residual stream, so that its variance does not grow with depth. The embedding has variance 1, or
    1 / D where it is scaled or tied to the head; norms start as factors of 1, biases and sinks at 0.

    Args:
      config: the shape.
      key: a `jax.random.key`.

    Returns:
      A dict of float32 arrays, V = vocab_size, L = num_layers, D = hidden_size, H, K = heads, F = mlp_size:
      `embedding` [V, D], `final_norm` [D], `head` [D, V] and `layers`, a list of L dicts of `attention_norm` and
      `mlp_norm` [D], `query` [D, H·head_dim], `key` and `value` [D, K·head_dim], `out` [H·head_dim, D], `gate` and
      `up` [D, F], `down` [F, D]. With E experts these three are [E, D, F] and [E, F, D], and `router` is [D, E].
      What else there is, `config.other_shapes` tells: `query_norm` and `key_norm` [head_dim] or [N],
      `attention_post_norm` and `mlp_post_norm` [D] with the other two or in their place, `query_bias` and others
      [N], `sinks` [H], and biases of experts [E, N]. A tied head is no parameter. Latent attention has other kernels:
      see `te_jax.models.Latent`; and so have the first `config.experts.dense_layers` blocks: see `config.block`.
    """
    DecoderConfig.check(config)
    d, count = config.hidden_size, config.num_layers
    embedding_key, head_key, key = jax.random.split(key, 3)
    of_norm = jnp.zeros if config.zero_centered_norms else jnp.ones
    blocks = [config.block(layer) for layer in range(count)]
    layers: list[dict[str, jax.Array]] = [
        {
            name: (of_norm if name.endswith("_norm") else jnp.zeros)(shape, jnp.float32)
            for name, shape in block.other_shapes.items()
        }
        for block in blocks
    ]
    for kind in dict.fromkeys(blocks):
        alike = [layer for layer, block in zip(layers, blocks, strict=True) if block == kind]
        for name in () if kind.lora is None else kind.lora.names:  # the other one, b, starts as 0
            rows, rank = kind.other_shapes[f"{name}_a"]
            adapters, key = _draw(key, len(alike), (rows, rank), rows**-0.5)
            for layer, adapter in zip(alike, adapters, strict=True):
                layer[f"{name}_a"] = adapter
        for name, shape in kind.kernel_shapes.items():
            fan_in = shape[-2] * (2 * count if name in ("out", "down", "shared_down") else 1)
            kernels, key = _draw(key, len(alike), shape, fan_in**-0.5)
            for layer, kernel in zip(alike, kernels, strict=True):
                layer[name] = kernel
    embedding = jax.random.normal(embedding_key, (config.vocab_size, d), jnp.float32)
    params = {"embedding": embedding, "layers": layers, "final_norm": of_norm((d,), jnp.float32)}
    if config.scaled_embedding or config.tied_head:
        params["embedding"] *= d**-0.5
    if not config.tied_head:
        params["head"] = jax.random.normal(head_key, (d, config.vocab_size), jnp.float32) * d**-0.5
    return params


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _draw(key: jax.Array, count: int, shape: tuple[int, ...], scale: float) -> tuple[list[jax.Array], jax.Array]:
    """Normal float32 kernels of one name, one a layer, and the key for the next name.

    All layers are drawn at once: within a jit XLA would compile a generator for every kernel, which took two minutes
    for 18 layers. Names are drawn one after the other, so that memory holds a second copy of one name and not of all.
    """
    key, next_key = jax.random.split(key)
    stack = jax.lax.optimization_barrier(jax.random.normal(key, (count, *shape), jnp.float32) * scale)
    return jax.lax.optimization_barrier((list(stack), next_key))


def init_scaling_state(config: DecoderConfig) -> ScalingState | None:
    """The state of delayed scaling before the first step; `loss` takes it, and its gradient is the next state.

    Args:
      config: the shape.

    Returns:
      For each layer a dict with a `te_jax.recipe.DelayedScalingState` for each projection, by its name in `init`; None
      where the recipe has no state.
    """
    DecoderConfig.check(config)
    recipe = config.recipe
    if not isinstance(recipe, DelayedScaling):
        return None
    return [{name: recipe.init() for name in config.projections} for _ in range(config.num_layers)]


def requantize(
    config: DecoderConfig, *, parallel: TensorParallel | None = None, implementation: Implementation | None = None
) -> PyTree:
    """Which kernels `te_jax.optim.apply_updates` quantizes for the next step, and how.

    A step then quantizes each kernel once, however many microbatches it has:

        params, kernels = te_jax.optim.apply_updates(params, updates, requantize=models.requantize(config))
        operands = te_jax.optim.merge_kernels(params, kernels)  # of the next step
        loss, gradients = te_jax.layers.accumulate_gradients(loss)(operands, gradients, …)

    Args:
      config: the shape, with a recipe.
      parallel: the devices that share the decoder, if any. Left to the layers are kernels of which they cut blocks or
        rows, and those of key and value where devices share heads.
      implementation: see `te_jax.ops.quantize`.

    Returns:
      A tree like the parameters, with a `te_jax.optim.Requantize` for every projection of a block and None elsewhere.

    Raises:
      ValueError: `config` has no recipe, or one for each product.
    """
    DecoderConfig.check(config)
    recipe = config.recipe
    if recipe is None or kernel_facts(config).is_plain:
        raise ValueError(
            f"config.recipe is {recipe!r}: only one recipe for all products says how kernels are quantized"
        )
    how = Requantize(recipe, implementation=implementation)

    def of_block(block: DecoderConfig) -> dict[str, Requantize | None]:
        layer = {**dict.fromkeys((*block.other_shapes, *block.kernel_shapes)), **dict.fromkeys(block.projections, how)}
        if block.experts is not None:
            of_experts = dataclasses.replace(how, stacked_ndim=1)
            layer |= dict.fromkeys(MLP, of_experts)
        if parallel is not None:
            layer |= dict.fromkeys(tensor_parallel.quantized_in_layers(block, parallel))
        return layer

    head = {} if config.tied_head else {"head": None}
    layers = [of_block(config.block(layer)) for layer in range(config.num_layers)]
    return {"embedding": None, "layers": layers, "final_norm": None, **head}


def apply(
    params: Params,
    tokens: jax.Array,
    config: DecoderConfig,
    scaling_state: ScalingState | None = None,
    *,
    segment_ids: jax.Array | None = None,
    parallel: TensorParallel | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Logits of the next token at every position; position t sees tokens 0 … t.

    Args:
      params: what `init` returned for this `config`. Kernels of blocks may be quantized (`requantize`).
      tokens: integer [batch, time], each in [0, vocab_size). As in `jnp.take` and `flax.nnx.Embed`, -1 reads the last
        row of the embedding, and tokens from vocab_size on make logits NaN.
      config: the shape.
      scaling_state: for delayed scaling: what `init_scaling_state` returned, or a later state.
      segment_ids: integer [batch, time] of packed sequences: a token sees only tokens with its own number; see
        `DecoderConfig.max_segments_per_seq`. Rotary positions need no restart.
      parallel: inside `shard_map`, how the decoder is split over devices. `params` are then this device's parts, as
        `te_jax.models.param_specs` says, and `tokens` whole sequences, the same on all devices along its axis.
      implementation: passed to `te_jax.ops.dense` and `te_jax.parallel`.

    Returns:
      Logits [batch, time, vocab_size] in `config.dtype`; with `parallel` this device's part of the vocabulary.

    Raises:
      ValueError: `tokens` is not an integer array of two dimensions, or is empty; `scaling_state` is missing or has no
        use; a size does not fit FP8 products, or does not divide over devices.
    """

    def logits(x: jax.Array, kernel: Any) -> jax.Array:
        layer, options = linear.Layer(kernel, None, None), linear.Options(None, None, implementation)
        features, tensor = ((config.vocab_size,),), None if parallel is None else parallel.tensor
        (y,) = linear.linears(x, (layer,), features=features, dtype=config.dtype, options=options, tensor=tensor)
        return capped(y, config)

    return _run(params, tokens, config, scaling_state, segment_ids, parallel, implementation, logits)[0]


def apply_head(
    params: Params,
    tokens: jax.Array,
    config: DecoderConfig,
    head: Callable[[jax.Array, jax.Array], T],
    scaling_state: ScalingState | None = None,
    *,
    segment_ids: jax.Array | None = None,
    parallel: TensorParallel | None = None,
    implementation: Implementation | None = None,
) -> T:
    """What a function makes of the hidden states, in the place of logits: log-probabilities, or a policy's loss.

    Args:
      params, tokens, config, scaling_state, segment_ids, parallel, implementation: as in `apply`.
      head: of the hidden states [batch, time, hidden_size] and the output head's kernel [hidden_size, vocab_size], such
        as `te_jax.ops.linear_token_loss` with what it needs besides. With `parallel` the kernel is this device's part,
        which `vocab_axis=parallel.axis_name` says to it. Where there is a `config.softcaps.logits`, head caps logits
        itself, as with the `logit_softcap` of `te_jax.ops.Softmax`.

    Returns:
      What head returns.

    Raises:
      ValueError: what `apply` refuses.

    Examples:
      >>> import functools, jax, jax.numpy as jnp, te_jax
      >>> config = te_jax.models.PRESETS["nano"]
      >>> params = te_jax.models.init(config, jax.random.key(0))
      >>> tokens = jnp.array([[1, 2, 3, 4]])
      >>> log_probs = functools.partial(te_jax.ops.linear_log_probs, tokens=tokens[:, 1:])
      >>> te_jax.models.apply_head(params, tokens[:, :-1], config, log_probs).shape
      (1, 3)
    """

    def of_head(x: jax.Array, kernel: Any) -> T:
        x = x if parallel is None else tensor_parallel.all_of_the_time(x, parallel)
        return head(x, dense_kernels((kernel,))["kernel"][0])

    return _run(params, tokens, config, scaling_state, segment_ids, parallel, implementation, of_head)[0]


def loss(
    params: Params,
    tokens: jax.Array,
    targets: jax.Array,
    config: DecoderConfig,
    scaling_state: ScalingState | None = None,
    *,
    segment_ids: jax.Array | None = None,
    parallel: TensorParallel | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Mean cross-entropy of `targets` under the logits of `apply`, in nats per token: what training minimises.

    With experts it has their auxiliary losses besides; `losses` has the cross-entropy alone.

    With delayed scaling the gradient with respect to `scaling_state` is the state of the next step:

        gradients, scaling_state = jax.grad(loss, argnums=(0, 4))(params, tokens, targets, config, scaling_state)

    Args:
      params: what `init` returned for this `config`. Kernels of blocks may be quantized (`requantize`); gradients with
        respect to these need `te_jax.layers.accumulate_gradients`.
      tokens: integer [batch, time].
      targets: integer [batch, time]: the token that follows each position, or -100 where none is to be predicted.
      config: the shape.
      scaling_state: for delayed scaling: what `init_scaling_state` returned, or a later state.
      segment_ids: of packed sequences: see `apply`. `targets` behind the last token of a segment are -100.
      parallel: inside `shard_map`, how the decoder is split over devices: see `apply`. `targets` are like `tokens`.
      implementation: passed to `te_jax.ops.dense`, `te_jax.parallel` and the loss.

    Returns:
      float32 scalar; with `parallel` the same on all devices.

    Raises:
      ValueError: `tokens` or `targets` is not an integer array of two dimensions, or is empty, or their shapes differ;
        or for what `apply` refuses.
    """
    run = functools.partial(losses, segment_ids=segment_ids, parallel=parallel, implementation=implementation)
    return run(params, tokens, targets, config, scaling_state).objective


def losses(
    params: Params,
    tokens: jax.Array,
    targets: jax.Array,
    config: DecoderConfig,
    scaling_state: ScalingState | None = None,
    *,
    segment_ids: jax.Array | None = None,
    parallel: TensorParallel | None = None,
    implementation: Implementation | None = None,
) -> Losses:
    """`loss`, its cross-entropy alone, and the load of experts: for logs and validations.

    Args:
      params, tokens, targets, config, scaling_state, segment_ids, parallel, implementation: see `loss`.

    Returns:
      Losses(objective, cross_entropy, largest_load). Without experts the first two are the same.

    Raises:
      ValueError: what `loss` refuses.
    """
    check_tokens("targets", targets)
    if targets.shape != tokens.shape:
        raise ValueError(
            f"targets has shape {targets.shape} and tokens has shape {tokens.shape}: give one target for each token"
        )

    @jax.named_scope("loss")
    def cross_entropy(x: jax.Array, head: Any) -> jax.Array:
        arguments = dense_kernels((head,))
        kernel, accumulator = arguments["kernel"][0], arguments["wgrad_accumulator"][0]
        options: Any = {"accumulate": arguments["accumulate"], "recipe": config.head_recipe}
        options["fp8_products"] = config.head_fp8_products
        options["loss"] = ops.CrossEntropy(logit_softcap=config.softcaps.logits)
        if parallel is not None:
            x = tensor_parallel.all_of_the_time(x, parallel)
            options |= {"vocab_axis": parallel.axis_name, "reduction": "sum"}
            options["weight"] = tensor_parallel.shares_of_the_mean(targets, parallel)
        value = ops.linear_cross_entropy(
            x, kernel, targets, wgrad_accumulator=accumulator, implementation=implementation, **options
        )
        if parallel is not None and parallel.batch_axes:
            value = jax.lax.psum(value, parallel.batch_axes)
        return value

    value, balance = _run(params, tokens, config, scaling_state, segment_ids, parallel, implementation, cross_entropy)
    if balance is None:
        return Losses(value, value, None)
    return Losses(value + balance.auxiliary, value, balance.largest_load)


def _run(
    params: Params,
    tokens: jax.Array,
    config: DecoderConfig,
    scaling_state: ScalingState | None,
    segment_ids: jax.Array | None,
    parallel: TensorParallel | None,
    implementation: Implementation | None,
    of_head: Callable[[jax.Array, Any], T],
) -> tuple[T, Balance | None]:
    """of_head(hidden states, head), and the balance of the experts."""
    DecoderConfig.check(config)
    check_tokens("tokens", tokens)
    if (scaling_state is not None) != isinstance(config.recipe, DelayedScaling):
        raise ValueError(
            f"scaling_state is {'missing' if scaling_state is None else 'given'}, and config.recipe is "
            f"{config.recipe!r}: delayed scaling, and nothing else, takes what `init_scaling_state` returns"
        )
    if parallel is not None:
        params = tensor_parallel.enter(params, tokens, config, parallel)
    context_axis = None if parallel is None else parallel.context_axis
    time = tokens.shape[1]
    positions = jnp.arange(time) if context_axis is None else positions_here(context_axis, time)
    rotary = rotary_of(positions, config)

    def block(
        config: DecoderConfig,
        window: int | None,
        rope: Rope | None,
        carried: tuple[jax.Array, Balance | None],
        layer_and_state: tuple[PyTree, PyTree],
    ) -> tuple[jax.Array, Balance | None]:
        x, balance = carried
        layer, state = layer_and_state

        def attend(
            query: jax.Array, key: jax.Array, value: jax.Array, sinks: jax.Array | None, latents: object = None
        ) -> jax.Array:
            del latents  # which a cache alone holds
            options: Any = {"causal": True, "window": window, "segment_ids": segment_ids}
            options["max_segments_per_seq"] = None if segment_ids is None else config.max_segments_per_seq
            options |= {"scale": config.factors.scores, "implementation": config.attention}
            if context_axis is not None:
                return ring_attention(query, key, value, axis_name=context_axis, **options)
            return ops.attention(query, key, value, sinks=sinks, softcap=config.softcaps.scores, **options)

        x, own = Block(layer, state, config, parallel, implementation)(x, rotary[rope], attend)
        return x, _together(balance, own)

    def ending(carried: tuple[jax.Array, Balance | None], last: Params) -> tuple[T, Balance | None]:
        x, balance = carried
        x = final_norm(last["final_norm"], config, implementation)(x, None)
        return of_head(x, last["head"]), balance

    x = tensor_parallel.embed(params["embedding"], tokens, config, parallel)
    states = [None] * config.num_layers if scaling_state is None else scaling_state
    layers = list(zip(params["layers"], states, strict=True))
    balance = None if config.experts is None else Balance(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))
    last = {"final_norm": params["final_norm"], "head": head_of(params, config, parallel)}
    shared = parallel is not None and parallel.fsdp is not None
    of_kind: dict[tuple[DecoderConfig, int | None, Rope | None], Callable[..., Any]] = {}
    kinds = list(zip(map(config.block, range(config.num_layers)), config.windows, config.ropes, strict=True))
    for kind in dict.fromkeys(kinds):
        run = functools.partial(block, *kind)
        of_kind[kind] = rematerialized(run, config.remat) if shared and config.remat else run
    blocks = [of_kind[kind] for kind in kinds]
    if parallel is None or parallel.fsdp is None:
        return ending(apply_layers(blocks, layers, (x, balance), remat=config.remat, offload=config.offload), last)
    # The head is gathered beside the last block, and its gradient travels beside the first one of the backward pass.
    return apply_layers(
        [*blocks, ending],
        [*layers, last],
        (x, balance),
        offload=config.offload,
        fsdp=_bound(parallel.fsdp, config, parallel, scaling_state, implementation),
    )


def _bound(
    fsdp: FSDP,
    config: DecoderConfig,
    parallel: TensorParallel,
    scaling_state: ScalingState | None,
    implementation: Implementation | None,
) -> FSDP:
    """FSDP of the blocks and the head, with what the decoder knows of them."""
    specs = param_specs(config, parallel)
    of_state = None if scaling_state is None else dict.fromkeys(scaling_state[0], PartitionSpec())
    blocks = [config.block(layer) for layer in range(config.num_layers)]
    quantize: list[Any] = [None] * len(blocks)
    # With scales of rows or of a state's amax, whole kernels are quantized by the layers.
    if scaling_state is None and kernel_facts(config).is_symmetric:
        # Devices quantize here what cuts blocks, too.
        whole = dataclasses.replace(parallel, fsdp=None)
        hows = requantize(config, parallel=whole, implementation=implementation)["layers"]
        quantize = [(how, None) for how in hows]
    last = {"final_norm": specs["final_norm"], "head": head_spec(parallel)}
    of_blocks = [(loop_specs(block, parallel), of_state) for block in blocks]
    return dataclasses.replace(fsdp, specs=[*of_blocks, last], quantize=[*quantize, None])


def _together(first: Balance | None, second: Balance | None) -> Balance | None:
    """The balance of the blocks so far, and of the next one."""
    if first is None or second is None:
        return first
    return Balance(first.auxiliary + second.auxiliary, jnp.maximum(first.largest_load, second.largest_load))


def is_head(path: jax.tree_util.KeyPath, leaf: object) -> bool:
    """Whether a parameter is the output head, whose gradient `loss` adds in place where `accumulate_gradients` asks.

    Args:
      path: of the parameter, as `jax.tree_util` makes it.
      leaf: the parameter; it does not matter.

    Examples:
      >>> import te_jax
      >>> gradient = te_jax.layers.accumulate_gradients(te_jax.models.loss, in_place=te_jax.models.is_head)
    """
    del leaf
    return path[-1:] == (jax.tree_util.DictKey("head"),)


def head_of(params: Params, config: DecoderConfig, parallel: TensorParallel | None = None) -> Any:
    """The kernel of the output head [D, V], or this device's part of it."""
    return tensor_parallel.tied_head(params["embedding"], parallel) if config.tied_head else params["head"]
