"""`te-jax export`: the model of a run, written as one of Hugging Face."""

import argparse

from te_jax.cli import _options
from te_jax.cli.errors import UserError

_DESCRIPTION = """\
Writes the model of a run of te-jax train, at its last checkpoint, as a folder of Hugging Face: config.json, safetensors
and the tokenizer. transformers reads it, and so does te-jax train --from and te-jax generate --from."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `te-jax export` to a parser."""
    parser.description = _DESCRIPTION
    parser.add_argument("folder", type=_options.path, metavar="DIR", help="folder to write, which holds no model yet")
    parser.add_argument(
        "--run",
        type=_options.path,
        metavar="DIR",
        help="folder of the run (the runs/train-… of the highest number)",
    )
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float32", "float16"),
        help="dtype of the tensors (bfloat16)",
    )


def run(args: argparse.Namespace) -> int:
    """Exports.

    Args:
      args: parsed options of `add_arguments`.

    Returns:
      0.

    Raises:
      UserError: there is no run, no checkpoint or no such architecture, or the folder cannot be written.
    """
    from te_jax.cli import _trained
    from te_jax.models import to_hf

    trained = _trained.of_run(args.run, args.dtype)
    try:
        to_hf(
            args.folder,
            trained.config,
            trained.params,
            like=trained.folder,
            dtype=args.dtype,
            tokenizer=trained.tokenizer,
            fields=None if trained.seq_len is None else {"max_position_embeddings": trained.seq_len},
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    print(f"{trained.name}, {trained.config.num_parameters:,} parameters in {args.dtype}: {args.folder}")
    return 0
