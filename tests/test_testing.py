"""The helpers of all other tests: that they can fail."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax.testing import Buffer, Collective, assert_close, buffers, collectives, relative_error


def test_relative_error_is_the_relative_l2_norm():
    assert relative_error([3.0, 4.0, 0.5], [3.0, 4.0, 0.0]) == pytest.approx(0.1)
    assert relative_error([1e300, 0.0], [1e300, 1e299]) == pytest.approx(0.1, rel=1e-2)
    assert relative_error([1e-300, 2e-300], [1e-300, 1e-300]) == pytest.approx(0.5**0.5)
    assert relative_error([1e200, 2.0], [1e200, 1.0]) == pytest.approx(1e-200)


def test_relative_error_of_special_values():
    assert relative_error([], []) == 0.0
    assert relative_error(0.0, 0.0) == 0.0
    assert relative_error([1e-30], [0.0]) == np.inf
    assert relative_error([np.inf, 1.0], [np.inf, 1.0]) == 0.0
    assert relative_error([np.inf, 1.1], [np.inf, 1.0]) == pytest.approx(0.1)
    assert relative_error([np.inf, 1.0], [-np.inf, 1.0]) == np.inf
    assert relative_error([np.inf, 1.0], [5.0, 1.0]) == np.inf
    assert relative_error([5.0, 1.0], [np.inf, 1.0]) == np.inf
    assert np.isnan(relative_error([np.nan, 1.0], [np.nan, 1.0]))
    assert np.isnan(relative_error([np.nan, 1.0], [1.0, 1.0]))
    assert np.isnan(relative_error([1.0, 1.0], [np.nan, 1.0]))


def test_relative_error_broadcasts_nothing():
    with pytest.raises(ValueError, match=r"actual has shape \(1,\) and expected \(2,\)"):
        relative_error([1.0], [1.0, 1.0])


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-2), ("float16", 2e-3), ("float64", 1e-12)]
)
def test_default_tolerance_follows_the_dtype(dtype, tolerance, rng):
    with jax.enable_x64(True):
        expected = jnp.asarray(rng.standard_normal(1000), dtype)
        exact = np.asarray(expected, np.float64)
        assert_close(expected, exact * (1 + 0.9 * tolerance), dtype=dtype)
        with pytest.raises(AssertionError, match="relative L2 error"):
            assert_close(expected, exact * (1 + 1.1 * tolerance), dtype=dtype)


def test_integers_must_be_equal():
    assert_close(np.arange(3), np.arange(3))
    with pytest.raises(AssertionError, match="relative L2 error"):
        assert_close(np.array([1000000, 1]), np.array([1000000, 2]))


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_integers_that_float64_rounds_are_refused(dtype):
    largest = np.array([2**53], dtype)
    assert_close(largest, largest)
    with pytest.raises(ValueError, match=f"actual has dtype {dtype} and integers beyond 2\\^53"):
        assert_close(largest + np.array([1], dtype), largest)
    if dtype == "int64":
        assert_close(-largest, -largest)
        with pytest.raises(ValueError, match="expected has dtype int64 and integers beyond"):
            assert_close(-largest, -largest - 1)


def test_complex_numbers_are_refused():
    with pytest.raises(ValueError, match="expected has dtype complex64; it must be real"):
        relative_error(np.ones(2, np.float32), np.ones(2, np.complex64))


def test_zeros_are_not_close_to_anything_else():
    expected = np.full(8, 1e-20, np.float32)
    with pytest.raises(AssertionError, match=r"relative L2 error 1\.000e\+00"):
        assert_close(np.zeros(8, np.float32), expected)
    with pytest.raises(AssertionError, match="relative L2 error inf"):
        assert_close(expected, np.zeros(8, np.float32))


def test_failure_states_metric_norms_tolerance_and_worst_element():
    actual, expected = np.full((2, 3), 2.0, np.float32), np.full((2, 3), 2.0, np.float32)
    actual[1, 2] = 8.0
    with pytest.raises(AssertionError) as failure:
        assert_close(actual, expected, tolerance=0.25)
    message = str(failure.value)
    for part in ("relative L2 error 1.225e+00", "tolerance 2.500e-01", "‖actual‖ = 9.165151e+00",
                 "‖expected‖ = 4.898979e+00", "at (1, 2): 8, but 2 is expected"):  # fmt: skip
        assert part in message


def test_failure_leaves_out_what_is_not_finite_on_both_sides():
    expected = np.array([np.nan, np.inf, 3.0, 4.0], np.float32)
    with pytest.raises(AssertionError) as failure:
        assert_close(expected + np.array([0, 0, 0, 1], np.float32), expected, equal_nan=True)
    for part in ("‖actual‖ = 5.830952e+00", "‖expected‖ = 5.000000e+00", "at (3,): 5, but 4 is expected"):
        assert part in str(failure.value)


def test_shape_and_dtype_must_match():
    with pytest.raises(AssertionError, match=r"shape \(1, 2\), but \(2,\)"):
        assert_close(np.ones((1, 2), np.float32), np.ones(2, np.float32))
    with pytest.raises(AssertionError, match=r"shape \(\), but \(2,\)"):
        assert_close(np.float32(1), np.ones(2, np.float32))
    with pytest.raises(AssertionError, match="dtype float32, but bfloat16"):
        assert_close(jnp.ones(2, jnp.float32), jnp.ones(2, jnp.bfloat16))
    with pytest.raises(AssertionError, match="dtype float32, but float16"):
        assert_close(np.ones(2, np.float32), np.ones(2), dtype=jnp.float16)


def test_nan_passes_only_where_it_is_expected():
    with_nan, without = np.array([1.0, np.nan], np.float32), np.array([1.0, 2.0], np.float32)
    for actual, expected in ((with_nan, with_nan), (with_nan, without), (without, with_nan)):
        with pytest.raises(AssertionError, match="NaN never passes"):
            assert_close(actual, expected, tolerance=np.inf)
    for actual, expected in ((with_nan, without), (without, with_nan), (with_nan, with_nan[::-1])):
        with pytest.raises(AssertionError, match="NaN at different places"):
            assert_close(actual, expected, tolerance=np.inf, equal_nan=True)
    assert_close(with_nan, with_nan, equal_nan=True)
    with pytest.raises(AssertionError, match="relative L2 error"):
        assert_close(with_nan + 1, with_nan, equal_nan=True)


@pytest.mark.parametrize("tolerance", [-1.0, np.nan])
def test_tolerance_must_be_a_number(tolerance):
    with pytest.raises(ValueError, match="tolerance is"):
        assert_close(1.0, 1.0, tolerance=tolerance)


# The forms of XLA's text: names, tuples, layouts and tilings, asynchronous pairs, comments.
_TEXT = """
  %all-reduce.7 = f32[8,4]{1,0:T(8,128)} all-reduce(%x), channel_id=1, to_apply=%add
  ROOT %pmax.5 = (f32[4]{0}, /*index=1*/bf16[2,3]{1,0}) all-reduce(%a, %all-gather.1), channel_id=1
  %all-reduce-start.2 = (f32[5]{0}, f32[]) all-reduce-start(%a, %b), channel_id=2
  %all-reduce-done.2 = (f32[5]{0}, f32[]) all-reduce-done(%all-reduce-start.2)
  ag = (bf16[4]{0}, bf16[16]{0}) all-gather-start(p), dimensions={0}
  %agd = bf16[16]{0} all-gather-done(%ag)
  %ag2 = ((f32[4]{0}, pred[2]{0}), (f32[8]{0}, pred[4]{0})) all-gather-start(%p, %q), dimensions={0}
  %cp = (f32[3,2]{1,0}, f32[3,2]{1,0}, u32[], u32[]) collective-permute-start(%p)
  %rs = ((f32[64]{0}), f32[8]{0}) reduce-scatter-start(%p), dimensions={0}
  %a2a = (s4[7]{0}, s4[7]{0}) all-to-all(%a, %b)
  %cb = f8e4m3fn[16]{0} collective-broadcast(%a)
  %fusion = f32[2]{0} fusion(%all-reduce.7), kind=kLoop, metadata={op_name="all-reduce(x)"}
