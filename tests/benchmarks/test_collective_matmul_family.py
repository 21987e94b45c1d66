"""The collective matmul family: its operands, calls that wait for one another, and torch's processes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import collective_matmul as family
from benchmarks.harness import QUICK, Timing
from benchmarks.shapes import TensorParallelShape
from benchmarks.workers import Workers

CASE = TensorParallelShape(tokens=64, hidden=64, features=128, model="test")
ONE = Timing(samples=1, sample_seconds=1e-6)
ALL_GATHER, REDUCE_SCATTER = family.Operation(gathers=True), family.Operation(gathers=False)


@pytest.fixture
def devices(require_devices, monkeypatch):
    """Four devices, however many there are."""
    require_devices(4)
    every = jax.local_devices
    monkeypatch.setattr(jax, "local_devices", lambda **backend: every(**backend)[:4])
    return jax.local_devices()


@pytest.mark.parametrize("backward", [False, True])
def test_calls_of_a_program_wait_for_one_another_and_none_is_left_out(backward):
    """Whatever XLA leaves out, or runs at the same time, would make calls look faster than they are."""
    calls, shape = 3, (64, 32)

    def call(x, w, dy):
        return {"y": x @ w} if dy is None else {"dx": dy @ w.T, "y": x @ w, "dkernel": x.T @ dy}

    xs, w = tuple(jnp.full(shape, i + 1.0) for i in range(calls)), jnp.ones((32, 16))
    dy = jnp.ones((64, 16)) if backward else None
    program = jax.jit(family._chained(call), donate_argnums=(0, 1)).lower(xs, dy, w).compile()
    cost, memory = program.cost_analysis(), program.memory_analysis()
    assert cost is not None
    assert memory is not None
    assert cost["flops"] >= calls * (3 if backward else 1) * 2 * 64 * 32 * 16
    assert memory.alias_size_in_bytes == sum(x.nbytes for x in jax.tree.leaves((xs, dy)))
    assert " copy(" not in str(program.as_text())  # operands are written in place

    for name, value in call(xs[0], w, dy).items():
        poisoned = value.at[0, 0].set(jnp.nan)
        for operand in jax.tree.leaves((xs[1], dy)):
            written = family._after({"other": value, name: poisoned}, operand)
            assert jnp.isnan(written[0, 0])  # so it waits for this result
            np.testing.assert_array_equal(family._after({name: value}, operand), operand.at[0, 0].set(0))

    written, _, results = program(xs, dy, w)
    np.testing.assert_array_equal(jnp.stack(written)[:, 0, :2], [[1, 1], [0, 2], [0, 3]])
    np.testing.assert_array_equal(results["y"], jnp.full((64, 16), 96.0).at[0].set(93))


def test_shares_of_four_devices_on_two():
    case = TensorParallelShape(8192, 4096, 14336, tensor_parallel=4, model="test")
    assert case.name == "8192x4096x14336-tp4"
    gather, scatter = (family.Layer.of(operation, case, 2) for operation in (ALL_GATHER, REDUCE_SCATTER))
    assert (gather.rows // 2, gather.inner, gather.columns // 2) == (8192 // 4, 4096, 14336 // 4)
    assert (scatter.rows // 2, scatter.inner // 2, scatter.columns) == (8192 // 4, 14336 // 4, 4096)
    whole = family.Layer.of(ALL_GATHER, TensorParallelShape(8192, 4096, 14336, model="test"), 4)
    assert gather.flops == whole.flops // 2  # the same columns of half as many gathered rows


@pytest.mark.usefixtures("devices")
def test_results_of_several_sequences_are_right():
    case = TensorParallelShape(tokens=192, hidden=64, features=128, model="test", sequences=3, sweep=True)
    assert case.name == "3x64x64x128"
    result = family.run_case(case, ("te_jax_ring", "gemm_alone"), ONE)
    assert not result.wrong
    found = [(row["operation"], row["implementation"]) for row in result.rows]
    names = ("all_gather_matmul", "matmul_reduce_scatter")
    assert found == [(operation, name) for operation in names for name in ("te_jax_ring", "gemm_alone")]


@pytest.mark.parametrize(
    ("case", "count", "reason"),
    [
        (CASE, 1, "set XLA_FLAGS=--xla_force_host_platform_device_count"),
        (TensorParallelShape(64, 64, 128, tensor_parallel=4, model="test"), 4, "for fewer than 4 devices"),
        (CASE, 3, "cannot be split over 3 devices"),
        (TensorParallelShape(96, 64, 128, sequences=16, model="test"), 4, "cannot be split over 4 devices"),
    ],
)
def test_what_cannot_be_run_says_why(case, count, reason, devices, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda **_: devices[:count])
    if reason.startswith("set") and devices[0].platform != "cpu":
        reason = "it needs 2 devices"
    result = family.run_case(case, family.IMPLEMENTATIONS, QUICK)
    assert not result.rows
    (problem,) = result.skipped
    assert reason in problem["reason"]


# Torch's processes, with other work for them


class Rank:
    """What a process of these tests does in place of torch."""

    def __init__(self, rank, count, file):
        self.rank, self.count, self.file = rank, count, file
        self.clock = 0.0

    def where(self):
        return self.rank, self.count, self.file

    def ready(self):
        pass

    def prepare(self, layer, calls):
        del layer
        return {"y_error": 0.001 * (self.rank + 1) * calls}

    def time(self, calls):
        self.clock += 1.0
        return self.clock + 0.1 * self.rank + 0.001 * calls

    def all_raise(self):
        raise ValueError("not on this GPU\nmore")


@pytest.fixture
def workers():
    workers = Workers(2, Rank)
    yield workers
    workers.close()


def test_torch_takes_the_slowest_clock_and_the_largest_error(workers):
    (first, count, file), (second, *others) = workers.ask("where")
    assert (first, second, count) == (0, 1, 2)
    assert others == [2, file]

    candidate = family._build_torch(family.Layer.of(ALL_GATHER, CASE, 2), workers)
    calls = family._CALLS[jax.default_backend()]
    assert candidate.read(None) == {"y_error": 0.002 * calls}
    for programs in (5, 1, 3, 1, 3):  # as the harness does: a single program before each sample
        for arguments in candidate.arguments(programs):
            candidate.call(*arguments)
        candidate.wait(None)
    expected = [clock + 0.1 + 0.003 * calls for clock in (3, 5)]
    assert candidate.seconds([9.0, 9.0]) == pytest.approx(expected)  # its own clock, not the harness'

    with pytest.raises(RuntimeError, match=r"ValueError: not on this GPU$"):
        workers.ask("all_raise")
    assert len(workers.ask("where")) == 2  # what all of them refuse costs none of them its life
