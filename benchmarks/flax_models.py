"""Train steps of a Llama that a user of Flax wrote, before and after the lines that te_jax asks for.

The model is plain Flax, NNX or Linen: it knows nothing of te_jax. Parameters are float32, activations bfloat16,
attention is cuDNN's (XLA's on a CPU), layers are a list. Implementations, each with the changes of the one before:

- nnx, linen: Flax, `optax.adamw` and optax's cross-entropy of logits in float32.
- …_convert: `te_jax.nnx.convert(model, BlockScaling())`, or `te_jax.flax.convert`.
- …_adam: `te_jax.optim.adamw` with moments in bfloat16.
- …_loss: the head and the loss by `te_jax.ops.linear_cross_entropy(recipe=BlockScaling())`, of the hidden states.
- …_logits, of NNX: with all of the head's products in FP8. …_params, of NNX: with parameters in bfloat16 and
  `master_dtype="int16"`. …_attention, of NNX: with `te_jax.ops.attention` in the place of JAX's, which takes
  FlashAttention 3 where it is installed.
- …_blocks: …_loss with `TransformerBlock` in the place of the user's blocks.
- bf16, bf16_scan, flax_fp8, te_jax_block_fp8_head: those of `benchmarks.step`, for the same parameters. The losses of
  all others are checked against the first one's.

With several microbatches a `lax.scan` adds up gradients; …_loss and …_blocks quantize kernels once a step for all of
them, by `quantize_kernels` and `accumulate_gradients` of te_jax. Steps are enqueued as in `benchmarks.step`.

For nnx, nnx_loss and nnx_blocks also the time of a step after which the host reads the loss, as users' first loops do,
with what NNX does on the host: waited_jit_ms by `nnx.jit` of model and optimizer, waited_cached_ms by
`nnx.cached_partial`, and waited_split_ms where both are split once, before the loop, and merged inside of `jax.jit`.
"""

import functools
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec

import te_jax.flax
import te_jax.nnx
from benchmarks import shapes, step
from benchmarks.harness import CaseResult, Family, Headline, Timing, problem, reason_of, rounded
from te_jax import ops, optim
from te_jax.layers import apply_layers
from te_jax.parallel import FSDP
from te_jax.recipe import BlockScaling, Product

_CHANGES = ("convert", "adam", "loss", "logits", "params", "attention")
_OF = {"nnx": (*_CHANGES, "blocks"), "linen": (*_CHANGES[:3], "blocks")}
_NAMES = {library: (library, *(f"{library}_{change}" for change in changes)) for library, changes in _OF.items()}
_WAITING = ("nnx", "nnx_loss", "nnx_blocks")
_REFERENCES = ("bf16", "bf16_scan", "flax_fp8", "te_jax_block_fp8_head")
TENSOR_AXIS = "tensor"
IMPLEMENTATIONS = (*_REFERENCES, *_NAMES["nnx"], *_NAMES["linen"])
_EPSILON, _ROPE_THETA = 1e-5, 500_000.0


