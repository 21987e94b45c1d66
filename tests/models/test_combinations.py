"""Every pair of values that users combine in Python: gradients are traced, or one sentence says why there are none.

Models are the decoder, and its block in `apply_layers` and `scan_layers`, as a model of one's own calls it.
Meshes are real ones of simulated devices; XLA compiles a drawn part alone.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from parameters import covering_rows, drawn, parts
from test_decoder import random_params
from test_tensor_parallel import jit

from te_jax import checkpoint_policies, debug, models, native, ops, optim
from te_jax._core import observe
from te_jax.debug import comparison
from te_jax.debug._functions import traced_with
from te_jax.layers import Router, accumulate_gradients, apply_layers, dense_kernels, scan_layers
from te_jax.layers.attention import rotary_tables
from te_jax.models import DecoderConfig, Experts, Factors, Lora, TensorParallel, is_head, join_adapters, split_adapters
from te_jax.models.block import Block
from te_jax.offload import LAYER_INPUT, Offload
from te_jax.ops import Activation
from te_jax.parallel import FSDP, context_order, ring_attention, shard_specs
from te_jax.parallel.ring_attention import positions_here
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, RowwiseScaling, products

pytestmark = [
    pytest.mark.usefixtures("_eight_cpus"),
    pytest.mark.filterwarnings("ignore:te_jax runs no native kernel"),  # of scans, whose arrays may be split here
]

BATCH, TIME = 4, 512
# Kernels that FSDP gathers, in parts that are whole blocks.
CONFIG = DecoderConfig(
    vocab_size=256, num_layers=2, hidden_size=256, num_heads=2, num_kv_heads=2, head_dim=128, mlp_size=512
)
VARIANTS = {
    **{"window": 70, "qk_norm": True, "activation": Activation("silu", alpha=1.7, offset=1.0)},
    **{"attention_biases": ("query", "out"), "zero_centered_norms": True, "scaled_embedding": True, "tied_head": True},
    **{"rope_theta": (500.0, None), "norms": "both"},
    "factors": Factors(2.0, 0.5, 0.3, 3.0),
}
RECIPES = {
    "none": None,
    "current": CurrentScaling(),
    "block": BlockScaling(),
    "rowwise": RowwiseScaling(),
    "mxfp8": MXFP8Scaling(),
    "delayed": DelayedScaling(history_len=2),
    "products": products(forward=BlockScaling(), wgrad=RowwiseScaling()),
    "forward alone": products(forward=CurrentScaling()),
}
REMATS = {"none": False, "all": True, "attention": "attention", "policy": checkpoint_policies.save_fp8_operands}
OFFLOADS = {
    "none": None,
    "all": Offload(min_size=0),
    "input": Offload([LAYER_INPUT], min_size=0),
    "attention": Offload(["te_attention_output"], min_size=0),
    "quantized": Offload(min_size=0, quantize=True, implementation="xla"),
    "xla": Offload(min_size=0, implementation="xla", slots=2),
    "native": Offload(min_size=0, implementation="native"),
}
# Axes of the mesh, and how TensorParallel uses them.
SHARED = FSDP(2, reduce_dtype="float32")
MESHES = {
    "one": ({}, {}),
    "data": ({"data": 2}, {"batch_axes": ("data",)}),
    "context": ({"context": 2}, {"batch_axes": ("context",), "context_axis": "context"}),
    "fsdp": ({"fsdp": 2}, {"fsdp": SHARED}),
    "fsdp, all kept": ({"fsdp": 2}, {"fsdp": dataclasses.replace(SHARED, keep=9)}),
    "replicas of fsdp": ({"replica": 2, "fsdp": 2}, {"fsdp": dataclasses.replace(SHARED, replica_axis="replica")}),
    "context of fsdp": ({"fsdp": 2}, {"fsdp": SHARED, "context_axis": "fsdp"}),
    "tensor": ({"tensor": 2}, {}),
    "fsdp, tensor": ({"fsdp": 2, "tensor": 2}, {"fsdp": SHARED}),
    "context, tensor": ({"context": 2, "tensor": 2}, {"batch_axes": ("context",), "context_axis": "context"}),
}
LORA = Lora(8, names=("query", "out"))

OPTIONS = {
    "loop": ("decoder", "apply", "scan"),
    "mesh": tuple(MESHES),
    "axes": ("auto", "explicit"),
    "recipe": tuple(RECIPES),
    "head": tuple(name for name in RECIPES if name not in ("delayed", "products", "forward alone")),
    "logits": ("plain", "fp8"),
    "remat": tuple(REMATS),
    "offload": tuple(OFFLOADS),
    "microbatches": (1, 3),
    "kernels": ("plain", "quantized once"),
    "head gradient": ("apart", "in place"),
    "watch": ("nothing", "statistics", "comparison"),
    "lora": (None, LORA),
    "dtype": ("float32", "bfloat16"),
    "segments": ("none", "any", "at most 4"),
    "mlp": ("dense", "experts"),
    "variants": (False, True),
    "dropout": (False, True),
    "implementation": (None, "reference"),
}
_OWN = ("apply", "scan")
_TENSOR = tuple(name for name, (axes, _) in MESHES.items() if "tensor" in axes)
_FSDP = tuple(name for name, (_, options) in MESHES.items() if "fsdp" in options)
_DECODER = (*_TENSOR, "context of fsdp")  # meshes of the decoder alone

_IMPLIED = [
    {"loop": ("decoder",), "dropout": (True,)},
    *({"mesh": _DECODER, **values} for values in ({"loop": _OWN}, {"dropout": (True,)})),
    {"loop": ("scan",), "mesh": _FSDP},
    {"loop": ("scan",), "variants": (True,)},
    {"mesh": ("data", *_FSDP, *_TENSOR), "offload": ("native",)},
    {"variants": (True,), "offload": ("native",)},
    {"mesh": ("one",), "axes": ("explicit",)},
    {"head": ("none",), "logits": ("fp8",)},
]
"""Values that no arguments say together, or that follow from others that do not go together."""

REFUSED = [
    ({"recipe": ("none", "products", "forward alone"), "kernels": ("quantized once",)}, "config.recipe is .*only one "),
    ({"mlp": ("experts",), "recipe": ("delayed",)}, "recipe is DelayedScaling, and experts have no scaling state"),
    ({"mesh": _TENSOR, "lora": (LORA,)}, r"parallel.size is 2: adapters \(config.lora\) are not split"),
    ({"mesh": _TENSOR, "recipe": ("mxfp8",)}, "parallel.size is 2 and config.recipe is MXFP8Scaling"),
    ({"loop": ("decoder", "apply"), "offload": ("native",)}, "offload has implementation='native': apply_layers"),
    ({"loop": ("scan",), "offload": ("native",), "mesh": ("data",)}, "arrays may be split over devices here"),
    ({"remat": ("all", "policy"), "offload": ("attention",)},
     "offload has the names .*te_attention_output.*let remat keep"),
    ({"loop": _OWN, "mesh": ("data",), "axes": ("explicit",), "mlp": ("experts",)},
     r"experts are split over \['data'\], and the sort is over all tokens: call it inside shard_map"),
    ({"loop": ("apply",), "mesh": _FSDP[:3], "recipe": ("rowwise", "mxfp8"), "kernels": ("quantized once",)},
     r"params\[0\].* is quantized by .* devices that have parts cannot agree on them"),
    ({"loop": _OWN, "mesh": ("context",), "kernels": ("quantized once",), "lora": (None,)},
     r"wgrad_accumulator\[0\] is the same on all devices along \['context'\]"),
    ({"loop": _OWN, "mesh": ("context",), "head gradient": ("in place",), "lora": (None,), "microbatches": (3,)},
     r"wgrad_accumulator is the same on all devices along \['context'\]"),
]  # fmt: skip
"""Values that do not go together, and what the sentence says."""


@pytest.fixture
def _eight_cpus(require_devices):
    require_devices(8)
    if jax.default_backend() != "cpu":
        pytest.skip("what a GPU refuses depends on the GPU")


# --------------------------------------------------------------------------------------------------- a row's program


def config_of(row):
    changes = VARIANTS if row["variants"] else {}
    return dataclasses.replace(
        CONFIG,
        **changes,
        recipe=RECIPES[row["recipe"]],
        head_recipe=RECIPES[row["head"]],
        head_fp8_products=("forward", "dgrad", "wgrad") if row["logits"] == "fp8" else ("dgrad", "wgrad"),
        dtype=row["dtype"],
        remat=REMATS[row["remat"]],
        offload=OFFLOADS[row["offload"]],
        max_segments_per_seq=4 if row["segments"] == "at most 4" else None,
        lora=row["lora"],
        experts=Experts(4, Router(top_k=2)) if row["mlp"] == "experts" else None,
    )


def mesh_of(row):
    """The mesh, and how a decoder would lie on it; None for one device."""
    axes, options = MESHES[row["mesh"]]
    if not axes:
        return None, None
    if row["loop"] == "decoder":
        axes = {"tensor": 1} | axes
    kind = AxisType.Explicit if row["axes"] == "explicit" else AxisType.Auto
    devices = np.array(jax.devices()[: math.prod(axes.values())]).reshape(*axes.values())
    return Mesh(devices, tuple(axes), axis_types=(kind,) * len(axes)), TensorParallel(axes.get("tensor", 1), **options)


def loss_of(row, config, mesh, parallel):
    """(parameters, states, tokens, targets, segments) -> loss."""
    if row["loop"] != "decoder":
        return loss_of_layers(row, config, mesh, parallel)
    if mesh is not None:
        split = models.parallel_loss(mesh, config, parallel, implementation=row["implementation"])
        return lambda params, states, tokens, targets, segments: split(params, tokens, targets, states, segments)

    def loss(params, states, tokens, targets, segments):
        options = {"segment_ids": segments, "implementation": row["implementation"]}
        return models.loss(params, tokens, targets, config, states, **options)

    return loss


def loss_of_layers(row, config, mesh, parallel):
    """A model of one's own, out of the decoder's blocks."""
    options = {"remat": REMATS[row["remat"]], "offload": OFFLOADS[row["offload"]]}
    if row["mesh"] in _FSDP:
        how = None
        if row["kernels"] == "plain" and row["recipe"] in ("current", "block"):
            how = models.requantize(dataclasses.replace(config, lora=None))["layers"][0]
            how = how | dict.fromkeys(config.other_shapes), None, None
        options["fsdp"] = dataclasses.replace(parallel.fsdp, quantize=how)
    context = "context" if row["mesh"] == "context" else None

    def loss(params, states, tokens, targets, segments):
        time = tokens.shape[1]

        def tables():
            positions = jnp.arange(time) if context is None else positions_here(context, time)
            return rotary_tables(positions, config.head_dim, CONFIG.ropes[0].theta)

        closed_over = tables() if row["axes"] == "auto" else None

        def layer(x_and_segments, of_layer):
            (x, segments), (params, state, key) = x_and_segments, of_layer

            def attend(query, key, value, sinks):
                masks = {"causal": True, "segment_ids": segments}
                masks["max_segments_per_seq"] = None if segments is None else config.max_segments_per_seq
                if context is not None:
                    return ring_attention(query, key, value, axis_name=context, **masks)
                return ops.attention(query, key, value, **masks)

            block = Block(params, state, config, None, row["implementation"])
            x, _ = block(x, closed_over or tables(), attend)
            if key is not None:
                x = jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, jnp.zeros((), x.dtype))
            return x, segments

        # On Explicit meshes, the rows of a whole embedding lie as the tokens do.
        explicit = row["axes"] == "explicit" and context is None
        place = {"out_sharding": jax.typeof(tokens).sharding.spec} if explicit else {}
        x = params["embedding"].at[tokens].get(**place).astype(config.dtype)
        keys = jax.random.split(jax.random.key(0), config.num_layers) if row["dropout"] else None
        each = params["layers"], states, keys
        if row["loop"] == "scan":
            x, _ = scan_layers(layer, each, (x, segments), **options)
        else:
            each = zip(*([None] * config.num_layers if part is None else part for part in each), strict=True)
            x, _ = apply_layers(layer, list(each), (x, segments), **options)
        x = ops.rms_norm(x, params["final_norm"], implementation=row["implementation"])
        head = dense_kernels((params["embedding"].T if config.tied_head else params["head"],))
        (kernel,), (accumulator,) = head["kernel"], head["wgrad_accumulator"]
        of_head = {"recipe": config.head_recipe, "fp8_products": config.head_fp8_products}
        of_head |= {"wgrad_accumulator": accumulator, "accumulate": head["accumulate"]}
        return ops.linear_cross_entropy(x, kernel, targets, **of_head, implementation=row["implementation"])

    if context is None:
        return loss
    specs = P(), P(), *(P(None, context),) * 3
    local = lambda *operands: lax.pmean(loss(*operands), context)  # noqa: E731
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())


def program(row):
    """(parameters, states, microbatches) -> (loss, (gradients, next states)), as the row says, watched."""
    config = config_of(row)
    mesh, parallel = mesh_of(row)
    loss, requantize = loss_of(row, config, mesh, parallel), None
    if row["kernels"] == "quantized once":
        of_decoder = {"parallel": parallel} if row["loop"] == "decoder" else {}
        requantize = models.requantize(dataclasses.replace(config, lora=None), **of_decoder)
        if row["loop"] == "scan":
            stack = lambda how: how and dataclasses.replace(how, stacked_ndim=how.stacked_ndim + 1)  # noqa: E731
            requantize["layers"] = {name: stack(how) for name, how in requantize["layers"][0].items()}

    def quantized(params):
        if requantize is None:
            return params
        zeros = jax.tree.map(jnp.zeros_like, params)
        return optim.merge_kernels(params, optim.apply_updates(params, zeros, requantize=requantize)[1])

    def run(params, states, batches):
        if row["lora"]:
            trained, frozen = split(row, params)
            frozen = quantized(jax.tree.map(lambda leaf: leaf.astype(row["dtype"]), frozen))
            operands, whole = trained, lambda trained: join(row, trained, frozen)
        else:
            trained, operands, whole = params, quantized(params), lambda operands: operands

        def objective(operands_and_states, batch):
            operands, states = operands_and_states
            return loss(whole(operands), states, *batch)

        gradient = accumulate_gradients(objective, in_place=is_head if row["head gradient"] == "in place" else None)
        if row["microbatches"] == 1:
            return gradient((operands, states), None, jax.tree.map(lambda leaf: leaf[0], batches))
        zeros = jax.tree.map(jnp.zeros_like, (trained, states))
        sums, losses = lax.scan(lambda sums, batch: gradient((operands, states), sums, batch)[::-1], zeros, batches)
        return jnp.sum(losses), sums

    if row["watch"] == "statistics":
        run = debug.with_statistics(run)
    elif row["watch"] == "comparison":  # what debug.compare traces
        request = observe.Request(debug.statistics.ROLES, debug.statistics.PRODUCTS, results=True)
        run = traced_with(run, request, comparison._collected, "te_jax.debug.compare")
    return run


def split(row, params):
    if row["loop"] != "scan":
        return split_adapters(params)
    trained, frozen = split_adapters(params | {"layers": [params["layers"]]})
    return {"layers": trained["layers"][0]}, frozen | {"layers": frozen["layers"][0]}


def join(row, trained, frozen):
    if row["loop"] != "scan":
        return join_adapters(trained, frozen)
    return frozen | {"layers": frozen["layers"] | trained["layers"]}


def operands_of(row, draw):
    """Parameters, states and microbatches; draw(name, shapes) makes leaves, to be placed on the row's mesh."""
    config = config_of(row)
    mesh, parallel = mesh_of(row)
    params = dict(draw("params", jax.eval_shape(functools.partial(models.init, config), jax.random.key(0))))
    states = models.init_scaling_state(config)
    tokens = jax.ShapeDtypeStruct((row["microbatches"], BATCH, TIME), jnp.int32)
    segments = None if row["segments"] == "none" else tokens
    batches = draw("tokens", tokens), draw("targets", tokens), draw("segments", segments)
    specs = jax.tree.map(lambda _: P(), params)
    if mesh is not None and row["loop"] == "decoder":
        specs = models.param_specs(config, parallel)
    elif row["mesh"] in _FSDP:
        specs["layers"] = shard_specs(params["layers"], parallel.fsdp)
    if row["loop"] == "scan":
        stacked = lambda *leaves: (  # noqa: E731
            jnp.stack(leaves)
            if isinstance(leaves[0], jax.Array)
            else jax.ShapeDtypeStruct((len(leaves), *leaves[0].shape), leaves[0].dtype)
        )
        params["layers"] = jax.tree.map(stacked, *params["layers"])
        states = None if states is None else jax.tree.map(stacked, *states)
        specs["layers"] = specs["layers"][0]
    if mesh is None:
        return params, states, batches
    context = parallel.context_axis
    batch = tuple(axis for axis in parallel.batch_axes if axis != context)
    spec = P(None, batch or None, context)
    if context is not None and isinstance(batches[0], jax.Array):
        order = context_order(TIME, mesh.shape[context])
        batches = jax.tree.map(lambda leaf: leaf[..., order], batches)
    return (
        jax.tree.map(lambda leaf, spec: _placed(leaf, mesh, spec), params, specs),
        states,
        jax.tree.map(lambda leaf: _placed(leaf, mesh, spec), batches),
    )


