"""The options of `te-jax train`: given on the command line, or kept by the run that is resumed."""

import argparse
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, cast

from te_jax._version import __version__
from te_jax.cli._run_folder import StoredRun
from te_jax.cli.errors import UserError
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, Recipe, RowwiseScaling

DESCRIPTION = """\
Trains a small language model on text, on whatever devices JAX finds, and writes a log, checkpoints and the loss
curves to a folder. Processes that srun or mpirun starts train together. Ctrl-C and SIGTERM save a checkpoint first. A
run that was stopped or killed goes on with --resume, and ends with the same bits on CPUs and, with --deterministic, on
GPUs."""

RECIPES: dict[str, Recipe | None] = {
    "block": BlockScaling(),
    "current": CurrentScaling(),
    "rowwise": RowwiseScaling(),
    "delayed": DelayedScaling(),
    "mxfp8": MXFP8Scaling(),
    "none": None,
}

STATE_DTYPES = {"f32": "float32", "bf16": "bfloat16", "fp8": "float8_e4m3fn"}

# A resumed run compares the tokens of its text and the size of its model; the other options change no more than the
# rounding of numbers.
_CHANGEABLE = (
    *("text", "tokenizer", "from_", "checkpoint_every", "devices", "replicas", "fsdp", "tp", "cp", "transport"),
    *("remat", "offload", "microbatches", "deterministic", "statistics", "tensorboard", "hang_timeout"),
)


def path_word(word: str) -> str:
    """A path on the command line."""
    # A script's variable that is not set; as a path it would be the working directory.
    if not word:
        raise argparse.ArgumentTypeError("is empty: give a path")
    try:
        word.encode()
    except UnicodeEncodeError as error:  # checkpoints cannot be written there
        raise argparse.ArgumentTypeError("is not UTF-8: give another path, or rename it") from error
    return word


def path(word: str) -> Path:
    """A path that is not written to the header of a run."""
    return Path(path_word(word))


def _rank_or_folder(word: str) -> int | str:
    try:
        return int(word)
    except ValueError:
        return path_word(word)


def _option(default: Any, text: str, **argument: Any) -> Any:
    """A field of `Options`, with what argparse is told about it."""
    if default not in (None, False):
        text += f" ({default})"
    if type(default) in (int, float):
        argument["type"] = type(default)
    return dataclasses.field(default=default, metadata={"help": text, **argument})


@dataclasses.dataclass(frozen=True)
class _Group:
    """Options that belong together; each is checked by itself, and raises UserError."""

    counts: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self):
        for name in self.counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{flag(name)} is {value}: it must be at least 1")


@dataclasses.dataclass(frozen=True)
class Data(_Group):
    """The text, and how much of it a step reads."""

    text: str | None = _option(
        None, "what to train on (the language reference that ships with Python)", type=path_word, metavar="FILE_OR_DIR"
    )
    tokenizer: str | None = _option(
        None,
        "tokenizer.json of Hugging Face, read with the package tokenizers; the model's vocabulary becomes its own, "
        "rounded up to a multiple of 128 (tokens are bytes; with --from, that of its folder)",
        type=path_word,
        metavar="FILE",
    )
    pack: bool = _option(
        False,
        "a token sees only its own document, and the loss ignores the token behind a document's end; documents are the "
        "files of a folder, or topics of the language reference (a window is one text)",
        action="store_true",
    )
    batch: int = _option(16, "windows per step, over all devices")
    seq_len: int = _option(128, "tokens predicted per window")

    counts = ("batch", "seq_len")


@dataclasses.dataclass(frozen=True)
class Origin(_Group):
    """The model that is trained, and where its parameters come from."""

    preset: str = _option("tiny", "shape of the model: nano, tiny, small or 8b; with experts: moe or moe-3b")
    from_: str | None = _option(
        None,
        "start from a model of Hugging Face, in the place of --preset: a folder with config.json, safetensors and "
        "tokenizer.json",
        type=path_word,
        metavar="DIR",
    )
    lora: int | str | None = _option(
        None,
        "with --from: train adapters of this rank beside the kernels, which stay as they are, and with a recipe in FP8 "
        "alone; or begin with the adapters of PEFT in a folder",
        type=_rank_or_folder,
        metavar="RANK_OR_DIR",
    )

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.lora, int) and self.lora < 1:
            raise UserError(f"--lora is {self.lora}: it must be at least 1, or the folder of adapters of PEFT")
        if self.from_ is not None and self.preset != "tiny":
            raise UserError(f"--from has a model, and --preset {self.preset} names another: leave one of them out")
        if self.lora is not None and self.from_ is None:
            raise UserError(f"--lora {self.lora} trains adapters of a model that was trained before: add --from DIR")

    @property
    def named(self) -> str:
        """The option that names the model, with its value."""
        return f"--preset {self.preset}" if self.from_ is None else f"--from {self.from_}"


