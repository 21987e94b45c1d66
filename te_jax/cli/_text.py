"""Text as tokens: where it is read from, what is held out, and which windows a step sees."""

import hashlib
import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from te_jax._core.terminal import reason_of
from te_jax.cli.errors import UserError, note

__all__ = [
    "DEFAULT_TEXT",
    "Corpus",
    "Tokenizer",
    "Tokens",
    "evaluation_starts",
    "load",
    "most_documents",
    "split",
    "training_starts",
    "windows_at",
]

DEFAULT_TEXT = "pydoc_data.topics"
"""Name under which a run records that it read the language reference that ships with CPython."""

_BETWEEN = b"\n\n"  # documents, and paragraphs of the language reference
_HELD_OUT = 10  # one part in ten
_DATA = (".json", ".jsonl", ".ndjson", ".csv", ".tsv")
_PIECE = 2**18  # characters of a piece of text that is tokenized by itself
_PIECES = 64  # tokenized in parallel, and held in the tokenizer's own, large format


class Tokens(NamedTuple):
    """Tokens of a text, or of windows of it."""

    ids: Any  # integers: uint8 of bytes, or uint16 or uint32 of a tokenizer
    begins: Any = None  # bool: at which tokens a document begins; None without --pack


class Corpus(NamedTuple):
    """Text and where it came from."""

    tokens: Tokens  # [tokens]
    source: str  # the path, or DEFAULT_TEXT
    sha256: str  # of the tokens, and with --pack of where documents begin
    unit: str = "byte"  # what a token is called, in the singular


class Tokenizer:
    """A tokenizer in a file, as Hugging Face's package tokenizers writes it.

    Args:
      path: the file, usually called tokenizer.json.

    Raises:
      UserError: the package is not installed, or cannot read the file.
    """

    def __init__(self, path: str):
        try:
            tokenizers = importlib.import_module("tokenizers")
        except ImportError as error:
            raise UserError(f"{path} is read by the package tokenizers: pip install tokenizers") from error
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # the package raises plain `Exception`
            raise UserError(f"{path} cannot be read as a tokenizer: {reason_of(error)}") from error

    @property
    def vocab_size(self) -> int:
        """One more than the largest token."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def prompt(self, text: str) -> list[int]:
        """Tokens of a text, with the special ones that a model begins with."""
        return self._tokenizer.encode(text).ids

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return self._tokenizer.decode(list(tokens))

    def encode(self, documents: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of all documents, one after the other and without special ones, and their number in each.

        They are uint16, or uint32 where the vocabulary is larger.
        """
        pieces = [(number, piece) for number, document in enumerate(documents) for piece in _pieces(document)]
        dtype = np.uint16 if self.vocab_size <= 2**16 else np.uint32
        tokens, counts = [np.empty(0, dtype)], np.zeros(len(documents), np.int64)
        for first in range(0, len(pieces), _PIECES):
            batch = pieces[first : first + _PIECES]
            encoded = self._tokenizer.encode_batch([piece for _, piece in batch], add_special_tokens=False)
            for (number, _), piece in zip(batch, encoded, strict=True):
                tokens.append(np.asarray(piece.ids, dtype))
                counts[number] += len(piece.ids)
        return np.concatenate(tokens), counts


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        # Between lines, where few tokenizers have a token.
        newline = text.find("\n", start + _PIECE)
        end = len(text) if newline < 0 else newline + 1
        yield text[start:end]
        start = end


def load(source: str | None, tokenizer: Tokenizer | None = None, *, pack: bool = False) -> Corpus:
    """Reads a text file, or all text files below a folder in order of their paths, without hidden ones.

    None and `DEFAULT_TEXT` stand for the language reference that ships with CPython. Without a tokenizer each byte is a
    token. With `pack` it is known where documents begin, which are the files of a folder or the topics of the
    reference, and no token of a tokenizer crosses from one into the next.

    Raises:
      UserError: there is nothing there, or nothing that is UTF-8 text.
    """
    if source is None or source == DEFAULT_TEXT:
        source, documents = DEFAULT_TEXT, _language_reference()
    else:
        path = Path(source)
        try:
            source = str(path.resolve())
            texts = _read_folder(path) if path.is_dir() else {path: _read_file(path)}
        except OSError as error:
            raise UserError(f"--text {path} cannot be read: {error.strerror or error}") from error
        _note_data(path, texts)
        documents = list(texts.values())
    # What is between documents ends the former, so that the text is the same with and without `pack`.
    documents = [document + _BETWEEN for document in documents[:-1]] + documents[-1:]
    if not pack:
        documents = [b"".join(documents)]
    if tokenizer is None:
        ids, counts = np.frombuffer(b"".join(documents), np.uint8), list(map(len, documents))
    else:
        ids, counts = tokenizer.encode([document.decode() for document in documents])
    digest, begins = hashlib.sha256(ids.data), None
    if pack:
        begins = np.zeros(ids.size + 1, bool)
        begins[np.cumsum([0, *counts])] = True
        begins = begins[:-1]
        digest.update(begins.data)
    return Corpus(Tokens(ids, begins), source, digest.hexdigest(), "byte" if tokenizer is None else "token")