def _placed(leaf, mesh, spec):
    sharding = NamedSharding(mesh, spec)
    if isinstance(leaf, jax.Array):
        return jax.device_put(leaf, sharding)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def on_mesh(row):
    """Attention in bfloat16 needs promotion."""
    stack = contextlib.ExitStack()
    stack.enter_context(jax.numpy_dtype_promotion("standard"))
    if (mesh := mesh_of(row)[0]) is not None:
        stack.enter_context(jax.set_mesh(mesh))
    return stack


def trace(row):
    with on_mesh(row):
        jax.eval_shape(program(row), *operands_of(row, lambda _, shapes: shapes))


# ------------------------------------------------------------------------------------------------------------- tests


@functools.cache
def rows():
    return covering_rows(OPTIONS, [*_IMPLIED, *(values for values, _ in REFUSED)])


_PARTS = 86  # of the rows, of which `make test` has the first
_WITH_MOST_PAIRS = 36
"""Parts with 92% of the pairs, which CI runs; later ones bring a pair or two each, and `pytest -m ""` runs them."""


def text_of(row):
    return ", ".join(f"{name}={value}" for name, value in row.items())


@pytest.mark.parametrize("part", parts(_PARTS, _WITH_MOST_PAIRS))
def test_gradients_of_each_pair_are_traced(part):
    faults = {}
    for row in rows()[part::_PARTS]:
        try:
            trace(row)
        except Exception as error:
            faults[text_of(row)] = f"{type(error).__name__}: {error}"
    assert not faults


