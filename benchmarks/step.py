"""Whole train steps of a decoder on one device: te_jax in FP8 against plain JAX in bfloat16, and Flax's own FP8.

A step is forward, backward and AdamW of a decoder with its embedding, head and loss; parameters are float32 unless a
name says otherwise, activations bfloat16, and the train state is donated. In a case "…-remat" blocks keep only their
inputs. With several microbatches a `lax.scan` adds up their gradients in float32. Operation "step" has the case's
number of layers, and "step_4_layers" four of them: the time of a layer is the difference divided by the number of
layers between. Implementations:

- bf16, bf16_scan: plain JAX as its best users write it: kernels cast to bfloat16 in the call, attention by cuDNN (by
  XLA on a CPU), logits in bfloat16 and optax's cross-entropy in float32, `optax.adamw`. Layers are unrolled, from a
  list, or in a `lax.scan` over stacked parameters; the faster of the two counts.
- flax_fp8, flax_fp8_scan: the same with Flax's `Fp8DirectDotGeneralOp` for every product of a block with a kernel.
  Products of experts stay in bfloat16: Flax has none for groups.
- te_jax: `te_jax.models.loss` without a recipe, and `te_jax.optim.adamw` with moments in bfloat16.
- te_jax_block, te_jax_current, te_jax_delayed: the same with a recipe. The optimizer quantizes kernels once a step
  (`te_jax.optim.Requantize`); their FP8 copies are part of the state.
- te_jax_xla: te_jax_current by XLA, as on GPUs without te_jax's products.
- te_jax_block_fp8_head: te_jax_block with the gradients of the head in FP8 (`DecoderConfig.head_recipe`).
- te_jax_block_bf16_params: te_jax_block_fp8_head with parameters in bfloat16, the rest of the float32 numbers in int16
  beside the moments (`te_jax.optim.adamw(master_dtype="int16")`), and gradients in bfloat16. Those of several
  microbatches still add up in float32.
- te_jax_block_fp8_logits: te_jax_block_bf16_params with the forward GEMM of the head in FP8, too, which loses most of
  the head's accuracy: see `benchmarks.linear_cross_entropy` (`DecoderConfig.head_fp8_products`).
- te_jax_block_fp8_moments: te_jax_block_fp8_logits with moments in FP8. Only `benchmarks.whole_model` runs it and these
  peers: bf16_remat recomputes blocks from their inputs, bf16_dots from the results of their products with kernels, and
  …_mu_bf16 keeps the first moment in bfloat16.
- te_jax_block_offload: te_jax_block_fp8_head with inputs of blocks, and what attention reads and returns, in host
  memory until the backward pass (`DecoderConfig.offload`).
- te_jax_block_remat…: te_jax_block_fp8_head whose blocks are recomputed, from their inputs; with "_attention" from the
  results of attention too, with "_fp8" from the operands in FP8. Only `benchmarks.remat` runs these.
- te_jax_block_float32_moments: te_jax_block with the moments of optax: what the kernels gain without the optimizer.
- te_jax_block_statistics: te_jax_block with `te_jax.debug.with_statistics` of all tensors in every step, as `te-jax
  train --statistics` takes it every N steps: layers quantize the kernels, which then have statistics too.

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from benchmarks import flax_fp8, layer, shapes
from benchmarks.harness import (
    CaseResult,
    Family,
    Headline,
    Timing,
    compute_row,
    problem,
    reason_of,
    rounded,
    temporary_bytes,
)
from benchmarks.moe import plain_experts
from benchmarks.profile import traced
from te_jax import checkpoint_policies, debug, models, native, optim
from te_jax._core.devices import bf16_peak
from te_jax.layers import Router, accumulate_gradients
from te_jax.models import DecoderConfig
from te_jax.offload import LAYER_INPUT, Offload
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, Product, Recipe

LOSS_BOUND = 0.06
"""Largest relative difference of a loss to that of bf16, of each of the first steps from the same state on the same
tokens. The third loss is a fifth of the first: there scaling by tensor is behind bf16 by 3 to 5%."""

LOSS_BOUND_ELSEWHERE = 0.15
"""The same of another process, which draws its own parameters from the same distribution."""

CHECKED_STEPS = 3
_LEARNING_STEPS = 4
"""After which delayed scaling knows the sizes of all gradients, from a state that knows nothing."""

_ALL: tuple[Product, ...] = ("forward", "dgrad", "wgrad")
RATE = 1e-4
ADAMW: dict[str, Any] = {"b2": 0.95, "weight_decay": 0.1}
_NORM_EPS, _ROPE_THETA = 1e-5, 500_000.0  # those of benchmarks.layer

ENVIRONMENT = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}
"""JAX's default share of a GPU's memory is too little."""

State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Variant:
    """How te_jax trains.

    Attributes:
      recipe: of the products of blocks; None for bfloat16.
      moments: dtype of Adam's moments.
      head_recipe: of the output head.
      head_fp8_products: of the products that it quantizes.
      master_dtype: of what completes bfloat16 parameters; None for float32 ones.
      offload: what blocks keep in host memory.
      remat: what blocks recompute; None for what the case says.
      statistics: whether the step returns those of all tensors in FP8.
      implementation: of te_jax's operations. Never None: where the kernels are not loaded that would publish the
        reference under their name.
    """

    recipe: Recipe | None
    moments: str = "bfloat16"
    head_recipe: Recipe | None = None
    head_fp8_products: tuple[Product, ...] = ("dgrad", "wgrad")
    master_dtype: str | None = None
    offload: Offload | None = None
    remat: Any = None
    statistics: bool = False
    implementation: native.Implementation = "native"


_OFFLOAD = Offload(names=[LAYER_INPUT, "te_attention_operand", "te_attention_output"])
REMATS = {
    "": True,
    "_attention": "attention",
    "_fp8": checkpoint_policies.save_fp8_operands,
    "_fp8_attention": jax.checkpoint_policies.save_from_both_policies(
        checkpoint_policies.save_fp8_operands, checkpoint_policies.save_attention
    ),
}
"""What blocks keep, by the end of a name."""
VARIANTS = {
    "te_jax": Variant(None),
    "te_jax_block": Variant(BlockScaling()),
    "te_jax_block_fp8_head": Variant(BlockScaling(), head_recipe=BlockScaling()),
    "te_jax_block_bf16_params": Variant(BlockScaling(), head_recipe=BlockScaling(), master_dtype="int16"),
    "te_jax_block_fp8_logits": Variant(
        BlockScaling(), head_recipe=BlockScaling(), master_dtype="int16", head_fp8_products=_ALL
    ),
    "te_jax_block_fp8_moments": Variant(
        BlockScaling(), "float8_e4m3fn", BlockScaling(), master_dtype="int16", head_fp8_products=_ALL
    ),
    "te_jax_block_offload": Variant(BlockScaling(), head_recipe=BlockScaling(), offload=_OFFLOAD),
    "te_jax_block_float32_moments": Variant(BlockScaling(), moments="float32"),
    "te_jax_block_statistics": Variant(BlockScaling(), statistics=True),
    **{
        f"te_jax_block_remat{name}": Variant(BlockScaling(), head_recipe=BlockScaling(), remat=remat)
        for name, remat in REMATS.items()
    },
    "te_jax_current": Variant(CurrentScaling(fast_accumulation=_ALL)),
    "te_jax_delayed": Variant(DelayedScaling(fast_accumulation=_ALL)),
    "te_jax_xla": Variant(CurrentScaling(fast_accumulation=_ALL), implementation="xla"),
}
RECOMPUTING = ("bf16_remat", "bf16_remat_mu_bf16", "bf16_dots_mu_bf16")
FORMS = {"bf16": ("bf16", "bf16_scan", *RECOMPUTING), "flax_fp8": ("flax_fp8", "flax_fp8_scan")}
"""The forms of a peer, of which the fastest counts."""
PEERS = ("bf16", "bf16_scan", "flax_fp8", "flax_fp8_scan")
_OF_OTHER_FAMILIES = ("te_jax_block_fp8_moments", *(f"te_jax_block_remat{name}" for name in REMATS))
IMPLEMENTATIONS = (*PEERS, *(name for name in VARIANTS if name not in _OF_OTHER_FAMILIES))


class OneDevice:
    """Where a step runs, and what that changes in it: nothing here. `benchmarks.fsdp` has devices that share it."""

    @property
    def sums_in_place(self) -> Callable[..., bool] | None:
        """Which gradients besides those of quantized kernels microbatches add in place."""
        return models.is_head

    @property
    def compiler_options(self) -> dict[str, Any]:
        return {}

    def rows(self, x: jax.Array) -> jax.Array:
        """Activations [batch, …], of plain JAX."""
        return x

    def whole(self, kernel: jax.Array) -> jax.Array:
        """The head, of plain JAX."""
        return kernel

    def parts(self, gradients: Any) -> Any:
        """Gradients of all parameters."""
        return gradients

    def loss(self, config: DecoderConfig, implementation: native.Implementation) -> Callable[..., jax.Array]:
        """te_jax's (params, tokens, targets, scaling state) → loss."""

        def loss(params: Any, tokens: jax.Array, targets: jax.Array, scaling: Any) -> jax.Array:
            return models.loss(params, tokens, targets, config, scaling, implementation=implementation)

        return loss

    def requantize(self, config: DecoderConfig, implementation: native.Implementation) -> Any:
        """Which kernels the optimizer quantizes."""
        return None if config.recipe is None else models.requantize(config, implementation=implementation)

    def shardings(self, state: State) -> Any:
        """Those of a train state or of the part that has its parameters."""

    def put(self, batch: Any) -> Any:
        """Tokens and targets [microbatches, batch, sequence] on the devices."""
        return batch


