"""Models of Hugging Face as parameters of the decoder, and back: folders with config.json and safetensors."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from te_jax._core.types import E4M3, PyTree
from te_jax.models import _hf_families as families
from te_jax.models import _hf_tensors, adapters, decoder
from te_jax.models._hf_fields import UNUSED
from te_jax.models._hf_tensors import IN_FLOAT32, ParamPath, Tensor
from te_jax.models.config import DecoderConfig, Params, kernel_facts
from te_jax.models.safetensors import (
    FolderError,
    Tensors,
    explaining_os_errors,
    no_model,
    quoted,
    read_file,
    read_json,
    shown,
    write,
)
from te_jax.quantized import Quantizable, QuantizedArray, both_copies, scale_shape
from te_jax.recipe import Scaling

__all__ = ["config_from_hf", "from_hf", "to_hf"]

_CONFIG = "config.json"
_MOST_CONFIG_BYTES = 10_000_000
_TOKENIZER = "tokenizer.json"
FLOATS = ("float32", "bfloat16", "float16")
_SCALES = "_scale_inv"
_BLOCKS: Scaling = "block_128x128"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"

_BESIDE = (
    *("generation_config.json", _TOKENIZER, "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json"),
)
"""Files of a folder that a model which was trained on keeps."""


def config_from_hf(folder: str | Path, *, ignore: Collection[str] = (), **changes: Any) -> DecoderConfig:
    """The shape of a model of Hugging Face.

    Llama, Mistral, Qwen 2 and 3, Gemma (the first), 2 and 3 (of text), SmolLM 3, OLMo 2, Phi 3, Granite, Mixtral,
    Qwen 2 and 3 MoE, DeepSeek V2 and V3, and gpt-oss, by the model_type of config.json. A field that the decoder does
    not know is an error, since it may change the model, unless it is null or false.

    Args:
      folder: with config.json. Where its safetensors hold another output head than the embedding, that is read, also if
        config.json ties the two, as transformers does.
      ignore: names of fields that the decoder does not know, and which do not change the model.
      changes: fields of `DecoderConfig` that say how the model is computed and not what it is, such as dtype, remat and
        recipe.

    Raises:
      ValueError: there is no such file, it is damaged, or the decoder cannot be this model; the message, of a
        `te_jax.models.FolderError`, names the field. Or a change is none, or does not fit.

    Examples:
      >>> config = te_jax.models.config_from_hf(folder, dtype="bfloat16")  # doctest: +SKIP
    """
    return dataclasses.replace(_read_config(Path(folder), ignore)[1], **changes)


def from_hf(
    folder: str | Path,
    *,
    param_dtype: jax.typing.DTypeLike = jnp.float32,
    shardings: Callable[[DecoderConfig], PyTree] | None = None,
    keep_fp8: bool = False,
    ignore: Collection[str] = (),
    **changes: Any,
) -> tuple[DecoderConfig, Params]:
    """A model of Hugging Face: the decoder's shape and its parameters.

        config, params = te_jax.models.from_hf("Llama-3.2-1B", dtype="bfloat16", recipe=te_jax.recipe.BlockScaling())
        logits = te_jax.models.apply(params, tokens, config)

    Tensors go one at a time from the file to the devices that need them, which transpose and convert them: neither the
    host nor a device ever holds a second copy of the model. Files are safetensors; nothing in them is executed. The
    experts of gpt-oss may be in MXFP4, and the linear layers of any model in FP8 with scales of 128 × 128 values.

    Args:
      folder: with config.json and model.safetensors, or an index and the files that it names: what `save_pretrained`
        of transformers writes, or a snapshot of the hub.
      param_dtype: float dtype of the parameters.
      shardings: the config → a `jax.sharding.Sharding` for every parameter, in the dicts of `te_jax.models.init`; for
        example by `te_jax.models.param_specs`. None puts all on the default device.
      keep_fp8: leave those kernels of blocks in FP8 that the files have so, each a `te_jax.quantized.QuantizedArray` of
        their bytes, for `apply`, `generate`, and training beside them; recipe needs to be BlockScaling. Without it they
        are dequantized. With `lora` there are both copies of each, since gradients pass through it, otherwise the one
        that the forward pass reads.
      ignore, changes: as in `config_from_hf`. With `lora` there are adapters besides, those of `te_jax.models.init`
        with `jax.random.key(0)`, in float32.

    Returns:
      (config, parameters as of `te_jax.models.init`).

    Raises:
      ValueError: as for `config_from_hf`; or a tensor is missing, unknown, or of another shape than config.json says,
        or keep_fp8 is set without its recipe.
    """
    folder = Path(folder)
    family, config = _read_config(folder, ignore)
    tensors = Tensors.open(folder)
    # config.json may ask for any number: one more than there are is enough to know that one is missing.
    expected = list(
        itertools.islice(_hf_tensors.tensors(config, family.joined, family.experts), len(tensors.types) + 1)
    )
    _check(folder, tensors, expected, config, family)
    shapes = jax.eval_shape(lambda: decoder.init(config, jax.random.key(0)))
    config = dataclasses.replace(config, **changes)
    if keep_fp8 and kernel_facts(config).name != _BLOCKS:
        raise ValueError(
            f"keep_fp8 is {keep_fp8!r}, and recipe is {config.recipe!r}, which does not read kernels with scales of "
            "128 × 128 values: pass recipe=te_jax.recipe.BlockScaling(), or leave keep_fp8 out"
        )
    kept = 0 if not keep_fp8 else 1 if config.lora is None else 2
    places = None if shardings is None else shardings(config)
    of_adapters, shape_of = None, _shape_of(config)
    if places is not None and config.lora is not None:
        of_adapters, places = adapters.split_adapters(places)
    groups: dict[ParamPath, list[Tensor]] = {}
    for tensor in expected:
        for path in tensor.paths:
            groups.setdefault(path, []).append(tensor)

    def load(path: Sequence[Any], shape: jax.ShapeDtypeStruct, place: Sharding | None) -> Quantizable:
        names = tuple(entry.key if isinstance(entry, jax.tree_util.DictKey) else entry.idx for entry in path)
        rows = _rows(groups[names][0], names, shape_of)
        dtype = jnp.dtype(np.float32 if names[-1] in IN_FLOAT32 else param_dtype)
        copies = kept if names[-1] in config.projections else 0
        return _load(tensors, names, groups[names], rows, dtype, place, copies)

    if places is None:
        params = jax.tree.map_with_path(lambda path, shape: load(path, shape, None), shapes)
    else:
        params = jax.tree.map_with_path(load, shapes, places)
    if config.lora is None:
        return config, params

    def drawn() -> Params:
        return adapters.split_adapters(decoder.init(config, jax.random.key(0)))[0]

    return config, adapters.join_adapters(jax.jit(drawn, out_shardings=of_adapters)(), params)


def to_hf(
    folder: str | Path,
    config: DecoderConfig,
    params: Params,
    *,
    like: str | Path | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    tokenizer: str | Path | None = None,
    fields: Mapping[str, Any] | None = None,
) -> None:
    """Writes parameters of the decoder as a model of Hugging Face, which `from_hf` and transformers read.

    config.json is written last: a folder without it is not finished. After an error no file of the model is left.

    Args:
      folder: is made; it holds no model yet.
      config, params: of the decoder, without adapters. Kernels that are quantized by BlockScaling are written as they
        are, in FP8 with their scales, and no others may be quantized. Parameters may be split over devices of this
        process.
      like: a folder with such a model: its config.json is kept but for dtype, and its tokenizer is copied. Without it
        config.json names the first architecture that has such models, and no tokens that begin or end a text.
      dtype: of the tensors that are not in FP8: float32, bfloat16 or float16; None for that of each parameter.
      tokenizer: a tokenizer.json, which is copied in the place of that in `like`.
      fields: of config.json, which say nothing of parameters, such as "max_position_embeddings" and "eos_token_id".
        Without the first and `like` transformers takes the length of its class, which is 2048 for a llama, unless
        `config.rope_scaling` has one.

    Raises:
      ValueError: no architecture has such models, `like` holds another one, params are not those of config or are
        quantized in another way, or `folder` cannot be written or holds a model already.

    Examples:
      >>> te_jax.models.to_hf("finetuned", config, params, like="Llama-3.2-1B", dtype="bfloat16")  # doctest: +SKIP
    """
    folder, like = Path(folder), None if like is None else Path(like)
    with explaining_os_errors(folder, "written"):
        if (folder / _CONFIG).exists():
            raise FolderError(f"{folder} already holds a model: choose another folder, or remove the model")
    if config.lora is not None:
        raise ValueError("config has lora, and adapters are no part of such a model: call merge_adapters before")
    check_dtype(dtype)
    if unknown := (fields or {}).keys() - UNUSED:
        raise ValueError(f"fields has {quoted(*unknown)}: give what says nothing of parameters, such as eos_token_id")
    if like is None:
        family = families.family_of(config)
        described = families.describe(family, config)
    else:
        described = _fields(like)
        # What from_hf was told to ignore is kept.
        family, theirs = _read_config(like, None)
        if theirs.architecture != config.architecture:
            raise ValueError(f"config is {config!r}, and like, {like}, has {theirs!r}: leave like out")
        if config.tied_head != families.read(described, like, None)[1].tied_head:
            described["tie_word_embeddings"] = config.tied_head
    expected = {tensor.name: tensor for tensor in _hf_tensors.tensors(config, family.joined, family.experts)}
    arrays = arrays_of(params, expected.values(), config)
    shapes: dict[str, jax.ShapeDtypeStruct] = {}
    for name, tensor in expected.items():
        param = arrays[tensor.paths[0]]
        shape = _file_shape(tensor, *(arrays[path].shape for path in tensor.paths))
        in_float32 = tensor.paths[0][-1] in IN_FLOAT32
        shapes[name] = jax.ShapeDtypeStruct(shape, np.float32 if in_float32 else dtype or param.dtype)
        if isinstance(param, QuantizedArray):
            shapes[name] = jax.ShapeDtypeStruct(shape, E4M3)
            shapes[name + _SCALES] = jax.ShapeDtypeStruct(scale_shape(_BLOCKS, shape[:1], shape[1:]), np.float32)

    def values(name: str) -> np.ndarray:
        tensor = expected[name.removesuffix(_SCALES)]
        parts = [arrays[path] for path in tensor.paths]
        if isinstance(x := parts[0], QuantizedArray):
            x = both_copies(x) if x.transposed is None else x
            half = x.transposed if name in expected else x.transposed_scale_inv
            assert half is not None
            return np.asarray(jnp.copy(half if tensor.expert is None else half[tensor.expert]))
        if tensor.expert is not None:
            parts = [jnp.asarray(param)[tensor.expert] for param in parts]
        # Turned on a device, since a host takes ten times as long.
        return np.asarray(_as_in_file(tuple(parts), tensor.form, shapes[name].dtype))

    in_fp8 = {name for name in expected if name + _SCALES in shapes}
    apart = in_fp8 | {name for name, tensor in expected.items() if tensor.paths[0][-1] in IN_FLOAT32}
    of_all = {shape.dtype.name for name, shape in shapes.items() if name.removesuffix(_SCALES) not in apart}
    described = {name: value for name, value in described.items() if name not in ("dtype", "quantization_config")}
    # Blocks for later tokens are not written.
    described |= dict.fromkeys({"num_nextn_predict_layers", "num_mtp_layers"} & described.keys(), 0)
    described |= {**(fields or {}), "torch_dtype": next(iter(of_all)) if len(of_all) == 1 else "float32"}
    if in_fp8:
        others = [t.name.removesuffix(".weight") for t in expected.values() if t.form == "transposed"]
        others = [name for name in others if f"{name}.weight" not in in_fp8]
        described["quantization_config"] = families.BLOCK_FP8 | {"modules_to_not_convert": others}
    sources = {} if like is None else {name: like / name for name in _BESIDE if (like / name).is_file()}
    sources |= {} if tokenizer is None else {_TOKENIZER: Path(tokenizer)}
    files = [(name, read_file(path)) for name, path in sources.items()]
    files.append((_CONFIG, json.dumps(described, indent=2).encode() + b"\n"))
    write(folder, shapes, values, files=files)


def check_dtype(dtype: jax.typing.DTypeLike | None) -> None:
    """Raises a ValueError unless tensors of a model have such a dtype, or None is given."""
    if dtype is not None and jnp.dtype(dtype).name not in FLOATS:
        raise ValueError(f"dtype is {jnp.dtype(dtype)}: choose one of {', '.join(FLOATS)}")


@functools.partial(jax.jit, static_argnums=(1, 2))
def _as_in_file(params: tuple[jax.Array, ...], form: str, dtype: np.dtype) -> jax.Array:
    # Copies: of an array that JAX forwards, NumPy's view would stay beside it on the host.
    arrays = [jnp.copy(param).astype(dtype) for param in params]
    if form == "pairs":
        stacked = jnp.stack(arrays, axis=-1)
        return stacked.reshape(*stacked.shape[:-2], -1)
    if form == "joined":
        return jnp.concatenate(arrays, axis=1).T
    return arrays[0].T if form == "transposed" else arrays[0]


def arrays_of(params: PyTree, tensors: Collection[Tensor], config: DecoderConfig) -> dict[ParamPath, Any]:
    """The parameters that tensors hold, by their paths.

    Raises:
      ValueError: one is missing, quantized or of another shape, or there are more.
    """
    shape_of, arrays = _shape_of(config), {}
    for path, form in {path: tensor.form for tensor in tensors for path in tensor.paths}.items():
        name = "".join(f"[{entry!r}]" for entry in path)
        try:
            arrays[path] = param = _at(params, path)
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"params lacks {name}, which config asks for") from error
        if isinstance(param, QuantizedArray) and not (form == "transposed" and _is_in_blocks(param)):
            raise ValueError(
                f"params{name} is quantized, {param!r}: give the parameters that kernels were quantized from"
                + ("" if form == "joined" else ", or kernels that BlockScaling quantized, in float8_e4m3fn")
            )
        if getattr(param, "shape", None) != shape_of(path):
            raise ValueError(
                f"params{name} has shape {getattr(param, 'shape', None)}: config asks for {shape_of(path)}"
            )
    leaves = jax.tree.leaves_with_path(params, is_leaf=lambda leaf: isinstance(leaf, QuantizedArray))
    present = {jax.tree_util.keystr(path) for path, _ in leaves}
    if more := present - {"".join(f"[{entry!r}]" for entry in path) for path in arrays}:
        raise ValueError(f"params has {', '.join(sorted(more)[:3])}, which config does not ask for: leave that out")
    return arrays


def _is_in_blocks(x: QuantizedArray) -> bool:
    codes, scaling = (x.data, x.scaling) if x.transposed is None else (x.transposed, x.transposed_scaling)
    return codes is not None and codes.dtype == E4M3 and scaling == _BLOCKS and x.row_ndim == x.col_ndim == 1


def _read_config(folder: Path, ignore: Collection[str] | None) -> tuple[families.Family, DecoderConfig]:
    family, config = families.read(_fields(folder), folder / _CONFIG, ignore)
    return family, dataclasses.replace(config, tied_head=config.tied_head and not _has_other_head(folder))


def _has_other_head(folder: Path) -> bool:
    """Whether files hold an output head that is not the embedding."""
    try:
        tensors = Tensors.open(folder)
    except FolderError:  # which `from_hf` raises
        return False
    if not {_EMBEDDING, _HEAD} <= tensors.types.keys():
        return False
    types = [tensors.types[name] for name in (_EMBEDDING, _HEAD)]
    if types[0].shape != types[1].shape or not {of.dtype.name for of in types} <= {*FLOATS}:
        return True
    embedding, head = (np.atleast_1d(tensors.read(name)) for name in (_EMBEDDING, _HEAD))
    pieces = (slice(first, first + 1024) for first in range(0, len(head), 1024))
    return any((head[rows].astype(np.float32) != embedding[rows].astype(np.float32)).any() for rows in pieces)


def _fields(folder: Path) -> dict[str, Any]:
    with explaining_os_errors(folder / _CONFIG, "read"):
        if not folder.exists() and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(folder)):
            raise FolderError(
                f"{folder} is no folder here: if it is a model of the hub, fetch it with "
                f"`hf download {folder} --local-dir {folder.name}` and give {folder.name}"
            )
        if folder.is_dir() and not (folder / _CONFIG).exists():
            raise no_model(folder, f"it has no {_CONFIG}")
    return read_json(folder / _CONFIG, _MOST_CONFIG_BYTES)


def _check(
    folder: Path, tensors: Tensors, expected: Sequence[Tensor], config: DecoderConfig, family: families.Family
) -> None:
    """Refuses tensors that are not those of the parameters."""
    names = {name for tensor in expected for name in _names_in_files(tensors, tensor)}
    if missing := [name for name in names if name not in tensors.types]:
        if _EMBEDDING.removeprefix("model.") in tensors.types:
            raise FolderError(
                f'{folder} holds a base model, whose tensors have no "model." before their names, and no output head: '
                f"save_pretrained the {family.architecture} that it belongs to"
            )
        raise FolderError(f"{folder} lacks {quoted(*missing)}, which config.json asks for")
    # Older files hold tables of rotary positions, and some a tied head beside the embedding.
    unused = {name for name in tensors.types if name.endswith("rotary_emb.inv_freq")} | {_HEAD}
    # Blocks behind the last one, which predict later tokens.
    unused |= {name for name in tensors.types if family.has_later_blocks and _block_of(name) >= config.num_layers}
    if others := tensors.types.keys() - names - unused:
        raise FolderError(f"{folder} has {quoted(*others)}, which config.json does not ask for")
    shape_of, kinds = _shape_of(config), {}
    for tensor in expected:
        shape = _file_shape(tensor, *map(shape_of, tensor.paths))
        parts = _names_in_files(tensors, tensor)
        if kinds.setdefault(tensor.paths[0], len(parts)) != len(parts):
            raise FolderError(
                f"{folder}: {tensor.name} is in FP8 and other experts beside it are not, or the other way: load the "
                "model with transformers, dequantized to bfloat16, and save_pretrained it"
            )
        if len(parts) > 1:
            (_check_mxfp4 if tensor.form != "transposed" else _check_blocks)(folder, tensors, parts, shape)
            continue
        found = tensors.types[tensor.name]
        if found.shape != shape:
            raise FolderError(
                f"{folder}: {tensor.name} has shape {shown(found.shape)}, and config.json asks for {shown(shape)}"
            )
        if found.dtype not in FLOATS:
            raise FolderError(
                f"{folder}: {tensor.name} has dtype {found.dtype}, and te_jax.models reads {', '.join(FLOATS)}, and "
                f"{E4M3} of linear layers beside {shown(tensor.name + _SCALES)}"
            )


def _names_in_files(tensors: Tensors, tensor: Tensor) -> tuple[str, ...]:
    """The tensor itself, or the two of one in MXFP4, or in FP8."""
    if tensor.form == "transposed" and {tensor.name, tensor.name + _SCALES} <= tensors.types.keys():
        return tensor.name, tensor.name + _SCALES
    parts = f"{tensor.name}_blocks", f"{tensor.name}_scales"
    return parts if parts[0] in tensors.types and tensor.name not in tensors.types else (tensor.name,)


def _check_mxfp4(folder: Path, tensors: Tensors, parts: tuple[str, ...], shape: tuple[int, ...]) -> None:
    experts, inner, columns = shape
    scales = experts, columns, inner // 32
    for name, wanted in zip(parts, ((*scales, 16), scales), strict=True):
        _check_part(folder, tensors, name, wanted, "uint8", fits=inner % 32 == 0)


def _check_blocks(folder: Path, tensors: Tensors, parts: tuple[str, ...], shape: tuple[int, ...]) -> None:
    codes, scales = parts
    _check_part(folder, tensors, codes, shape, E4M3.name)
    _check_part(folder, tensors, scales, scale_shape(_BLOCKS, shape[:1], shape[1:]), "float32", "bfloat16")
    if not np.isfinite(tensors.read(scales).astype(np.float32)).all():
        raise FolderError(f"{folder}: {scales} has a scale that is not finite: download the file again")


def _check_part(
    folder: Path, tensors: Tensors, name: str, shape: tuple[int, ...], *dtypes: str, fits: bool = True
) -> None:
    found, wanted = tensors.types.get(name), f"{' or '.join(dtypes)} of shape {shown(shape)}"
    if found is None or found.shape != shape or found.dtype.name not in dtypes or not fits:
        raise FolderError(f"{folder}: {name} is {shown(found)}, and config.json asks for {wanted}")


def _block_of(name: str) -> int:
    """The number of the block that a tensor is of, or -1."""
    found = re.match(r"model\.layers\.(\d{1,9})\.", name)
    return -1 if found is None else int(found[1])


def _shape_of(config: DecoderConfig) -> Callable[[ParamPath], tuple[int, ...]]:
    """The shape of each parameter, by its path."""
    vocab, hidden = config.vocab_size, config.hidden_size
    tables = {"embedding": (vocab, hidden), "final_norm": (hidden,), "head": (hidden, vocab)}
    # Blocks are of two kinds, at most.
    of_kinds = {block: block.kernel_shapes | block.other_shapes for block in (config.block(0), config)}

    def shape(path: ParamPath) -> tuple[int, ...]:
        return (of_kinds[config.block(path[1])] if path[0] == "layers" else tables)[path[-1]]

    return shape


def _file_shape(tensor: Tensor, *shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor, from those of its parameters."""
    if tensor.form == "joined":
        return sum(columns for _, columns in shapes), shapes[0][0]
    shape = shapes[0] if tensor.expert is None else shapes[0][1:]
    if tensor.form == "pairs":
        return (*shape[:-1], 2 * shape[-1])
    return shape[::-1] if tensor.form == "transposed" else shape


