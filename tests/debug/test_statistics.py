"""Statistics are those of NumPy, whatever the tensor, the recipe and the transformation."""

import collections
import contextlib
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from parameters import in_turns
from statistics_oracle import FIELDS, assert_statistics, expected
from xla_targets import compiled, know_handlers, needs_compiler

from te_jax import debug, layers, ops, parallel
from te_jax.debug import Statistics, with_statistics
from te_jax.debug.statistics import PRODUCTS
from te_jax.offload import LAYER_INPUT, Offload
from te_jax.optim import Requantize
from te_jax.parallel import FSDP
from te_jax.recipe import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXFP8Scaling,
    ProductRecipes,
    RowwiseScaling,
    products,
)

COPIES = {
    ("activation", "forward"): "data",
    ("activation", "wgrad"): "transposed",
    ("kernel", "forward"): "transposed",
    ("kernel", "dgrad"): "data",
    ("gradient", "dgrad"): "data",
    ("gradient", "wgrad"): "transposed",
}
RECIPES = {
    "current": CurrentScaling(),
    "row": RowwiseScaling(gradient_dtype=jnp.float8_e5m2),
    "block": BlockScaling(),
    "mxfp8": MXFP8Scaling(),
    "delayed": DelayedScaling(history_len=2),
}
_AMAX = 2.0  # of delayed scaling: larger values saturate


def normal(rng, *shape, scale=1.0):
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def hostile(rng, kind, shape):
    x = normal(rng, *shape)
    place = tuple(rng.integers(size) for size in shape)
    if kind == "zeros":
        x[:] = 0
    elif kind == "subnormal":
        x *= np.float32(1e-39)
    elif kind == "partly subnormal":
        x[:, ::2] *= np.float32(1e-39)
    elif kind == "outlier":
        x[place] = 1e6
    elif kind in SCALES:
        x *= np.float32(SCALES[kind])
    elif kind == "wide":
        x *= np.exp(rng.uniform(-30, 30, shape)).astype(np.float32)
    elif kind in ("inf", "-inf", "nan"):
        x[place] = float(kind)
    return x


SCALES = {"small": 1e-18, "smaller": 1e-30, "large": 1e18, "larger": 1e30}  # squares or those of errors leave float32
KINDS = ("normal", *SCALES, "zeros", "subnormal", "partly subnormal", "outlier", "wide", "inf", "-inf", "nan")


@functools.cache
def step_of(name):
    """(x, kernel, dy, state) -> statistics of a layer whose gradient is dy."""
    recipe = RECIPES[name]
    # Elsewhere a GPU of compute capability 9.0 refuses it.
    implementation = "reference" if isinstance(recipe, MXFP8Scaling) else None

    def loss(params, x, dy):
        kernel, state = params["up"]["kernel"], params.get("state")
        y = ops.dense(x, kernel, recipe=recipe, scaling_state=state, implementation=implementation)
        return jnp.vdot(y, dy)

    def run(x, kernel, dy):
        params: dict[str, Any] = {"up": {"kernel": kernel}}
        if isinstance(recipe, DelayedScaling):
            history = jnp.full((2,), _AMAX, jnp.float32)
            params["state"] = type(recipe.init())(history, history, history, jnp.ones((), jnp.float32))
        wanted = Statistics(exponents=True)
        _, statistics = with_statistics(jax.grad(loss, argnums=(0, 1)), wanted)(params, x, dy)
        return statistics["up"]

    return jax.jit(run)


@pytest.mark.parametrize("name", RECIPES)
def test_statistics_of_hostile_tensors(name, rng):
    recipe = RECIPES[name]
    amax = np.float32(_AMAX) if name == "delayed" else None
    for kind in KINDS:
        if amax is not None and kind in SCALES:
            continue  # an amax of another step says nothing of them
        rows, inner = (144, 160) if name == "block" else (80, 96)  # a block and a part of one
        x, kernel, dy = (hostile(rng, kind, shape) for shape in ((rows, inner), (inner, 48), (rows, 48)))
        statistics = step_of(name)(x, kernel, dy)
        assert set(statistics) == {"activation", "kernel", "gradient"}
        for (role, product), copy in COPIES.items():
            tensor = {"activation": x, "kernel": kernel, "gradient": dy}[role]
            wanted = expected(tensor, recipe.quantization(role), copy, amax)
            assert_statistics(statistics[role][product], wanted, f"{kind} {role} {product}")


