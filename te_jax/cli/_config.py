"""The decoder that options name, and what keeps one from being trained by them."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp

from te_jax import ops
from te_jax._core.terminal import reason_of
from te_jax._core.types import E4M3, FP8_ALIGNMENT
from te_jax.cli._options import RECIPES, STATE_DTYPES, Options
from te_jax.cli.errors import UserError, choose
from te_jax.layers import Router
from te_jax.layers.stack import Remat
from te_jax.models import (
    PRESETS,
    DecoderConfig,
    Experts,
    Factors,
    FolderError,
    Lora,
    RopeScaling,
    Softcaps,
    TensorParallel,
    config_from_hf,
    peft,
)
from te_jax.models.config import Latent
from te_jax.models.parallel import lacking_in_a_ring
from te_jax.models.safetensors import Tensors
from te_jax.offload import LAYER_INPUT, Offload
from te_jax.quantized import facts_of_recipe
from te_jax.recipe import MXFP8Scaling

OFFLOAD_MIN_SIZE = 2**16
"""Bytes: what is smaller stays on the device."""

_BYTES = 256
_VOCAB_MULTIPLE = 128  # suits GEMMs, and devices that share the model


def build_config(options: Options, vocab_size: int | None = None) -> DecoderConfig:
    """The model's shape, recipe and offload, and whether devices can share it.

    Args:
      options: of `_options.resolve`. `dtype`, which may depend on devices, is left to `decide`.
      vocab_size: number of tokens of the tokenizer; None for bytes.

    Raises:
      UserError: options name what there is not, or do not go together.
    """
    precision, memory = options.precision, options.memory
    of_head = [name for name in RECIPES if name != "delayed"]  # a loss has no state
    choose("preset", options.model.preset, PRESETS)
    choose("recipe", precision.recipe, RECIPES)
    choose("head-recipe", precision.head_recipe, of_head)
    choose("optimizer-state", precision.optimizer_state, STATE_DTYPES)
    if precision.fp8_logits and precision.head_recipe == "none":
        raise UserError("--fp8-logits needs a recipe of the output head: add --head-recipe, such as block")
    if options.output.statistics and precision.recipe == precision.head_recipe == "none":
        raise UserError(
            f"--statistics {options.output.statistics} has nothing to show, since no layer is in FP8: add --recipe, "
            "such as block, or leave it out"
        )
    if memory.remat == "attention" and precision.deterministic:
        raise UserError(
            "--remat attention does not go with --deterministic, whose attention is computed again in any case: leave "
            "the word attention out"
        )
    model = _model(options, vocab_size)
    if model.experts is not None:
        _check_experts(options)
    remat = cast(Remat, memory.remat or model.remat)
    config = dataclasses.replace(
        model,
        recipe=RECIPES[precision.recipe],
        head_recipe=RECIPES[precision.head_recipe],
        head_fp8_products=("forward",) * precision.fp8_logits + model.head_fp8_products,
        remat=remat,
        offload=_activations(remat, precision.deterministic) if "activations" in memory.offloaded else None,
        # XLA stops with an IndexError where cuDNN's attention meets xla_gpu_deterministic_ops (jax 0.11.2).
        attention="reference" if precision.deterministic else None,
        lora=None if options.model.lora is None else _lora(options.model.lora, model),
    )
    _check_parallel(options, config)
    return config


def _lora(lora: int | str, model: DecoderConfig) -> Lora | None:
    """Adapters of all kernels that can have one, or those of a folder."""
    if isinstance(lora, int):
        return Lora(lora, names=model.adaptable)
    with reading(lora):
        return peft.read(Path(lora), model)[0].lora


def _model(options: Options, vocab_size: int | None) -> DecoderConfig:
    """The shape that options name, for a tokenizer of so many tokens."""
    from_ = options.model.from_
    if from_ is None:
        preset = PRESETS[options.model.preset]
        rounded = preset.vocab_size if vocab_size is None else -(-vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
        return dataclasses.replace(preset, vocab_size=rounded)
    with reading(from_):
        config = config_from_hf(from_)
    if vocab_size is not None and vocab_size > config.vocab_size:
        raise UserError(
            f"--tokenizer {options.data.tokenizer} has {vocab_size} tokens, and the model of --from {from_} "
            f"knows {config.vocab_size}: give the model's own tokenizer"
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
        if isinstance(scaling := fields.get("rope_scaling"), dict):
            fields["rope_scaling"] = RopeScaling(**scaling)
        elif scaling is not None:
            fields["rope_scaling"] = [each and RopeScaling(**each) for each in scaling]
        if (lora := fields.get("lora")) is not None:
            fields["lora"] = Lora(**{**lora, "names": tuple(lora["names"])})
        if (latent := fields.get("latent")) is not None:
            fields["latent"] = Latent(**latent)
        if (factors := fields.get("factors")) is not None:
            fields["factors"] = Factors(**factors)
        if (softcaps := fields.get("softcaps")) is not None:
            fields["softcaps"] = Softcaps(**softcaps)
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


def has_block_fp8(folder: str | Path) -> bool:
    """Whether kernels of a model are in FP8 with scales of blocks, of sizes that FP8 products take.

    Raises:
      UserError: the folder holds no model.
    """
    with reading(folder):
        types = [each for each in Tensors.open(Path(folder)).types.values() if each.dtype == E4M3]
    return bool(types) and not any(size % FP8_ALIGNMENT for each in types for size in each.shape)


@contextlib.contextmanager
def reading(folder: str | Path) -> Iterator[None]:
    """Turns what is wrong with a folder of Hugging Face into an error of the command."""
    try:
        yield
    except FolderError as error:
        named = "" if str(folder) in str(error) else f"{folder}: "
        raise UserError(f"{named}{error}") from error


def _check_experts(options: Options) -> None:
    """Refuses what a model with experts cannot do."""
    precision = options.precision
    if precision.recipe == "delayed":
        raise UserError(
            f"--recipe delayed keeps no state for the experts of {options.model.named}: choose block, current, "
            "rowwise or none"
        )
    is_plain = precision.recipe == precision.head_recipe == "none" and precision.optimizer_state == "f32"
    if options.output.compare and is_plain:
        raise UserError(
            f"--compare has no twin for {options.model.named}, since optax has no loss of experts: add --recipe, "
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
    mesh, seq_len = options.mesh, options.data.seq_len
    if mesh.cp > 1 and (lacking := lacking_in_a_ring(config)) is not None:
        raise UserError(
            f"--cp {mesh.cp} does not fit {options.model.named}: {lacking}, which attention of devices that share a "
            "window lacks; choose --fsdp in the place of --cp"
        )
    if mesh.tp == 1:
        if mesh.transport != "auto":
            raise UserError(f"--transport {mesh.transport} is for devices that share a model: add --tp N")
        return
    if isinstance(config.recipe, MXFP8Scaling):
        raise UserError(
            f"--recipe {options.precision.recipe} does not go with --tp {mesh.tp}, whose products have no blocks of "
            "32: choose current, rowwise or block, or --fsdp in the place of --tp"
        )
    if options.model.lora is not None:
        raise UserError(
            f"--lora {options.model.lora} does not go with --tp {mesh.tp}, since adapters are not split: choose "
            "--fsdp in the place of --tp"
        )
    parallel = TensorParallel(mesh.tp)
    same: dict[str, Any] = {"recipe": config.recipe}
    if options.data.tokenizer is not None:
        same["vocab_size"] = config.vocab_size

    def problem(model: DecoderConfig) -> str | None:
        try:
            parallel.check(model)
        except ValueError as error:
            return str(error).removeprefix(f"parallel.size is {mesh.tp}: ")  # --tp, on the command line

    if misfit := problem(config):
        named = f"--tp {mesh.tp} does not fit {options.model.named}: {misfit}"
        if options.model.from_ is not None:
            raise UserError(named)
        presets = {name: dataclasses.replace(preset, **same) for name, preset in PRESETS.items()}
        fitting = ", ".join(name for name, preset in presets.items() if not problem(preset)) or "none"
        raise UserError(f"{named}; presets that {mesh.tp} fits: {fitting}")
    # Blocks of the weight gradients' operands lie along the time that a device has.
    block = facts_of_recipe(config.recipe).block_size
    multiple = mesh.cp * mesh.tp * block
    if seq_len % multiple:
        shared = f"--cp {mesh.cp} --tp {mesh.tp}" if mesh.cp > 1 else f"--tp {mesh.tp}"
        blocks = f" in blocks of {block}" if block > 1 else ""
        raise UserError(f"--seq-len {seq_len} does not divide over {shared}{blocks}: choose a multiple of {multiple}")


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
