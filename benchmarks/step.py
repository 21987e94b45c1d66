"""Whole train steps of a decoder on one device: te_jax in FP8 against plain JAX in bfloat16, and Flax's own FP8.

A step is forward, backward and AdamW of a decoder with its embedding, head and loss; parameters are float32,
activations bfloat16, and the train state is donated. With several microbatches a `lax.scan` adds up their gradients in
float32. Operation "step" has the case's number of layers, and "step_4_layers" four of them: the time of a layer is the
difference divided by the number of layers between. Implementations:

- bf16, bf16_scan: plain JAX as its best users write it: kernels cast to bfloat16 in the call, attention by cuDNN (by
  XLA on a CPU), logits in bfloat16 and optax's cross-entropy in float32, `optax.adamw`. Layers are unrolled, from a
  list, or in a `lax.scan` over stacked parameters; the faster of the two counts.
- flax_fp8, flax_fp8_scan: the same with Flax's `Fp8DirectDotGeneralOp` for every product of a block with a kernel.
  Products of experts stay in bfloat16: Flax has none for groups.
- te_jax: `te_jax.models.loss` without a recipe, and `te_jax.optim.adamw` with moments in bfloat16.
- te_jax_block, te_jax_current, te_jax_delayed: the same with a recipe. The optimizer quantizes kernels once a step
  (`te_jax.optim.Requantize`); their FP8 copies are part of the state.
- te_jax_block_fp8_head: te_jax_block with the gradients of the head in FP8 (`DecoderConfig.head_recipe`).
- te_jax_block_offload: te_jax_block_fp8_head with inputs of blocks, and what attention reads and returns, in host
  memory until the backward pass (`DecoderConfig.offload`).
- te_jax_block_float32_moments: te_jax_block with the moments of optax: what the kernels gain without the optimizer.

Train states of two implementations do not fit one GPU, so each makes its own from the same seed when its turn comes,
runs a step that is not counted, and then those that are, up to four at a time; compiled programs stay. Model TFLOP/s
are for three times the forward pass's operations, where causal attention counts half of all pairs; MFU is their share
of the GPU's bf16 peak, for FP8 too. Peak memory is what XLA plans for the step: arguments, results and temporaries.
Times by kind come from a trace of a few steps: see `benchmarks.profile`.

No time is reported for an implementation whose losses in the first steps are not those of bf16.
"""

import dataclasses
import functools
import gc
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from benchmarks import flax_fp8, layer, shapes
from benchmarks.harness import CaseResult, Family, Headline, Timing, compute_row, problem, reason_of, rounded
from benchmarks.moe import plain_experts
from benchmarks.profile import traced
from te_jax import models, optim
from te_jax._core.devices import bf16_peak
from te_jax.layers import Router, accumulate_gradients
from te_jax.models import DecoderConfig
from te_jax.offload import LAYER_INPUT, Offload
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, Recipe

LOSS_BOUND = 0.06
"""Largest relative difference of a loss to that of bf16, of each of the first steps from the same state on the same
tokens. The third loss is a fifth of the first: there scaling by tensor is behind bf16 by 3 to 5%."""

_CHECKED_STEPS = 3
_LEARNING_STEPS = 4
"""After which delayed scaling knows the sizes of all gradients, from a state that knows nothing."""

_FAST = ("forward", "dgrad", "wgrad")
_RATE = 1e-4
_ADAMW: dict[str, Any] = {"b2": 0.95, "weight_decay": 0.1}
_NORM_EPS, _ROPE_THETA = 1e-5, 500_000.0  # those of benchmarks.layer

State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Variant:
    """How te_jax trains.

    Attributes:
      recipe: of the products of blocks; None for bfloat16.
      moments: dtype of Adam's moments.
      head_recipe: of the gradients of the output head.
      offload: what blocks keep in host memory.
    """

    recipe: Recipe | None
    moments: str = "bfloat16"
    head_recipe: Recipe | None = None
    offload: Offload | None = None


_OFFLOAD = Offload(names=[LAYER_INPUT, "te_attention_operand", "te_attention_output"])
VARIANTS = {
    "te_jax": _Variant(None),
    "te_jax_block": _Variant(BlockScaling()),
    "te_jax_block_fp8_head": _Variant(BlockScaling(), head_recipe=BlockScaling()),
    "te_jax_block_offload": _Variant(BlockScaling(), head_recipe=BlockScaling(), offload=_OFFLOAD),
    "te_jax_block_float32_moments": _Variant(BlockScaling(), moments="float32"),
    "te_jax_current": _Variant(CurrentScaling(fast_accumulation=_FAST)),
    "te_jax_delayed": _Variant(DelayedScaling(fast_accumulation=_FAST)),
}
FORMS = {"bf16": ("bf16", "bf16_scan"), "flax_fp8": ("flax_fp8", "flax_fp8_scan")}
"""The forms of a peer, of which the fastest counts."""
PEERS = tuple(itertools.chain(*FORMS.values()))
IMPLEMENTATIONS = (*PEERS, *VARIANTS)


