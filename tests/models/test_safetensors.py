"""Folders of safetensors: what is written is read, also by the package of Hugging Face, and what is refused."""

import builtins
import errno
import io
import json
import math
import os
import pickle
import re
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from te_jax.models import safetensors
from te_jax.models.safetensors import FolderError, Tensors, write

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHAPES = [(), (0,), (3, 0, 2), (5,), (3, 1, 7)]


@pytest.fixture
def arrays(rng):
    """Random bits in all dtypes, scalars and empty arrays among them."""
    return {
        f"{dtype_name}{shape}": random_bits(rng, dtype, shape)
        for dtype_name, dtype in safetensors._DTYPES.items()
        for shape in SHAPES
    }


def random_bits(rng, dtype, shape):
    largest = 1 if dtype == np.bool_ else 255
    values = rng.integers(0, largest, math.prod(shape) * dtype.itemsize, np.uint8, endpoint=True)
    return values.view(dtype).reshape(shape)


def write_arrays(folder, arrays, **options):
    write(folder, {name: struct(array) for name, array in arrays.items()}, arrays.__getitem__, **options)


def struct(array):
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def check_equal(tensors, arrays):
    assert tensors.types == {name: struct(array) for name, array in arrays.items()}
    for name, array in arrays.items():
        read = tensors.read(name)
        assert (read.shape, read.dtype, read.tobytes()) == (array.shape, array.dtype, array.tobytes())


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


# ----------------------------------------------------------------------------------------------- writing and reading


def test_one_file_is_read_as_it_was_written(arrays, tmp_path):
    write_arrays(tmp_path / "new" / "folder", arrays)
    assert names_in(tmp_path / "new" / "folder") == [SINGLE]
    check_equal(Tensors.open(tmp_path / "new" / "folder"), arrays)
    check_equal(Tensors.open(tmp_path / "new" / "folder" / SINGLE), arrays)


def test_several_files_have_an_index_and_at_most_the_bytes_asked_for(rng, tmp_path):
    sizes = {"a": 60, "b": 40, "c": 1, "d": 250, "e": 0, "f": 99, "g": 1}
    arrays = {name: random_bits(rng, np.dtype(np.int8), (size,)) for name, size in sizes.items()}
    write_arrays(tmp_path, arrays, largest_file_bytes=100)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == {"total_size": sum(sizes.values())}
    numbers = {
        name: int(re.fullmatch(r"model-(\d{5})-of-00004\.safetensors", f)[1]) for name, f in index["weight_map"].items()
    }
    assert numbers == {"a": 1, "b": 1, "c": 2, "d": 3, "e": 4, "f": 4, "g": 4}
    assert names_in(tmp_path) == sorted({INDEX, *index["weight_map"].values()})
    check_equal(Tensors.open(tmp_path), arrays)


def test_a_transposed_array_is_written_in_its_own_order(rng, tmp_path):
    arrays = {"a": random_bits(rng, np.dtype(np.float32), (7, 33)).T, "b": rng.normal(size=(50, 4))[::-2]}
    write_arrays(tmp_path, arrays)
    check_equal(Tensors.open(tmp_path), arrays)


def test_a_tensor_is_an_aligned_read_only_view_of_the_file(arrays, tmp_path):
    write_arrays(tmp_path, arrays)
    tensors = Tensors.open(tmp_path)
    for name in arrays:
        view = tensors.read(name)
        assert view.flags.aligned
        assert not view.flags.owndata
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 0