ONE_DEVICE = OneDevice()


@dataclasses.dataclass
class Program:
    """A compiled step, and how its state is made.

    Attributes:
      name: of the implementation.
      first: makes the first train state, always the same.
      batch: tokens and targets.
      step: compiled (state, tokens, targets) -> (state, loss or (loss, statistics)); the state given is donated.
      compile_seconds: what tracing and compiling the step took.
      scaling: entries of the state that replace those of `first_state`, once they are known.
      losses: of the first steps.
      device_peak_bytes: most that was in use up to then, where that was in this program's first steps.
    """

    name: str
    first: Callable[[], State]
    batch: tuple[jax.Array, jax.Array]
    step: Any
    compile_seconds: float
    scaling: Any = None
    losses: list[float] = dataclasses.field(default_factory=list)
    device_peak_bytes: int | None = None

    def start(self) -> State:
        """The first train state, with scaling that is known."""
        state = self.first()
        if self.scaling is not None:
            known = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), self.scaling, state["scaling"])
            state["scaling"] = known
        return state

    def run(self, state: State) -> tuple[State, jax.Array]:
        state, result = self.step(state, *self.batch)
        return state, result[0] if isinstance(result, tuple) else result


@dataclasses.dataclass
class Elsewhere:
    """What another process measured.

    Attributes:
      seconds: of a step, one for each sample.
      losses, compile_seconds: as those of a `Program`.
      figures: more keys of the row.
    """

    seconds: list[float]
    losses: list[float]
    compile_seconds: float
    figures: dict[str, Any]


