"""Models that were trained: those of runs of `te-jax train`, and those of Hugging Face."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from te_jax import native, optim
from te_jax._core.types import PyTree
from te_jax.cli import _config, _placement, _run_folder, _text
from te_jax.cli.errors import UserError
from te_jax.models import (
    DecoderConfig,
    config_from_hf,
    decoder,
    from_hf,
    from_peft,
    join_adapters,
    merge_adapters,
    split_adapters,
)
from te_jax.ops.implementations import fp8_implementation, unsupported
from te_jax.recipe import BlockScaling


class Trained(NamedTuple):
    """A model with what reads its text.

    Attributes:
      config: its shape; without recipes, unless kernels are kept in FP8.
      params: its parameters.
      tokenizer: None for bytes.
      folder: that of Hugging Face which it comes from, if any.
      name: what it is called, for messages.
      seq_len: the tokens of a sequence that it was trained on, where it comes from no other model.
    """

    config: DecoderConfig
    params: Any
    tokenizer: str | None
    folder: Path | None
    name: str
    seq_len: int | None = None


def of_run(
    path: Path | None,
    dtype: jax.typing.DTypeLike,
    *,
    adapters_alone: bool = False,
    devices: Sequence[object] | None = None,
) -> Trained:
    """The model of a run at its last checkpoint.

    Args:
      path: the folder; None for the latest of runs/train-….
      dtype: of the parameters.
      adapters_alone: params are the adapters, which otherwise are merged.
      devices: those that share the parameters; None for one that has all.

    Raises:
      UserError: there is no run, or no checkpoint of it, or it has no adapters where they are asked for.
    """
    path = _run_folder.newest_path("--run") if path is None else path
    header = _run_folder.read_header(path, "--run")
    config, options = _config.config_of(path, header), header["options"]
    shapes = jax.eval_shape(lambda: decoder.init(config, jax.random.key(0)))
    if devices is None or config.lora is not None:  # adapters are small
        places = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), shapes)
    else:
        places = _placement.places_of(devices, config)
    like = jax.tree.map(lambda shape, place: jax.ShapeDtypeStruct(shape.shape, dtype, sharding=place), shapes, places)
    folder = options.get("from_")
    folder = Path(folder) if folder is not None and Path(folder).is_dir() else None
    if config.lora is None:
        if adapters_alone:
            raise UserError(f"--adapters: the run in {path} trained all parameters; leave --adapters out")
        step, params = _params_of(path, like, options)
    elif folder is None:
        raise UserError(f"{path} has adapters of {options.get('from_')}, which is not there: bring the folder back")
    else:
        base = header["model"].get("base_sha256")
        with _config.reading(folder):
            other_shape = config_from_hf(folder).architecture != dataclasses.replace(config, lora=None).architecture
        if other_shape or (base is not None and base != _config.sha256_of(folder)):
            raise UserError(
                f"{folder} holds another model than that beside which the run in {path} trained its adapters: put the "
                "files back that were there"
            )
        step, params = _params_of(path, split_adapters(like)[0], options)
        if not adapters_alone:
            config, params = _merged(config, params, of_folder(folder, dtype, devices=devices).params)
    seq_len = options.get("seq_len") if options.get("from_") is None else None
    return Trained(config, params, options.get("tokenizer"), folder, f"{path}, step {step}", seq_len)


def _params_of(path: Path, like: PyTree, options: dict[str, Any]) -> tuple[int, PyTree]:
    """The last step of a run, and the parameters that it trains then."""
    if options.get("parameters") != "bfloat16" or jax.tree.leaves(like)[0].dtype == jnp.bfloat16:
        step, state = _run_folder.read_state(path, {"params": like})
        return step, state["params"]

    def in_dtype(dtype: jax.typing.DTypeLike) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding), like)

    clipping = [None] if options["clip_norm"] else []
    optimizer = [*clipping, {"master": in_dtype(jnp.int16)}]
    step, state = _run_folder.read_state(path, {"params": in_dtype(jnp.bfloat16), "optimizer": optimizer})
    masters = optim.MasterWeightsState(state["optimizer"][-1]["master"], None)
    exact = optim.weights(state["params"], masters)
    return step, jax.tree.map(lambda weight, leaf: weight.astype(leaf.dtype), exact, like)


def _merged(config: DecoderConfig, adapters: PyTree, params: PyTree) -> tuple[DecoderConfig, PyTree]:
    """Parameters with their adapters in them, which go where these lie."""
    place = jax.tree.leaves(params)[0].sharding
    if isinstance(place, NamedSharding):
        adapters = jax.device_put(adapters, NamedSharding(place.mesh, PartitionSpec()))
    return merge_adapters(config, join_adapters(adapters, params))


def of_folder(
    path: Path,
    dtype: jax.typing.DTypeLike,
    *,
    keep_fp8: bool = False,
    lora: Path | None = None,
    devices: Sequence[object] | None = None,
) -> Trained:
    """A model of Hugging Face.

    Args:
      path: the folder.
      dtype: of the parameters.
      keep_fp8: leave kernels in FP8 that are so, where their products run here; the config then has their recipe.
      lora: a folder of PEFT's adapters, which are merged; kernels are then in no FP8.
      devices: those that share the parameters; None for one that has all.

    Raises:
      UserError: the folder holds none that te_jax reads, or has no tokenizer; or adapters are not those of the model.
    """
    tokenizer = _config.tokenizer_of(str(path))
    recipe = None
    if keep_fp8 and lora is None and _config.has_block_fp8(path):
        with contextlib.suppress(native.NativeUnavailableError):
            fp8_implementation(None, "block_1x128", unsupported("block_1x128"), by_xla=False)
            recipe = BlockScaling()
    shardings = None if devices is None else functools.partial(_placement.places_of, devices)
    with _config.reading(path):
        config, params = from_hf(
            path, param_dtype=dtype, shardings=shardings, keep_fp8=recipe is not None, recipe=recipe
        )
    if lora is not None:
        with _config.reading(lora):
            config, adapters = from_peft(lora, config)
        config, params = _merged(config, adapters, params)
    return Trained(config, params, tokenizer, path, str(path))


def dtype_of(name: str) -> jnp.dtype:
    """A dtype by its name on the command line, where auto is bfloat16 on GPUs and float32 on CPUs."""
    return jnp.dtype(_placement.defaults_of(jax.default_backend()).dtype if name == "auto" else name)


def tokenizer_of(trained: Trained) -> _text.Tokenizer | None:
    """Tokenizer of a model, if it has one.

    Raises:
      UserError: its file cannot be read.
    """
    return None if trained.tokenizer is None else _text.Tokenizer(trained.tokenizer)
