"""What a run of `te-jax train` is, by its command line, its text and its devices, and what is refused.

Nothing here trains, and XLA compiles nothing.
"""

import argparse
import dataclasses
import json
import math
import re
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from parameters import in_turns
from runs import defaults_of, plan_of, refused

from te_jax.cli import _options, _placement, _plan, _processes, _report, _step
from te_jax.cli._config import config_of
from te_jax.cli._options import Options
from te_jax.cli._run_folder import StoredRun
from te_jax.cli.errors import UserError
from te_jax.cli.main import main
from te_jax.models import PRESETS, Factors, Lora, RopeScaling, Softcaps

pytestmark = pytest.mark.usefixtures("as_in_a_process_of_its_own")

RUN = Path("run")
UNDECIDED = {"tokenizer", "warmup_steps", "from_", "lora"}


@pytest.fixture(autouse=True)
def _eight_devices(require_devices):
    require_devices(8)


def options_of(words, stored=None):
    """Options of a command line, for a new run or for one that goes on from these."""
    parser = argparse.ArgumentParser()
    _options.add_arguments(parser)
    run = None if stored is None else StoredRun(RUN, {"options": stored})
    return _options.resolve(parser.parse_args(words.split()), run)


def planned(words):
    return _plan.decide(options_of(f"--preset nano --devices 1 {words}"))[0]


# ------------------------------------------------------------------------------------------------------ what is planned


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {"warmup_steps": 10, "learning_rate": 0.012, "checkpoint_every": 1000}),
        ("--steps 60", {"warmup_steps": 3}),
        ("--steps 60 --warmup-steps 0", {"warmup_steps": 0}),
        ("--steps 60 --warmup-steps 7 --learning-rate 0.5", {"warmup_steps": 7, "learning_rate": 0.5}),
        ("--preset small", {"learning_rate": 0.0005}),
        ("--checkpoint-every 7", {"checkpoint_every": 7}),
    ],
)
def test_what_is_left_open_is_decided(words, expected):
    plan = planned(words)
    assert {name: getattr(plan, name) for name in expected} == expected


@pytest.mark.parametrize(("platform", "dtype", "steps"), [("cpu", "float32", 100), ("gpu", "bfloat16", 1000)])
def test_the_platform_decides_what_is_left_open(platform, dtype, steps):
    assert defaults_of(platform) == (dtype, dtype, steps)
    assert planned("").config.dtype == "bfloat16"  # as runs of these tests have it
    assert planned("--dtype float32").config.dtype == "float32"
    assert [planned(words).models[0].parameters for words in ("", "--dtype float32")] == ["bfloat16", "float32"]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"tp": 2, "devices": 2, "transport": "ring", "optimizer_state": "bf16", "compare": True, "learning_rate": 0.5},
        {"preset": "moe", "recipe": "current", "offload": "activations,optimizer", "deterministic": True},
        {"pack": True, "seq_len": 4096},
    ],
)
def test_the_options_that_a_run_records_decide_the_same_plan(given):
    plan = plan_of(**given)
    recorded = json.loads(json.dumps(plan.recorded_options()))
    assert {name for name, value in recorded.items() if value is None} == UNDECIDED
    again = plan_of(**recorded)
    assert again.recorded_options() == recorded
    again = dataclasses.replace(again, options=plan.options)
    assert (again, hash(again)) == (plan, hash(plan))


@pytest.mark.parametrize(
    ("recipe", "state", "twin", "twin_state"),
    [
        ("none", "f32", "optax_loss", "f32"),
        ("none", "fp8", "f32_states_loss", "f32"),
        ("current", "f32", "bfloat16_loss", "f32"),
        ("current", "fp8", "bfloat16_loss", "fp8"),
    ],
)
def test_a_twin_differs_in_one_thing(recipe, state, twin, twin_state):
    """The recipe first, and then the moments. Beside both there is the loss."""
    run, other = plan_of(recipe=recipe, optimizer_state=state, compare=True).models
    assert (run.loss_name, other.loss_name) == ("loss", twin)
    dtypes = _options.STATE_DTYPES
    assert (run.state_dtype, other.state_dtype) == (dtypes[state], dtypes[twin_state])
    assert (run.config.recipe is None, other.config.recipe) == (recipe == "none", None)
    assert (run.by_optax, other.by_optax) == (False, twin == "optax_loss")


