"""What defines a run of `te-jax train`: its options, where they come from, and which of them can be met together."""

import argparse
import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from te_jax._version import __version__
from te_jax.cli.errors import UserError
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling

if TYPE_CHECKING:
    from te_jax.cli._text import Corpus, Tokenizer
    from te_jax.models import DecoderConfig
    from te_jax.offload import Offload

RECIPES: dict[str, Recipe | None] = {
    "block": BlockScaling(),
    "current": CurrentScaling(),
    "rowwise": RowwiseScaling(),
    "delayed": DelayedScaling(),
    "none": None,
}

STATE_DTYPES = {"f32": "float32", "bf16": "bfloat16", "fp8": "float8_e4m3fn"}

# A resumed run compares the tokens of its text; the other options change no more than the rounding of numbers.
_CHANGEABLE = (
    *("text", "tokenizer", "checkpoint_every", "tp", "transport"),
    *("remat", "offload", "microbatches", "deterministic"),
)

OFFLOAD_MIN_SIZE = 2**16
"""Bytes: what is smaller stays on the device."""

_VOCAB_MULTIPLE = 128


def _path(word: str) -> str:
    # A script's variable that is not set; as a path it would be the working directory.
    if not word:
        raise argparse.ArgumentTypeError("is empty: give a path or leave the option out")
    return word


def _option(default: Any, text: str, **argument: Any) -> Any:
    """A field of `Options`, with what argparse is told about it."""
    if default not in (None, False):
        text += f" ({default})"
    if type(default) in (int, float):
        argument["type"] = type(default)
    return dataclasses.field(default=default, metadata={"help": text, **argument})


