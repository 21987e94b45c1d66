"""Shapes of real models, shared by every benchmark family.

`GPU` cases are the sizes that training on a Hopper GPU meets; `CPU` cases are small enough that a family finishes in
about a minute on two cores. The `name` of a shape is the case's name in result files and on the command line.
"""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class _OfModel:
    """The shape of a part of `model`, or of one like it."""

    model: str


@dataclass(frozen=True, kw_only=True)
class _OfDecoder(_OfModel):
    """The shape of blocks of a decoder of the Llama family.

    Attributes:
      hidden, mlp: widths of the residual stream and between the gated projections.
      heads, kv_heads, head_dim: of attention.
    """

    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class LogitsShape(_OfModel):
    """Logits of one language-model step: `rows` tokens by `vocab` classes of `dtype`.

    Attributes:
      rows: tokens in the step, all sequences of the batch together.
      vocab: size of the vocabulary.
      dtype: dtype of the logits, as NumPy names it.
    """

    rows: int
    vocab: int
    dtype: str

    @property
    def name(self) -> str:  # "8192x32768-bfloat16"
        return f"{self.rows}x{self.vocab}-{self.dtype}"

    @property
    def bytes(self) -> int:
        """Bytes of the logits in device memory."""
        return self.rows * self.vocab * {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]


LOGITS_GPU = (
    LogitsShape(rows=8192, vocab=32768, dtype="bfloat16", model="Mistral 7B v0.3"),
    LogitsShape(rows=8192, vocab=128256, dtype="bfloat16", model="Llama 3"),
    LogitsShape(rows=4096, vocab=262144, dtype="bfloat16", model="Gemma 3"),
)

LOGITS_CPU = (
    LogitsShape(rows=4096, vocab=256, dtype="float32", model="bytes as tokens, te-jax train"),
    LogitsShape(rows=512, vocab=32768, dtype="float32", model="Mistral 7B v0.3"),
    LogitsShape(rows=512, vocab=32768, dtype="bfloat16", model="Mistral 7B v0.3"),
)


@dataclass(frozen=True)
class HeadShape(_OfModel):
    """The output head of a language model, of float32 or bfloat16 kernels [hidden, vocab], and its loss.

    Attributes:
      tokens: in the step, all sequences of the batch together.
      hidden, vocab: width of the hidden states, and size of the vocabulary.
      operations: of `benchmarks.linear_cross_entropy`.
      full_logits: whether implementations that hold all logits are measured, too.
    """

    tokens: int
    hidden: int
    vocab: int
    operations: tuple[str, ...]
    full_logits: bool = True

    @property
    def name(self) -> str:  # "8192x4096x128256"
        return f"{self.tokens}x{self.hidden}x{self.vocab}"


_LLAMA_HEAD = {"hidden": 4096, "vocab": 128_256, "model": "Llama 3 8B"}
_QWEN_HEAD = {"hidden": 4096, "vocab": 151_936, "model": "Qwen 3 8B"}
_GEMMA_HEAD = {"hidden": 4096, "vocab": 262_144, "model": "the vocabulary of Gemma 3"}
HEAD_GPU = (
    HeadShape(tokens=8192, operations=("master", "bf16", "trained"), **_LLAMA_HEAD),
    HeadShape(tokens=4096, operations=("master", "bf16"), **_LLAMA_HEAD),
    HeadShape(tokens=16384, operations=("master", "bf16"), **_LLAMA_HEAD),
    HeadShape(tokens=8192, operations=("policy",), **_QWEN_HEAD),
    HeadShape(tokens=8192, operations=("master", "bf16"), **_GEMMA_HEAD),
    HeadShape(tokens=65536, operations=("master", "bf16"), full_logits=False, **_GEMMA_HEAD),
)

HEAD_CPU = (
    HeadShape(
        tokens=512, hidden=128, vocab=4096, operations=("master", "bf16", "trained", "policy"), model="te-jax train"
    ),
)