def test_the_bound_of_documents_holds_for_every_window_and_is_left_out_where_a_mask_is_needed(tmp_path):
    def bound(*lengths):
        for number, length in enumerate(lengths):
            (tmp_path / f"{number:02}").write_text("x" * (length - 2 * (number < len(lengths) - 1)))
        return planned(f"--text {tmp_path} --pack --seq-len 256").config.max_segments_per_seq

    assert bound(2000) == 1
    assert bound(700, 1300) == 2
    assert bound(700, 254, 1046) == 4  # three, of which one has a single token
    assert bound(700, 255, 1045) == 2
    assert bound(600, *[3] * 6, 1382) == 8
    assert bound(600, *[3] * 7, 1379) is None


# ---------------------------------------------------------------------------------------------------------- the devices


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--devices 8", "replicas 1, fsdp 8, tp 1"),
        ("--devices 8 --tp 2", "replicas 1, fsdp 4, tp 2, transport auto"),
        ("--devices 8 --replicas 2", "replicas 2, fsdp 4, tp 1"),
        ("--devices 8 --fsdp 2 --tp 2", "replicas 2, fsdp 2, tp 2, transport auto"),
        ("--devices 4 --cp 2", "replicas 2, fsdp 2, tp 1, each window by 2"),
        ("--devices 6 --batch 6",
         "replicas 3, fsdp 2, tp 1 (fsdp 6 does not fit: hidden_size is 128, which 1 · 6 does not divide)"),
        ("--devices 6 --batch 6 --preset small", "replicas 1, fsdp 6, tp 1"),
        ("--devices 8 --preset small --recipe block", "replicas 1, fsdp 8, tp 1"),
    ],
)  # fmt: skip
def test_as_many_devices_as_fit_share_the_parameters(words, expected):
    plan, _ = _plan.decide(options_of(words))
    described = _placement.describe(plan.placement, plan.options.mesh, plan.config)
    assert described == f"{words.split()[1]} cpu devices: {expected}"
    batch, parts = plan.options.data.batch, plan.placement.replicas * plan.placement.fsdp
    windows = batch // (plan.placement.replicas if plan.options.mesh.cp > 1 else parts)
    assert plan.placement.windows.shard_shape((3, batch, 33)) == (3, windows, 33)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", "replicas 4, fsdp 2, tp 1 (each host has all parameters: --fsdp 8 shares them between hosts)"),
        ("--tp 2", "replicas 4, fsdp 1, tp 2, transport auto (each host has all parameters: --fsdp 4 shares them "
         "between hosts)"),
        ("--tp 4", "replicas 1, fsdp 2, tp 4, transport auto"),
        ("--fsdp 8", "replicas 1, fsdp 8, tp 1"),
        ("--cp 2", "replicas 4, fsdp 2, tp 1, each window by 2"),
    ],
)  # fmt: skip
def test_the_devices_of_a_host_share_the_parameters(words, expected, monkeypatch):
    """Eight processes with a device each, two on every host."""
    monkeypatch.setattr(_processes, "hosts", lambda: [0, 0, 2, 2, 4, 4, 6, 6])
    devices = [types.SimpleNamespace(process_index=index, platform="gpu") for index in range(8)]
    asked, config = options_of(words).mesh, PRESETS["tiny"]
    fsdp = _placement._fsdp_size(devices, asked, config, "--preset tiny")
    placement = types.SimpleNamespace(devices=devices, replicas=8 // fsdp // asked.tp, fsdp=fsdp)
    assert _placement.describe(placement, asked, config) == f"8 gpu devices: {expected}"


def test_devices_are_all_that_there_are_unless_fewer_are_asked_for():
    devices = jax.devices()
    assert _placement.take_devices(options_of("--tp 2").mesh) == devices
    assert _placement.take_devices(options_of("--devices 2 --tp 2").mesh) == devices[:2]


@pytest.mark.parametrize(("devices", "tp", "parts"), [(1, 1, 1), (2, 1, 2), (4, 2, 4), (6, 2, 2), (3, 1, 1)])
def test_experts_are_divided_among_devices_where_their_number_allows_it(devices, tp, parts, monkeypatch):
    few = dataclasses.replace(PRESETS["moe"].experts, num_experts=4)
    monkeypatch.setitem(PRESETS, "moe", dataclasses.replace(PRESETS["nano"], num_layers=1, experts=few))
    plan = plan_of(preset="moe", devices=devices, tp=tp, batch=devices)
    state = _step.build_learner(plan, *plan.models).abstract_state()
    moments = [part.mu for part in jax.tree.leaves(state.optimizer, is_leaf=_has_mu) if _has_mu(part)]
    for tree in (state.params, *moments):
        gate = tree["layers"][0]["gate"]
        assert gate.shape[0] == 4
        assert gate.sharding.shard_shape(gate.shape)[0] == 4 // parts


def _has_mu(part):
    return hasattr(part, "mu")


def test_by_default_a_device_has_a_part_of_the_state():
    plan = plan_of(preset="small", devices=8, batch=8)
    params = _step.build_learner(plan, *plan.models).abstract_state().params
    sizes = [(math.prod(leaf.sharding.shard_shape(leaf.shape)), leaf.size) for leaf in jax.tree.leaves(params)]
    assert all(part == size // 8 for part, size in sizes if size > 768)


def test_what_is_offloaded_waits_in_host_memory():
    plan = plan_of(preset="tiny", offload="activations,optimizer")
    state = _step.build_learner(plan, *plan.models).abstract_state()
    large = [leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.optimizer) if leaf.size >= 2**15]
    assert set(large) == {"pinned_host"}
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.params)} == {"device"}
    assert plan.config.offload is not None
    assert plan_of(preset="tiny", offload="optimizer").config.offload is None


