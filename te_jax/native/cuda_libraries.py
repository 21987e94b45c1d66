"""Finding the CUDA libraries that the CUDA extension links: in the toolkit, or in the wheels of `jax[cuda13]`."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

# In the order in which they depend on each other.
_LIBRARIES = ("libcudart.so.13", "libcublasLt.so.13")
_TOOLKITS = ("CUDA_HOME", "CUDA_PATH")


def _directories() -> Iterator[Path]:
    """Where the libraries may be, besides the dynamic loader's own paths.

    The wheels come first: they are the ones that JAX itself uses, and two copies of cuBLAS in one process cost memory.
    """
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        yield from sorted(Path(root).glob("*/lib"))
    for toolkit in (*(os.environ.get(name) for name in _TOOLKITS), "/usr/local/cuda"):
        if toolkit:
            yield from (Path(toolkit) / "lib64", Path(toolkit) / "lib")


def load() -> None:
    """Loads the libraries into the process, so that importing the extension finds them by name.

    Raises:
      OSError: naming the library that was not found, where it was sought, and how to get it.
    """
    for library in _LIBRARIES:
        candidates = [str(path) for directory in _directories() if (path := directory / library).exists()]
        for candidate in (*candidates, library):
            try:
                ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
                break
            except OSError:
                continue
        else:
            sought = ", ".join(str(directory) for directory in _directories()) or "no directory"
            raise OSError(
                f"{library} was found neither by the dynamic loader nor in {sought}; "
                'pip install "jax[cuda13]", or install the CUDA 13 toolkit and set CUDA_HOME'
            )