@dataclasses.dataclass(frozen=True)
class Training(_Group):
    """Steps of the optimizer."""

    steps: int = _option(200, "optimizer steps; with --resume, a larger number extends the run")
    seed: int = _option(0, "seed of parameters or adapters, order of the data and stochastic rounding")
    optimizer: str = _option(
        "adam",
        "adam, or muon: the kernels of hidden layers by Muon, in updates as large as Adam's, and all else by Adam",
        choices=("adam", "muon"),
    )
    learning_rate: float | None = _option(
        None,
        "peak of the schedule (0.384 / width of the model; with --from 0.00002, with --lora 0.0002)",
        type=float,
    )
    warmup_steps: int | None = _option(
        None,
        "steps until the peak, after which the rate falls along a cosine (a twentieth of --steps)",
        type=int,
        metavar="STEPS",
    )
    clip_norm: float = _option(
        1.0, "largest norm of the gradient, to which larger ones are scaled; 0 for none", metavar="NORM"
    )

    counts = ("steps",)

    def __post_init__(self):
        super().__post_init__()
        if self.steps >= 2**31:
            raise UserError(f"--steps is {self.steps}: it must be below {2**31}")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"--seed is {self.seed}: it must lie between 0 and {2**32 - 1}")
        rate = self.learning_rate
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            raise UserError(f"--learning-rate is {rate}: it must be a finite number above 0")
        warmup = self.warmup_steps
        if warmup is not None and not 0 <= warmup < self.steps:
            raise UserError(f"--warmup-steps is {warmup}: it must be at least 0 and below --steps, {self.steps}")
        if not (math.isfinite(self.clip_norm) and self.clip_norm >= 0):
            raise UserError(f"--clip-norm is {self.clip_norm}: it must be a finite number of at least 0, 0 for none")