def stored_of(preset="tiny", recipe="none", state="f32", **changes):
    """What a run of one layer with these options has in its checkpoints: structure, shapes and dtypes."""
    devices = changes.get("tp", 1) * changes.get("fsdp", 1)
    given = {"preset": preset, "recipe": recipe, "optimizer_state": state, "compare": recipe != "none"}
    plan = plan_of(devices=devices, seq_len=256, **given, **changes)
    found = {}
    for model in plan.models:
        model = model._replace(config=dataclasses.replace(model.config, num_layers=1))
        learner = _step.build_learner(plan, model)
        kept = learner.stored(learner.abstract_state())
        found[model.loss_name] = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), kept)
    return found


@pytest.mark.parametrize(
    ("recipe", "state", "preset"), in_turns(list(_options.RECIPES), ["f32", "bf16", "fp8"], ["tiny", "moe"])
)
def test_a_checkpoint_fits_whatever_options_a_resumed_run_changes(preset, recipe, state):
    preset = "tiny" if recipe == "delayed" else preset
    expected = stored_of(preset, recipe, state)
    shared = {"fsdp": 2} if recipe == "mxfp8" else {"tp": 2, "fsdp": 2, "offload": "activations,optimizer"}
    for changes in (shared, {"remat": True, "microbatches": 2, "deterministic": True}):
        assert stored_of(preset, recipe, state, **changes) == expected


# -------------------------------------------------------------------------------------------------- a run that goes on

MESH = {"devices": 16, "replicas": 2, "fsdp": 4, "tp": 2}


