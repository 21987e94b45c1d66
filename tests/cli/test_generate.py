"""`te-jax generate`, and paths of all commands: what cannot be read is one sentence and status 2."""

import dataclasses
import io
import json
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from runs import plan_of

from te_jax import models, ops
from te_jax.cli import _step, _trained, main, train
from te_jax.layers import Router
from te_jax.quantized import QuantizedArray
from te_jax.recipe import BlockScaling

pytestmark = pytest.mark.usefixtures("as_in_a_process_of_its_own")

CONFIG = models.DecoderConfig(
    vocab_size=256, num_layers=1, hidden_size=16, num_heads=1, num_kv_heads=1, head_dim=16, mlp_size=16
)
LONG = "a" * 300


def in_blocks(folder):
    """A model of bytes whose kernels are in FP8, and its parameters. Quantizing them again would change their codes."""
    params = jax.jit(models.init, static_argnums=0)(CONFIG, jax.random.key(0))
    for name in models.config.ATTENTION + models.config.MLP:
        array = ops.quantize(params["layers"][0][name], BlockScaling().quantization("kernel"), copies="transposed")
        smaller = (array.transposed.astype("float32") / 1.9).astype("float8_e4m3fn")
        params["layers"][0][name] = dataclasses.replace(array, transposed=smaller)
    models.to_hf(folder, CONFIG, params)
    return params