# Measuring


def run_case(
    case: shapes.StepShape, implementations: Sequence[str], timing: Timing, *, profile: Path | None = None
) -> CaseResult:
    """Measure one case with the named implementations; see `harness.Family.run_case`."""
    result = CaseResult()
    layers = case.depths[0]
    for depth in case.depths:
        run_depth(case, depth, implementations, timing, profile, result)
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


def run_depth(
    case: shapes.StepShape,
    depth: int,
    implementations: Sequence[str],
    timing: Timing,
    profile: Path | None,
    result: CaseResult,
    *,
    build: Callable[[str, shapes.StepShape, int], Program] | None = None,
    elsewhere: Mapping[str, Elsewhere] | None = None,
) -> None:
    """Measure one depth, and add rows and problems to the result.

    Args:
      case, depth, implementations, timing, profile, result: those of `run_case`.
      build: makes the program of a name; None for those of one device.
      elsewhere: what was measured in other processes, by name.
    """
    operation = _operation(case, depth)
    programs: dict[str, Program | Elsewhere] = {}
    expected: list[float] | None = None
    elsewhere = elsewhere or {}
    names = dict.fromkeys(implementations if "bf16" in implementations else ("bf16", *implementations))
    for name in (*names, *elsewhere):
        try:
            program = elsewhere.get(name) or (build or built)(name, case, depth)
            if isinstance(program, Program):
                _learn_and_check(program)
        except Exception as error:  # one that is missing or out of memory must not cost the others theirs
            result.skipped.append(problem(case.name, operation, name, reason_of(error)))
            del error
            gc.collect()  # its traceback held a train state
            continue
        _say(f"{case.name} {operation} {name}: compiled in {program.compile_seconds:.1f} s, losses {program.losses}")
        if name == "bf16" or expected is None:
            expected = program.losses
        differences = [abs(a - b) / abs(b) for a, b in zip(program.losses, expected, strict=True)]
        bound = LOSS_BOUND if isinstance(program, Program) else LOSS_BOUND_ELSEWHERE
        if all(difference <= bound for difference in differences):  # which NaN is not
            programs[name] = program
        else:
            result.wrong.append(
                problem(case.name, operation, name, f"losses {program.losses} differ from {expected}, those of bf16")
            )

    here = {name: program for name, program in programs.items() if isinstance(program, Program)}
    seconds, failed = _measured(here, timing)
    for name, samples in seconds.items():  # what is cut short after this has shown it at least
        _say(f"{case.name} {operation} {name}: {statistics.median(samples) * 1e3:.1f} ms")
    seconds |= {name: program.seconds for name, program in programs.items() if isinstance(program, Elsewhere)}
    result.skipped += [problem(case.name, operation, name, reason) for name, reason in failed.items()]
    for name in seconds:
        program = programs[name]
        breakdown = None
        if isinstance(program, Elsewhere):
            figures = program.figures
        else:
            figures = _figures(program)
            if depth == case.depths[0]:
                breakdown = _breakdown(program, case, profile)
        result.rows.append(
            {
                **_row(case, depth, name, seconds),
                **figures,
                "compile_seconds": rounded(program.compile_seconds),
                "losses": program.losses,
                **({} if breakdown is None else {"breakdown_ms": breakdown}),
            }
        )