@dataclasses.dataclass
class _Program:
    """A compiled step, and how its state is made.

    Attributes:
      name: of the implementation.
      complete: makes the first train state of the parameters given.
      config: whose parameters.
      step: compiled (state, tokens, targets) -> (state, loss); the state given is donated.
      compile_seconds: what tracing and compiling the step took.
      scaling: entries of the state that replace those of `first_state`, once they are known.
      losses: of the first steps.
      device_peak_bytes: most that was in use up to then, where that was in this program's first steps.
    """

    name: str
    complete: Callable[[Any], State]
    config: DecoderConfig
    step: Any
    compile_seconds: float
    scaling: Any = None
    losses: list[float] = dataclasses.field(default_factory=list)
    device_peak_bytes: int | None = None

    def start(self) -> State:
        """The first train state, always the same."""
        state = self.complete(_init(self.config)())
        if self.scaling is not None:
            state["scaling"] = jax.device_put(self.scaling)
        return state


# Measuring


def run_case(
    case: shapes.StepShape, implementations: Sequence[str], timing: Timing, *, profile: Path | None = None
) -> CaseResult:
    """Measure one case with the named implementations; see `harness.Family.run_case`."""
    result = CaseResult()
    layers = case.depths[0]
    for depth in case.depths:
        _run_depth(case, depth, implementations, timing, profile, result)
    if len(case.depths) > 1:
        time_of = {(row["operation"], row["implementation"]): row["median_ms"] for row in result.rows}
        fewer = case.depths[-1]
        for row in result.rows:
            shallow = time_of.get((_operation(case, fewer), row["implementation"]))
            if row["operation"] == _operation(case, layers) and shallow is not None:
                row["layer_ms"] = rounded((row["median_ms"] - shallow) / (layers - fewer))
    return result


def _operation(case: shapes.StepShape, depth: int) -> str:
    return "step" if depth == case.depths[0] else f"step_{depth}_layer{'s' if depth > 1 else ''}"


def _run_depth(
    case: shapes.StepShape,
    depth: int,
    implementations: Sequence[str],
    timing: Timing,
    profile: Path | None,
    result: CaseResult,
) -> None:
    operation = _operation(case, depth)

    tokens, targets = _drawn(case)
    programs: dict[str, _Program] = {}
    expected: list[float] | None = None
    names = dict.fromkeys(implementations if "bf16" in implementations else ("bf16", *implementations))
    for name in names:
        try:
            program = _built(name, case, depth, tokens, targets)
            _learn_and_check(program, tokens, targets)
        except Exception as error:  # one that is missing or out of memory must not cost the others theirs
            result.skipped.append(problem(case.name, operation, name, reason_of(error)))
            del error
            gc.collect()  # its traceback held a train state
            continue
        _say(f"{case.name} {operation} {name}: compiled in {program.compile_seconds:.1f} s, losses {program.losses}")
        if name == "bf16" or expected is None:
            expected = program.losses
        differences = [abs(a - b) / abs(b) for a, b in zip(program.losses, expected, strict=True)]
        if all(difference <= LOSS_BOUND for difference in differences):  # which NaN is not
            programs[name] = program
        else:
            result.wrong.append(
                problem(case.name, operation, name, f"losses {program.losses} differ from {expected}, those of bf16")
            )

    seconds, failed = _measured(programs, tokens, targets, timing)
    result.skipped += [problem(case.name, operation, name, reason) for name, reason in failed.items()]
    for name in seconds:
        breakdown = None
        if depth == case.depths[0]:
            breakdown = _breakdown(programs[name], case, tokens, targets, profile)
        result.rows.append(_row(case, depth, programs[name], seconds, breakdown))