def _rotated(x: jax.Array) -> jax.Array:
    """x [batch, time, heads, head_dim] with rotary positions."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / _ROPE_THETA ** (jnp.arange(half) / half)
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _attended(query: jax.Array, key: jax.Array, value: jax.Array, *, by_te_jax: bool = False) -> jax.Array:
    if by_te_jax:
        return ops.attention(_rotated(query), _rotated(key), value, causal=True)
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    return jax.nn.dot_product_attention(
        _rotated(query), _rotated(key), value, is_causal=True, implementation=implementation
    )


class Attention(nnx.Module):
    by_te_jax = False

    def __init__(self, case: shapes.StepShape, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        self.head_dim = case.head_dim
        self.query = linear(case.hidden, case.heads * case.head_dim)
        self.key = linear(case.hidden, case.kv_heads * case.head_dim)
        self.value = linear(case.hidden, case.kv_heads * case.head_dim)
        self.out = linear(case.heads * case.head_dim, case.hidden)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = (y.reshape(*x.shape[:2], -1, self.head_dim) for y in (self.query(x), self.key(x), self.value(x)))
        return self.out(_attended(*heads, by_te_jax=self.by_te_jax).reshape(*x.shape[:2], -1))


class MLP(nnx.Module):
    def __init__(self, case: shapes.StepShape, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        self.gate_proj = linear(case.hidden, case.mlp)
        self.up_proj = linear(case.hidden, case.mlp)
        self.down_proj = linear(case.mlp, case.hidden)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    def __init__(self, case: shapes.StepShape, rngs: nnx.Rngs):
        norm = functools.partial(nnx.RMSNorm, case.hidden, epsilon=_EPSILON, dtype=jnp.bfloat16, rngs=rngs)
        self.attention_norm, self.attention = norm(), Attention(case, rngs)
        self.mlp_norm, self.mlp = norm(), MLP(case, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nnx.Module):
    def __init__(self, case: shapes.StepShape, depth: int, block: Callable[..., Any], rngs: nnx.Rngs):
        self.remat = case.remat
        self.embed = nnx.Embed(case.vocab, case.hidden, dtype=jnp.bfloat16, rngs=rngs)
        self.layers = nnx.List([block(case, rngs) for _ in range(depth)])
        self.norm = nnx.RMSNorm(case.hidden, epsilon=_EPSILON, dtype=jnp.bfloat16, rngs=rngs)
        self.lm_head = nnx.Linear(case.hidden, case.vocab, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)

    def hidden(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = nnx.remat(lambda layer, x: layer(x))(layer, x) if self.remat else layer(x)
        return self.norm(x)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.lm_head(self.hidden(tokens))


class SharedLlama(Llama):
    """The same, with layers that devices share; `fsdp` is set after `convert`."""

    fsdp: FSDP

    def hidden(self, tokens: jax.Array) -> jax.Array:
        graph, states = nnx.split(self.layers[0])[0], [nnx.state(layer) for layer in self.layers]
        x = apply_layers(
            lambda x, state: nnx.merge(graph, state)(x), states, self.embed(tokens), remat=self.remat, fsdp=self.fsdp
        )
        return self.norm(x)


class TensorLlama(Llama):
    """The same with te_jax's blocks, whose `tensor_axis` devices share them, and so embedding and head."""

    def __init__(self, case: shapes.StepShape, depth: int, block: Callable[..., Any], rngs: nnx.Rngs):
        super().__init__(case, depth, functools.partial(block, tensor_axis=TENSOR_AXIS), rngs)
        self.embed.embedding.set_metadata("out_sharding", (None, TENSOR_AXIS))
        self.lm_head.kernel.set_metadata("out_sharding", (None, TENSOR_AXIS))

    def hidden(self, tokens: jax.Array) -> jax.Array:
        x = jax.lax.with_sharding_constraint(self.embed(tokens), PartitionSpec(None, TENSOR_AXIS))
        for layer in self.layers:
            x = nnx.remat(lambda layer, x: layer(x))(layer, x) if self.remat else layer(x)
        return self.norm(x)


class LinenAttention(nn.Module):
    case: shapes.StepShape

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        case, linear = self.case, functools.partial(nn.Dense, use_bias=False, dtype=jnp.bfloat16)
        query = linear(case.heads * case.head_dim, name="query")(x)
        key = linear(case.kv_heads * case.head_dim, name="key")(x)
        value = linear(case.kv_heads * case.head_dim, name="value")(x)
        heads = (y.reshape(*x.shape[:2], -1, case.head_dim) for y in (query, key, value))
        return linear(case.hidden, name="out")(_attended(*heads).reshape(*x.shape[:2], -1))


class LinenMLP(nn.Module):
    case: shapes.StepShape

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        linear = functools.partial(nn.Dense, use_bias=False, dtype=jnp.bfloat16)
        gate, up = linear(self.case.mlp, name="gate_proj")(x), linear(self.case.mlp, name="up_proj")(x)
        return linear(self.case.hidden, name="down_proj")(nn.silu(gate) * up)


class LinenBlock(nn.Module):
    case: shapes.StepShape

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = functools.partial(nn.RMSNorm, epsilon=_EPSILON, dtype=jnp.bfloat16)
        x = x + LinenAttention(self.case, name="attention")(norm(name="attention_norm")(x))
        return x + LinenMLP(self.case, name="mlp")(norm(name="mlp_norm")(x))