def _row(case: shapes.StepShape, depth: int, name: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    flops = config_of(case, depth).flops_per_token(case.sequence) * case.tokens // case.devices
    forms = FORMS | {peer: (peer,) for peer in seconds if peer.startswith("torch") or peer in ("nnx", "linen")}
    row = compute_row(seconds, name, flops=flops, peers=tuple(itertools.chain(*forms.values())))
    fastest = {
        peer: min(statistics.median(seconds[form]) for form in of_peer if form in seconds)
        for peer, of_peer in forms.items()
        if any(form in seconds for form in of_peer)
    }
    median = statistics.median(seconds[name])
    peak = bf16_peak(jax.devices()[0].device_kind)
    return {
        "case": case.name,
        "model": case.model,
        "operation": _operation(case, depth),
        "implementation": name,
        **row,
        **{f"time_over_{peer}": rounded(median / best) for peer, best in fastest.items()},
        "layers": depth,
        **({} if case.devices == 1 else {"devices": case.devices}),
        "tokens_per_second": rounded(case.tokens / case.devices / median),
        **({} if peak is None else {"mfu": rounded(row["flops"] / median / peak)}),
    }


def _figures(program: Program) -> dict[str, Any]:
    """Memory of one device."""
    temporaries = temporary_bytes(program.step)
    return {
        "peak_bytes": peak_bytes(program.step),
        "device_peak_bytes": program.device_peak_bytes,
        **({} if temporaries is None else {"temporaries_gb": rounded(temporaries / 1e9)}),
    }


def peak_bytes(compiled: Any) -> int | None:
    """What XLA plans for: results that take the place of a donated argument count once."""
    try:
        found = compiled.memory_analysis()
        alone = found.output_size_in_bytes - found.alias_size_in_bytes
        return int(found.argument_size_in_bytes + found.temp_size_in_bytes + alone)
    except Exception:  # a figure that some backend does not offer must not stop a benchmark
        return None


def _learn_and_check(program: Program) -> None:
    """Runs the first steps: those after which scaling is known, and again from the first state, for their losses."""
    before = _peak_in_use()
    state = program.start()
    if jax.tree.leaves(state["scaling"]):
        for _ in range(_LEARNING_STEPS):
            state, _ = program.run(state)
        program.scaling = jax.device_get(state["scaling"])
        del state
        state = program.start()
    losses = []
    for _ in range(CHECKED_STEPS):
        state, loss = program.run(state)
        losses.append(loss)
    program.losses = [rounded(float(loss)) for loss in losses]
    program.device_peak_bytes = after if (after := _peak_in_use()) > before else None


def _peak_in_use() -> int:
    """The most bytes that this process ever had in use on the device."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def _measured(programs: dict[str, Program], timing: Timing) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of a step, by implementation, and why others failed: in rounds, each in another order."""
    on_cpu = jax.default_backend() == "cpu"
    rounds = max(1, timing.samples // 3)
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    failed: dict[str, str] = {}
    for turn in range(rounds):
        for name in random.Random(turn).sample(list(programs), len(programs)):
            if name in failed:
                continue
            steps = 1 if on_cpu else max(1, 4 // programs[name].batch[0].shape[0])  # dispatch hides behind the first
            try:
                seconds[name] += _steps_of(programs[name], samples=1 if on_cpu else 2, steps=steps)
            except Exception as error:
                failed[name] = reason_of(error)
                del seconds[name], error
                gc.collect()
    return seconds, failed


def _steps_of(program: Program, *, samples: int, steps: int) -> list[float]:
    """Seconds of a step: samples of several steps that are enqueued together."""
    found = []
    state, loss = program.run(program.start())
    jax.block_until_ready((state, loss))
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(steps):
            state, loss = program.run(state)
        jax.block_until_ready(loss)
        found.append((time.perf_counter() - start) / steps)
    return found


def _breakdown(program: Program, case: shapes.StepShape, profile: Path | None) -> dict[str, float] | None:
    """Milliseconds of a step by kind, None without a GPU. With a folder the trace stays, and a list of kernels."""
    if jax.default_backend() != "gpu" and profile is None:
        return None
    with tempfile.TemporaryDirectory() as temporary:
        steps = 1 if case.microbatches > 1 else 2
        folder = Path(temporary) if profile is None else profile / case.name / program.name
        try:
            state, _ = program.run(program.start())
            held = [jax.block_until_ready(state)]
            del state

            def run() -> Any:
                loss = None
                for _ in range(steps):
                    held[0], loss = program.run(held[0])
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


def drawn(case: shapes.StepShape) -> tuple[jax.Array, jax.Array]:
    """Tokens and targets, int32 [microbatches, batch, sequence]."""
    shape = case.microbatches, case.batch, case.sequence + 1
    text = jax.random.randint(jax.random.key(1), shape, 0, case.vocab, jnp.int32)
    return text[..., :-1], text[..., 1:]


def config_of(case: shapes.StepShape, depth: int, recipe: Recipe | None = None) -> DecoderConfig:
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
        remat=case.remat,
        recipe=recipe,
        # Without the losses of the router, which plain JAX would spell in many ways.
        experts=models.Experts(case.experts, Router(case.top_k), balance_weight=0.0) if case.experts else None,
    )


def built(name: str, case: shapes.StepShape, depth: int) -> Program:
    on = ONE_DEVICE
    made = te_jax_step(VARIANTS[name], case, depth, on) if name in VARIANTS else plain_step(name, case, depth, on)
    return compiled(name, made, case, depth, on)


Made = tuple[Callable[[Any], State], Callable[..., Any]]
"""How a train state is made of parameters, and a step: (state, tokens, targets) -> (state, loss), the loss perhaps in a
tuple with statistics."""


def compiled(name: str, made: Made, case: shapes.StepShape, depth: int, on: OneDevice) -> Program:
    complete, _ = made
    init = _init(config_of(case, depth), on)
    shardings = on.shardings(jax.eval_shape(complete, jax.eval_shape(init)))
    batch = on.put(drawn(case))
    start = time.perf_counter()
    step = lowered(made, case, depth, on, batch).compile(on.compiler_options)
    seconds = time.perf_counter() - start
    # A stack, other dtypes, or what a user has of other shapes, does not fit in the place of layers: one program
    # makes both then, lest layers leave a hole in memory.
    others = ("_scan", "_bf16_params", "_fp8_logits", "_fp8_moments")
    if name.endswith(others) or name.startswith(("nnx", "linen")):
        return Program(name, jax.jit(lambda: complete(init()), out_shardings=shardings), batch, step, seconds)
    completed = jax.jit(complete, donate_argnums=0, out_shardings=shardings)
    return Program(name, lambda: completed(init()), batch, step, seconds)


def lowered(made: Made, case: shapes.StepShape, depth: int, on: OneDevice, batch: Any) -> jax.stages.Lowered:
    """The step, traced for a batch of arrays or `jax.ShapeDtypeStruct`."""
    complete, step = made
    state = jax.eval_shape(complete, jax.eval_shape(_init(config_of(case, depth), on)))
    shardings = on.shardings(state)
    if shardings is not None:
        state = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state, shardings
        )
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None)).lower(state, *batch)


