"""The folder of a run: what survives a kill, and what is refused."""

import errno
import functools
import json
import os
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax.cli._run_folder import RunFolder, read_header
from te_jax.cli.errors import UserError

HEADER = {"kind": "header", "options": {"steps": 9}}


@pytest.fixture
def start(tmp_path):
    """Folders that are closed at the end of the test, as the process that held them would be."""
    opened = []

    def start(make=functools.partial(RunFolder.create, header=HEADER)):
        opened.append(make(tmp_path / "run"))
        return opened[-1]

    yield start
    for folder in opened:
        folder.close()


def state_of(step):
    return {"loss": (jnp.full((3, 2), step, jnp.float32), jnp.asarray(step, jnp.int32))}


def log(folder, steps):
    for step in steps:
        folder.append({"kind": "train", "step": step, "loss": step / 3})


def test_a_resumed_run_has_its_header_state_and_log_up_to_the_checkpoint(start, tmp_path):
    folder = start()
    log(folder, [1, 2])
    folder.append({"kind": "validation", "step": 2, "loss": 0.1})
    folder.save(2, state_of(2))
    log(folder, [3, 4])
    folder.close()
    folder = start(RunFolder.resume)
    assert folder.header == HEADER
    assert folder.latest_step == 2
    like = like_state()
    restored = folder.restore(like)
    assert jax.tree.structure(restored) == jax.tree.structure(like)
    for leaf, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(state_of(2)), strict=True):
        np.testing.assert_array_equal(leaf, expected)
        assert leaf.dtype == expected.dtype
    assert [record["step"] for record in folder.records("train")] == [1, 2]
    log(folder, [3])
    assert [record["loss"] for record in folder.records("train")] == [1 / 3, 2 / 3, 1.0]
    assert [record["step"] for record in folder.records("validation")] == [2]


def like_state():
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state_of(0))


def with_checkpoints(start, *steps):
    """The closed folder of a run with these checkpoints and a step after the last."""
    folder = start()
    for step in steps:
        log(folder, [step])
        folder.save(step, state_of(step))
    log(folder, [steps[-1] + 1])
    folder.close()
    return folder.path


def check_restored(folder, step):
    restored = folder.restore(like_state())
    assert folder.latest_step == step
    for leaf, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(state_of(step)), strict=True):
        np.testing.assert_array_equal(leaf, expected)


