"""The folder of a run: what survives a kill and damage, and what is refused."""

import errno
import functools
import gc
import json
import os
import re
import resource
import shutil
from pathlib import Path

import jax
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
    """Has an array that orbax stores in a file of its own, and which is too random to be compressed."""
    drawn = np.random.default_rng(step).standard_normal(3000, np.float32)
    return {"loss": tuple(jax.device_put((drawn, np.int32(step))))}


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


def like_state(state=state_of(0)):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


# ----------------------------------------------------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def _whole(tmp_path_factory):
    """A run with checkpoints of steps 1 and 2, and records of steps 1 to 3."""
    folder = RunFolder.create(tmp_path_factory.mktemp("whole") / "run", HEADER)
    for step in (1, 2):
        log(folder, [step])
        folder.save(step, state_of(step))
    log(folder, [3])
    folder.close()
    return folder.path


@pytest.fixture
def whole(_whole, tmp_path):
    """A copy of that run."""
    return shutil.copytree(_whole, tmp_path / "run")


@pytest.fixture
def whole_of_an_older_version(whole):
    """That run as a te_jax without checksums wrote it."""
    for checksums in (whole / "checkpoints").glob("*/checksums.json"):
        checksums.unlink()
    path = whole / "log.jsonl"
    path.write_bytes(re.sub(rb', "crc32": \d+', b"", path.read_bytes()))
    return whole


def check_restored(folder, step):
    restored = folder.restore(like_state())
    assert folder.latest_step == step
    assert [record["step"] for record in folder.records("train")] == list(range(1, step + 1))
    for leaf, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(state_of(step)), strict=True):
        np.testing.assert_array_equal(leaf, expected)


