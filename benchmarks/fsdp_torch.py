"""A peer of `benchmarks.fsdp`: torch's FSDP2 as torchtitan trains Llama 3, in a process for each GPU.

Blocks are checkpointed where the case says so, compiled one by one, and sharded by `fully_shard` with parameters in
bfloat16 and gradients summed in float32; attention is cuDNN's or flash attention, AdamW is fused. With FP8, torchao
multiplies kernels of blocks with one scale a tensor and gathers them so.
"""

import contextlib
import dataclasses
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import profile, shapes
from benchmarks.collective_torch import ENVIRONMENT
from benchmarks.harness import Timing, rounded
from benchmarks.step import CHECKED_STEPS, Elsewhere
from benchmarks.workers import Workers

PATIENCE = 240.0  # blocks are compiled
_NORM_EPS, _ROPE_THETA = 1e-5, 500_000.0


def measured(case: shapes.StepShape, batch: tuple[Any, Any], timing: Timing, *, fp8: bool) -> Elsewhere:
    """Trains on all GPUs, whose memory JAX must not have taken yet. The processes end with it.

    Args:
      case: on all devices.
      batch: tokens and targets [microbatches, batch, sequence].
      timing: how long.
      fp8: by torchao.
    """
    workers = Workers(case.devices, Rank, PATIENCE)
    samples, steps = max(2, timing.samples * 2 // 3), max(1, 4 // case.microbatches)
    try:
        found = workers.ask("train", case, *map(np.asarray, batch), samples, steps, fp8)
    finally:
        workers.close()
    slowest = [max(each) for each in zip(*(one.seconds for one in found), strict=True)]
    return dataclasses.replace(found[0], seconds=slowest)


class Rank:
    """One of torch's processes.

    Args:
      rank, count: of this process.
      file: where all of them meet.
    """

    def __init__(self, rank: int, count: int, file: str):
        os.environ.update(ENVIRONMENT)  # read when torch is imported
        import torch  # pyright: ignore[reportMissingImports]
        import torch.distributed  # pyright: ignore[reportMissingImports]

        self.torch, self.rank, self.count = torch, rank, count
        self.on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", rank) if self.on_gpu else torch.device("cpu")
        if self.on_gpu:
            torch.cuda.set_device(self.device)
        store = torch.distributed.FileStore(file, count)
        backend = "nccl" if self.on_gpu else "gloo"
        torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=count)

    def train(
        self, case: shapes.StepShape, tokens: np.ndarray, targets: np.ndarray, samples: int, steps: int, fp8: bool
    ) -> Elsewhere:
        torch = self.torch
        per_device = case.batch // self.count
        own = slice(self.rank * per_device, (self.rank + 1) * per_device)
        batches = [
            tuple(torch.from_numpy(x[i, own].astype(np.int64)).to(self.device) for x in (tokens, targets))
            for i in range(case.microbatches)
        ]
        model, scale = self._model(case, fp8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        loss_of = self._compiled(
            lambda logits, targets: torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        )

        def step() -> Any:
            total = torch.zeros((), device=self.device)
            for x, y in batches:
                loss = loss_of(model(x), y) / len(batches)
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            scale()
            return total

        with self._attention():
            losses: list[float] = []
            spent: list[float] = []
            for _ in range(CHECKED_STEPS):
                start = time.perf_counter()
                loss = step()
                torch.distributed.all_reduce(loss)
                losses.append(rounded(loss.item() / self.count))
                spent.append(time.perf_counter() - start)
            seconds: list[float] = []
            for _ in range(samples):
                torch.distributed.barrier()
                self._wait()
                start = time.perf_counter()
                for _ in range(steps):
                    step()
                self._wait()
                seconds.append((time.perf_counter() - start) / steps)
            figures: dict[str, Any] = {}
            if self.on_gpu:
                figures["peak_bytes"] = torch.cuda.max_memory_allocated()
                with contextlib.suppress(Exception):  # a trace that fails must not cost the times
                    figures["breakdown_ms"] = self._breakdown(step)
        return Elsewhere(seconds, losses, spent[0] - spent[-1], figures)

    def _wait(self) -> None:
        if self.on_gpu:
            self.torch.cuda.synchronize()

    def _compiled(self, function: Any) -> Any:
        return self.torch.compile(function) if self.on_gpu else function

    def _attention(self) -> Any:
        if not self.on_gpu:
            return contextlib.nullcontext()
        from torch.nn.attention import SDPBackend, sdpa_kernel  # pyright: ignore[reportMissingImports]

        return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True)

    def _breakdown(self, step: Any) -> dict[str, float]:
        """Times by kind as `benchmarks.profile` has them, of the first process's GPU."""
        torch = self.torch
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            step()
            self._wait()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            trace.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        streams = [
            {**event, "pid": 0, "tid": 0}
            for event in events
            if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        ]
        names = [
            {"name": f"{what}_name", "pid": 0, "tid": 0, "args": {"name": name}}
            for what, name in (("process", "GPU"), ("thread", "Stream"))
        ]
        found = profile.sorted_kernels([*names, *streams], calls=1)
        return {kind: rounded(value) for kind, value in found.milliseconds.items()}

    def _model(self, case: shapes.StepShape, fp8: bool) -> tuple[Any, Any]:
        """The sharded model, and what is to be called after each step of the optimizer."""
        torch = self.torch
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (  # pyright: ignore[reportMissingImports]
            checkpoint_wrapper,
        )
        from torch.distributed.fsdp import (  # pyright: ignore[reportMissingImports]
            MixedPrecisionPolicy,
            fully_shard,
        )

        with torch.device("meta"):
            model = _decoder(torch, case)
        scale = lambda: None  # noqa: E731
        if fp8:
            from torchao import float8  # pyright: ignore[reportMissingImports]

            options = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
            float8.convert_to_float8_training(
                model, config=options, module_filter_fn=lambda _, name: not name.endswith("head")
            )
            scale = lambda: float8.precompute_float8_dynamic_scale_for_fsdp(model)  # noqa: E731
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        last = len(model.layers) - 1
        for i, block in enumerate(model.layers):
            block = checkpoint_wrapper(block, preserve_rng_state=False) if case.remat else block
            model.layers[i] = self._compiled(block)
            fully_shard(model.layers[i], mp_policy=policy, reshard_after_forward=i < last)
        fully_shard(model.embedding, mp_policy=policy)
        fully_shard([model.norm, model.head], mp_policy=policy, reshard_after_forward=False)
        fully_shard(model, mp_policy=policy)
        model.to_empty(device=self.device)
        torch.manual_seed(0)
        with torch.no_grad():
            for name, value in model.named_parameters():
                if value.ndim == 1:
                    value.fill_(1.0)
                else:
                    inner = 1 if "embedding" in name else value.shape[1]
                    wide = 2 * case.depths[0] if "out." in name or "down." in name else 1
                    value.normal_(std=(inner * wide) ** -0.5)
            cos, sin = _tables(torch, case, self.device)
            for block in model.layers:
                for module in block.modules():
                    if hasattr(module, "tables"):
                        module.tables = (cos, sin)
        scale()
        return model, scale