@pytest.mark.parametrize("name", ["_METADATA", "manifest.ocdbt", "d/*"])
def test_a_truncated_file_costs_the_newest_checkpoint_alone(name, start, capsys):
    path = with_checkpoints(start, 1, 2)
    for file in (path / "checkpoints" / "2" / "default").glob(name):
        os.truncate(file, file.stat().st_size // 2)
    folder = start(RunFolder.resume)
    check_restored(folder, 1)
    assert [record["step"] for record in folder.records("train")] == [1]
    (noted,) = capsys.readouterr().err.splitlines()
    assert noted.startswith(f"te-jax: note: --out {path} has a damaged checkpoint (step 2: ")
    assert noted.endswith("): the run goes on from step 1")


@pytest.mark.parametrize("folder", ["", "default"], ids=["empty step", "missing item"])
def test_a_checkpoint_without_its_files_is_passed_over_and_written_again(folder, start, capsys):
    path = with_checkpoints(start, 1, 2)
    shutil.rmtree(path / "checkpoints" / "2" / folder)
    (path / "checkpoints" / "2").mkdir(exist_ok=True)
    folder = start(RunFolder.resume)
    check_restored(folder, 1)
    assert "(step 2: " in capsys.readouterr().err
    folder.save(2, state_of(2))
    folder.close()
    check_restored(start(RunFolder.resume), 2)
    assert sorted(path.name for path in (path / "checkpoints").iterdir()) == ["1", "2", "2.damaged"]


def test_a_run_without_an_intact_checkpoint_is_refused_and_left_as_it_is(start):
    path = with_checkpoints(start, 1, 2)
    for step in "12":
        shutil.rmtree(path / "checkpoints" / step / "default")
    folder = start(RunFolder.resume)
    with pytest.raises(
        UserError, match=r"no checkpoint that can be read \(step 2: .*; step 1: .*\): start another run"
    ):
        folder.restore(like_state())
    assert sorted(path.name for path in (path / "checkpoints").iterdir()) == ["1", "2"]


@pytest.mark.parametrize("error", [MemoryError(), ValueError("RESOURCE_EXHAUSTED: 9 bytes"), PermissionError(13, "no")])
def test_what_is_not_damage_leaves_the_checkpoints_as_they_are(error, start, monkeypatch):
    def restore(*args, **options):
        raise error

    with_checkpoints(start, 1, 2)
    folder = start(RunFolder.resume)
    monkeypatch.setattr(folder._checkpoints, "restore", restore)
    with pytest.raises(type(error)):
        folder.restore(like_state())
    assert folder.latest_step == 2


def test_a_header_with_other_options_is_added_where_the_run_goes_on(start, capsys):
    path = with_checkpoints(start, 1, 2)
    longer = HEADER | {"options": {"steps": 12}}
    folder = start(functools.partial(RunFolder.resume, header=longer))
    log(folder, [3])
    folder.close()
    assert read_header(path) == longer
    shutil.rmtree(path / "checkpoints" / "2" / "default")
    folder = start(functools.partial(RunFolder.resume, header=longer))
    folder.restore(like_state())
    assert read_header(path) == longer  # although the former was cut off
    kinds = [json.loads(line)["kind"] for line in (path / "log.jsonl").read_text().splitlines()]
    assert kinds == ["header", "train", "header"]


def test_the_two_latest_checkpoints_are_kept(start):
    folder = start()
    for step in range(1, 5):
        folder.save(step, state_of(step))
    assert sorted(path.name for path in (folder.path / "checkpoints").iterdir()) == ["3", "4"]


def test_without_a_checkpoint_only_the_header_is_kept(start):
    folder = start()
    folder.append({"kind": "validation", "step": 0, "loss": 5.5})
    log(folder, [1])
    folder.close()
    folder = start(RunFolder.resume)
    assert folder.latest_step == 0
    assert folder.records("train") == folder.records("validation") == []
    assert read_header(folder.path) == HEADER


def test_a_torn_last_record_is_forgotten(start):
    folder = start()
    log(folder, [1, 2])
    folder.save(2, state_of(2))
    folder.close()
    path = folder.path / "log.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind": "train", "st')
    start(RunFolder.resume).close()
    assert path.read_bytes() == whole


def test_an_unfinished_checkpoint_is_not_taken(start):
    folder = start()
    log(folder, [1, 2, 3])
    folder.save(1, state_of(1))
    unfinished = folder.path / "checkpoints" / "3.orbax-checkpoint-tmp-0"
    unfinished.mkdir()
    (unfinished / "default").mkdir()
    folder.close()
    folder = start(RunFolder.resume)
    assert folder.latest_step == 1
    folder.save(3, state_of(3))
    assert folder.latest_step == 3


def test_a_torn_header_is_no_run(start, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").write_bytes(b'{"kind": "hea')
    with pytest.raises(UserError, match="holds no run"):
        start(RunFolder.resume)
    assert start().records("train") == []
    assert read_header(tmp_path / "run") == HEADER


@pytest.mark.parametrize("damage", [b"nonsense\n", b"\0" * 16 + b"\n", b"\xff\xfe\n"], ids=["text", "zeros", "bytes"])
def test_a_damaged_record_is_named(start, damage):
    folder = start()
    log(folder, [1, 2])
    folder.save(2, state_of(2))
    folder.close()
    path = folder.path / "log.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], damage, lines[2]]))
    with pytest.raises(UserError, match=r"log\.jsonl is damaged at line 3"):
        start(RunFolder.resume)


def test_a_run_that_has_taken_a_step_is_not_overwritten(start):
    folder = start()
    folder.append({"kind": "validation", "step": 0, "loss": 5.5})
    folder.close()
    folder = start()
    assert folder.records("validation") == []
    log(folder, [1])
    folder.close()
    with pytest.raises(UserError, match="already holds a run: continue it with --resume"):
        start()


def test_a_run_has_one_process_at_a_time(start):
    start()
    with pytest.raises(UserError, match="in use by another"):
        start(RunFolder.resume)


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match="cannot be written"):
            RunFolder.create(path, HEADER)


def test_a_disk_that_is_full_is_one_sentence(start, tmp_path):
    folder = start()
    log(folder, [1])
    folder.save(1, state_of(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    wide = {"loss": np.random.default_rng(0).random(50_000)}
    words = f"--out {tmp_path / 'run'} cannot be written: {os.strerror(errno.EFBIG)}"
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        with pytest.raises(UserError, match=words):
            folder.save(2, wide)
        with pytest.raises(UserError, match=words):
            folder.append({"kind": "train", "step": 2, "loss": "x" * 30_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    folder.close()
    assert start(RunFolder.resume).latest_step == 1
