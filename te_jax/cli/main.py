"""Entry point of the `te-jax` command."""

import argparse
import errno
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NoReturn

from te_jax._version import __version__
from te_jax.cli import _options, _processes, bench, doctor, export, generate, plot
from te_jax.cli.errors import UserError, guess

__all__ = ["main"]

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OF_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR)

# Modules with `add_arguments`. `run` is in the module of the command's name, which is imported when it is called.
_COMMANDS = {
    "train": (_options, "train a small language model on text"),
    "plot": (plot, "draw the losses of a run, as far as it has come"),
    "generate": (generate, "continue a text by a trained model"),
    "export": (export, "write the model of a run as one of Hugging Face"),
    "doctor": (doctor, "report what works on this machine and how to get what does not"),
    "bench": (bench, "measure an operation against its peers"),
}

# The extra [train] by its modules.
_PACKAGES = {"optax": "optax", "orbax": "orbax-checkpoint", "matplotlib": "matplotlib", "tqdm": "tqdm"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand.

    Args:
      argv: the words after `te-jax`; None takes them from `sys.argv`.

    Returns:
      The exit status: the subcommand's own, 2 for a mistake of the user, a full disk or a path that cannot be opened
      (one sentence on stderr), 130 when interrupted, 141 when what reads its output has gone.
    """
    _open_closed_streams()
    # Not every locale has the dashes and arrows of a report.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")
    status = 1
    try:
        status = _status(argv)
    finally:
        _processes.leave(status)
    return status


def _status(argv: Sequence[str] | None) -> int:
    try:
        try:
            args, unknown = _parser().parse_known_args(argv)
            if unknown:
                known = [_options.flag(name) for name in vars(args)]
                word = unknown[0].partition("=")[0]
                raise UserError(f"{word} is unknown{guess(word, known)}; see `te-jax {args.command} --help`")
            return _run(args)
        finally:
            print(end="", flush=True)
    except UserError as error:
        print(f"te-jax: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("te-jax: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_output()
        return 141
    except OSError as error:
        if error.errno in _NO_SPACE:
            _drop_output()
            print(f"te-jax: error: cannot write: {error.strerror}", file=sys.stderr)
        elif error.errno in _OF_PATHS and error.filename is not None:
            print(f"te-jax: error: {error.filename}: {error.strerror}", file=sys.stderr)
        else:
            raise
        return 2


def _open_closed_streams() -> None:
    """Puts the null device in the place of a stream that was closed when this process began, as by daemons and `>&-`.

    Python has None in its place, and the next file that is opened would get its descriptor.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = open(os.devnull, mode)  # noqa: SIM115, open until the process ends
            setattr(sys, name, nowhere)
            try:
                os.fstat(descriptor)
            except OSError:
                os.dup2(nowhere.fileno(), descriptor)


def _drop_output() -> None:
    # Python writes what is left when it exits, and would report that it cannot.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in the arguments like every other mistake: in one sentence, without the usage text."""

    def error(self, message: str) -> NoReturn:
        if choice := re.fullmatch(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", message):
            name, word, known = choice.groups()
            known = [each.strip(" '") for each in known.split(",")]
            named = word if name == "COMMAND" else f"{name} {word}"
            message = f"{named} is unknown{guess(word, known)}: choose one of {', '.join(known)}"
        raise UserError(f"{message} (see `{self.prog} --help`)")


def _run(args: argparse.Namespace) -> int:
    if args.command in ("train", "plot", "export", "generate") and (
        missing := [_PACKAGES[name] for name in _PACKAGES if not find_spec(name)]
    ):
        raise UserError(f"te-jax {args.command} needs {', '.join(missing)}: pip install {' '.join(missing)}")
    return importlib.import_module(f"te_jax.cli.{args.command}").run(args)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="te-jax", description="Fused kernels and FP8 training for JAX.")
    parser.add_argument("--version", action="version", version=f"te_jax {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (module, summary) in _COMMANDS.items():
        # Abbreviated options would change their meaning whenever an option is added.
        command = commands.add_parser(name, help=summary, allow_abbrev=False)
        module.add_arguments(command)
        command.set_defaults(command=name)
    return parser
