"""Trainings by `te-jax train`: one table of runs, and what has to hold for each of them.

A run learns, writes what its options promise, and its twin sees the same data. A copy of it that lacks the last
checkpoint goes on, and ends with the same bits.
"""

import contextlib
import dataclasses
import io
import math
import re
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from runs import losses, records, without_last_checkpoint

from te_jax import hlo, native
from te_jax.cli import _config, _plan, _statistics, _step
from te_jax.cli._options import Options
from te_jax.cli._run_folder import read_header
from te_jax.cli._text import Tokens
from te_jax.cli.main import main
from te_jax.layers import Router
from te_jax.models import PRESETS, Experts, decoder

pytestmark = pytest.mark.usefixtures("as_in_a_process_of_its_own", "programs_of_equal_runs", "_presets_and_text")

STEPS = 20
ARGV = ["train", "--preset", "nano", "--seq-len", "32", "--batch", "4", "--steps", str(STEPS), "--eval-every", "10"]
ARGV += ["--checkpoint-every", "10", "--seed", str(2**32 - 1)]
LAYERS = [f"layers/0/{name}" for name in ("query", "key", "value", "out", "gate", "up", "down")]
FLOAT32 = "--dtype float32"


@dataclasses.dataclass(frozen=True)
class Run:
    """A row of the table.

    Attributes:
      words: its options, beside those of all.
      like: the run whose losses it has, and how far from them it may be, as a part of them.
      twin: the field of its twin's losses.
      of_twin: the run that has the same losses as the twin, and how far from them it may be.
      shown: a pattern that is in what it prints.
      header: values in the header of its log, by path.
      devices: that it needs.
    """

    words: str = ""
    like: tuple[str, float] | None = ("plain", 2e-2)
    twin: str | None = None
    of_twin: tuple[str, float] | None = None
    shown: str = ""
    header: dict[str, Any] = dataclasses.field(default_factory=dict)
    devices: int = 1


RUNS = {
    "plain": Run(
        like=None,
        shown=r"tokens/s(.|\n)*MiB",
        header={"options.dtype": "bfloat16", "text.source": "pydoc_data.topics", "versions.jax": jax.__version__},
    ),
    "twin of optax": Run(
        f"{FLOAT32} --compare",
        twin="optax_loss",
        of_twin=("twin of optax", 1e-3),
        shown=r"te_jax .*\noptax twin .*\ndifference ",
        header={"options.dtype": "float32"},
    ),
    "block": Run(
        "--recipe block --microbatches 2",
        header={"options.recipe": "block", "model.recipe.forward_dtype": "float8_e4m3fn"},
    ),
    "current": Run(
        "--recipe current --compare",
        twin="bfloat16_loss",
        of_twin=("plain", 1e-4),
        shown=r"current scaling .*\nbfloat16 twin ",
    ),
    "delayed": Run("--recipe delayed", header={"model.recipe.name": "DelayedScaling"}),
    "head": Run(
        "--recipe rowwise --head-recipe block --fp8-logits",
        shown=r"rowwise scaling and block head with logits ",
        header={"model.head_recipe.name": "BlockScaling", "model.head_fp8_products.0": "forward"},
    ),
    "states in FP8": Run(
        "--optimizer-state fp8 --compare",
        twin="f32_states_loss",
        of_twin=("plain", 1e-6),
        shown=r"fp8 states .*\nf32 states twin ",
        header={"options.optimizer_state": "fp8"},
    ),
    "statistics": Run("--head-recipe block --statistics 4", shown=r"block head "),
    "offload": Run("--offload activations,optimizer", like=("plain", 1e-4)),
    "packed": Run(
        f"{FLOAT32} --text text --pack",
        like=None,
        shown="9 documents, packed\n",
        header={"text.documents": 9, "model.max_segments_per_seq": None},
    ),
    "experts": Run(
        "--preset moe --recipe block --microbatches 2",
        like=None,
        shown=r"experts +largest load in validation \d\.\d\d → \d\.\d\d times the mean",
        header={"model.experts.num_experts": 4},
    ),
    "tensor parallel": Run(
        f"{FLOAT32} --devices 2 --tp 2 --transport ring",
        like=("twin of optax", 1e-4),
        shown=rf"2 cpu devices: replicas 1, fsdp 1, tp 2, transport ring\n(.|\n)*{STEPS} steps with tp 2, transport r",
        header={"parallel": {"tp": 2, "fsdp": 1, "transport": "ring"}, "device.count": 2, "options.devices": 2},
        devices=2,
    ),
    "replicas": Run(
        f"{FLOAT32} --devices 4 --replicas 2 --optimizer-state bf16",
        like=("twin of optax", 5e-3),
        shown="4 cpu devices: replicas 2, fsdp 2, tp 1\n",
        header={"parallel.fsdp": 2},
        devices=4,
    ),
    "shared windows": Run(
        f"{FLOAT32} --text text --pack --devices 4 --cp 2",
        like=("packed", 1e-4),
        shown="4 cpu devices: replicas 2, fsdp 2, tp 1, each window by 2\n",
        header={"parallel.cp": 2},
        devices=4,
    ),
    "recipe on a mesh": Run(
        f"{FLOAT32} --devices 4 --tp 2 --recipe delayed --compare",
        like=("twin of optax", 5e-2),
        twin="float32_loss",
        of_twin=("twin of optax", 1e-4),
        shown="4 cpu devices: replicas 1, fsdp 2, tp 2, transport auto\n",
        devices=4,
    ),
}


