"""`te-jax train` in several processes: what one learns, agreed decisions, and an end together."""

import contextlib
import errno
import functools
import json
import os
import random
import re
import shutil
import signal
import socket
import threading
import time
from types import SimpleNamespace

import numpy as np
import orbax.checkpoint
import pytest
from processes import finish, start
from runs import SMALL, losses, records, train_slowly, without_last_checkpoint

from te_jax.cli import _processes, _text, _watchdog
from te_jax.cli._run_folder import RunFolder, RunShare
from te_jax.cli.errors import UserError
from te_jax.cli.main import main

ARGV = ["train", *SMALL, "--eval-every", "10", "--checkpoint-every", "10", "--devices", "4", "--dtype", "float32"]
REAL = [*ARGV, "--steps", "12", "--pack"]
LONG = [*ARGV, "--steps", "5000"]  # of train_slowly: nobody waits for its end


def process_of_two(index, port, before=None):
    os.environ |= {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": str(index),
    }
    if before is not None:
        before()


def start_two(argv, folder, before=(None, None)):
    """Two processes, and the files with what each shows."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir(exist_ok=True)
    shown = [folder / f"shown {index}" for index in range(2)]
    return [
        start(argv[index] if isinstance(argv, tuple) else argv, shown[index],
              functools.partial(process_of_two, index, port, before[index]))
        for index in range(2)
    ], shown  # fmt: skip


def wait_for(condition, processes, seconds=60, pause=0.05):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        assert all(process.is_alive() for process in processes)
        time.sleep(pause)


def end_of(processes, seconds):
    """Exit codes of processes that end within seconds."""
    until = time.monotonic() + seconds
    for process in processes:
        process.join(max(0, until - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def told(shown):
    """What is said of an end, in the order of the processes."""
    return [line for each in shown for line in each.read_text().splitlines() if line.startswith("te-jax: ")]


def latest_step(out):
    with contextlib.suppress(FileNotFoundError):
        return max((int(path.name) for path in (out / "checkpoints").glob("*[0-9]")), default=0)
    return 0


# ------------------------------------------------------------------------------------------------------------ losses


@pytest.fixture(scope="module")
def in_one(tmp_path_factory):
    out = tmp_path_factory.mktemp("one") / "run"
    process = start([*REAL, "--out", str(out)], out.parent / "shown")
    finish(process, out.parent / "shown")
    return out


@pytest.fixture(scope="module")
def in_two(tmp_path_factory):
    out = tmp_path_factory.mktemp("two") / "run"
    processes, shown = start_two([*REAL, "--out", str(out)], out.parent)
    for process, each in zip(processes, shown, strict=True):
        finish(process, each)
    return out


@pytest.mark.slow
def test_two_processes_learn_what_one_does(in_one, in_two):
    np.testing.assert_allclose(losses(in_two), losses(in_one), rtol=0, atol=1e-6)
    assert [record["step"] for record in records(in_two, "train")] == list(range(1, 13))
    assert "12 steps in" in (in_two.parent / "shown 0").read_text()
    assert "step" not in (in_two.parent / "shown 1").read_text()
    assert {path.name for path in in_two.iterdir()} == {"log.jsonl", "checkpoints", "loss.png"}
    assert {path.name for path in (in_two / "checkpoints").iterdir()} == {"10", "12"}
    written = json.loads((in_two / "checkpoints" / "12" / "checksums.json").read_text())
    assert any(name.startswith("ocdbt.process_1/") for name in written)


@pytest.mark.slow
@pytest.mark.usefixtures("as_in_a_process_of_its_own")
def test_one_process_goes_on_where_two_stopped(in_two, tmp_path, require_devices):
    require_devices(4)
    out = without_last_checkpoint(in_two, tmp_path / "run")
    assert main(["train", "--resume", "--out", str(out)]) == 0
    np.testing.assert_allclose(losses(out), losses(in_two), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_two_processes_go_on_where_one_stopped(in_one, tmp_path):
    """On fewer devices, and both from the last intact checkpoint."""
    out = shutil.copytree(in_one, tmp_path / "run")
    os.truncate(out / "checkpoints" / "12" / "default" / "manifest.ocdbt", 1)
    argv = ["train", "--resume", "--out", str(out), "--devices", "2"]
    processes, shown = start_two(argv, tmp_path)
    for process, each in zip(processes, shown, strict=True):
        finish(process, each)
    assert told(shown)[-1].startswith(f"te-jax: note: --out {out} has a damaged checkpoint ")
    np.testing.assert_allclose(losses(out), losses(in_one), rtol=0, atol=1e-6)


# -------------------------------------------------------------------------------------------------------------- ends


@pytest.mark.slow
@pytest.mark.parametrize("receivers", [[1], [0, 1]])
def test_a_signal_to_any_process_saves_and_ends_both(receivers, tmp_path):
    out = tmp_path / "run"
    processes, shown = start_two([*LONG, "--out", str(out)], tmp_path, (train_slowly, train_slowly))
    wait_for(lambda: latest_step(out) >= 10, processes)
    for receiver in receivers:
        os.kill(processes[receiver].pid, signal.SIGTERM)
    assert end_of(processes, 20) == [143, 143]
    step = records(out, "train")[-1]["step"]
    assert latest_step(out) == step
    assert told(shown)[-1].startswith(f"te-jax: SIGTERM: step {step} of 5000 is saved; continue with te-jax train ")
    assert len(told(shown)) == 1 + (0 in receivers)  # that it saves says only the first


def hang_at_step_3(*, hangs):
    """Behind the compiled steps none may take longer than three seconds. A process that hangs has no third."""
    progressed, training_starts = _watchdog.Watchdog.progressed, _text.training_starts

    def watched(self, step):
        progressed(self, step)
        self._seconds = 3 if step >= 2 else self._seconds

    def starts(*args, step, **options):
        if step == 3:
            threading.Event().wait()
        return training_starts(*args, step=step, **options)

    _watchdog._LOOKS_S = 0.3
    _watchdog.Watchdog.progressed = watched
    _text.training_starts = starts if hangs else training_starts


def test_a_watchdog_waits_for_the_next_step_and_names_who_is_behind(monkeypatch):
    """Of 40 seconds a look is 5, and step 7 comes after 8 of them."""
    ended, looks = [], []

    def wait(pause):
        looks.append(pause)
        if len(looks) == 8:
            watchdog.progressed(7)
        return bool(ended)

    monkeypatch.setattr(_processes, "end", lambda *how: ended.append(how))
    monkeypatch.setattr(_processes, "told_steps", lambda: {0: 7, 1: 6, 2: 6})
    watchdog = _watchdog.Watchdog(0, 6, "go on")
    watchdog._seconds, watchdog._left = 40, SimpleNamespace(wait=wait)
    watchdog._look()
    assert looks == [5] * 16
    where = "processes 1, 2 of 3 are still at step 6"
    assert ended == [(75, f"no step after 7 for 40 s (--hang-timeout); {where}: go on")]


@pytest.mark.slow
@pytest.mark.parametrize("hanging", [0, 1])
def test_a_process_that_hangs_ends_all_and_is_named(hanging, tmp_path):
    out = tmp_path / "run"
    before = [functools.partial(hang_at_step_3, hangs=index == hanging) for index in (0, 1)]
    processes, shown = start_two([*LONG, "--out", str(out)], tmp_path, before)
    assert end_of(processes, 60) == [75, 75]
    (line,) = [line for line in told(shown) if "error" in line]
    way_out = f"continue with te-jax train --resume --out {out}"
    assert re.fullmatch(
        rf"te-jax: error: no step after \d+ for 3 s \(--hang-timeout\); process {hanging} of 2 is still at step [12]: "
        + re.escape(way_out),
        line,
    )


@pytest.mark.slow
def test_a_run_that_hangs_ends(tmp_path):
    shown = tmp_path / "shown"
    process = start([*LONG, "--out", str(tmp_path / "run")], shown, functools.partial(hang_at_step_3, hangs=True))
    assert end_of([process], 60) == [75]
    assert "te-jax: error: no step after 2 for 3 s (--hang-timeout): continue with te-jax train" in shown.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_ends_the_other_in_seconds(killed, tmp_path):
    out = tmp_path / "run"
    processes, shown = start_two([*LONG, "--out", str(out)], tmp_path, (train_slowly, train_slowly))
    wait_for(lambda: latest_step(out) >= 10, processes)
    processes[killed].kill()
    codes = end_of(processes, 30)
    assert codes[killed] == -signal.SIGKILL
    assert codes[1 - killed] not in (0, None)
    # Where its step waits for the other, JAX ends the process.
    assert re.search("te-jax: error: a step failed in process|another task died", shown[1 - killed].read_text())
    RunFolder.resume(out).close()


def fill_up():
    def save(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    train_slowly()
    orbax.checkpoint.AsyncCheckpointer.save = save


@pytest.mark.slow
def test_a_full_disk_ends_both_with_one_sentence(tmp_path):
    out = tmp_path / "run"
    processes, shown = start_two([*LONG, "--out", str(out)], tmp_path, (train_slowly, fill_up))
    assert end_of(processes, 60) == [2, 2]
    assert told(shown) == [f"te-jax: error: --out {out} cannot be written: {os.strerror(errno.ENOSPC)}"]


@pytest.mark.slow
def test_a_run_that_is_refused_ends_both_with_one_sentence(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {"kind": "header", "options": {}})
    processes, shown = start_two([*LONG, "--out", str(folder.path)], tmp_path)
    assert end_of(processes, 60) == [2, 2]
    assert told(shown) == [f"te-jax: error: --out {folder.path} is in use by another te-jax train"]
    folder.close()
    shutil.rmtree(folder.path)
    argv = [*LONG, "--out", str(folder.path)]
    processes, shown = start_two((argv, [*argv, "--seed", "1"]), tmp_path)
    assert end_of(processes, 60) == [2, 2]
    (line,) = told(shown)
    assert "process 1 has other values of options than process 0: start all with the same arguments" in line


@pytest.mark.slow
def test_a_run_killed_at_random_steps_ends_with_the_same_bits(tmp_path):
    """The run trains a toy. Models are resumed in test_train.py."""

    def begin(out, *argv):
        return start(["train", "--out", str(out), *argv], tmp_path / "shown", train_slowly)

    def kill_at(step, process):
        log = killed / "log.jsonl"
        wait_for(lambda: log.exists() and f'"step": {step},' in log.read_text(), [process], pause=0.001)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert log.read_bytes() != expected

    options = [*SMALL[:-1], "2", "--steps", "36", "--eval-every", "15", "--checkpoint-every", "12"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(begin(whole, *options), tmp_path / "shown")
    expected = (whole / "log.jsonl").read_bytes()
    before, after = random.randint(1, 11), random.randint(13, 30)
    print("killed at", before, "and", after)  # pytest shows it if the test fails
    kill_at(before, begin(killed, *options))
    kill_at(after, begin(killed, "--resume"))
    finish(begin(killed, "--resume"), tmp_path / "shown")
    assert (killed / "log.jsonl").read_bytes() == expected


def test_a_folder_that_another_host_does_not_see_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"does not see .*/run/log\.jsonl, .*: --out must be on a file system that all"):
        RunShare(tmp_path / "run", 0)


# ------------------------------------------------------------------------------------------------------- environment

SRUN = {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"}
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
BY_HAND = {"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "0"}


@pytest.fixture
def environment(monkeypatch):
    for name in {**SRUN, **MPIRUN, **BY_HAND}:
        monkeypatch.delenv(name, raising=False)

    def set_all(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (1, 0)),
        (SRUN, (8, 3)),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, (1, 0)),  # a batch script
        (MPIRUN, (2, 1)),
        (BY_HAND, (4, 0)),
        (SRUN | MPIRUN | BY_HAND, (4, 0)),
        (MPIRUN | {"JAX_COORDINATOR_ADDRESS": "host:1"}, (2, 1)),
    ],
)
def test_the_environment_says_which_process_this_is(variables, expected, environment):
    environment(variables)
    assert _processes._from_environment() == expected


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "host:1"}, "set JAX_NUM_PROCESSES and JAX_PROCESS_ID as well"),
        (BY_HAND | {"JAX_PROCESS_ID": "4"}, "JAX_NUM_PROCESSES is 4, JAX_PROCESS_ID is 4: they must be"),
        (BY_HAND | {"JAX_PROCESS_ID": "-1"}, "JAX_PROCESS_ID is -1"),
        (BY_HAND | {"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES is two"),
    ],
)
def test_an_environment_without_sense_is_refused(variables, words, environment):
    environment(variables)
    with pytest.raises(UserError, match=words):
        _processes._from_environment()


class Store:
    """Of `jax.distributed`, in which the other processes have written."""

    def __init__(self, values):
        self.values = values

    def key_value_set(self, key, value):
        self.values[key] = value

    def blocking_key_value_get(self, key, timeout_in_ms):
        return self.values[key]


@pytest.mark.parametrize(
    ("visible", "index", "expected"),
    [
        (["a b c d"] * 2, 0, "0,1"),
        (["a b c d"] * 2, 1, "2,3"),
        (["a b", "c d", "a b", "c d"], 3, "1"),  # two hosts
        (["a", "b"], 1, None),  # one GPU each
        (["a b", "c d"], 1, None),
        (["", ""], 1, None),  # CPUs
    ],
)
def test_processes_divide_the_gpus_that_they_share(visible, index, expected, monkeypatch):
    chosen = visible_devices_after_division(visible, index, monkeypatch)
    assert chosen == ([] if expected is None else [("jax_cuda_visible_devices", expected)])


def visible_devices_after_division(visible, index, monkeypatch):
    chosen = []
    store = Store({f"te_jax/gpus/{each}": gpus for each, gpus in enumerate(visible)})
    monkeypatch.setattr(_processes, "_count", len(visible))
    monkeypatch.setattr(_processes, "_index", index)
    monkeypatch.setattr(_processes, "_store", lambda: store)
    monkeypatch.setattr(_processes, "_visible_gpus", lambda: visible[index])
    monkeypatch.setattr("jax.config.update", lambda *option: chosen.append(option))
    _processes._divide_gpus()
    return chosen


def test_gpus_that_processes_cannot_divide_are_refused(monkeypatch):
    with pytest.raises(UserError, match="3 processes share 4 GPUs, which they cannot divide: start another number"):
        visible_devices_after_division(["a b c d"] * 3, 0, monkeypatch)