def _row(
    case: shapes.StepShape,
    depth: int,
    program: _Program,
    seconds: dict[str, list[float]],
    breakdown: dict[str, float] | None,
) -> dict[str, Any]:
    flops = _config(case, depth).flops_per_token(case.sequence) * case.tokens
    row = compute_row(seconds, program.name, flops=flops, peers=PEERS)
    fastest = {
        peer: min(statistics.median(seconds[form]) for form in forms if form in seconds)
        for peer, forms in FORMS.items()
        if any(form in seconds for form in forms)
    }
    median = statistics.median(seconds[program.name])
    peak = bf16_peak(jax.devices()[0].device_kind)
    return {
        "case": case.name,
        "model": case.model,
        "operation": _operation(case, depth),
        "implementation": program.name,
        **row,
        **{f"time_over_{peer}": rounded(median / best) for peer, best in fastest.items()},
        "layers": depth,
        "tokens_per_second": rounded(case.tokens / median),
        **({} if peak is None else {"mfu": rounded(row["flops"] / median / peak)}),
        "peak_bytes": _peak_bytes(program.step),
        "device_peak_bytes": program.device_peak_bytes,
        "compile_seconds": rounded(program.compile_seconds),
        "losses": program.losses,
        **({} if breakdown is None else {"breakdown_ms": breakdown}),
    }


def _peak_bytes(compiled: Any) -> int | None:
    """What XLA plans for: results that take the place of a donated argument count once."""
    try:
        found = compiled.memory_analysis()
        alone = found.output_size_in_bytes - found.alias_size_in_bytes
        return int(found.argument_size_in_bytes + found.temp_size_in_bytes + alone)
    except Exception:  # a figure that some backend does not offer must not stop a benchmark
        return None


def _learn_and_check(program: _Program, tokens: jax.Array, targets: jax.Array) -> None:
    """Runs the first steps: those after which scaling is known, and again from the first state, for their losses."""
    before = _peak_in_use()
    state = program.start()
    if jax.tree.leaves(state["scaling"]):
        for _ in range(_LEARNING_STEPS):
            state, _ = program.step(state, tokens, targets)
        program.scaling = jax.device_get(state["scaling"])
        del state
        state = program.start()
    losses = []
    for _ in range(_CHECKED_STEPS):
        state, loss = program.step(state, tokens, targets)
        losses.append(loss)
    program.losses = [rounded(float(loss)) for loss in losses]
    program.device_peak_bytes = after if (after := _peak_in_use()) > before else None


