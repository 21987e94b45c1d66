"""Dispatch to experts on other devices and back, against loops in NumPy over all choices of all devices."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from te_jax import ops, parallel
from te_jax.ops import Activation
from te_jax.ops.experts_mlp import experts_mlp
from te_jax.parallel.experts import combine_tokens, gather_tokens
from te_jax.recipe import BlockScaling, CurrentScaling, RowwiseScaling

EXCHANGES = ("all_to_all", "all_gather")
TOKENS, FEATURES = 12, 5


@dataclasses.dataclass(frozen=True)
class Case:
    devices: int
    experts: int
    top_k: int
    align: int = 1
    capacity: int | None = None
    buffer_factor: float | None = None
    check_vma: bool = True
    mesh: dict[str, int] | None = None

    @property
    def axes(self):
        return self.mesh or {"expert": self.devices}

    @property
    def options(self):
        return {"align": self.align, "capacity": self.capacity, "buffer_factor": self.buffer_factor}

    @property
    def held(self):
        return self.experts // self.devices

    @property
    def num_rows(self):
        """As the docstring says."""

        def padded(choices):
            return (choices + (self.align - 1) * min(self.held, choices)) // self.align * self.align

        rows = [padded(self.devices * TOKENS * min(self.top_k, self.held))]
        if self.capacity is not None:
            rows.append(self.held * -(-self.capacity // self.align) * self.align)
        if self.buffer_factor is not None:
            rows.append(padded(math.ceil(self.buffer_factor * TOKENS * self.top_k)))
        return min(rows)


CASES = {
    "capacity": Case(2, 8, 3, align=4, capacity=15),
    "small buffer": Case(4, 16, 2, align=4, buffer_factor=0.7, check_vma=False, mesh={"node": 2, "expert": 2}),
}


def mesh_of(**axes):
    """Skips the test where there are fewer devices."""
    if jax.device_count() < math.prod(axes.values()):
        pytest.skip(f"needs {math.prod(axes.values())} devices, and there are {jax.device_count()}")
    sizes, devices = tuple(axes.values()), jax.devices()[: math.prod(axes.values())]
    return jax.make_mesh(sizes, tuple(axes), axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def loads(rng, case):
    """Experts [devices, tokens, top_k] for every token, by the name of the load."""
    shape = (case.devices, TOKENS)
    everywhere = np.arange(case.experts, dtype=np.int32)

    def drawn(probabilities):
        keys = np.log(probabilities) + rng.gumbel(size=(*shape, case.experts))
        return np.argsort(-keys, axis=-1)[..., : case.top_k].astype(np.int32)

    zipf = 1.0 / (1.0 + everywhere)
    flat = np.arange(np.prod(shape) * case.top_k) % case.experts
    hot = np.full((*shape, case.top_k), -1, np.int32)
    hot[..., 0] = case.experts - 1
    idle = drawn(np.where(everywhere < case.held, 1.0, 0.0) + 1e-9)
    idle = np.where(idle < case.held, idle, -1)
    silent = drawn(zipf)
    silent[-1] = -1
    return {
        "balanced": flat.reshape(*shape, case.top_k).astype(np.int32),
        "zipf": drawn(zipf),
        "all to one expert": hot,
        "nothing to most devices": idle,
        "nothing from one device, and outside": np.where(rng.random((*shape, 1)) < 0.2, case.experts, silent),
        "nothing at all": np.full_like(hot, -1),
    }


def expected(case, x, experts, weights, cotangent):
    """What each device receives, counts and returns."""
    room, align = case.num_rows, case.align
    rows = np.zeros((case.devices, room, FEATURES), np.float32)
    of_rows = np.zeros((case.devices, room), np.float32)
    sizes = np.zeros((case.devices, case.held), np.int32)
    goes = np.zeros(experts.shape, bool)
    for device in range(case.devices):
        mine = [np.argwhere(experts == device * case.held + e) for e in range(case.held)]
        fits = [len(choices) if case.capacity is None else min(len(choices), case.capacity) for choices in mine]

        def padded(limit, fits=fits):
            return sum(-(-min(n, limit) // align) * align for n in fits)

        limit = next(m * align for m in range(room, -1, -1) if padded(m * align) <= room)
        start = 0
        for e, choices in enumerate(mine):
            for place, (d, t, k) in enumerate(choices[: min(fits[e], limit)]):
                rows[device, start + place] = x[d, t]
                of_rows[device, start + place] = weights[d, t, k]
                goes[d, t, k] = True
            sizes[device, e] = -(-min(fits[e], limit) // align) * align
            start += sizes[device, e]
    valid = (experts >= 0) & (experts < case.experts)
    kept = np.where(goes, weights, 0.0).sum(axis=-1, keepdims=True)
    products = (cotangent * x).sum(axis=-1, keepdims=True)
    return {
        "rows": rows,
        "of_rows": of_rows,
        "sizes": sizes,
        "dropped": (valid & ~goes).sum(axis=(1, 2)),
        "y": kept * x,
        "dx": kept * cotangent,
        "dweights": np.where(goes, products, 0.0),
        "goes": goes,
        "choices": np.sort(np.where(goes.reshape(case.devices, -1), np.arange(TOKENS * case.top_k), -1)),
    }


@jax.custom_vjp
def poisoned(rows, padding, poison):
    """The rows, with poison in padding, and in the gradient of padding."""
    return jnp.where(padding[:, None], poison, rows)


poisoned.defvjp(
    lambda rows, padding, poison: (poisoned(rows, padding, poison), (padding, poison)),
    lambda kept, drows: (jnp.where(kept[0][:, None], kept[1], drows), None, None),
)


def program(case):
    """f(x, experts, weights, cotangent, poison) for both exchanges, which puts the poison where rows are padding."""

    def local(exchange, x, experts, weights, cotangent, poison):
        plan = parallel.plan_dispatch(
            experts, case.experts, axis_name=tuple(case.axes), exchange=exchange, **case.options
        )
        assert plan.exchange == exchange

        def layer(x, weights):
            rows, of_rows = parallel.dispatch(x, weights, plan)
            bad_rows, bad_of_rows = (poisoned(a, of_rows == 0.0, poison) for a in (rows, of_rows[:, None]))
            return parallel.combine(bad_rows * bad_of_rows, plan), (rows, of_rows)

        y, vjp, (rows, of_rows) = jax.vjp(layer, x, weights, has_aux=True)
        dx, dweights = vjp(cotangent)
        names = ("rows", "of_rows", "sizes", "dropped", "y", "dx", "dweights", "goes", "choices")
        goes, choices = plan.permutation.rows >= 0, jnp.sort(plan.permutation.choices)
        values = (rows, of_rows, plan.group_sizes, plan.dropped[None], y, dx, dweights, goes, choices)
        return dict(zip(names, values, strict=True))

    def both(*operands):
        return {exchange: local(exchange, *operands) for exchange in EXCHANGES}

    split = P(tuple(case.axes))
    mapped = jax.shard_map(
        both, mesh=mesh_of(**case.axes), in_specs=(*(split,) * 4, P()), out_specs=split, check_vma=case.check_vma
    )
    return jax.jit(mapped)


@pytest.mark.parametrize("name", CASES)
def test_as_loops(rng, name):
    """Rows, counts, sums and gradients of every load by one executable, whatever padding holds."""
    case = CASES[name]
    f = program(case)
    for load, experts in loads(rng, case).items():
        shape = (case.devices, TOKENS)
        x, cotangent = (rng.standard_normal((*shape, FEATURES)).astype(np.float32) for _ in range(2))
        weights = rng.uniform(0.1, 1.0, experts.shape).astype(np.float32)
        flat = [a.reshape(-1, a.shape[-1]) for a in (x, experts, weights, cotangent)]
        found = jax.tree.map(np.asarray, f(*flat, jnp.float32(0.0)))
        poisoned = jax.tree.map(np.asarray, f(*flat, jnp.float32(np.nan)))
        wanted = expected(case, x, experts, weights, cotangent)
        for exchange in EXCHANGES:
            for result, value in wanted.items():
                text = f"{load}, {exchange}, {result}"
                array = found[exchange][result].reshape(value.shape)
                if result in ("y", "dx", "dweights"):
                    np.testing.assert_allclose(array, value, rtol=1e-5, atol=1e-5, err_msg=text)
                else:
                    np.testing.assert_array_equal(array, value, text)
                np.testing.assert_array_equal(found[exchange][result], poisoned[exchange][result], text)
    assert f._cache_size() == 1


# The second one's rows are enough for one expert of a device, if the other one has no tokens.
@pytest.mark.parametrize("limit", [{"capacity": 15}, {"buffer_factor": 0.02}], ids=["capacity", "small buffer"])
def test_experts_gather_tokens_of_all_devices(rng, limit):
    """As rows that were sent to them, with what does not fit, and whatever tokens without an expert hold."""
    case = Case(4, 8, 3, align=128, **limit)
    tokens, features, hidden = TOKENS, 32, 16
    options = {"activation": Activation("silu"), "recipe": BlockScaling(power_of_two_scales=True),
               "wgrad_accumulator": (None,) * 3, "accumulate": True, "implementation": None}  # fmt: skip

    def local(exchange, x, chosen, weights, cotangent, *kernels):
        plan = parallel.plan_dispatch(chosen, case.experts, axis_name="expert", exchange=exchange, **case.options)
        quantization = options["recipe"].quantization("activation")

        def layer(x, weights, kernels):
            if exchange == "all_gather":
                x, weights = gather_tokens(x, weights, plan, quantization, None)
                y = experts_mlp(x, weights, plan.group_sizes, plan.gathered, kernels, **options)
                return combine_tokens(y, plan)
            rows, of_rows = parallel.dispatch(x, weights, plan, quantization=quantization)
            return parallel.combine(experts_mlp(rows, of_rows, plan.group_sizes, None, kernels, **options), plan)

        goes = jnp.any(plan.permutation.rows >= 0, axis=-1, keepdims=True)
        x, cotangent = (jnp.where(goes, array, jnp.nan) for array in (x, cotangent))
        y, vjp = jax.vjp(layer, x, weights, kernels)
        return {"y": y, "gradients": vjp(cotangent), "goes": goes, "dropped": plan.dropped[None]}

    mapped = jax.shard_map(
        lambda *operands: [local(exchange, *operands) for exchange in EXCHANGES],
        mesh=mesh_of(expert=4), in_specs=P("expert"), out_specs=P("expert"),
    )  # fmt: skip
    f, dropped = jax.jit(mapped), 0
    shapes = ((features, hidden), (features, hidden), (hidden, features))
    for load, chosen in loads(rng, case).items():
        x, cotangent = (rng.standard_normal((4 * tokens, features)).astype(np.float32) for _ in range(2))
        weights = rng.uniform(0.1, 1.0, (4 * tokens, case.top_k)).astype(np.float32)
        kernels = (rng.standard_normal((case.experts, *shape)).astype(np.float32) for shape in shapes)
        found = f(x, chosen.reshape(-1, case.top_k), weights, cotangent, *kernels)
        rows, gathered = jax.tree.map(np.asarray, found)
        for (path, one), other in zip(
            jax.tree_util.tree_leaves_with_path(gathered), jax.tree.leaves(rows), strict=True
        ):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4, err_msg=f"{load}, {path}")
        assert np.any(gathered["y"]) == np.any(gathered["goes"])
        dropped += int(np.sum(gathered["dropped"]))
    assert f._cache_size() == 1
    assert dropped > 0


def test_fp8_on_the_wire(rng):
    """Rows arrive as their FP8 values, and quantizing them again changes none; gradients pass as they are."""
    recipes = (BlockScaling(power_of_two_scales=True), RowwiseScaling(power_of_two_scales=True))
    tokens, features, experts, top_k = 40, 208, 4, 2
    x = np.exp2(rng.uniform(-60, 60, (tokens, 1))) * rng.standard_normal((tokens, features))
    x *= np.exp2(rng.integers(-24, 0, x.shape))  # FP8 subnormals, and values that become zero
    x = x.astype(np.float32)
    x[0], x[1, :130], x[2, 3], x[3, 4], x[5] = 0.0, 1e-40, np.inf, np.nan, 2.0**-126
    x[4] = np.float32(2.0**-120) * rng.standard_normal(features)
    operands = (
        x.astype(jnp.bfloat16),
        rng.integers(0, experts, (tokens, top_k)).astype(np.int32),
        rng.random((tokens, top_k)).astype(np.float32),
    )

    def local(x, chosen, weights):
        results = []
        for exchange, recipe in zip(EXCHANGES, recipes, strict=True):
            quantization = recipe.quantization("activation")
            plan = parallel.plan_dispatch(chosen, experts, axis_name="expert", align=16, exchange=exchange)
            send = functools.partial(parallel.dispatch, plan=plan, quantization=quantization)
            (rows, of_rows), vjp = jax.vjp(send, x, weights)
            plain, plain_vjp = jax.vjp(functools.partial(parallel.dispatch, plan=plan), x, weights)
            cotangents = jnp.where(jnp.isnan(rows), jnp.ones((), rows.dtype), rows), of_rows
            again = ops.quantize(rows, quantization, copies="data").dequantize()
            here = ops.quantize(x, quantization, copies="data").dequantize()
            wanted, _ = parallel.dispatch(here, weights, plan)
            results.append(((rows, of_rows, *vjp(cotangents)), (wanted, plain[1], *plain_vjp(cotangents)), rows, again))
        return results

    mapped = jax.shard_map(local, mesh=mesh_of(expert=2), in_specs=P("expert"), out_specs=P("expert"))
    for found, wanted, rows, again in jax.jit(mapped)(*operands):
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
        np.testing.assert_array_equal(np.asarray(rows, np.float32), np.asarray(again, np.float32))
        assert np.isnan(np.asarray(rows, np.float32)).any()


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_program_for_gpus(exchange):
    """Forward 2 exchanges and 1 back, backward 1 and 2 back; no scatter, and nothing travels twice."""

    def local(x, experts, weights):
        plan = parallel.plan_dispatch(experts, 4, axis_name="expert", exchange=exchange)
        rows, of_rows = parallel.dispatch(x, weights, plan, quantization=BlockScaling().quantization("activation"))
        return parallel.combine(jnp.sin(rows) * of_rows[:, None], plan)

    mapped = jax.shard_map(local, mesh=mesh_of(expert=2), in_specs=P("expert"), out_specs=P("expert"))

    def loss(*operands):
        return jnp.sum(
            jax.checkpoint(mapped, policy=jax.checkpoint_policies.save_only_these_names("te_dispatched_rows"))(
                *operands
            )
            ** 2
        )

    operands = np.ones((8, 128), np.float32), np.zeros((8, 2), np.int32), np.ones((8, 2), np.float32)
    traced = jax.jit(jax.value_and_grad(loss, argnums=(0, 2))).trace(*operands)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    found = {name: len(re.findall(rf"[@.]{name}\b", text)) for name in ("ragged_all_to_all", "all_to_all", "scatter")}
    assert found == {
        "ragged_all_to_all": 6 if exchange == "all_to_all" else 0,
        "all_to_all": 3 if exchange == "all_gather" else 0,
        "scatter": 0,
    }


def test_choice_of_exchange():
    """By bytes: a gather where devices are no more than choices of a token."""

    def exchange(devices, top_k):
        def local(experts):
            found.append(parallel.plan_dispatch(experts, 8, axis_name="expert").exchange)

        found = []
        mapped = jax.shard_map(local, mesh=mesh_of(expert=devices), in_specs=P("expert"), out_specs=P())
        jax.eval_shape(mapped, jax.ShapeDtypeStruct((8, top_k), jnp.int32))
        return found[0]

    counts = [n for n in (1, 2, 4) if n <= jax.device_count()]
    assert [exchange(n, 2) for n in counts] == ["all_gather", "all_gather", "all_to_all"][: len(counts)]


def test_errors():
    mesh = mesh_of(expert=2)
    shape = jax.ShapeDtypeStruct
    experts, x, weights = shape((4, 2), jnp.int32), shape((4, 32), jnp.float32), shape((4, 2), jnp.float32)

    def run(function, *operands, specs=P("expert")):
        mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P("expert"))
        return jax.eval_shape(mapped, *operands)

    def planned(experts, num_experts=4, **options):
        return parallel.plan_dispatch(experts, num_experts, axis_name="expert", **options)

    def dispatched(x, weights, experts, **options):
        return parallel.dispatch(x, weights, planned(experts), **options)[0]

    for options, message in (
        ({"num_experts": 5}, "num_experts is 5; it must be a multiple of the 2 devices along 'expert'"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"align": 0}, "align is 0"),
        ({"capacity": 1.5}, "capacity is 1.5"),
        ({"buffer_factor": 0}, "buffer_factor is 0; it must be a positive number"),
        ({"exchange": "ring"}, "exchange is 'ring'"),
    ):
        with pytest.raises(ValueError, match=message):
            run(functools.partial(planned, **options), experts)
    with pytest.raises(ValueError, match=r"experts have shape .* they must be integers"):
        run(planned, weights)
    with pytest.raises(
        ValueError, match=r"experts is the same on all devices along .* pass each device its own tokens"
    ):
        run(planned, experts, specs=P())
    with pytest.raises(ValueError, match="no axis 'expert' is mapped here"):
        jax.eval_shape(planned, experts)
    with pytest.raises(ValueError, match="more than int32 can count; pass fewer tokens at once"):
        run(planned, jax.ShapeDtypeStruct((2**30, 2), jnp.int32))

    with pytest.raises(ValueError, match=r"x has shape \(3, 32\); the plan is one of tokens \(2,\)"):
        run(dispatched, shape((6, 32), jnp.float32), weights, experts)
    with pytest.raises(ValueError, match="x has dtype int32"):
        run(dispatched, experts, weights, experts)
    with pytest.raises(ValueError, match=r"weights have shape \(2, 32\)"):
        run(dispatched, x, x, experts)
    with pytest.raises(ValueError, match="quantization has scaling 'tensor'; rows travel alone"):
        run(
            functools.partial(dispatched, quantization=CurrentScaling().quantization("activation")), x, weights, experts
        )
    block = BlockScaling().quantization("activation")
    with pytest.raises(ValueError, match="x has dtype float16, whose range"):
        run(functools.partial(dispatched, quantization=block), shape((4, 32), jnp.float16), weights, experts)
    with pytest.raises(
        ValueError, match=r"plan is of type Permutation; it must come from te_jax\.parallel\.plan_dispatch"
    ):
        jax.eval_shape(lambda x, experts: parallel.combine(x, ops.group_by_expert(experts, 4)), x, experts)
    with pytest.raises(ValueError, match=r"y has shape \(2, 32\); the plan has 8 rows"):
        run(lambda experts, y: parallel.combine(y, planned(experts)), experts, x)

    def twice(x, *others):
        once = jax.grad(lambda x: jnp.sum(dispatched(x, *others, quantization=block) ** 2))
        return jax.grad(lambda x: jnp.sum(once(x)))(x)

    with pytest.raises(NotImplementedError, match="in FP8 is differentiated once"):
        run(twice, x, weights, experts)
    forward = jax.shard_map(
        lambda x, *others: jax.jvp(lambda x: dispatched(x, *others), (x,), (x,))[1],
        mesh=mesh, in_specs=P("expert"), out_specs=P("expert"),
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match="dispatch has derivatives in reverse mode"):
        jax.jit(forward).lower(x, weights, experts)