"""


def test_collectives_of_text():
    f32 = lambda *shape: Buffer("f32", shape)  # noqa: E731
    assert collectives(_TEXT) == [
        Collective("all-reduce", (f32(8, 4),)),
        Collective("all-reduce", (f32(4), Buffer("bf16", (2, 3)))),
        Collective("all-reduce", (f32(5), f32())),
        Collective("all-gather", (Buffer("bf16", (16,)),)),
        Collective("all-gather", (f32(8), Buffer("pred", (4,)))),
        Collective("collective-permute", (f32(3, 2),)),
        Collective("reduce-scatter", (f32(8),)),
        Collective("all-to-all", (Buffer("s4", (7,)), Buffer("s4", (7,)))),
        Collective("collective-broadcast", (Buffer("f8e4m3fn", (16,)),)),
    ]


def test_sizes_of_collectives():
    merged = collectives(_TEXT)[1]
    assert merged.shapes == ((4,), (2, 3))
    assert merged.dtypes == ("f32", "bf16")
    assert (merged.elements, merged.bytes) == (10, 28)
    assert [result.bytes for result in collectives(_TEXT)[-2].results] == [4, 4]
    assert Buffer("f8e4m3fn", (16,)).bytes == Buffer("pred", (16,)).bytes == 16
    assert Buffer("c64", ()).bytes == 8


def test_collectives_of_compiled_programs(make_mesh, rng):
    mesh = make_mesh({"x": AxisType.Auto})
    devices = mesh.shape["x"]
    x = jnp.asarray(rng.standard_normal((devices * devices, 3)), jnp.float32)

    def found(body, out_specs):
        function = jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=out_specs, check_vma=False)
        return {entry.kind: entry.shapes for entry in collectives(jax.jit(function).lower(x).compile())}

    ring = [(i, (i + 1) % devices) for i in range(devices)]
    assert found(lambda x: x * 2, P("x")) == {}
    assert found(lambda x: lax.psum(x, "x"), P()) == {"all-reduce": ((devices, 3),)}
    assert found(lambda x: lax.all_gather(x, "x", tiled=True), P()) == {"all-gather": ((devices * devices, 3),)}
    assert found(lambda x: lax.ppermute(x, "x", ring), P("x")) == {"collective-permute": ((devices, 3),)}
    (scattered,) = found(lambda x: lax.psum_scatter(x, "x", tiled=True), P("x")).items()
    assert scattered == ("reduce-scatter", ((1, 3),))
    (kind,) = found(lambda x: lax.all_to_all(x, "x", 0, 0, tiled=True), P("x"))
    assert kind == "all-to-all"


def test_collectives_see_a_gather_that_sharding_causes(make_mesh):
    mesh = make_mesh({"x": AxisType.Auto})
    x = jax.device_put(jnp.ones((mesh.shape["x"], 3)), NamedSharding(mesh, P("x")))
    gather = jax.jit(lambda x: x + 1, out_shardings=NamedSharding(mesh, P()))
    assert [entry.kind for entry in collectives(gather.lower(x).compile())] == ["all-gather"]


def test_buffers_of_compiled_programs():
    x = jnp.ones((4, 6), jnp.bfloat16)
    compiled = jax.jit(lambda x: jnp.exp(x.astype(jnp.float32)) @ x.astype(jnp.float32).T).lower(x).compile()
    assert Buffer("f32", (4, 4)) in buffers(compiled)
    assert Buffer("bf16", (4, 6)) in buffers(compiled, "parameter")
    assert Buffer("f32", (4, 4)) not in buffers(compiled, "parameter")
    assert buffers("  %c = (f32[2]{0}, s32[]) custom-call(%x)\n", "copy") == []


@pytest.mark.parametrize("function", [buffers, collectives])
def test_programs_without_text_are_refused(function):
    with pytest.raises(ValueError, match="program has no text"):
        function(types.SimpleNamespace(as_text=lambda: None))


def test_text_that_was_torn_is_refused():
    with pytest.raises(ValueError, match="a bracket is never closed in 'f32"):
        collectives('  %r = f32[8] all-reduce(%x, f32[8] %y, ")"')
