"""Text: what is read, what is held out, which windows a step sees."""

import os
import re
import sys
import types
from pydoc_data.topics import topics

import numpy as np
import pytest

from te_jax.cli import _text
from te_jax.cli._text import Tokens
from te_jax.cli.errors import UserError


def test_the_default_is_the_language_reference_with_every_paragraph_once():
    text = _text.load(None).tokens.ids.tobytes().decode()
    paragraphs = text.split("\n\n")
    assert len(paragraphs) == len(set(paragraphs))
    assert set(paragraphs) == {part.strip("\n") for topic in topics.values() for part in topic.split("\n\n")}
    assert text.startswith(topics["assert"].split("\n\n")[0])


def test_a_file_is_read_byte_for_byte(tmp_path):
    path = tmp_path / "poem.txt"
    path.write_bytes("Über allen Gipfeln\r\nist Ruh".encode())
    corpus = _text.load(str(path))
    assert corpus.tokens.ids.tobytes() == path.read_bytes()
    assert corpus.tokens.ids.dtype == np.uint8
    assert corpus.source == str(path)


def test_a_folder_is_its_text_files_in_order_of_their_paths(tmp_path):
    for name, data in {
        "b.txt": b"second",
        "a/z.md": b"first",
        "c.bin": b"\x00\x01",
        "d.latin": b"\xff\xfe",
        "e.txt": b"",
        ".git/config": b"hidden",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    os.mkfifo(tmp_path / "pipe")
    assert _text.load(str(tmp_path)).tokens.ids.tobytes() == b"first\n\nsecond"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"chat.jsonl": '{"messages": []}\n{"messages": []}\n'}, "chat.jsonl is data and not plain text"),
        ({"chat": '\n{"text": "one"}\n{"text": "two"}\n'}, "chat is data and not plain text"),
        ({"table.CSV": "a,b\n1,2\n"}, "table.CSV is data and not plain text"),
        ({"a.txt": "one", "b.json": "[1,\n2]"}, "with files such as b.json, is data and not plain text"),
        ({"poem.txt": "{once\nupon}"}, ""),
        ({"[": "[1] A reference."}, ""),
        ({"a.py": "a long program", "b.json": "{}"}, ""),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_note_says_that_data_is_no_plain_text(files, words, tmp_path, capsys):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    _text.load(str(tmp_path / name if len(files) == 1 else tmp_path))
    note = capsys.readouterr().err
    assert words in note
    assert note.count("\n") == bool(words)


def documents_of(corpus):
    return np.split(corpus.tokens.ids, np.flatnonzero(corpus.tokens.begins)[1:])


def test_packed_files_are_documents_that_end_with_what_is_between_them(tmp_path):
    for name, text in {"a": "one", "b": "Über", "c": "three"}.items():
        (tmp_path / name).write_text(text)
    packed, plain = _text.load(str(tmp_path), pack=True), _text.load(str(tmp_path))
    found = [document.tobytes().decode() for document in documents_of(packed)]
    assert found == ["one\n\n", "Über\n\n", "three"]
    assert packed.tokens.ids.tobytes() == plain.tokens.ids.tobytes()
    assert plain.tokens.begins is None
    assert packed.sha256 != plain.sha256
    (tmp_path / "a").unlink()
    (tmp_path / "b").write_text("one\n\nÜber")
    fewer = _text.load(str(tmp_path), pack=True)
    assert fewer.tokens.ids.tobytes() == plain.tokens.ids.tobytes()
    assert fewer.sha256 != packed.sha256
    alone = _text.load(str(tmp_path / "b"), pack=True)
    assert [document.tobytes().decode() for document in documents_of(alone)] == ["one\n\nÜber"]


def test_no_token_of_a_tokenizer_crosses_from_a_packed_document_into_the_next(tmp_path, monkeypatch):
    for name, text in {"a": "one", "b": " two", "c": "-"}.items():
        (tmp_path / name).write_text(text)
    words = Words({"one": 7, "two": 8, "\n\n ": 1, "\n\n": 2, " ": 3, "\n\n-": 4, "-": 5, "\n": 6, "\n\n\n": 9})
    tokenizer = installed(monkeypatch, words)
    assert _text.load(str(tmp_path), tokenizer).tokens.ids.tolist() == [7, 1, 8, 4]
    found = _text.load(str(tmp_path), tokenizer, pack=True)
    assert [document.tolist() for document in documents_of(found)] == [[7, 2], [3, 8, 2], [5]]
    long = "one\n" * 2**17  # tokenized in pieces, between lines
    (tmp_path / "b").write_text(long)
    first, second, third = documents_of(_text.load(str(tmp_path), tokenizer, pack=True))
    assert [first.tolist(), second.tolist(), third.tolist()] == [[7, 2], [7, 6] * (2**17 - 1) + [7, 9], [5]]
    assert max(words.batches) > 3
    silent = types.SimpleNamespace(get_vocab=words.get_vocab, encode_batch=lambda texts, add_special_tokens: [
        types.SimpleNamespace(ids=[7] * (text != "-")) for text in texts
    ])  # fmt: skip
    found = _text.load(str(tmp_path), installed(monkeypatch, silent), pack=True)
    assert found.tokens.begins.sum() == 2  # the last document has no tokens


