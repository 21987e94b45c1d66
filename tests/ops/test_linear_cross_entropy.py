"""Linear cross-entropy: the loss and gradients of all logits at once, in float64, whatever chunks and products."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cross_entropy_oracle import OPTIONS, changed, oracle
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from te_jax import native, ops
from te_jax.ops import CrossEntropy
from te_jax.ops.head.chunks import chunk_tokens
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from te_jax.testing import assert_close

IN = 44
RECIPES = {"block": BlockScaling(), "current": CurrentScaling(), "rowwise": RowwiseScaling()}
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}


def normal(rng, *shape, dtype="float32", scale=1.0):
    return jax.device_put((scale * rng.standard_normal(shape)).astype(np.float32).astype(jnp.dtype(dtype)))


def draw(rng, batch=(3, 50), vocab=130, dtype="float32", last=False):
    """(x, kernel, bias, weight, labels)"""
    labels = rng.integers(0, vocab, batch)
    labels = np.where(rng.random(batch) < 0.2, -100, labels)
    kernel = normal(rng, IN, vocab, dtype=dtype, scale=IN**-0.5)
    return (
        normal(rng, *batch, IN, dtype=dtype),
        jax.device_put(np.asarray(kernel).T) if last else kernel,
        normal(rng, vocab, dtype=dtype),
        jax.device_put(np.asarray(rng.uniform(0.5, 2.0, batch), jnp.float32)),
        jax.device_put(np.asarray(labels, np.int32)),
    )


def expected(case, *, last=False, reduction="mean", cotangent=1.0, **options):
    """(loss, dx, dkernel, dbias) in float64."""
    x, kernel, bias, weight, labels = (np.asarray(a).astype(np.float64) for a in case)
    kernel = kernel.T if last else kernel
    labels = labels.astype(int)
    total = 1.0
    if reduction == "mean":
        total = np.sum(np.where(labels == -100, 0.0, weight))
    weight_in_loss = np.broadcast_to(weight * cotangent / total, labels.shape)
    found = oracle(x @ kernel + bias, labels, reduction="none", cotangent=weight_in_loss, **options)
    dlogits = found.gradient.reshape(-1, kernel.shape[1])
    dkernel = x.reshape(-1, IN).T @ dlogits
    losses = weight * found.loss
    loss = losses if reduction == "none" else np.sum(losses) / total
    return loss, (dlogits @ kernel.T).reshape(x.shape), dkernel.T if last else dkernel, dlogits.sum(0)


def run(case, *, cotangent=1.0, last=False, **options):
    *arrays, weight, labels = case

    def loss(x, kernel, bias):
        value = ops.linear_cross_entropy(
            x, kernel, labels, bias=bias, weight=weight, kernel_contracting="last" if last else "first", **options
        )
        return jnp.sum(value * cotangent), value

    gradients, value = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*arrays)
    return value, *gradients


def compare(found, wanted, *tolerances):
    for a, b, tolerance in zip(found, wanted, tolerances, strict=True):
        assert_close(np.asarray(a, np.float32), np.asarray(b, np.float32), tolerance=tolerance)


@pytest.mark.parametrize(
    ("options", "dtype", "reduction", "last", "chunk"),
    [
        ("plain", "float32", "mean", False, 64),
        ("all", "float32", "mean", True, 64),
        ("smoothing", "float32", "sum", False, 20),  # more chunks than are unrolled
        ("softcap", "bfloat16", "mean", True, 7),
        ("z_loss", "bfloat16", "sum", False, None),
        ("plain", "float16", "none", True, 128),
    ],
)
def test_against_float64(options, dtype, reduction, last, chunk, implementation, rng):
    case = draw(rng, dtype=dtype, last=last)
    cotangent = rng.uniform(0.5, 2.0, (3, 50)) if reduction == "none" else 3.0
    options = OPTIONS[options]
    if not native.takes(dtype):  # by name, native kernels refuse it on a GPU
        implementation = None if implementation == "native" else implementation
    found = run(
        case, reduction=reduction, last=last, cotangent=np.asarray(cotangent, np.float32), chunk_tokens=chunk,
        implementation=implementation, **options,
    )  # fmt: skip
    wanted = expected(case, last=last, reduction=reduction, cotangent=cotangent, **options)
    with_logits = {"float32": 2e-5, "bfloat16": 1.5e-2}.get(dtype, TOLERANCE[dtype])
    compare(found, wanted, TOLERANCE[dtype], with_logits, with_logits, with_logits)
    assert [a.dtype for a in found] == ["float32", dtype, dtype, dtype]


def unweighted(x, kernel, labels):
    """A case without bias and weights, for `expected`."""
    return x, kernel, np.zeros(kernel.shape[1]), np.ones(labels.shape), labels


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_shards_of_a_vocabulary_that_are_padded(reduction, require_devices, rng):
    """Of 65 columns in 16 bits."""
    require_devices(2)
    x, kernel, _, _, labels = draw(rng, batch=(20,), dtype="bfloat16")
    mesh = jax.make_mesh((2,), ("vocab",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def local(x, kernel):
        return jnp.sum(ops.linear_cross_entropy(x, kernel, labels, reduction=reduction, vocab_axis="vocab"))

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(None, "vocab")), out_specs=P())
    loss, gradients = jax.jit(jax.value_and_grad(mapped, (0, 1)))(x, kernel)
    wanted, *of_wanted = expected(unweighted(x, kernel, labels), reduction=reduction)
    compare((loss, *gradients), (np.sum(wanted), *of_wanted[:2]), 2e-3, 1.5e-2, 1.5e-2)


ALL_PRODUCTS = ("forward", "dgrad", "wgrad")
CAPPED = CrossEntropy(label_smoothing=0.1, logit_softcap=3.0)


@pytest.mark.parametrize(
    ("recipe", "vocab", "last", "options", "tolerances"),
    [
        ("block", 130, True, {"loss": CrossEntropy(z_loss=1e-3)}, (1e-3, 0.08, 0.08, 0.01)),
        ("rowwise", 384, False, {"reduction": "none"}, (1e-3, 0.08, 0.08, 0.01)),
        ("block", 384, False, {"loss": CAPPED, "fp8_products": ALL_PRODUCTS}, (5e-3, 0.06, 0.06, 0.04)),
        ("block", 384, False, {"loss": CAPPED, "fp8_products": ("wgrad",)}, (1e-3, 0.01, 0.05, 0.01)),
    ],
    ids=["block, last", "rowwise, none", "all products", "one product"],
)
def test_fp8(recipe, vocab, last, options, tolerances, rng):
    case = draw(rng, batch=(300,), vocab=vocab, dtype="bfloat16", last=last)
    found = run(case, last=last, recipe=RECIPES[recipe], chunk_tokens=128, **options)
    of_oracle = {name: value for name, value in options.items() if name != "fp8_products"}
    compare(found, expected(case, last=last, **of_oracle), *tolerances)


def test_the_reference_computes_it_in_fp8_too(rng, native_kernels):
    case = draw(rng, batch=(100,), vocab=134, dtype="bfloat16")
    options = {"loss": CrossEntropy(label_smoothing=0.1, logit_softcap=3.0, z_loss=1e-3)}
    run_ = functools.partial(run, case, recipe=BlockScaling(), fp8_products=ALL_PRODUCTS, **options)
    compare(run_(implementation="reference"), run_(implementation="native"), 1e-3, 2e-2, 2e-2, 2e-2)


@pytest.mark.parametrize(
    ("recipe", "implementation"),
    [(None, "reference"), (BlockScaling(), "native")],
    ids=["none", "block"],
)
@pytest.mark.usefixtures("native_kernels")
def test_ignored_tokens_are_not_read_and_unknown_labels_are_nan(recipe, implementation, rng):
    x, kernel, _, weight, labels = draw(rng, batch=(200,), vocab=256, dtype="bfloat16")
    x, weight, labels = (np.asarray(a) for a in (x, weight, labels))
    ignored = labels == -100
    loss = functools.partial(
        ops.linear_cross_entropy, recipe=recipe, chunk_tokens=128, implementation=implementation,
        fp8_products=ALL_PRODUCTS,
    )  # fmt: skip
    both = jax.jit(jax.value_and_grad(lambda x, kernel, weight: loss(x, kernel, labels, weight=weight), (0, 1, 2)))

    def with_ignored(a, value):
        return np.where(ignored.reshape(-1, *(1,) * (a.ndim - 1)), np.array(value, a.dtype), a)

    wanted = both(with_ignored(x, 0), kernel, with_ignored(weight, 0))
    for bad in (np.nan, np.inf):
        found = both(with_ignored(x, bad), kernel, with_ignored(weight, bad))
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert not np.any(np.asarray(found[1][0], np.float32)[ignored])

    def total(x, labels, weight):
        losses = loss(x, kernel, labels, weight=weight, reduction="none")
        return jnp.sum(losses), losses

    each = jax.jit(jax.grad(total, has_aux=True))
    assert not np.any(np.asarray(each(x, labels, with_ignored(weight, np.inf))[1])[ignored])
    dx, losses = each(x, changed(labels, 5, 256), weight)
    np.testing.assert_array_equal(np.isnan(losses), np.arange(200) == 5)
    assert np.all(np.isnan(np.asarray(dx, np.float32)[5]))


def test_weights_of_tokens(rng):
    x, kernel, _, weight, labels = draw(rng)
    step = jax.jit(jax.value_and_grad(lambda weight: ops.linear_cross_entropy(x, kernel, labels, weight=weight)))
    losses, *_ = expected(unweighted(x, kernel, labels), reduction="none")
    counted = np.asarray(labels) != -100
    total = np.sum(np.asarray(weight, np.float64)[counted])
    mean = np.sum(losses * weight) / total
    compare(jax.tree.leaves(step(weight)), (mean, np.where(counted, (losses - mean) / total, 0.0)), 1e-5, 1e-5)
    assert float(step(np.zeros_like(weight))[0]) == 0.0


def test_lse(rng, implementation):
    x, kernel, bias, _, labels = draw(rng)
    wanted = np.logaddexp.reduce(np.asarray(x, np.float64) @ np.asarray(kernel) + np.asarray(bias), axis=-1)

    def of_lse(x):
        options = {"return_lse": True, "implementation": implementation}
        _, lse = ops.linear_cross_entropy(x, kernel, labels, bias=bias, **options)
        return jnp.sum(lse), lse

    gradient, lse = jax.jit(jax.grad(of_lse, has_aux=True))(x)
    assert_close(lse, np.where(np.asarray(labels) == -100, 0.0, wanted), dtype="float32", tolerance=1e-5)
    assert not np.any(gradient)


# ------------------------------------------------------------------------------------------------------- accumulators


@pytest.mark.parametrize(
    ("dtype", "vocab", "scale", "accumulate", "reduction"),
    [
        ("float32", 128, 1.0, True, "mean"),
        ("float32", 130, 0.5, True, "mean"),
        ("bfloat16", 128, 1.0, False, "mean"),
        ("float32", 128, 2.0, False, "none"),
    ],
)
def test_accumulator(dtype, vocab, scale, accumulate, reduction, implementation, rng):
    x, kernel, _, _, labels = draw(rng, vocab=vocab)
    sums = normal(rng, IN, vocab, dtype=dtype)

    def loss(sums, kernel):
        options = {"reduction": reduction, "wgrad_accumulator": sums, "accumulate": accumulate, "chunk_tokens": 64}
        return scale * jnp.sum(ops.linear_cross_entropy(x, kernel, labels, implementation=implementation, **options))

    following, dkernel = jax.jit(jax.grad(loss, argnums=(0, 1)))(sums, kernel)
    _, _, wanted, _ = expected(unweighted(x, kernel, labels), reduction=reduction, cotangent=scale)
    wanted = wanted + (np.asarray(sums, np.float32) if accumulate else 0.0)
    assert_close(np.asarray(following, np.float32), wanted, dtype="float32", tolerance=2 * TOLERANCE[dtype])
    assert following.dtype == dtype
    assert not np.any(dkernel)


@pytest.mark.parametrize(
    ("dtype", "scale", "recipe"),
    [("float32", 2.0**24, None), ("bfloat16", 1024.0, BlockScaling())],
)
def test_accumulator_of_a_loss_that_is_scaled(dtype, scale, recipe, rng):
    """What the accumulator holds already, in the same scale, takes nothing from what a microbatch adds."""
    x, kernel, _, _, labels = draw(rng, vocab=128)

    options = {"chunk_tokens": 64, "recipe": recipe}
    dkernel = jax.jit(jax.grad(lambda kernel: ops.linear_cross_entropy(x, kernel, labels, **options)))(kernel)
    dkernel = np.asarray(dkernel)
    before = (scale * dkernel).astype(jnp.dtype(dtype))

    def scaled(sums, scale):
        return scale * ops.linear_cross_entropy(x, kernel, labels, wgrad_accumulator=sums, **options)

    after = jax.jit(jax.grad(scaled))(before, scale)
    added = np.asarray(after, np.float32) - before.astype(np.float32)
    assert_close(added, scale * dkernel, tolerance=2 * TOLERANCE[dtype])


def test_a_loss_that_is_scaled_costs_no_product_unless_the_scale_is_computed(rng, native_kernels):
    x, kernel, _, _, labels = draw(rng, vocab=128)

    def products(scale):
        def loss(sums, scale):
            value = ops.linear_cross_entropy(x, kernel, labels, chunk_tokens=64, wgrad_accumulator=sums)
            return value if scale is None else scale * value

        return jax.jit(jax.grad(loss)).lower(kernel, scale).compile().as_text().count('custom_call_target="te_gemm"')

    def known(sums):
        return 0.25 * ops.linear_cross_entropy(x, kernel, labels, chunk_tokens=64, wgrad_accumulator=sums)

    chunks = products(None)
    assert jax.jit(jax.grad(known)).lower(kernel).compile().as_text().count('custom_call_target="te_gemm"') == chunks
    assert products(jnp.float32(2.0)) == 2 * chunks == 6


def test_microbatches_add_up_in_place(rng):
    x, kernel, _, _, labels = draw(rng, vocab=256)

    def loss(sums, labels):
        return ops.linear_cross_entropy(x, kernel, labels, wgrad_accumulator=sums, chunk_tokens=64)

    def step(sums, labels):
        return jax.grad(loss)(sums, labels), None

    several = np.stack([labels, np.flip(labels)])
    compiled = jax.jit(lambda sums: jax.lax.scan(step, sums, several)[0], donate_argnums=0).lower(kernel).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == kernel.nbytes
    wanted = sum(expected(unweighted(x, kernel, each))[2] for each in several)
    zeros = jax.device_put(np.zeros_like(kernel), may_alias=False)
    assert_close(compiled(zeros), wanted, dtype="float32", tolerance=2e-5)


def test_accumulator_needs_to_be_differentiated(rng):
    x, kernel, _, _, labels = draw(rng)
    with pytest.raises(ValueError, match="differentiate with respect to wgrad_accumulator"):
        jax.eval_shape(
            jax.grad(
                lambda kernel: ops.linear_cross_entropy(x, kernel, labels, wgrad_accumulator=jnp.zeros_like(kernel))
            ),
            kernel,
        )


# -------------------------------------------------------------------------------------------------------------- memory


def test_memory_is_that_of_a_chunk(rng):
    """Of 2048 × 4096 logits, 16 MB in bfloat16 and 32 in float32, there are never more than a chunk of 256 rows."""
    x, kernel, _, _, labels = draw(rng, batch=(2048,), vocab=4096, dtype="bfloat16")

    def loss(x, kernel):
        return ops.linear_cross_entropy(x, kernel, labels, chunk_tokens=256)

    for program in (jax.jit(loss), jax.jit(jax.grad(loss, argnums=0))):
        assert program.lower(x, kernel).compile().memory_analysis().temp_size_in_bytes < 12 * 2**20


def test_only_what_is_asked_for_is_computed(rng):
    x, kernel, _, _, labels = draw(rng, vocab=128)

    def loss(x, kernel):
        return ops.linear_cross_entropy(x, kernel, labels)

    text = jax.jit(jax.grad(loss)).lower(x, kernel).as_text()
    assert "te_gemm" not in text  # the weight gradient's product
    assert "te_gemm" in jax.jit(jax.grad(loss, argnums=1)).lower(x, kernel).as_text()


@pytest.mark.parametrize(
    ("tokens", "vocab", "in_fp8", "wanted"),
    [
        (100, 128, False, 100),
        (0, 128, False, 1),
        (8192, 128256, False, 3072),
        (8192, 128256, True, 4096),
        (4096, 262144, False, 2048),
        (65536, 262144, False, 2048),
        (8192, 32000, False, 8192),
    ],
)
def test_chunks(tokens, vocab, in_fp8, wanted):
    assert chunk_tokens(tokens, vocab, 2, in_fp8) == wanted


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel": np.zeros((IN, 130, 1), np.float32)}, r"they must be \[\*batch, in\] and \[in, vocab\]"),
        ({"kernel": np.zeros((IN + 1, 130), np.float32)}, "whose first dimension is contracted"),
        ({"kernel": np.zeros((130, IN), np.float32)}, r"not logits, or a kernel in this order .*='last'"),
        ({"kernel": np.zeros((IN, 0), np.float32)}, "only the batch may be empty"),
        ({"kernel_contracting": "middle"}, "kernel_contracting is 'middle'"),
        ({"x": np.zeros((3, 50, IN), np.int32)}, "x has dtype int32"),
        ({"bias": np.zeros((131,), np.float32)}, r"bias has shape \(131,\)"),
        ({"weight": np.zeros((3,), np.float32)}, r"weight has shape \(3,\)"),
        ({"labels": np.zeros(3, np.int32)}, r"labels have shape \(3,\); for x of shape"),
        ({"labels": np.zeros((3, 50), np.float32)}, "labels have dtype float32"),
        ({"reduction": "max"}, "reduction is 'max'"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0"),
        ({"loss": None}, "loss is None; it must be a te_jax.ops.CrossEntropy"),
        ({"recipe": DelayedScaling()}, "whose state a loss does not take"),
        ({"recipe": "block"}, "recipe is 'block'"),
        ({"recipe": BlockScaling(), "fp8_products": ()}, r"fp8_products is \(\)"),
        ({"recipe": BlockScaling(), "fp8_products": "wgrad"}, "fp8_products is 'wgrad'"),
        ({"wgrad_accumulator": np.zeros((130, IN), np.float32)}, r"wgrad_accumulator has shape \(130, 44\)"),
        ({"vocab_axis": "model"}, "no axis 'model' is mapped here"),
    ],
)
def test_errors_name_the_argument(change, message, rng):
    x, kernel, _, _, labels = draw(rng)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: ops.linear_cross_entropy(**{"x": x, "kernel": kernel, "labels": labels, **change}))