@pytest.mark.parametrize(
    ("stored", "words", "expected"),
    [
        ({"devices": 8, "tp": 2, "transport": "ring"}, "", {"devices": 8, "tp": 2, "transport": "ring"}),
        ({"devices": 8, "tp": 2, "transport": "ring"}, "--tp 1", {"devices": 4, "tp": 1, "transport": "auto"}),
        ({"devices": 8, "tp": 2, "transport": "ring"}, "--tp 4 --devices 16", {"tp": 4, "transport": "ring"}),
        ({"devices": 8, "tp": 2, "transport": "ring"}, "--transport auto", {"tp": 2, "transport": "auto"}),
        ({"devices": 4}, "--tp 2 --transport p2p", {"devices": 8, "tp": 2, "transport": "p2p"}),
        ({"devices": 4}, "--tp 2 --devices 4", {"devices": 4, "tp": 2, "transport": "auto"}),
        (MESH, "", {"replicas": 2, "fsdp": 4}),
        (MESH, "--devices 16 --steps 300", {"replicas": 2, "fsdp": 4, "steps": 300}),
        (MESH, "--devices 8", {"replicas": None, "fsdp": None}),
        (MESH, "--tp 1", {"devices": 8, "replicas": None, "fsdp": None}),
        (MESH, "--fsdp 8", {"replicas": None, "fsdp": 8}),
        (MESH, "--replicas 4", {"replicas": 4, "fsdp": None}),
        (MESH, "--cp 2", {"replicas": None, "fsdp": None, "cp": 2}),
        ({}, "", {"fsdp": 1}),  # of a version that was without it: each device had all parameters
        (
            {"dtype": "bfloat16", "implementation": "reference"},
            "--dtype auto --implementation auto",
            {"dtype": "bfloat16", "implementation": "reference"},
        ),
    ],
)
def test_a_run_that_goes_on_keeps_what_is_not_given(stored, words, expected):
    """Parts of the batch stay what they are, and as many devices as are asked for share the model for each of them."""
    values = options_of(words, stored).values()
    assert {name: values[name] for name in expected} == expected


CHANGED = {
    **{"preset": "small", "steps": "150", "batch": "32", "seq_len": "8", "seed": "1", "learning_rate": "0.1"},
    **{"eval_every": "7", "recipe": "block", "head_recipe": "block", "implementation": "reference", "lora": "4"},
    **{"dtype": "float32", "warmup_steps": "3", "clip_norm": "0.5", "optimizer_state": "fp8", "parameters": "float32"},
    **{"optimizer": "muon"},
    **dict.fromkeys(("compare", "pack", "fp8_logits"), ""),
}
FREE = {
    **{"text": "x", "tokenizer": "x", "from_": "x", "checkpoint_every": "3", "remat": "", "offload": "optimizer"},
    **{"microbatches": "2", "deterministic": "", "tensorboard": "", "statistics": "5", "steps": "300"},
    **{"hang_timeout": "60"},
}


def test_every_option_of_a_resumed_run_is_kept_free_or_of_the_mesh():
    mesh = {"devices", "replicas", "fsdp", "tp", "cp", "transport"}
    assert {*CHANGED, *FREE, *mesh} == Options().values().keys()


@pytest.mark.parametrize("name", CHANGED)
def test_what_changes_the_numbers_of_a_run_cannot_change(name):
    stored = plan_of(preset="tiny").recorded_options()
    flag = _options.flag(name)
    with pytest.raises(UserError, match=rf"^{flag} is .*, but the run in run was started with .*: leave {flag} out to"):
        options_of(f"{flag} {CHANGED[name]}", stored)


@pytest.mark.parametrize("name", FREE)
def test_what_changes_no_more_than_rounding_may_change(name):
    value = options_of(f"{_options.flag(name)} {FREE[name]}", plan_of(preset="tiny").recorded_options()).values()[name]
    assert value == type(value)(FREE[name] or True)


def test_the_model_of_a_header_is_read_as_it_was_written():
    changes = {"factors": Factors(2.0, 0.5, None, 3.0), "lora": Lora(2), "rope_theta": (1e4, None, 1e6, 1e6)}
    changes |= {
        "softcaps": Softcaps(50.0, 30.0),
        "window": (None, 3, 4, None),
        "rope_scaling": (None, None, RopeScaling("linear", 8.0), None),
    }
    config = dataclasses.replace(PRESETS["tiny"], **changes)
    header = json.loads(json.dumps({"model": dataclasses.asdict(config)}))
    assert config_of(RUN, header) == config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stfps": 40}, r"has options that te_jax \S+ does not know \(stfps\): go on with the version"),
        ({"dtype": "bfloat17"}, "is damaged, dtype is 'bfloat17': start another run"),
        ({"steps": "40"}, "is damaged, steps is '40': start another run"),
        ({"tp": 0}, "--tp is 0"),
    ],
)
def test_a_header_of_another_version_or_with_damage_is_one_sentence(changes, words):
    with pytest.raises(UserError, match=words):
        options_of("", changes)


@pytest.mark.parametrize(
    ("options", "header", "words"),
    [
        ({}, {"texu": {}}, "is not, or no longer, what the run in run was trained on"),
        ({}, {"text": {"sha256": "ab"}}, "is not, or no longer, what the run in run was trained on"),
        ({"pack": True}, None, "is not, or no longer, what the run in run was trained on"),
    ],
)
def test_another_text_does_not_go_on(options, header, words):
    header = {"text": {"sha256": plan_of().sha256}} if header is None else header
    with pytest.raises(UserError, match=words):
        _plan.decide(Options.of({"preset": "nano", "devices": 1, **options}), StoredRun(RUN, header))


# ------------------------------------------------------------------------------------------------------ what is refused

