"""What recomputation costs and saves: a train step whose blocks keep all residuals, some, or their inputs alone.

Steps, their implementations and rows are those of `benchmarks.step`: bf16 and te_jax_block_fp8_head keep everything,
te_jax_block_offload keeps inputs and what attention reads and returns, in host memory.
"""

from benchmarks import shapes, step
from benchmarks.harness import Family, Headline

_OURS = tuple(f"te_jax_block_remat{name}" for name in step.REMATS)
IMPLEMENTATIONS = ("bf16", "te_jax_block_fp8_head", *_OURS, "te_jax_block_offload")

FAMILY = Family(
    description="what recomputing blocks costs and saves in a train step",
    cases={"gpu": shapes.STEP_GPU[:2], "cpu": shapes.STEP_CPU},
    implementations=IMPLEMENTATIONS,
    peers=(),
    run_case=step.run_case,
    headline=Headline(
        operation="step",
        figure="time_over_bf16",
        label="Train step with recomputation, time as a multiple of plain JAX's in bfloat16 without",
        implementations=IMPLEMENTATIONS,
    ),
    profiles=True,
    environment=step.ENVIRONMENT,
)