def test_the_window_with_the_most_documents_is_found(rng):
    for size, often, seq_len in [(40, 0.3, 7), (40, 0.05, 7), (40, 0.9, 1), (40, 0.5, 2), (9, 0.0, 9), (30, 1.0, 5)]:
        begins = rng.random(size) < often
        windows = np.lib.stride_tricks.sliding_window_view(begins, seq_len)
        assert _text.most_documents(begins, seq_len) == 1 + windows[:, 1:].sum(axis=1).max()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.write_bytes(b"text\x00text"), "is not UTF-8 text"),
        (lambda path: path.write_bytes(b"caf\xe9"), "is not UTF-8 text"),
        (lambda path: path.mkdir(), "without a text file"),
        (os.mkfifo, "neither a file nor a folder"),
        (lambda path: path.symlink_to("/proc/self/mem"), "cannot be read: Input/output error"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, make, words):
    path = tmp_path / "text"
    make(path)
    with pytest.raises(UserError, match=words):
        _text.load(str(path))


class Words:
    """In place of a tokenizer of the package: words and what lies between them, one token each."""

    def __init__(self, vocab):
        self.vocab = vocab
        self.batches = []

    def get_vocab(self, with_added_tokens):
        return self.vocab

    def encode_batch(self, texts, add_special_tokens):
        assert not add_special_tokens
        self.batches.append(len(texts))
        return [
            types.SimpleNamespace(ids=[self.vocab[word] for word in re.findall(r"\w+|\W+", text)]) for text in texts
        ]


def installed(monkeypatch, tokenizer):
    """Puts it in place of the package, and returns what te-jax makes of it."""
    package = types.SimpleNamespace(Tokenizer=types.SimpleNamespace(from_file=lambda path: tokenizer))
    monkeypatch.setitem(sys.modules, "tokenizers", package)
    return _text.Tokenizer("tokenizer.json")


@pytest.mark.parametrize(("largest", "dtype"), [(2**16 - 1, np.uint16), (2**16, np.uint32)])
def test_a_tokenizer_makes_tokens_of_text(largest, dtype, tmp_path, monkeypatch):
    tokenizer = installed(monkeypatch, Words({"one": 7, "two": largest, " ": 0, "\n": 3}))
    assert tokenizer.vocab_size == largest + 1
    path = tmp_path / "text"
    path.write_text("one two\none")
    corpus = _text.load(str(path), tokenizer)
    assert corpus.tokens.ids.dtype == dtype
    assert corpus.tokens.ids.tolist() == [7, 0, largest, 3, 7]
    path.write_text("two two\none")
    assert _text.load(str(path), tokenizer).sha256 != corpus.sha256
    path.write_text("two")
    with pytest.raises(UserError, match="has 1 tokens and --seq-len 9 needs"):
        _text.split(_text.load(str(path), tokenizer), 9)


def test_a_tokenizer_that_cannot_be_read_is_refused(monkeypatch):
    def from_file(path):
        raise Exception("expected value at line 1 column 1")

    package = types.SimpleNamespace(Tokenizer=types.SimpleNamespace(from_file=from_file))
    monkeypatch.setitem(sys.modules, "tokenizers", package)
    with pytest.raises(UserError, match=r"^tokenizer\.json cannot be read as a tokenizer: .*: expected value at"):
        _text.Tokenizer("tokenizer.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # as if it were not installed
    with pytest.raises(UserError, match=r"^tokenizer\.json is read by the package tokenizers: pip install tokenizers"):
        _text.Tokenizer("tokenizer.json")


def corpus_of(size):
    ids = np.arange(size).astype(np.uint8)
    return _text.Corpus(Tokens(ids, ids % 7 == 0), "text", "")


@pytest.mark.parametrize(("size", "seq_len", "held_out"), [(1000, 9, 100), (1009, 9, 100), (50, 9, 10), (20, 9, 10)])
def test_a_tenth_and_at_least_one_window_is_held_out_at_the_end(size, seq_len, held_out):
    corpus = corpus_of(size)
    training, validation = _text.split(corpus, seq_len)
    assert validation.ids.size == held_out
    for whole, parts in zip(corpus.tokens, zip(training, validation, strict=True), strict=True):
        np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_a_text_without_room_for_two_windows_is_refused():
    with pytest.raises(UserError, match=r"has 19 bytes and --seq-len 9 needs at least 20"):
        _text.split(corpus_of(19), 9)


def training_windows(data, seq_len, **options):
    return _text.windows_at(data, _text.training_starts(data.size, seq_len=seq_len, **options), seq_len)


def test_training_windows_depend_on_seed_and_step_alone():
    data = np.random.default_rng().integers(0, 256, 500).astype(np.uint8)
    size = {"batch": 6, "seq_len": 20}
    windows = training_windows(data, seed=3, step=41, **size)
    assert windows.shape == (6, 21)
    for window in windows:
        assert window.tobytes() in data.tobytes()
    np.testing.assert_array_equal(windows, training_windows(data, seed=3, step=41, **size))
    assert (windows != training_windows(data, seed=3, step=42, **size)).any()
    assert (windows != training_windows(data, seed=4, step=41, **size)).any()
    assert (windows != training_windows(data, seed=4, step=40, **size)).any()


def test_training_windows_reach_both_ends():
    data = np.arange(12, dtype=np.uint8)
    windows = training_windows(data, seed=0, step=1, batch=200, seq_len=9)
    assert set(windows[:, 0]) == {0, 1, 2}
    exact = training_windows(data[:10], seed=0, step=1, batch=2, seq_len=9)
    np.testing.assert_array_equal(exact, [data[:10]] * 2)


def test_evaluation_windows_spread_from_end_to_end():
    data = np.arange(200, dtype=np.uint8)
    windows = _text.windows_at(data, _text.evaluation_starts(data.size, count=5, seq_len=10), 10)
    assert windows.shape == (5, 11)
    assert windows[0, 0] == 0
    assert windows[-1, -1] == 199
    assert (np.diff(windows[:, 0].astype(int)) > 40).all()
    np.testing.assert_array_equal(_text.evaluation_starts(11, count=3, seq_len=10), [0, 0, 0])
