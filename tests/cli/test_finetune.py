"""`te-jax train --from`, `generate` and `export`: from one folder of Hugging Face to another."""

import dataclasses
import functools
import json
import os
import shutil
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from runs import losses, records, without_last_checkpoint

from te_jax import models
from te_jax.cli import _checkpoints, _plan, train
from te_jax.cli._options import Options
from te_jax.cli._run_folder import StoredRun, read_header
from te_jax.cli.errors import DamagedError, UserError
from te_jax.cli.main import main
from te_jax.testing import relative_error

pytestmark = pytest.mark.usefixtures("as_in_a_process_of_its_own", "tokenizers")

MODEL = Path(__file__).parents[1] / "models" / "hf" / "llama_tied"
TOKENS = 64
ARGV = ["--seq-len", "16", "--batch", "4", "--steps", "6", "--checkpoint-every", "3", "--recipe", "block"]


class Bytes:
    """In place of a tokenizer of the package: each byte is a token, or a control character."""

    @classmethod
    def from_file(cls, path):
        assert path.endswith("tokenizer.json")
        return cls()

    def get_vocab(self, with_added_tokens):
        return {"last": TOKENS - 1}

    def encode(self, text):
        return types.SimpleNamespace(ids=[byte % TOKENS for byte in text.encode()])

    def encode_batch(self, texts, add_special_tokens):
        assert not add_special_tokens
        return [self.encode(text) for text in texts]

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


@pytest.fixture(scope="module")
def tokenizers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tokenizers", types.SimpleNamespace(Tokenizer=Bytes))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model in bfloat16, with a tokenizer."""
    path = shutil.copytree(MODEL, tmp_path_factory.mktemp("hf") / "small")
    (path / "tokenizer.json").write_text("{}")
    (path / "generation_config.json").write_text('{"eos_token_id": [10, 11]}')
    return path


@pytest.fixture(scope="module")
def capped(tmp_path_factory):
    """A model whose attention has a cap."""
    path = shutil.copytree(MODEL.parent / "gemma2", tmp_path_factory.mktemp("hf") / "capped")
    (path / "tokenizer.json").write_text("{}")
    return path


