"""The text of `benchmarks.accuracy`, made of documentation on GitHub, and a tokenizer for it.

    pip install tokenizers
    python -m benchmarks.accuracy_text FOLDER    # text.txt and tokenizer.json; downloads about 1 GB by git

Repositories are read at fixed commits, so that the text is the same every time. A paragraph of 80 characters or more is
kept where it comes first, and then documents of 6000 or more. They follow each other in the order of their hashes, so
that the last tenth, which `te-jax train` holds out, is like the rest.
"""

import argparse
import hashlib
import io
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import check_call, check_output

REPOSITORIES = (
    ("python/peps", "ba4deeb7969588d937da609008d05bb83a47b1ab"),
    ("rust-lang/rfcs", "354518a8c9025f40be6f730452c1bfe71a12dc22"),
    ("rust-lang/blog.rust-lang.org", "0243724c2e50ad2b7ebd3d9dbc7cd88aed7605a3"),
    ("swiftlang/swift-evolution", "0105e139a22938561c700cfbb89ddc3ebe402f0c"),
    ("ethereum/EIPs", "f767a1e8078e17c9b381a91d35a09492189ede1b"),
    ("kubernetes/enhancements", "64765b4b02389318f2113119dd9e491479f978a0"),
    ("MicrosoftDocs/cpp-docs", "a2e592a8fc391b6aff8d1323f5b58696abdc5d57"),
    ("MicrosoftDocs/windows-driver-docs", "825aa15f476fc33a3e80abd3db387b025771f6f8"),
    ("MicrosoftDocs/win32", "47e64c189dcb1c1a42c221380ccf0ec81cc82d4b"),
)
VOCABULARY = 2**15

_SUFFIXES = (".md", ".rst")
_HEADING = 80  # characters; shorter paragraphs may repeat
_DOCUMENT = 6000  # characters; shorter documents are mostly tables and lists of links


def main(argv: Sequence[str] | None = None) -> int:
    """Write both files; see the module's docstring. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy_text", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="made if it does not exist")
    folder = parser.parse_args(argv).folder
    folder.mkdir(parents=True, exist_ok=True)
    text = joined(_all_documents())
    (folder / "text.txt").write_text(text, encoding="utf-8", newline="\n")
    train_tokenizer(text).save(str(folder / "tokenizer.json"))
    size = len(text.encode())
    print(f"{folder}: text.txt ({size:,} bytes, SHA-256 {hashlib.sha256(text.encode()).hexdigest()}), tokenizer.json")
    return 0


def _all_documents() -> Iterator[str]:
    for repository, commit in REPOSITORIES:
        with tempfile.TemporaryDirectory() as folder:
            download(repository, commit, folder)
            yield from documents(folder, commit)


def download(repository: str, commit: str, folder: str) -> None:
    """Makes the folder a git repository with one commit of one on GitHub."""
    check_call(["git", "init", "--quiet", "--bare", folder])
    check_call(["git", "-C", folder, "fetch", "--quiet", "--depth", "1", f"https://github.com/{repository}", commit])


def documents(folder: str, commit: str) -> Iterator[str]:
    """The texts of a git repository at a commit, in the order of their paths."""
    git = ["git", "-C", folder]
    tree = check_output([*git, "ls-tree", "-r", commit], text=True).splitlines()
    blobs = [line.split()[2] for line in tree if line.startswith("100") and line.endswith(_SUFFIXES)]  # no links
    contents = io.BytesIO(check_output([*git, "cat-file", "--batch"], input="\n".join(blobs).encode()))
    for _ in blobs:
        size = int(contents.readline().split()[2])
        yield contents.read(size).decode(errors="replace")
        contents.read(1)  # the newline after each


def joined(sources: Iterator[str]) -> str:
    """One text of many, without paragraphs that were there before."""
    known: set[str] = set()
    kept = []
    for source in sources:
        paragraphs = []
        for paragraph in source.replace("\r\n", "\n").split("\n\n"):
            if len(paragraph) >= _HEADING:
                if paragraph in known:
                    continue
                known.add(paragraph)
            paragraphs.append(paragraph)
        document = "\n\n".join(paragraphs).strip() + "\n"
        if len(document) >= _DOCUMENT:
            kept.append(document)
    return "\n".join(sorted(kept, key=lambda document: hashlib.sha256(document.encode()).digest()))


def train_tokenizer(text: str):  # -> tokenizers.Tokenizer
    """Byte-pair encoding of a part of the text, like GPT-2's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # pyright: ignore[reportMissingImports]

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    pieces = text[: 2**25].splitlines(keepends=True)
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer


if __name__ == "__main__":
    sys.exit(main())