def _rows(tensor: Tensor, path: ParamPath, shape_of: Callable[[ParamPath], tuple[int, ...]]) -> slice:
    """The rows of a tensor that hold a parameter."""
    if tensor.form != "joined":
        return slice(None)
    sizes = [shape_of(each)[1] for each in tensor.paths]
    place = tensor.paths.index(path)
    return slice(sum(sizes[:place]), sum(sizes[: place + 1]))


def _at(params: PyTree, path: Sequence[str | int]) -> Any:
    return functools.reduce(lambda tree, entry: tree[entry], path, params)


def _load(
    tensors: Tensors,
    path: ParamPath,
    parts: Sequence[Tensor],
    rows: slice,
    dtype: np.dtype,
    place: Sharding | None,
    kept: int,
) -> Quantizable:
    """A parameter from these rows of the tensors that hold it: as they are in the file, then turned on the devices.

    A kernel in FP8 stays so in one copy or both, as `kept` says; with 0 it is dequantized.
    """
    form, of_experts = parts[0].form, parts[0].expert is not None

    def put(views: Sequence[np.ndarray], source: Sharding | None) -> jax.Array:
        return _put_stacked(views, source) if of_experts else _put(views[0], source)

    if len(quantized := _names_in_files(tensors, parts[0])) > 1 and form == "transposed":
        source = _source(place, 2 + of_experts, transposed=True)
        whole = NamedSharding(source.mesh, PartitionSpec()) if isinstance(source, NamedSharding) else source
        codes, scales = ([tensors.read(part.name + end) for part in parts] for end in ("", _SCALES))
        turned = _of_blocks(kept, dtype, place, source, whole)
        return turned(put(codes, source), put(scales, whole))
    if len(quantized) > 1:
        whole = NamedSharding(place.mesh, PartitionSpec()) if isinstance(place, NamedSharding) else place
        which = parts[0].paths.index(path) if parts[0].form == "pairs" else None
        return _dequantized(which, dtype, place)(*(_put(tensors.read(name), whole) for name in quantized))
    views = [tensors.read(part.name)[rows] for part in parts]
    if form == "pairs":
        views = [view[..., part.paths.index(path) :: 2] for view, part in zip(views, parts, strict=True)]
    transposed = parts[0].is_transposed
    source = _source(place, views[0].ndim + of_experts, transposed=transposed)
    return _turned(transposed, dtype, place)(put(views, source))