FIRST = {name: values[0] for name, values in OPTIONS.items()} | {"watch": "nothing", "recipe": "current"}


@pytest.mark.parametrize(("values", "words"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_does_not_go_together_is_refused_by_a_sentence(values, words):
    for row in (FIRST | dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())):
        with pytest.raises((ValueError, native.NativeUnavailableError), match=re.compile(words, re.DOTALL)):
            trace(row)


EXACT = dict.fromkeys(("recipe", "head"), "none") | dict.fromkeys(("logits", "kernels"), "plain")
EXACT |= {"dtype": "float32", "watch": "nothing"}
"""Values with which gradients are those of one device up to the order of sums; and no residual is stored in FP8."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("place", range(4))
def test_gradients_of_some_of_them_are_those_of_one_device(place, rng):
    """A few of the rows, in float32."""
    row = drawn(rows(), place)
    check(row | EXACT | ({"offload": "all"} if row["offload"] == "quantized" else {}), rng)


def check(row, rng):
    """Against one device that calls the layers one after another, keeps all that they compute, and adds gradients of
    microbatches afterwards."""
    print(text_of(row))
    # Devices that share layers, or a sequence in shard_map, draw other masks than one device.
    row = row | {"dropout": row["dropout"] and row["mesh"] in ("one", "data")}
    alone = {"mesh": "one", "axes": "auto", "remat": "none", "offload": "none", "microbatches": 1}
    alone |= {"kernels": "plain", "head gradient": "apart", "watch": "nothing"}
    drawn = {}

    def draw(name, shapes):
        if shapes is None or name in drawn:
            return drawn.get(name)
        if name == "params":
            drawn[name] = random_params(config_of(row), rng)
        elif name == "segments":
            drawn[name] = jnp.asarray(np.sort(rng.integers(0, 4, shapes.shape), axis=-1), jnp.int32)
        else:
            drawn[name] = jnp.asarray(rng.integers(0, CONFIG.vocab_size, shapes.shape), jnp.int32)
        return drawn[name]

    with on_mesh(row):
        params, states, batches = operands_of(row, draw)
    with on_mesh(row | alone):
        expect = jit(program(row | alone))
        whole, _, all_batches = operands_of(row | {"mesh": "one"}, draw)
        each = [jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], all_batches) for i in range(row["microbatches"])]
        of_each = [expect(whole, states, batch) for batch in each]
        value, expected = jax.tree.map(lambda *leaves: sum(leaves), *((value, sums[0]) for value, sums in of_each))
    with on_mesh(row):
        result = jit(program(row))(params, states, batches)
    found, (gradients, _) = result
    np.testing.assert_allclose(found, value, rtol=1e-5)
    for (path, one), other in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(expected), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        error = np.linalg.norm(one - other) / np.linalg.norm(other)
        assert error <= 1e-5, (text_of(row), jax.tree_util.keystr(path), error)
