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
from te_jax import native

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


@jax.jit
def block_on_one_device(parameters, x, dy):
    """The result and gradients in float32, with all pairs of positions."""
    y, vjp = jax.vjp(plain_block, parameters, x)
    return y, *vjp(dy.astype(jnp.float32))


def plain_block(parameters, x):

    def norm(x, scale):
        return x / jnp.sqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-5) * scale[None]

    def rotated(x):
        half = CASE.head_dim // 2
        angles = jnp.arange(CASE.sequence)[:, None] * 500_000.0 ** (-jnp.arange(half)[None] / half)
        turned = (x[..., :half] + 1j * x[..., half:]) * jnp.exp(1j * angles)[None]
        return jnp.concatenate([turned.real, turned.imag], axis=2)

    p = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), parameters)
    x = x[0].astype(jnp.float32)
    h = norm(x, p["attention_norm"])
    kv = np.arange(CASE.heads) // (CASE.heads // CASE.kv_heads)
    query, key, value = (
        (h @ p[name]).reshape(CASE.sequence, -1, CASE.head_dim).swapaxes(0, 1) for name in ("query", "key", "value")
    )
    scores = jnp.einsum("hqd,hkd->hqk", rotated(query), rotated(key)[kv]) / math.sqrt(CASE.head_dim)
    weights = jax.nn.softmax(jnp.where(np.tri(CASE.sequence, dtype=bool)[None], scores, -jnp.inf), axis=2)
    mixed = jnp.einsum("hqk,hkd->qhd", weights, value[kv]).reshape(CASE.sequence, -1)
    x = x + mixed @ p["out"]
    h = norm(x, p["mlp_norm"])
    gate = h @ p["gate"]
    return (x + (gate / (1 + jnp.exp(-gate)) * (h @ p["up"])) @ p["down"])[None]


@pytest.mark.parametrize(
    ("setup", "bound"),
    [
        (SETUPS["xla"], 0.02),
        (SETUPS["te_jax_current"], 0.2),
        (Setup("xla", sequence_parallel=False), 0.02),
    ],
    ids=["xla", "fp8", "no_sp"],
)
def test_results_and_gradients_are_those_of_one_device(setup, bound, mesh, rng):
    if setup.recipe is not None and not native.available():
        pytest.skip("needs the extension for this platform")
    call, (parameters, x, dy) = family.compiled(CASE, setup, mesh, seed=int(rng.integers(2**31)))
    actual = call(parameters, x, dy)
    with jax.numpy_dtype_promotion("standard"):
        expected = block_on_one_device(*jax.device_put((parameters, x, dy), jax.devices()[0]))
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for path, leaf in jax.tree.leaves_with_path(expected):
        other = jax.tree.leaves([each for where, each in jax.tree.leaves_with_path(actual) if where == path])[0]
        exact, other = (np.asarray(each, np.float64) for each in (leaf, other))
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
