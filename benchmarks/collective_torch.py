"""Torch's fused products of tensor-parallel layers, in a process for each GPU, as `torch.ops.symm_mem` needs it."""

import atexit
import functools
import os
from collections.abc import Callable
from typing import Any

from benchmarks import dense
from benchmarks.collective_layers import Layer, Operation
from benchmarks.workers import PATIENCE, Workers

ENVIRONMENT = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
"""Multicast over NVLink stays off: on a shared host it can put GPUs out of service."""


@functools.cache
def workers(count: int) -> Workers:
    """Started once: later cases ask the same processes, or learn that they are lost."""
    started = Workers(count, TorchRank)
    atexit.register(started.close)
    return started


class TorchRank:
    """Torch's side of the comparison on one GPU: its part of the layer, computed by fused operations.

    Args:
      rank, count: of this process.
      file: where all of them meet.
    """

    def __init__(self, rank: int, count: int, file: str):
        os.environ.update(ENVIRONMENT)  # read when torch is imported
        import datetime

        import torch  # pyright: ignore[reportMissingImports]
        import torch.distributed  # pyright: ignore[reportMissingImports]
        import torch.distributed._symmetric_memory  # pyright: ignore[reportMissingImports]  # defines the operations
        from torch._C._autograd import DeviceType  # pyright: ignore[reportMissingImports]
        from torch._C._distributed_c10d import _SymmetricMemory  # pyright: ignore[reportMissingImports]

        self.torch, self.rank = torch, rank
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        if _SymmetricMemory.has_multicast_support(DeviceType.CUDA, rank):
            raise RuntimeError(f"torch means to use NVLink multicast although the environment has {ENVIRONMENT}")
        torch.distributed.init_process_group(
            "nccl",
            store=torch.distributed.FileStore(file, count),
            rank=rank,
            world_size=count,
            timeout=datetime.timedelta(seconds=PATIENCE),
            device_id=self.device,
        )
        self.group = torch.distributed.group.WORLD.group_name
        self.count = count
        self.calls: list[Callable[[], dict[str, Any]]] = []

    def ready(self) -> None:
        """To be asked first, so that what comes next need not wait for all of this to start."""

    def prepare(self, layer: Layer, calls: int) -> dict[str, float]:
        """Draws operands for that many calls, and returns relative L2 errors of this device's part of the results."""
        torch, operation, devices = self.torch, layer.operation, layer.devices
        self.calls = []
        torch.cuda.empty_cache()
        rows, inner, columns = layer.rows, layer.inner, layer.columns
        if operation.gathers:
            sizes = {"x": (rows // devices, inner), "w": (inner, columns // devices), "dy": (rows, columns // devices)}
        else:
            sizes = {"x": (rows, inner // devices), "w": (inner // devices, columns), "dy": (rows // devices, columns)}
        generator = torch.Generator(self.device).manual_seed(self.rank)
        options = {"generator": generator, "device": self.device, "dtype": torch.bfloat16}
        xs = [torch.randn(sizes["x"], **options) for _ in range(calls)]
        w, dy = (torch.randn(sizes[name], **options) for name in ("w", "dy"))
        compute = self._fp8_call if operation.fp8 else self._call
        right = self._quantized(w.t().contiguous()) if operation.fp8 else w
        self.calls = [
            functools.partial(compute, operation, self._quantized(x) if operation.fp8 else x, right, dy) for x in xs
        ]
        return self._errors(operation, self.calls[-1](), xs[-1], w, dy)

    def time(self, calls: int) -> float:
        """Seconds that each of so many calls takes by this GPU's clock."""
        torch = self.torch
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.distributed.barrier()
        torch.cuda.synchronize()
        start.record()
        for number in range(calls):
            self.calls[number % len(self.calls)]()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / calls

    def _call(self, operation: Operation, x: Any, w: Any, dy: Any) -> dict[str, Any]:
        fused = self.torch.ops.symm_mem
        if operation.gathers:
            gathered, (y,) = fused.fused_all_gather_matmul(x, [w], 0, self.group, return_A=operation.backward)
            if not operation.backward:
                return {"y": y}
            dx = fused.fused_matmul_reduce_scatter(dy, w.t(), "sum", 0, self.group)
            return {"y": y, "dx": dx, "dkernel": gathered.t() @ dy}
        y = fused.fused_matmul_reduce_scatter(x, w, "sum", 0, self.group)
        if not operation.backward:
            return {"y": y}
        gathered, (dx,) = fused.fused_all_gather_matmul(dy, [w.t()], 0, self.group, return_A=True)
        return {"y": y, "dx": dx, "dkernel": x.t() @ gathered}

    def _fp8_call(self, operation: Operation, x: Any, w: Any, dy: Any) -> dict[str, Any]:
        del dy
        fused, out = self.torch.ops.symm_mem, self.torch.bfloat16
        (x, x_scale), (w, w_scale) = x, w
        w = w.t()  # [inner, columns] with its columns in one piece, as FP8 products want the right side
        if operation.gathers:
            _, (y,) = fused.fused_all_gather_scaled_matmul(
                x, [w], x_scale, [w_scale], 0, self.group, [None], [None], [out], [True]
            )
            return {"y": y}
        y = fused.fused_scaled_matmul_reduce_scatter(
            x,
            w,
            x_scale,
            w_scale,
            "sum",
            0,
            0,
            self.group,
            [x.shape[0], w.shape[1]],
            out_dtype=out,
            use_fast_accum=True,
        )
        return {"y": y}

    def _quantized(self, x: Any) -> tuple[Any, Any]:
        """FP8 and the scale that all devices share."""
        amax = x.abs().max().float()
        self.torch.distributed.all_reduce(amax, self.torch.distributed.ReduceOp.MAX)
        scale = 448 / amax
        return (x.float() * scale).clamp(-448, 448).to(self.torch.float8_e4m3fn), scale.reciprocal()

    def _errors(self, operation: Operation, results: dict[str, Any], x: Any, w: Any, dy: Any) -> dict[str, float]:
        """Of rows all over the results of this device, against float64."""
        if operation.gathers:
            x = self._gathered(x)
            exact = {"y": self._own(x, w), "dx": self._scattered(dy, w.t()), "dkernel": self._own(x.t(), dy)}
        else:
            dy = self._gathered(dy)
            exact = {"y": self._scattered(x, w), "dx": self._own(dy, w.t()), "dkernel": self._own(x.t(), dy)}
        errors = {}
        for name, value in results.items():
            rows, expected = exact[name]
            difference = (value[rows].double() - expected).norm() / expected.norm()
            errors[f"{name}_error"] = float(f"{difference.item():.3g}")
        return errors

    def _gathered(self, x: Any) -> Any:
        whole = x.new_empty((x.shape[0] * self.count, x.shape[1]))
        self.torch.distributed.all_gather_into_tensor(whole, x)
        return whole

    def _rows(self, count: int) -> Any:
        return self.torch.linspace(0, count - 1, dense.CHECKED_ROWS, device=self.device).long().unique()

    def _own(self, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        """(indices, exact rows) of a product of what this device has."""
        rows = self._rows(lhs.shape[0])
        return rows, lhs[rows].double() @ rhs.double()

    def _scattered(self, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        """(indices, exact rows) of this device's part of a sum of products over all devices."""
        part = lhs.shape[0] // self.count
        rows = self._rows(part)
        indices = (self.torch.arange(self.count, device=self.device)[:, None] * part + rows).flatten()
        total = lhs[indices].double() @ rhs.double()
        self.torch.distributed.all_reduce(total)
        return rows, total.chunk(self.count)[self.rank]
