"""Adapters as folders of Hugging Face's PEFT, and back: adapter_config.json and adapter_model.safetensors.

Each adapter is two tensors, named by the module of its kernel, and A and B are the transposes of ours:

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   [r, in]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight   [out, r]
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Collection
from pathlib import Path

import jax
import numpy as np

from te_jax._core.arguments import is_finite_number, is_whole_number
from te_jax.models import _hf_families as families
from te_jax.models import _hf_tensors
from te_jax.models._hf_fields import Fields
from te_jax.models._hf_tensors import Tensor
from te_jax.models.adapters import split_adapters
from te_jax.models.config import DecoderConfig, Lora, Params
from te_jax.models.huggingface import FLOATS, arrays_of, check_dtype
from te_jax.models.safetensors import FolderError, Tensors, explaining_os_errors, quoted, read_json, shown, write

__all__ = ["from_peft", "read", "to_peft"]

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_MOST_CONFIG_BYTES = 10_000_000
_PARTS = "_A", "_B"
_MERGE = "put the adapters on their base model with PEFT, and save_pretrained what merge_and_unload() returns"

_READ = (
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules"),
    *("layers_to_transform", "layers_pattern"),
)
_UNUSED = (
    *("auto_mapping", "base_model_name_or_path", "eva_config", "inference_mode", "lora_dropout", "megatron_core"),
    *("peft_version", "qalora_group_size", "revision", "runtime_config", "task_type"),
)
"""Fields that change nothing in what adapters add."""

_ABSENT = (None, False, {}, [], "")
_VALUES = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # all others change the base model, too
}
"""Values of fields that may be there; of those that are neither here nor above, `_ABSENT`."""


def from_peft(folder: str | Path, config: DecoderConfig) -> tuple[DecoderConfig, Params]:
    """Adapters of PEFT for a model of Hugging Face: its config with `lora`, and the adapters.

        config, params = te_jax.models.from_hf("Llama-3.2-1B")
        config, adapters = te_jax.models.from_peft("my-adapters", config)
        logits = te_jax.models.apply(te_jax.models.join_adapters(adapters, params), tokens, config)

    A decoder's adapters have one rank and one scale. Where those of PEFT have several, by rank_pattern or
    alpha_pattern, smaller ones are padded with zeros, which training leaves, and scales are multiplied into B. Where
    some blocks have none, these get zeros as well. lora_dropout is no part of a decoder.

    Args:
      folder: with adapter_config.json and adapter_model.safetensors, as `save_pretrained` of PEFT writes them.
      config: of the base model. Its kernels may be quantized.

    Returns:
      (config with `lora`, adapters in float32 as of `split_adapters`).

    Raises:
      ValueError: there is no such file, it is damaged, adapters are not those of such a model, or they do more than
        LoRA; the message, of a `te_jax.models.FolderError`, names the field or the tensor.

    Examples:
      >>> config, adapters = te_jax.models.from_peft("my-adapters", config)  # doctest: +SKIP
    """
    config, adapters = read(Path(folder), config)
    return config, jax.device_put(adapters, may_alias=False)


def to_peft(
    folder: str | Path,
    config: DecoderConfig,
    params: Params,
    *,
    base: str | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> None:
    """Writes the adapters of a decoder as PEFT does, which `from_peft`, PEFT and servers read beside the base model.

    adapter_config.json is written last: a folder without it is not finished.

    Args:
      folder: is made; it holds no adapters yet.
      config: with `lora`.
      params: of the decoder, or its adapters alone, as of `split_adapters`.
      base: what base_model_name_or_path says: the base model's folder, or its name on the hub.
      dtype: of the tensors: float32, bfloat16 or float16; None for that of each parameter.

    Raises:
      ValueError: config has no lora, params are not those of config, `base` is a folder whose model has several of the
        kernels in one module, or `folder` cannot be written or holds adapters.

    Examples:
      >>> te_jax.models.to_peft("my-adapters", config, params, base="meta-llama/Llama-3.2-1B")  # doctest: +SKIP
    """
    folder = Path(folder)
    DecoderConfig.check(config)
    if (lora := config.lora) is None:
        raise ValueError("config.lora is None: there are no adapters to write; to_hf writes the model")
    check_dtype(dtype)
    with explaining_os_errors(folder, "written"):
        if (folder / _CONFIG).exists():
            raise FolderError(f"{folder} already holds adapters: choose another folder, or remove them")
    tensors = [
        Tensor(_tensor(_hf_tensors.module(layer, name), part), (("layers", layer, name + part.lower()),), "transposed")
        for layer in range(config.num_layers)
        for name, part in itertools.product(lora.names, _PARTS)
    ]
    found = arrays_of(split_adapters(params)[0], tensors, config).values()
    arrays = {tensor.name: array for tensor, array in zip(tensors, found, strict=True)}
    shapes = {name: jax.ShapeDtypeStruct(x.shape[::-1], dtype or x.dtype) for name, x in arrays.items()}

    def values(name: str) -> np.ndarray:
        return np.asarray(arrays[name]).astype(shapes[name].dtype).T

    if base is not None:
        _check_base(Path(base), lora)
    assert lora.alpha is not None
    fields = {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True},
        **{"r": lora.rank, "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha},
        "target_modules": [_hf_tensors.module(0, name).rpartition(".")[-1] for name in lora.names],
        **{"lora_dropout": 0.0, "bias": "none"},
    }
    files = [(_CONFIG, json.dumps(fields, indent=2).encode() + b"\n")]
    write(folder, shapes, values, files=files, single=_TENSORS, largest_file_bytes=sys.maxsize)


def _check_base(base: Path, lora: Lora) -> None:
    """Refuses adapters of kernels that a base model which is here has in one module, as a phi3 has."""
    if not (base / "config.json").is_file():
        return
    kind = read_json(base / "config.json", _MOST_CONFIG_BYTES).get("model_type")
    joined = families.FAMILIES[kind].joined if isinstance(kind, str) and kind in families.FAMILIES else {}
    for place, names in joined.items():
        if adapted := [name for name in lora.names if name in names]:
            raise ValueError(
                f"base is {base}, a {kind}, whose {place} holds {', '.join(names)}, and lora.names has "
                f"{', '.join(adapted)}: merge_adapters, and write the model with to_hf"
            )


def read(folder: Path, config: DecoderConfig) -> tuple[DecoderConfig, Params]:
    """As `from_peft`, with adapters as NumPy arrays, so that no device is asked for."""
    path = folder / _TENSORS
    fields = _Fields(folder / _CONFIG)
    with explaining_os_errors(path, "read"):
        if not path.is_file():
            raise FolderError(
                f"{folder} has no {_TENSORS}, and adapter_model.bin is not read, a pickle, which executes code: "
                "save_pretrained the adapters with PEFT again, which writes safetensors"
            )
    tensors = Tensors.open(path)
    # config.json may ask for any number of blocks: one more than there can be is enough to know that one is missing.
    kernels = {
        _hf_tensors.module(layer, name): (layer, name)
        for layer in range(min(config.num_layers, len(tensors.types) + 1))
        for name in config.adaptable
    }
    ranks = {module: fields.rank(module) for module in _adapted(path, tensors, kernels, fields)}
    for module, rank in ranks.items():
        rows, columns = config.kernel_shapes[kernels[module][1]]
        for part, shape in zip(_PARTS, ((rank, rows), (columns, rank)), strict=True):
            _check(path, tensors, _tensor(module, part), shape)
    # One rank and one scale for all. Without patterns and roots they are r and lora_alpha, to the last bit.
    most = max(ranks.values())
    alphas = {module: fields.alpha(module) * (most / rank**fields.power) for module, rank in ranks.items()}
    alpha = next(iter(alphas.values()))
    lora = Lora(most, alpha, tuple({kernels[module][1] for module in ranks}))
    adapted = dataclasses.replace(config, lora=lora)
    shapes = {name: shape for name, shape in adapted.other_shapes.items() if name.endswith(("_a", "_b"))}
    layers = [{name: np.zeros(shape, np.float32) for name, shape in shapes.items()} for _ in range(config.num_layers)]
    for module, rank in ranks.items():
        layer, name = kernels[module]
        a, b = (tensors.read(_tensor(module, part)).astype(np.float32).T for part in _PARTS)
        layers[layer][f"{name}_a"][:, :rank] = a
        layers[layer][f"{name}_b"][:rank] = b * np.float32(alphas[module] / alpha)
    return adapted, {"layers": layers}


class _Fields:
    """What an adapter_config.json says.

    Attributes:
      power: of the rank that divides alpha.

    Raises:
      FolderError: there is no such file, it is damaged, or it asks for more than LoRA; the message names the field.
    """

    def __init__(self, path: Path):
        given, self._path = read_json(path, _MOST_CONFIG_BYTES), path
        for name, value in ({"peft_type": None} | given).items():
            if name not in (*_READ, *_UNUSED) and value not in _VALUES.get(name, _ABSENT):
                raise self._error(f"{name} is {shown(value)}, and te_jax.models reads plain LoRA alone: {_MERGE}")
        fields = Fields(given, path)
        self._defaults = {"rank_pattern": fields.take("r", kind=int)}
        self._defaults["alpha_pattern"] = fields.take("lora_alpha", kind=(int, float))
        self._patterns = {name: fields.take(name, kind=dict, default={}) for name in self._defaults}
        self.power = 0.5 if fields.take("use_rslora", kind=bool, default=False) else 1.0
        self._target = fields.take("target_modules", kind=(list, str))
        # A regular expression from a file may take for ever to match, so the tensors in the file decide.
        self._is_list = isinstance(self._target, list) or self._target == "all-linear"
        self.names_all = self._is_list and all(
            given.get(name) in (None, [], "") for name in ("exclude_modules", "layers_to_transform")
        )
        for name, pattern in self._patterns.items():
            if others := [key for key in pattern if not re.fullmatch(r"\^?[\w.]+", key)]:
                raise self._error(
                    f"{name} has the key {quoted(*others)}, and te_jax.models reads names of modules and no other "
                    f"regular expressions: write the names in a copy of the file, or {_MERGE}"
                )

    def _error(self, problem: str) -> FolderError:
        return FolderError(f"{self._path}: {problem}")

    def names(self, module: str) -> bool:
        """Whether target_modules has a module, or may have it."""
        if not self._is_list or self._target == "all-linear":
            return True
        return any(f".{module}".endswith(f".{each}") for each in self._target)

    def rank(self, module: str) -> int:
        if not is_whole_number(rank := self._of("rank_pattern", module)) or rank < 1:
            raise self._error(
                f"the rank of {module} is {shown(rank)}: r and rank_pattern need whole numbers of at least 1"
            )
        return int(rank)

    def alpha(self, module: str) -> float:
        if not is_finite_number(alpha := self._of("alpha_pattern", module)) or alpha <= 0:
            raise self._error(f"alpha of {module} is {shown(alpha)}: lora_alpha and alpha_pattern need numbers above 0")
        return alpha

    def _of(self, pattern: str, module: str) -> int | float:
        """The value of the first key that a module's name ends with."""
        for key, value in self._patterns[pattern].items():
            if module == key.removeprefix("^") or module.endswith(f".{key}"):
                return value
        return self._defaults[pattern]


