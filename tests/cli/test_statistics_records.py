"""What `te-jax train --statistics` says about records of its log, without a run."""

import collections
import json
import math

import numpy as np
import pytest

from te_jax.cli import _statistics
from te_jax.cli._run_folder import RunFolder
from te_jax.cli._statistics import MAX_SATURATION, MAX_UNDERFLOW, Watch
from te_jax.debug import TensorStatistics

_GOOD = {"amax": 1.0, "smallest_scale": 2.0, "largest_scale": 4.0, "error": 0.026}
_GOOD |= {"underflow": 0.0, "saturation": 0.0, "nonfinite": 0.0}


def tensor(**values):
    fields = _GOOD | values
    return TensorStatistics(**{name: np.float32(value) for name, value in fields.items()})


def record(step, layers):
    """A record of {layer: {role: values that are not good}}."""
    found = collections.OrderedDict(
        (layer, {role: {"forward": tensor(), "wgrad": tensor(**values)} for role, values in roles.items()})
        for layer, roles in layers.items()
    )
    return json.loads(json.dumps(_statistics.record_of(step, found)))


def test_layers_stay_in_their_order_and_those_beside_adapters_have_their_names():
    found = record(1, {name: {"kernel": {}} for name in ("frozen/layers/0/up", "layers/0/down", "head")})
    assert list(found["layers"]) == ["layers/0/up", "layers/0/down", "head"]


def test_a_record_has_the_fields_by_name_and_null_for_what_json_lacks():
    found = record(3, {"head": {"gradient": {"amax": math.nan, "largest_scale": math.inf, "nonfinite": 0.123456}}})
    assert (found["kind"], found["step"]) == ("statistics", 3)
    (good, bad) = (dict(zip(found["fields"], v, strict=True)) for v in found["layers"]["head"]["gradient"].values())
    assert good == pytest.approx(_GOOD)
    assert bad == pytest.approx(good | {"amax": None, "largest_scale": None, "nonfinite": 0.1235})
    assert _statistics.is_record(found)
    for damage in (lambda r: r.pop("fields"), lambda r: r["layers"].update(head=[]), lambda r: r["fields"].append("x")):
        damaged = json.loads(json.dumps(found))
        damage(damaged)
        assert not _statistics.is_record(damaged)


def test_a_log_keeps_them_without_taking_them_for_steps(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {"kind": "header", "options": {}})
    try:
        wanted = record(1, {"head": {"gradient": {}}})
        folder.append(wanted)
        folder.append({"kind": "train", "step": 1, "loss": 1.0})
        assert folder.records("statistics") == [wanted]
        assert folder.records("train") == [{"kind": "train", "step": 1, "loss": 1.0}]
    finally:
        folder.close()


@pytest.mark.parametrize(
    ("field", "role", "limit", "words"),
    [
        ("saturation", "gradient", MAX_SATURATION, "exceed the largest FP8 value"),
        ("underflow", "activation", MAX_UNDERFLOW["activation"], "become zero in FP8"),
        ("underflow", "gradient", MAX_UNDERFLOW["gradient"], "become zero in FP8"),
    ],
)
def test_what_passes_a_limit_is_named_once(field, role, limit, words):
    watch = Watch()
    assert watch.look(record(1, {"layers/0/up": {role: {field: 0.9 * limit}}})) == []
    layers = {"layers/0/up": {role: {field: 1.05 * limit}}, "layers/1/up": {role: {field: 1.1 * limit}}}
    (sentence,) = watch.look(record(2, layers))
    share = f"{1.1 * limit:.2%}"
    assert sentence == f"at step 2 {share} of the {role} of layers/1/up (wgrad) {words} (too many in 2 tensors)"
    assert watch.look(record(3, layers)) == []
    (sentence,) = watch.look(record(4, layers | {"layers/0/up": {"kernel": {field: 0.5}}}))
    assert sentence == f"at step 4 50.00% of the kernel of layers/0/up (wgrad) {words}"


def test_delayed_scaling_begins_without_scales():
    begin, watch = {"layers/0/up": {"gradient": {"underflow": 1.0}}}, Watch(delayed=True)
    assert [len(watch.look(record(step, begin))) for step in range(1, 6)] == [0, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (["gradient"], "layers/1/up is the first layer of the backward pass whose gradient is not finite"),
        (["gradient", "activation"], "layers/0/up is the first layer of the forward pass whose input is not finite"),
        (["gradient", "activation", "kernel"], "layers/0/up has a kernel that is not finite, so that an earlier step"),
    ],
)
def test_values_that_are_not_finite_are_said_to_begin_where_they_are_computed_first(broken, sentence):
    watch = Watch()
    bad = {role: {"nonfinite": 0.5 if role in broken else 0.0} for role in ("activation", "kernel", "gradient")}
    good = {"activation": {}, "kernel": {}, "gradient": {}}
    layers = {"layers/0/up": bad, "layers/1/up": bad, "layers/2/up": good}
    (found,) = watch.look(record(7, layers))
    assert found.startswith(f"at step 7 {sentence}")
    watch.look(record(8, {"layers/0/up": bad | {"kernel": {"nonfinite": 1.0}}}))
    assert watch.nonfinite == found  # the first, which caused the others
    watch.look(record(9, {"layers/0/up": good}))
    assert watch.nonfinite is None
