"""Reads and writes folders of safetensors, the format of models on Hugging Face.

    model.safetensors                  all tensors, or
    model-00001-of-00002.safetensors   some of them, and
    model.safetensors.index.json       {"weight_map": {tensor: file}}

A file is the length of its header in 8 bytes, the header, and the tensors one after the other. All numbers are
little-endian:

    {"__metadata__": {name: text}, tensor: {"dtype": "BF16", "shape": [4096, 1024], "data_offsets": [begin, end]}}

Files come from strangers, so a header is believed only where it agrees with the file: its tensors fill the rest of it
without gaps or overlaps. Nothing in a folder is executed.

References:
  https://github.com/huggingface/safetensors#format
"""

import contextlib
import hashlib
import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import ml_dtypes
import numpy as np

__all__ = [
    "FolderError",
    "Tensors",
    "explaining_os_errors",
    "no_model",
    "quoted",
    "read_file",
    "read_json",
    "shown",
    "write",
]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MOST_HEADER_BYTES = 100_000_000
_MOST_ARRAY_BYTES = 2**63 - 1
_MOST_NAME_LETTERS = 255
_MOST_DIMENSIONS = 64  # of a NumPy array
_PIECE_BYTES = 2**24
_SAMPLE_BYTES = 2**12
_SAMPLE_EVERY = 2**22

_DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class FolderError(ValueError):
    """Tensors cannot be read from a folder, or written to it, and why: one sentence that names the file."""


class _Entry(NamedTuple):
    type: jax.ShapeDtypeStruct
    begin: int  # of its bytes in the file
    end: int


class Tensors:
    """The tensors of a model, which stay on disk until they are read.

    Attributes:
      types: shape and dtype of each tensor, by name.
    """

    def __init__(self, files: Iterable[tuple[mmap.mmap, Mapping[str, _Entry]]]):
        self._places = {name: (content, entry) for content, entries in files for name, entry in entries.items()}
        self.types: Mapping[str, jax.ShapeDtypeStruct] = {name: e.type for name, (_, e) in self._places.items()}

    @classmethod
    def open(cls, path: Path) -> "Tensors":
        """Reads and checks all headers, and no tensor.

        Args:
          path: one file; or a folder with model.safetensors, or with an index and the files that the index names, which
            all have to be in this folder.

        Raises:
          FolderError: there are no safetensors, they cannot be read, a file is damaged, or the folder holds two models.
        """
        with explaining_os_errors(path, "read"):
            if path.suffix == ".safetensors" and path.is_file():
                return cls([_open_file(path)])
            if not path.is_dir():
                raise FolderError(f"{path} is no folder and no .safetensors file: give one with {_SINGLE} or {_INDEX}")
            single, index = path / _SINGLE, path / _INDEX
            files = _files_of(index) if index.is_file() else {}
            if not single.is_file():
                if not index.is_file():
                    raise no_model(path, f"it has neither {_SINGLE} nor {_INDEX}")
                return cls(_open_files(index, files))
            # transformers reads model.safetensors then, and vLLM the files of the index.
            if files.keys() - {_SINGLE}:
                raise FolderError(
                    f"{path} has {_SINGLE} beside {_INDEX}, which names other files, so it holds two models: move one "
                    "of them to another folder"
                )
            return cls([_open_file(single)])

    def read(self, name: str) -> np.ndarray:
        """A tensor as a read-only view of its file.

        Its bytes come from disk when they are first used. The file must not be truncated as long as the view lives.
        """
        content, entry = self._places[name]
        return np.ndarray(entry.type.shape, entry.type.dtype, buffer=content, offset=entry.begin)

    def digest(self) -> str:
        """SHA-256 of names, dtypes and shapes, and of a sample of each tensor: 4 KiB of every 4 MiB and the last 4 KiB.

        It does not depend on how tensors are split into files. For 16 GB it reads 20 MB.
        """
        digest = hashlib.sha256()
        for name, (content, entry) in sorted(self._places.items(), key=lambda item: item[0]):
            digest.update(repr((name, entry.type.dtype.name, entry.type.shape)).encode())
            last = max(entry.begin, entry.end - _SAMPLE_BYTES)
            for begin in sorted({*range(entry.begin, entry.end, _SAMPLE_EVERY), last}):
                digest.update(content[begin : min(begin + _SAMPLE_BYTES, entry.end)])
        return digest.hexdigest()