def test_statistics_of_bfloat16(rng):
    x, kernel, dy = (normal(rng, *shape).astype(jnp.bfloat16) for shape in ((32, 64), (64, 48), (32, 48)))
    statistics = step_of("current")(x, kernel, dy)
    for (role, product), copy in COPIES.items():
        tensor = {"activation": x, "kernel": kernel, "gradient": dy}[role]
        wanted = expected(tensor, RECIPES["current"].quantization(role), copy)
        assert_statistics(statistics[role][product], wanted, f"{role} {product}")


@pytest.mark.parametrize("width", [32_752, 131_072])
def test_counts_of_long_rows(width, rng):
    """One integer holds two counts of rows that are short."""
    x = normal(rng, 1, width) * np.float32(1e-9)
    x[:, 0] = 1
    run = with_statistics(lambda x, kernel: ops.dense(x, kernel, recipe=RECIPES["current"]))
    _, statistics = jax.jit(run)(x, normal(rng, width, 16))
    (found,) = (of_role["activation"]["forward"] for of_role in statistics.values())
    assert_statistics(found, expected(x, RECIPES["current"].quantization("activation"), "data"))
    assert found.underflow > 0.9


def test_a_delayed_scale_saturates(rng):
    """And not only in the oracle."""
    x, kernel, dy = (normal(rng, *shape) for shape in ((80, 96), (96, 48), (80, 48)))
    x[np.abs(np.abs(x) - _AMAX) < 1e-4] = 1  # whose products with the scale may be the largest value, rounded
    found = step_of("delayed")(x, kernel, dy)["activation"]["forward"]
    assert float(found.saturation) == pytest.approx(np.mean(np.abs(x) > _AMAX), rel=1e-5)


# ------------------------------------------------------------------------------------------------- transformations


def stack_loss(remat=False, recipe=RowwiseScaling()):
    def block(x, kernel, shared):
        h = ops.dense(x, kernel.astype(jnp.bfloat16).astype(jnp.float32), recipe=recipe)
        return jnp.tanh(ops.dense(h, shared, recipe=recipe))

    run = jax.checkpoint(block) if remat else block

    def loss(params, x):
        body = lambda x, kernel: (run(x, kernel, params["shared"]), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(body, x, params["layers"]["up"])[0] ** 2)

    return loss


def assert_same(actual, wanted, tolerance=1e-5):
    for field in FIELDS:
        found, reference = getattr(actual, field), getattr(wanted, field)
        np.testing.assert_allclose(found, reference, rtol=tolerance, atol=tolerance, err_msg=field)


def test_recomputed_tensors_count_once():
    """A program with remat reads tensors no more often for statistics than one without."""
    stack, shared = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 32, 32), (32, 32)))
    shapes, x = {"layers": {"up": stack}, "shared": shared}, jax.ShapeDtypeStruct((16, 32), jnp.float32)

    def reads(**options):
        run = with_statistics(jax.value_and_grad(stack_loss(**options)))
        jaxpr = jax.make_jaxpr(run)(shapes, x).jaxpr
        return str(dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]).count(" is_finite ")

    assert reads(remat=True) == reads() > 0