def _source(place: Sharding | None, ndim: int, *, transposed: bool) -> Sharding | None:
    """Where the values of a file go, for a parameter that lies as `place` says."""
    if place is None or isinstance(place, SingleDeviceSharding):
        return place
    if not isinstance(place, NamedSharding):
        raise ValueError(f"shardings has {place!r}: it needs to be a NamedSharding or a SingleDeviceSharding")
    entries = [*place.spec, *(None,) * (ndim - len(place.spec))]
    return NamedSharding(place.mesh, PartitionSpec(*entries[:-2], *entries[-2:][:: -1 if transposed else 1]))


def _put(view: np.ndarray, place: Sharding | None) -> jax.Array:
    if place is None:
        return jax.device_put(view)
    return jax.make_array_from_callback(view.shape, place, lambda index: view[index])


def _put_stacked(views: Sequence[np.ndarray], place: Sharding | None) -> jax.Array:
    """As `_put`, of an array for each expert."""
    if place is None:
        return jax.device_put(np.stack(views))

    def part(index: Any) -> np.ndarray:
        return np.stack([view[index[1:]] for view in views[index[0]]])

    return jax.make_array_from_callback((len(views), *views[0].shape), place, part)


@functools.lru_cache(maxsize=1024)
def _turned(transposed: bool, dtype: np.dtype, place: Sharding | None) -> Callable[[jax.Array], jax.Array]:
    def turn(x: jax.Array) -> jax.Array:
        # A copy: what JAX forwards would stay the memory of the file, on a CPU.
        return jnp.copy(jnp.swapaxes(x, -1, -2) if transposed else x).astype(dtype)

    return jax.jit(turn, out_shardings=place)