def write(
    folder: Path,
    types: Mapping[str, jax.ShapeDtypeStruct],
    read: Callable[[str], np.ndarray],
    *,
    files: Sequence[tuple[str, bytes]] = (),
    single: str = _SINGLE,
    largest_file_bytes: int = 5 * 10**9,
) -> None:
    """Writes the tensors of a model, one at a time: `write(folder, tensors.types, tensors.read)` copies all.

    A file gets its name when all of it is on disk, and the index is written last, so that an interrupted write leaves
    a folder that `Tensors.open` refuses.

    Args:
      folder: is made if it does not exist.
      types: shape and dtype of each tensor, by name.
      read: gives the tensor of a name. Not called for the next one before this one is written and released.
      files: names and contents of other files, which are written after the tensors, in this order.
      single: name of the file, where it is one.
      largest_file_bytes: if all tensors together have more bytes, they are split into several files in the order of
        `types`. A larger tensor gets a file of its own.

    Raises:
      FolderError: the folder already holds a model, or cannot be written.
      ValueError: a dtype has no name in the format, or `read` gives another shape or dtype than `types`.
    """
    for name, tensor in types.items():
        if tensor.dtype not in _DTYPE_NAMES:
            raise ValueError(f"{name} has dtype {tensor.dtype}: safetensors hold {', '.join(map(str, _DTYPE_NAMES))}")
        if name == "__metadata__":
            raise ValueError("a tensor is named __metadata__, which safetensors reserve: rename it")
    with explaining_os_errors(folder, "written"):
        folder.mkdir(parents=True, exist_ok=True)
        if any((folder / name).exists() for name in (single, _INDEX)):
            raise FolderError(f"{folder} already holds a model: choose another folder, or remove the model")
    groups = _split(types, largest_file_bytes)
    names = [f"model-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
    named = dict(zip(names if len(groups) > 1 else [single], groups, strict=True))
    if len(groups) > 1:
        total_size = sum(map(_num_bytes, types.values()))
        places = {tensor: name for name, group in named.items() for tensor in group}
        index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(places.items()))}
        files = [(_INDEX, json.dumps(index, indent=2).encode() + b"\n"), *files]
    with explaining_os_errors(folder, "written"), contextlib.ExitStack() as undo:
        for name, group in named.items():
            _write_file(folder / name, group, read)
            undo.callback((folder / name).unlink, missing_ok=True)
        for name, content in files:
            with _new_file(folder / name) as file:
                file.write(content)
            undo.callback((folder / name).unlink, missing_ok=True)
        undo.pop_all()


# ---------------------------------------------------------------------------------------------------------- reading


def _files_of(index: Path) -> Mapping[str, set[str]]:
    """The tensors of each file that an index names."""
    files = read_json(index, _MOST_HEADER_BYTES).get("weight_map")
    if not isinstance(files, dict):
        raise FolderError(f"{index} has no weight_map, the object that names the file of each tensor")
    tensors_of: dict[str, set[str]] = {}
    for tensor, file_name in files.items():
        if not isinstance(file_name, str) or not _is_file_of_folder(file_name):
            raise FolderError(f"{index} places {quoted(tensor)} in something else than a .safetensors file beside it")
        tensors_of.setdefault(file_name, set()).add(tensor)
    return tensors_of


def _open_files(index: Path, files: Mapping[str, set[str]]) -> Iterator[tuple[mmap.mmap, Mapping[str, _Entry]]]:
    for file_name, expected in files.items():
        path = index.with_name(file_name)
        with explaining_os_errors(path, "read"):
            if not path.is_file():
                raise FolderError(f"{path} is missing, but {index.name} names it: download it as well")
        content, entries = _open_file(path)
        if missing := expected - entries.keys():
            raise FolderError(f"{path} lacks {quoted(*missing)}, which {index.name} places in it: download both again")
        if extra := entries.keys() - expected:
            raise FolderError(
                f"{path} has {quoted(*extra)}, which {index.name} does not place in it: download both again"
            )
        yield content, entries


def _is_file_of_folder(name: str) -> bool:
    # A link in the folder may lead out of it: Hugging Face's cache consists of links. A name may not.
    plain = name.isprintable() and "/" not in name and "\\" not in name
    return plain and name.endswith(".safetensors") and len(name) <= _MOST_NAME_LETTERS


