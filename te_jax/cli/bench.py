"""`te-jax bench FAMILY`: measure an operation against its peers on this machine.

The benchmarks themselves are the repository's folder `benchmarks`, which a wheel has without its results.
"""

import argparse
import importlib
import json
import os
import pkgutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from te_jax._core.terminal import key_values, reason_of
from te_jax.cli._options import path
from te_jax.cli.errors import UserError, guess

if TYPE_CHECKING:
    from benchmarks.harness import Family

DESCRIPTION = """\
Measure a family of operations against its peers, in one process and on the same arrays, and print medians and ratios.
Peers that are not installed are left out. In a checkout a complete run is also written to
benchmarks/results/<device>/<family>.json, from which the tables and figures of README.md and docs/ are made (python -m
benchmarks.tables). Without FAMILY, list the families.

Exit status: 0 after a run, 1 when results were outside their error bounds, 2 for a mistake in the arguments."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("family", nargs="?", metavar="FAMILY", help="what to measure; leave it out for the list")
    parser.add_argument("--quick", action="store_true", help="few, short samples, and only the first case")
    parser.add_argument("--cases", nargs="+", default=[], metavar="CASE", help="only these cases")
    parser.add_argument("--peers", nargs="*", metavar="PEER", help="only these peers beside te_jax; none for none")
    parser.add_argument(
        "--output",
        type=path,
        metavar="DIR",
        help="folder for the results and a figure of them, an SVG (default: none; in a checkout benchmarks/results, "
        "where only complete runs are written, and python -m benchmarks.tables draws)",
    )
    parser.add_argument(
        "--add",
        action="store_true",
        help="keep what the result file has and this run does not measure, of the same device and versions",
    )
    parser.add_argument(
        "--profile", type=path, metavar="DIR", help="also write a Perfetto trace of every implementation under DIR"
    )
    parser.add_argument(
        "--commit", metavar="SHA", help="commit to record, where the checkout has no git history, or that of others"
    )


def run(args: argparse.Namespace) -> int:
    root = _folder_of_benchmarks()
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    names = [module.name for module in pkgutil.iter_modules([str(root / "benchmarks")])]
    if args.family is None:
        print("Benchmark families (te-jax bench FAMILY):")
        lines = {name: _line(name) for name in names}
        print(key_values([(name, line) for name, line in lines.items() if line is not None]))
        return 0
    family = _family(args.family) if args.family in names else None
    if family is None:
        meant = guess(args.family, names)
        raise UserError(f"no benchmark family is called {args.family!r}{meant}; `te-jax bench` lists them")
    for option, folder in (("--output", args.output), ("--profile", args.profile)):
        if folder is not None:
            _check_writable(option, folder)
    for variable, value in family.environment.items():
        os.environ.setdefault(variable, value)

    import jax

    from benchmarks import harness, tables

    try:
        jax.devices()
    except Exception as error:  # RuntimeError, or AssertionError where JAX_PLATFORMS names a platform that is not here
        raise UserError(f"JAX starts no backend ({reason_of(error)}); `te-jax doctor` says more") from error
    try:
        status = harness.run_family(
            args.family,
            family,
            cases=args.cases,
            peers=args.peers,
            quick=args.quick,
            output=args.output,
            commit=args.commit,
            add=args.add,
            profile=args.profile,
        )
    except harness.SelectionError as error:
        raise UserError(str(error)) from error
    if args.output is not None:  # figures of published results are drawn for the pages that show them
        results = harness.result_path(args.family, jax.devices()[0].device_kind, args.output)
        if results.exists():
            figure = results.with_suffix(".svg")
            figure.write_text(tables.bar_chart(json.loads(results.read_text(encoding="utf-8"))), encoding="utf-8")
            print(f"Drawn in {figure}.")
    return status


def _folder_of_benchmarks() -> Path:
    """The folder that holds `benchmarks`: the checkout that te_jax is imported from, else the working directory if that
    is one, else a folder of the installed package."""
    package = Path(__file__).resolve().parent.parent
    for root in (package.parent, Path.cwd()):
        if (root / "benchmarks" / "harness.py").is_file() and (root / "te_jax").is_dir():
            return root
    return package / "cli" / "_installed"


def _family(name: str) -> "Family | None":
    """The family of a module of benchmarks, or None for the helpers among them."""
    try:
        return getattr(importlib.import_module(f"benchmarks.{name}"), "FAMILY", None)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("benchmarks"):
            raise
        raise UserError(f"{name} needs {error.name}, which is not installed: pip install {error.name}") from error


def _line(name: str) -> str | None:
    """The line of a module of benchmarks in the list; None for the helpers among them."""
    try:
        family = _family(name)
    except UserError as error:
        return str(error)
    return None if family is None else family.description


def _check_writable(option: str, folder: Path) -> None:
    """Refuse a folder before measuring for minutes, not after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option} {folder} cannot be made: {error.strerror or error}") from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"{option} {folder} cannot be written to")