@dataclass(frozen=True)
class GemmShape(_OfModel):
    """A product of [m, k] and [k, n].

    Attributes:
      m: rows of the result: tokens.
      n: columns of the result: features out.
      k: values summed over: features in.
      products: of that size, under `jax.vmap`: experts; None without it.
    """

    m: int
    n: int
    k: int
    products: int | None = None

    @property
    def name(self) -> str:  # "8192x28672x8192", "64x512x1024x2048"
        return "x".join(map(str, (*self.batch, self.m, self.n, self.k)))

    @property
    def batch(self) -> tuple[int, ...]:
        """The products, if several."""
        return () if self.products is None else (self.products,)


GEMM_GPU = (
    GemmShape(m=8192, n=8192, k=8192, model="Llama 3 70B, attention output"),
    GemmShape(m=8192, n=28672, k=8192, model="Llama 3 70B, MLP up"),
    GemmShape(m=8192, n=14336, k=4096, model="Llama 3 8B, MLP up"),
    GemmShape(m=16384, n=4096, k=4096, model="Llama 3 8B, attention output"),
    GemmShape(m=8192, n=4096, k=14336, model="Llama 3 8B, MLP down"),
    GemmShape(m=4096, n=7168, k=16384, model="DeepSeek-V3, attention output"),
    GemmShape(m=512, n=1024, k=2048, model="64 experts, 512 tokens each", products=64),
    GemmShape(m=2048, n=2048, k=4096, model="8 experts, 2048 tokens each", products=8),
)

GEMM_CPU = (
    GemmShape(m=512, n=512, k=512, model="te-jax train"),
    GemmShape(m=1024, n=512, k=2048, model="te-jax train, MLP down"),
    GemmShape(m=256, n=256, k=256, model="8 experts, 256 tokens each", products=8),
)

DENSE_GPU = GEMM_GPU[:4]
DENSE_CPU = GEMM_CPU[:2]


@dataclass(frozen=True)
class MatrixShape(_OfModel):
    """A tensor of a linear layer, as a matrix.

    Attributes:
      rows: tokens, or features of a kernel.
      cols: features.
      dtype: as NumPy names it.
      examples: of that size, under `jax.vmap`: experts; None without it.
    """

    rows: int
    cols: int
    dtype: str
    examples: int | None = None

    @property
    def name(self) -> str:  # "8192x8192-bfloat16", "64x512x2048-bfloat16"
        return "x".join(map(str, self.shape)) + f"-{self.dtype}"

    @property
    def shape(self) -> tuple[int, ...]:
        """The examples, if any, rows and columns."""
        return (*self.batch, self.rows, self.cols)

    @property
    def batch(self) -> tuple[int, ...]:
        """The examples, if any."""
        return () if self.examples is None else (self.examples,)

    @property
    def elements(self) -> int:
        """Number of values, of all examples."""
        return math.prod(self.shape)


QUANTIZE_GPU = (
    MatrixShape(rows=8192, cols=8192, dtype="bfloat16", model="Llama 3 70B, 8192 tokens"),
    MatrixShape(rows=16384, cols=8192, dtype="bfloat16", model="Llama 3 70B, 16384 tokens"),
    MatrixShape(rows=512, cols=2048, dtype="bfloat16", model="64 experts, 512 tokens each", examples=64),
    MatrixShape(rows=2048, cols=4096, dtype="bfloat16", model="8 experts, 2048 tokens each", examples=8),
)

QUANTIZE_CPU = (
    MatrixShape(rows=2048, cols=1024, dtype="bfloat16", model="te-jax train"),
    MatrixShape(rows=2048, cols=1024, dtype="float32", model="te-jax train"),
    MatrixShape(rows=256, cols=256, dtype="bfloat16", model="8 experts, 256 tokens each", examples=8),
)

ACTIVATION_GPU = (
    MatrixShape(rows=8192, cols=4096, dtype="bfloat16", model="8192 tokens, 4096 features"),
    MatrixShape(rows=16384, cols=8192, dtype="bfloat16", model="16384 tokens, 8192 features"),
    MatrixShape(rows=8192, cols=14336, dtype="bfloat16", model="Llama 3 8B, 8192 tokens"),
)