@functools.cache
def _init(config: DecoderConfig, on: OneDevice) -> Callable[[], Any]:
    """Makes the first parameters, compiled once for all implementations."""

    def init() -> Any:
        return models.init(config, jax.random.key(0))

    shardings = on.shardings({"params": jax.eval_shape(init)})
    return jax.jit(init, out_shardings=None if shardings is None else shardings["params"])


def te_jax_step(variant: Variant, case: shapes.StepShape, depth: int, on: OneDevice) -> Made:
    config = dataclasses.replace(
        config_of(case, depth, variant.recipe),
        head_recipe=variant.head_recipe,
        head_fp8_products=variant.head_fp8_products,
        offload=variant.offload,
        remat=case.remat if variant.remat is None else variant.remat,
    )
    how, loss_of = on.requantize(config, variant.implementation), on.loss(config, variant.implementation)
    optimizer = optim.adamw(
        RATE, mu_dtype=variant.moments, nu_dtype=variant.moments, master_dtype=variant.master_dtype, **ADAMW
    )

    def complete(params: Any) -> State:
        moments: Any = optimizer.init(params)
        if variant.master_dtype is not None:
            # With the remainders of these numbers: from rounded ones, the first steps would change no parameter.
            exact, params = params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
            moments = optim.convert_state(optimizer, moments._replace(master=exact), params)
        state = {"params": params, "optimizer": moments, "scaling": models.init_scaling_state(config)}
        if how is not None:
            zeros = jax.tree.map(jnp.zeros_like, params)
            _, state["kernels"] = optim.apply_updates(params, zeros, requantize=how)
        return state

    def loss(variables: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        params, scaling = variables
        return loss_of(params, tokens, targets, scaling)

    def step(state: State, tokens: jax.Array, targets: jax.Array) -> tuple[State, Any]:
        params, scaling = state["params"], state["scaling"]
        operands = params if how is None or variant.statistics else optim.merge_kernels(params, state["kernels"])

        def gradients_of(operands: Any, scaling: Any, tokens: jax.Array, targets: jax.Array) -> Any:
            gradient = accumulate_gradients(loss, in_place=on.sums_in_place)
            sums = on.parts(jax.tree.map(functools.partial(jnp.zeros_like, dtype=jnp.float32), params))
            zeros = sums, jax.tree.map(jnp.zeros_like, scaling)
            return _over_microbatches(functools.partial(gradient, (operands, scaling)), zeros, tokens, targets)

        if variant.statistics:
            (value, (gradients, scaling)), found = debug.with_statistics(gradients_of)(
                operands, scaling, tokens, targets
            )
        else:
            (value, (gradients, scaling)), found = gradients_of(operands, scaling, tokens, targets), None
        if case.microbatches > 1:
            gradients = jax.tree.map(lambda sum_: sum_ / case.microbatches, gradients)
        with jax.named_scope("optimizer"):
            updates, moments = optimizer.update(gradients, state["optimizer"], params)
            updated = optim.apply_updates(params, updates, requantize=how)
        state = {"optimizer": moments, "scaling": scaling, "params": updated if how is None else updated[0]}
        if how is not None:
            state["kernels"] = updated[1]
        return state, value if found is None else (value, found)

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


def plain_step(name: str, case: shapes.StepShape, depth: int, on: OneDevice) -> Made:
    """A step of plain JAX, of the name of a peer."""
    fp8, scanned, dots = name.startswith("flax"), name.endswith("_scan"), name.startswith("bf16_dots")
    optimizer = optax.adamw(RATE, mu_dtype=jnp.bfloat16 if name.endswith("_mu_bf16") else None, **ADAMW)

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
    kind = _with_rows(kind, on.rows)

    def block(x: jax.Array, params_and_scaling: Any) -> jax.Array:
        return layer.applied(kind(*params_and_scaling), on.rows(x), case, "block")

    if case.remat or dots or name.startswith("bf16_remat"):
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if dots else None
        block = jax.checkpoint(block, policy=policy, prevent_cse=not scanned)

    def loss(variables: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        params, scaling = variables
        x = on.rows(jnp.take(params["embedding"], tokens, axis=0).astype(jnp.bfloat16))
        if scanned:
            x, _ = lax.scan(lambda x, each: (block(x, each), None), x, (params["layers"], scaling))
        else:
            for i in range(depth):
                x = block(x, (params["layers"][i], None if scaling is None else scaling[i]))
        x, _ = layer.Plain(params, None).norm(x, "final_norm")
        logits = x @ on.whole(params["head"]).astype(x.dtype)
        with jax.named_scope("loss"):
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets))

    def step(state: State, tokens: jax.Array, targets: jax.Array) -> tuple[State, jax.Array]:
        params, scaling = state["params"], state["scaling"]

        def gradient(sums: Any, tokens: jax.Array, targets: jax.Array) -> tuple[jax.Array, Any]:
            value, (gradients, after) = jax.value_and_grad(loss)((params, scaling), tokens, targets)
            gradients = on.parts(gradients)
            if sums is not None:
                gradients = jax.tree.map(jnp.add, sums[0], gradients)
            return value, (gradients, after)  # the next state of scaling, of the last microbatch

        zeros = on.parts(jax.tree.map(jnp.zeros_like, params)), jax.tree.map(jnp.zeros_like, scaling)
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


def _with_rows(kind: type[layer.Plain], rows: Callable[[jax.Array], jax.Array]) -> type[layer.Plain]:
    class WithRows(kind):
        def project(self, x: Any, names: tuple[str, ...]) -> tuple[jax.Array, ...]:
            return tuple(map(rows, super().project(x, names)))

        def attention(self, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            return rows(super().attention(rows(query), rows(key), rows(value)))

    return WithRows


FAMILY = Family(
    description="whole train steps on one device: decoder, loss and AdamW, with one and four microbatches",
    cases={"gpu": shapes.STEP_GPU, "cpu": shapes.STEP_CPU, "by name alone": shapes.STEP_BY_NAME},
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
    environment=ENVIRONMENT,
)
