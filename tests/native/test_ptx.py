"""The PTX of kernels that are no products, which the extension carries for later GPUs, assembles for them."""

import pathlib
import subprocess

import pytest

from te_jax._core import host

CUDA_EXT = pathlib.Path(__file__).parents[2] / "cuda_ext"
SOURCES = [path for path in CUDA_EXT.glob("*/*.cu") if not path.parent.name.endswith("gemm")]


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.skipif(host.nvcc() is None, reason="needs nvcc")
@pytest.mark.skipif(not SOURCES, reason="needs a checkout")
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_ptx_assembles(source, tmp_path):
    """Optimized, as the driver does: without, it takes longer. What takes minutes is assembled for one, which has the
    least shared memory."""
    nvcc, _ = host.nvcc()
    options = ["-std=c++20", "--expt-relaxed-constexpr", "-DTE_JAX_CUDA", f"-I{CUDA_EXT}"]
    takes_minutes = source.parent.name in ("activation", "norm", "softmax_cross_entropy")
    code = "sm_120" if takes_minutes else "[sm_100,sm_120]"
    later = f"arch=compute_90,code={code}"
    command = [
        nvcc,
        *options,
        "--threads=2",
        "--generate-code",
        later,
        "--fatbin",
        source,
        "-o",
        tmp_path / "kernels.fatbin",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