@pytest.fixture(scope="module")
def _presets_and_text(tmp_path_factory):
    """Presets of one layer, nine documents in the working folder, and offload of small arrays, too."""
    root = tmp_path_factory.mktemp("trainings")
    (root / "text").mkdir()
    for number in range(9):
        (root / "text" / f"{number}.txt").write_text(f"Document {number} is a text of its own. " * 5)
    experts = Experts(num_experts=4, router=Router(top_k=2), balance_weight=0.25)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "small", PRESETS["nano"])  # of two layers
        patch.setitem(PRESETS, "nano", dataclasses.replace(PRESETS["nano"], num_layers=1))
        patch.setitem(PRESETS, "moe", dataclasses.replace(PRESETS["nano"], experts=experts))
        patch.setattr(_config, "OFFLOAD_MIN_SIZE", 1)
        patch.chdir(root)
        yield


def train(*argv):
    """What a run that succeeds prints."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert main([*argv]) == 0
    return shown.getvalue()


def resume(out, *options):
    return train("train", "--resume", *options, "--out", str(out))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, as_in_a_process_of_its_own, programs_of_equal_runs, _presets_and_text):
    """trained(name): the folder of a run of the table, which has ended, and what it printed."""
    ended = {}

    def trained(name):
        if jax.device_count() < RUNS[name].devices:
            pytest.skip(f"needs {RUNS[name].devices} devices")
        if name not in ended:
            out = tmp_path_factory.mktemp(name.replace(" ", "_")) / "run"
            words = RUNS[name].words.split()
            devices = [] if "--devices" in words else ["--devices", "1"]
            ended[name] = out, train(*ARGV, *words, *devices, "--out", str(out))
        return ended[name]

    return trained


def value_at(header, path):
    for key in path.split("."):
        header = header[int(key) if key.isdigit() else key]
    return header


@pytest.mark.parametrize("name", RUNS)
def test_a_run_learns_and_leaves_what_its_options_promise(name, trained):
    run, (out, shown) = RUNS[name], trained(name)
    training, validation = losses(out, "train"), losses(out, "validation")
    assert [record["step"] for record in records(out, "train")] == list(range(1, STEPS + 1))
    assert [record["step"] for record in records(out, "validation")] == [0, 10, STEPS]
    assert validation[-1] < validation[0] - 0.7
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["10", str(STEPS)]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert f"{validation[-1]:.6f} nats per byte" in shown
    assert re.search(run.shown, shown), shown
    header = read_header(out)
    assert {path: value_at(header, path) for path in run.header} == run.header
    if header["platform" if "platform" in header else "device"]["platform"] == "cpu":
        assert header["implementation"] == ("native" if native.available() else "reference")
    if run.like is not None:
        expected, bound = losses(trained(run.like[0])[0], "train"), run.like[1]
        np.testing.assert_allclose(training[-1], expected[-1], rtol=bound)
        np.testing.assert_allclose(np.mean(training), np.mean(expected), rtol=bound)
        if bound > 1e-3:  # it is another computation
            assert (training != expected)[1:].any()
    if run.twin is not None:
        twin, (name, bound) = losses(out, "train", name=run.twin), run.of_twin
        np.testing.assert_allclose(twin, losses(trained(name)[0], "train"), rtol=bound)
        assert (twin != training)[1:].any()
        label = run.twin.removesuffix("_loss").replace("_", " ")
        last = losses(out, "validation", name=run.twin)[-1]
        assert re.search(rf"^{label} twin .* → {last:.6f} nats per byte$", shown, re.MULTILINE)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_lost_its_last_checkpoint_ends_with_the_same_bits(name, trained, tmp_path):
    whole, _ = trained(name)
    out = without_last_checkpoint(whole, tmp_path / "run")
    resume(out)
    assert (out / "log.jsonl").read_bytes() == (whole / "log.jsonl").read_bytes()


def test_a_finished_run_can_be_resumed_and_stays_as_it_is(trained, tmp_path):
    whole, shown = trained("plain")
    out = shutil.copytree(whole, tmp_path / "run")
    summary = shown.replace(str(whole), str(out)).splitlines()[-2:]
    assert resume(out).splitlines() == summary
    for name in ("log.jsonl", "loss.png"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    (out / "loss.png").unlink()
    resume(out)
    assert (out / "loss.png").stat().st_size > 0


# ------------------------------------------------------------------------------------------------------- single rows


def test_checkpoints_hold_moments_in_few_bytes_and_the_state_of_scaling_but_no_quantized_kernels(trained):
    def saved(name):
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(trained(name)[0] / "checkpoints" / str(STEPS) / "default")["loss"]

    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(saved("states in FP8")["optimizer"])]
    moments = [leaf for leaf in leaves if leaf.dtype == jnp.float8_e4m3fn]
    assert len(moments) == len(jax.tree.leaves(saved("plain")["params"])) * 2
    assert all(leaf.astype(np.float32).any() for leaf in moments)
    histories = [np.asarray(leaf) for leaf in jax.tree.leaves(saved("delayed")["scaling"]) if np.ndim(leaf)]
    assert histories
    assert all(np.count_nonzero(history) == STEPS for history in histories)
    assert not jax.tree.leaves(saved("block")["kernels"])


def test_statistics_are_of_every_n_steps_and_end_where_a_resumed_run_has_none(trained, tmp_path, capsys):
    out, _ = trained("statistics")
    found = records(out, "statistics")
    assert [record["step"] for record in found] == list(range(4, STEPS + 1, 4))
    for record in found:
        assert list(record["layers"]) == ["head"]
        for tensor in _statistics.tensors_of(record):
            assert 0.001 < tensor.values["error"] < 0.04, tensor
            assert tensor.values["saturation"] == tensor.values["nonfinite"] == 0
    assert (out / "statistics.png").read_bytes().startswith(b"\x89PNG")
    assert not (trained("plain")[0] / "statistics.png").exists()
    again = without_last_checkpoint(out, tmp_path / "run")
    resume(again, "--statistics", "0")
    assert [record["step"] for record in records(again, "statistics")] == [4, 8]
    assert read_header(again)["options"]["statistics"] == 0
    np.testing.assert_allclose(losses(again, "validation"), losses(out, "validation"), rtol=1e-2)
    assert "note: at step" not in capsys.readouterr().err


def test_experts_have_a_load_and_their_balance_is_no_part_of_the_loss(trained):
    out, shown = trained("experts")
    for record in records(out, "validation"):
        # At step 0 logits of variance 1 add 0.5. The objective is above that by a quarter of the balance: 0.25 or more.
        assert math.log(256) - 1.5 < record["loss"] < math.log(256) + 0.5 + 0.2 or record["step"]
        assert 1 <= record["largest_load"] <= 2
        line = f"step {record['step']} · validation loss {record['loss']:.4f} · largest expert load "
        assert f"{line}{record['largest_load']:.2f}× · " in shown
    model = read_header(out)["model"]
    assert model["num_active_parameters"] == model["num_parameters"] - 2 * 3 * 32 * 96


def test_a_step_moves_no_parameters_between_devices(require_devices):
    require_devices(2)
    plan, _ = _plan.decide(
        Options.of({"preset": "nano", "devices": 2, "tp": 2, "seq_len": 32, "batch": 4, "dtype": "float32"})
    )
    learner = _step.build_learner(plan, *plan.models)
    windows = Tokens(jax.ShapeDtypeStruct((1, 4, 33), np.uint8, sharding=plan.placement.windows))
    hlo.assert_no_resharding(learner.step, learner.abstract_state(), windows, allowed=("all-reduce",))


# ------------------------------------------------------------------------------------------------ on another mesh


@pytest.mark.parametrize(
    ("name", "words", "noted"),
    [
        ("twin of optax", "--devices 2 --tp 2 --transport ring", r"'tp': 1, .* to {'tp': 2, 'fsdp': 1, .*'ring'}"),
        ("tensor parallel", "--tp 1", r"'tp': 2, .* to {'tp': 1, 'fsdp': 1, .*'auto'}"),
        ("replicas", "--devices 2", r"'count': 4} to .*'count': 2}"),
        ("shared windows", "--devices 1 --cp 1", r"'cp': 2} to {'tp': 1, 'fsdp': 1, .*}"),
    ],
)
def test_a_run_goes_on_with_more_devices_or_with_fewer(name, words, noted, trained, tmp_path, capsys):
    whole, _ = trained(name)
    out = without_last_checkpoint(whole, tmp_path / "run")
    resume(out, *words.split())
    np.testing.assert_allclose(losses(out), losses(whole), rtol=5e-3 if name == "replicas" else 1e-4)
    noted = rf"note: (parallel|device) changed from .*{noted}: losses may differ in their last bits"
    assert re.search(noted, capsys.readouterr().err)


# ------------------------------------------------------------------------------------------------------ what breaks


def test_a_kernel_with_an_outlier_is_named(tmp_path, capsys, monkeypatch):
    def init(config, key):
        params = decoder_init(config, key)
        kernel = params["layers"][0]["up"]
        params["layers"][0] = params["layers"][0] | {"up": kernel.at[0, 0].set(1e7)}
        return params

    decoder_init = decoder.init
    monkeypatch.setattr(decoder, "init", init)
    words = "--preset nano --seq-len 16 --batch 2 --devices 1 --recipe current --steps 1 --statistics 1"
    train("train", *words.split(), "--out", str(tmp_path / "run"))
    (note,) = [line for line in capsys.readouterr().err.splitlines() if "become zero" in line]
    assert "% of the kernel of layers/0/up (" in note
    assert note.startswith("te-jax: note: at step 1 9")
    (record,) = records(tmp_path / "run", "statistics")
    assert list(record["layers"]) == LAYERS


def test_a_gradient_that_is_not_finite_is_named_where_it_begins(tmp_path, capsys, monkeypatch):
    """Between the two blocks, so that the first has it in its last layer."""

    @jax.custom_vjp
    def broken(x):
        return x

    broken.defvjp(lambda x: (x, None), lambda _, dy: (dy * jnp.nan,))
    calls = []

    def run_block(self, x, *arguments):
        calls.append(None)
        return run(self, broken(x) if len(calls) % 2 == 0 else x, *arguments)

    run = decoder.Block.__call__
    monkeypatch.setattr(decoder.Block, "__call__", run_block)
    words = "--preset small --seq-len 16 --batch 3 --devices 1 --recipe block --steps 4 --statistics 1"
    assert main(["train", *words.split(), "--out", str(tmp_path / "run")]) == 2
    assert len(calls) % 2 == 0
    sentence = "at step 1 layers/0/down is the first layer of the backward pass whose gradient is not finite"
    note, error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("te-jax: ")]
    assert note == f"te-jax: note: {sentence}"
    assert error == f"te-jax: error: the train loss is nan at step 2: try a smaller --learning-rate ({sentence})"