def most_documents(begins: np.ndarray, seq_len: int) -> int:
    """The number of documents in that window of seq_len tokens which has the most."""
    places = np.flatnonzero(begins[1:])
    within = np.searchsorted(places, places + seq_len - 1) - np.arange(places.size)
    return 1 + int(within.max(initial=0))


def split(corpus: Corpus, seq_len: int) -> tuple[Tokens, Tokens]:
    """The tokens to train on and those to validate on: the last tenth, and at least one window of seq_len + 1.

    Raises:
      UserError: the text has no room for a window of each.
    """
    size, window = corpus.tokens.ids.size, seq_len + 1
    if size < 2 * window:
        raise UserError(
            f"--text {corpus.source} has {size} {corpus.unit}s and --seq-len {seq_len} needs at least {2 * window}, "
            "one window to train on and one to validate on: give more text or a smaller --seq-len"
        )
    end = size - max(size // _HELD_OUT, window)
    return jax.tree.map(lambda x: x[:end], corpus.tokens), jax.tree.map(lambda x: x[end:], corpus.tokens)


def training_starts(size: int, *, seed: int, step: int, batch: int, seq_len: int) -> np.ndarray:
    """[batch]: where the windows of a step begin in `size` tokens, each in a uniformly random place.

    They follow from the arguments alone, so that a resumed run sees what it would have seen.
    """
    return np.random.default_rng([seed, step]).integers(0, size - seq_len, size=batch)


def evaluation_starts(size: int, *, count: int, seq_len: int) -> np.ndarray:
    """[count]: where windows begin that are evenly spread over `size` tokens, from the first to the last."""
    return np.linspace(0, size - seq_len - 1, count).astype(np.int64)


def windows_at(data: np.ndarray, starts: np.ndarray, seq_len: int) -> np.ndarray:
    """[..., seq_len + 1], in the dtype of data: the windows that begin at starts [...]."""
    return data[starts[..., None] + np.arange(seq_len + 1)]


def _language_reference() -> list[bytes]:
    try:
        from pydoc_data.topics import topics  # some Linux distributions leave it out
    except ImportError as error:
        raise UserError("this Python comes without pydoc_data: name a text to train on with --text") from error
    # Topics quote each other at length: each paragraph is kept once, lest what is held out be trained on elsewhere.
    documents, seen = [], set[str]()
    for topic in topics.values():
        paragraphs = dict.fromkeys(part.strip("\n") for part in topic.split("\n\n"))
        if new := [paragraph for paragraph in paragraphs if paragraph not in seen]:
            documents.append(_BETWEEN.join(paragraph.encode() for paragraph in new))
        seen |= paragraphs.keys()
    return documents


def _read_file(path: Path) -> bytes:
    if not path.exists():
        raise UserError(f"--text {path} does not exist")
    if not path.is_file():
        raise UserError(f"--text {path} is neither a file nor a folder")
    data = path.read_bytes()
    if not data:
        raise UserError(f"--text {path} is empty")
    if not _is_text(data):
        raise UserError(f"--text {path} is not UTF-8 text")
    return data


def _note_data(source: Path, texts: dict[Path, bytes]) -> None:
    """Says that texts which are mostly JSON or tables are read as they are."""
    data = {path: len(text) for path, text in texts.items() if path.suffix.lower() in _DATA or _is_json(text)}
    if 2 * sum(data.values()) > sum(map(len, texts.values())):
        what = source if source in data else f"{source}, with files such as {next(iter(data)).name},"
        note(
            f"--text {what} is data and not plain text: the model learns its names of fields, quotes and brackets as "
            "well. If you want the texts in it alone, write each to a .txt file of a folder, and name the folder"
        )


def _is_json(text: bytes) -> bool:
    """Whether the first line is a whole object or array of JSON."""
    line = text.lstrip().split(b"\n", 1)[0]
    try:
        return line[:1] in (b"{", b"[") and bool(json.loads(line))
    except (ValueError, RecursionError):
        return False


def _read_folder(folder: Path) -> dict[Path, bytes]:
    # A folder that cannot be listed raises here; rglob below would pass over it.
    next(folder.iterdir(), None)
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not _is_hidden(path.relative_to(folder)))
    texts = {path: data for path in paths if (data := path.read_bytes()) and _is_text(data)}
    if not texts:
        raise UserError(f"--text {folder} is a folder without a text file in it")
    return texts


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _is_text(data: bytes) -> bool:
    if b"\0" in data:
        return False
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