def is_quantized(leaf):
    return isinstance(leaf, QuantizedArray)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of bytes."""
    path = tmp_path_factory.mktemp("hf") / "bytes"
    shapes = jax.eval_shape(lambda: models.init(CONFIG, jax.random.key(0)))
    models.to_hf(path, CONFIG, jax.tree.map(lambda shape: np.zeros(shape.shape, shape.dtype), shapes))
    return str(path)


def refused(argv, capsys):
    assert main.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("te-jax: error: ").rstrip("\n")


UNREAD = "the text to continue cannot be read from stdin: Is a directory"
NO_UTF8 = "the text to continue is not UTF-8: convert it, for example with iconv"


def unreadable():
    raise IsADirectoryError(21, "Is a directory")


@pytest.mark.parametrize(
    ("word", "stdin", "sentence"),
    [
        ("-", lambda: None, "the text to continue is empty: give at least one character"),
        ("-", lambda: io.TextIOWrapper(io.BytesIO(b"caf\xe9"), "utf-8"), NO_UTF8),
        ("-", lambda: SimpleNamespace(read=unreadable, close=lambda: None), UNREAD),
        ("caf\udce9", io.StringIO, NO_UTF8),
    ],
    ids=["closed", "latin-1", "folder", "word"],
)
def test_a_text_that_cannot_be_read_is_refused(word, stdin, sentence, folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", stdin())
    assert refused(["generate", word, "--from", folder], capsys) == sentence
    sys.stdin.close()


def test_each_token_is_drawn_by_itself_and_repeats_with_the_seed(folder, capfdbinary):
    """A model whose logits are the same for all bytes."""

    def drawn(*words):
        argv = ["generate", "x", "--from", folder, "--max-new-tokens", "8", "--temperature", "1", *words]
        assert main.main(argv) == 0
        return capfdbinary.readouterr().out

    found = drawn()
    assert len(set(found.decode().removeprefix("x").rstrip("\n"))) > 3
    assert drawn() == found
    assert drawn("--seed", "1") != found


def test_kernels_in_fp8_stay_so(tmp_path, capfdbinary):
    """Beside adapters, too, whose training has both copies, by the bytes of the folder."""
    params = in_blocks(tmp_path / "blocks")
    trained = _trained.of_folder(tmp_path / "blocks", "float32", keep_fp8=True)
    for found, wanted in zip(jax.tree.leaves(trained.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert main.main(["generate", "x", "--from", str(tmp_path / "blocks"), "--max-new-tokens", "4"]) == 0
    config = dataclasses.replace(CONFIG, recipe=BlockScaling())
    tokens = np.asarray(models.generate(params, np.array([[ord("x")]]), config, max_new_tokens=4))
    text = bytes([ord("x"), *tokens[0].tolist()]).decode(errors="replace")
    assert capfdbinary.readouterr().out.decode() == f"{text}\n"
    plain = _trained.of_folder(tmp_path / "blocks", "float32")  # adapters are merged with these
    assert plain.config.recipe is None
    assert not any(map(is_quantized, jax.tree.leaves(plain.params, is_leaf=is_quantized)))

    options = {"preset": "tiny", "from_": str(tmp_path / "blocks"), "lora": 2, "seq_len": 16, "batch": 4}
    for recipe, kept in (("block", True), ("current", False)):
        plan = plan_of(**options, recipe=recipe)
        frozen = train._first_state(_step.build_learner(plan, *plan.models), plan).frozen["layers"][0]
        for name in ("query", "out", "gate", "down"):
            codes = np.asarray(params["layers"][0][name].transposed)
            assert np.array_equal(frozen[name].transposed, codes) == kept
            assert np.array_equal(frozen[name].data, codes.T) == kept


@pytest.mark.parametrize("experts", [None, models.Experts(3, Router(top_k=2))], ids=["dense", "experts"])
def test_devices_that_share_a_model_continue_as_one(experts, tmp_path, capfdbinary):
    """Three experts are not divided by their number."""
    config = dataclasses.replace(models.PRESETS["nano"], num_layers=1, num_kv_heads=2, experts=experts)
    models.to_hf(tmp_path / "hf", config, jax.jit(models.init, static_argnums=0)(config, jax.random.key(0)))
    argv = ["generate", "x", "--from", str(tmp_path / "hf"), "--max-new-tokens", "6", "--dtype", "float32"]
    assert main.main(argv) == main.main([*argv, "--tp", "2"]) == 0
    alone, shared = capfdbinary.readouterr().out.splitlines()
    assert alone == shared
    for count, sentence in (("3", b"--tp is 3: parallel.size is 3: num_heads is 2, which"), ("99", b"--tp 99 is more")):
        assert main.main([*argv, "--tp", count]) == 2
        assert sentence in capfdbinary.readouterr().err


def test_prompts_of_a_file_are_lines_of_json_with_log_probabilities(folder, capsys, tmp_path):
    """A model whose logits are the same for all bytes. Batches of three, of which the last is not full."""
    (tmp_path / "prompts").write_text('one\n\n{"prompt": "three", "id": 3}\n')
    argv = ["generate", "--prompts", str(tmp_path / "prompts"), "--from", folder, "--samples", "2", "--batch", "3"]
    assert main.main([*argv, "--max-new-tokens", "4", "--temperature", "1"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(record["prompt"], record.get("id")) for record in records] == [("one", None)] * 2 + [("three", 3)] * 2
    assert len({tuple(record["tokens"]) for record in records}) == 4
    for record in records:
        assert record["text"] == bytes(record["tokens"]).decode(errors="replace")
        np.testing.assert_allclose(record["log_probs"], [-np.log(256)] * 4, rtol=1e-5)


@pytest.mark.parametrize(
    ("content", "words", "sentence"),
    [
        ("", [], " has no text to continue: write one a line"),
        ('{"text": 1}', [], 'is a JSON object without a text in "prompt"'),
        ("{", [], 'is a JSON object without a text in "prompt"'),
        ("x", ["y"], "give a text to continue, or --prompts FILE, and not both"),
        ("x", ["--batch", "0"], "--batch is 0: it must be at least 1"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(content, words, sentence, folder, capsys, tmp_path):
    (tmp_path / "prompts").write_text(content)
    argv = ["generate", *words, "--prompts", str(tmp_path / "prompts"), "--from", folder]
    assert refused(argv, capsys).endswith(sentence)


@pytest.mark.parametrize(("name", "why"), [("nowhere", "No such file or directory"), ("", "Is a directory")])
def test_a_file_of_prompts_that_is_none_is_refused(name, why, folder, capsys, tmp_path):
    argv = ["generate", "--prompts", str(tmp_path / name), "--from", folder]
    assert refused(argv, capsys) == f"--prompts {tmp_path / name} cannot be read: {why}"


def test_more_tokens_than_memory_has_room_for_are_refused(folder, capsys):
    argv = ["generate", "x", "--from", folder, "--max-new-tokens", "3000000000"]
    assert refused(argv, capsys).startswith("--max-new-tokens is 3000000000: keys and values of as many tokens take ")


@pytest.mark.parametrize(
    "argv",
    [
        ["generate", "x", "--run", ""],
        ["generate", "x", "--from", ""],
        ["export", "", "--run", "FOLDER"],
        ["export", "DIR", "--run", ""],
        ["train", "--out", ""],
        ["bench", "gemm", "--output", ""],
        ["bench", "gemm", "--profile", ""],
    ],
    ids=" ".join,
)
def test_an_empty_path_is_not_the_working_folder(argv, capsys):
    assert "is empty: give a path" in refused(argv, capsys)
    argv = [word or "caf\udce9" for word in argv]
    assert "is not UTF-8: give another path, or rename it" in refused(argv, capsys)


@pytest.mark.parametrize(
    "argv",
    [
        ["generate", "x", "--run", LONG],
        ["generate", "x", "--from", LONG],
        ["export", "DIR", "--run", LONG],
        ["train", "--from", LONG],
        ["train", "--text", LONG],
        ["train", "--out", LONG],
        ["train", "--resume", "--out", LONG],
        ["bench", "gemm", "--output", LONG],
    ],
    ids=lambda argv: " ".join(word for word in argv if word != LONG),
)
def test_a_path_that_is_too_long_is_refused(argv, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sentence = refused(argv, capsys)
    assert LONG in sentence
    assert "File name too long" in sentence
    assert ("--out " in sentence) == ("--out" in argv)