def _peak_in_use() -> int:
    """The most bytes that this process ever had in use on the device."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def _measured(
    programs: dict[str, _Program], tokens: jax.Array, targets: jax.Array, timing: Timing
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of a step, by implementation, and why others failed: in rounds, each in another order."""
    on_cpu = jax.default_backend() == "cpu"
    rounds = max(1, timing.samples // 3)
    steps = 1 if on_cpu else max(1, 4 // tokens.shape[0])  # dispatch hides behind the first one
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    failed: dict[str, str] = {}
    for turn in range(rounds):
        for name in random.Random(turn).sample(list(programs), len(programs)):
            if name in failed:
                continue
            try:
                seconds[name] += _steps_of(programs[name], tokens, targets, samples=1 if on_cpu else 2, steps=steps)
            except Exception as error:
                failed[name] = reason_of(error)
                del seconds[name], error
                gc.collect()
    return seconds, failed


def _steps_of(program: _Program, tokens: jax.Array, targets: jax.Array, *, samples: int, steps: int) -> list[float]:
    """Seconds of a step: samples of several steps that are enqueued together."""
    found = []
    state, loss = program.step(program.start(), tokens, targets)
    jax.block_until_ready((state, loss))
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(steps):
            state, loss = program.step(state, tokens, targets)
        jax.block_until_ready(loss)
        found.append((time.perf_counter() - start) / steps)
    return found


def _breakdown(
    program: _Program,
    case: shapes.StepShape,
    tokens: jax.Array,
    targets: jax.Array,
    profile: Path | None,
) -> dict[str, float] | None:
    """Milliseconds of a step by kind, None without a GPU. With a folder the trace stays, and a list of kernels."""
    if jax.default_backend() != "gpu" and profile is None:
        return None
    with tempfile.TemporaryDirectory() as temporary:
        steps = 1 if case.microbatches > 1 else 2
        folder = Path(temporary) if profile is None else profile / case.name / program.name
        try:
            state, _ = program.step(program.start(), tokens, targets)
            held = [jax.block_until_ready(state)]
            del state

            def run() -> Any:
                loss = None
                for _ in range(steps):
                    held[0], loss = program.step(held[0], tokens, targets)
                return loss

            found = traced(run, calls=steps, folder=folder, program=program.step.as_text())
        except Exception as error:
            _say(f"{program.name}: no profile, {reason_of(error)}")
            return None
        if profile is not None:
            lines = [
                f"{each.milliseconds:9.3f} ms {each.calls:7.2f} × {each.kind:16} {each.name[:120]}\n"
                for each in found.kernels
            ]
            (folder / "kernels.txt").write_text("".join(lines), encoding="utf-8")
            _say(f"{program.name}: trace for ui.perfetto.dev: {found.trace}; its kernels: {folder / 'kernels.txt'}")
    if not found.kernels:
        return None
    return {kind: rounded(value) for kind, value in found.milliseconds.items()}


def _say(line: str) -> None:
    """Progress of a family that compiles for minutes."""
    print(f"  {line}", file=sys.stderr, flush=True)


# Programs


def _drawn(case: shapes.StepShape) -> tuple[jax.Array, jax.Array]:
    """Tokens and targets, int32 [microbatches, batch, sequence]."""
    shape = case.microbatches, case.batch, case.sequence + 1
    text = jax.random.randint(jax.random.key(1), shape, 0, case.vocab, jnp.int32)
    return text[..., :-1], text[..., 1:]


def _config(case: shapes.StepShape, depth: int, recipe: Recipe | None = None) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=case.vocab,
        num_layers=depth,
        hidden_size=case.hidden,
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        mlp_size=case.mlp,
        rope_theta=_ROPE_THETA,
        norm_eps=_NORM_EPS,
        dtype="bfloat16",
        recipe=recipe,
        # Without the losses of the router, which plain JAX would spell in many ways.
        experts=models.Experts(case.experts, Router(case.top_k), balance_weight=0.0) if case.experts else None,
    )


def _built(name: str, case: shapes.StepShape, depth: int, tokens: jax.Array, targets: jax.Array) -> _Program:
    if name in VARIANTS:
        complete, step = _te_jax(VARIANTS[name], case, depth)
    else:
        complete, step = _plain(case, depth, fp8=name.startswith("flax"), scanned=name.endswith("_scan"))
    config = _config(case, depth)
    state = jax.eval_shape(complete, jax.eval_shape(_init(config)))
    start = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=0).lower(state, tokens, targets).compile()
    seconds = time.perf_counter() - start
    donated = () if name.endswith("_scan") else (0,)  # a stack does not fit in the place of layers
    return _Program(name, jax.jit(complete, donate_argnums=donated), config, compiled, seconds)


@functools.cache
def _init(config: DecoderConfig) -> Callable[[], Any]:
    """Makes the first parameters, compiled once for all implementations."""
    return jax.jit(lambda: models.init(config, jax.random.key(0)))


