"""`te-jax train --preset moe`, with a smaller preset of that name."""

import dataclasses
import math
import re

import jax
import pytest
from runs import plan_of, records

from te_jax.cli import _report, _step
from te_jax.cli._run_folder import read_header
from te_jax.cli.main import main
from te_jax.layers import Router
from te_jax.models import PRESETS, Experts

pytestmark = pytest.mark.usefixtures("as_in_a_process_of_its_own")

ARGUMENTS = ["train", "--preset", "moe", "--seq-len", "16", "--batch", "4", "--devices", "1"]
RUN = [*ARGUMENTS, "--recipe", "block", "--microbatches", "2", "--steps", "16", "--eval-every", "8"]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    experts = Experts(num_experts=4, router=Router(top_k=2), balance_weight=0.25)
    monkeypatch.setitem(PRESETS, "moe", dataclasses.replace(PRESETS["nano"], num_layers=1, experts=experts))
    monkeypatch.setattr(_report, "draw_losses", lambda path, title, *_: path.write_text(title))


def test_a_run_that_was_killed_ends_with_the_same_bits(tmp_path, capsys, monkeypatch):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main([*RUN, "--out", str(whole)]) == 0
    shown = capsys.readouterr().out
    validation = [record for record in records(whole) if record["kind"] == "validation"]
    # At step 0 logits of variance 1 add 0.5. The objective is above that by a quarter of the balance: 0.25 or more.
    for record in validation:
        assert math.log(256) - 1.5 < record["loss"] < math.log(256) + 0.5 + 0.2 or record["step"]
        assert 1 <= record["largest_load"] <= 2
        line = f"step {record['step']} · validation loss {record['loss']:.4f} · largest expert load "
        assert f"{line}{record['largest_load']:.2f}× · " in shown
    assert validation[-1]["loss"] < validation[0]["loss"] - 0.5
    assert re.search(r"^experts +largest load in validation \d\.\d\d → \d\.\d\d times the mean$", shown, re.MULTILINE)
    model = read_header(whole)["model"]
    assert model["experts"]["num_experts"] == 4
    assert model["num_active_parameters"] == model["num_parameters"] - 2 * 3 * 32 * 96
    assert f"{model['num_active_parameters']:,} active" in (whole / "loss.png").read_text()

    def step(self, step, losses):
        steps.append(losses)
        if len(steps) == 12:
            raise RuntimeError("killed")

    steps: list[object] = []
    with monkeypatch.context() as patch:
        patch.setattr(_report.Progress, "step", step)
        with pytest.raises(RuntimeError, match="killed"):
            main([*RUN, "--checkpoint-every", "8", "--out", str(killed)])
    assert main(["train", "--resume", "--out", str(killed)]) == 0
    assert records(killed) == records(whole)


@pytest.mark.parametrize(("devices", "tp", "parts"), [(1, 1, 1), (2, 1, 2), (4, 2, 4), (6, 2, 2), (3, 1, 1)])
def test_experts_are_divided_among_devices_where_their_number_allows_it(devices, tp, parts, require_devices):
    require_devices(devices)
    plan = plan_of(preset="moe", devices=devices, tp=tp, batch=devices)
    learner = _step.build_learner(plan, *plan.models)
    state = learner.abstract_state()
    for tree in (
        state.params,
        *(part.mu for part in jax.tree.leaves(state.optimizer, is_leaf=_has_mu) if _has_mu(part)),
    ):
        gate = tree["layers"][0]["gate"]
        assert gate.shape[0] == 4
        assert gate.sharding.shard_shape(gate.shape)[0] == 4 // parts


def _has_mu(part):
    return hasattr(part, "mu")
