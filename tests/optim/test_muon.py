"""Muon: singular values after its iterations, optax's updates, and the same bits however matrices are divided."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Numbers

from te_jax import optim
from te_jax.hlo import collectives
from te_jax.optim import _symmetric
from te_jax.optim._orthogonal import MUON, _segments, flops, orthogonalize
from te_jax.testing import relative_error

FLOAT8 = jnp.float8_e4m3fn
SHAPES = {
    "up": (64, 256),
    "down": (256, 64),
    "query/kernel": (64, 8, 16),
    "out/kernel": (8, 16, 64),
    "experts": (3, 64, 256),
    "bias": (2, 64),
    "embedding": (128, 64),
    "norm": (64,),
}


def draw(rng, scale=1.0):
    return {name: np.float32(scale * rng.normal(size=shape)) for name, shape in SHAPES.items()}


def spectrum(name, size):
    i = np.arange(size)
    return {
        "equal": np.ones(size),
        "harmonic": 1 / (1 + i),
        "exponential": 10.0 ** (-2 * i / size),
        "two sizes": np.where(i < 4, 1.0, 0.05),
    }.get(name)


@pytest.mark.parametrize("spectrum_name", ["equal", "harmonic", "exponential", "two sizes", "normal"])
def test_iterations_are_those_of_float64(spectrum_name, rng):
    """Long matrices by the Gram form, from either side, and square ones by themselves."""
    for shape in ((64, 224), (224, 64), (64, 80)):
        size, values = min(shape), spectrum(spectrum_name, min(shape))
        left, right = (np.linalg.qr(rng.normal(size=(n, size)))[0] for n in shape)
        x = rng.normal(size=shape) if values is None else left * values @ right.T
        narrow = np.float16(x / np.abs(x).max())
        exact = np.float64(x) / np.linalg.norm(x)
        exact = exact if shape[0] <= shape[1] else exact.T
        for a, b, c in MUON:
            gram = exact @ exact.T
            exact = a * exact + (b * gram + c * gram @ gram) @ exact
        found = np.float64(jax.jit(orthogonalize)(narrow))
        assert relative_error(found, exact if shape[0] <= shape[1] else exact.T) < 0.02
        large = np.linalg.svd(x / np.linalg.norm(x), compute_uv=False) > 0.005
        after = np.linalg.svd(found, compute_uv=False)[large]
        assert after.min() > 0.65
        assert after.max() < 1.25


def test_the_form_with_fewest_products_is_taken():
    def by(lengths, m, n):
        return sum(4 * m * m * n + (2 * k + 2 * (k - 1) + 4 * (k - 1)) * m**3 for k in lengths)

    for m, n in ((64, 64), (64, 95), (64, 97), (4096, 14336)):
        assert flops((n, m), 5) == min(by([1] * 5, m, n), by([3, 2], m, n))
        assert _segments((m, n), 5)[-1].stop == 5


@functools.cache
def compiled(optimizer):
    return jax.jit(optimizer.update)


convert = jax.jit(optim.convert_state, static_argnums=0)


def steps(optimizer, params, gradients, state=None):
    with jax.numpy_dtype_promotion("standard"):  # optax multiplies integers by floats
        state = jax.jit(optimizer.init)(params) if state is None else state
        updates = None
        for g in gradients:
            updates, state = compiled(optimizer)(g, state, params)
    return updates, state


MUON_OF_OPTAX = {"learning_rate": 0.1, "muon_weight_dimension_numbers": optim.muon_dimension_numbers}


@pytest.mark.parametrize("rms", [None, 0.2])
def test_updates_are_those_of_optax(rms, rng):
    params, gradients = draw(rng), [draw(rng), draw(rng, 1e-8)]
    theirs = optax.contrib.muon(**MUON_OF_OPTAX, weight_decay=0.1, consistent_rms=rms)
    ours = optim.muon(0.1, weight_decay=0.1, consistent_rms=rms)
    (expected, _), (updates, _) = steps(theirs, params, gradients), steps(ours, params, gradients)
    errors = {name: relative_error(updates[name], expected[name]) for name in SHAPES}
    assert max(errors.values()) < 0.01
    assert max(errors[name] for name in ("bias", "embedding", "norm")) < 1e-5


def test_states_of_optax_go_on_in_few_bytes_and_back(rng):
    params, gradients = draw(rng), [draw(rng), draw(rng)]
    theirs = optax.contrib.muon(**MUON_OF_OPTAX)
    _, state = steps(theirs, params, gradients)
    for dtype, bytes_, tolerance in (("bfloat16", 2, 0.02), (FLOAT8, 1.06, 0.2)):
        ours = optim.muon(0.1, mu_dtype=dtype)
        converted = convert(ours, state, params)
        momentum = converted.inner_states["muon"].inner_state[0]
        values = sum(leaf.size for leaf in jax.tree.leaves(momentum.mu))
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(momentum)) <= bytes_ * values + 4
        updates, _ = steps(ours, params, gradients[1:], converted)
        again, _ = steps(theirs, params, gradients[1:], state)
        assert relative_error(updates["down"], again["down"]) < tolerance
        back = convert(theirs, converted, params)
        assert jax.tree.structure(back) == jax.tree.structure(state)
    with pytest.raises(ValueError, match=r"state is a .*MuonState; it must be a te_jax.optim.ScaleByMuonState"):
        jax.eval_shape(optim.scale_by_muon().update, {}, optax.contrib.scale_by_muon().init({}))


def test_masters_skipped_steps_offload_and_kernels_in_fp8(rng):
    params, gradients = ({name: x.astype(jnp.bfloat16) for name, x in draw(rng).items()} for _ in range(2))
    optimizer = optim.muon(1e-3, mu_dtype=FLOAT8, master_dtype="int16", skip_nonfinite=True)
    updates, state = steps(optimizer, params, [gradients])
    streamed = optim.offload(optimizer, min_size=0)
    for one, other in zip(updates.values(), steps(streamed, params, [gradients])[0].values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-6)
    broken = gradients | {"down": np.where(np.arange(64) == 0, np.nan, gradients["down"]).astype(jnp.bfloat16)}
    skipped, after = steps(optimizer, params, [broken], state)
    assert not any(np.asarray(x).any() for x in skipped.values())
    assert int(after.skipped) == 1
    nothing, _ = steps(optim.muon(1e-3), {"down": params["down"]}, [{"down": broken["down"]}])
    assert np.all(np.isnan(np.float32(nothing["down"])))


MATRICES = ("up", "down", "query/kernel", "out/kernel", "experts")
MESHES = {
    "rows": ((8,), P("x")),
    "columns": ((8,), P(None, "x")),
    "both": ((4, 2), P("x", "y")),
    "copies": ((8,), P()),
    "rows and copies": ((2, 4), P("x")),
}


def spec_of(name, spec):
    """Of a matrix, of one with heads, or of one in a stack."""
    rows, columns = (*spec, None, None)[:2]
    entries = {"experts": (None, rows, columns), "query/kernel": (rows, columns), "out/kernel": (rows, None, columns)}
    return P(*entries.get(name, (rows, columns)))


def divided(way, mesh_name, make, gradients):
    """The updates of a transform on a mesh, and the collectives of a step."""
    sizes, spec = MESHES[mesh_name]
    names = ("x", "y")[: len(sizes)]
    kind = AxisType.Explicit if way == "explicit" else AxisType.Auto
    mesh = jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))
    specs = {name: spec_of(name, spec) for name in MATRICES}
    placed = {name: jax.device_put(gradients[name], NamedSharding(mesh, specs[name])) for name in MATRICES}
    if way == "shard_map":
        transform = make(axis_name=names, specs=specs)
        of_state = jax.tree.map_with_path(
            lambda path, leaf: specs[path[-1].key] if leaf.ndim else P(), jax.eval_shape(transform.init, gradients)
        )
        update = jax.shard_map(
            transform.update, mesh=mesh, in_specs=(specs, of_state, specs), out_specs=(specs, of_state)
        )
    else:
        transform = make()
        update = transform.update
    with jax.set_mesh(mesh):
        state = jax.jit(transform.init)(placed)
        program = jax.jit(update).lower(placed, state, placed).compile()
        updates, _ = program(placed, state, placed)
    assert all(updates[name].sharding.is_equivalent_to(x.sharding, x.ndim) for name, x in placed.items())
    return updates, collectives(program)


@pytest.mark.parametrize("way", ["auto", "explicit", "shard_map"])
@pytest.mark.parametrize("mesh_name", MESHES)
def test_the_same_bits_by_one_exchange_each_way(mesh_name, way, require_devices, rng):
    require_devices(8)
    gradients = {name: x for name, x in draw(rng).items() if name in MATRICES}
    transform = optim.scale_by_muon()
    expected, _ = steps(transform, gradients, [gradients])
    updates, found = divided(way, mesh_name, optim.scale_by_muon, gradients)
    for name, x in updates.items():
        np.testing.assert_array_equal(x, expected[name], err_msg=name)
    assert all(c.times == 1 for c in found)  # none in the loop over matrices
    # A stack of up and experts and three of one matrix each are padded to as many as devices: 2 bytes a value, twice.
    moved = sum(c.bytes for c in found if c.kind == "all-to-all")
    split = sum(axis is not None for axis in MESHES[mesh_name][1])
    most = 2 * 2 * (2 * 64 * 256 + 2 * 64 * 128) * split
    assert most / 2 <= moved <= most


@pytest.mark.parametrize("way", ["auto", "shard_map"])
def test_the_same_bits_by_products_of_lower_triangles(way, require_devices, native_kernels, monkeypatch, rng):
    require_devices(8)
    monkeypatch.setattr(_symmetric, "runs_native", lambda *_: True)
    original = _symmetric._te_symmetric_gemm
    gradients = {name: x for name, x in draw(rng).items() if name in MATRICES}
    calls = []
    monkeypatch.setattr(_symmetric, "_te_symmetric_gemm", lambda *a, **k: calls.append(1) or original(*a, **k))
    expected, _ = steps(optim.scale_by_muon(), gradients, [gradients])
    whole = len(calls)
    updates, _ = divided(way, "rows", optim.scale_by_muon, gradients)
    assert len(calls) > whole > 0
    for name, x in updates.items():
        np.testing.assert_array_equal(x, expected[name], err_msg=name)


def test_factors_are_those_of_whole_matrices(require_devices, rng):
    require_devices(8)
    gradients = {name: x for name, x in draw(rng).items() if name in MATRICES}
    expected, _ = steps(optim.muon(0.1), gradients, [gradients])
    updates, _ = divided("shard_map", "rows", functools.partial(optim.muon, 0.1), gradients)
    assert max(relative_error(updates[name], expected[name]) for name in MATRICES) < 1e-6


NUMBERS = {
    ("mlp", "up", "kernel"): ((16, 32), (0,), (1,)),
    ("layers", "down"): ((4, 16, 32), (1,), (2,)),
    ("attention", "query", "kernel"): ((16, 4, 8), (0,), (1, 2)),
    ("attention", "out", "kernel"): ((2, 4, 8, 16), (1, 2), (3,)),
    ("router", "kernel"): ((16, 4), (0,), (1,)),
    ("MultiHeadDotProductAttention_0", "key", "kernel"): ((16, 4, 8), (0,), (1, 2)),
    ("LayerNormMLP_0", "up_kernel"): ((16, 32), (0,), (1,)),
    ("empty", "kernel"): ((0, 4), None, None),
    ("ln_1", "weight"): ((4, 8), None, None),
    ("layers", "norm", "scale"): ((4, 16), None, None),
    ("attention", "key", "bias"): ((4, 8), None, None),
    ("LayerNorm_0", "weight"): ((4, 8), None, None),
    ("embed_tokens",): ((99, 16), None, None),
    ("lm_head", "kernel"): ((16, 99), None, None),
    ("Conv_0", "kernel"): ((3, 3, 4, 8), None, None),
    ("down_bias",): ((4, 16), None, None),
}


def test_matrices_are_found_by_name_and_shape():
    for path, (shape, rows, columns) in NUMBERS.items():
        tree = jax.ShapeDtypeStruct(shape, jnp.float32)
        for name in reversed(path):
            tree = {name: tree}
        found = optim.muon_dimension_numbers(tree)
        for name in path:
            found = found[name]
        assert found == (None if rows is None else Numbers(rows, columns)), path


STATE = optim.ScaleByMuonState(np.int32(0), np.ones((2, 2), np.float32), None)


def in_shard_map(optimizer, spec):
    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x = jnp.zeros((64, 32))
    options = {"mesh": mesh, "in_specs": (spec, P()), "out_specs": spec}
    return jax.shard_map(lambda g, s: optimizer.update(g, s)[0], **options)(x, optimizer.init(x))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: optim.muon(0.1, mu_dtype="int8").init(jnp.ones((2, 2))), "mu_dtype is int8: choose float32"),
        (lambda: optim.scale_by_muon(seed=-1), "seed is -1"),
        (lambda: optim.scale_by_muon().init({"x": jnp.ones(4)}), r"None for a parameter of shape \(4,\): Muon is for"),
        (
            lambda: optim.scale_by_muon(dimension_numbers=Numbers(0, 2)).init(jnp.ones((2, 2))),
            r"shape \(2, 2\), which lacks some",
        ),
        (
            lambda: optim.scale_by_muon(dimension_numbers=Numbers(0, -2)).init(jnp.ones((2, 2))),
            "some are named twice",
        ),
        (
            lambda: optim.muon(0.1).init(optim.Buckets.of({"x": jnp.ones((2, 2))}).pack({"x": jnp.ones((2, 2))})),
            "params are packed by Buckets, whose leaves have no names",
        ),
        (lambda: in_shard_map(optim.scale_by_muon(), P("x")), r"gradients vary over \['x'\]: in shard_map name"),
        (lambda: optim.scale_by_muon(specs=P()).update(jnp.ones((2, 2)), STATE), "specs are given"),
        (
            lambda: in_shard_map(optim.scale_by_muon(axis_name=(), specs=P("x")), P("x")),
            r"P\('x',\) for a parameter whose part has shape \(8, 32\): its axes must be in axis_name, \(\)",
        ),
    ],
)  # fmt: skip
def test_what_muon_does_not_take(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        jax.eval_shape(call)
