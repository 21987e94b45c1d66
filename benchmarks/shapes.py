"""Shapes of real models, shared by every benchmark family.

`GPU` cases are the sizes that training on a Hopper GPU meets; `CPU` cases are small enough that a family finishes in
about a minute on two cores.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class LogitsShape:
    """Logits of one language-model step: `rows` tokens by `vocab` classes of `dtype`.

    Attributes:
      rows: tokens in the step, all sequences of the batch together.
      vocab: size of the vocabulary.
      dtype: dtype of the logits, as NumPy names it.
      model: a model whose output layer has this vocabulary.
    """

    rows: int
    vocab: int
    dtype: str
    model: str

    @property
    def name(self) -> str:
        """The case's name in result files and on the command line, such as "8192x32768-bfloat16"."""
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