class LinenLlama(nn.Module):
    case: shapes.StepShape
    depth: int
    block: Callable[..., Any]

    def setup(self) -> None:
        self.embed = nn.Embed(self.case.vocab, self.case.hidden, dtype=jnp.bfloat16)
        self.layers = [self.block(self.case) for _ in range(self.depth)]
        self.norm = nn.RMSNorm(epsilon=_EPSILON, dtype=jnp.bfloat16)
        self.lm_head = nn.Dense(self.case.vocab, use_bias=False, dtype=jnp.bfloat16)

    def hidden(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.lm_head(self.hidden(tokens))


# What te_jax changes


def _options(case: shapes.StepShape) -> dict[str, Any]:
    """Arguments of a `TransformerBlock`."""
    heads = {"num_heads": case.heads, "num_kv_heads": case.kv_heads, "head_dim": case.head_dim}
    return {"hidden_features": case.mlp, **heads, "rope_theta": _ROPE_THETA, "dtype": jnp.bfloat16}


def _nnx_blocks(case: shapes.StepShape, rngs: nnx.Rngs, tensor_axis: str | None = None) -> nnx.Module:
    options = _options(case)
    return te_jax.nnx.TransformerBlock(
        case.hidden, recipe=BlockScaling(), tensor_axis=tensor_axis, **options, rngs=rngs
    )


def _linen_blocks(case: shapes.StepShape) -> nn.Module:
    block = nn.remat(te_jax.flax.TransformerBlock) if case.remat else te_jax.flax.TransformerBlock
    return block(recipe=BlockScaling(), **_options(case))


def _has(name: str, change: str) -> bool:
    """Whether an implementation has a change, its own or one before it."""
    own = name.partition("_")[2]
    if own == "blocks":
        return change in ("blocks", *_CHANGES[:3])
    return own in _CHANGES and change in _CHANGES[: _CHANGES.index(own) + 1]


def _adamw(name: str) -> optax.GradientTransformation:
    if not _has(name, "adam"):
        return optax.adamw(step.RATE, **step.ADAMW)
    master = {"master_dtype": "int16"} if _has(name, "params") else {}
    return optim.adamw(step.RATE, mu_dtype="bfloat16", nu_dtype="bfloat16", **master, **step.ADAMW)


def _loss_of_logits(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets))


