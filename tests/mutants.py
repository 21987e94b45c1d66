"""Which one-line faults the tests see: `make mutants`, or `python tests/mutants.py [NAME or FILE …]`.

tests/mutants.toml lists faults of one line each. For each, the line is replaced in a copy of the project in
build/mutants, and the tests that have to see it run there, as `make test` selects them. A fault is seen if one of them
fails. Where it lives, a test is missing; that all of them pass without any fault is what `make test` shows.

`--draw 10 --seed 7` draws faults from the operators, comparisons and numbers of te_jax in the place of the list.
"""

import argparse
import ast
import dataclasses
import glob
import importlib.util
import os
import pathlib
import queue
import random
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from concurrent import futures

from selection import is_slow

PROJECT = pathlib.Path(__file__).resolve().parents[1]
BUILD = PROJECT / "build" / "mutants"
LIST = PROJECT / "tests" / "mutants.toml"
PYTEST = ("-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", "--timeout", "300")
PASSED, NO_TESTS = 0, (None, 4, 5)  # exit codes of pytest; None where the extension was not built


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault of one line.

    Attributes:
      file: below the project.
      before: text that the file has once.
      after: what stands there instead.
      breaks: what a user would lose.
      seen_by: arguments of pytest, whose tests have to fail.
    """

    name: str
    file: str
    before: str
    after: str
    breaks: str
    seen_by: str

    @property
    def is_compiled(self):
        return self.file.startswith("cuda_ext/")

    def problem(self):
        """What is wrong with this entry in the files at hand, or None."""
        text = (PROJECT / self.file).read_text()
        if text.count(self.before) != 1:
            return f"{self.file} has {self.before!r} {text.count(self.before)} times, not once"
        if self.before == self.after:
            return "before and after are the same"
        paths = [argument.partition("::")[0] for argument in shlex.split(self.seen_by) if argument.startswith("tests/")]
        if not paths:
            return "seen_by names no file of tests"
        for path in paths:
            if not (PROJECT / path).exists():
                return f"seen_by names {path}, which is not there"
            if is_slow(PROJECT / path):
                return f"seen_by names {path}, which `make test` does not run"
        return None


def read(path=LIST):
    return [Mutant(**entry) for entry in tomllib.loads(path.read_text())["mutant"]]


# ---------------------------------------------------------------------------------------------------- drawn faults

_OTHER = {
    **{ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")},
    **{ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is")},
    **{ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and")},
    **{ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*")},
}
"""How an operator is written, and the one that stands there in a fault."""

_TESTS_OF = {
    "ops": "tests/ops tests/linear tests/conformance",
    "reference": "tests/ops tests/linear tests/conformance",
    "layers": "tests/layers tests/modules",
    "flax": "tests/modules tests/flax",
    "nnx": "tests/modules tests/nnx",
}
"""Folders of tests of a package, where they have another name."""


def drawn(count, seed):
    """Faults of operators, comparisons and numbers, each in another function of te_jax."""
    rng, found = random.Random(seed), {}
    for path in sorted((PROJECT / "te_jax").rglob("*.py")):
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        found |= {(path, node.name, node.lineno): node for node in functions}
    faults = []
    for path, name, line in rng.sample(list(found), len(found)):
        if len(faults) == count:
            break
        lines = path.read_text().splitlines()
        changes = [change for node in ast.walk(found[path, name, line]) if (change := _changed(node, lines))]
        if not changes:
            continue
        before, after = rng.choice(changes)
        package = path.relative_to(PROJECT / "te_jax").parts[0]
        tests = _TESTS_OF.get(package, f"tests/{package}")
        tests = tests if (PROJECT / tests.split()[0]).is_dir() else "tests"
        file = str(path.relative_to(PROJECT))
        fault = Mutant(f"{name}-{len(faults)}", file, before, after, f"{before!r}: {after!r}", tests)
        if not fault.problem():
            faults.append(fault)
    return faults


def _changed(node, lines):
    """(line, line with another operator or number), or None."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        where, old, new = (node.lineno, node.col_offset, node.end_col_offset), None, str(node.value + 1)
    else:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            sides, operator = (node.left, node.comparators[0]), node.ops[0]
        elif isinstance(node, ast.BinOp):
            sides, operator = (node.left, node.right), node.op
        elif isinstance(node, ast.BoolOp):
            sides, operator = node.values[:2], node.op
        else:
            return None
        if type(operator) not in _OTHER or sides[0].end_lineno != sides[1].lineno:
            return None
        where, (old, new) = (sides[1].lineno, sides[0].end_col_offset, sides[1].col_offset), _OTHER[type(operator)]
    row, begin, end = where
    line = lines[row - 1].encode()  # columns of ast are bytes
    middle = line[begin:end].decode()
    changed = new if old is None else middle.replace(old, new)
    return lines[row - 1], (line[:begin] + changed.encode() + line[end:]).decode()


