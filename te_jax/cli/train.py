"""Trains a small byte-level language model on text, on whatever devices JAX finds, and writes a log, checkpoints and
the loss curves to a folder. A run that was killed goes on with --resume and ends with the same bits."""

import argparse
import dataclasses
import functools
import importlib.util
import math
import sys
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from te_jax.cli.errors import UserError
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling

if TYPE_CHECKING:
    import jax
    import numpy as np

    from te_jax.cli._report import Progress
    from te_jax.cli._run_folder import RunFolder
    from te_jax.cli._step import Learner, LossFunction, Placement, TrainState
    from te_jax.cli._text import Corpus
    from te_jax.models import DecoderConfig

__all__ = ["add_arguments", "run"]

_PACKAGES = ("optax", "orbax", "matplotlib", "tqdm")

_RECIPES: dict[str, Recipe | None] = {
    "block": BlockScaling(),
    "current": CurrentScaling(),
    "rowwise": RowwiseScaling(),
    "delayed": DelayedScaling(),
    "none": None,
}

_STATE_DTYPES = {"f32": "float32", "bf16": "bfloat16", "fp8": "float8_e4m3fn"}

_EVALUATION_WINDOWS = 64

# Steps whose losses are still on the device while the host prepares the next: enough to hide the host, few enough that
# devices which share a host's cores do not wait for each other in several steps at once.
_STEPS_IN_FLIGHT = 2