ACTIVATION_CPU = (MatrixShape(rows=2048, cols=1024, dtype="bfloat16", model="te-jax train"),)


NORM_GPU = (
    MatrixShape(rows=8192, cols=4096, dtype="bfloat16", model="Llama 3 8B, 8192 tokens"),
    MatrixShape(rows=16384, cols=8192, dtype="bfloat16", model="Llama 3 70B, 16384 tokens"),
    MatrixShape(rows=8192, cols=14336, dtype="bfloat16", model="wide rows"),
)

NORM_CPU = (
    MatrixShape(rows=2048, cols=1024, dtype="bfloat16", model="te-jax train"),
    MatrixShape(rows=2048, cols=1024, dtype="float32", model="te-jax train"),
)


@dataclass(frozen=True)
class LeavesShape(_OfModel):
    """Parameters of a model: as many matrices of one shape.

    Attributes:
      leaves: number of matrices.
      rows, cols: of each.
    """

    leaves: int
    rows: int
    cols: int

    @property
    def name(self) -> str:  # "16x4096x4096"
        return f"{self.leaves}x{self.rows}x{self.cols}"

    @property
    def elements(self) -> int:
        return self.leaves * self.rows * self.cols


LEAVES_GPU = (
    LeavesShape(leaves=16, rows=4096, cols=4096, model="268 million parameters"),
    LeavesShape(leaves=16, rows=4096, cols=16384, model="1.07 billion parameters"),
    LeavesShape(leaves=10, rows=1600, cols=2560, model="41 million parameters"),
    LeavesShape(leaves=10_000, rows=64, cols=64, model="41 million parameters in small leaves"),
)

LEAVES_CPU = (LeavesShape(leaves=4, rows=512, cols=512, model="one million parameters"),)


@dataclass(frozen=True)
class MessageSizes:
    """Messages between devices, each four times as large as the one before.

    Attributes:
      smallest, largest: bytes.
      devices: how many take part; None for all that are there.
    """

    smallest: int
    largest: int
    devices: int | None

    @property
    def name(self) -> str:  # "2x4KiB-4MiB", or "4KiB-1GiB" for all devices
        head = "" if self.devices is None else f"{self.devices}x"
        return f"{head}{bytes_as_text(self.smallest)}-{bytes_as_text(self.largest)}"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of every message."""
        sizes = [self.smallest]
        while sizes[-1] * 4 <= self.largest:
            sizes.append(sizes[-1] * 4)
        return tuple(sizes)


def bytes_as_text(size: int) -> str:
    """A power of two as in "64KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size}{unit}"
        size //= 1024
    return f"{size}GiB"


MESSAGES_GPU = (MessageSizes(smallest=2**12, largest=2**30, devices=None),)

MESSAGES_CPU = (
    MessageSizes(smallest=2**12, largest=2**22, devices=2),
    MessageSizes(smallest=2**12, largest=2**22, devices=4),
)


@dataclass(frozen=True)
class TensorParallelShape(_OfModel):
    """Two linear layers that are split over devices: into the features, and back to the hidden size.

    Attributes:
      tokens, hidden, features: of the whole layers.
      tensor_parallel: the number of devices whose share of the layers each device has; None for all that are there.
      sequences: that the tokens are of, all of one length; every device has a part of each. Several in sweeps only.
      sweep: whether the case is one of a series that shows which way to communicate is best for how many tokens.
    """

    tokens: int
    hidden: int
    features: int
    tensor_parallel: int | None = None
    sequences: int = 1
    sweep: bool = False

    @property
    def name(self) -> str:  # "8192x8192x28672", "…-tp4", "8x1024x8192x28672"
        tokens = self.tokens if self.sequences == 1 else f"{self.sequences}x{self.tokens // self.sequences}"
        tail = "" if self.tensor_parallel is None else f"-tp{self.tensor_parallel}"
        return f"{tokens}x{self.hidden}x{self.features}{tail}"