def test_vmap_and_branches_and_while(rng):
    """Examples are parts of one tensor; a branch that is not taken has no values; iterations are counted together."""
    x, kernel = normal(rng, 4, 16, 32), normal(rng, 32, 32)
    recipe = RowwiseScaling()

    def function(params, x, taken):
        y = jax.vmap(lambda x: ops.dense(x, params["mapped"], recipe=recipe))(x)
        y = jax.lax.cond(taken, lambda x: ops.dense(x, params["branch"], recipe=recipe), lambda x: x, y)
        again = lambda state: (state[0] + 1, ops.dense(state[1], params["loop"], recipe=recipe))  # noqa: E731
        _, z = jax.lax.while_loop(lambda state: state[0] < 2, again, (0, x))
        return y, z

    step = jax.jit(with_statistics(function))
    params = dict.fromkeys(("mapped", "branch", "loop"), kernel)
    _, statistics = step(params, x, True)
    quantization = recipe.quantization("activation")
    wanted = expected(x.reshape(64, 32), quantization, "data")
    assert_statistics(statistics["mapped"]["activation"]["forward"], wanted)
    assert set(statistics["mapped"]) == {"activation", "kernel"}  # there is no backward pass
    taken = statistics["branch"]["activation"]["forward"]
    (mapped, z), others = step(params, x, False)
    branch = others["branch"]["activation"]["forward"]
    assert (float(branch.amax), float(branch.underflow), np.isnan(branch.largest_scale)) == (0.0, 0.0, True)
    assert_statistics(taken, expected(np.reshape(mapped, (64, 32)), quantization, "data"))
    once = jax.jit(lambda x: ops.dense(x, kernel, recipe=recipe))(x)
    whole = expected(np.concatenate([x, once]).reshape(128, 32), quantization, "data")
    assert_statistics(statistics["loop"]["activation"]["forward"], whole)
    np.testing.assert_array_equal(z, jax.jit(lambda x: ops.dense(x, kernel, recipe=recipe))(once))


def test_several_kernels_share_the_statistics_of_x(rng):
    x, kernels = normal(rng, 16, 32), {"q": normal(rng, 32, 48), "k": normal(rng, 32, 16)}
    function = lambda kernels, x: ops.dense(x, (kernels["q"], kernels["k"]), recipe=CurrentScaling())  # noqa: E731
    _, statistics = jax.jit(with_statistics(function))(kernels, x)
    wanted = expected(x, CurrentScaling().quantization("activation"), "data")
    for name, kernel in kernels.items():
        assert_statistics(statistics[name]["activation"]["forward"], wanted)
        of_kernel = expected(kernel, CurrentScaling().quantization("kernel"), "transposed")
        assert_statistics(statistics[name]["kernel"]["forward"], of_kernel)


# --------------------------------------------------------------------------------------------------------- meshes


@pytest.mark.parametrize("kind", ["explicit", "unchecked"])
def test_meshes(kind, rng, require_devices):
    """Statistics are those of whole tensors."""
    require_devices(4)
    axis = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis, axis), devices=jax.devices()[:4])
    x, kernel, dy = normal(rng, 64, 32), normal(rng, 32, 96), normal(rng, 64, 96)
    recipe = RowwiseScaling()

    def grad(params, x, dy):
        return jax.grad(lambda params, x: jnp.sum(ops.dense(x, params["up"], recipe=recipe) * dy), (0, 1))(params, x)

    def local(params, x, dy):
        dparams, dx = grad(params, x, dy)
        return jax.lax.psum(dparams, "data"), jax.lax.psum(dx, "model")

    function, specs = grad, ({"up": P(None, "model")}, P("data"))
    if kind == "unchecked":  # `test_collective_matmul` has checked ones
        in_specs = (*specs, P("data", "model"))
        function = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=specs, check_vma=False)
    placed = [
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in ((kernel, P(None, "model")), (x, P("data", None)), (dy, P("data", "model")))
    ]
    with jax.set_mesh(mesh):
        _, statistics = jax.jit(with_statistics(function))({"up": placed[0]}, *placed[1:])
    of = statistics["up"]
    assert_statistics(of["activation"]["forward"], expected(x, recipe.quantization("activation"), "data"))
    assert_statistics(of["kernel"]["forward"], expected(kernel, recipe.quantization("kernel"), "transposed"))
    if kind != "unchecked":  # a device alone has scales of its part of a row
        assert_statistics(of["gradient"]["dgrad"], expected(dy, recipe.quantization("gradient"), "data"))
        assert_statistics(of["activation"]["wgrad"], expected(x, recipe.quantization("activation"), "transposed"))