def _tensor(module: str, part: str) -> str:
    return f"base_model.model.{module}.lora{part}.weight"


def _adapted(path: Path, tensors: Tensors, kernels: Collection[str], fields: _Fields) -> list[str]:
    """The modules that have adapters, in the order of the model.

    Raises:
      FolderError: others have, half of one is missing, or they are not those that target_modules names.
    """
    of_file = tensors.types.keys()
    modules = {_tensor(module, part): module for module in kernels for part in _PARTS}
    if unknown := of_file - modules.keys():
        raise FolderError(
            f"{path} has {quoted(*unknown)}, and te_jax.models reads lora_A and lora_B of the base model's "
            f"{', '.join(dict.fromkeys(module.rpartition('.')[-1] for module in kernels))} alone: give the base model "
            f"that the adapters are of, or {_MERGE}"
        )
    adapted = {modules[name] for name in of_file}
    if more := [module for module in adapted if not fields.names(module)]:
        raise FolderError(f"{path} has adapters of {quoted(*more)}, which target_modules does not name: add them there")
    wanted = [module for module in kernels if module in adapted or (fields.names_all and fields.names(module))]
    if missing := {_tensor(module, part) for module in wanted for part in _PARTS} - of_file:
        raise FolderError(f"{path} lacks {quoted(*missing)}, which {_CONFIG} asks for: download both files again")
    if not wanted:
        raise FolderError(f"{path} has no adapters: save_pretrained them with PEFT again")
    return wanted


def _check(path: Path, tensors: Tensors, name: str, shape: tuple[int, ...]) -> None:
    found = tensors.types[name]
    if found.shape != shape or found.dtype.name not in FLOATS:
        raise FolderError(
            f"{path}: {name} is {shown(found)}, and r and the base model ask for {shown(shape)} in one of "
            f"{', '.join(FLOATS)}: give the base model that the adapters are of"
        )
    if not np.isfinite(tensors.read(name).astype(np.float32)).all():
        raise FolderError(f"{path}: {name} has a value that is not finite: download it again, or save it anew")