@dataclasses.dataclass(frozen=True)
class Options:
    """What defines a run: the same options give the same numbers. A run records them, and a resumed run keeps them.

    Those whose default is None follow from the text, the model and the devices.
    """

    text: str | None = None
    preset: str = "tiny"
    steps: int = 200
    batch: int = 16
    seq_len: int = 128
    seed: int = 0
    devices: int | None = None
    tp: int = 1
    transport: Literal["auto", "xla", "ring", "p2p"] = "auto"
    compare: bool = False
    learning_rate: float | None = None
    recipe: str = "none"
    optimizer_state: str = "f32"
    implementation: Literal["auto", "native", "reference"] = "auto"
    dtype: str = "auto"
    eval_every: int = 50
    checkpoint_every: int = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `te-jax train` to a parser."""
    default = Options()
    # None stands for "not given": a resumed run takes what was not given from the run itself.
    add = functools.partial(parser.add_argument, default=None)
    add("--text", metavar="FILE_OR_DIR", help="what to train on (the language reference that ships with Python)")
    add("--preset", help=f"shape of the model: nano, tiny, small or 8b ({default.preset})")
    add("--steps", type=int, help=f"optimizer steps ({default.steps})")
    add("--batch", type=int, help=f"windows per step, over all devices ({default.batch})")
    add("--seq-len", type=int, help=f"bytes predicted per window ({default.seq_len})")
    parser.add_argument("--out", default="runs/train", metavar="DIR", help="folder of the run (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    add("--seed", type=int, help=f"of parameters, order of the data and rounding at random ({default.seed})")
    add(
        "--devices", type=int, help="GPUs to use, or CPU devices to divide this host into (all that JAX shows, or --tp)"
    )
    add(
        "--tp",
        type=int,
        metavar="N",
        help=f"devices that share the model: each has a part of its heads, widths and vocabulary ({default.tp})",
    )
    add(
        "--transport",
        choices=("auto", "xla", "ring", "p2p"),
        help=f"how devices that share the model exchange what they compute ({default.transport})",
    )
    add("--recipe", help=f"of the FP8 of projections: {', '.join(_RECIPES)} ({default.recipe})")
    add(
        "--optimizer-state",
        help=f"what Adam's moments are kept in: {', '.join(_STATE_DTYPES)} ({default.optimizer_state})",
    )
    add(
        "--compare",
        action="store_true",
        help="also train a twin on the same data: without the recipe; where there is none, with float32 moments; where "
        "the run has these too, with optax's loss",
    )
    add("--checkpoint-every", type=int, metavar="STEPS", help=f"steps between checkpoints ({default.checkpoint_every})")
    add("--eval-every", type=int, metavar="STEPS", help=f"steps between validations ({default.eval_every})")
    add("--learning-rate", type=float, help="peak of the schedule (0.384 / width of the model)")
    add("--implementation", choices=("auto", "native", "reference"), help="of te_jax's operations (auto)")
    add("--dtype", choices=("auto", "float32", "bfloat16"), help="of activations (bfloat16 on GPUs, float32 on CPUs)")


def run(args: argparse.Namespace) -> int:
    """Trains, or continues to, until `--steps`.

    Args:
      args: parsed options of `add_arguments`.

    Returns:
      0.

    Raises:
      UserError: an option cannot be met; nothing has been written.
    """
    _require_packages()
    from te_jax.cli import _run_folder, _step, _text

    out = Path(args.out)
    stored = _run_folder.read_header(out) if args.resume else None
    if args.resume and stored is None:
        raise UserError(f"--out {out} holds no run to resume: leave --resume out to start one")
    options = _resolve(args, stored)
    _check(options)
    config = _config(options)
    _check_parallel(options, config)
    corpus = _text.load(options.text)
    if stored is not None and corpus.sha256 != stored["text"]["sha256"]:
        raise UserError(f"--text {corpus.source} is not, or no longer, what the run in {out} was trained on")
    data = _text.split(corpus, options.seq_len)

    devices = _step.take_devices(options.devices, options.tp)
    parts = len(devices) // options.tp
    if options.batch % parts:
        over = f"{parts} devices" if options.tp == 1 else f"{parts} groups of --tp {options.tp}"
        raise UserError(f"--batch {options.batch} does not divide over {over}: choose a multiple of {parts}")
    options = _settle(options, config, corpus, devices)
    config = dataclasses.replace(config, dtype=options.dtype)
    placement = _step.build_placement(devices, options.tp, options.transport)
    learners = _learners(options, config, placement)

    header = _header(options, config, corpus, devices)
    if stored is None:
        folder = _run_folder.RunFolder.create(out, header)
    else:
        folder = _run_folder.RunFolder.resume(out)
        _note_changes(stored, header)
    if options.tp > 1:
        print(
            f"{len(devices)} {devices[0].platform} devices, {options.tp} share the model: transport {options.transport}"
        )
    try:
        _train(folder, options, learners, placement, data, devices)
        _conclude(folder, options, config)
    finally:
        folder.close()
    return 0


def _require_packages() -> None:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"te-jax train needs {', '.join(missing)}: pip install 'te_jax[train]'")


def _resolve(args: argparse.Namespace, stored: dict[str, Any] | None) -> Options:
    """Options as given, or else as in the run that is resumed, or else their defaults."""
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(Options)}
    given = {name: value for name, value in given.items() if value is not None}
    if stored is None:
        return Options(**given)
    kept = {**dataclasses.asdict(Options()), **stored["options"]}
    if "tp" in given:
        # Parts of the batch stay what they are, and more or fewer devices share the model for each.
        kept["devices"] = kept["devices"] // kept["tp"] * given["tp"]
        kept["transport"] = kept["transport"] if given["tp"] > 1 else "auto"
    for name, value in given.items():
        # The text is compared by its content, and neither how often to save nor how a model is split changes more than
        # the rounding of numbers.
        before = kept[name]
        if name in ("text", "checkpoint_every", "tp", "transport") or value in ("auto", before):
            continue
        option = "--" + name.replace("_", "-")
        raise UserError(
            f"{option} is {value}, but the run in {args.out} was started with {before}: "
            f"leave {option} out to continue it, or start another run in another --out"
        )
    new = {name: value for name, value in given.items() if value != "auto" or name == "transport"}
    return Options(**{**kept, **new})


def _check(options: Options) -> None:
    for name in ("steps", "batch", "seq_len", "tp", "devices", "eval_every", "checkpoint_every"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}: it must be at least 1")
    if not 0 <= options.seed < 2**32:
        raise UserError(f"--seed is {options.seed}: it must lie between 0 and {2**32 - 1}")
    rate = options.learning_rate
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        raise UserError(f"--learning-rate is {rate}: it must be a finite number above 0")


def _config(options: Options) -> "DecoderConfig":
    from te_jax.models import PRESETS

    if options.preset not in PRESETS:
        raise UserError(f"--preset {options.preset} is unknown: choose one of {', '.join(PRESETS)}")
    if options.recipe not in _RECIPES:
        raise UserError(f"--recipe {options.recipe} is unknown: choose one of {', '.join(_RECIPES)}")
    if options.optimizer_state not in _STATE_DTYPES:
        raise UserError(
            f"--optimizer-state {options.optimizer_state} is unknown: choose one of {', '.join(_STATE_DTYPES)}"
        )
    return dataclasses.replace(PRESETS[options.preset], recipe=_RECIPES[options.recipe])


def _check_parallel(options: Options, config: "DecoderConfig") -> None:
    from te_jax.models import PRESETS, TensorParallel
    from te_jax.recipe import BLOCK

    if options.tp == 1:
        if options.transport != "auto":
            raise UserError(f"--transport {options.transport} is for devices that share a model: add --tp N")
        return
    parallel = TensorParallel(options.tp)

    def problem(preset: str) -> ValueError | None:
        try:
            parallel.check(dataclasses.replace(PRESETS[preset], recipe=config.recipe))
        except ValueError as error:
            return error

    if misfit := problem(options.preset):
        fitting = ", ".join(preset for preset in PRESETS if not problem(preset)) or "none"
        raise UserError(
            f"--tp {options.tp} does not fit --preset {options.preset}: {misfit}; presets that {options.tp} fits: "
            f"{fitting}"
        )
    # Blocks of the weight gradients' operands lie along the time that a device has.
    multiple = options.tp * (BLOCK if isinstance(config.recipe, BlockScaling) else 1)
    if options.seq_len % multiple:
        raise UserError(
            f"--seq-len {options.seq_len} does not divide over --tp {options.tp}"
            f"{'' if multiple == options.tp else f' in blocks of {BLOCK}'}: choose a multiple of {multiple}"
        )


def _settle(options: Options, config: "DecoderConfig", corpus: "Corpus", devices: "list[Any]") -> Options:
    """The options with everything that was left open filled in."""
    on_gpu = devices[0].platform == "gpu"
    return dataclasses.replace(
        options,
        text=corpus.source,
        devices=len(devices),
        learning_rate=_peak_rate(options, config),
        dtype=("bfloat16" if on_gpu else "float32") if options.dtype == "auto" else options.dtype,
    )


def _learners(options: Options, config: "DecoderConfig", placement: "Placement") -> "dict[str, Learner]":
    """By the name of the loss in the log: te_jax's own, and the twin's where one is asked for."""
    from te_jax.cli import _step

    implementation = _implementation(options)

    def learner(config: "DecoderConfig", loss: "LossFunction", states: str = options.optimizer_state) -> "Learner":
        optimizer = _step.build_optimizer(
            _peak_rate(options, config), options.steps, state_dtype=_STATE_DTYPES[states], seed=options.seed
        )
        return _step.build_learner(config, loss, optimizer, placement)

    loss = _step.te_jax_loss(config, implementation, placement)
    learners = {"loss": learner(config, loss)}
    # A twin differs in one thing, so that the distance of the two curves is what that costs.
    if options.compare and config.recipe is not None:
        plain = dataclasses.replace(config, recipe=None)
        learners[f"{config.dtype}_loss"] = learner(plain, _step.te_jax_loss(plain, implementation, placement))
    elif options.compare and options.optimizer_state != "f32":
        learners["f32_states_loss"] = learner(config, loss, "f32")
    elif options.compare:
        learners["optax_loss"] = learner(config, _step.optax_loss(config, placement))
    return learners


def _peak_rate(options: Options, config: "DecoderConfig") -> float:
    # Falls with the width, as the gradients of wider layers add up: 0.003 for `tiny`, 0.0005 for `small`.
    return options.learning_rate or 0.384 / config.hidden_size


def _implementation(options: Options) -> Literal["native", "reference"]:
    """Which implementation of te_jax's operations runs: "native" or "reference"."""
    from te_jax import native

    try:
        use_native = native.use_native(None if options.implementation == "auto" else options.implementation)
    except native.NativeUnavailableError as error:
        raise UserError(f"--implementation {options.implementation} cannot run here: {error}") from error
    if options.transport == "p2p":
        try:
            native.use_native("native")
        except native.NativeUnavailableError as error:
            raise UserError(f"--transport p2p cannot run here: {error}") from error
    if use_native:
        _check_products(options)
    return "native" if use_native else "reference"


