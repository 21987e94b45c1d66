"""Entry point of the `te-jax` command."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from te_jax.cli import bench, doctor, train
from te_jax.cli.errors import UserError

__all__ = ["main"]

_COMMANDS = {
    "train": (train, "train a small language model on text"),
    "doctor": (doctor, "report what works on this machine and how to get what does not"),
    "bench": (bench, "measure an operation against its peers"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand.

    Args:
      argv: the words after `te-jax`; None takes them from `sys.argv`.

    Returns:
      The exit status: the subcommand's own, 2 for a mistake of the user (one sentence on stderr), 130 when interrupted.
    """
    try:
        args = _parser().parse_args(argv)
        return args.run(args)
    except UserError as error:
        print(f"te-jax: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("te-jax: interrupted", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in the arguments like every other mistake: in one sentence, without the usage text."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see `{self.prog} --help`)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="te-jax", description="Fused kernels and FP8 training for JAX.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (module, summary) in _COMMANDS.items():
        # Abbreviated options would change their meaning whenever an option is added.
        command = commands.add_parser(name, help=summary, description=module.__doc__, allow_abbrev=False)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser
