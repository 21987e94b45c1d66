"""Operands and results of a training step."""

from typing import Any, NamedTuple

from te_jax import optim
from te_jax.models import join_adapters


class TrainState(NamedTuple):
    """State that one step turns into the next."""

    params: Any  # that are trained: those of the decoder in `Model.parameters`, or its adapters in float32
    optimizer: Any  # of the optax transform
    scaling: Any  # amax histories of delayed scaling; None with every other recipe
    kernels: Any  # like params: a QuantizedArray for each kernel that the optimizer quantized, None elsewhere
    frozen: Any = None  # with adapters, all that the decoder reads besides

    @property
    def operands(self) -> Any:
        """Parameters as the decoder reads them: quantized kernels, and all others."""
        return optim.merge_kernels(self.params, self.kernels)

    def whole(self, operands: Any) -> Any:
        """All that the decoder reads."""
        return operands if self.frozen is None else join_adapters(operands, self.frozen)
