"""Who waits for whom in the collective products' own calls, on simulated devices under ThreadSanitizer."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "tests/parallel/protocol_test.cc", *(ROOT / "cuda_ext/collective_gemm").glob("shared_*.cc")


@pytest.fixture(scope="module")
def simulation(tmp_path_factory):
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    program = tmp_path_factory.mktemp("protocol") / "simulation"
    flags = ["-std=c++20", "-O1", "-g1", "-fsanitize=thread", "-pthread", f"-I{ROOT / 'cuda_ext'}"]
    try:
        subprocess.run([compiler, *flags, *map(str, SOURCES), "-o", str(program)], check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        if b"tsan" in error.stderr:
            pytest.skip("needs ThreadSanitizer's runtime")
        raise AssertionError(error.stderr.decode()) from None
    return program


def test_nothing_is_read_or_written_out_of_order(simulation, rng):
    """Random calls, of which some fail on one device, and to some one does not come."""
    seed = str(rng.integers(2**31))
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    environment.pop("LD_PRELOAD", None)
    done = subprocess.run(
        [str(simulation), "60", seed], capture_output=True, text=True, env=environment, timeout=240, check=False
    )
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not start under this kernel's address randomisation")
    assert done.returncode == 0, f"seed {seed}: {done.stderr[:4000]}"