_MLP_70B = TensorParallelShape(8192, 8192, 28672, model="Llama 3 70B, MLP up and down")
_TENSOR_PARALLEL = (
    _MLP_70B,
    TensorParallelShape(8192, 8192, 10240, model="Llama 3 70B, queries, keys and values"),
    TensorParallelShape(16384, 4096, 14336, model="Llama 3 8B, MLP up and down"),
)

TENSOR_PARALLEL_GPU = (
    *_TENSOR_PARALLEL,
    *(replace(case, tensor_parallel=4) for case in _TENSOR_PARALLEL),
    *(replace(_MLP_70B, tokens=tokens, sweep=True) for tokens in (512, 1024, 2048, 4096, 16384)),
    *(replace(_MLP_70B, sequences=sequences, sweep=True) for sequences in (2, 8, 16)),
)

TENSOR_PARALLEL_CPU = (
    TensorParallelShape(tokens=512, hidden=256, features=512, model="te-jax train, MLP up and down"),
    TensorParallelShape(tokens=1024, hidden=256, features=512, model="te-jax train, MLP up and down", sweep=True),
    TensorParallelShape(1024, 256, 512, model="te-jax train, MLP up and down", sequences=4, sweep=True),
)


@dataclass(frozen=True, kw_only=True)
class BlockShape(_OfDecoder):
    """A block of a decoder of the Llama family, for one sequence.

    Attributes:
      sequence: tokens.
    """

    sequence: int

    @property
    def name(self) -> str:  # "8192x8192x28672"
        return f"{self.sequence}x{self.hidden}x{self.mlp}"


BLOCK_GPU = (
    BlockShape(sequence=8192, hidden=8192, mlp=28672, heads=64, kv_heads=8, head_dim=128, model="Llama 3 70B"),
)

BLOCK_CPU = (BlockShape(sequence=128, hidden=128, mlp=256, heads=16, kv_heads=8, head_dim=16, model="te-jax train"),)


@dataclass(frozen=True, kw_only=True)
class LayerShape(_OfDecoder):
    """Layers of a decoder of the Llama family on one device.

    Attributes:
      batch, sequence: sequences, and tokens of each.
      operations: which layers, of `benchmarks.layer`.
    """

    batch: int
    sequence: int
    operations: tuple[str, ...]

    @property
    def name(self) -> str:  # "1x8192x4096x14336"
        return f"{self.batch}x{self.sequence}x{self.hidden}x{self.mlp}"


@dataclass(frozen=True, kw_only=True)
class StepShape(_OfDecoder):
    """A train step of a decoder of the Llama family.

    Attributes:
      short: names the model in the case's name.
      depths: numbers of layers. The first is the case's; the time of one layer follows from the last.
      batch, sequence: sequences of a microbatch on all devices, and tokens of each.
      vocab: number of tokens that there are.
      microbatches: whose gradients are added up before the optimizer's step.
      experts, top_k: of the mixture in the place of each MLP, whose width is then that of one expert; 0 for none.
      remat: whether blocks are recomputed in the backward pass, and only their inputs kept.
      devices: that share the step.
      one_sequence: whether the devices share each sequence, and not the batch.
    """

    short: str
    depths: tuple[int, ...]
    batch: int
    sequence: int
    vocab: int
    microbatches: int = 1
    experts: int = 0
    top_k: int = 0
    remat: bool = False
    devices: int = 1
    one_sequence: bool = False

    @property
    def name(self) -> str:  # "8b-8x1x8192", "8b-8x1x8192-4microbatches-remat"
        tail = "" if self.microbatches == 1 else f"-{self.microbatches}microbatches"
        tail += "-remat" * self.remat + "-context" * self.one_sequence
        return f"{self.short}-{self.depths[0]}x{self.batch}x{self.sequence}{tail}"

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.microbatches * self.batch * self.sequence