REFUSED = {
    "--steps 0": "--steps is 0",
    "--parameters bfloat16 --dtype float32": "does not go with activations in float32: add --dtype bfloat16",
    "--batch -4": "--batch is -4",
    "--seq-len 0": "--seq-len is 0",
    "--seq-len 1000000000": "--seq-len 1000000000 needs at least",
    "--devices 0": "--devices is 0",
    "--devices 1000 --batch 1000": "--devices 1000 is more than",
    "--devices 3 --batch 4": "--batch 4 does not divide over 3 devices: choose a multiple of 3",
    "--microbatches 0": "--microbatches is 0",
    "--devices 2 --batch 6 --microbatches 2": (
        "--batch 6 does not divide over --microbatches 2 on 2 devices: choose a multiple of 4"
    ),
    "--warmup-steps -1": "--warmup-steps is -1: it must be at least 0 and below --steps, 200",
    "--clip-norm -1": "--clip-norm is -1.0: it must be a finite number of at least 0",
    "--checkpoint-every 0": "--checkpoint-every is 0",
    "--seed 4294967296": "--seed is 4294967296: it must lie between 0 and 4294967295",
    "--learning-rate nan": "--learning-rate is nan",
    "--statistics -1": "--statistics is -1: it must be at least 1, or 0 for none",
    "--statistics 3": "--statistics 3 has nothing to show, since no layer is in FP8: add --recipe, such as block",
    "--preset giant": "--preset giant is unknown: choose one of nano, tiny, small, moe, moe-3b, 8b",
    "--recipe fp8": "--recipe fp8 is unknown (did you mean mxfp8?): choose one of block, current, rowwise, ",
    "--remat attentions": "--remat is attentions: write --remat alone, or --remat attention",
    "--offload moments": "--offload is moments: choose activations, optimizer, activations,optimizer or none",
    "--head-recipe delayed": "--head-recipe delayed is unknown: choose one of block, current, rowwise, mxfp8, none",
    "--fp8-logits": "--fp8-logits needs a recipe of the output head: add --head-recipe",
    "--optimizer-state float32": "--optimizer-state float32 is unknown (did you mean f32?): choose one of f32, ",
    "--text nowhere.txt": "--text nowhere.txt does not exist",
    "--text=": "--text: is empty",
    "--resume": "holds no run: leave --resume out",
    "--tp 0": "--tp is 0: it must be at least 1",
    "--transport ring": "--transport ring is for devices that share a model: add --tp N",
    "--preset nano --tp 4": (
        "--tp 4 does not fit --preset nano: num_heads is 2, which 4 does not divide; sizes that fit this decoder: "
        "1, 2; presets that 4 fits: tiny, small, moe, moe-3b, 8b"
    ),
    "--tp 2 --seq-len 33": "--seq-len 33 does not divide over --tp 2: choose a multiple of 2",
    "--tp 2 --recipe block": "does not divide over --tp 2 in blocks of 128: choose a multiple of 256",
    "--tp 2 --devices 3": (
        "--tp 2 does not divide 3 cpu devices: choose --tp from 1, 3, or a multiple of 2 for --devices"
    ),
    "--tp 2 --transport p2p --implementation reference": "p2p is native, and --implementation is reference",
    "--cp 0": "--cp is 0: it must be at least 1",
    "--cp 2 --fsdp 4": "--cp is 2 and --fsdp 4: devices that share windows share the parameters, too",
    "--cp 2 --seq-len 34": "--seq-len is 34: with --cp 2 --tp 1 it must be a multiple of 4",
    "--cp 4 --devices 6": "--cp 4 does not fit 6 cpu devices",
    "--fsdp 3 --devices 6 --batch 6": (
        "--fsdp 3 does not fit 6 cpu devices and --preset tiny: hidden_size is 128, which 1 · 3 does not divide; "
        "sizes that fit: --replicas 6 --fsdp 1; --replicas 3 --fsdp 2, or choose another --devices"
    ),
    "--replicas 8 --tp 2 --devices 4": (
        "--replicas 8 · --tp 2 does not fit 4 cpu devices and --preset tiny: --replicas · --fsdp · --tp must be 4; "
        "sizes that fit: --replicas 2 --fsdp 1; --replicas 1 --fsdp 2, or choose"
    ),
    "--tp 2 --devices 6": "--batch 16 does not divide over 3 groups of --tp 2: choose a multiple of 3",
    "--preset 8b --tp 16": "_host_platform_device_count=16",
}
"""Command lines, and words of the sentence that refuses them."""


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_run_is_refused_before_anything_is_written(words, tmp_path, capsys):
    out = tmp_path / "run"
    assert REFUSED[words] in refused([*words.split(), "--out", str(out)], capsys)
    assert not out.exists()


def test_an_output_folder_that_cannot_be_written_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for out in ("file/run", "file"):
        argv = ["--preset", "nano", "--devices", "1", "--out", str(tmp_path / out)]
        assert "cannot be written" in refused(argv, capsys)


def test_a_model_that_no_device_holds_is_refused_before_anything_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(_placement, "memory_of", lambda devices: 2**30)
    out = ["--preset", "8b", "--out", str(tmp_path / "run")]
    error = refused(["--devices", "1", *out], capsys)
    assert "--preset 8b needs 89.75 GiB on each device for parameters and Adam's moments" in error
    ways_out = "a smaller --preset, --optimizer-state fp8, --offload optimizer, or more devices, which share them"
    assert f"has 1.00 GiB: choose {ways_out}" in error
    shared = ["--tp", "2", "--devices", "2", "--optimizer-state", "fp8"]
    assert "--preset 8b needs 22.67 GiB on each device" in refused([*shared, *out], capsys)
    assert not (tmp_path / "run").exists()


def test_the_memory_of_a_step_is_told_and_nothing_is_written(tmp_path, capsys, monkeypatch):
    argv = ["--preset", "nano", "--devices", "1", "--seq-len", "16", "--recipe", "block", "--memory"]
    argv += ["--out", str(tmp_path / "run")]
    assert main(["train", *argv]) == 0
    parts = r"parameters \d+, optimizer \d+, kernels in FP8 \d+, gradients, activations and temporaries \d+"
    told = capsys.readouterr().out
    assert re.fullmatch(rf"loss: a step needs \d+ MiB of each device: {parts}\na device has [\d,]+ MiB\n", told)
    monkeypatch.setattr(_placement, "memory_of", lambda devices: 2**20)
    assert "is out of memory (a device has 1 MiB): choose a smaller --preset" in refused(argv, capsys)
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------------------- other machines