@pytest.mark.parametrize(
    ("recipe", "name"),
    in_turns(
        {
            "row": RowwiseScaling(),
            "gradients": products(dgrad=RowwiseScaling(), wgrad=CurrentScaling()),
        },
        ["all_gather_matmul", "matmul_reduce_scatter"],
    ),
)
def test_collective_matmul(name, recipe, rng, require_devices):
    """Both products that read a tensor have its statistics, also where it travels once and is transposed afterwards."""
    require_devices(2)
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x, kernel, dy = normal(rng, 32, 64), normal(rng, 64, 96), normal(rng, 32, 96)
    gathers = name == "all_gather_matmul"
    rows, cols = P("tp"), P(None, "tp")
    options: dict[str, Any] = {"gather_dimension" if gathers else "scatter_dimension": 0}

    def local(params, x):
        return getattr(parallel, name)(x, params["up"], axis_name="tp", recipe=recipe, **options)

    specs = ({"up": cols}, rows) if gathers else ({"up": rows}, cols)
    function = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=cols if gathers else rows)
    grad = jax.grad(lambda params, x: jnp.sum(function(params, x) * dy), argnums=(0, 1))
    _, statistics = jax.jit(with_statistics(grad))({"up": kernel}, x)
    of = statistics["up"]
    recipes = recipe.by_product if isinstance(recipe, ProductRecipes) else dict.fromkeys(PRODUCTS, recipe)
    found = {(role, product): one for role, of_role in of.items() for product, one in of_role.items()}
    assert set(found) == {(role, product) for role, product in COPIES if recipes[product] is not None}
    tensors = {"activation": x, "kernel": kernel, "gradient": dy}
    for (role, product), one in found.items():
        copy, own = COPIES[role, product], recipes[product]
        split = (role, copy) in _SPLIT_ROWS[name] and isinstance(own, RowwiseScaling)
        if not split:  # a device alone has scales of its part of a row
            assert_statistics(one, expected(tensors[role], own.quantization(role), copy), f"{role} {product}")


_SPLIT_ROWS = {
    "all_gather_matmul": {("gradient", "data"), ("kernel", "data")},
    "matmul_reduce_scatter": {("activation", "data"), ("kernel", "transposed")},
}


_OFFLOAD = functools.partial(Offload, names=[LAYER_INPUT, "te_dense_activation"], min_size=0, required=False)
STACKS = {
    "unrolled": {},
    "scan": {},
    "scan and offload": {"offload": _OFFLOAD(implementation="native")},
    "fsdp and offload": {"fsdp": FSDP(2, min_size=0), "offload": _OFFLOAD()},
    "fsdp in fp8": {"fsdp": FSDP(2, min_size=0, quantize={"up": Requantize(BlockScaling())})},
}


@functools.cache
def stack_statistics(name, remat):
    """Statistics of two layers, and the kernels and x."""
    rng = np.random.default_rng(7)
    kernels, x = [4.0**i * normal(rng, 256, 256) for i in range(2)], normal(rng, 256, 256)
    run = layers.scan_layers if "scan" in name else layers.apply_layers

    def loss(params, x):
        layer = lambda x, of: ops.dense(x, of["up"], recipe=BlockScaling())  # noqa: E731
        return jnp.sum(run(layer, params["layers"], x, remat=remat, **STACKS[name]) ** 2)

    of_layers = [{"up": kernel} for kernel in kernels]
    params = {"layers": jax.tree.map(lambda *a: np.stack(a), *of_layers) if "scan" in name else of_layers}
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh) if "fsdp" in name else contextlib.nullcontext():
        _, statistics = jax.jit(with_statistics(jax.value_and_grad(loss, argnums=(0, 1))))(params, x)
    if "scan" in name:
        of = statistics["layers/up"]
        statistics = {f"layers/{i}/up": jax.tree.map(lambda leaf, i=i: leaf[i], of) for i in range(2)}
    return statistics, kernels, x