@dataclass(frozen=True)
class AttentionShape(_OfModel):
    """Causal attention of grouped queries in bfloat16.

    Attributes:
      batch, sequence: sequences, and tokens of each.
      heads, kv_heads, head_dim: of query, of key and value, and features of each.
      documents: tokens of those that each sequence consists of.
    """

    batch: int
    sequence: int
    heads: int
    kv_heads: int
    head_dim: int
    documents: tuple[int, ...]

    @property
    def name(self) -> str:  # "1x8192x32x8x128", "1x8192x32x8x128-4documents"
        tail = f"-{len(self.documents)}documents" if len(self.documents) > 1 else ""
        return f"{self.batch}x{self.sequence}x{self.heads}x{self.kv_heads}x{self.head_dim}{tail}"

    @property
    def scores(self) -> int:
        """That tokens see, of all heads, where half a document is hidden."""
        return self.batch * self.heads * sum(count * count for count in self.documents) // 2


_OF_8B = {"heads": 32, "kv_heads": 8, "head_dim": 128, "model": "Llama 3 8B"}
ATTENTION_GPU = (
    AttentionShape(batch=1, sequence=8192, documents=(8192,), **_OF_8B),
    AttentionShape(batch=4, sequence=2048, documents=(2048,), **_OF_8B),
    AttentionShape(batch=1, sequence=8192, documents=(2048,) * 4, **_OF_8B),
    AttentionShape(batch=1, sequence=8192, documents=(131, 2900, 47, 512, 1389, 700, 64, 2003, 9, 250, 187), **_OF_8B),
    AttentionShape(batch=4, sequence=8192, documents=(1024,) * 8, **_OF_8B),
    AttentionShape(batch=1, sequence=32768, documents=(32768,), **_OF_8B),
)
ATTENTION_CPU = (
    AttentionShape(batch=2, sequence=128, heads=4, kv_heads=2, head_dim=32, documents=(90, 38), model="te-jax train"),
    AttentionShape(batch=1, sequence=256, heads=4, kv_heads=2, head_dim=32, documents=(256,), model="te-jax train"),
)

_LLAMA_8B = {"hidden": 4096, "mlp": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128, "model": "Llama 3 8B"}
LAYER_GPU = (
    LayerShape(batch=1, sequence=8192, operations=("mlp", "block"), **_LLAMA_8B),
    LayerShape(batch=4, sequence=2048, operations=("block",), **_LLAMA_8B),
)

LAYER_CPU = (
    LayerShape(
        batch=2,
        sequence=128,
        hidden=128,
        mlp=256,
        heads=8,
        kv_heads=4,
        head_dim=16,
        operations=("mlp", "block"),
        model="te-jax train",
    ),
)

_STEP_8B = {"short": "8b", "vocab": 128_256, **_LLAMA_8B}
_STEP_70B = {
    "short": "70b", "vocab": 128_256, "hidden": 8192, "mlp": 28672, "heads": 64, "kv_heads": 8, "head_dim": 128,
    "model": "Llama 3 70B",
}  # fmt: skip
_STEP_QWEN = {
    "short": "qwen3-1.7b", "vocab": 151_936, "hidden": 2048, "mlp": 6144, "heads": 16, "kv_heads": 8, "head_dim": 128,
    "model": "Qwen3 1.7B, without norms of query and key and with a head of its own",
}  # fmt: skip
_STEP_EXPERTS = {
    "short": "qwen3-30b-a3b", "vocab": 151_936, "hidden": 2048, "mlp": 768, "heads": 32, "kv_heads": 4, "head_dim": 128,
    "experts": 128, "top_k": 8, "model": "Qwen3 30B-A3B, without norms of query and key",
}  # fmt: skip
STEP_GPU = (
    StepShape(depths=(8, 4), batch=1, sequence=8192, **_STEP_8B),
    StepShape(depths=(8,), batch=4, sequence=2048, **_STEP_8B),
    StepShape(depths=(8,), batch=1, sequence=8192, microbatches=4, **_STEP_8B),
    StepShape(depths=(2, 1), batch=1, sequence=8192, **_STEP_70B),
    StepShape(depths=(28,), batch=1, sequence=8192, **_STEP_QWEN),
    StepShape(depths=(28,), batch=4, sequence=2048, **_STEP_QWEN),
    StepShape(depths=(4,), batch=1, sequence=8192, microbatches=4, **_STEP_EXPERTS),
    StepShape(depths=(8,), batch=1, sequence=8192, remat=True, **_STEP_8B),
)
STEP_BY_NAME = (StepShape(depths=(8,), batch=1, sequence=32768, remat=True, **_STEP_8B),)