@dataclasses.dataclass(frozen=True)
class Devices(_Group):
    """How many devices train, and what they share."""

    devices: int | None = _option(
        None,
        "GPUs to use, or CPU devices to divide this host into (all that JAX shows, on CPUs --replicas · --fsdp · --tp; "
        "several processes use all)",
        type=int,
    )
    replicas: int | None = _option(
        None,
        "groups of devices that have the same parameters, and a part of the batch each (as few as --fsdp allows)",
        type=int,
        metavar="N",
    )
    fsdp: int | None = _option(
        None,
        "devices that share the parameters: each has a part of every one, and of the batch (as many of a host as "
        "fit the model and divide its devices)",
        type=int,
        metavar="N",
    )
    tp: int = _option(
        1, "devices that share the model: each has a part of its heads, widths and vocabulary", metavar="N"
    )
    cp: int = _option(
        1,
        "devices that share each window, and have a part of its tokens each; in the place of --fsdp N they share the "
        "parameters, too",
        metavar="N",
    )
    transport: Literal["auto", "xla", "ring", "p2p"] = _option(
        "auto", "how devices that share the model communicate", choices=("auto", "xla", "ring", "p2p")
    )

    counts = ("devices", "replicas", "fsdp", "tp", "cp")

    def __post_init__(self):
        super().__post_init__()
        if self.cp > 1 and self.fsdp not in (None, self.cp):
            raise UserError(
                f"--cp is {self.cp} and --fsdp {self.fsdp}: devices that share windows share the parameters, too; "
                "leave --fsdp out"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the mesh that are asked for, by their options."""
        shared = {"cp": self.cp} if self.cp > 1 else {"fsdp": self.fsdp}
        sizes = {"replicas": self.replicas, **shared, "tp": self.tp if self.tp > 1 else None}
        return {f"--{name}": size for name, size in sizes.items() if size is not None}


@dataclasses.dataclass(frozen=True)
class Precision(_Group):
    """Dtypes, recipes and implementations of what is computed."""

    recipe: str = _option("none", f"FP8 recipe of the projections: {', '.join(RECIPES)}")
    head_recipe: str = _option(
        "none", f"FP8 recipe of the output head's gradients: {', '.join(name for name in RECIPES if name != 'delayed')}"
    )
    fp8_logits: bool = _option(
        False,
        "with --head-recipe: the logits, too, are computed in FP8, which is faster and loses most of the accuracy",
        action="store_true",
    )
    optimizer_state: str = _option("f32", f"dtype of the optimizer's moments: {', '.join(STATE_DTYPES)}")
    parameters: str = _option(
        "auto",
        "dtype of the parameters that the model reads; beside bfloat16 the optimizer keeps the other 16 bits of "
        "float32 weights, and gradients and memory are smaller; auto is bfloat16 on GPUs with activations in bfloat16, "
        "and float32 elsewhere and for adapters",
        choices=("auto", "float32", "bfloat16"),
    )
    dtype: str = _option(
        "auto",
        "dtype of activations; auto is bfloat16 on GPUs and float32 on CPUs",
        choices=("auto", "float32", "bfloat16"),
    )
    implementation: Literal["auto", "native", "xla", "reference"] = _option(
        "auto", "implementation of te_jax's operations", choices=("auto", "native", "xla", "reference")
    )
    deterministic: bool = _option(
        False,
        "repeat the same bits on a GPU, with --resume too: no autotuning and no atomic additions, which is slower; "
        "runs on CPUs always do",
        action="store_true",
    )


@dataclasses.dataclass(frozen=True)
class Memory(_Group):
    """What a device keeps."""

    microbatches: int = _option(
        1, "equal parts of the batch that are computed one after the other: less memory for the same step", metavar="N"
    )
    remat: bool | str = _option(
        False,
        "recompute blocks in the backward pass: less memory for a third more FLOPs (always for 8b and moe-3b); --remat "
        "attention keeps the results of attention, as large as a block's input, and does not compute it again",
        nargs="?",
        const=True,
        metavar="attention",
    )
    offload: str = _option(
        "none",
        "what waits in host memory while it is not needed: activations, optimizer (its moments), or both with a "
        "comma between",
        metavar="WHAT",
    )

    counts = ("microbatches",)

    def __post_init__(self):
        super().__post_init__()
        if self.remat not in (False, True, "attention"):
            raise UserError(f"--remat is {self.remat}: write --remat alone, or --remat attention")
        if not self.offloaded <= {"activations", "optimizer"}:
            raise UserError(
                f"--offload is {self.offload}: choose activations, optimizer, activations,optimizer or none"
            )

    @property
    def offloaded(self) -> frozenset[str]:
        return frozenset() if self.offload == "none" else frozenset(self.offload.split(","))


@dataclasses.dataclass(frozen=True)
class Output(_Group):
    """What a run measures and writes beside its model."""

    compare: bool = _option(
        False,
        "also train a twin on the same data: without recipes; if there are none, with float32 moments; if these are "
        "float32 too, with optax's loss",
        action="store_true",
    )
    statistics: int = _option(
        0,
        "with --recipe: every N steps, a step with statistics of the tensors in FP8, for the log, a figure and "
        "warnings; 0 for none",
        metavar="N",
    )
    tensorboard: bool = _option(
        False,
        "also write losses and statistics for TensorBoard, to the folder tensorboard of the run",
        action="store_true",
    )
    eval_every: int = _option(50, "steps between validations", metavar="STEPS")
    checkpoint_every: int | None = _option(
        None, "steps between checkpoints (1000 on GPUs, 100 on CPUs)", type=int, metavar="STEPS"
    )

    hang_timeout: int = _option(
        1800, "end a run without a further step for so long, with exit status 75; 0 for never", metavar="SECONDS"
    )

    counts = ("eval_every", "checkpoint_every")

    def __post_init__(self):
        super().__post_init__()
        if self.statistics < 0:
            raise UserError(f"--statistics is {self.statistics}: it must be at least 1, or 0 for none")
        if self.hang_timeout < 0:
            raise UserError(f"--hang-timeout is {self.hang_timeout}: it must be at least 1 second, or 0 for never")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options that define a run: the same ones give the same numbers. A run records them, and a resumed run keeps them.

    `_plan.decide` decides those whose default is None by the text, the model and the devices; for a resumed run on
    other devices `replicas` and `fsdp` again.
    """

    data: Data = Data()
    model: Origin = Origin()
    training: Training = Training()
    mesh: Devices = Devices()
    precision: Precision = Precision()
    memory: Memory = Memory()
    output: Output = Output()

    def __post_init__(self):
        """Checks what no group knows by itself, except for names of what `_plan` knows; raises UserError."""
        multiple = 2 * self.mesh.cp * self.mesh.tp
        if self.mesh.cp > 1 and self.data.seq_len % multiple:
            raise UserError(
                f"--seq-len is {self.data.seq_len}: with --cp {self.mesh.cp} --tp {self.mesh.tp} it must be a multiple "
                f"of {multiple}"
            )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Options by their names, and defaults of the others."""
        groups = {
            name: kind(**{key: values[key] for key in kind.__dataclass_fields__ if key in values})
            for name, kind in GROUPS.items()
        }
        return cls(**groups)

    def values(self) -> dict[str, Any]:
        """All options by their names."""
        return {name: value for group in vars(self).values() for name, value in vars(group).items()}


GROUPS: dict[str, type[Any]] = Options.__annotations__
_FIELDS = {field.name: field for kind in GROUPS.values() for field in dataclasses.fields(kind)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `te-jax train` to a parser."""
    parser.description = DESCRIPTION
    parser.usage = f"{parser.prog} [OPTION ...]"
    run = parser.add_argument_group("run")
    run.add_argument(
        "--out",
        type=path_word,
        metavar="DIR",
        help="folder of the run (runs/train-001, or the next number that is free)",
    )
    run.add_argument(
        "--resume",
        action="store_true",
        help="go on from the last checkpoint in --out (the runs/train-… of the highest number)",
    )
    run.add_argument(
        "--memory",
        action="store_true",
        help="compile a step, say what it needs of a device's memory, and end",
    )
    for name, kind in GROUPS.items():
        group = parser.add_argument_group(name)
        for field in dataclasses.fields(kind):
            # None stands for "not given": a resumed run takes what was not given from the run itself.
            group.add_argument(flag(field.name), dest=field.name, **{"default": None, **field.metadata})


def flag(name: str) -> str:
    """The option of a field; `from_` stands for a word of Python."""
    return "--" + name.rstrip("_").replace("_", "-")


def resolve(args: argparse.Namespace, stored: StoredRun | None) -> Options:
    """Options as given, or else as in the run that is resumed, or else their defaults.

    Args:
      args: parsed options of `add_arguments`.
      stored: the run that is resumed; None for a new one.

    Raises:
      UserError: a number is out of range, an option given is not that of the run, or its header has options that cannot
        be read.
    """
    arguments = {name: value for name in _FIELDS if (value := getattr(args, name)) is not None}
    if stored is None:
        return Options.of(arguments)
    kept = _kept(stored)
    if any(arguments.get(name, kept[name]) != kept[name] for name in ("devices", "replicas", "fsdp", "tp", "cp")):
        kept |= {"replicas": None, "fsdp": None}
    if "tp" in arguments:
        # Unless --devices says otherwise, parts of the batch stay what they are, and more or fewer devices share each.
        kept["devices"] = kept["devices"] // kept["tp"] * arguments["tp"]
        kept["transport"] = kept["transport"] if arguments["tp"] > 1 else "auto"
    for name, value in arguments.items():
        before = kept.get(name)
        if name in _CHANGEABLE or value in ("auto", before) or (name == "steps" and value > kept["steps"]):
            continue
        option = flag(name)
        raise UserError(
            f"{option} is {value}, but the run in {stored.path} was started with {before}: "
            f"leave {option} out to continue it, or start another run without --resume"
        )
    new = {name: value for name, value in arguments.items() if value != "auto" or name == "transport"}
    return Options.of(kept | new)


def _kept(stored: StoredRun) -> dict[str, Any]:
    """Options of the run that is resumed, and defaults of those that are newer."""
    # A run without `fsdp` is older than that: its devices have all parameters. Nor could these have another dtype.
    kept = Options.of({"fsdp": 1, "parameters": "float32"}).values() | stored.header["options"]
    if unknown := sorted(kept.keys() - _FIELDS.keys()):
        raise UserError(
            f"the run in {stored.path} has options that te_jax {__version__} does not know ({', '.join(unknown)}): go "
            "on with the version that wrote it, or start another run"
        )
    for name, field in _FIELDS.items():
        value, choices = kept[name], field.metadata.get("choices")
        if not (value in choices if choices else isinstance(value, cast(type, field.type))):
            raise UserError(
                f"the header of the run in {stored.path} is damaged, {name} is {value!r}: start another run"
            )
    return Options.of(kept).values()
