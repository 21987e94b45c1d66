"""`te-jax generate`: a text, continued by a trained model."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from te_jax._core.terminal import reason_of
from te_jax.cli import _options
from te_jax.cli.errors import UserError, is_out_of_memory

if TYPE_CHECKING:
    import jax

    from te_jax._core.types import PyTree
    from te_jax.models import DecoderConfig

_DESCRIPTION = """\
Continues a text by a model of te-jax train or of Hugging Face, with keys and values of what was read in a cache. The
most likely token follows, unless --temperature draws others. With --prompts it continues each line of a file, and
writes a line of JSON for each text that follows, with its tokens and their log-probabilities."""

_BUCKET = 64
"""Tokens: prompts of a file are padded to a multiple of it, so that files of like lengths share a compilation."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `te-jax generate` to a parser."""
    parser.description = _DESCRIPTION
    parser.add_argument("prompt", nargs="?", metavar="TEXT", help="text to continue; - reads it from stdin")
    parser.add_argument(
        "--prompts",
        type=_options.path,
        metavar="FILE",
        help='in the place of TEXT: a text a line, or a JSON object with "prompt", whose other fields are kept',
    )
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="with --prompts: texts for each prompt (1)")
    parser.add_argument("--batch", type=int, default=16, metavar="N", help="with --prompts: texts at once (16)")
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
    parser.add_argument(
        "--lora", type=_options.path, metavar="DIR", help="with --from: folder of PEFT's adapters, added to the model"
    )
    parser.add_argument(
        "--tp",
        type=int,
        default=1,
        metavar="N",
        help="GPUs, or CPU devices, that share the model: each has a part of its heads, widths and vocabulary (1)",
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
    parser.add_argument(
        "--top-k",
        type=int,
        metavar="K",
        help="with --temperature: draw from as many of the likeliest tokens at most (all)",
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

    from te_jax.cli import _placement, _trained

    if not 0 <= args.seed < 2**32:
        raise UserError(f"--seed is {args.seed}: it must lie between 0 and {2**32 - 1}")
    for name in ("samples", "batch", "tp"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} is {getattr(args, name)}: it must be at least 1")
    if (args.prompt is None) == (args.prompts is None):
        raise UserError("give a text to continue, or --prompts FILE, and not both")
    if args.lora is not None and args.from_ is None:
        raise UserError(f"--lora {args.lora} has adapters of a model of Hugging Face: add --from DIR")
    records = [{"prompt": _text_to_continue(args.prompt)}] if args.prompts is None else _records_of(args.prompts)
    devices = _placement.take_devices(_options.Devices(tp=args.tp))[: args.tp] if args.tp > 1 else None
    dtype = _trained.dtype_of(args.dtype)
    if args.from_ is None:
        trained = _trained.of_run(args.run, dtype, devices=devices)
    else:
        trained = _trained.of_folder(args.from_, dtype, keep_fp8=True, lora=args.lora, devices=devices)
    tokenizer = _trained.tokenizer_of(trained)
    prompts = [
        list(record["prompt"].encode()) if tokenizer is None else tokenizer.prompt(record["prompt"])
        for record in records
    ]
    if not all(prompts):
        raise UserError("the text to continue is empty: give at least one character")
    if (largest := max(map(max, prompts))) >= trained.config.vocab_size:
        raise UserError(f"the tokenizer gives token {largest}, and {trained.name} knows {trained.config.vocab_size}")
    config = dataclasses.replace(trained.config, dtype=dtype.name)
    stop = tuple(token for token in _ends(trained.folder) if token < config.vocab_size)
    rows, longest = 1 if args.prompts is None else args.batch, max(map(len, prompts))
    time = longest if args.prompts is None else -(-longest // _BUCKET) * _BUCKET
    latent, devices = config.latent, devices or jax.devices()[:1]
    width = 2 * config.num_kv_heads * config.head_dim if latent is None else latent.rank + latent.rope_dim
    values = rows * config.num_layers * (time + max(args.max_new_tokens, 0)) * width
    needed, present = values * dtype.itemsize, _placement.memory_of(devices) * len(devices)
    if needed > present:
        raise UserError(
            f"--max-new-tokens is {args.max_new_tokens}: keys and values of as many tokens take "
            f"{needed / 2**30:,.2f} GiB, and there are {present / 2**30:,.2f} GiB: choose a smaller number"
        )
    run = functools.partial(_generated, args, trained.params, config, stop)

    def text_of(tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace") if tokenizer is None else tokenizer.text(tokens)

    try:
        if args.prompts is None:
            tokens, _ = run(prompts, jax.random.key(args.seed), None)
            print(text_of(prompts[0] + _until(tokens[0], stop, keep=False)))
            return 0
        # Each call has some texts of some prompts, as many in all calls, of which what is too many is dropped.
        texts = min(args.samples, rows)
        calls = [
            (first, min(texts, args.samples - drawn))
            for first in range(0, len(prompts), rows // texts)
            for drawn in range(0, args.samples, texts)
        ]
        for number, (first, wanted) in enumerate(calls):
            batch = prompts[first : first + rows // texts]
            key = jax.random.fold_in(jax.random.key(args.seed), number)
            tokens, log_probs = run(batch + batch[:1] * (rows // texts - len(batch)), key, time, texts)
            for place, (row, values) in enumerate(zip(tokens, log_probs, strict=True)):
                which, sample = divmod(place, texts)
                if which >= len(batch) or sample >= wanted:
                    continue
                kept = _until(row, stop, keep=True)
                found = {"text": text_of(_until(row, stop, keep=False)), "tokens": kept}
                line = json.dumps({**records[first + which], **found, "log_probs": values[: len(kept)]})
                print(line, flush=True)
    except Exception as error:
        name, _, rest = str(error).partition(" ")
        if isinstance(error, ValueError) and name in ("max_new_tokens", "temperature", "top_p", "top_k"):
            raise UserError(f"--{name.replace('_', '-')} {rest}") from error
        if is_out_of_memory(error):
            raise UserError(
                f"{trained.name} with {longest} tokens and --max-new-tokens {args.max_new_tokens} is out of memory "
                f"({reason_of(error)}): choose a shorter text, a smaller number or --dtype bfloat16"
            ) from error
        raise
    return 0


def _generated(
    args: argparse.Namespace,
    params: PyTree,
    config: DecoderConfig,
    stop: tuple[int, ...],
    prompts: list[list[int]],
    key: jax.Array,
    time: int | None,
    samples: int = 1,
) -> tuple[list[list[int]], list[list[float]]]:
    """New tokens of the samples of each prompt and, where prompts are padded to a time, their log-probabilities."""
    import numpy as np

    from te_jax.models import generate

    draw = functools.partial(
        generate,
        params,
        config=config,
        max_new_tokens=args.max_new_tokens,
        samples=samples,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        key=key,
        stop_tokens=stop,
    )
    if time is None:
        return np.asarray(draw(np.array(prompts, np.int32))).tolist(), []
    padded = np.zeros((len(prompts), time), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    found = draw(padded, lengths=lengths, return_log_probs=True)
    tokens, log_probs = (np.asarray(each).tolist() for each in found)
    return tokens, log_probs


def _until(tokens: list[int], stop: tuple[int, ...], *, keep: bool) -> list[int]:
    """Tokens up to the first that ends a text, with it or without."""
    end = next((i for i, token in enumerate(tokens) if token in stop), len(tokens))
    return tokens[: end + keep]


def _records_of(path: Path) -> list[dict[str, Any]]:
    """The prompts of a file, with what stands beside them."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeError as error:
        raise UserError(f"--prompts {path} is not UTF-8: convert it, for example with iconv") from error
    except OSError as error:
        raise UserError(f"--prompts {path} cannot be read: {error.strerror or error}") from error
    records = []
    for number, line in enumerate(lines, start=1):
        record: Any = {"prompt": line}
        if line.startswith("{"):
            record = None
            with contextlib.suppress(ValueError):
                record = json.loads(line)
            if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
                raise UserError(f'line {number} of --prompts {path} is a JSON object without a text in "prompt"')
        if record["prompt"]:
            records.append(record)
    if not records:
        raise UserError(f"--prompts {path} has no text to continue: write one a line")
    return records


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
