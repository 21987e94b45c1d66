"""Entry point of the `te-jax` command."""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from te_jax._version import __version__
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
      The exit status: the subcommand's own, 2 for a mistake of the user (one sentence on stderr), 130 when interrupted,
      141 when what reads its output has gone.
    """
    # Not every locale has the dashes and arrows of a report.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            args = _parser().parse_args(argv)
            return args.run(args)
        finally:
            print(end="", flush=True)
    except UserError as error:
        print(f"te-jax: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("te-jax: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Python writes what is left when it exits, and would report that it cannot.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in the arguments like every other mistake: in one sentence, without the usage text."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see `{self.prog} --help`)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="te-jax", description="Fused kernels and FP8 training for JAX.")
    parser.add_argument("--version", action="version", version=f"te_jax {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (module, summary) in _COMMANDS.items():
        # Abbreviated options would change their meaning whenever an option is added.
        command = commands.add_parser(name, help=summary, description=module.__doc__, allow_abbrev=False)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser
