"""`te-jax export`: the model of a run, written as one of Hugging Face, or its adapters as those of PEFT."""

import argparse

from te_jax.cli import _options
from te_jax.cli.errors import UserError

_DESCRIPTION = """\
Writes the model of a run of te-jax train, at its last checkpoint, as a folder of Hugging Face: config.json, safetensors
and the tokenizer. transformers reads it, and so does te-jax train --from and te-jax generate --from. With --adapters it
writes a folder of PEFT, which holds the adapters of a run with --lora alone."""


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
        "--adapters", action="store_true", help="write the adapters as PEFT does, and not the model with them"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32", "float16"),
        help="dtype of the tensors (bfloat16; with --adapters, float32)",
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
    import jax

    from te_jax.cli import _trained
    from te_jax.models import to_hf, to_peft

    dtype = args.dtype or ("float32" if args.adapters else "bfloat16")
    trained = _trained.of_run(args.run, dtype, adapters_alone=args.adapters)
    config, params = trained.config, trained.params
    try:
        if args.adapters:
            to_peft(args.folder, config, params, base=str(trained.folder), dtype=dtype)
        else:
            to_hf(
                args.folder,
                config,
                params,
                like=trained.folder,
                dtype=dtype,
                tokenizer=trained.tokenizer,
                fields=None if trained.seq_len is None else {"max_position_embeddings": trained.seq_len},
            )
    except ValueError as error:
        raise UserError(str(error)) from error
    count = sum(param.size for param in jax.tree.leaves(params))
    print(f"{trained.name}, {count:,} parameters in {dtype}: {args.folder}")
    return 0
