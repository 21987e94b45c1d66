"""`te-jax generate`: a text, continued by a trained model."""

import argparse
import sys
from pathlib import Path
from typing import Any

from te_jax._core.terminal import reason_of
from te_jax.cli import _options
from te_jax.cli.errors import UserError, is_out_of_memory

_DESCRIPTION = """\
Continues a text by a model of te-jax train or of Hugging Face, with keys and values of what was read in a cache. The
most likely token follows, unless --temperature draws others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `te-jax generate` to a parser."""
    parser.description = _DESCRIPTION
    parser.add_argument("prompt", metavar="TEXT", help="text to continue; - reads it from stdin")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--run",
        type=_options.path,
        metavar="DIR",
        help="folder of a run of te-jax train, at its last checkpoint (the runs/train-… of the highest number)",
    )
    source.add_argument(
        "--from",
        dest="from_",
        type=_options.path,
        metavar="DIR",
        help="folder of a model of Hugging Face: config.json, safetensors and tokenizer.json",
    )
    parser.add_argument("--max-new-tokens", type=int, default=100, metavar="N", help="tokens to add at most (100)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="draw tokens by their probability at it; 0 takes the likeliest (0)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="with --temperature: draw from the likeliest tokens alone, which together have this probability (1)",
    )
    parser.add_argument("--seed", type=int, default=0, help="with --temperature: seed of what is drawn (0)")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16"),
        help="dtype of parameters and activations; auto is bfloat16 on GPUs and float32 on CPUs (auto)",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the prompt and what follows.

    Args:
      args: parsed options of `add_arguments`.

    Returns:
      0.

    Raises:
      UserError: there is no such model, or an option cannot be met.
    """
    import dataclasses

    import jax
    import numpy as np

    from te_jax.cli import _placement, _trained
    from te_jax.models import generate

    if not 0 <= args.seed < 2**32:
        raise UserError(f"--seed is {args.seed}: it must lie between 0 and {2**32 - 1}")
    prompt = _text_to_continue(args.prompt)
    dtype = _trained.dtype_of(args.dtype)
    trained = _trained.of_run(args.run, dtype) if args.from_ is None else _trained.of_folder(args.from_, dtype)
    tokenizer = _trained.tokenizer_of(trained)
    tokens = list(prompt.encode()) if tokenizer is None else tokenizer.prompt(prompt)
    if not tokens:
        raise UserError("the text to continue is empty: give at least one character")
    if max(tokens) >= trained.config.vocab_size:
        raise UserError(
            f"the tokenizer gives token {max(tokens)}, and {trained.name} knows {trained.config.vocab_size}"
        )
    config = dataclasses.replace(trained.config, dtype=dtype.name)
    stop = tuple(token for token in _ends(trained.folder) if token < config.vocab_size)
    vectors = 2 * config.num_layers * config.num_kv_heads * (len(tokens) + max(args.max_new_tokens, 0))
    needed, present = vectors * config.head_dim * dtype.itemsize, _placement.memory_of(jax.devices()[:1])
    if needed > present:
        raise UserError(
            f"--max-new-tokens is {args.max_new_tokens}: keys and values of as many tokens take "
            f"{needed / 2**30:,.2f} GiB, and the device has {present / 2**30:,.2f} GiB: choose a smaller number"
        )
    try:
        new_tokens = generate(
            trained.params,
            np.array([tokens], np.int32),
            config,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            key=jax.random.key(args.seed),
            stop_tokens=stop,
        )
    except Exception as error:
        name, _, rest = str(error).partition(" ")
        if isinstance(error, ValueError) and name in ("max_new_tokens", "temperature", "top_p"):
            raise UserError(f"--{name.replace('_', '-')} {rest}") from error
        if is_out_of_memory(error):
            raise UserError(
                f"{trained.name} with {len(tokens)} tokens and --max-new-tokens {args.max_new_tokens} is out of memory "
                f"({reason_of(error)}): choose a shorter text, a smaller number or --dtype bfloat16"
            ) from error
        raise
    new = np.asarray(new_tokens)[0].tolist()
    new = new[: next((i for i, token in enumerate(new) if token in stop), len(new))]
    print(bytes(tokens + new).decode(errors="replace") if tokenizer is None else tokenizer.text(tokens + new))
    return 0


def _text_to_continue(word: str) -> str:
    """The text that the argument is, or for "-" that of stdin."""
    try:
        text = sys.stdin.read() if word == "-" else word
        text.encode()  # Python stands in for bytes of the command line that are no text
    except UnicodeError as error:
        raise UserError("the text to continue is not UTF-8: convert it, for example with iconv") from error
    except OSError as error:
        raise UserError(f"the text to continue cannot be read from stdin: {error.strerror or error}") from error
    return text


def _ends(folder: Path | None) -> tuple[int, ...]:
    """The tokens that end a text, as the folder of a model says."""
    from te_jax.models.safetensors import FolderError, read_json

    if folder is None:
        return ()
    for name in ("generation_config.json", "config.json"):
        try:
            token_ids: Any = read_json(folder / name, 10_000_000).get("eos_token_id")
        except FolderError:
            continue
        token_ids = token_ids if isinstance(token_ids, list) else [token_ids]
        if ends := tuple(token for token in token_ids if type(token) is int and 0 <= token < 2**31):
            return ends
    return ()
