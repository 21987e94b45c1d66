"""What families share that compare with torch on the GPU of this process."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def torch_on_gpu() -> Any:
    """The module torch, if it is here and knows CUDA."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise RuntimeError("torch is not installed") from error
    if not torch.cuda.is_available():
        raise RuntimeError("this torch has no CUDA support")
    return torch


def as_torch(array: jax.Array | None) -> Any:
    """The same device memory as a torch tensor that needs no gradient."""
    return torch_on_gpu().utils.dlpack.from_dlpack(jax.block_until_ready(array)).detach()


def rows_of(tensor: Any, rows: np.ndarray) -> np.ndarray:
    """The rows at these indices in float32, on the host."""
    indices = torch_on_gpu().as_tensor(rows.astype(np.int64), device=tensor.device)
    return tensor[indices].float().cpu().numpy()


def temporaries(call: Callable[[], tuple[Any, ...]]) -> int:
    """Peak bytes that one call allocates beside its results, once warm."""
    torch = torch_on_gpu()
    call()  # compiles, and keeps workspaces that outlive the call out of the figure
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = call()
    torch.cuda.synchronize()
    return max(0, torch.cuda.max_memory_allocated() - before - sum(tensor.nbytes for tensor in results))
