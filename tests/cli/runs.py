"""Runs of `te-jax train` in tests: their arguments, what they leave, and a toy that trains an array."""

import functools
import json
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np

from te_jax.cli import _placement, _plan, _step
from te_jax.cli._options import Options
from te_jax.cli.main import main
from te_jax.models import Losses

SMALL = ["--preset", "nano", "--seq-len", "16", "--batch", "4", "--devices", "1"]

defaults_of = _placement.defaults_of


def take_defaults_of_a_gpu():
    """Runs of this process have what a GPU takes where an option is left open: bfloat16 above all.

    Tests whose bounds need float32 ask for it.
    """
    _placement.defaults_of = lambda platform: defaults_of("gpu")


def plan_of(**options):
    """The plan of a run of a small model, on one device unless more are asked for."""
    plan, _ = _plan.decide(Options.of({"preset": "nano", "devices": 1, **options}))
    return plan


def refused(argv, capsys):
    """The sentence with which `te-jax train` refuses its arguments."""
    assert main(["train", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("te-jax: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def records(out, *kinds):
    """Those of the log of a run; without kinds, those of every step and validation."""
    lines = (out / "log.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] in (kinds or ("train", "validation"))]


def losses(out, *kinds, name="loss"):
    return np.array([record[name] for record in records(out, *kinds)])


def without_last_checkpoint(whole, out):
    """A copy of a run that has ended, as if it had been killed before it saved its last step."""
    shutil.copytree(whole, out)
    shutil.rmtree(max((out / "checkpoints").iterdir(), key=lambda step: int(step.name)))
    return out


class Toy:
    """What runs train: a step multiplies it by `factor`. `step` and `evaluate` are called before each of these."""

    def __init__(self, step=lambda: None):
        self.step = step
        self.evaluate = lambda: None
        self.factor = 0.9
        self.scale = 1.0  # of what it begins with

    def build_learner(self, plan, model):
        def called_after(name, function):
            return lambda *args: (getattr(self, name)(), function(*args))[1]

        init, step, evaluate = _toy_functions(plan.placement.state, self.factor, self.scale)
        step, evaluate = called_after("step", step), called_after("evaluate", evaluate)
        return _step.Learner(init, step, evaluate, lambda x: x, lambda x, _: x, lambda x: x, None)


@functools.cache
def _toy_functions(sharding, factor, scale):
    def losses(value):
        return Losses(value, value, None)

    functions = (
        lambda key: scale * jax.random.normal(key, (1000,)),
        lambda state, text: (state * factor + text.ids.mean() / 255, losses(jnp.abs(state).mean())),
        lambda state, text: losses(jnp.abs(state).mean() + text.ids.mean()),
    )
    return [jax.jit(function, out_shardings=sharding) for function in functions]


def train_slowly():
    """For a process that is to be killed at a step."""
    _step.build_learner = Toy(lambda: time.sleep(0.02)).build_learner