def largest_file(step):
    return max((path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip_bytes(step):
    """64 in the midst of an array."""
    path = largest_file(step)
    content = np.frombuffer(path.read_bytes(), np.uint8).copy()
    content[content.size // 2 : content.size // 2 + 64] ^= 0xFF
    path.write_bytes(content.tobytes())


def truncate(name, part=0.5):
    def damage(step):
        for path in step.glob(name):
            os.truncate(path, int(path.stat().st_size * part))

    return damage


def remove(name):
    def damage(step):
        for path in step.glob(name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def write_checksums(text):
    return lambda step: (step / "checksums.json").write_text(text)


def become_a_file(step):
    shutil.rmtree(step)
    step.touch()


def link_to_memory(step):
    """The memory of this process is a file whose first bytes cannot be read."""
    path = largest_file(step)
    path.unlink()
    path.symlink_to("/proc/self/mem")


DAMAGES = {
    "flipped bytes": (flip_bytes, r"default/.* does not match its checksum"),
    "truncated data": (truncate("default/**/d/*"), r"default/.*d/\w+ does not match its checksum"),
    "truncated manifest": (truncate("default/manifest.ocdbt"), "default/manifest.ocdbt does not match its checksum"),
    "empty metadata": (truncate("default/_METADATA", 0), "default/_METADATA does not match its checksum"),
    "missing data": (remove("default/ocdbt.process_0/d"), r"default/ocdbt.process_0/d/\w+ is missing"),
    "missing metadata": (remove("default/_METADATA"), "default/_METADATA is missing"),
    "missing item": (remove("default"), "default/ is missing"),
    "empty step folder": (remove("*"), "default/ is missing"),
    "no step folder": (become_a_file, "default/ is missing"),
    "truncated checksums": (truncate("checksums.json"), "checksums.json is unreadable"),
    "no checksums": (write_checksums("{}"), "checksums.json lists no file"),
    "checksums that are no object": (write_checksums("[]"), "checksums.json is unreadable"),
    "nested checksums": (write_checksums("[" * 5000), "checksums.json is unreadable"),
    "a file without a checksum": (lambda step: (step / "default" / "e").touch(), "default/e has no checksum"),
    "a file that the disk does not give back": (link_to_memory, r"OSError: \[Errno 5\] Input/output error"),
}


@pytest.mark.parametrize(
    ("damage", "words"),
    [*DAMAGES.values(), (remove("checksums.json"), "checksums.json is missing")],
    ids=[*DAMAGES, "missing checksums"],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_restored(damage, words, whole, start, capsys):
    damage(whole / "checkpoints" / "2")
    check_restored(start(RunFolder.resume), 1)
    (noted,) = capsys.readouterr().err.splitlines()
    expected = (
        rf"te-jax: note: --out {whole} has a damaged checkpoint \(step 2: .*{words}\): the run goes on from step 1"
    )
    assert re.fullmatch(expected, noted), noted


def contents(folder):
    """Everything that is in a folder."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


resume_longer = functools.partial(RunFolder.resume, header=HEADER | {"options": {"steps": 12}})


@pytest.mark.parametrize("damage", ["flipped bytes", "missing item", "no step folder"])
def test_a_run_without_an_intact_checkpoint_is_refused_and_left_as_it_is(damage, whole, start):
    damage, words = DAMAGES[damage]
    for step in "12":
        damage(whole / "checkpoints" / step)
    (whole / "checkpoints" / "3.tmp" / "default").mkdir(parents=True)
    before = contents(whole)
    folder = start(resume_longer)
    found = rf"no intact checkpoint \(step 2: .*{words}; step 1: .*{words}\)"
    with pytest.raises(
        UserError, match=rf"{found}: start another run, or delete {whole}/checkpoints to begin this one"
    ):
        folder.restore(like_state())
    assert contents(whole) == before


def test_a_run_whose_checkpoints_were_deleted_begins_at_step_0(whole, start, capsys):
    shutil.rmtree(whole / "checkpoints")
    folder = start(RunFolder.resume)
    assert folder.latest_step == 0
    assert folder.records("train") == []
    assert not capsys.readouterr().err


@pytest.mark.parametrize("place", [0.001, 0.999])
def test_damage_anywhere_in_a_large_file_is_found(place, start):
    """Checksums are made of blocks of 4 MiB."""
    folder, state = start(), {"loss": jax.device_put(np.random.default_rng(0).random(2**21, np.float32))}
    for step in (1, 2):
        log(folder, [step])
        folder.save(step, state)
    path = largest_file(folder.path / "checkpoints" / "2")
    content = bytearray(path.read_bytes())
    assert len(content) > 6e6
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)
    folder.restore(like_state(state))
    assert folder.latest_step == 1


def test_a_step_that_was_damaged_is_written_again(whole, start):
    for _ in range(2):
        flip_bytes(whole / "checkpoints" / "2")
        folder = start(RunFolder.resume)
        folder.restore(like_state())
        log(folder, [2])
        folder.save(2, state_of(2))
        folder.close()
    check_restored(start(RunFolder.resume), 2)
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == ["1", "2", "2.damaged"]


def test_a_run_of_an_older_version_goes_on_with_a_word_that_it_is_not_verified(
    whole_of_an_older_version, start, capsys
):
    path = whole_of_an_older_version
    folder = start(RunFolder.resume)
    check_restored(folder, 2)
    words = "the checkpoint of step 2 has no checksums, so damage would go unnoticed"
    assert capsys.readouterr().err == f"te-jax: note: --out {path}: {words}\n"
    log(folder, [3])
    folder.save(3, state_of(3))
    folder.close()
    check_restored(start(RunFolder.resume), 3)
    assert not capsys.readouterr().err


# Orbax gives up at the first array that it cannot read and closes its event loop. Reads of other arrays that end after
# that find the loop closed, and Python reports their error as one that nobody could catch.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "damage", [truncate("default/_METADATA"), truncate("default/**/d/*")], ids=["metadata", "data"]
)
def test_what_cannot_be_read_of_an_older_version_is_passed_over(damage, whole_of_an_older_version, start, capsys):
    damage(whole_of_an_older_version / "checkpoints" / "2")
    check_restored(start(RunFolder.resume), 1)
    damaged, unverified = capsys.readouterr().err.splitlines()
    assert "has a damaged checkpoint (step 2: " in damaged
    assert "step 1 has no checksums" in unverified


def test_an_intact_checkpoint_that_does_not_fit_is_no_damage(whole, start):
    before = contents(whole)
    folder = start(resume_longer)
    with pytest.raises(
        UserError, match=r"checkpoints/2 is intact, but cannot be restored \(.*\): go on with the version"
    ):
        folder.restore({"another": jax.ShapeDtypeStruct((5,), np.float32)})
    assert folder.latest_step == 2
    assert contents(whole) == before


@pytest.mark.parametrize(("error", "told"), [(MemoryError(), MemoryError), (PermissionError(13, "no"), UserError)])
def test_what_is_not_damage_leaves_the_checkpoints_as_they_are(error, told, whole, start, monkeypatch):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr("orbax.checkpoint.Checkpointer.restore", fail)
    folder = start(RunFolder.resume)
    with pytest.raises(told):
        folder.restore(like_state())
    assert folder.latest_step == 2


def edit(*changes):
    """Replaces lines of a log, which are numbered from 1; a change to None removes the line."""

    def damage(path):
        lines = path.read_bytes().splitlines(keepends=True)
        for number, change in changes:
            lines[number - 1] = change(lines[number - 1])
        path.write_bytes(b"".join(lines))

    return damage


@pytest.mark.parametrize(
    ("damage", "words", "kept"),
    [
        ((2, lambda line: b"\0" * (len(line) - 1) + b"\n"), "line 2 is unreadable; 1 of 2 steps have no record", [2]),
        ((2, lambda _: b"\xff\xfe\n"), "line 2 is unreadable; 1 of 2 steps have no record", [2]),
        ((2, lambda line: line.replace(b"0.3", b"0.4")), "line 2 is unreadable; 1 of 2 steps have no record", [2]),
        ((2, lambda line: line.replace(b": 1,", b": 9,")), "line 2 is unreadable; 1 of 2 steps have no record", [2]),
        ((2, lambda line: line[:-1]), "line 2 is unreadable; 2 of 2 steps have no record", []),
        ((2, lambda _: b""), "1 of 2 steps have no record", [2]),
        ((3, lambda line: line[9:]), "line 3 is unreadable; 1 of 2 steps have no record", [1]),
        ((4, lambda line: line[9:]), "line 4 is unreadable", [1, 2]),
        # As an older version wrote it, without a checksum. Records behind a step that is too large are kept.
        ((2, lambda _: record(1).replace(b": 1,", b": 9,")), "1 of 2 steps have no record", [9, 2]),
    ],
    ids=[
        *("zeros", "bytes", "a loss", "a step", "joined", "missing", "of the checkpoint", "after it"),
        "a step of an older version",
    ],
)
def test_damaged_records_are_named_and_the_others_kept(damage, words, kept, whole, start, capsys):
    edit(damage)(whole / "log.jsonl")
    folder = start(RunFolder.resume)
    folder.restore(like_state())
    assert folder.latest_step == 2
    told = f"te-jax: note: --out {whole} has a damaged log ({words}): the other records are kept\n"
    assert capsys.readouterr().err == told
    assert [record["step"] for record in folder.records("train")] == kept
    log(folder, [3])
    assert [record["step"] for record in folder.records("train")] == [*kept, 3]


def record(step):
    """A line of the log as an older version wrote it."""
    return b'{"kind": "train", "step": %d, "loss": 0.5}\n' % step


NO_RECORDS = [
    b'{"kind": "train", "stdp": 2, "loss": 0.5}',
    b'{"kind": "train", "step": null, "loss": 0.5}',
    b'{"kind": "train", "step": "2", "loss": 0.5}',
    b'{"kind": "train", "step": true, "loss": 0.5}',
    b'{"kind": "train", "step": 2.0, "loss": 0.5}',
    b'{"kind": "train", "step": -2, "loss": 0.5}',
    b'{"kind": "train", "step": ' + b"9" * 5000 + b', "loss": 0.5}',
    b'{"kind": "train", "step": 2}',
    b'{"kind": "train", "step": 2, "loss": "0.5"}',
    b'{"kind": "train", "step": 2, "loss": 0.5, "optax_loss": null}',
    b'{"kind": "validation", "step": 2, "loss": []}',
    b'{"kind": "strain", "step": 2, "loss": 0.5}',
    b'{"kind": {}, "step": 2, "loss": 0.5}',
    b'{"kind": "header"}',
    b'{"kind": "header", "optionr": {}}',
    b'{"kind": "header", "options": []}',
    b'{"kind": "header", "options": null}',
    b'{"a":' * 3000,
]


def test_lines_that_are_no_records_are_damaged(whole, start, capsys):
    edit((3, lambda line: line + b"\n".join([*NO_RECORDS, line])))(whole / "log.jsonl")
    folder = start(RunFolder.resume)
    folder.restore(like_state())
    unreadable = "; ".join(f"line {number} is unreadable" for number in range(4, 4 + len(NO_RECORDS)))
    assert f"({unreadable})" in capsys.readouterr().err
    assert [record["step"] for record in folder.records("train")] == [1, 2, 2]
    folder.close()
    for line in NO_RECORDS:
        edit((1, lambda _, line=line: line + b"\n"))(whole / "log.jsonl")
        with pytest.raises(UserError, match="has lost its header"):
            start(RunFolder.resume)


@pytest.mark.parametrize(
    "damage",
    [
        edit((1, lambda line: line.replace(b": 9", b": 8"))),
        edit((1, lambda _: b"")),
        edit(*((number, lambda line: line[5:]) for number in range(1, 5))),
        lambda path: path.unlink(),
        lambda path: os.truncate(path, 0),
    ],
    ids=["flipped", "missing", "every line", "no log", "empty log"],
)
def test_a_run_that_has_lost_its_header_is_neither_resumed_nor_overwritten(damage, whole, start):
    damage(whole / "log.jsonl")
    with pytest.raises(UserError, match=r"log\.jsonl has lost its header, without which no run goes on: start another"):
        start(RunFolder.resume)
    with pytest.raises(UserError, match="already holds a run"):
        start()


# ------------------------------------------------------------------------------------------------------------- kills


def test_a_header_with_other_options_is_added_where_the_run_goes_on(whole, start):
    longer = HEADER | {"options": {"steps": 12}}
    folder = start(functools.partial(RunFolder.resume, header=longer))
    assert read_header(whole) == HEADER
    folder.restore(like_state())
    log(folder, [3])
    folder.close()
    assert read_header(whole) == longer
    shutil.rmtree(whole / "checkpoints" / "2" / "default")
    folder = start(functools.partial(RunFolder.resume, header=longer))
    folder.restore(like_state())
    assert read_header(whole) == longer  # although the former was cut off
    kinds = [json.loads(line)["kind"] for line in (whole / "log.jsonl").read_text().splitlines()]
    assert kinds == ["header", "train", "header"]


def test_the_two_latest_checkpoints_are_kept(start):
    folder = start()
    for step in range(1, 5):
        folder.save(step, state_of(step))
    assert sorted(path.name for path in (folder.path / "checkpoints").iterdir()) == ["3", "4"]


def test_a_checkpoint_is_written_while_training_goes_on(start):
    """And holds what the state was when it began, although that is donated."""
    folder, next_step = start(), jax.jit(lambda x: x + 1, donate_argnums=0)
    values = next_step(jax.device_put(np.zeros(1000, np.float32), may_alias=False))
    for step in (1, 2):
        folder.save_behind(step, {"loss": (values, jax.device_put(np.int32(step)))})
        values = next_step(values)
        log(folder, [step])
    folder.finish_saving()
    for step in (2, 1):
        assert folder.latest_step == step
        (restored, _) = folder.restore(like_state({"loss": (values, jax.device_put(np.int32(0)))}))["loss"]
        np.testing.assert_array_equal(restored, np.full(1000, step))
        shutil.rmtree(folder.path / "checkpoints" / str(step))


def test_a_torn_last_record_is_forgotten(start):
    folder = start()
    log(folder, [1, 2])
    folder.save(2, state_of(2))
    folder.close()
    path = folder.path / "log.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind": "train", "st')
    start(RunFolder.resume).restore(like_state())
    assert path.read_bytes() == whole


def test_an_unfinished_checkpoint_is_not_taken(start):
    folder = start()
    log(folder, [1, 2, 3])
    folder.save(1, state_of(1))
    for name in ("3.tmp", "3.orbax-checkpoint-tmp-0"):  # the latter of an older version
        (folder.path / "checkpoints" / name / "default").mkdir(parents=True)
    folder.close()
    folder = start(RunFolder.resume)
    assert folder.latest_step == 1
    folder.save(3, state_of(3))
    assert folder.latest_step == 3
    assert not (folder.path / "checkpoints" / "3.tmp").exists()


def test_a_torn_header_is_no_run(start, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").write_bytes(b'{"kind": "hea')
    with pytest.raises(UserError, match="holds no run"):
        start(RunFolder.resume)
    assert start().records("train") == []
    assert read_header(tmp_path / "run") == HEADER


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


def replace(path):
    shutil.copy(path / "log.jsonl", path / "new")
    os.replace(path / "new", path / "log.jsonl")


@pytest.mark.parametrize(
    ("change", "words", "saves"),
    [
        (replace, "was replaced by another file", False),
        (lambda path: (path / "log.jsonl").unlink(), "was moved or removed", False),
        (shutil.rmtree, "was moved or removed", False),
        (lambda path: os.truncate(path / "log.jsonl", 0), "was changed by another program", True),
    ],
    ids=["replaced", "removed", "folder removed", "truncated"],
)
def test_a_log_that_another_program_changes_ends_the_run(change, words, saves, start):
    folder = start()
    log(folder, [1, 2])
    folder.save(2, state_of(2))
    change(folder.path)
    if words == "was replaced by another file":  # no second run gets in beside it
        with pytest.raises(UserError, match="in use by another"):
            start(RunFolder.resume)
    with pytest.raises(UserError, match=rf"run/log\.jsonl {words} while the run went on, so the run stops: continue"):
        log(folder, [3])
    if not saves:  # what a checkpoint needs is there
        with pytest.raises(UserError, match=words):
            folder.save(3, state_of(3))
        with pytest.raises(UserError, match=words):
            folder.records("train")


# ----------------------------------------------------------------------------------------- what else is in the folder


def linked_folder(path):
    """A link to a folder with a file in it."""
    target = path.parent.parent / "elsewhere"
    target.mkdir(exist_ok=True)
    (target / "file").touch()
    path.symlink_to(target)
    return target / "file"


NAMES = ["notes.txt", "x.tmp", "007", "٣", "03.tmp", "-1", "3.damaged", "3.orbax"]


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, linked_folder], ids=["file", "folder", "link"])
def test_entries_of_other_names_are_left_alone(make, whole, start, capsys):
    for name in NAMES:
        make(whole / "checkpoints" / name)
    (whole / "checkpoints" / "2" / "default" / ".DS_Store").touch()
    folder = start(RunFolder.resume)
    check_restored(folder, 2)
    assert not capsys.readouterr().err
    folder.save(3, state_of(3))
    assert {path.name for path in (whole / "checkpoints").iterdir()} == {"2", "3", *NAMES}


def test_a_checkpoint_may_be_a_link(whole, start):
    """On a larger disk, for example."""
    entries = whole / "checkpoints"
    for step in "12":
        (entries / step).rename(whole.parent / step)
        (entries / step).symlink_to(whole.parent / step)
    folder = start(RunFolder.resume)
    check_restored(folder, 2)
    folder.save(3, state_of(3))
    assert {path.name for path in entries.iterdir()} == {"2", "3"}
    assert (whole.parent / "1" / "default").exists()


def test_a_disk_that_is_full_is_one_sentence(start, tmp_path, caplog, capfd):
    folder = start()
    log(folder, [1])
    folder.save(1, state_of(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    wide = {f"loss {i}": jax.device_put(np.random.default_rng(i).random(50_000)) for i in range(5)}
    words = f"--out {tmp_path / 'run'} cannot be written: {os.strerror(errno.EFBIG)}"
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        with pytest.raises(UserError, match=words):
            folder.save(2, wide)
        folder.save_behind(2, wide)
        with pytest.raises(UserError, match=words):
            folder.finish_saving()
        with pytest.raises(UserError, match=words):
            folder.append({"kind": "train", "step": 2, "loss": "x" * 30_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    folder.close()
    gc.collect()
    assert (caplog.records, capfd.readouterr().err) == ([], "")
    assert [path.name for path in (folder.path / "checkpoints").iterdir()] == ["1"]
    assert start(RunFolder.resume).latest_step == 1
