"""The file of the CUDA extension, where it is built: small, and silent about the machine that built it."""

import collections
import importlib.util
import os
import pathlib
import re

import pytest

_SPEC = importlib.util.find_spec("te_jax._te_cuda")  # where it lies beside an editable checkout, too
_FILES = [pathlib.Path(_SPEC.origin)] if _SPEC and _SPEC.origin else []
# Lines of the source would be twice as much, and kernels that nothing asks for come one by one.
_ASSEMBLED = "TE_JAX_ASSEMBLE_PTX=ON" in os.environ.get("SKBUILD_CMAKE_DEFINE", "")  # for one more GPU
_MOST_BYTES = (40 if _ASSEMBLED else 24) * 10**6
# Kernels by the function of which they are instances: another template argument changes these numbers.
_KERNELS = {
    "QuantizeTile": 68,
    "QuantizeGatheredTiles": 16,
    "QuantizeVectors": 2,
    "AmaxOfValues": 2,
    "AmaxOfRowsAndColumns": 2,
    "ComputeTiles": 8,
    "ComputeTilesInTurn": 6,
    "ActivateRows": 6,
    "AmaxOfActivation": 4,
    "NormalizeRows": 16,
    "NormalizeLongRows": 2,
    "BackwardOfRows": 12,
    "BackwardOfLongRows": 2,
    "StatisticsOnLanes": 16,
    "StatisticsOnBlocks": 8,
    "BothOfRow": 8,
    "GradientOnStretches": 4,
    "Multiply": 76,
    "MultiplyFewRows": 9,
    "MultiplyLowerTiles": 4,
    "SumParts": 3,
    "FillPlain": 3,
    "FillFp8": 2,
}
_FLOAT16 = {"SumParts": 1, "FillPlain": 1, "MultiplyLowerTiles": 2}  # of products of plain operands


def _kernels(content):
    """(name, mangled name) of kernels with template arguments. The runtime is given the latter, as text."""
    mangled = {text.decode() for text in re.findall(rb"(_ZN2te\w+)\0", content)}
    found = [(re.search(rf"({'|'.join(f'{len(name)}{name}' for name in _KERNELS)})I", text), text) for text in mangled]
    return [(match[1].lstrip("0123456789"), text) for match, text in found if match]


@pytest.mark.skipif(not _FILES, reason="the CUDA extension is not built")
def test_the_cuda_extension_is_small_and_names_no_path_of_the_machine_that_built_it():
    (path,) = _FILES
    content = path.read_bytes()
    assert len(content) <= _MOST_BYTES
    assert not re.findall(rb"/[\w./-]+/cuda_ext/[\w./-]+", content)[:3]


@pytest.mark.skipif(not _FILES, reason="the CUDA extension is not built")
def test_the_cuda_extension_has_no_kernel_that_nothing_asks_for():
    kernels = _kernels(_FILES[0].read_bytes())
    assert collections.Counter(name for name, _ in kernels) == _KERNELS
    assert collections.Counter(name for name, mangled in kernels if "6__half" in mangled) == _FLOAT16
