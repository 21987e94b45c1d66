"""Several processes: the same calls through memory that they share."""

import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from xla_flags import environment_without_devices

from te_jax import native

pytestmark = pytest.mark.skipif(not native.available(), reason="needs te_jax's extension")

WORKER = Path(__file__).with_name("process_worker.py")


def run(processes, *arguments, devices=1):
    """What each of them printed. They leave no shared memory behind."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = environment_without_devices() | {"TE_JAX_TEST_GPUS": str(len(jax.devices()))}
    if devices > 1:
        environment["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={devices}"
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(processes), str(port), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(processes)
    ]
    try:
        outputs = [worker.communicate(timeout=200)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    left = [path.name for worker in workers for path in Path("/dev/shm").glob(f"te_jax-{worker.pid}-*")]
    assert not left
    return outputs


@pytest.mark.parametrize("processes", [4])
def test_processes(processes):
    for output in run(processes):
        assert "fine" in output.splitlines(), output


@pytest.mark.parametrize("processes", [2])
def test_weights_that_share_a_gather(processes):
    for output in run(processes, "weights"):
        assert "fine" in output.splitlines(), output


def test_a_process_that_leaves():
    stayed, left = run(2, "leave")
    assert "left" in left.splitlines(), left
    assert "fine" in stayed.splitlines(), stayed


def test_a_process_that_is_late():
    for output in run(2, "late"):
        assert "fine" in output.splitlines(), output


@pytest.mark.parametrize(("task", "processes"), [("alone", 3), ("fails", 2)])
def test_memory_that_cannot_be_shared_at_first(task, processes):
    """Whoever waits hears of it, long before the limit of 300 s, and the next attempt is everybody's."""
    for output in run(processes, task):
        assert "fine" in output.splitlines(), output


def test_another_job_of_the_same_processes():
    """Devices are known by other numbers, and what they shared is gone."""
    for output in run(2, "again"):
        assert "fine" in output.splitlines(), output


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="several devices for each process are simulated on CPUs")
def test_groups_within_and_across_processes():
    for output in run(2, "groups", devices=2):
        assert "fine" in output.splitlines(), output