class Tree:
    """A copy of the project, with the extension of the installed package, and a Python that imports from it."""

    def __init__(self, name):
        self.root, self.venv = BUILD / name / "tree", BUILD / name / "venv"
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        files = subprocess.run(listed, cwd=PROJECT, check=True, capture_output=True, text=True).stdout.split("\0")
        wanted = {file for file in files if file and (PROJECT / file).is_file()}
        for path in [path for path in self.root.rglob("*") if path.is_file() and "__pycache__" not in path.parts]:
            if str(path.relative_to(self.root)) not in wanted:
                path.unlink()
        for file in wanted:
            self.restore(file)
        self.extension = pathlib.Path(importlib.util.find_spec("te_jax._te_cpu").origin)
        self._install(self.extension)
        if not self.venv.exists():  # one that sees the packages at hand, but not an editable te_jax
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.venv], check=True)
            (site,) = glob.glob(f"{self.venv}/lib/python*/site-packages")
            pathlib.Path(site, "tools.pth").write_text(f"{self.extension.parents[1]}\n")

    def restore(self, file):
        """A file as the project has it, with its time, by which a build sees what has changed."""
        (self.root / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(PROJECT / file, self.root / file)

    def _install(self, extension):
        shutil.copy2(extension, self.root / "te_jax" / self.extension.name)

    def run(self, mutant):
        """(exit code of pytest, what it printed) with the fault."""
        file = self.root / mutant.file
        try:
            file.write_text(file.read_text().replace(mutant.before, mutant.after))
            if mutant.is_compiled and (printed := self._build()):
                return None, printed
            python = self.venv / "bin" / "python"
            environment = os.environ | {"PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}
            environment = {"JAX_PLATFORMS": "cpu", "TE_JAX_TEST_REQUIRE_NATIVE": "1"} | environment
            command = [python, "-P", *PYTEST, *shlex.split(mutant.seen_by)]
            done = subprocess.run(
                command, cwd=self.root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            return done.returncode, done.stdout
        finally:
            self.restore(mutant.file)
            if mutant.is_compiled:
                file.touch()  # newer than the object of the fault
                self._install(self.extension)

    def _build(self):
        """Compiles the CPU extension of this tree into it. What was printed, if that failed."""
        build = BUILD / self.root.parent.name / "extension"
        options = ["-DTE_JAX_CUDA=OFF", "-DCMAKE_CXX_FLAGS_RELEASE=-O1", f"-DPython_EXECUTABLE={sys.executable}"]
        cmake = [sys.executable, "-m", "cmake"]
        for command in (
            [*cmake, "-S", self.root, "-B", build, *options],
            [*cmake, "--build", build, "--parallel", "2"],
        ):
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode:
                return done.stdout
        (extension,) = build.glob("_te_cpu*.so")
        self._install(extension)
        return None


def outcome(mutant, code, printed):
    """("seen", "LIVES" or "BROKEN", why)"""
    failed = [line for line in printed.splitlines() if line.startswith("FAILED tests/")]
    if code == PASSED:
        return "LIVES", f"{mutant.breaks}; {printed.strip().splitlines()[-1]}"
    if code in NO_TESTS:
        return "BROKEN", printed[-1500:]
    return "seen", failed[0].removeprefix("FAILED ").partition(" - ")[0] if failed else f"pytest ends with {code}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", help="names of faults, or files with faults; all of them if left out")
    parser.add_argument("--list", type=pathlib.Path, default=LIST, help="another list")
    parser.add_argument("--draw", type=int, metavar="N", help="N faults that are in no list")
    parser.add_argument("--seed", type=int, default=0, help="of the faults that are drawn")
    parser.add_argument("--tree", default="tree", help="another folder of build/mutants, beside a run in this one")
    parser.add_argument("--workers", type=int, default=1, help="copies of the project that run tests at a time")
    options = parser.parse_args()
    listed = drawn(options.draw, options.seed) if options.draw else read(options.list)
    chosen = [m for m in listed if not options.which or {m.name, m.file} & set(options.which)]
    if not chosen:
        parser.error(
            f"no fault of {options.list.name} has one of the names, or lies in one of the files, {options.which}"
        )
    if problems := [f"{mutant.name}: {problem}" for mutant in chosen if (problem := mutant.problem())]:
        parser.error("\n  ".join(("entries that do not fit the project:", *problems)))
    trees = queue.SimpleQueue()
    for worker in range(options.workers):
        trees.put(Tree(f"{options.tree}{worker}"))

    def run(mutant):
        tree, begun = trees.get(), time.monotonic()
        try:
            word, why = outcome(mutant, *tree.run(mutant))
            return word, f"{time.monotonic() - begun:4.0f} s  {why}"
        finally:
            trees.put(tree)

    words = []
    with futures.ThreadPoolExecutor(options.workers) as pool:
        for mutant, (word, why) in zip(chosen, pool.map(run, chosen), strict=True):
            print(f"{word:8s} {mutant.name:48s} {why}", flush=True)
            words.append(word)
    counts = {word: words.count(word) for word in ("seen", "LIVES", "BROKEN")}
    print(f"{len(words)} faults: {', '.join(f'{count} {word}' for word, count in counts.items() if count)}")
    return counts["LIVES"] + counts["BROKEN"] > 0


if __name__ == "__main__":
    sys.exit(main())