@pytest.mark.parametrize(
    ("capability", "words", "expected"),
    [
        ("8.0", "", None),
        ("8.9", "--recipe current", None),
        ("12.0", "--recipe delayed --head-recipe current", None),
        ("9.0", "--recipe block", "native"),
        ("8.9", "--recipe current --implementation reference", "reference"),
    ],
)
def test_gpus_without_kernels_train_by_xla(capability, words, expected, report_gpus):
    report_gpus(capability)
    assert planned(words).implementation == expected


@pytest.mark.parametrize(
    ("capability", "words", "sentence"),
    [
        ("8.0", "--recipe current", r"--recipe current cannot run here: .*no FP8 product for it runs on GPU 8.0"),
        ("8.9", "--recipe block", r"--recipe block cannot run here"),
        ("8.9", "--preset moe --recipe current", r"current cannot run here: .* XLA has no FP8 product of groups"),
        ("8.9", "--tp 2 --devices 2 --transport p2p", r"--transport p2p cannot run here"),
        ("8.9", "--implementation native", r"--implementation native cannot run here"),
    ],
)
def test_what_a_gpu_has_no_kernels_for_is_refused(capability, words, sentence, report_gpus):
    report_gpus(capability)
    with pytest.raises(UserError, match=sentence):
        planned(words)


# -------------------------------------------------------------------------------------------------------- what is shown


def test_the_difference_is_a_part_of_the_twins_loss():
    training, validation = [{"loss": 3.0, "optax_loss": 2.0}], [{"loss": 1.0, "optax_loss": 4.0}]
    *_, difference = _report.summary("te_jax", training, validation).splitlines()
    assert re.findall(r"[+-][\d.]+%", difference) == ["+50.000%", "-75.000%"]
    assert "+nan%" in _report.summary("te_jax", training, [{"loss": 1.0, "optax_loss": 0.0}])


def test_the_speed_is_shown_as_part_of_the_peak_of_the_devices(capsys, monkeypatch):
    class Gpu:
        device_kind, process_index = "NVIDIA H100 80GB HBM3", 0

        def memory_stats(self):
            return {"peak_bytes_in_use": 2**30}

    clock = iter(range(100))
    monkeypatch.setattr(_report.time, "perf_counter", lambda: float(next(clock)))
    progress = _report.Progress(2, 0, 1000, 989_000_000, [Gpu()] * 2)
    progress.time_steps()
    progress.step(1, {"loss": 1.0})
    capsys.readouterr()
    progress.close()
    assert capsys.readouterr().out == "1,000 tokens/s · MFU 0.1% of bfloat16 · 1,024 MiB\n"


def test_the_figure_shows_means_in_the_middle_of_their_steps_and_how_far_above_the_twin(tmp_path, monkeypatch):
    """The mean around any step of a straight line lies on the line."""
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path: figures.append(figure))
    training = [{"step": step, "loss": 3.0 * step, "optax_loss": 2.0 * step} for step in range(1, 91)]
    ends = [{**training[0], "step": 0}, training[0], training[-1]]
    _report.draw_losses(tmp_path / "loss.png", "title", "te_jax", training, ends, "byte", "5 tokens/s")
    top, bottom = figures[0].axes
    assert top.get_title(loc="left") == "5 tokens/s"
    steps, means = top.lines[1].get_data()
    assert (steps[0], steps[-1]) == (2, 89)
    np.testing.assert_allclose(means, 3.0 * np.asarray(steps))
    assert [list(line.get_xdata()) for line in top.lines[2:]] == [[0], [1, 90], [1, 90]]  # no line from the beginning
    np.testing.assert_allclose(bottom.lines[1].get_ydata(), range(1, 91))