def _loss_of_hidden(name: str, hidden: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    products: tuple[Product, ...] = ("forward", "dgrad", "wgrad") if _has(name, "logits") else ("dgrad", "wgrad")
    return ops.linear_cross_entropy(hidden, head, targets, recipe=BlockScaling(), fp8_products=products)


# Steps


def _from_decoder(params: Any, path: tuple[Any, ...], like: Any) -> jax.Array:
    """The parameter of a model's path, out of those of `te_jax.models.init`."""
    names = [str(name) for name in path if name not in ("attention", "mlp", "kernel", "scale", "embedding")]
    if names[0] == "layers" or names[0].startswith("layers_"):
        number, name = names[1:] if names[0] == "layers" else (names[0].removeprefix("layers_"), names[1])
        found = params["layers"][int(number)][name.removesuffix("_proj")]
    else:
        found = params[{"embed": "embedding", "norm": "final_norm", "lm_head": "head"}[names[0]]]
    return found.reshape(like.shape).astype(like.dtype)


def nnx_model(name: str, case: shapes.StepShape, depth: int) -> Llama:
    """The model of an implementation, with random parameters."""
    blocks = _has(name, "blocks")
    kind = Llama if case.devices == 1 else TensorLlama if blocks else SharedLlama
    model = kind(case, depth, _nnx_blocks if blocks else Block, nnx.Rngs(0))
    if _has(name, "convert"):
        te_jax.nnx.convert(model, BlockScaling())
    if _has(name, "params"):
        nnx.update(model, jax.tree.map(lambda param: param.astype(jnp.bfloat16), nnx.state(model, nnx.Param)))
    if _has(name, "attention"):
        for layer in model.layers:
            layer.attention.by_te_jax = True
    if isinstance(model, SharedLlama):
        model.fsdp = FSDP(case.devices, quantize=te_jax.nnx.requantize(model.layers[0]))
    return model


def _nnx_loss(name: str) -> Callable[..., jax.Array]:
    def loss(model: Llama, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        if _has(name, "loss"):
            head = model.lm_head.kernel.get_value()
            if isinstance(model, SharedLlama):
                head = head.astype(jnp.bfloat16)  # which XLA gathers then
            return _loss_of_hidden(name, model.hidden(tokens), head, targets)
        return _loss_of_logits(model(tokens), targets)

    return loss


def _nnx_step(name: str, microbatches: int) -> Callable[..., jax.Array]:
    """(model, optimizer, tokens, targets) → loss, as users write it."""
    loss = _nnx_loss(name)

    def train(model: Llama, optimizer: nnx.Optimizer[Any], tokens: jax.Array, targets: jax.Array) -> jax.Array:
        if microbatches == 1:
            value, gradients = nnx.value_and_grad(loss)(model, tokens[0], targets[0])
        else:
            zeros = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
            once = _has(name, "loss") and not isinstance(model, SharedLlama)  # FSDP quantizes by itself
            read = te_jax.nnx.quantize_kernels(model) if once else model
            graph, state = nnx.split(read)

            def add(sums: Any, batch: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
                model = nnx.merge(graph, state, copy=True)
                if once:
                    value, sums = te_jax.nnx.accumulate_gradients(loss)(model, sums, *batch)
                    return sums, value
                value, gradients = nnx.value_and_grad(loss)(model, *batch)
                return jax.tree.map(jnp.add, sums, gradients), value

            gradients, values = jax.lax.scan(add, zeros, (tokens, targets))
            gradients = jax.tree.map(lambda sum_: sum_ / microbatches, gradients)
            value = jnp.mean(values)
        optimizer.update(model, gradients)
        return value

    return train


def nnx_made(name: str, case: shapes.StepShape, depth: int) -> step.Made:
    """The state and the step of an implementation. Several devices of a case share it by `FSDP`, and te_jax's blocks by
    their `tensor_axis`."""

    def objects() -> tuple[Llama, nnx.Optimizer[Any]]:
        model = nnx_model(name, case, depth)
        return model, nnx.Optimizer(model, _adamw(name), wrt=nnx.Param)

    graph = nnx.split(nnx.eval_shape(objects))[0]
    train = _nnx_step(name, case.microbatches)

    def complete(params: Any) -> step.State:
        model, _ = objects()
        state = nnx.state(model, nnx.Param)
        flat = {
            path: leaf.replace(_from_decoder(params, path, leaf).astype(leaf.dtype))
            for path, leaf in nnx.to_flat_state(state)
        }
        nnx.update(model, nnx.from_flat_state(flat))
        optimizer = nnx.Optimizer(model, _adamw(name), wrt=nnx.Param)
        return {"all": nnx.state((model, optimizer)), "scaling": None}

    def run(state: step.State, tokens: jax.Array, targets: jax.Array) -> tuple[step.State, jax.Array]:
        model, optimizer = nnx.merge(graph, state["all"])
        value = train(model, optimizer, tokens, targets)
        return {"all": nnx.state((model, optimizer)), "scaling": None}, value

    return complete, run


def _linen_made(name: str, case: shapes.StepShape, depth: int) -> step.Made:
    own: Any = nn.remat(LinenBlock) if case.remat else LinenBlock
    model = LinenLlama(case, depth, _linen_blocks if _has(name, "blocks") else own)
    if _has(name, "convert"):
        model = te_jax.flax.convert(model, BlockScaling())
    optimizer = _adamw(name)
    sample = jnp.zeros((1, case.sequence), jnp.int32)
    once = _has(name, "loss") and case.microbatches > 1

    def loss(variables: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        y: Any = model.apply(variables, tokens, method="hidden" if _has(name, "loss") else None)
        if _has(name, "loss"):
            return _loss_of_hidden(name, y, variables["params"]["lm_head"]["kernel"], targets)
        return _loss_of_logits(y, targets)

    def complete(params: Any) -> step.State:
        variables = jax.eval_shape(model.init, jax.random.key(0), sample)
        variables = jax.tree.map_with_path(
            lambda path, like: _from_decoder(params, tuple(key.key for key in path[1:]), like), variables
        )
        return {"variables": variables, "optimizer": optimizer.init(variables), "scaling": None}

    def run(state: step.State, tokens: jax.Array, targets: jax.Array) -> tuple[step.State, jax.Array]:
        variables = state["variables"]
        if case.microbatches == 1:
            value, gradients = jax.value_and_grad(loss)(variables, tokens[0], targets[0])
        else:
            read = te_jax.flax.quantize_kernels(model, variables, tokens[0]) if once else variables

            def add(sums: Any, batch: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
                if once:
                    value, sums = te_jax.flax.accumulate_gradients(loss)(read, sums, *batch)
                    return sums, value
                value, gradients = jax.value_and_grad(loss)(read, *batch)
                return jax.tree.map(jnp.add, sums, gradients), value

            gradients, values = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, variables), (tokens, targets))
            gradients = jax.tree.map(lambda sum_: sum_ / case.microbatches, gradients)
            value = jnp.mean(values)
        updates, moments = optimizer.update(gradients, state["optimizer"], variables)
        variables = optim.apply_updates(variables, updates)
        return {"variables": variables, "optimizer": moments, "scaling": None}, value

    return complete, run


# Measuring


def _built(name: str, case: shapes.StepShape, depth: int) -> step.Program:
    if name in _REFERENCES:
        return step.built(name, case, depth)
    make = nnx_made if name.startswith("nnx") else _linen_made
    return step.compiled(name, make(name, case, depth), case, depth, step.ONE_DEVICE)


def run_case(
    case: shapes.StepShape, implementations: Sequence[str], timing: Timing, *, profile: Path | None = None
) -> CaseResult:
    """Measure one case with the named implementations; see `harness.Family.run_case`."""
    result = CaseResult()
    depth = case.depths[0]
    programs: dict[str, step.Program] = {}

    def built(name: str, case: shapes.StepShape, depth: int) -> step.Program:
        programs[name] = _built(name, case, depth)
        return programs[name]

    step.run_depth(case, depth, implementations, timing, profile, result, build=built)
    for row in result.rows:
        name = row["implementation"]
        if name in _WAITING:
            try:
                row |= _waited(name, case, depth, timing, programs[name])
            except Exception as error:  # out of memory, say: what else was measured stays
                result.skipped.append(problem(case.name, row["operation"], f"{name}, waited for", reason_of(error)))
                del error
                gc.collect()
    return result


def _waited(name: str, case: shapes.StepShape, depth: int, timing: Timing, program: step.Program) -> dict[str, float]:
    """Milliseconds of a step after each of which the host reads the loss, by the form of the user's loop."""
    batch = step.drawn(case)
    compiled = nnx.jit(_nnx_step(name, case.microbatches), donate_argnums=(0, 1))

    def objects() -> tuple[Llama, nnx.Optimizer[Any]]:
        model = nnx_model(name, case, depth)
        return model, nnx.Optimizer(model, _adamw(name), wrt=nnx.Param)

    def of_objects() -> Callable[[], jax.Array]:
        model, optimizer = nnx.jit(objects)()
        return lambda: compiled(model, optimizer, *batch)

    def of_cached() -> Callable[[], jax.Array]:
        cached = nnx.cached_partial(compiled, *nnx.jit(objects)())
        return lambda: cached(*batch)

    def of_split() -> Callable[[], jax.Array]:
        state = [program.start()]

        def run() -> jax.Array:
            state[0], loss = program.run(state[0])
            return loss

        return run

    found = {}
    for form, make in (("jit", of_objects), ("cached", of_cached), ("split", of_split)):
        run = make()
        for _ in range(2):
            float(run())
        seconds = []
        for _ in range(2 * timing.samples):
            start = time.perf_counter()
            float(run())
            seconds.append(time.perf_counter() - start)
        found[f"waited_{form}_ms"] = rounded(1e3 * statistics.median(seconds))
        del run
        gc.collect()  # modules and their variables refer to each other
    return found


FAMILY = Family(
    description="train steps of plain Flax models, NNX and Linen, before and after each line that te_jax asks for",
    cases={"gpu": shapes.FLAX_MODELS_GPU, "cpu": shapes.FLAX_MODELS_CPU},
    implementations=IMPLEMENTATIONS,
    peers=tuple(name for name in IMPLEMENTATIONS if name != "bf16"),
    run_case=run_case,
    headline=Headline(
        operation="step",
        figure="time_over_nnx",
        label="Train step of a plain NNX Llama, time as a multiple of the one before the changes",
        implementations=_NAMES["nnx"],
    ),
    profiles=True,
    environment=step.ENVIRONMENT,
)
