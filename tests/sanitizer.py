"""Programs of C++ sources of the extensions, compiled with a sanitizer."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def built(folder, *sources, name="thread"):
    """A program of sources, paths below the root; skips where there is no compiler or no sanitizer of that name."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    program = folder / "simulation"
    flags = ["-std=c++20", "-O1", "-g1", f"-fsanitize={name}", "-pthread", f"-I{ROOT / 'cuda_ext'}"]
    paths = [str(ROOT / source) for source in sources]
    try:
        subprocess.run([compiler, *flags, *paths, "-o", str(program)], check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        if b"san" in error.stderr:
            pytest.skip("needs the sanitizer's runtime")
        raise AssertionError(error.stderr.decode()) from None
    return program


def run(program, rounds, rng):
    """Runs a program with a number of rounds and a random seed, and fails where it does or the sanitizer reports."""
    seed = str(rng.integers(2**31))
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=0"}
    environment.pop("LD_PRELOAD", None)
    done = subprocess.run(
        [str(program), str(rounds), seed], capture_output=True, text=True, env=environment, timeout=240, check=False
    )
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not start under this kernel's address randomisation")
    assert done.returncode == 0, f"seed {seed}: {done.stderr[:4000]}"