def _check_products(options: Options) -> None:
    """Kernels may be there, and the GPU not one that multiplies what the recipe makes."""
    import jax
    import jax.numpy as jnp

    from te_jax import native, ops

    recipe = _RECIPES[options.recipe]
    if recipe is None:
        return
    activation, kernel = recipe.quantization("activation"), recipe.quantization("kernel")

    def product(x: jax.Array) -> jax.Array:
        return ops.gemm(ops.quantize(x, activation), ops.quantize(x, kernel), implementation="native")

    try:
        jax.eval_shape(product, jax.ShapeDtypeStruct((16, 16), jnp.float32))
    except native.NativeUnavailableError as error:
        raise UserError(f"--recipe {options.recipe} cannot run here: {error}") from error


def _header(options: Options, config: "DecoderConfig", corpus: "Corpus", devices: "list[Any]") -> dict[str, Any]:
    import platform

    import jax
    import jaxlib.version
    import optax

    import te_jax

    return {
        "kind": "header",
        "options": dataclasses.asdict(options),
        "model": {
            **dataclasses.asdict(config),
            "recipe": _describe(config.recipe),
            "num_parameters": config.num_parameters,
        },
        "text": {"source": corpus.source, "bytes": corpus.data.size, "sha256": corpus.sha256},
        "implementation": _implementation(options),
        "parallel": {"tp": options.tp, "transport": options.transport},
        "device": {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)},
        "versions": {
            "te_jax": te_jax.__version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.version.__version__,
            "optax": optax.__version__,
            "python": platform.python_version(),
        },
    }


