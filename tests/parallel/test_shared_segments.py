"""Shared memory segments of a group of devices of several processes, without any other process."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "tests/parallel/shared_segments_test.cc", ROOT / "cuda_ext/collective_gemm/shared_segments.cc"


def test_participants_that_wait_learn_of_those_that_do_not_arrive(tmp_path):
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    program = tmp_path / "shared_segments"
    flags = ["-std=c++20", "-O1", "-pthread", f"-I{ROOT / 'cuda_ext'}"]
    subprocess.run([compiler, *flags, *map(str, SOURCES), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