@dataclasses.dataclass(frozen=True)
class Options:
    """What defines a run: the same options give the same numbers. A run records them, and a resumed run keeps them.

    Those whose default is None follow from the text, the model and the devices.
    """

    text: str | None = _option(
        None, "what to train on (the language reference that ships with Python)", type=_path, metavar="FILE_OR_DIR"
    )
    tokenizer: str | None = _option(
        None,
        "tokenizer.json of Hugging Face, read with the package tokenizers; the model's vocabulary becomes its own, "
        "rounded up to a multiple of 128 (tokens are bytes)",
        type=_path,
        metavar="FILE",
    )
    preset: str = _option("tiny", "shape of the model: nano, tiny, small or 8b; with experts: moe or moe-3b")
    steps: int = _option(200, "optimizer steps; with --resume, a larger number extends the run")
    batch: int = _option(16, "windows per step, over all devices")
    microbatches: int = _option(
        1, "equal parts of the batch that are computed one after the other: less memory for the same step", metavar="N"
    )
    seq_len: int = _option(128, "tokens predicted per window")
    seed: int = _option(0, "seed of parameters, order of the data and stochastic rounding")
    devices: int | None = _option(
        None, "GPUs to use, or CPU devices to divide this host into (all that JAX shows, or --tp)", type=int
    )
    tp: int = _option(
        1, "devices that share the model: each has a part of its heads, widths and vocabulary", metavar="N"
    )
    transport: Literal["auto", "xla", "ring", "p2p"] = _option(
        "auto", "how devices that share the model communicate", choices=("auto", "xla", "ring", "p2p")
    )
    recipe: str = _option("none", f"FP8 recipe of the projections: {', '.join(RECIPES)}")
    optimizer_state: str = _option("f32", f"dtype of Adam's moments: {', '.join(STATE_DTYPES)}")
    remat: bool = _option(
        False,
        "recompute activations in the backward pass: less memory for a third more FLOPs (always for 8b and moe-3b)",
        action="store_true",
    )
    offload: str = _option(
        "none",
        "what waits in host memory while it is not needed: activations, optimizer (Adam's moments), or both with a "
        "comma between",
        metavar="WHAT",
    )
    compare: bool = _option(
        False,
        "also train a twin on the same data: without the recipe; if there is none, with float32 moments; if these are "
        "float32 too, with optax's loss",
        action="store_true",
    )
    checkpoint_every: int | None = _option(
        None, "steps between checkpoints (1000 on GPUs, 100 on CPUs)", type=int, metavar="STEPS"
    )
    eval_every: int = _option(50, "steps between validations", metavar="STEPS")
    learning_rate: float | None = _option(None, "peak of the schedule (0.384 / width of the model)", type=float)
    warmup_steps: int | None = _option(
        None,
        "steps until the peak, after which the rate falls along a cosine (a twentieth of --steps)",
        type=int,
        metavar="STEPS",
    )
    clip_norm: float = _option(
        1.0, "largest norm of the gradient, to which larger ones are scaled; 0 for none", metavar="NORM"
    )
    implementation: Literal["auto", "native", "reference"] = _option(
        "auto", "implementation of te_jax's operations", choices=("auto", "native", "reference")
    )
    dtype: str = _option(
        "auto",
        "dtype of activations; auto is bfloat16 on GPUs and float32 on CPUs",
        choices=("auto", "float32", "bfloat16"),
    )
    deterministic: bool = _option(
        False,
        "repeat the same bits on a GPU, with --resume too: no autotuning and no atomic additions, which is slower; "
        "runs on CPUs always do",
        action="store_true",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `te-jax train` to a parser."""
    parser.add_argument(
        "--out", type=_path, metavar="DIR", help="folder of the run (runs/train-001, or the next number that is free)"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the last checkpoint in --out (the runs/train-… of the highest number)",
    )
    for field in dataclasses.fields(Options):
        # None stands for "not given": a resumed run takes what was not given from the run itself.
        parser.add_argument("--" + field.name.replace("_", "-"), **{"default": None, **field.metadata})


def resolve(args: argparse.Namespace, out: Path | None, stored: dict[str, Any] | None) -> Options:
    """Options as given, or else as in the run that is resumed, or else their defaults.

    Args:
      args: parsed options of `add_arguments`.
      out: folder of the run that is resumed.
      stored: its header; None for a new run.

    Raises:
      UserError: an option given is not that of the run, or its header has options that cannot be read.
    """
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(Options)}
    given = {name: value for name, value in given.items() if value is not None}
    if stored is None:
        return Options(**given)
    kept = _kept(out, stored)
    if "tp" in given:
        # Parts of the batch stay what they are, and more or fewer devices share the model for each.
        kept["devices"] = kept["devices"] // kept["tp"] * given["tp"]
        kept["transport"] = kept["transport"] if given["tp"] > 1 else "auto"
    for name, value in given.items():
        before = kept.get(name)
        if name in _CHANGEABLE or value in ("auto", before) or (name == "steps" and value > kept["steps"]):
            continue
        option = "--" + name.replace("_", "-")
        if name == "devices" and "tp" in given:
            raise UserError(
                f"--devices is {value}, but the run in {out} divides its batch so that --tp {given['tp']} needs "
                f"{before} devices: leave --devices out"
            )
        raise UserError(
            f"{option} is {value}, but the run in {out} was started with {before}: "
            f"leave {option} out to continue it, or start another run without --resume"
        )
    new = {name: value for name, value in given.items() if value != "auto" or name == "transport"}
    return Options(**{**kept, **new})


def _kept(out: Path | None, stored: dict[str, Any]) -> dict[str, Any]:
    """Options of the run that is resumed, and defaults of those that are newer."""
    kept = {**dataclasses.asdict(Options()), **stored["options"]}
    types = get_type_hints(Options)
    if unknown := sorted(kept.keys() - types.keys()):
        raise UserError(
            f"the run in {out} has options that te_jax {__version__} does not know ({', '.join(unknown)}): go on with "
            "the version that wrote it, or start another run"
        )
    for field in dataclasses.fields(Options):
        value, choices = kept[field.name], field.metadata.get("choices")
        if not (value in choices if choices else isinstance(value, types[field.name])):
            raise UserError(f"the header of the run in {out} is damaged, {field.name} is {value!r}: start another run")
    check(Options(**kept))
    return kept


def check(options: Options) -> None:
    """Numbers by themselves; raises UserError."""
    for name in ("steps", "batch", "microbatches", "seq_len", "tp", "devices", "eval_every", "checkpoint_every"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}: it must be at least 1")
    if options.steps >= 2**31:
        raise UserError(f"--steps is {options.steps}: it must be below {2**31}")
    if not 0 <= options.seed < 2**32:
        raise UserError(f"--seed is {options.seed}: it must lie between 0 and {2**32 - 1}")
    rate = options.learning_rate
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        raise UserError(f"--learning-rate is {rate}: it must be a finite number above 0")
    warmup = options.warmup_steps
    if warmup is not None and not 0 <= warmup < options.steps:
        raise UserError(f"--warmup-steps is {warmup}: it must be at least 0 and below --steps, {options.steps}")
    if not (math.isfinite(options.clip_norm) and options.clip_norm >= 0):
        raise UserError(f"--clip-norm is {options.clip_norm}: it must be a finite number of at least 0, 0 for none")


def build_config(options: Options, tokenizer: "Tokenizer | None" = None) -> "DecoderConfig":
    """The model's shape and recipe; raises UserError for names that are none."""
    from te_jax.models import PRESETS

    if options.preset not in PRESETS:
        raise UserError(f"--preset {options.preset} is unknown: choose one of {', '.join(PRESETS)}")
    if options.recipe not in RECIPES:
        raise UserError(f"--recipe {options.recipe} is unknown: choose one of {', '.join(RECIPES)}")
    if options.optimizer_state not in STATE_DTYPES:
        raise UserError(
            f"--optimizer-state {options.optimizer_state} is unknown: choose one of {', '.join(STATE_DTYPES)}"
        )
    preset = PRESETS[options.preset]
    if preset.experts is not None:
        _check_experts(options)
    remat = preset.remat or options.remat
    return dataclasses.replace(
        preset,
        recipe=RECIPES[options.recipe],
        remat=remat,
        offload=_activations(remat) if "activations" in offloaded(options) else None,
        # XLA stops with an IndexError where cuDNN's attention meets xla_gpu_deterministic_ops (jax 0.11.2).
        attention="reference" if options.deterministic else None,
        vocab_size=preset.vocab_size if tokenizer is None else _rounded_up(tokenizer.vocab_size),
    )


def _check_experts(options: Options) -> None:
    """Refuses what a model with experts cannot do."""
    if options.recipe == "delayed":
        raise UserError(
            f"--recipe delayed keeps no state for the experts of --preset {options.preset}: choose block, current, "
            "rowwise or none"
        )
    if options.compare and options.recipe == "none" and options.optimizer_state == "f32":
        raise UserError(
            f"--compare has no twin for --preset {options.preset}, since optax has no loss of experts: add --recipe or "
            "--optimizer-state, or leave it out"
        )


def offloaded(options: Options) -> frozenset[str]:
    """What `--offload` names; raises UserError for names that are none."""
    named = frozenset(options.offload.split(","))
    unknown = sorted(named - {"activations", "optimizer", "none"})
    if unknown or (len(named) > 1 and "none" in named):
        raise UserError(f"--offload is {options.offload}: choose activations, optimizer, activations,optimizer or none")
    return named - {"none"}


def _activations(remat: bool) -> "Offload":
    """What a block keeps that takes long to compute again for its bytes."""
    from te_jax.offload import LAYER_INPUT, Offload

    names = [LAYER_INPUT] if remat else [LAYER_INPUT, "te_attention_operand", "te_attention_output"]
    return Offload(names=names, min_size=OFFLOAD_MIN_SIZE)


def _rounded_up(vocab_size: int) -> int:
    """A vocabulary that suits GEMMs and devices that share the model."""
    return -(-vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE


def check_parallel(options: Options, config: "DecoderConfig") -> None:
    """Whether as many devices as `--tp` asks for can share this model and these windows; raises UserError."""
    from te_jax._core.types import BLOCK
    from te_jax.models import PRESETS, TensorParallel

    if options.tp == 1:
        if options.transport != "auto":
            raise UserError(f"--transport {options.transport} is for devices that share a model: add --tp N")
        return
    parallel = TensorParallel(options.tp)
    same: dict[str, Any] = {"recipe": config.recipe}
    if options.tokenizer is not None:
        same["vocab_size"] = config.vocab_size

    def problem(preset: str) -> str | None:
        try:
            parallel.check(dataclasses.replace(PRESETS[preset], **same))
        except ValueError as error:
            return str(error).removeprefix(f"parallel.size is {options.tp}: ")  # --tp, on the command line

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


def settle(options: Options, config: "DecoderConfig", corpus: "Corpus", devices: "list[Any]") -> Options:
    """The options with everything that was left open filled in."""
    on_gpu = devices[0].platform == "gpu"
    return dataclasses.replace(
        options,
        text=corpus.source,
        tokenizer=None if options.tokenizer is None else str(Path(options.tokenizer).resolve()),
        devices=len(devices),
        checkpoint_every=options.checkpoint_every or (1000 if on_gpu else 100),
        learning_rate=peak_rate(options, config),
        dtype=("bfloat16" if on_gpu else "float32") if options.dtype == "auto" else options.dtype,
    )


def peak_rate(options: Options, config: "DecoderConfig") -> float:
    """The learning rate after warming up."""
    # Falls with the width, as the gradients of wider layers add up: 0.003 for `tiny`, 0.0005 for `small`.
    return options.learning_rate or 0.384 / config.hidden_size