def _describe(recipe: Recipe | None) -> dict[str, Any] | None:
    if recipe is None:
        return None
    values = {name: str(v) if name.endswith("dtype") else v for name, v in dataclasses.asdict(recipe).items()}
    return {"name": type(recipe).__name__, **values}


def _note_changes(stored: dict[str, Any], header: dict[str, Any]) -> None:
    """Says what a resumed run cannot keep equal, since other software or hardware rounds in other places."""
    for subject in ("implementation", "parallel", "device", "versions"):
        # Runs of before devices could share a model say nothing of it.
        before = stored.get(subject, {"tp": Options.tp, "transport": Options.transport})
        if before != header[subject]:
            print(
                f"te-jax: note: {subject} changed from {before} to {header[subject]}: "
                "losses may differ in their last bits",
                file=sys.stderr,
            )


def _train(
    folder: "RunFolder",
    options: Options,
    learners: "dict[str, Learner]",
    placement: "Placement",
    data: "tuple[np.ndarray, np.ndarray]",
    devices: "list[Any]",
) -> None:
    import jax

    from te_jax.cli import _report, _text

    training, held_out = data
    done = folder.latest_step
    states = _initial_states(folder, options, learners)
    batches = math.ceil(_EVALUATION_WINDOWS / options.batch)
    windows = _text.evaluation_windows(held_out, count=batches * options.batch, seq_len=options.seq_len)
    windows = jax.device_put(windows.reshape(batches, options.batch, -1), placement.evaluation)

    progress = _report.Progress(options.steps, done, options.batch * options.seq_len, devices)
    records = _Records(folder, progress)

    def evaluate(step: int) -> None:
        records.add("validation", step, {name: it.evaluate(states[name], windows) for name, it in learners.items()})

    try:
        if not done:
            evaluate(0)
        for step in range(done + 1, options.steps + 1):
            batch = _text.training_windows(
                training, seed=options.seed, step=step, batch=options.batch, seq_len=options.seq_len
            )
            batch = jax.device_put(batch, placement.windows)
            losses = {}
            for name, learner in learners.items():
                states[name], losses[name] = learner.step(states[name], batch)
            records.add("train", step, losses)
            if step % options.eval_every == 0 or step == options.steps:
                evaluate(step)
            if step % options.checkpoint_every == 0 or step == options.steps:
                records.flush()
                folder.save(step, states)
    finally:
        progress.close()


