"""Plan of a run of `te-jax train`, decided once: by its options, its text, the devices and the run that it resumes."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from te_jax import native, ops
from te_jax._core.terminal import reason_of
from te_jax.cli import _placement, _text
from te_jax.cli._options import RECIPES, STATE_DTYPES, Options
from te_jax.cli._placement import Placement
from te_jax.cli._run_folder import StoredRun
from te_jax.cli.errors import UserError
from te_jax.layers import Router
from te_jax.layers.stack import Remat
from te_jax.models import (
    PRESETS,
    DecoderConfig,
    Experts,
    FolderError,
    Lora,
    RopeScaling,
    TensorParallel,
    config_from_hf,
)
from te_jax.models.config import ATTENTION
from te_jax.models.safetensors import Tensors
from te_jax.offload import LAYER_INPUT, Offload
from te_jax.quantized import facts_of_recipe
from te_jax.recipe import DelayedScaling, MXFP8Scaling

OFFLOAD_MIN_SIZE = 2**16
"""Bytes: what is smaller stays on the device."""

_BYTES = 256
_VOCAB_MULTIPLE = 128  # suits GEMMs, and devices that share the model


class Model(NamedTuple):
    """A model that a run trains, and how."""

    loss_name: str  # in the log
    config: DecoderConfig
    state_dtype: str  # of Adam's moments
    parameters: str = "float32"  # dtype of those that are trained
    by_optax: bool = False  # whether optax computes the loss
    quantized_once: bool = True  # whether a step quantizes kernels once, where it can, and not each layer its own


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run, decided once. Hashable: runs of equal plans compile equal programs.

    What depends on more than one option, such as a default by platform, is a field: read that and not the option.
    """

    options: Options  # as asked for, so that None and "auto" are undecided
    models: tuple[Model, ...]  # the run's own, and its twin with --compare
    learning_rate: float  # after warming up
    warmup_steps: int
    checkpoint_every: int  # steps
    placement: Placement
    implementation: native.Implementation | None  # None: each operation has its own, as kernels do not multiply all
    text: str  # its path, or `_text.DEFAULT_TEXT`
    token: str  # what a token of the text is called, in the singular
    num_tokens: int  # of the text
    num_documents: int | None  # of the text; None without --pack
    sha256: str  # of its tokens, and of where documents begin

    @property
    def config(self) -> DecoderConfig:
        """The run's own."""
        return self.models[0].config

    def recorded_options(self) -> dict[str, Any]:
        """Options as a resumed run finds them. `warmup_steps` is left open where it was: a longer run takes more."""
        tokenizer = self.options.tokenizer
        return dataclasses.asdict(self.options) | {
            "text": self.text,
            "tokenizer": None if tokenizer is None else str(Path(tokenizer).resolve()),
            "from_": None if self.options.from_ is None else str(Path(self.options.from_).resolve()),
            "devices": len(self.placement.devices),
            "replicas": self.placement.replicas,
            "fsdp": self.placement.fsdp,
            "checkpoint_every": self.checkpoint_every,
            "learning_rate": self.learning_rate,
            "dtype": self.config.dtype,
            "parameters": self.models[0].parameters,
        }


