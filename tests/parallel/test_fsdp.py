"""Layers whose parameters devices share: values and gradients of whole parameters, and what is refused."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax import layers, ops, optim
from te_jax._core.jaxprs import inner
from te_jax.layers import apply_layers
from te_jax.offload import Offload
from te_jax.ops.linear.kernels import quantize_kernel
from te_jax.optim import Requantize
from te_jax.parallel import FSDP, gather_params, shard_specs
from te_jax.parallel import shards as shards_module
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from te_jax.testing import assert_close

WIDTH, MLP, COUNT, DEVICES = 256, 512, 2, 2
BLOCK = Requantize(BlockScaling())
QUANTIZE = {"scale": None, "up": BLOCK, "bias": None, "down": BLOCK}
EXACT = FSDP(DEVICES, quantize=QUANTIZE, reduce_dtype="float32", min_size=1024)


@pytest.fixture
def mesh(require_devices):
    require_devices(8)
    return Mesh(np.array(jax.devices()[:DEVICES]), ("fsdp",), axis_types=(AxisType.Auto,))


def layer(x, params, recipe=BlockScaling()):
    """With a kernel that is split by columns too, and something of parameters alone."""
    h = ops.dense(ops.rms_norm(x["h"], 1 + params["scale"]), params["up"], params["bias"], recipe=recipe)
    h = checkpoint_name(jnp.where(x["mask"][..., None] > 0, jax.nn.silu(h), h), "hidden")
    return {"h": x["h"] + ops.dense(h, params["down"], recipe=recipe), "mask": x["mask"]}


plain = functools.partial(layer, recipe=None)


def draw(rng, count=COUNT):
    def normal(*shape, scale):
        return np.asarray(rng.standard_normal(shape) * scale, np.float32)

    params = [
        {
            "scale": normal(WIDTH, scale=0.1),
            "up": normal(WIDTH, MLP, scale=WIDTH**-0.5),
            "bias": normal(MLP, scale=0.1),
            "down": normal(MLP, WIDTH, scale=MLP**-0.5),
        }
        for _ in range(count)
    ]
    return params, {"h": normal(4, 128, WIDTH, scale=1.0), "mask": np.asarray(rng.integers(0, 2, (4, 128)), np.int32)}


HEADS, HEAD_DIM, EXPERTS = 4, 64, 4


def attend(x, params):
    """Kernels whose heads are one dimension with that of a head, where they are quantized."""
    heads = ops.dense(x["h"], params["query"], recipe=BlockScaling())
    heads = heads.reshape(*x["h"].shape[:-1], *params["out"].shape[:-1])
    out = ops.dense(heads, params["out"], contracting_ndim=params["out"].ndim - 1, recipe=BlockScaling())
    return x | {"h": x["h"] + out}


def mix(x, params):
    """Kernels of experts, each of which has its part of the tokens."""
    rows = x["h"].reshape(-1, x["h"].shape[-1])
    sizes = jnp.full(EXPERTS, len(rows) // EXPERTS, jnp.int32)
    hidden = jax.nn.silu(ops.grouped_dense(rows, params["up"], sizes, recipe=BlockScaling()))
    return x | {
        "h": x["h"] + ops.grouped_dense(hidden, params["down"], sizes, recipe=BlockScaling()).reshape(x["h"].shape)
    }


# Layers whose kernels have no dimension with whole blocks on two devices; how these are quantized; shapes and specs.
KINDS = {
    "heads": (
        attend,
        {"query": BLOCK, "out": dataclasses.replace(BLOCK, row_ndim=2)},
        {"query": (128, HEADS, HEAD_DIM), "out": (HEADS, HEAD_DIM, 128)},
        {"query": P(None, "fsdp"), "out": P("fsdp")},
    ),
    "experts": (
        mix,
        dict.fromkeys(("up", "down"), dataclasses.replace(BLOCK, stacked_ndim=1)),
        {"up": (EXPERTS, 128, 192), "down": (EXPERTS, 192, 128)},
        {"up": P("fsdp"), "down": P("fsdp")},
    ),
}


def draw_kind(rng, kind):
    """A layer, how its kernels are shared, parameters of a stack, x, and specs of a layer."""
    run, quantize, shapes, specs = KINDS[kind]
    params = [
        {name: np.asarray(rng.standard_normal(shape) / 16, np.float32) for name, shape in shapes.items()}
        for _ in range(2)
    ]
    x = {"h": np.asarray(rng.standard_normal((4, 512, 128)), np.float32), "mask": np.zeros((4, 512), np.int32)}
    return run, dataclasses.replace(EXACT, quantize=quantize), params, x, specs


def objective(y):
    return jnp.sum(jnp.sin(y["h"].astype(jnp.float32)))


def gradient(run, **options):
    """Of params and of h, in x."""

    def loss(params, h, mask):
        return objective(apply_layers(run, params, {"h": h, "mask": mask}, **options))

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def place(mesh, params, specs):
    return jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), params, specs)


def on_mesh(mesh, params, x, fsdp, run, **options):
    params = place(mesh, params, shard_specs(params, fsdp))
    x = jax.device_put(x, NamedSharding(mesh, P("fsdp")))
    with jax.set_mesh(mesh):
        return gradient(run, fsdp=fsdp, **options)(params, x["h"], x["mask"])


def assert_same(found, expected, tolerance):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(jax.device_get(one), jax.device_get(other), tolerance=tolerance)


CASES = {
    "plain": ({"quantize": None}, plain, {}),
    "all gathered once": ({"keep": COUNT}, layer, {"remat": True}),
    "gathered again": ({"keep": 0, "prefetch_bytes": 2**30}, layer, {}),
    "offloaded": ({"keep": 1}, layer, {"remat": True, "offload": Offload(min_size=0)}),
}


whole_gradient = functools.cache(lambda run: gradient(run))


@pytest.mark.parametrize("case", CASES)
def test_the_gradients_of_whole_parameters(case, mesh, rng, monkeypatch):
    monkeypatch.setattr(shards_module, "_LAUNCHES_GROUPS", case != "plain")
    changes, run, options = CASES[case]
    params, x = draw(rng, count=3 if case == "gathered again" else COUNT)
    found = on_mesh(mesh, params, x, dataclasses.replace(EXACT, **changes), run, **options)
    expected = whole_gradient(run)(params, x["h"], x["mask"])
    # XLA adds up in another order, and in FP8 that flips a rounding here and there.
    assert_same(found, expected, 1e-5 if run is plain else 1e-2)
    for leaf, spec in zip(jax.tree.leaves(found[1][0]), jax.tree.leaves(shard_specs(params, EXACT)), strict=True):
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), leaf.ndim)


def sum_of(function, params, x):
    """The sum of function(params, part) over the parts of the batch that devices have."""
    parts = [jax.tree.map(lambda leaf, part=part: np.split(leaf, DEVICES)[part], x) for part in range(DEVICES)]
    return jax.tree.map(lambda *values: sum(map(np.asarray, values)), *(function(params, part) for part in parts))


LAYERS = {
    "a list of functions": (
        [layer, plain],
        {"quantize": [QUANTIZE, None]},
        lambda run, params, x, **options: apply_layers(run, params, x, **options),
    ),
    "examples of vmap": (
        layer,
        {},
        lambda run, params, x, **options: jax.tree.map(
            lambda leaf: leaf[0],
            jax.vmap(lambda scale, x: apply_layers(run, params, x | {"h": x["h"] * scale}, **options), (0, None))(
                jnp.array([1.0, 2.0]), x
            ),
        ),
    ),
}


@pytest.mark.parametrize("case", LAYERS)
def test_layers_in_other_programs(case, mesh, rng):
    run, changes, stack = LAYERS[case]
    params, x = draw(rng, count=len(run) if isinstance(run, list) else 1)

    def of(**options):
        return jax.jit(jax.value_and_grad(lambda params, x: objective(stack(run, params, x, remat=True, **options))))

    with jax.set_mesh(mesh):
        found = of(fsdp=dataclasses.replace(EXACT, **changes))(params, x)
    assert_same(found, sum_of(of(), params, x), 1e-2)


# Layers (x, kernel, kernel that devices share) with branches that they choose by their own tokens.
SHARED = {
    "cond": lambda x, kernel, shared: jax.lax.cond(
        x.sum() > 0, lambda: jnp.tanh(x @ kernel), lambda: jnp.sin(x @ jax.nn.relu(shared))
    ),
    "cond that returns it": lambda x, kernel, shared: jnp.sin(
        x @ (kernel + jax.lax.cond(x.sum() > 0, lambda: 2 * shared, lambda: shared.T))
    ),
    "switch in scan": lambda x, kernel, shared: jax.lax.scan(
        jax.checkpoint(
            lambda x, i: (
                jax.lax.switch((x.sum() > 0).astype(int) + i, [lambda: x, *[lambda: jnp.sin(x @ shared)] * 2]),
                None,
            )
        ),
        jnp.tanh(x @ kernel),
        jnp.arange(2),
    )[0],
}


@pytest.mark.parametrize("place", ["closed over", "in x"])
@pytest.mark.parametrize("case", SHARED)
def test_gradients_of_what_a_branch_reads_are_summed_outside_of_it(case, place, mesh, rng):
    normal = lambda *shape: np.asarray(rng.standard_normal(shape) / 4, np.float32)  # noqa: E731
    kernels, shared = [normal(16, 16), normal(16, 16)], normal(16, 16)
    x = normal(4, 16) + np.float32([1, 1, -1, -1])[:, None]  # devices take different branches
    fsdp = FSDP(DEVICES, min_size=1, reduce_dtype="float32", specs=[P("fsdp")] * 2)

    def loss(kernels, shared, x, **options):
        run = SHARED[case]
        if place == "in x":
            layer = lambda x, kernel: (run(x[0], kernel, x[1]), x[1])  # noqa: E731
            return jnp.sum(apply_layers(layer, kernels, (x, shared), **options)[0] ** 2)
        return jnp.sum(apply_layers(lambda x, kernel: run(x, kernel, shared), kernels, x, **options) ** 2)

    gradient = jax.grad(functools.partial(loss, fsdp=fsdp, remat=True), argnums=(0, 1))
    specs = fsdp.specs, P()
    found = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=(*specs, P("fsdp")), out_specs=specs))
    expected = jax.jit(jax.grad(lambda *a: sum(loss(*a, part) for part in np.split(x, DEVICES)), argnums=(0, 1)))
    assert_same(found(kernels, shared, x), expected(kernels, shared), 1e-5)


# Layers (x, params) that close over a kernel, and what is said of them.
REFUSED = {
    "reads a state of delayed scaling": lambda shared: (
        lambda x, params: jax.lax.cond(
            x.sum() > 0, lambda: ops.dense(x, params[0], recipe=DelayedScaling(), scaling_state=params[1]), lambda: x
        )
    ),
    "custom_linear_solve reads an array that devices share": lambda shared: (
        lambda x, params: jax.lax.cond(x.sum() > 0, lambda: x @ jnp.linalg.solve(shared, shared), lambda: x)
    ),
    r"a branch has a psum\w* over \['fsdp'\]": lambda shared: (
        lambda x, params: jax.lax.cond(
            jax.random.bernoulli(jax.random.key(0)), lambda: x * jax.lax.psum(x, "fsdp"), lambda: x
        )
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_branches_of_devices_that_are_refused(words, mesh):
    params = [(np.eye(128, dtype=np.float32), DelayedScaling().init())]

    def run(x, shared):
        return apply_layers(REFUSED[words](shared), params, x, fsdp=FSDP(DEVICES))

    with pytest.raises(ValueError, match=words), jax.set_mesh(mesh):
        jax.eval_shape(run, np.ones((2, 128), np.float32), params[0][0])


# How a layer finds a key, from one of the step.
KEYS = {
    "passed": lambda key, drawn: (lambda x, params: x * drawn(params[1], x), lambda params: (params, key)),
    "closed over": lambda key, drawn: (lambda x, params: x * jax.nn.relu(drawn(key, x)), lambda params: params),
    "made of a seed": lambda key, drawn: (
        jax.checkpoint(lambda x, params: x * drawn(jax.random.split(jax.random.key(3))[1], x)),
        lambda params: params,
    ),
    "in a loop": lambda key, drawn: (
        lambda x, params: x * jax.random.poisson(params[1], 3.0, x.shape).astype(x.dtype),
        lambda params: (params, key),
    ),
    "for a branch": lambda key, drawn: (
        lambda x, params: jax.lax.cond(
            jax.random.bernoulli(params[1]), lambda: x * params[0][None], lambda: jnp.sin(x)
        ),
        lambda params: (params, key),
    ),
}


@pytest.mark.parametrize("case", KEYS)
def test_each_device_draws_for_its_part_of_the_batch(case, require_devices):
    """Also where they are replicas; a layer that runs again for its gradient draws the same."""
    require_devices(8)
    devices = np.array(jax.devices()[:8]).reshape(2, 4)
    fsdp = FSDP(4, replica_axis="replica")
    x, scale = jnp.ones((8, 64)), jnp.full(64, 2.0)

    def run(x, key, fsdp):
        layer, of_layer = KEYS[case](key, lambda key, x: jax.random.bernoulli(key, 0.5, x.shape).astype(x.dtype))
        return apply_layers(layer, [of_layer(scale)], x, remat=True, fsdp=fsdp)

    @jax.jit
    def both(x, key):
        y, backward = jax.vjp(lambda x: run(x, key, fsdp), x)
        return y, backward(y)[0]

    with jax.set_mesh(Mesh(devices, ("replica", "fsdp"), axis_types=(AxisType.Auto,) * 2)):
        y, gradient = jax.device_get(both(x, jax.random.key(1)))
    assert len({row.tobytes() for row in y}) == (2 if case == "for a branch" else 8)
    if case != "for a branch":
        np.testing.assert_array_equal(gradient, y * y)
    with jax.set_mesh(Mesh(devices[:1, :1], ("replica", "fsdp"), axis_types=(AxisType.Auto,) * 2)):
        of_one = jax.jit(lambda x, key: [run(x, key, fsdp) for fsdp in (FSDP(1, replica_axis="replica"), None)])
        np.testing.assert_array_equal(*of_one(x, jax.random.key(1)))


def launches(jaxpr):
    """How often each launch of a program gathers and sums."""
    for eqn in jaxpr.eqns:
        if eqn.params.get("name") == "_collectives":
            counts = collections.Counter(each.primitive.name for part in inner(eqn) for each in part.eqns)
            yield counts["all_gather"], counts["reduce_scatter"]
        else:
            assert eqn.primitive.name not in ("all_gather", "reduce_scatter")
            for part in inner(eqn):
                yield from launches(part)


@pytest.mark.parametrize(
    ("keep", "backward"),
    [
        (0, [(2, 0), (2, 0), (2, 2), (0, 2), (0, 2)]),
        (1, [(2, 0), (2, 2), (0, 2), (0, 2)]),
        (3, [(0, 2), (0, 2), (0, 2)]),
    ],
)
def test_one_launch_a_layer(keep, backward, mesh, rng, monkeypatch):
    """The last layers are gathered once; the others beside the sums of gradients, `up` and `down` together."""
    monkeypatch.setattr(shards_module, "_LAUNCHES_GROUPS", True)
    params, x = draw(rng, count=3)
    with jax.set_mesh(mesh):
        traced = gradient(plain, fsdp=of(quantize=None, keep=keep), remat=True).trace(params, x["h"], x["mask"])
    assert list(launches(traced.jaxpr)) == [(2, 0)] * 3 + backward


def test_gradients_on_a_wire_of_sixteen_bits(mesh, rng):
    params, x = draw(rng, count=1)
    found = on_mesh(mesh, params, x, of(reduce_dtype="bfloat16", min_size=1), layer, remat=True)
    exact = on_mesh(mesh, params, x, of(min_size=1), layer, remat=True)
    assert_same(found[0], exact[0], 0)
    assert_same(found[1], exact[1], 2**-7)
    vectors = [[leaf for leaf in jax.tree.leaves(each[1][0]) if leaf.ndim == 1] for each in (found, exact)]
    assert_same(*vectors, 1e-6)  # they travel in float32
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(found))


def exchanges(jaxpr):
    """Primitive and dtype of what is exchanged along "replica" alone, for each array."""
    for eqn in jaxpr.eqns:
        axes = eqn.params.get("axis_name", eqn.params.get("axes"))
        if axes in ("replica", ("replica",)) and eqn.primitive.name not in ("axis_index", "pvary"):
            yield from ((eqn.primitive.name, x.aval.dtype.name) for x in eqn.invars)
        for part in inner(eqn):
            yield from exchanges(part)


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@pytest.mark.parametrize("learns", [("up", "down"), ("down",)], ids=str)
def test_replicas_sum_gradients_of_kernels_that_learn_in_the_dtype_of_the_wire(learns, wire, require_devices, rng):
    require_devices(8)
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(3, 2), ("replica", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    fsdp = of(quantize=None, replica_axis="replica", reduce_dtype=wire, keep=0)
    params, x = draw(rng)
    x = {name: np.resize(array, (6, *array.shape[1:])) for name, array in x.items()}

    def loss(learned, params, x, fsdp=None):
        params = [each | some for each, some in zip(params, learned, strict=True)]
        return objective(apply_layers(plain, params, x, fsdp=fsdp))

    learned = [{name: each[name] for name in learns} for each in params]
    expected = jax.jit(jax.grad(loss))(learned, params, x)
    learned, params = (place(mesh, tree, shard_specs(tree, fsdp)) for tree in (learned, params))
    x = jax.device_put(x, NamedSharding(mesh, P(("replica", "fsdp"))))
    with jax.set_mesh(mesh):
        traced = jax.jit(jax.grad(functools.partial(loss, fsdp=fsdp))).trace(learned, params, x)
        found = traced.lower().compile()(learned, params, x)
    assert_same(found, expected, 1e-5 if wire == "float32" else 2**-7)
    assert list(exchanges(traced.jaxpr)) == [("psum_invariant", wire)] * COUNT * len(learns)


def test_replicas_that_have_gradients_of_their_own_sum_them_once(require_devices, rng):
    require_devices(8)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("replica", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    params, x = draw(rng)
    specs = shard_specs(params, EXACT)
    fsdp = of(quantize=None, replica_axis="replica", specs=specs)

    def loss(params, x):
        return objective(apply_layers(plain, params, x, fsdp=fsdp))

    def step(params, x):
        own = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, ("replica",), to="varying"), params)
        halves = ({name: value[:, half::2] for name, value in x.items()} for half in range(2))  # microbatches
        first, second = (jax.grad(loss)(own, half) for half in halves)
        return jax.tree.map(lambda *both: jax.lax.psum(sum(both), "replica"), first, second)

    traced = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs, P(("replica", "fsdp"))), out_specs=specs)).trace(
        params, x
    )
    found = traced.lower().compile()(
        place(mesh, params, specs), jax.device_put(x, NamedSharding(mesh, P(("replica", "fsdp"))))
    )
    assert_same(found, whole_gradient(plain)(params, x["h"], x["mask"])[1][0], 1e-5)
    leaves = len(jax.tree.leaves(params))
    assert list(exchanges(traced.jaxpr)) == [("psum_invariant", "float32")] * leaves


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_that_are_no_matrices(kind, mesh, rng):
    """Quantized in the layer, or once, in parts, for microbatches, whose sums are parts, too."""
    run, fsdp, params, x, specs = draw_kind(rng, kind)
    specs = [specs] * 2
    assert shard_specs(params, fsdp) == specs
    placed = place(mesh, params, specs)
    halves = [jax.tree.map(lambda leaf, part=part: leaf[part::2], x) for part in range(2)]

    def loss(params, x, fsdp=fsdp):
        return objective(apply_layers(run, params, x, remat=True, fsdp=fsdp))

    @jax.jit
    def both(params, halves):
        how = [fsdp.quantize] * len(params)
        _, kernels = optim.apply_updates(params, jax.tree.map(jnp.zeros_like, params), requantize=how)
        accumulate, sums = layers.accumulate_gradients(loss), None
        for half in halves:
            _, sums = accumulate(optim.merge_kernels(params, kernels), sums, half)
        return jax.value_and_grad(loss)(params, halves[0]), sums

    with jax.set_mesh(mesh):
        of_first, sums = both(placed, halves)
    whole = jax.jit(jax.value_and_grad(functools.partial(loss, fsdp=None)))
    first, second = (sum_of(whole, params, half) for half in halves)
    assert_same(of_first, first, 5e-3)
    assert_same(sums, jax.tree.map(lambda a, b, like: (a + b).reshape(like.shape), first[1], second[1], sums), 1e-2)
    for found in (of_first[1], sums):
        for leaf, spec in zip(jax.tree.leaves(found), jax.tree.leaves(specs), strict=True):
            assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), leaf.ndim)


def test_parts_that_cut_blocks(require_devices, rng):
    """Scales are those of whole blocks, and codes those of the whole kernel, bit for bit."""
    require_devices(8)
    mesh = Mesh(np.array(jax.devices()[:8]), ("fsdp",), axis_types=(AxisType.Auto,))
    shapes = {"rows": (384, 192), "cols": (131, 512), "heads": (192, 2, 96), "experts": (3, 192, 128)}
    kernels = {
        name: np.asarray(rng.standard_normal(shape) * np.exp(2 * rng.standard_normal(shape)), np.float32)
        for name, shape in shapes.items()
    }
    hows = dict.fromkeys(kernels, BLOCK) | {"experts": dataclasses.replace(BLOCK, stacked_ndim=1)}
    hows["heads"] = dataclasses.replace(BLOCK, row_ndim=2)
    fsdp = of(size=8, quantize=hows)
    specs = shard_specs(kernels, fsdp)
    assert specs == {"rows": P("fsdp"), "cols": P(None, "fsdp"), "heads": P("fsdp"), "experts": P(None, "fsdp")}

    def gathered(kernels, x):
        (layer,), shards = shards_module.prepare(dataclasses.replace(fsdp, specs=specs), [kernels], x)
        return jax.tree.map(lambda leaf: leaf[None], shards.gather(0, layer))

    inside = jax.shard_map(gathered, mesh=mesh, in_specs=(specs, P("fsdp")), out_specs=P("fsdp"))
    found = jax.jit(inside)(place(mesh, kernels, specs), jnp.ones(8))
    for name, kernel in kernels.items():
        how = hows[name]
        wanted = quantize_kernel(kernel, how.recipe, row_ndim=how.row_ndim, stacked_ndim=how.stacked_ndim)
        for each in ("data", "scale_inv", "transposed", "transposed_scale_inv"):
            one, other = (np.asarray(getattr(array, each)).astype(np.float32) for array in (found[name], wanted))
            np.testing.assert_array_equal(one, np.broadcast_to(other, one.shape), err_msg=f"{name} {each}")


def test_gradients_of_parts_that_cut_blocks(require_devices, rng):
    require_devices(8)
    mesh = Mesh(np.array(jax.devices()[:8]), ("fsdp",), axis_types=(AxisType.Auto,))
    params, x = draw(rng)
    x = {name: np.concatenate([array, array]) for name, array in x.items()}
    found = on_mesh(mesh, params, x, of(size=8), layer, remat=True)
    assert_same(found, whole_gradient(layer)(params, x["h"], x["mask"]), 1e-2)


@pytest.mark.parametrize("remat", [None, True])
def test_values_of_a_quantized_kernel_have_no_gradient(remat, mesh, rng):
    params, x = draw(rng)

    def reads(x, params):
        return layer(x, params) | {"h": x["h"] @ params["up"].dequantize()[:, :WIDTH]}

    with pytest.raises(NotImplementedError, match=r"read by dequantize\(\) and differentiated"):
        on_mesh(mesh, params, x, EXACT, reads, remat=remat)


def test_parameters_outside_of_a_stack(mesh, rng):
    params = {"head": np.asarray(rng.standard_normal((WIDTH, MLP)), np.float32), "scale": np.ones(8, np.float32)}
    fsdp = FSDP(DEVICES, gather_dtype="bfloat16")
    specs = shard_specs(params, fsdp)
    assert specs == {"head": P("fsdp"), "scale": P()}

    def loss(params):
        whole = gather_params(fsdp, params, specs)
        assert (whole["head"].shape, whole["head"].dtype) == ((WIDTH, MLP), jnp.bfloat16)
        return jax.lax.psum(jnp.sum(whole["head"].astype(jnp.float32)) + jnp.sum(whole["scale"]), "fsdp")

    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(specs,), out_specs=P())
    found = jax.jit(jax.grad(mapped))(params)
    assert_same(found, jax.tree.map(lambda leaf: np.full(leaf.shape, 2, np.float32), params), 0)


# ----------------------------------------------------------------------------------------------------- what is refused


def of(**changes):
    return dataclasses.replace(EXACT, **changes)


@pytest.mark.parametrize(
    ("fsdp", "words"),
    [
        (2, "fsdp is 2: it must be a te_jax.parallel.FSDP"),
        (of(size=4), r"fsdp.size is 4, and the mesh has 2 devices along 'fsdp': pass size=2"),
        (of(axis_name="data"), r"fsdp names the axes \['data'\], and the mesh has \('fsdp',\)"),
        (of(quantize={"up": BLOCK}), r"fsdp.quantize fits no layer's parameters.* nothing for .*\['bias'\]"),
        (of(quantize=QUANTIZE | {"key": None}), r"it has .*\['key'\].*, which the layer lacks"),
        (of(quantize=QUANTIZE | {"up": BlockScaling()}), "neither a te_jax.optim.Requantize nor None"),
        (of(quantize=QUANTIZE | {"bias": BLOCK}), r"row_ndim=1 .* use None for what is no kernel"),
        (of(quantize=QUANTIZE | {"up": Requantize(RowwiseScaling())}), "scales of their own"),
        (of(quantize=QUANTIZE | {"up": Requantize(DelayedScaling())}), "whose state remembers the kernel's amax"),
    ],
)
def test_what_does_not_fit(fsdp, words, mesh, rng):
    params, x = draw(rng)
    with pytest.raises(ValueError, match=words), jax.set_mesh(mesh):
        jax.eval_shape(lambda params, x: apply_layers(layer, params, x, fsdp=fsdp), params, x)


def test_places_where_parameters_cannot_be_shared(mesh, rng):
    params, x = draw(rng)
    run = lambda params, x, fsdp=EXACT: apply_layers(layer, params, x, fsdp=fsdp)  # noqa: E731
    specs = shard_specs(params, EXACT)

    def mapped(fsdp, in_specs, **options):
        function = functools.partial(run, fsdp=fsdp)
        shapes = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=P("fsdp"), **options)
        jax.eval_shape(shapes, params, x)

    with pytest.raises(ValueError, match=r"fsdp has no specs, and inside of jax.shard_map nothing else says"):
        mapped(EXACT, (specs, P("fsdp")))
    with pytest.raises(ValueError, match="x is the same on all devices"):
        mapped(of(specs=specs), (specs, P()))
    whole = [specs[0] | {"up": P()}] * COUNT
    words = r"params\[0\]\['up'\] differs from device to device along 'fsdp', and fsdp.specs has P\(\) for it: pass"
    with pytest.raises(ValueError, match=words):
        mapped(of(specs=whole), (specs, P("fsdp")))
    words = r"params\[0\]\['up'\] is the same on all devices along 'fsdp', and fsdp.specs has P\('fsdp',?\) for it"
    with pytest.raises(ValueError, match=words):
        mapped(of(specs=specs), (whole, P("fsdp")))
    with pytest.raises(TypeError, match="unexpected keyword argument 'fsdp'"):
        layers.scan_layers(layer, params[0], x, fsdp=EXACT)
    with pytest.raises(ValueError, match="does not track what varies over devices"):
        mapped(of(specs=specs), (specs, P("fsdp")), check_vma=False)
    with (
        pytest.raises(ValueError, match=r"x\['h'\] has shape \(3, 128, 256\), .* split over 2 devices"),
        jax.set_mesh(mesh),
    ):
        run(params, jax.tree.map(lambda leaf: leaf[:3], x))
    others = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tensor"))
    with pytest.raises(ValueError, match=r"several devices along \['tensor'\]"), jax.set_mesh(others):
        run(params, x)
    explicit = Mesh(mesh.devices, ("fsdp",), axis_types=(AxisType.Explicit,))

    def closing_over_scale(params, h):
        scale = jnp.ones((1, 1, WIDTH))
        return apply_layers(lambda x, p: x * scale, params, h, fsdp=EXACT)

    words = r"layer closes over an array, and the mesh has Explicit axes, \('fsdp',\): .* Pass it to each layer in"
    with pytest.raises(ValueError, match=words), jax.set_mesh(explicit):
        jax.eval_shape(closing_over_scale, params, x["h"])


def test_equal_values_have_one_hash():
    one, other = FSDP(2, quantize={"up": BLOCK, "bias": None}), FSDP(2, quantize={"bias": None, "up": BLOCK})
    assert one == other
    assert hash(one) == hash(other) != hash(FSDP(2))
    assert hash(of(specs=[{"up": P("fsdp")}])) != hash(of(specs=[{"up": P(None, "fsdp")}]))


def test_sizes_of_parts():
    shapes = {"kernel": (28672, 8192), "scale": (8192,), "heads": (512, 8, 64)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    assert shard_specs(params, FSDP(4)) == {"kernel": P("fsdp"), "scale": P(), "heads": P("fsdp")}
    assert shard_specs(params, FSDP(64))["kernel"] == P(None, "fsdp")
    heads, experts = jnp.zeros((256, 8, 64)), jnp.zeros((8, 192, 256))
    how = {"heads": BLOCK, "experts": dataclasses.replace(BLOCK, stacked_ndim=1)}
    of_layer = {"heads": heads, "experts": experts}
    expected = {"heads": P(None, "fsdp"), "experts": P("fsdp")}
    for params, wanted in ((of_layer, expected), ([of_layer] * 2, [expected] * 2), ((of_layer,), (expected,))):
        assert shard_specs(params, FSDP(4, quantize=how)) == wanted
    assert shard_specs({"head": heads}, FSDP(4, quantize=how)) == {"head": P("fsdp")}
    quantized = ops.quantize(jnp.ones((256, 512)), CurrentScaling().quantization("kernel"))
    assert shard_specs([quantized], FSDP(2)) == [P("fsdp")]
    with pytest.raises(
        ValueError, match=r"params\['kernel'\] has shape \(100, 1000\), and size=3 .* sizes that do: 2\."
    ):
        shard_specs({"kernel": jnp.zeros((100, 1000))}, FSDP(3))
    kernel = ops.quantize(jnp.ones((192, 192)), BlockScaling().quantization("kernel"))
    with pytest.raises(
        ValueError, match=r"params\['up'\] .* in FP8, and size=2 cuts its blocks .* name it in fsdp.quantize"
    ):
        shard_specs({"up": kernel}, FSDP(2, min_size=1))
    for wrong, words in (
        ({"size": 0}, "size is 0"),
        ({"keep": -1}, "keep is -1"),
        ({"reduce_dtype": "int8"}, "reduce_dtype is int8"),
        ({"replica_axis": "fsdp"}, "name two axes"),
        ({"axis_name": 1}, "axis_name is 1"),
    ):
        with pytest.raises(ValueError, match=words):
            FSDP(**{"size": 2} | wrong)