def _open_file(path: Path) -> tuple[mmap.mmap, Mapping[str, _Entry]]:
    with explaining_os_errors(path, "read"), path.open("rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        start = file.read(8)
        header_bytes = int.from_bytes(start, "little")
        if start == b"version ":
            raise FolderError(f"{path} is a pointer of Git LFS and not the file that it stands for: run `git lfs pull`")
        if file_bytes < 8 or header_bytes > file_bytes - 8:
            raise FolderError(f"{path} ends within its header, after {file_bytes} bytes: download it again")
        if header_bytes > _MOST_HEADER_BYTES:
            raise FolderError(f"{path} has a header of {header_bytes} bytes: at most {_MOST_HEADER_BYTES} are allowed")
        header = _parse_json(path, file.read(header_bytes))
        entries = _entries(path, header, 8 + header_bytes)
        end = max((entry.end for entry in entries.values()), default=8 + header_bytes)
        if end > file_bytes:
            raise FolderError(f"{path} is truncated, {end - file_bytes} bytes are missing: download it again")
        if end < file_bytes:
            raise FolderError(f"{path} has {file_bytes - end} bytes after its last tensor: download it again")
        # Without madvise: MADV_SEQUENTIAL reads from disk at a third of the speed, and MADV_WILLNEED changes nothing.
        return mmap.mmap(file.fileno(), file_bytes, access=mmap.ACCESS_READ), entries


def _entries(path: Path, header: dict[str, Any], data_begin: int) -> Mapping[str, _Entry]:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FolderError(f"{path} has a __metadata__ that is not an object of strings")
    entries = {name: _entry(f"tensor {quoted(name)} of {path}", entry, data_begin) for name, entry in header.items()}
    position = data_begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin < position:
            raise FolderError(f"tensor {quoted(name)} of {path} overlaps the tensor before it")
        if entry.begin > position:
            raise FolderError(f"{path} has a gap of {entry.begin - position} bytes before tensor {quoted(name)}")
        position = entry.end
    return entries


def _entry(tensor: str, entry: object, data_begin: int) -> _Entry:
    match entry:
        case {"dtype": str(dtype_name), "shape": list(shape), "data_offsets": [begin, end], **rest} if not rest:
            numbers = [*shape, begin, end]
        case _:
            raise FolderError(f"{tensor} has an entry that is not a dtype, a shape and data_offsets [begin, end]")
    if not all(type(number) is int and 0 <= number <= _MOST_ARRAY_BYTES for number in numbers):
        raise FolderError(f"{tensor} has sizes or data_offsets that are not whole numbers from 0 to 2^63 - 1")
    if (dtype := _DTYPES.get(dtype_name)) is None:
        raise FolderError(f"{tensor} has the unknown dtype {quoted(dtype_name)}: known are {', '.join(_DTYPES)}")
    # NumPy counts the bytes of an empty array without its dimensions of 0, and refuses too many.
    if len(shape) > _MOST_DIMENSIONS or math.prod(size or 1 for size in shape) * dtype.itemsize > _MOST_ARRAY_BYTES:
        raise FolderError(f"{tensor} has a larger shape than any array")
    struct = jax.ShapeDtypeStruct(tuple(shape), dtype)
    if end - begin != _num_bytes(struct):
        raise FolderError(
            f"{tensor} is {dtype_name} of shape {shape} and needs {_num_bytes(struct)} bytes, but data_offsets has "
            f"{end - begin}"
        )
    return _Entry(struct, data_begin + begin, data_begin + end)


def read_json(path: Path, most_bytes: int) -> dict[str, Any]:
    """The object that a JSON file of a stranger holds.

    Raises:
      FolderError: as for `read_file`; or it is no object, names something twice, has NaN or Infinity, or is no JSON.
    """
    return _parse_json(path, read_file(path, most_bytes))


def read_file(path: Path, most_bytes: int = 2**30) -> bytes:
    """The bytes of a file of a stranger.

    Raises:
      FolderError: there is no such file, it is no regular one, or it has more bytes.
    """
    with explaining_os_errors(path, "read"):
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise FolderError(f"{path} is no regular file: put the file itself there")
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise FolderError(f"{path} has more than {most_bytes} bytes, which no model needs")
    return content


def no_model(folder: Path, problem: str) -> FolderError:
    """The error of a folder that holds no model, which says what it holds instead."""
    if any((folder / name).is_file() for name in ("adapter_config.json", "adapter_model.safetensors")):
        return FolderError(
            f"{folder} holds adapters of PEFT and no model: give the folder of their base model, and this one to "
            "te_jax.models.from_peft, or as --lora of te-jax train and generate"
        )
    if any(folder.glob("pytorch_model*.bin")):
        return FolderError(
            f"{folder} holds pickles (pytorch_model*.bin), which are not read, since that executes code in them: "
            "convert them with save_pretrained(folder, safe_serialization=True) of transformers"
        )
    return FolderError(f"{folder} holds no model, {problem}: give a folder that save_pretrained of transformers wrote")


def _parse_json(path: Path, text: bytes) -> dict[str, Any]:
    try:
        if not text.startswith(b"{"):
            raise ValueError("it is no object")
        return json.loads(text.decode(), object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise FolderError(f"the JSON in {path} is invalid: {error}") from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names: set[str] = set()
    for name, _ in pairs:
        if name in names:
            raise ValueError(f"{quoted(name)} occurs twice")
        name.encode()  # which refuses halves of surrogate pairs
        names.add(name)
    return dict(pairs)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def quoted(*names: str) -> str:
    """The first three names, of which each may be hostile, and how many more there are."""
    return ", ".join(map(shown, sorted(names)[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def shown(value: object) -> str:
    """A name or a value of a stranger's file, for an error: in one line that is not long, without escape sequences."""
    text = repr(f"{value[:100]}…" if isinstance(value, str) and len(value) > 100 else value)
    return text if len(text) <= 200 else f"{text[:199]}…"


# ---------------------------------------------------------------------------------------------------------- writing


def _split(types: Mapping[str, jax.ShapeDtypeStruct], most_bytes: int) -> list[dict[str, jax.ShapeDtypeStruct]]:
    """The tensors of each file."""
    groups, group_bytes = [{}], 0
    for name, tensor in types.items():
        if groups[-1] and group_bytes + _num_bytes(tensor) > most_bytes:
            groups.append({})
            group_bytes = 0
        groups[-1][name] = tensor
        group_bytes += _num_bytes(tensor)
    return groups


def _write_file(path: Path, types: Mapping[str, jax.ShapeDtypeStruct], read: Callable[[str], np.ndarray]) -> None:
    # Larger elements first, so that all are aligned.
    types = dict(sorted(types.items(), key=lambda item: -item[1].dtype.itemsize))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # without which transformers does not read it
    position = 0
    for name, tensor in types.items():
        offsets = [position, position := position + _num_bytes(tensor)]
        header[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with _new_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in types.items():
            _write_tensor(file, name, tensor, read(name))  # no variable holds it while the next is read


def _write_tensor(file: BinaryIO, name: str, tensor: jax.ShapeDtypeStruct, values: np.ndarray) -> None:
    values = np.asarray(values)
    if values.shape != tensor.shape or values.dtype != tensor.dtype:
        raise ValueError(f"read({name!r}) gives {values.dtype}{values.shape}: types has {tensor.dtype}{tensor.shape}")
    if not values.size:
        return
    values = np.atleast_1d(values)
    rows = max(1, _PIECE_BYTES // values[0].nbytes)
    for first in range(0, len(values), rows):  # a transposed array is copied in pieces
        file.write(np.ascontiguousarray(values[first : first + rows]).view(np.uint8).data)


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name when all of it is on disk."""
    unfinished = path.with_name(f"{path.name}.tmp")
    with explaining_os_errors(path, "written"), contextlib.ExitStack() as undo:
        undo.callback(unfinished.unlink, missing_ok=True)
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        _fsync_folder(path.parent)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):  # some network file systems cannot
        os.fsync(descriptor)
    os.close(descriptor)


def _num_bytes(tensor: jax.ShapeDtypeStruct) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


@contextlib.contextmanager
def explaining_os_errors(path: Path, verb: str) -> Iterator[None]:
    """Turns errors of the file system into a FolderError that names a path."""
    try:
        yield
    except OSError as error:
        raise FolderError(f"{path} cannot be {verb}: {error.strerror or error}") from error