def decide(options: Options, stored: StoredRun | None = None) -> tuple[Plan, tuple[_text.Tokens, _text.Tokens]]:
    """The plan, and the tokens to train on and to validate on. Starts JAX's backend.

    Args:
      options: of `_options.resolve`.
      stored: the run that is resumed; None for a new one.

    Raises:
      UserError: options name what there is not, do not go together, or need another text or other devices.
    """
    if options.from_ is not None and options.tokenizer is None:
        options = dataclasses.replace(options, tokenizer=tokenizer_of(options.from_))
    tokenizer = None if options.tokenizer is None else _text.Tokenizer(options.tokenizer)
    config = build_config(options, None if tokenizer is None else tokenizer.vocab_size)
    corpus = _text.load(options.text, tokenizer, pack=options.pack)
    if stored is not None:
        _check_stored(stored, options, config, corpus)
    data = _text.split(corpus, options.seq_len)
    devices = _placement.take_devices(options)
    _check_batch(options, len(devices) // (options.tp * options.cp))
    defaults = _placement.defaults_of(devices[0].platform)
    begins = corpus.tokens.begins
    config = dataclasses.replace(
        config,
        dtype=defaults.dtype if options.dtype == "auto" else options.dtype,
        max_segments_per_seq=None if begins is None else _max_segments(begins, options.seq_len),
    )
    plan = Plan(
        options,
        models=_models(options, config, defaults.parameters),
        learning_rate=options.learning_rate or _learning_rate(options, config),
        warmup_steps=options.steps // 20 if options.warmup_steps is None else options.warmup_steps,
        checkpoint_every=options.checkpoint_every or defaults.checkpoint_every,
        placement=_placement.build_placement(devices, options, config),
        implementation=_implementation(options, config),
        text=corpus.source,
        token=corpus.unit,
        num_tokens=corpus.tokens.ids.size,
        num_documents=None if begins is None else int(begins.sum()),
        sha256=corpus.sha256,
    )
    return plan, data


def _learning_rate(options: Options, config: DecoderConfig) -> float:
    """Falls with the width, as the gradients of wider layers add up: 0.003 for `tiny`, 0.0005 for `small`. A model that
    was trained before takes smaller steps."""
    if options.from_ is None:
        return 0.384 / config.hidden_size
    return 2e-5 if config.lora is None else 2e-4


def tokenizer_of(folder: str) -> str | None:
    """The file with the tokenizer of a model of Hugging Face; None for a model of bytes, as `te-jax train` makes them.

    Raises:
      UserError: there is no such model, or no tokenizer of it.
    """
    path = Path(folder) / "tokenizer.json"
    if path.is_file():
        return str(path)
    with reading(folder):
        config = config_from_hf(folder)
    if config.vocab_size == _BYTES:
        return None
    raise UserError(f"--from {folder} has no tokenizer.json, which reads the text: put that of the model there")


def build_config(options: Options, vocab_size: int | None = None) -> DecoderConfig:
    """The model's shape, recipe and offload, and whether devices can share it.

    Args:
      options: of `_options.resolve`. `dtype`, which may depend on devices, is left to `decide`.
      vocab_size: number of tokens of the tokenizer; None for bytes.

    Raises:
      UserError: options name what there is not, or do not go together.
    """
    of_head = [name for name in RECIPES if name != "delayed"]  # a loss has no state
    names = ("preset", PRESETS), ("recipe", RECIPES), ("head_recipe", of_head), ("optimizer_state", STATE_DTYPES)
    for name, known in names:
        if (value := getattr(options, name)) not in known:
            option = name.replace("_", "-")
            raise UserError(f"--{option} {value} is unknown: choose one of {', '.join(known)}")
    if options.fp8_logits and options.head_recipe == "none":
        raise UserError("--fp8-logits needs a recipe of the output head: add --head-recipe, such as block")
    if options.statistics and options.recipe == options.head_recipe == "none":
        raise UserError(
            f"--statistics {options.statistics} has nothing to show, since no layer is in FP8: add --recipe, such as "
            "block, or leave it out"
        )
    if options.remat == "attention" and options.deterministic:
        raise UserError(
            "--remat attention does not go with --deterministic, whose attention is computed again in any case: leave "
            "the word attention out"
        )
    model = _model(options, vocab_size)
    if model.experts is not None:
        _check_experts(options)
    remat = cast(Remat, options.remat or model.remat)
    config = dataclasses.replace(
        model,
        recipe=RECIPES[options.recipe],
        head_recipe=RECIPES[options.head_recipe],
        head_fp8_products=("forward",) * options.fp8_logits + model.head_fp8_products,
        remat=remat,
        offload=_activations(remat, options.deterministic) if "activations" in options.offloaded else None,
        # XLA stops with an IndexError where cuDNN's attention meets xla_gpu_deterministic_ops (jax 0.11.2).
        attention="reference" if options.deterministic else None,
        lora=None if options.lora is None else _lora(options.lora, model),
    )
    _check_parallel(options, config)
    return config


def _lora(rank: int, model: DecoderConfig) -> Lora:
    """Adapters of all kernels that can have one."""
    return Lora(rank) if model.experts is None else Lora(rank, names=ATTENTION)


def _model(options: Options, vocab_size: int | None) -> DecoderConfig:
    """The shape that options name, for a tokenizer of so many tokens."""
    if options.from_ is None:
        preset = PRESETS[options.preset]
        rounded = preset.vocab_size if vocab_size is None else -(-vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
        return dataclasses.replace(preset, vocab_size=rounded)
    with reading(options.from_):
        config = config_from_hf(options.from_)
    if vocab_size is not None and vocab_size > config.vocab_size:
        raise UserError(
            f"--tokenizer {options.tokenizer} has {vocab_size} tokens, and the model of --from {options.from_} knows "
            f"{config.vocab_size}: give the model's own tokenizer"
        )
    return config


def config_of(path: Path, header: dict[str, Any]) -> DecoderConfig:
    """The shape in the header of a run, without what says how it was trained.

    Raises:
      UserError: the header is damaged.
    """
    names = {field.name for field in dataclasses.fields(DecoderConfig)} - {"recipe", "head_recipe", "offload"}
    try:
        fields: dict[str, Any] = {name: value for name, value in header["model"].items() if name in names}
        if (experts := fields.get("experts")) is not None:
            fields["experts"] = Experts(**{**experts, "router": Router(**experts["router"])})
        if (scaling := fields.get("rope_scaling")) is not None:
            fields["rope_scaling"] = RopeScaling(**scaling)
        if (lora := fields.get("lora")) is not None:
            fields["lora"] = Lora(**{**lora, "names": tuple(lora["names"])})
        if isinstance(activation := fields.get("activation"), dict):
            fields["activation"] = ops.Activation(**activation)
        fields |= {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        return DecoderConfig(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"the header of the run in {path} is damaged or of another version ({reason_of(error)})"
        ) from error


def sha256_of(folder: str | Path) -> str:
    """SHA-256 of a sample of a model's weights.

    Raises:
      UserError: the folder holds no model.
    """
    with reading(folder):
        return Tensors.open(Path(folder)).digest()


def is_bfloat16(folder: str | Path) -> bool:
    """Whether all of a model's weights are bfloat16.

    Raises:
      UserError: the folder holds no model.
    """
    with reading(folder):
        return {each.dtype for each in Tensors.open(Path(folder)).types.values()} == {jnp.dtype(jnp.bfloat16)}


@contextlib.contextmanager
def reading(folder: str | Path) -> Iterator[None]:
    """Turns what is wrong with a folder of Hugging Face into an error of the command."""
    try:
        yield
    except FolderError as error:
        named = "" if str(folder) in str(error) else f"{folder}: "
        raise UserError(f"{named}{error}") from error


def _max_segments(begins: np.ndarray, seq_len: int) -> int | None:
    """`DecoderConfig.max_segments_per_seq`: a power of two, so that another text seldom changes the program.

    None takes a mask, which cuDNN needs before Hopper. It is slower than any bound that was measured on an H100, but
    above a document for 32 tokens the workspace of attention's gradients grows with the bound.
    """
    bound = 1 << (_text.most_documents(begins, seq_len) - 1).bit_length()
    hopper = (native.compute_capability() or (9, 0)) >= (9, 0)
    return bound if hopper and 32 * bound <= seq_len else None


def _check_experts(options: Options) -> None:
    """Refuses what a model with experts cannot do."""
    if options.recipe == "delayed":
        raise UserError(
            f"--recipe delayed keeps no state for the experts of {options.model}: choose block, current, "
            "rowwise or none"
        )
    if options.compare and options.recipe == options.head_recipe == "none" and options.optimizer_state == "f32":
        raise UserError(
            f"--compare has no twin for {options.model}, since optax has no loss of experts: add --recipe, "
            "--head-recipe or --optimizer-state, or leave it out"
        )


def _activations(remat: Remat, deterministic: bool) -> Offload:
    """Residuals of a block that take long to compute again for their bytes."""
    names = [LAYER_INPUT]
    if not remat:
        names.append("te_attention_operand")
    if remat is not True and not deterministic:  # the reference's attention keeps probabilities in its place
        names.append("te_attention_output")
    return Offload(names=names, min_size=OFFLOAD_MIN_SIZE)


def _check_parallel(options: Options, config: DecoderConfig) -> None:
    """Refuses a model and windows that as many devices as `--tp` asks for cannot share."""
    if options.tp == 1:
        if options.transport != "auto":
            raise UserError(f"--transport {options.transport} is for devices that share a model: add --tp N")
        return
    if isinstance(config.recipe, MXFP8Scaling):
        raise UserError(
            f"--recipe {options.recipe} does not go with --tp {options.tp}, whose products have no blocks of 32: "
            "choose current, rowwise or block, or --fsdp in the place of --tp"
        )
    if options.lora is not None:
        raise UserError(
            f"--lora {options.lora} does not go with --tp {options.tp}, since adapters are not split: choose --fsdp in "
            "the place of --tp"
        )
    parallel = TensorParallel(options.tp)
    same: dict[str, Any] = {"recipe": config.recipe}
    if options.tokenizer is not None:
        same["vocab_size"] = config.vocab_size

    def problem(model: DecoderConfig) -> str | None:
        try:
            parallel.check(model)
        except ValueError as error:
            return str(error).removeprefix(f"parallel.size is {options.tp}: ")  # --tp, on the command line

    if misfit := problem(config):
        named = f"--tp {options.tp} does not fit {options.model}: {misfit}"
        if options.from_ is not None:
            raise UserError(named)
        presets = {name: dataclasses.replace(preset, **same) for name, preset in PRESETS.items()}
        fitting = ", ".join(name for name, preset in presets.items() if not problem(preset)) or "none"
        raise UserError(f"{named}; presets that {options.tp} fits: {fitting}")
    # Blocks of the weight gradients' operands lie along the time that a device has.
    block = facts_of_recipe(config.recipe).block_size
    multiple = options.cp * options.tp * block
    if options.seq_len % multiple:
        shared = f"--cp {options.cp} --tp {options.tp}" if options.cp > 1 else f"--tp {options.tp}"
        blocks = f" in blocks of {block}" if block > 1 else ""
        raise UserError(
            f"--seq-len {options.seq_len} does not divide over {shared}{blocks}: choose a multiple of {multiple}"
        )


def _check_stored(stored: StoredRun, options: Options, config: DecoderConfig, corpus: _text.Corpus) -> None:
    """Refuses another text than that of the run which is resumed, or other tokens."""
    if corpus.sha256 != stored.header.get("text", {}).get("sha256"):
        by = "" if options.tokenizer is None else f" with --tokenizer {options.tokenizer}"
        raise UserError(
            f"--text {corpus.source}{by} is not, or no longer, what the run in {stored.path} was trained on"
        )
    model = stored.header.get("model", {})
    if options.from_ is not None and model:
        other_shape = config_of(stored.path, stored.header).architecture != config.architecture
        base = model.get("base_sha256")  # of runs with adapters, whose checkpoints hold no more
        if other_shape or (base is not None and base != sha256_of(options.from_)):
            what = "a model of another shape" if other_shape else "other weights"
            raise UserError(
                f"--from {options.from_} holds {what} than the run in {stored.path} began with: give the folder that "
                "the run began with"
            )
    before = model.get("vocab_size", config.vocab_size)
    if config.vocab_size != before:
        raise UserError(
            f"--tokenizer {options.tokenizer} needs a vocabulary of {config.vocab_size}, and the model of the run in "
            f"{stored.path} has {before}: give the run's own tokenizer, or start another run without --resume"
        )


def _check_batch(options: Options, parts: int) -> None:
    """Refuses a batch that groups of devices cannot share equally."""
    multiple = parts * options.microbatches
    if options.batch % multiple:
        group = " ".join(f"--{name} {size}" for name, size in (("cp", options.cp), ("tp", options.tp)) if size > 1)
        over = f"{parts} groups of {group}" if group else f"{parts} devices"
        over = over if options.microbatches == 1 else f"--microbatches {options.microbatches} on {over}"
        raise UserError(
            f"--batch {options.batch} does not divide over {over}: choose a multiple of {multiple}, or other --devices"
        )


def _models(options: Options, config: DecoderConfig, parameters: str) -> tuple[Model, ...]:
    in_bfloat16 = config.dtype == "bfloat16" and config.lora is None
    if options.parameters == "bfloat16" and not in_bfloat16:
        raise UserError(
            "--parameters bfloat16 does not go with "
            + ("--lora, whose adapters are float32" if config.lora else "activations in float32: add --dtype bfloat16")
        )
    parameters = parameters if options.parameters == "auto" else options.parameters
    model = Model(
        "loss", config, STATE_DTYPES[options.optimizer_state], parameters=parameters if in_bfloat16 else "float32"
    )
    if not options.compare:
        return (model,)
    # A twin differs in one thing, so that the distance of the two curves is what that costs.
    if config.recipe is not None or config.head_recipe is not None:
        plain = dataclasses.replace(config, recipe=None, head_recipe=None)
        return model, model._replace(loss_name=f"{config.dtype}_loss", config=plain)
    if options.optimizer_state != "f32":
        return model, model._replace(loss_name="f32_states_loss", state_dtype=STATE_DTYPES["f32"])
    return model, model._replace(loss_name="optax_loss", by_optax=True)


def _implementation(options: Options, config: DecoderConfig) -> native.Implementation | None:
    """Which implementation of te_jax's operations runs. Raises UserError where what was asked for cannot run."""
    asked = None if options.implementation == "auto" else options.implementation
    with _available(f"--implementation {options.implementation}"):
        use_native = native.use_native(asked, products=True)
    if options.transport == "p2p":
        if asked in ("reference", "xla"):
            raise UserError(f"--transport p2p is native, and --implementation is {asked}: leave one of them out")
        with _available("--transport p2p"):
            native.use_native("native", products=True)
    of = {f"--recipe {options.recipe}": config.recipe, f"--head-recipe {options.head_recipe}": config.head_recipe}
    chosen = "" if asked is None else f" with --implementation {asked}"
    for option, recipe in of.items():
        if recipe is None:
            continue
        if config.experts is not None and option.startswith("--recipe"):
            grouped = functools.partial(ops.grouped_dense, recipe=recipe, implementation=asked)
            with _available(f"{option}{chosen}"):
                shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((128, 128), (1, 128, 128))]
                jax.eval_shape(grouped, *shapes, jax.ShapeDtypeStruct((1,), jnp.int32))
        state = recipe.init() if isinstance(recipe, DelayedScaling) else None
        layer = functools.partial(ops.dense, recipe=recipe, scaling_state=state, implementation=asked)
        with _available(f"{option}{chosen}"):  # not every GPU has kernels for it
            jax.eval_shape(layer, *[jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 2)
    has_kernels = not any(isinstance(recipe, MXFP8Scaling) for recipe in of.values())
    if use_native and has_kernels:
        return "native"
    on_cpu_alone = native.compute_capability() is None and not use_native
    return asked or ("reference" if on_cpu_alone else None)


@contextlib.contextmanager
def _available(option: str) -> Iterator[None]:
    try:
        yield
    except native.NativeUnavailableError as error:
        raise UserError(f"{option} cannot run here: {error}") from error