def trained(folder, out, *options):
    assert main(["train", "--from", str(folder), *ARGV, "--devices", "1", *options, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def all_parameters(folder, tmp_path_factory, as_in_a_process_of_its_own, tokenizers):
    return trained(folder, tmp_path_factory.mktemp("runs") / "all", "--learning-rate", "0.01")


@pytest.fixture(scope="module")
def adapters(folder, tmp_path_factory, as_in_a_process_of_its_own, tokenizers):
    return trained(folder, tmp_path_factory.mktemp("runs") / "lora", "--learning-rate", "0.01", "--lora", "2")


def exported(run, path, dtype="float32"):
    assert main(["export", str(path), "--run", str(run), "--dtype", dtype]) == 0
    return models.from_hf(path)[1]


def generated(capsys, *argv):
    capsys.readouterr()
    assert main(["generate", "The lambda", "--max-new-tokens", "8", *argv]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_run_begins_with_the_model_and_ends_as_one(folder, all_parameters, tmp_path, capsys):
    before, header = models.from_hf(folder)[1], read_header(all_parameters)
    assert header["model"]["num_parameters"] == models.config_from_hf(folder).num_parameters
    unmoved = trained(folder, tmp_path / "unmoved", "--learning-rate", "1e-30")
    after = exported(unmoved, tmp_path / "same", "bfloat16")
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert (tmp_path / "same" / "tokenizer.json").read_text() == "{}"
    assert losses(all_parameters)[0] == losses(unmoved)[0]
    assert losses(all_parameters)[-1] < losses(unmoved)[-1]
    # With bfloat16 parameters the other 16 bits of each weight come from the optimizer.
    options = ["--dtype", "bfloat16", "--parameters", "bfloat16", "--learning-rate", "1e-3"]
    in_halves = trained(folder, tmp_path / "halves", *options)
    whole, upper = (
        exported(in_halves, tmp_path / f"halves-{dtype}", dtype)["embedding"] for dtype in ("float32", "bfloat16")
    )
    np.testing.assert_array_equal(whole.astype("bfloat16").astype("float32"), upper)
    assert relative_error(upper, whole) > 1e-4
    exported(all_parameters, tmp_path / "new")
    assert main(["export", str(tmp_path / "new"), "--run", str(all_parameters)]) == 2
    assert "new already holds a model: choose another folder" in capsys.readouterr().err
    of_run = generated(capsys, "--run", str(all_parameters))
    assert of_run == generated(capsys, "--from", str(tmp_path / "new"))
    assert len(of_run) > len("The lambda\n")

    # A text ends where the model says so: here at its third token, which is then not shown.
    prompt, tokens = len("The lambda"), of_run.removesuffix("\n")
    (tmp_path / "new" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [63, ord(tokens[prompt + 2])]})
    )
    first = tokens.index(tokens[prompt + 2], prompt)
    assert generated(capsys, "--from", str(tmp_path / "new")) == tokens[:first] + "\n"


@pytest.mark.slow
def test_adapters_leave_the_model_as_it_is(folder, adapters, tmp_path):
    before, after = models.from_hf(folder)[1], exported(adapters, tmp_path / "merged")
    np.testing.assert_array_equal(after["embedding"], before["embedding"])
    for name in ("query", "down"):
        added = np.asarray(after["layers"][1][name] - before["layers"][1][name], np.float64)
        values = np.linalg.svd(added, compute_uv=False)
        assert values[1] > 1e-4 > 10 * values[2]
    assert losses(adapters)[-1] < losses(adapters)[0]


@pytest.mark.slow
def test_adapters_go_to_peft_and_back(folder, adapters, all_parameters, tmp_path, capsys):
    peft, run = tmp_path / "peft", str(adapters)
    assert main(["export", str(peft), "--run", run, "--adapters"]) == 0
    shape = dataclasses.replace(models.config_from_hf(folder), lora=models.Lora(2))
    assert f"{shape.num_parameters - models.config_from_hf(folder).num_parameters:,} parameters in float32" in (
        capsys.readouterr().out
    )
    assert generated(capsys, "--from", str(folder), "--lora", str(peft)) == generated(capsys, "--run", run)
    on = trained(folder, tmp_path / "on", "--lora", str(peft))
    assert losses(on)[0] == losses(adapters)[-1]
    assert read_header(on)["options"]["lora"] == str(peft)
    out = without_last_checkpoint(on, tmp_path / "killed")
    assert main(["train", "--resume", "--out", str(out)]) == 0
    assert records(out) == records(on)
    unmoved = trained(folder, tmp_path / "unmoved", "--lora", str(peft), "--learning-rate", "1e-30")
    assert main(["export", str(tmp_path / "again"), "--run", str(unmoved), "--adapters"]) == 0
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (peft / name).read_bytes()
    capsys.readouterr()
    assert main(["export", str(tmp_path / "none"), "--run", str(all_parameters), "--adapters"]) == 2
    assert f"--adapters: the run in {all_parameters} trained all parameters" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_of_adapters_that_was_stopped_ends_with_the_same_bits(adapters, tmp_path):
    out = without_last_checkpoint(adapters, tmp_path / "killed")
    assert main(["train", "--resume", "--out", str(out)]) == 0
    assert records(out) == records(adapters)


@pytest.mark.slow
def test_a_model_of_bytes_needs_no_tokenizer(tmp_path, capsys):
    run, folder = tmp_path / "run", str(tmp_path / "bytes")
    argv = ["--seq-len", "16", "--batch", "2", "--steps", "2", "--devices", "1"]
    assert main(["train", "--preset", "nano", *argv, "--out", str(run)]) == 0
    exported(run, folder)
    assert generated(capsys, "--from", folder) == generated(capsys, "--run", str(run))
    assert main(["train", "--from", folder, *argv, "--out", str(tmp_path / "on")]) == 0
    assert losses(tmp_path / "on")[0] < losses(run)[0]


def test_adapters_go_with_the_model_that_they_were_trained_beside(folder, tmp_path, capsys):
    base, run = shutil.copytree(folder, tmp_path / "base"), tmp_path / "run"
    argv = {"from_": str(base), "lora": 2, "seq_len": 16, "batch": 4, "devices": 1}
    plan, _ = _plan.decide(Options.of(argv))
    header = json.loads(json.dumps(train._header(plan)))
    run.mkdir()
    (run / "log.jsonl").write_text(json.dumps(header) + "\n")
    export = ["export", str(tmp_path / "new"), "--run", str(run)]
    resumed = functools.partial(_plan.decide, plan.options, StoredRun(run, header))
    resumed()
    assert main(export) == 2
    assert "run holds no checkpoint yet" in capsys.readouterr().err

    fields = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(fields | {"rms_norm_eps": 1e-3}))
    with pytest.raises(UserError, match=r"base holds a model of another shape than the run in .*run began with: give"):
        resumed()
    assert main(export) == 2
    assert "base holds another model than that beside which the run in" in capsys.readouterr().err
    (base / "config.json").write_text(json.dumps(fields))
    content = bytearray((base / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (base / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"base holds other weights than the run in .*run began with: give the folder"):
        resumed()
    assert main(export) == 2
    assert "base holds another model than that beside which the run in" in capsys.readouterr().err
    del header["model"]["base_sha256"]  # as older versions wrote it
    resumed()


def test_a_pipe_in_the_folder_of_a_run_is_not_waited_for(tmp_path):
    (tmp_path / "default").mkdir()
    for name in ("log.jsonl", "checksums.json"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=r"--run .* cannot be read: log.jsonl is no regular file"):
        read_header(tmp_path, "--run")
    with pytest.raises(DamagedError, match=r"checksums.json is unreadable"):
        _checkpoints._verify(tmp_path)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["train", "--from", "FOLDER", "--preset", "small"], "--from has a model, and --preset small names another"),
        (["train", "--lora", "4"], "--lora 4 trains adapters of a model that was trained before: add --from DIR"),
        (["train", "--from", "FOLDER", "--lora", "0"], "--lora is 0: it must be at least 1, or the folder"),
        (["train", "--from", "FOLDER", "--lora", "nowhere"], "nowhere/adapter_config.json cannot be read: No such"),
        (["generate", "x", "--from", "FOLDER", "--lora", "nowhere"], "nowhere/adapter_config.json cannot be read: No"),
        (["generate", "x", "--lora", "nowhere"], "--lora nowhere has adapters of a model of Hugging Face: add --from"),
        (["train", "--from", "FOLDER", "--lora", "2", "--tp", "2"], "--lora 2 does not go with --tp 2, since adapters"),
        (["train", "--from", "FOLDER", "--tp", "3"], "--tp 3 does not fit --from FOLDER: num_heads is 4"),
        (
            ["train", "--from", "CAPPED", "--cp", "2"],
            "--cp 2 does not fit --from CAPPED: config.softcaps.scores is 2.0",
        ),
        (["train", "--from", "org/name"], "org/name is no folder here: if it is a model of the hub, fetch it with `hf"),
        (["train", "--from", "nowhere"], "nowhere/config.json cannot be read: No such file"),
        (["generate", "x", "--from", "nowhere"], "nowhere/config.json cannot be read: No such file"),
        (["generate", "", "--from", "FOLDER"], "the text to continue is empty: give at least one character"),
        (["generate", "x", "--from", "FOLDER", "--max-new-tokens", "0"], "--max-new-tokens is 0: it needs to be"),
        (["generate", "x", "--from", "FOLDER", "--top-p", "0"], "--top-p is 0.0: it needs to be a number above 0"),
        (["generate", "x", "--from", "FOLDER", "--seed", "-1"], "--seed is -1: it must lie between 0 and 4294967295"),
        (["generate", "x", "--run", "nowhere"], "--run nowhere holds no run: name the --out of te-jax train"),
        (["export", "FOLDER", "--run", "nowhere"], "--run nowhere holds no run: name the --out of te-jax train"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_sentence(argv, sentence, folder, capped, capsys):
    folders = {"FOLDER": str(folder), "CAPPED": str(capped)}
    argv = [folders.get(word, word) for word in argv]
    assert main([*argv, *(["--devices", "2"] if {"--tp", "--cp"} & {*argv} else [])]) == 2
    error = capsys.readouterr().err
    assert error.startswith("te-jax: error: " + sentence.replace("FOLDER", str(folder)).replace("CAPPED", str(capped)))
    assert error.count("\n") == 1