@functools.lru_cache(maxsize=64)
def _of_blocks(
    kept: int, dtype: np.dtype, place: Sharding | None, source: Sharding | None, whole: Sharding | None
) -> Callable[..., Quantizable]:
    """A kernel [in, out] of codes [out, in] and their scales: so many copies of it in FP8, or its values."""

    def quantized(*copies: Any) -> QuantizedArray:
        data, scale_inv, transposed, of_transposed = copies
        return QuantizedArray(data, scale_inv, transposed, of_transposed, 1, 1, _BLOCKS, _BLOCKS, dtype)

    def turn(codes: jax.Array, scales: jax.Array) -> Quantizable:
        x = quantized(None, None, codes, scales.astype(jnp.float32))
        if not kept:
            return x.dequantize()
        return jax.tree.map(jnp.copy, x if kept == 1 else both_copies(x))

    of_data = (place, whole) if kept == 2 else (None, None)
    places = quantized(*of_data, source, whole) if kept and place is not None else place
    return jax.jit(turn, out_shardings=places)


@functools.lru_cache(maxsize=64)
def _dequantized(which: int | None, dtype: np.dtype, place: Sharding | None) -> Callable[..., jax.Array]:
    """The values [experts, in, out] of blocks of MXFP4 and their scales, or every other column of them."""

    def turn(blocks: jax.Array, scales: jax.Array) -> jax.Array:
        codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1)  # the low half of a byte is the first value
        magnitudes = jnp.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], jnp.float32)
        values = jnp.where(codes & 8, -1.0, 1.0) * magnitudes[codes & 7]
        values = jnp.ldexp(values, scales.astype(jnp.int32)[..., None, None] - 127)
        values = jnp.swapaxes(values.reshape(*scales.shape[:2], -1), 1, 2)
        return (values if which is None else values[..., which::2]).astype(dtype)

    return jax.jit(turn, out_shardings=place)