def _initial_states(folder: "RunFolder", options: Options, learners: "dict[str, Learner]") -> "dict[str, TrainState]":
    import jax

    from te_jax.cli import _step

    if not folder.latest_step:
        return {name: learner.init(jax.random.key(options.seed)) for name, learner in learners.items()}
    like = {name: learner.abstract_state() for name, learner in learners.items()}
    if "optimizer_state" in folder.header["options"]:
        return folder.restore(like)
    # A run begun before that option existed: checkpoints of then hold the state of optax.adamw, later ones te_jax's.
    try:
        return folder.restore(like)
    except ValueError:
        return _step.from_optax(folder.restore(_step.to_optax(like)))


class _Records:
    """Losses on their way from the devices to the log: fetched late, so that the devices never wait for the host."""

    def __init__(self, folder: "RunFolder", progress: "Progress"):
        self._folder = folder
        self._progress = progress
        self._pending: deque[tuple[str, int, dict[str, Any]]] = deque()

    def add(self, kind: str, step: int, losses: "dict[str, jax.Array]") -> None:
        self._pending.append((kind, step, losses))
        while len(self._pending) > _STEPS_IN_FLIGHT:
            self._fetch()

    def flush(self) -> None:
        while self._pending:
            self._fetch()

    def _fetch(self) -> None:
        kind, step, arrays = self._pending.popleft()
        losses = {name: float(array) for name, array in arrays.items()}
        if not all(map(math.isfinite, losses.values())):
            raise UserError(f"the {kind} loss is {losses['loss']} at step {step}: try a smaller --learning-rate")
        self._folder.append({"kind": kind, "step": step, **losses})
        if kind == "train":
            self._progress.step(losses)
        else:
            self._progress.validation(step, losses)


def _conclude(folder: "RunFolder", options: Options, config: "DecoderConfig") -> None:
    from te_jax.cli import _report

    training, validation = folder.records("train"), folder.records("validation")
    figure = folder.path / "loss.png"
    chosen = [] if config.recipe is None else [f"{options.recipe} scaling"]
    chosen += [] if options.optimizer_state == "f32" else [f"{options.optimizer_state} states"]
    chosen = chosen or ["te_jax"]
    label = chosen[0]  # what a twin lacks
    chosen += [] if options.tp == 1 else [f"tp {options.tp} ({options.transport})"]
    title = f"te-jax train · {options.preset}, {config.num_parameters:,} parameters · {', '.join(chosen)}"
    _report.draw_losses(figure, title, label, training, validation)
    print(_report.summary(label, training, validation))
    how = "" if options.tp == 1 else f" with tp {options.tp}, transport {options.transport},"
    print(f"{options.steps} steps{how} in {folder.path}: log.jsonl, checkpoints, {figure.name}")