WHOLE_MODEL_GPU = (
    StepShape(depths=(32,), batch=1, sequence=8192, **_STEP_8B),
    StepShape(depths=(32,), batch=1, sequence=8192, microbatches=4, **_STEP_8B),
)

FLAX_MODELS_GPU = (
    StepShape(depths=(8,), batch=1, sequence=8192, **_STEP_8B),
    StepShape(depths=(8,), batch=4, sequence=2048, **_STEP_8B),
    StepShape(depths=(8,), batch=1, sequence=8192, remat=True, **_STEP_8B),
    StepShape(depths=(8,), batch=1, sequence=8192, microbatches=4, **_STEP_8B),
    StepShape(depths=(4,), batch=1, sequence=8192, **_STEP_8B),
)

MUON_GPU = (STEP_GPU[0], STEP_GPU[4])  # of which the kernels matter


@dataclass(frozen=True)
class GenerateShape(_OfModel):
    """Texts that follow prompts.

    Attributes:
      preset: of `te_jax.models.PRESETS`.
      batch: texts.
      prompt, tokens: of each: those that are given, and those that follow.
    """

    preset: str
    batch: int
    prompt: int
    tokens: int

    @property
    def name(self) -> str:  # "8b-16x512+128"
        return f"{self.preset}-{self.batch}x{self.prompt}+{self.tokens}"


GENERATE_GPU = tuple(
    GenerateShape(model="Llama 3 8B", preset="8b", batch=batch, prompt=prompt, tokens=128)
    for batch, prompt in ((1, 512), (16, 512), (64, 2048))
)
GENERATE_CPU = (GenerateShape(model="te-jax train", preset="tiny", batch=2, prompt=16, tokens=16),)

STEP_CPU = (
    StepShape(
        short="train",
        depths=(2, 1),
        batch=2,
        sequence=128,
        hidden=128,
        mlp=256,
        heads=8,
        kv_heads=4,
        head_dim=16,
        vocab=512,
        microbatches=2,
        model="te-jax train",
    ),
)

WHOLE_MODEL_CPU = tuple(replace(case, depths=(2,)) for case in STEP_CPU)

FLAX_MODELS_CPU = tuple(
    replace(case, depths=(2,), microbatches=microbatches, remat=microbatches == 1)
    for case in STEP_CPU
    for microbatches in (1, 2)
)


# Sequences of one device, or its part of one.
FSDP_GPU = (
    StepShape(depths=(8,), batch=1, sequence=8192, remat=True, **_STEP_8B),
    StepShape(depths=(8,), batch=1, sequence=8192, **_STEP_8B),
    StepShape(depths=(8,), batch=1, sequence=8192, microbatches=4, remat=True, **_STEP_8B),
)
# For four GPUs and more, except the second.
FSDP_BY_NAME = (
    StepShape(depths=(32,), batch=1, sequence=8192, remat=True, **_STEP_8B),
    StepShape(depths=(8,), batch=1, sequence=16384, remat=True, one_sequence=True, **_STEP_8B),
    StepShape(depths=(4,), batch=1, sequence=8192, remat=True, **_STEP_EXPERTS),
)
FSDP_CPU = (
    StepShape(
        short="train",
        depths=(2,),
        batch=1,
        sequence=128,
        hidden=512,
        mlp=512,
        heads=4,
        kv_heads=4,
        head_dim=128,
        vocab=512,
        remat=True,
        model="te-jax train",
    ),
)