def _tables(torch: Any, case: shapes.StepShape, device: Any) -> tuple[Any, Any]:
    half = torch.arange(0, case.head_dim, 2, device=device, dtype=torch.float32)
    angles = torch.outer(torch.arange(case.sequence, device=device), _ROPE_THETA ** (-half / case.head_dim))
    return angles.cos()[None, :, None], angles.sin()[None, :, None]


def _decoder(torch: Any, case: shapes.StepShape) -> Any:
    nn, functional = torch.nn, torch.nn.functional

    def linear(inner: int, outer: int) -> Any:
        return nn.Linear(inner, outer, bias=False)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            width = case.heads * case.head_dim, case.kv_heads * case.head_dim
            self.attention_norm, self.mlp_norm = (nn.RMSNorm(case.hidden, eps=_NORM_EPS) for _ in range(2))
            self.query, self.out = linear(case.hidden, width[0]), linear(width[0], case.hidden)
            self.key, self.value = linear(case.hidden, width[1]), linear(case.hidden, width[1])
            self.gate, self.up = linear(case.hidden, case.mlp), linear(case.hidden, case.mlp)
            self.down = linear(case.mlp, case.hidden)
            self.tables: Any = None

        def rotated(self, x: Any) -> Any:
            cos, sin = self.tables
            first, second = x.float().chunk(2, dim=-1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

        def forward(self, x: Any) -> Any:
            h = self.attention_norm(x)
            query, key, value = (
                kernel(h).unflatten(-1, (-1, case.head_dim)) for kernel in (self.query, self.key, self.value)
            )
            mixed = functional.scaled_dot_product_attention(
                self.rotated(query).transpose(1, 2),
                self.rotated(key).transpose(1, 2),
                value.transpose(1, 2),
                is_causal=True,
                enable_gqa=True,
            )
            x = x + self.out(mixed.transpose(1, 2).flatten(-2))
            h = self.mlp_norm(x)
            return x + self.down(functional.silu(self.gate(h)) * self.up(h))

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(case.vocab, case.hidden)
            self.layers = nn.ModuleList(Block() for _ in range(case.depths[0]))
            self.norm = nn.RMSNorm(case.hidden, eps=_NORM_EPS)
            self.head = linear(case.hidden, case.vocab)

        def forward(self, tokens: Any) -> Any:
            x = self.embedding(tokens)
            for block in self.layers:
                x = block(x)
            return self.head(self.norm(x))

    return Decoder()