@pytest.mark.parametrize(("name", "remat"), in_turns([*STACKS], [False, True]))
def test_stacks(name, remat, require_devices):
    """Every tensor counts as the layer has it, however the stack is run, and no other does: none of those of zeros with
    which a backward pass computes again what parameters decide alone."""
    require_devices(2)
    statistics, kernels, x = stack_statistics(name, remat)
    wanted, _, _ = stack_statistics("unrolled", False)
    assert list(statistics) == [f"layers/{i}/up" for i in range(2)]
    first = statistics["layers/0/up"]["activation"]["forward"]
    assert_statistics(first, expected(x, BlockScaling().quantization("activation"), "data"))
    for i, kernel in enumerate(kernels):
        of, in_unrolled = statistics[f"layers/{i}/up"], wanted[f"layers/{i}/up"]
        of_kernel = expected(kernel, BlockScaling().quantization("kernel"), "transposed")
        assert_statistics(of["kernel"]["forward"], of_kernel)
        for role, product in COPIES:
            # Where sums end in other last bits, a value may round to the next code.
            assert_same(of[role][product], in_unrolled[role][product], 1e-3)


# ---------------------------------------------------------------------------------------------- experts and the head


def test_experts(rng):
    x, kernels, sizes = normal(rng, 256, 32), normal(rng, 2, 32, 48), np.array([128, 100], np.int32)
    recipe = BlockScaling()
    function = lambda kernels, x: ops.grouped_dense(x, kernels, sizes, recipe=recipe)  # noqa: E731
    _, statistics = jax.jit(with_statistics(function))(kernels, x)
    of = statistics["kernels"]
    rows = np.where(np.arange(256)[:, None] < 228, x, 0)
    assert_statistics(of["activation"]["forward"], expected(rows, recipe.quantization("activation"), "data"))
    each = [expected(kernel, recipe.quantization("kernel"), "transposed") for kernel in kernels]
    found = of["kernel"]["forward"]
    assert float(found.amax) == max(float(part["amax"]) for part in each)
    assert float(found.smallest_scale) == pytest.approx(min(part["smallest_scale"] for part in each), rel=1e-6)


def test_head(rng):
    """Chunks of tokens are parts of one tensor."""
    x, kernel, labels = normal(rng, 96, 32), normal(rng, 32, 64), rng.integers(0, 64, 96)
    recipe = RowwiseScaling()

    def loss(params, x):
        options = {"recipe": recipe, "chunk_tokens": 40, "fp8_products": ("forward", "dgrad", "wgrad")}
        return ops.linear_cross_entropy(x, params["head"], labels, **options)

    (value, _), statistics = jax.jit(with_statistics(jax.value_and_grad(loss, argnums=(0, 1))))({"head": kernel}, x)
    assert np.isfinite(value)
    of = statistics["head"]
    assert_statistics(of["activation"]["forward"], expected(x, recipe.quantization("activation"), "data"))
    assert_statistics(of["kernel"]["dgrad"], expected(kernel, recipe.quantization("kernel"), "data"))
    assert set(of["gradient"]) == {"dgrad", "wgrad"}


@needs_compiler
def test_a_gpu_reads_each_tensor_once():
    """And writes nothing of its size: neither masks nor codes that it turned."""
    know_handlers()

    def step(params, x, dy):
        recipe = BlockScaling()
        _, pull = jax.vjp(
            lambda params, x: ops.dense(x, params["up"], recipe=recipe, implementation="native"), params, x
        )
        return pull(dy)

    kernel = jax.ShapeDtypeStruct((2048, 4096), jnp.float32)
    x, dy = (jax.ShapeDtypeStruct((4096, size), jnp.bfloat16) for size in (2048, 4096))
    entry = compiled(with_statistics(step), {"up": kernel}, x, dy).as_text().split("\nENTRY ")[1]
    fusions = re.findall(r"= (.*?) fusion\((.*?)\)", entry)
    shapes = [shape for types, _ in fusions for shape in re.findall(r"\[([\d,]+)\]", types)]
    assert max(math.prod(map(int, shape.split(","))) for shape in shapes) < kernel.size / 32
    read = collections.Counter(name for _, operands in fusions for name in re.findall(r"%(params|x|dy)", operands))
    assert read == {"params": 1, "x": 1, "dy": 1}


