"""The CUDA libraries that the CUDA extension links, in the toolkit or in the wheels of `jax[cuda13]`; and versions."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

# In the order in which they depend on each other.
_LIBRARIES = ("libcudart.so.13", "libcublasLt.so.13")
_GET_VERSION = {
    "cuBLAS": ("libcublasLt.so.13", "cublasLtGetVersion"),
    "cuDNN": ("libcudnn.so.9", "cudnnGetVersion"),
}
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


def load() -> str | None:
    """Loads the libraries into the process, so that importing the extension finds them by name.

    Returns:
      None, or which library was found nowhere, where it was sought, and how to get it.
    """
    for library in _LIBRARIES:
        paths = (str(path) for directory in _directories() if (path := directory / library).exists())
        if not any(_open(candidate) for candidate in (*paths, library)):
            sought = ", ".join(["the dynamic loader's paths", *(str(directory) for directory in _directories())])
            return (
                f"{library}, which is in none of: {sought}; "
                'pip install "jax[cuda13]", or install the CUDA 13 toolkit and set CUDA_HOME'
            )
    return None


def versions() -> dict[str, str]:
    """Versions of cuBLAS and cuDNN, of those that the process has loaded: JAX does so when its CUDA backend starts."""
    version_of = {}
    for name, (library, function) in _GET_VERSION.items():
        try:
            get_version = getattr(ctypes.CDLL(library, mode=os.RTLD_NOLOAD), function)
        except (OSError, AttributeError):
            continue
        get_version.restype = ctypes.c_size_t
        number = get_version()
        version_of[name] = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return version_of


def _open(library: str) -> bool:
    try:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True
