"""The transformer family: every way to share the block against the block on one device, and what it refuses."""

import gzip
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import shapes
from benchmarks import transformer as family
from benchmarks.harness import Timing
from benchmarks.shapes import BlockShape
from benchmarks.transformer import SETUPS, Setup

CASE = BlockShape(sequence=16, hidden=64, mlp=128, heads=8, kv_heads=4, head_dim=16, model="test")
ONE = Timing(samples=1, sample_seconds=1e-6)


@pytest.fixture
def devices(require_devices, monkeypatch):
    """Four devices, however many there are."""
    require_devices(4)
    every = jax.local_devices
    monkeypatch.setattr(jax, "local_devices", lambda **backend: every(**backend)[:4])
    return jax.local_devices()


@pytest.fixture
def mesh(devices):
    return family.mesh_of(devices)


@pytest.mark.usefixtures("native_kernels")
def test_results_and_gradients_are_those_of_plain_products(mesh, rng):
    seed = int(rng.integers(2**31))

    def results_of(setup):
        call, operands = family.compiled(CASE, setup, mesh, seed=seed)
        return jax.device_get(call(*operands))

    expected = results_of(SETUPS["xla"])
    for setup, bound in ((SETUPS["te_jax_current"], 0.2), (Setup("xla", sequence_parallel=False), 0.02)):
        for (path, exact), other in zip(
            jax.tree.leaves_with_path(expected), jax.tree.leaves(results_of(setup)), strict=True
        ):
            exact, other = np.asarray(exact, np.float64), np.asarray(other, np.float64)
            assert np.linalg.norm(other - exact) < bound * np.linalg.norm(exact), jax.tree_util.keystr(path)


def test_errors_see_what_is_wrong_anywhere():
    expected = (jnp.ones((2, 2)), {"a": jnp.ones(3), "b": jnp.ones(4)}, jnp.ones(5))
    assert family.errors_of(expected, expected) == {"y_error": 0, "gradient_error": 0}
    for spoilt, name in (
        ((expected[0] * 1.5, *expected[1:]), "y_error"),
        ((expected[0], {"a": jnp.ones(3) * 1.5, "b": jnp.ones(4)}, expected[2]), "gradient_error"),
        ((*expected[:2], expected[2] * 1.5), "gradient_error"),
        ((*expected[:2], expected[2] * jnp.nan), "gradient_error"),
    ):
        errors = family.errors_of(spoilt, expected)
        assert not errors.pop(name) <= 0.4
        assert list(errors.values()) == [0]


def test_operations_are_counted_as_in_a_program_that_wastes_none():
    products = sum(
        2 * CASE.sequence * math.prod(shape) for shape in family._parameter_shapes(CASE).values() if shape[1:]
    )
    pairs = sum(1 for q in range(CASE.sequence) for k in range(CASE.sequence) if k <= q)
    attention = CASE.heads * pairs * 2 * 2 * CASE.head_dim  # scores, and the sum of values
    assert family._flops(CASE) == 3 * (products + attention)


@pytest.mark.usefixtures("devices")
def test_one_setup_with_a_trace(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(shapes, "BLOCK_CPU", (CASE,))
    monkeypatch.setattr(shapes, "BLOCK_GPU", (CASE,))
    monkeypatch.setattr(family, "QUICK", ONE)
    assert family.main(["--tp", "2", "--transport", "ring", "--quick", "--profile", str(tmp_path)]) == 0
    (path,) = tmp_path.rglob("perfetto_trace.json.gz")
    printed = capsys.readouterr().out
    assert f"Perfetto trace: {path}" in printed
    assert "transformer on 2 × " in printed
    assert "te_jax_ring" in printed
    names = {event.get("name", "") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    assert any("ppermute" in name or "collective-permute" in name for name in names)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--no-sp", "--transport", "ring"), "--transport is ring, and --no-sp leaves only all-reduces"),
        (("--tp", "5"), "--tp is 5; it must be 1 to 4"),
        (("--tp", "0"), "--tp is 0; it must be 1 to 4"),
        (("--tp", "3"), "but over 1, 2: name one of these, as in `python -m benchmarks.transformer --tp 2`"),
    ],
)
@pytest.mark.usefixtures("devices")
def test_arguments_that_do_not_fit_are_refused(words, reason, capsys):
    with pytest.raises(SystemExit):
        family.main(words)
    assert reason in capsys.readouterr().err