# ---------------------------------------------------------------------------------------------------------- requests


def small_loss(params, x):
    for name in ("up", "gate", "down"):
        x = ops.dense(x, params[name], recipe=CurrentScaling())
    return jnp.sum(x**2)


SMALL = {name: jax.ShapeDtypeStruct((32, 32), jnp.float32) for name in ("up", "gate", "down")}
X = jax.ShapeDtypeStruct((16, 32), jnp.float32)


def test_only_what_is_asked_for():
    asked = Statistics(rules=("up", "ga*"), roles=("gradient", "kernel"), products=("dgrad",))
    _, statistics = jax.eval_shape(with_statistics(jax.grad(small_loss), asked), SMALL, X)
    assert {name: {role: list(products) for role, products in of.items()} for name, of in statistics.items()} == {
        name: {"gradient": ["dgrad"], "kernel": ["dgrad"]} for name in ("up", "gate")
    }
    assert statistics["up"]["kernel"]["dgrad"].exponents is None


def test_programs_without_a_request_are_what_they_were():
    run = jax.value_and_grad(small_loss)

    def program(function):
        return re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(function)(SMALL, X)))

    before = program(run)
    assert program(with_statistics(run)) != before
    assert program(run) == before


def test_donated_steps_and_logs(rng):
    """A whole step in a donated jit, which sorts dicts, and layers stay in the order of the forward pass; scalars and
    the table have every tensor."""
    params, x = {name: normal(rng, 32, 32) for name in SMALL}, normal(rng, 16, 32)

    def step(params, x):
        gradients = jax.grad(small_loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients)

    donated = jax.tree.map(lambda a: jax.device_put(a, may_alias=False), params)
    following, statistics = jax.jit(with_statistics(step), donate_argnums=0)(donated, x)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated))
    np.testing.assert_allclose(following["up"], jax.jit(step)(params, x)["up"], rtol=1e-6)
    assert list(statistics) == ["up", "gate", "down"]
    scalars = debug.scalars(statistics)
    assert len(scalars) == 3 * 6 * len(FIELDS)
    assert scalars["up/kernel/dgrad/amax"] == np.abs(params["up"]).max()
    lines = debug.table(statistics, sort_by="amax", most=4).splitlines()
    assert len(lines) == 6
    largest = max((value, name) for name, value in scalars.items() if name.endswith("/amax"))[1]
    assert lines[2].split()[:2] == largest.split("/")[:2]


# ------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rules": "up"}, "rules is 'up'; it must be a tuple of patterns"),
        ({"rules": ()}, r"rules is \(\)"),
        ({"roles": ("weight",)}, r"roles is \('weight',\); it must be a tuple of one or more names out of"),
        ({"products": "forward"}, "products is 'forward'"),
        ({"exponents": 1}, "exponents is 1; it must be True or False"),
    ],
)
def test_refused_statistics(arguments, message):
    with pytest.raises(ValueError, match=message):
        Statistics(**arguments)


def test_refused_functions():
    with pytest.raises(ValueError, match=r"rules has 'mlp/\*', which matches no layer in FP8 of function; it has"):
        jax.eval_shape(with_statistics(small_loss, Statistics(rules=("up", "mlp/*"))), SMALL, X)
    with pytest.raises(NotImplementedError, match="with_statistics is differentiated"):
        jax.eval_shape(jax.grad(lambda *args: with_statistics(small_loss)(*args)[0]), SMALL, X)
    with pytest.raises(ValueError, match="statistics is 'up'"):
        with_statistics(small_loss, "up")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="sort_by is 'loss'"):
        debug.table({}, sort_by="loss")
    with pytest.raises(ValueError, match="neither arrays nor hashable"):
        with_statistics(lambda x, options: x)(np.ones(3), {1, 2})
