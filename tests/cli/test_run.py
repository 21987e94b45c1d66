"""The course of a run of `te-jax train`, which trains a toy: folders, signals, what is told, and how it goes on."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from runs import SMALL, records, refused

from te_jax.cli import _report
from te_jax.cli._run_folder import read_header
from te_jax.cli.main import main

pytestmark = pytest.mark.usefixtures("as_in_a_process_of_its_own")

ROOT = Path(__file__).resolve().parents[2]
ARGV = ["train", *SMALL, "--steps", "12", "--eval-every", "5", "--checkpoint-every", "7"]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def whole(toy, tmp_path):
    """A run that has ended."""
    assert main([*ARGV, "--out", str(tmp_path / "whole")]) == 0
    return tmp_path / "whole"


def told(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("te-jax: ")]


def log_of(out):
    return (out / "log.jsonl").read_bytes()


def edit_log(out, *changes):
    """As an older version wrote it, without checksums, and with these texts replaced."""
    text = re.sub(r', "crc32": \d+', "", (out / "log.jsonl").read_text())
    for before, after in changes:
        assert text.count(before) == 1
        text = text.replace(before, after)
    (out / "log.jsonl").write_text(text)


def resume(out, *options):
    return main(["train", "--resume", *options, "--out", str(out)])


# -------------------------------------------------------------------------------------------------------- how it begins


@pytest.mark.usefixtures("toy")
def test_each_run_has_a_fresh_folder_and_the_newest_is_resumed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "there is no runs/train-… here: name the folder of the run with --out" in refused(["--resume"], capsys)
    assert not (tmp_path / "runs").exists()
    short = ["train", *SMALL, "--steps", "1"]
    for seed in ("0", "1"):
        assert main([*short, "--seed", seed]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if line.startswith("run in")] == ["run in runs/train-001", "run in runs/train-002"]
    error = refused(["--resume", "--seed", "0"], capsys)
    assert "--seed is 0, but the run in runs/train-002 was started with 1" in error
    for name in ("009", "last"):
        (tmp_path / "runs" / f"train-{name}").mkdir()
    (tmp_path / "runs" / "train-010").touch()
    assert "--out runs/train-009 holds no run: leave --resume out" in refused(["--resume"], capsys)
    assert main(short) == 0
    assert "run in runs/train-011\n" in capsys.readouterr().out


def test_the_seed_is_that_of_parameters_and_of_data(whole, toy, out):
    assert main([*ARGV, "--seed", "7", "--out", str(out)]) == 0
    before, after = (records(run, "validation")[0]["loss"] for run in (whole, out))
    assert abs(after - before) > 1e-3
    toy.scale = 0.0  # what is left is data
    found = []
    for seed in ("0", "7"):
        path = out.with_name(seed)
        assert main([*ARGV, "--seed", seed, "--out", str(path)]) == 0
        found.append([record["loss"] for record in records(path, "train")])
    assert found[0][0] == found[1][0] == 0
    assert found[0][1] != found[1][1]


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(("before", "after"), [(None, "0"), ("1", "1")])
def test_gemms_are_tuned_unless_the_run_is_deterministic(before, after, out, monkeypatch):
    """A resumed run could otherwise choose others, with other bits. What the user has set stays."""

    def forget():
        monkeypatch.setenv("TE_JAX_AUTOTUNE", before or "")
        if before is None:
            monkeypatch.delenv("TE_JAX_AUTOTUNE")

    forget()
    assert main(["train", *SMALL, "--steps", "1", "--out", str(out)]) == 0
    assert os.environ.get("TE_JAX_AUTOTUNE") == before
    assert read_header(out)["options"]["deterministic"] is False
    for steps, words in (("2", ["--deterministic"]), ("3", [])):
        forget()
        assert resume(out, *words, "--steps", steps) == 0
        assert os.environ["TE_JAX_AUTOTUNE"] == after
        assert read_header(out)["options"]["deterministic"] is True


@pytest.mark.usefixtures("toy")
def test_a_batch_larger_than_a_validation_on_the_shortest_text(tmp_path, out):
    (tmp_path / "text").write_text("abcd")
    argv = ["--preset", "nano", "--steps", "1", "--batch", "65", "--seq-len", "1", "--devices", "1"]
    assert main(["train", "--text", str(tmp_path / "text"), *argv, "--out", str(out)]) == 0
    assert [record["step"] for record in records(out, "validation")] == [0, 1]


def test_missing_packages_are_named_as_the_extra_names_them(out, capsys, monkeypatch):
    monkeypatch.setattr("te_jax.cli.main.find_spec", lambda name: None)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [requirement.partition(">")[0] for requirement in project["optional-dependencies"]["train"]]
    names.remove("tokenizers")  # which --from and --tokenizer alone need
    error = refused(["--out", str(out)], capsys)
    assert error == f"te-jax: error: te-jax train needs {', '.join(names)}: pip install {' '.join(names)}\n"


# ---------------------------------------------------------------------------------------------------------- how it ends


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_step_and_says_how_to_continue(number, whole, toy, out, capsys):
    def step():
        if next(count) == 5:
            signal.raise_signal(number)
            time.sleep(0.1)  # another thread hears of it

    toy.step, count = step, itertools.count(1)
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    assert main([*ARGV, "--out", str(out)]) == 128 + number
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["5"]
    assert (out / "loss.png").exists()
    command = f"te-jax train --resume --out {out}"
    assert told(capsys) == [
        "te-jax: saving after this step; interrupt again to end at once",
        f"te-jax: {number.name}: step 5 of 12 is saved; continue with {command}",
    ]
    assert main(command.split()[1:]) == 0
    assert log_of(out) == log_of(whole)


@pytest.mark.parametrize(("at", "saved"), [(1, "no step"), (10, "step 7 of 12")])
def test_a_signal_that_ends_a_compiler_of_xla_too_is_no_traceback(at, saved, toy, out, capsys):
    def step():
        if next(count) == at:
            signal.raise_signal(signal.SIGINT)
            raise jax.errors.JaxRuntimeError("INTERNAL: ptxas exited with non-zero error code 2")

    toy.step, count = step, itertools.count(1)
    assert main([*ARGV, "--out", str(out)]) == 130
    reason = "JaxRuntimeError: INTERNAL: ptxas exited with non-zero error code 2"
    command = f"te-jax train --resume --out {out}"
    last = f"te-jax: SIGINT: stopped in a step ({reason}); {saved} is saved; continue with {command}"
    assert told(capsys)[-1] == last
    toy.step = lambda: None
    assert main(command.split()[1:]) == 0


def test_an_error_without_a_signal_keeps_its_traceback(toy, out):
    def step():
        raise jax.errors.JaxRuntimeError("INTERNAL")

    toy.step = step
    with pytest.raises(jax.errors.JaxRuntimeError):
        main([*ARGV, "--out", str(out)])


def test_a_second_interruption_ends_the_process_at_once_and_one_that_is_sent_twice_does_not():
    """While the main thread hears of nothing, as in a compilation of XLA."""
    program = (
        "import ctypes\n"
        "from te_jax.cli._interruption import watching\n"
        "with watching():\n"
        "    print('ready', flush=True)\n"
        "    while True: ctypes.CDLL(None).sleep(600)\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert "interrupt again to end at once" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        time.sleep(0.7)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 128 + signal.SIGINT


def test_a_device_that_is_out_of_memory_is_one_sentence_with_the_way_out(out, toy, capsys):
    toy.evaluate = lambda: jax.jit(lambda: jnp.ones((2**60,), "uint8"))()
    error = refused([*SMALL, "--out", str(out)], capsys)
    assert error.startswith("te-jax: error: --preset nano with --batch 4 and --seq-len 16 is out of memory (JaxRuntime")
    way_out = "or --remat, --optimizer-state fp8, --offload activations,optimizer, a larger --microbatches or --tp\n"
    assert error.endswith(f"choose a smaller --preset, --batch or --seq-len, {way_out}")


@pytest.mark.usefixtures("toy")
def test_a_host_that_is_out_of_memory_is_one_sentence(out, capsys):
    all_measures = ["--remat", "--optimizer-state", "fp8", "--offload", "activations,optimizer"]
    error = refused([*SMALL, "--batch", str(2**50), *all_measures, "--out", str(out)], capsys)
    assert "is out of memory (MemoryError: Unable to allocate " in error
    assert error.endswith("choose a smaller --preset, --batch or --seq-len, or a larger --microbatches or --tp\n")


@pytest.mark.parametrize(
    ("words", "end"),
    [
        ([], "at step 3: try a smaller --learning-rate\n"),
        (["--recipe", "block"], "--learning-rate; --resume --statistics 1 names the layer where it begins\n"),
        (["--head-recipe", "block", "--statistics", "5"], "--resume --statistics 1 names the layer where it begins\n"),
    ],
)
def test_a_loss_that_is_not_finite_ends_the_run(words, end, toy, out, capsys):
    toy.factor = 1e30
    error = refused([*SMALL, *words, "--out", str(out)], capsys)
    assert "the train loss is inf at step 3: try a smaller --learning-rate" in error
    assert error.endswith(end)


# ------------------------------------------------------------------------------------------------------- how it goes on


def test_a_longer_run_goes_on_where_the_shorter_one_ended(whole, capsys):
    shorter = log_of(whole)
    capsys.readouterr()
    assert resume(whole, "--steps", "17") == 0
    (note,) = told(capsys)
    words = "--steps changed from 12 to 17: the learning rate continues on the schedule of 17 steps"
    assert note == f"te-jax: note: {words}"
    assert [record["step"] for record in records(whole, "train")] == list(range(1, 18))
    assert log_of(whole).startswith(shorter)
    assert resume(whole) == 0  # which knows that it has become longer
    assert resume(whole, "--steps", "17") == 0
    assert not told(capsys)
    assert len(records(whole, "header")) == 2
    assert "--steps is 12, but the run" in refused(["--resume", "--steps", "12", "--out", str(whole)], capsys)
    assert "already holds a run" in refused([*SMALL, "--out", str(whole)], capsys)


def test_another_text_is_refused_and_the_same_one_goes_on(tmp_path, out, toy, capsys):
    (tmp_path / "text").write_text("All happy families are alike. " * 20)
    words = [*ARGV, "--text", str(tmp_path / "text"), "--out", str(out)]
    assert main(words) == 0
    assert main([*words, "--resume", "--checkpoint-every", "2", "--dtype", "auto"]) == 0
    (tmp_path / "text").write_text("Every unhappy family is unhappy in its own way. " * 20)
    assert "is not, or no longer, what the run" in refused(["--resume", "--out", str(out)], capsys)


@pytest.mark.usefixtures("toy")
def test_a_tokenizer_decides_the_vocabulary_and_its_tokens_are_compared(tmp_path, out, capsys, monkeypatch):
    class Letters:
        largest = 1000

        def __init__(self, path):
            self.shift = int(Path(path).read_text())

        def get_vocab(self, with_added_tokens):
            return {"z": self.largest}

        def encode_batch(self, texts, add_special_tokens):
            return [types.SimpleNamespace(ids=[ord(letter) % 97 + self.shift for letter in text]) for text in texts]

    package = types.SimpleNamespace(Tokenizer=types.SimpleNamespace(from_file=Letters))
    monkeypatch.setitem(sys.modules, "tokenizers", package)
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("3")
    argv = ["train", *SMALL, "--steps", "2", "--tokenizer", str(tokenizer), "--out", str(out)]
    assert main(argv) == 0
    assert " nats per token\n" in capsys.readouterr().out
    header = read_header(out)
    assert header["model"]["vocab_size"] == 1024
    assert header["text"].keys() == {"source", "tokens", "sha256"}
    again = ["--resume", "--steps", "3", "--out", str(out)]
    assert main(["train", *again]) == 0
    capsys.readouterr()
    tokenizer.write_text("4")
    assert f"with --tokenizer {tokenizer} is not, or no longer, what the run" in refused(again, capsys)
    tokenizer.write_text("3")
    Letters.largest = 2000
    error = refused(again, capsys)
    assert f"tokenizer.json needs a vocabulary of 2048, and the model of the run in {out} has 1024" in error


def test_other_software_is_noted_on_resuming(whole, capsys):
    header = read_header(whole)
    version, implementation = f'"jax": "{jax.__version__}"', header["implementation"]
    chosen = '"implementation": "{}", "parallel"'
    edit_log(whole, (version, '"jax": "0.1.0"'), (chosen.format(implementation), chosen.format("another")))
    assert resume(whole) == 0
    noted = capsys.readouterr().err
    assert "note: versions changed" in noted
    assert f"note: implementation changed from another to {implementation}: " in noted


def test_a_run_of_a_version_without_a_subject_of_the_header_goes_on(whole, capsys):
    edit_log(whole, ('"parallel"', '"parrallel"'))
    capsys.readouterr()
    assert resume(whole, "--steps", "13") == 0
    (noted,) = told(capsys)
    assert "--steps changed from 12 to 13" in noted


@pytest.mark.usefixtures("toy")
def test_a_record_that_has_lost_its_twin_is_left_out(out, capsys):
    assert main([*ARGV, "--compare", "--dtype", "float32", "--out", str(out)]) == 0
    (difference,) = re.findall("^difference.*$", capsys.readouterr().out, re.MULTILINE)
    *before, last = (out / "log.jsonl").read_text().splitlines()
    damaged = {key: value for key, value in json.loads(last).items() if key not in ("crc32", "optax_loss")}
    (out / "log.jsonl").write_text("\n".join([*before, json.dumps(damaged)]) + "\n")
    assert resume(out) == 0
    shown = re.findall("^difference.*$", capsys.readouterr().out, re.MULTILINE)
    assert len(shown) == 1  # by the validation before
    assert difference.split("%")[0] == shown[0].split("%")[0]


# -------------------------------------------------------------------------------------------------------- what it shows


def test_plot_draws_what_the_log_has_and_keeps_a_figure_that_is_newer(whole, capsys):
    capsys.readouterr()
    (whole / "loss.png").unlink()
    assert main(["plot", str(whole)]) == 0
    assert re.fullmatch(rf"te_jax +training .* nats per byte\n{whole}: loss.png\n", capsys.readouterr().out)
    drawn = (whole / "loss.png").stat().st_mtime_ns
    for newer in (False, True):
        os.utime(whole / "log.jsonl", ns=(drawn, drawn + newer))
        assert main(["plot", str(whole)]) == 0
        assert ((whole / "loss.png").stat().st_mtime_ns > drawn) == newer


def test_plot_of_no_run_and_of_one_without_a_step_is_one_sentence(whole, tmp_path, capsys):
    header = (whole / "log.jsonl").read_bytes().split(b"\n")[0]
    (tmp_path / "log.jsonl").write_bytes(header + b"\n")
    for folder, words in ((tmp_path, "has no losses yet"), (tmp_path / "none", "holds no run")):
        capsys.readouterr()
        assert main(["plot", str(folder)]) == 2
        assert words in capsys.readouterr().err


def test_tensorboard_gets_the_losses_of_the_log(toy, out, capsys, monkeypatch):
    written = []

    class SummaryWriter:
        def __init__(self, path, purge_step):
            written.append((path, purge_step))

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

        def close(self):
            written.append("closed")

    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=SummaryWriter))
    assert main([*ARGV, "--tensorboard", "--out", str(out)]) == 0
    losses = [(f"{each['kind']}/loss", each["loss"], each["step"]) for each in records(out, "train", "validation")]
    assert written == [(str(out / "tensorboard"), 1), *losses, "closed"]
    for name in ("tensorboardX", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    error = refused([*SMALL, "--tensorboard", "--out", str(out / "another")], capsys)
    assert error == "te-jax: error: --tensorboard needs the package tensorboardX: pip install tensorboardX\n"
    assert not (out / "another").exists()


@pytest.mark.parametrize(("every", "steps"), [("1", range(8)), ("3", (0, 3, 6, 7))])
def test_only_steps_are_timed(every, steps, out, capsys, toy, monkeypatch):
    """By a clock on which a step takes a second, the compiler five, and a validation a hundred."""

    def takes(*seconds):
        def pass_time(*_):
            clock[0] += next(durations)

        durations = itertools.chain(seconds, itertools.repeat(seconds[-1]))
        return pass_time

    clock = [0.0]
    toy.step, toy.evaluate = takes(5, 1), takes(100)
    monkeypatch.setattr(_report.time, "perf_counter", lambda: clock[0])
    argv = ["train", *SMALL, "--steps", "7", "--eval-every", every, "--checkpoint-every", "4", "--out", str(out)]
    assert main(argv) == 0
    shown = [line.split(" · ") for line in capsys.readouterr().out.splitlines() if " · validation " in line]
    assert [words[0] for words in shown] == [f"step {step}" for step in steps]
    for (_, _, *speed, _), step in zip(shown, steps, strict=True):
        # 4 windows of 16 bytes in a second, which the second step is the first to show.
        assert speed == ([] if step < 2 else ["64 tokens/s"])
