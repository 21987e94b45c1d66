"""Every refused argument is named, with its value and the rule."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from te_jax import ops

LOGITS = jnp.zeros((4, 8), jnp.float32)
LABELS = jnp.zeros(4, jnp.int32)


@pytest.mark.parametrize(
    ("logits", "labels", "options", "message"),
    [
        (LOGITS.astype(jnp.int32), LABELS, {}, "logits have dtype int32; they must be float32, bfloat16 or float16"),
        (LOGITS.astype(jnp.float8_e4m3fn), LABELS, {}, "logits have dtype float8_e4m3fn"),
        (LOGITS.astype(jnp.complex64), LABELS, {}, "logits have dtype complex64"),
        (jnp.float32(1), jnp.int32(0), {}, "logits have shape (); they need a last dimension"),
        (jnp.zeros((4, 0)), LABELS, {}, "logits have shape (4, 0); they need a last dimension"),
        (LOGITS, LABELS.astype(jnp.float32), {}, "labels have dtype float32; they must be integers"),
        (LOGITS, LABELS.astype(bool), {}, "labels have dtype bool; they must be integers"),
        (LOGITS, jnp.zeros((4, 8)), {}, "labels have dtype float32; they must be integers"),
        (LOGITS, LABELS[:3], {}, "labels have shape (3,); for logits of shape (4, 8) they must have (4,)"),
        (LOGITS, LABELS[:, None], {}, "labels have shape (4, 1)"),
        (LOGITS, jnp.int32(0), {}, "labels have shape ()"),
        (None, LABELS, {}, "logits is None; it must be an array"),
        (LOGITS, "labels", {}, "labels is of type str; it must be an array"),
        (LOGITS, LABELS, {"reduction": "avg"}, "reduction is 'avg'; it must be 'mean', 'sum' or 'none'"),
        (LOGITS, LABELS, {"reduction": None}, "reduction is None"),
        (LOGITS, LABELS, {"implementation": "cuda"}, "implementation is 'cuda'; it must be None,"),
        (LOGITS, LABELS, {"vocab_axis": 3},
         "vocab_axis is 3; it must be the name of a mesh axis, or a tuple of several"),
        (LOGITS, LABELS, {"vocab_axis": "v"}, "vocab_axis is 'v', but no axis 'v' is mapped here; call it inside"),
        (LOGITS, LABELS, {"loss": 0.1}, "loss is 0.1; it must be a te_jax.ops.CrossEntropy, such as"),
    ],
)  # fmt: skip
def test_message_names_argument_value_and_rule(logits, labels, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ops.softmax_cross_entropy(logits, labels, **options)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"label_smoothing": -0.1}, "label_smoothing is -0.1; it must be"),
        ({"label_smoothing": 1.5}, "label_smoothing is 1.5"),
        ({"label_smoothing": float("nan")}, "label_smoothing is nan"),
        ({"label_smoothing": "a"}, "label_smoothing is 'a'; it must be a number in [0, 1], 0 for none"),
        ({"label_smoothing": True}, "label_smoothing is True"),
        ({"label_smoothing": None}, "label_smoothing is None"),
        ({"z_loss": "a"}, "z_loss is 'a'; it must be a finite number of at least 0 that float32 holds"),
        ({"z_loss": [1.0]}, "z_loss is [1.0]"),
        ({"z_loss": None}, "z_loss is None"),
        ({"z_loss": float("nan")}, "z_loss is nan"),
        ({"z_loss": -1e-4}, "z_loss is -0.0001; it must be"),
        ({"z_loss": float("inf")}, "z_loss is inf"),
        ({"z_loss": 1e39}, "z_loss is 1e+39"),
        ({"logit_softcap": 0.0}, "logit_softcap is 0.0; it must be"),
        ({"logit_softcap": "a"}, "logit_softcap is 'a'; it must be a number from 1e-30 to"),
        ({"logit_softcap": True}, "logit_softcap is True"),
        ({"logit_softcap": -3}, "logit_softcap is -3"),
        ({"logit_softcap": float("inf")}, "logit_softcap is inf"),
        ({"logit_softcap": 1e38}, "logit_softcap is 1e+38"),
        ({"logit_softcap": 1e39}, "logit_softcap is 1e+39"),
        ({"logit_softcap": 1e-40}, "logit_softcap is 1e-40"),
        ({"logit_softcap": 1e-50}, "logit_softcap is 1e-50"),
        ({"ignore_index": 1.5}, "ignore_index is 1.5; it must be an integer"),
        ({"ignore_index": True}, "ignore_index is True"),
        ({"ignore_index": "a"}, "ignore_index is 'a'"),
        ({"ignore_index": None}, "ignore_index is None"),
    ],
)
def test_numbers_of_a_loss(numbers, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ops.CrossEntropy(**numbers)


def test_float64_logits_are_refused():
    with jax.enable_x64(True), pytest.raises(ValueError, match="logits have dtype float64"):
        ops.softmax_cross_entropy(jnp.zeros((4, 8), jnp.float64), LABELS)


def test_axes_of_another_mesh(make_mesh):
    @jax.shard_map(mesh=make_mesh({"data": AxisType.Auto}), in_specs=P("data"), out_specs=P("data"))
    def loss(logits):
        return ops.softmax_cross_entropy(
            logits, jnp.zeros(len(logits), jnp.int32), reduction="none", vocab_axis=("data", "model")
        )

    with pytest.raises(ValueError, match="no axis 'model' is mapped here"):
        jax.eval_shape(loss, np.zeros((8, 8), np.float32))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.grad, jax.checkpoint], ids=["", "jit", "grad", "remat"])
def test_logits_that_are_the_same_on_all_devices(wrap, make_mesh, implementation):
    """Each device would take them for a shard, and the loss would be off by the logarithm of the number of devices."""
    mesh = make_mesh({"data": AxisType.Auto, "model": AxisType.Auto})

    def trace(spec, vocab_axis, check_vma=True):
        loss = functools.partial(ops.softmax_cross_entropy, vocab_axis=vocab_axis, implementation=implementation)
        out_spec = spec if wrap is jax.grad else P()
        mapped = jax.shard_map(
            wrap(lambda x: loss(x, LABELS)), mesh=mesh, in_specs=spec, out_specs=out_spec, check_vma=check_vma
        )
        jax.eval_shape(mapped, LOGITS)

    for spec, vocab_axis in ((P(), "model"), (P(None, "data"), ("data", "model"))):
        message = (
            "logits is the same on all devices along ['model'], and vocab_axis says that it is split: pass the "
            f"device's shard of the vocabulary, by in_specs such as P(None, {vocab_axis!r}), or vocab_axis=None"
        )
        with pytest.raises(ValueError, match=re.escape(message)):
            trace(spec, vocab_axis)
        trace(P(None, vocab_axis), vocab_axis)
    trace(P(), "model", check_vma=False)  # JAX does not know


@pytest.mark.parametrize("name", ["label_smoothing", "z_loss", "logit_softcap"])
def test_numbers_that_are_traced(name):
    with pytest.raises(ValueError, match=f"{name} is traced; it must be .*, known while tracing: make it a static"):
        jax.jit(lambda value: ops.softmax_cross_entropy(LOGITS, LABELS, ops.CrossEntropy(**{name: value})))(0.5)


def test_no_axes(implementation):
    loss = functools.partial(ops.softmax_cross_entropy, LOGITS, LABELS, implementation=implementation)
    assert loss(vocab_axis=()) == loss()


def test_numbers_of_other_types_are_taken(implementation):
    loss = functools.partial(ops.softmax_cross_entropy, implementation=implementation)
    plain = loss(LOGITS, LABELS, ops.CrossEntropy(label_smoothing=0.5, z_loss=1.0, logit_softcap=2.0))
    others = loss(
        np.zeros((4, 8), np.float32),
        np.zeros(4, np.int64).astype(np.int32),
        ops.CrossEntropy(np.float32(0.5), np.int32(-100), 1, np.int64(2)),
    )
    assert plain == others