def test_a_folder_of_two_models_is_refused(tmp_path):
    write_arrays(tmp_path, {"a": np.zeros(3, np.int8), "b": np.ones(3, np.int8)}, largest_file_bytes=3)
    write_arrays(tmp_path / "other", {"a": np.zeros(3, np.int8)})
    (tmp_path / "other" / SINGLE).rename(tmp_path / SINGLE)
    with pytest.raises(FolderError, match=f"has {SINGLE} beside {INDEX}, which names other files, so it holds two mod"):
        Tensors.open(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": SINGLE}}))
    assert Tensors.open(tmp_path).types.keys() == {"a"}


def test_a_digest_is_that_of_the_tensors_wherever_they_lie(rng, tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors, "_SAMPLE_BYTES", 8)
    monkeypatch.setattr(safetensors, "_SAMPLE_EVERY", 100)
    arrays = {"a": rng.normal(size=30), "b": rng.normal(size=2).astype(np.float32), "c": np.zeros((0, 3))}

    def digest(name, arrays, **options):
        write_arrays(tmp_path / name, arrays, **options)
        return Tensors.open(tmp_path / name).digest()

    assert digest("one", arrays) == digest("several", arrays, largest_file_bytes=1)
    first, last = arrays["a"].copy(), arrays["a"].copy()
    first[0], last[-1] = 0, 0
    others = [arrays | {"a": first}, arrays | {"a": last}, arrays | {"b": np.zeros(2, np.float32)}]
    others += [arrays | {"c": np.zeros((0, 4))}, {"d": arrays["a"], **arrays}]
    assert len({digest(f"{number}", each) for number, each in enumerate([arrays, *others])}) == 6


def test_links_out_of_the_folder_are_followed_as_the_cache_of_hugging_face_needs(rng, tmp_path):
    arrays = {"a": rng.normal(size=3), "b": rng.normal(size=4)}
    write_arrays(tmp_path / "blobs", arrays, largest_file_bytes=1)
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for number, name in enumerate(names_in(tmp_path / "blobs")):
        (tmp_path / "blobs" / name).rename(tmp_path / "blobs" / str(number))
        (snapshot / name).symlink_to(Path("..", "..", "blobs", str(number)))
    check_equal(Tensors.open(snapshot), arrays)


def test_the_package_of_hugging_face_reads_what_is_written(arrays, tmp_path):
    package = pytest.importorskip("safetensors")
    write_arrays(tmp_path, arrays, largest_file_bytes=100)
    read = {}
    for path in tmp_path.glob("*.safetensors"):
        with package.safe_open(path, framework="np") as file:
            assert file.metadata() == {"format": "pt"}
        read |= dict(package.deserialize(path.read_bytes()))
    assert read.keys() == arrays.keys()
    for name, array in arrays.items():
        assert safetensors._DTYPES[read[name]["dtype"]] == array.dtype
        assert (tuple(read[name]["shape"]), bytes(read[name]["data"])) == (array.shape, array.tobytes())


def test_what_the_package_of_hugging_face_writes_is_read(arrays, tmp_path):
    package = pytest.importorskip("safetensors.numpy")
    package.save_file(arrays, tmp_path / SINGLE, metadata={"of": "tests"})
    check_equal(Tensors.open(tmp_path), arrays)


# ------------------------------------------------------------------------------------------------- refused to write


def test_a_full_disk_is_named_and_nothing_remains(tmp_path, monkeypatch):
    synced = []

    def fsync(descriptor):
        synced.append(descriptor)
        if len(synced) == 3:  # a file, its folder, and a file
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(
        FolderError, match=r"model-00002-of-00002.safetensors cannot be written: No space left on device"
    ):
        write_arrays(tmp_path, {"a": np.zeros(3), "b": np.zeros(3)}, largest_file_bytes=1)
    assert names_in(tmp_path) == []
    with pytest.raises(FolderError, match=f"has neither {SINGLE} nor {INDEX}"):
        Tensors.open(tmp_path)


@pytest.mark.parametrize("name", [SINGLE, INDEX])
def test_a_model_is_not_overwritten(name, tmp_path):
    (tmp_path / name).write_text("kept")
    with pytest.raises(FolderError, match="already holds a model: choose another folder"):
        write_arrays(tmp_path, {"a": np.zeros(3)})
    assert (tmp_path / name).read_text() == "kept"


@pytest.mark.parametrize(
    ("name", "given", "declared", "sentence"),
    [
        ("a", np.zeros(3), np.zeros(3, np.float32), r"read\('a'\) gives float64\(3,\): types has float32\(3,\)"),
        ("a", np.zeros(3), np.zeros((3, 1)), r"read\('a'\) gives float64\(3,\): types has float64\(3, 1\)"),
        ("a", np.zeros(3), np.zeros(3, ml_dtypes.int4), "a has dtype int4: safetensors hold bool, uint8"),
        ("a", np.zeros(3), np.zeros(3, ">f4"), "a has dtype >f4"),
        ("__metadata__", np.zeros(3), np.zeros(3), "a tensor is named __metadata__"),
    ],
)
def test_tensors_that_cannot_be_written(name, given, declared, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        write(tmp_path, {name: struct(declared)}, lambda _: given)
    assert names_in(tmp_path) == []


# -------------------------------------------------------------------------------------------------- refused to read


class Bomb:
    """A pickle that makes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def open_hostile(tmp_path, monkeypatch):
    """Opens a folder of some files beside a secret, and checks that nothing else was opened and nothing executed."""
    write_arrays(tmp_path / "secret", {"a": np.zeros(3)})
    (tmp_path / "secret.safetensors").write_bytes((tmp_path / "secret" / SINGLE).read_bytes())
    opened = []

    def recording(function):
        def record(path, *args, **kwargs):
            opened.append(Path(path))
            return function(path, *args, **kwargs)

        return record

    def open_hostile(files):
        folder = tmp_path / "folder"
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "executed")))
        with monkeypatch.context() as patch:
            for module, name in ((builtins, "open"), (io, "open"), (os, "open")):
                patch.setattr(module, name, recording(getattr(module, name)))
            try:
                return Tensors.open(folder)
            finally:
                assert opened or not files
                assert {path for path in opened if path.name not in files or path.parent != folder} == set()
                assert names_in(tmp_path) == ["folder", "secret", "secret.safetensors"]

    return open_hostile


def file_of(header, data=b"", header_bytes=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if header_bytes is None else header_bytes).to_bytes(8, "little") + text + data


def entry(dtype="I8", shape=(4,), data_offsets=(0, 4), **more):
    return {"dtype": dtype, "shape": shape, "data_offsets": data_offsets, **more}


DATA = b"data"
NO_ENTRY = r"tensor 'a' of .*model.safetensors has an entry that is not a dtype, a shape and data_offsets"
NO_NUMBERS = r"tensor 'a' of .* has sizes or data_offsets that are not whole numbers from 0 to 2\^63 - 1"
TOO_LARGE = "tensor 'a' of .* has a larger shape than any array"
INVALID = "the JSON in .*model.safetensors is invalid: "


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        # The header.
        (b"", "ends within its header, after 0 bytes: download it again"),
        (file_of({}, header_bytes=2**64 - 1), "ends within its header, after 10 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a pointer of Git LFS .* `git lfs pull`"),
        (file_of(b""), INVALID + "it is no object"),
        (file_of(b'{"a": '), INVALID + "Expecting value"),
        (file_of("{}".encode("utf-16")), INVALID + "it is no object"),
        (file_of(b'{"\xff": 0}'), INVALID + "'utf-8' codec can't decode byte 0xff"),
        (file_of(b'{"\\ud800": 0}'), INVALID + "'utf-8' codec can't encode"),
        (file_of(b'{"a": NaN}'), INVALID + "NaN is not JSON"),
        (file_of(b'{"a": ' + b"9" * 5000 + b"}"), INVALID + "Exceeds the limit"),
        (file_of(b'{"a": ' + b"[" * 200_000 + b"}"), INVALID),
        (file_of(b'{"a": ' * 200_000 + b"}"), INVALID),
        (file_of(b'{"a": 0, "a": 0}'), INVALID + "'a' occurs twice"),
        (file_of(b'{"a": {"dtype": "I8", "dtype": "I8"}}'), INVALID + "'dtype' occurs twice"),
        (file_of({"__metadata__": {"format": 1}}), "has a __metadata__ that is not an object of strings"),
        # An entry.
        (file_of({"a": 0}, DATA), NO_ENTRY),
        (file_of({"a": entry(more=0)}, DATA), NO_ENTRY),
        (file_of({"a": {"dtype": "I8", "shape": [4]}}, DATA), NO_ENTRY),
        (file_of({"a": entry(dtype=["I8"])}, DATA), NO_ENTRY),
        (file_of({"a": entry(shape="4")}, DATA), NO_ENTRY),
        (file_of({"a": entry(shape=[4.0])}, DATA), NO_NUMBERS),
        (file_of({"a": entry(shape=[-4])}, DATA), NO_NUMBERS),
        (file_of({"a": entry(data_offsets=[False, 4])}, DATA), NO_NUMBERS),
        (file_of({"a": entry(data_offsets=[0, 2**63])}, DATA), NO_NUMBERS),
        (file_of({"a": entry(shape=[10**4000])}, DATA), NO_NUMBERS),
        (file_of({"a": entry(dtype="F4")}, DATA), "tensor 'a' of .* has the unknown dtype 'F4': known are BOOL, U8"),
        (file_of({"a": entry(shape=[2**32, 2**32])}, DATA), TOO_LARGE),
        (file_of({"a": entry("F32", [0, 2**62], [0, 0])}), TOO_LARGE),
        (file_of({"a": entry(shape=[1] * 65, data_offsets=[0, 1])}, b"a"), TOO_LARGE),
        (file_of({"a": entry(shape=[5])}, DATA), r"'a' of .* is I8 of shape \[5\] and needs 5 bytes, but .* has 4"),
        (file_of({"a": entry("F32")}, DATA), r"is F32 of shape \[4\] and needs 16 bytes, but data_offsets has 4"),
        (file_of({"a": entry(data_offsets=[4, 0])}, DATA), "needs 4 bytes, but data_offsets has -4"),
        # Where tensors lie.
        (file_of({"a": entry(), "b": entry()}, DATA), "tensor 'b' of .* overlaps the tensor before it"),
        (file_of({"a": entry(), "b": entry(shape=[0], data_offsets=[2, 2])}, DATA), "'b' of .* overlaps"),
        (file_of({"a": entry(data_offsets=[1, 5])}, b"?data"), "has a gap of 1 bytes before tensor 'a'"),
        (file_of({"b": entry(data_offsets=[6, 10]), "a": entry()}, b"data??data"), "has a gap of 2 bytes before .*'b'"),
        (file_of({"a": entry()}, b"dat"), "is truncated, 1 bytes are missing: download it again"),
        (file_of({"a": entry("U8", [2**62], [0, 2**62])}, DATA), f"is truncated, {2**62 - 4} bytes are missing"),
        (file_of({"a": entry()}, b"data+"), "has 1 bytes after its last tensor: download it again"),
    ],
)  # fmt: skip
def test_a_damaged_or_hostile_file(content, sentence, open_hostile):
    with pytest.raises(FolderError, match=sentence) as error:
        open_hostile({SINGLE: content})
    assert SINGLE in str(error.value)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 500


def test_a_long_header_is_refused_before_it_is_read(open_hostile, monkeypatch):
    monkeypatch.setattr(safetensors, "_MOST_HEADER_BYTES", 100)
    with pytest.raises(FolderError, match="has a header of 101 bytes: at most 100 are allowed"):
        open_hostile({SINGLE: file_of(b"{" * 101)})


OUTSIDE = "places 'a' in something else than a .safetensors file beside it"


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        ({}, "has no weight_map"),
        ({"weight_map": []}, "has no weight_map"),
        ([], "the JSON in .*index.json is invalid: it is no object"),
        (b"\xff", "the JSON in .*index.json is invalid"),
        (b'{"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}}', "'a' occurs twice"),
        *(
            ({"weight_map": {"a": name}}, OUTSIDE)
            for name in [
                "", ".", "..", "../secret.safetensors", "..\\secret.safetensors", "folder/../x.safetensors", None,
                1, [], "/etc/passwd", "pytorch_model.bin", "x.safetensors\0", "\ud800.safetensors", "x\n.safetensors",
                "../secret/model.safetensors",
            ]
        ),
        ({"weight_map": {"a": "y.safetensors"}}, "y.safetensors is missing, but .*index.json names it: download it"),
        ({"weight_map": {"a": "x" * 10**6 + ".safetensors"}}, OUTSIDE),
        ({"weight_map": {"a": "x.safetensors"}}, "x.safetensors has 'b', which .*index.json does not place in it"),
        (
            {"weight_map": dict.fromkeys("abcdefg", "x.safetensors")},
            "x.safetensors lacks 'c', 'd', 'e' and 2 more, which .*index.json places in it",
        ),
        (
            {"weight_map": {"a": "x.safetensors", "b": "z.safetensors"}},
            "x.safetensors has 'b', which .*index.json does not place in it",
        ),
    ],
)  # fmt: skip
def test_a_damaged_or_hostile_index(index, sentence, open_hostile):
    text = index if isinstance(index, bytes) else json.dumps(index).encode()
    both = file_of({"a": entry(), "b": entry(data_offsets=[4, 8])}, DATA + DATA)
    with pytest.raises(FolderError, match=sentence) as error:
        open_hostile({INDEX: text, "x.safetensors": both, "z.safetensors": both})
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 500


def test_pickles_are_not_read(open_hostile):
    with pytest.raises(FolderError, match=r"holds pickles .* since that executes code .* safe_serialization=True"):
        open_hostile({})


def test_folders_without_safetensors(tmp_path):
    (tmp_path / SINGLE).mkdir()
    with pytest.raises(FolderError, match=f"has neither {SINGLE} nor {INDEX}: give a folder that save_pretrained"):
        Tensors.open(tmp_path)
    os.mkfifo(tmp_path / "pipe.safetensors")
    for name in ("absent", "pipe.safetensors"):
        with pytest.raises(FolderError, match=f"{name} is no folder and no .safetensors file"):
            Tensors.open(tmp_path / name)


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    write_arrays(tmp_path, {"a": np.zeros(3)})

    def refuse(path, *args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(io, "open", refuse)
    with pytest.raises(FolderError, match=r"model.safetensors cannot be read: Permission denied$"):
        Tensors.open(tmp_path)
