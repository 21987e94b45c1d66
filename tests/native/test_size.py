"""The file of the CUDA extension, where it is built: small, and silent about the machine that built it."""

import pathlib
import re

import pytest

import te_jax

_FILES = sorted(pathlib.Path(te_jax.__file__).parent.glob("_te_cuda*.so"))
# Lines of the source would be a third more, and kernels that nothing asks for come one by one.
_MOST_BYTES = 36 * 10**6


@pytest.mark.skipif(not _FILES, reason="the CUDA extension is not built")
def test_the_cuda_extension_is_small_and_names_no_path_of_the_machine_that_built_it():
    (path,) = _FILES
    content = path.read_bytes()
    assert len(content) <= _MOST_BYTES
    assert not re.findall(rb"/[\w./-]+/cuda_ext/[\w./-]+", content)[:3]
