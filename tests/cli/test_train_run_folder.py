"""The folder of a run: what survives a kill, and what is refused."""

import errno
import functools
import os
import resource

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
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state_of(0))
    restored = folder.restore(like)
    assert jax.tree.structure(restored) == jax.tree.structure(like)
    for leaf, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(state_of(2)), strict=True):
        np.testing.assert_array_equal(leaf, expected)
        assert leaf.dtype == expected.dtype
    assert [record["step"] for record in folder.records("train")] == [1, 2]
    log(folder, [3])
    assert [record["loss"] for record in folder.records("train")] == [1 / 3, 2 / 3, 1.0]
    assert [record["step"] for record in folder.records("validation")] == [2]


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


def test_a_run_is_not_overwritten(start):
    start().close()
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