@dataclass(frozen=True)
class OffloadShape(_OfModel):
    """Layers, or an optimizer, of which a part is in host memory.

    Attributes:
      operations: "input", "hidden" and "optimizer"; see `benchmarks.offload`.
      layers: how many there are.
      tokens: rows of x.
      hidden, mlp: widths of a layer, and sizes of a kernel.
      kernels: of the optimizer.
    """

    operations: tuple[str, ...]
    layers: int
    tokens: int
    hidden: int
    mlp: int
    kernels: int

    @property
    def name(self) -> str:  # "input-16x16384x4096x14336"
        of_layers = f"{self.layers}x{self.tokens}" if self.operations != ("optimizer",) else f"{self.kernels}"
        return f"{'-'.join(self.operations)}-{of_layers}x{self.hidden}x{self.mlp}"

    @property
    def state_bytes(self) -> int:
        """Bytes of both moments of the optimizer."""
        return 8 * self.kernels * self.hidden * self.mlp


_OFFLOAD_GPU = OffloadShape(("input",), layers=16, tokens=16384, hidden=4096, mlp=14336, kernels=26, model="Llama 3 8B")
_OFFLOAD_CPU = OffloadShape(("input",), layers=4, tokens=256, hidden=256, mlp=1024, kernels=4, model="te-jax train")
OFFLOAD_GPU, OFFLOAD_CPU = (
    tuple(replace(case, operations=(operation,)) for operation in ("input", "hidden", "optimizer"))
    for case in (_OFFLOAD_GPU, _OFFLOAD_CPU)
)


@dataclass(frozen=True)
class ExpertsShape(_OfModel):
    """Experts of one layer, and how tokens are spread over them.

    Attributes:
      operations: of `benchmarks.moe`.
      experts: how many there are.
      tokens, top_k: tokens, and experts of each.
      hidden, mlp: widths of the residual stream and of an expert.
      load: "balanced", "zipf" (the n-th expert has 1/n of the first one's tokens), or "one_hot" (one has all).
    """

    operations: tuple[str, ...]
    experts: int
    tokens: int
    top_k: int
    hidden: int
    mlp: int
    load: str

    @property
    def name(self) -> str:  # "8x32768x4096x14336-zipf"
        return f"{self.experts}x{self.rows}x{self.hidden}x{self.mlp}-{self.load}"

    @property
    def rows(self) -> int:
        """Rows that the experts multiply: tokens, as often as they have experts."""
        return self.tokens * self.top_k


_PRODUCTS = ("forward", "dgrad", "wgrad")
_WHOLE_LAYER = ("layer", "permute", "permute_quantize")
_LOADS = ("balanced", "zipf", "one_hot")
_WIDE_EXPERTS = ExpertsShape(
    _PRODUCTS, experts=8, tokens=32768, top_k=1, hidden=4096, mlp=14336, load="balanced", model="8 wide experts"
)
_FINE_EXPERTS = ExpertsShape(
    _PRODUCTS, experts=128, tokens=8192, top_k=8, hidden=2048, mlp=768, load="balanced", model="Qwen3 30B-A3B"
)
_OLMOE_LAYER = ExpertsShape(
    _WHOLE_LAYER, experts=64, tokens=32768, top_k=8, hidden=2048, mlp=1024, load="balanced", model="OLMoE 7B"
)
_QWEN_LAYER = replace(_FINE_EXPERTS, operations=_WHOLE_LAYER, tokens=16384)
MOE_GPU = (
    *(replace(case, load=load) for case in (_WIDE_EXPERTS, _FINE_EXPERTS) for load in _LOADS),
    *(replace(case, load=load) for case in (_OLMOE_LAYER, _QWEN_LAYER) for load in _LOADS[:2]),
    replace(_OLMOE_LAYER, tokens=4096),  # few enough for `lax.ragged_dot`
    replace(_QWEN_LAYER, tokens=32768, operations=("share",)),
)

_SMALL_EXPERTS = ExpertsShape(
    _PRODUCTS, experts=8, tokens=512, top_k=2, hidden=128, mlp=192, load="balanced", model="te-jax train"
)
MOE_CPU = (
    *(replace(_SMALL_EXPERTS, load=load) for load in _LOADS),
    replace(_SMALL_EXPERTS, operations=(*_WHOLE_LAYER, "share"), tokens=1024),
)
