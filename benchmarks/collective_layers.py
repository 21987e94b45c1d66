"""The tensor-parallel linear layers that the family `collective_matmul` measures."""

from dataclasses import dataclass

from jax.sharding import PartitionSpec as P

from benchmarks import shapes

AXIS = "tensor"


@dataclass(frozen=True)
class Operation:
    """What is computed.

    Attributes:
      gathers: all_gather_matmul, else matmul_reduce_scatter.
      backward: with the gradients of x and w.
      fp8: of x and w that were quantized before.
    """

    gathers: bool
    backward: bool = False
    fp8: bool = False

    @property
    def name(self) -> str:
        head = "fp8_" if self.fp8 else ""
        tail = "_forward_backward" if self.backward else ""
        return f"{head}{'all_gather_matmul' if self.gathers else 'matmul_reduce_scatter'}{tail}"


@dataclass(frozen=True)
class Layer:
    """The layer of an operation on this machine.

    Attributes:
      rows, inner, columns: of x [rows, inner] and w [inner, columns], on all devices together.
      devices: that share it.
      sequences: that the rows are of. Where they are gathered each device has a part of each sequence, one behind the
        other, and so it has of the results where sums are scattered.
    """

    operation: Operation
    rows: int
    inner: int
    columns: int
    devices: int
    sequences: int = 1

    @classmethod
    def of(cls, operation: Operation, case: shapes.TensorParallelShape, devices: int) -> "Layer":
        share = devices / (case.tensor_parallel or devices)
        tokens, features = int(case.tokens * share), int(case.features * share)
        widths = (case.hidden, features) if operation.gathers else (features, case.hidden)
        return cls(operation, tokens, *widths, devices, case.sequences)

    @property
    def x(self) -> P:
        return P(AXIS, None) if self.operation.gathers else P(None, AXIS)

    @property
    def w(self) -> P:
        return P(None, AXIS) if self.operation.gathers else P(AXIS, None)

    @property
    def y(self) -> P:
        return self.w

    @property
    def flops(self) -> int:
        """Operations of one device."""
        return (6 if self.operation.backward else 2) * self.rows * self.inner * self.columns // self.devices
