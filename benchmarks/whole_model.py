"""Train steps of a model with all of its layers on one device: which of them fit, and how fast they are.

Steps, their implementations and rows are those of `benchmarks.step`; nothing is recomputed unless a name says so. The
state of plain JAX is float32, and of Adam's moments the first is bfloat16 in "…_mu_bf16". What does not fit is listed
as not measured.
"""

from benchmarks import shapes, step
from benchmarks.harness import Family, Headline

IMPLEMENTATIONS = ("bf16", *step.RECOMPUTING, "te_jax_block_fp8_logits", "te_jax_block_fp8_moments")

FAMILY = Family(
    description="train steps of all layers of Llama 3 8B on one device, with one and four microbatches",
    cases={"gpu": shapes.WHOLE_MODEL_GPU, "cpu": shapes.WHOLE_MODEL_CPU},
    implementations=IMPLEMENTATIONS,
    peers=("bf16", *step.RECOMPUTING),
    run_case=step.run_case,
    headline=Headline(
        operation="step",
        figure="time_over_bf16",
        label="Train step of all layers of Llama 3 8B on one device, time as a multiple of plain JAX's in bfloat16",
        implementations=IMPLEMENTATIONS,
    ),
    profiles=True,
    # Four microbatches need 63 GB of temporaries, which are nowhere in one piece once a state has been made.
    environment={"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.94", "XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"},
)