def _te_jax(variant: _Variant, case: shapes.StepShape, depth: int) -> tuple[Callable[[Any], State], Callable[..., Any]]:
    config = dataclasses.replace(
        _config(case, depth, variant.recipe), head_recipe=variant.head_recipe, offload=variant.offload
    )
    # Never implementation=None: where the kernels are not loaded that would publish the reference under their name.
    how = None if variant.recipe is None else models.requantize(config, implementation="native")
    optimizer = optim.adamw(_RATE, mu_dtype=variant.moments, nu_dtype=variant.moments, **_ADAMW)

    def complete(params: Any) -> State:
        state = {"params": params, "optimizer": optimizer.init(params), "scaling": models.init_scaling_state(config)}
        if how is not None:
            zeros = jax.tree.map(jnp.zeros_like, params)
            _, state["kernels"] = optim.apply_updates(params, zeros, requantize=how)
        return state

    def loss(variables: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        params, scaling = variables
        return models.loss(params, tokens, targets, config, scaling, implementation="native")

    def step(state: State, tokens: jax.Array, targets: jax.Array) -> tuple[State, jax.Array]:
        params, scaling = state["params"], state["scaling"]
        operands = params if how is None else optim.merge_kernels(params, state["kernels"])
        gradient = accumulate_gradients(loss, in_place=models.is_head)
        zeros = jax.tree.map(jnp.zeros_like, (params, scaling))
        value, (gradients, scaling) = _over_microbatches(
            functools.partial(gradient, (operands, scaling)), zeros, tokens, targets
        )
        if case.microbatches > 1:
            gradients = jax.tree.map(lambda sum_: sum_ / case.microbatches, gradients)
        with jax.named_scope("optimizer"):
            updates, moments = optimizer.update(gradients, state["optimizer"], params)
            found = optim.apply_updates(params, updates, requantize=how)
        state = {"optimizer": moments, "scaling": scaling, "params": found if how is None else found[0]}
        if how is not None:
            state["kernels"] = found[1]
        return state, value

    return complete, step


def _over_microbatches(
    gradient: Callable[..., tuple[jax.Array, Any]], zeros: Any, tokens: jax.Array, targets: jax.Array
) -> tuple[jax.Array, Any]:
    """The mean loss and the sum of gradients; gradient is (sum so far or None, tokens, targets) -> (loss, sum)."""
    if tokens.shape[0] == 1:
        return gradient(None, tokens[0], targets[0])

    def body(sums: Any, microbatch: Any) -> tuple[Any, jax.Array]:
        value, sums = gradient(sums, *microbatch)
        return sums, value

    sums, values = lax.scan(body, zeros, (tokens, targets))
    return jnp.mean(values), sums


def _plain(
    case: shapes.StepShape, depth: int, *, fp8: bool, scanned: bool
) -> tuple[Callable[[Any], State], Callable[..., Any]]:
    optimizer = optax.adamw(_RATE, **_ADAMW)

    def complete(params: Any) -> State:
        scaling = None
        if fp8:
            kernels = [name for name, value in params["layers"][0].items() if value.ndim == 2 and name != "router"]
            scaling = [{name: flax_fp8.first_state() for name in kernels} for _ in range(depth)]
        if scanned:
            layers, scaling = (
                None if layers is None else jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
                for layers in (params["layers"], scaling)
            )
            params = {**params, "layers": layers}
        return {"params": params, "optimizer": optimizer.init(params), "scaling": scaling}

    kind = layer.FlaxFp8 if fp8 else layer.Plain
    if case.experts:
        kind = _with_experts(kind, case.top_k)

    def block(x: jax.Array, params_and_scaling: Any) -> jax.Array:
        return layer.applied(kind(*params_and_scaling), x, case, "block")

    def loss(variables: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        params, scaling = variables
        x = jnp.take(params["embedding"], tokens, axis=0).astype(jnp.bfloat16)
        if scanned:
            x, _ = lax.scan(lambda x, each: (block(x, each), None), x, (params["layers"], scaling))
        else:
            for i in range(depth):
                x = block(x, (params["layers"][i], None if scaling is None else scaling[i]))
        x, _ = layer.Plain(params, None).norm(x, "final_norm")
        logits = x @ params["head"].astype(x.dtype)
        with jax.named_scope("loss"):
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets))

    def step(state: State, tokens: jax.Array, targets: jax.Array) -> tuple[State, jax.Array]:
        params, scaling = state["params"], state["scaling"]

        def gradient(sums: Any, tokens: jax.Array, targets: jax.Array) -> tuple[jax.Array, Any]:
            value, (gradients, after) = jax.value_and_grad(loss)((params, scaling), tokens, targets)
            if sums is not None:
                gradients = jax.tree.map(jnp.add, sums[0], gradients)
            return value, (gradients, after)  # the next state of scaling, of the last microbatch

        zeros = jax.tree.map(jnp.zeros_like, (params, scaling))
        value, (gradients, scaling) = _over_microbatches(gradient, zeros, tokens, targets)
        if case.microbatches > 1:
            gradients = jax.tree.map(lambda sum_: sum_ / case.microbatches, gradients)
        with jax.named_scope("optimizer"):
            updates, moments = optimizer.update(gradients, state["optimizer"], params)
            params = optax.apply_updates(params, updates)
        return {"params": params, "optimizer": moments, "scaling": scaling}, value

    return complete, step


def _with_experts(kind: type[layer.Plain], top_k: int) -> type[layer.Plain]:
    class WithExperts(kind):
        def mlp(self, x: Any) -> jax.Array:
            return plain_experts(x.reshape(-1, x.shape[-1]), self.parameters, top_k=top_k).reshape(x.shape)

    return WithExperts


FAMILY = Family(
    description="whole train steps on one device: decoder, loss and AdamW, with one and four microbatches",
    cases={"gpu": shapes.STEP_GPU, "cpu": shapes.STEP_CPU},
    implementations=IMPLEMENTATIONS,
    peers=tuple(name for name in IMPLEMENTATIONS if name != "bf16"),
    run_case=run_case,
    headline=Headline(
        operation="step",
        figure="time_over_bf16",
        label="Train step, time as a multiple of the fastest plain JAX's in bfloat16",
        implementations=("bf16", "flax_fp8", "te_jax", "te_jax_current", "te_jax_block", "te_jax_delayed"),
    ),
    profiles=True,
    memory_fraction=0.9,
)
