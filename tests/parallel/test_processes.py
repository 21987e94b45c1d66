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
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = environment_without_devices()
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
        return [worker.communicate(timeout=200)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()


@pytest.mark.parametrize("processes", [2, 4])
def test_processes(processes):
    if jax.default_backend() == "gpu" and len(jax.devices()) < processes:
        pytest.skip(f"needs {processes} GPUs")
    before = shared_files()
    for output in run(processes):
        assert "fine" in output.splitlines(), output
    assert shared_files() <= before


def test_a_process_that_leaves():
    if jax.default_backend() == "gpu" and len(jax.devices()) < 2:
        pytest.skip("needs 2 GPUs")
    stayed, left = run(2, "leave")
    assert "left" in left.splitlines(), left
    assert "fine" in stayed.splitlines(), stayed


def test_a_process_that_is_late():
    if jax.default_backend() == "gpu" and len(jax.devices()) < 2:
        pytest.skip("needs 2 GPUs")
    for output in run(2, "late"):
        assert "fine" in output.splitlines(), output


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("task", ["alone", "fails"])
def test_memory_that_cannot_be_shared_at_first(task, processes):
    """Whoever waits hears of it, long before the limit of 300 s, and the next attempt is everybody's."""
    if jax.default_backend() == "gpu" and len(jax.devices()) < processes:
        pytest.skip(f"needs {processes} GPUs")
    for output in run(processes, task):
        assert "fine" in output.splitlines(), output


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="several devices for each process are simulated on CPUs")
def test_groups_within_and_across_processes():
    before = shared_files()
    for output in run(2, "groups", devices=2):
        assert "fine" in output.splitlines(), output
    assert shared_files() <= before


def shared_files():
    return {path.name for path in Path("/dev/shm").glob("te_jax-*")}
