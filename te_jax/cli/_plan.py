"""Plan of a run of `te-jax train`, decided once: by its options, its text, the devices and the run that it resumes."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from te_jax import native, ops
from te_jax.cli import _config, _placement, _text
from te_jax.cli._options import STATE_DTYPES, Options, Origin
from te_jax.cli._placement import Placement
from te_jax.cli._run_folder import StoredRun
from te_jax.cli.errors import UserError
from te_jax.models import (
    DecoderConfig,
)
from te_jax.recipe import DelayedScaling, MXFP8Scaling


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
        data, model = self.options.data, self.options.model
        paths = {"tokenizer": data.tokenizer, "from_": model.from_, "lora": model.lora}
        return self.options.values() | {
            "text": self.text,
            **{name: str(Path(path).resolve()) for name, path in paths.items() if isinstance(path, str)},
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
    text, mesh, training = options.data, options.mesh, options.training
    if options.model.from_ is not None and text.tokenizer is None:
        text = dataclasses.replace(text, tokenizer=_config.tokenizer_of(options.model.from_))
        options = dataclasses.replace(options, data=text)
    tokenizer = None if text.tokenizer is None else _text.Tokenizer(text.tokenizer)
    config = _config.build_config(options, None if tokenizer is None else tokenizer.vocab_size)
    corpus = _text.load(text.text, tokenizer, pack=text.pack)
    if stored is not None:
        _check_stored(stored, options, config, corpus)
    data = _text.split(corpus, text.seq_len)
    devices = _placement.take_devices(mesh)
    _check_batch(options, len(devices) // (mesh.tp * mesh.cp))
    defaults = _placement.defaults_of(devices[0].platform)
    begins = corpus.tokens.begins
    config = dataclasses.replace(
        config,
        dtype=defaults.dtype if options.precision.dtype == "auto" else options.precision.dtype,
        max_segments_per_seq=None if begins is None else _max_segments(begins, text.seq_len),
    )
    plan = Plan(
        options,
        models=_models(options, config, defaults.parameters),
        learning_rate=training.learning_rate or _learning_rate(options.model, config),
        warmup_steps=training.steps // 20 if training.warmup_steps is None else training.warmup_steps,
        checkpoint_every=options.output.checkpoint_every or defaults.checkpoint_every,
        placement=_placement.build_placement(devices, mesh, config, options.model.named),
        implementation=_implementation(options, config),
        text=corpus.source,
        token=corpus.unit,
        num_tokens=corpus.tokens.ids.size,
        num_documents=None if begins is None else int(begins.sum()),
        sha256=corpus.sha256,
    )
    return plan, data


def _learning_rate(model: Origin, config: DecoderConfig) -> float:
    """Falls with the width, as the gradients of wider layers add up: 0.003 for `tiny`, 0.0005 for `small`. A model that
    was trained before takes smaller steps."""
    if model.from_ is None:
        return 0.384 / config.hidden_size
    return 2e-5 if config.lora is None else 2e-4


def _max_segments(begins: np.ndarray, seq_len: int) -> int | None:
    """`DecoderConfig.max_segments_per_seq`: a power of two, so that another text seldom changes the program.

    None takes a mask, which cuDNN needs before Hopper. It is slower than any bound that was measured on an H100, but
    above a document for 32 tokens the workspace of attention's gradients grows with the bound.
    """
    bound = 1 << (_text.most_documents(begins, seq_len) - 1).bit_length()
    hopper = (native.compute_capability() or (9, 0)) >= (9, 0)
    return bound if hopper and 32 * bound <= seq_len else None


def _check_stored(stored: StoredRun, options: Options, config: DecoderConfig, corpus: _text.Corpus) -> None:
    """Refuses another text than that of the run which is resumed, or other tokens."""
    tokenizer, from_ = options.data.tokenizer, options.model.from_
    if corpus.sha256 != stored.header.get("text", {}).get("sha256"):
        by = "" if tokenizer is None else f" with --tokenizer {tokenizer}"
        raise UserError(
            f"--text {corpus.source}{by} is not, or no longer, what the run in {stored.path} was trained on"
        )
    model = stored.header.get("model", {})
    if from_ is not None and model:
        other_shape = _config.config_of(stored.path, stored.header).architecture != config.architecture
        base = model.get("base_sha256")  # of runs with adapters, whose checkpoints hold no more
        if other_shape or (base is not None and base != _config.sha256_of(from_)):
            what = "a model of another shape" if other_shape else "other weights"
            raise UserError(
                f"--from {from_} holds {what} than the run in {stored.path} began with: give the folder that "
                "the run began with"
            )
    before = model.get("vocab_size", config.vocab_size)
    if config.vocab_size != before:
        raise UserError(
            f"--tokenizer {tokenizer} needs a vocabulary of {config.vocab_size}, and the model of the run in "
            f"{stored.path} has {before}: give the run's own tokenizer, or start another run without --resume"
        )


def _check_batch(options: Options, parts: int) -> None:
    """Refuses a batch that groups of devices cannot share equally."""
    microbatches, batch, mesh = options.memory.microbatches, options.data.batch, options.mesh
    multiple = parts * microbatches
    if batch % multiple:
        group = " ".join(f"--{name} {size}" for name, size in (("cp", mesh.cp), ("tp", mesh.tp)) if size > 1)
        over = f"{parts} groups of {group}" if group else f"{parts} devices"
        over = over if microbatches == 1 else f"--microbatches {microbatches} on {over}"
        raise UserError(
            f"--batch {batch} does not divide over {over}: choose a multiple of {multiple}, or other --devices"
        )


def _models(options: Options, config: DecoderConfig, parameters: str) -> tuple[Model, ...]:
    precision = options.precision
    in_bfloat16 = config.dtype == "bfloat16" and config.lora is None
    if precision.parameters == "bfloat16" and not in_bfloat16:
        raise UserError(
            "--parameters bfloat16 does not go with "
            + ("--lora, whose adapters are float32" if config.lora else "activations in float32: add --dtype bfloat16")
        )
    parameters = parameters if precision.parameters == "auto" else precision.parameters
    model = Model(
        "loss",
        config,
        STATE_DTYPES[precision.optimizer_state],
        parameters=parameters if in_bfloat16 else "float32",
    )
    if not options.output.compare:
        return (model,)
    # A twin differs in one thing, so that the distance of the two curves is what that costs.
    if config.recipe is not None or config.head_recipe is not None:
        plain = dataclasses.replace(config, recipe=None, head_recipe=None)
        return model, model._replace(loss_name=f"{config.dtype}_loss", config=plain)
    if precision.optimizer_state != "f32":
        return model, model._replace(loss_name="f32_states_loss", state_dtype=STATE_DTYPES["f32"])
    return model, model._replace(loss_name="optax_loss", by_optax=True)


def _implementation(options: Options, config: DecoderConfig) -> native.Implementation | None:
    """Which implementation of te_jax's operations runs. Raises UserError where what was asked for cannot run."""
    precision = options.precision
    asked = None if precision.implementation == "auto" else precision.implementation
    with _available(f"--implementation {precision.implementation}"):
        use_native = native.use_native(asked, products=True)
    if options.mesh.transport == "p2p":
        if asked in ("reference", "xla"):
            raise UserError(f"--transport p2p is native, and --implementation is {asked}: leave one of them out")
        with _available("--transport p2p"):
            native.use_native("native", products=True)
    of = {
        f"--recipe {precision.recipe}": config.recipe,
        f"--head-recipe {precision.head_recipe}": config.head_recipe,
    }
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
