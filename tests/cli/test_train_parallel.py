"""`te-jax train` on several devices: they learn what one does, and runs go on with more of them or fewer."""

import argparse
import dataclasses
import json
import math
import re
from pathlib import Path

import jax
import numpy as np
import processes
import pytest
from runs import losses, plan_of, refused, without_last_checkpoint

from te_jax import hlo, native
from te_jax.cli import _options, _placement, _plan, _step
from te_jax.cli._options import Options
from te_jax.cli._run_folder import RunFolder, StoredRun, read_header
from te_jax.cli._text import Tokens
from te_jax.cli.main import main
from te_jax.models import PRESETS, init

pytestmark = pytest.mark.usefixtures("as_in_a_process_of_its_own", "figures_of_twins_alone", "programs_of_equal_runs")

build_learner = _step.build_learner
STEPS = 12
ARGV = [
    "train",
    "--preset",
    "nano",
    "--seq-len",
    "32",
    "--batch",
    "4",
    "--steps",
    str(STEPS),
    "--checkpoint-every",
    "8",
    "--dtype",
    "float32",
]


@pytest.fixture(autouse=True)
def _eight_devices(require_devices):
    require_devices(8)


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory, as_in_a_process_of_its_own):
    out = tmp_path_factory.mktemp("one") / "run"
    assert main([*ARGV, "--devices", "1", "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def on_two_devices(tmp_path_factory):
    """In a process of its own, which has to make the two devices."""
    out = tmp_path_factory.mktemp("two") / "run"
    argv = [*ARGV, "--tp", "2", "--transport", "ring", "--out", str(out)]
    shown = out.parent / "shown"
    processes.finish(processes.start(argv, shown), shown)
    return out


def test_two_devices_learn_what_one_does(on_one_device, on_two_devices):
    np.testing.assert_allclose(losses(on_two_devices), losses(on_one_device), rtol=1e-4)
    header = read_header(on_two_devices)
    assert header["parallel"] == {"tp": 2, "fsdp": 1, "transport": "ring"}
    assert header["device"]["count"] == header["options"]["devices"] == 2
    shown = (on_two_devices.parent / "shown").read_text()
    assert "2 cpu devices: replicas 1, fsdp 1, tp 2, transport ring\n" in shown
    assert re.search(rf"^{STEPS} steps with tp 2, transport ring, in ", shown, re.MULTILINE)


def test_devices_that_share_the_parameters_learn_what_one_does(on_one_device, tmp_path, capsys):
    """Two replicas of two devices, after that all four as one does by default, and after that two."""
    out = tmp_path / "run"
    assert main([*ARGV, "--devices", "4", "--replicas", "2", "--out", str(out)]) == 0
    np.testing.assert_allclose(losses(out), losses(on_one_device), rtol=1e-4)
    shown = capsys.readouterr().out
    for step, options in enumerate([["--replicas", "1"], ["--devices", "2"], []], start=STEPS + 1):
        assert main(["train", "--resume", *options, "--steps", str(step), "--out", str(out)]) == 0
        shown += capsys.readouterr().out
    assert re.findall("cpu devices: (.*)", shown) == [
        "replicas 2, fsdp 2, tp 1",
        "replicas 1, fsdp 4, tp 1",
        *["replicas 1, fsdp 2, tp 1"] * 2,
    ]
    assert read_header(out)["parallel"]["fsdp"] == 2


@pytest.mark.slow
def test_devices_that_share_windows_learn_what_one_does(on_one_device, tmp_path, capsys):
    """Two replicas of two devices, after that two devices, and after that one of which shares no window."""
    out = tmp_path / "run"
    assert main([*ARGV, "--devices", "4", "--cp", "2", "--out", str(out)]) == 0
    np.testing.assert_allclose(losses(out), losses(on_one_device), rtol=1e-4)
    assert read_header(out)["parallel"]["cp"] == 2
    for step, options in enumerate([["--devices", "2"], ["--devices", "1", "--cp", "1"]], start=STEPS + 1):
        assert main(["train", "--resume", *options, "--steps", str(step), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert re.findall("cpu devices: (.*)", shown) == [
        "replicas 2, fsdp 2, tp 1, each window by 2",
        "replicas 1, fsdp 2, tp 1, each window by 2",
    ]


@pytest.mark.parametrize("of_an_old_version", [["replicas"], ["replicas", "fsdp"]])
def test_a_run_of_a_version_without_replicas_goes_on_as_it_was(of_an_old_version, tmp_path, capsys):
    """Each device has all parameters, as without --fsdp at that time."""
    out = tmp_path / "run"
    assert main([*ARGV, "--devices", "4", "--fsdp", "1", "--steps", "2", "--out", str(out)]) == 0
    log = out / "log.jsonl"
    text = re.sub(r', "crc32": \d+', "", log.read_text())
    for name in of_an_old_version:
        text, count = re.subn(rf'"{name}": \d+, (?=.*"model": )', "", text)
        assert count == 1
    log.write_text(text)
    capsys.readouterr()
    assert main(["train", "--resume", "--steps", "3", "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert "4 cpu devices: replicas 4, fsdp 1, tp 1\n" in shown.out
    assert "parallel" not in shown.err


@pytest.mark.parametrize(
    ("begun", "options", "before", "after"),
    [
        ("on_one_device", ["--tp", "2", "--transport", "ring"], ("1", "auto"), ("2", "ring")),
        ("on_two_devices", ["--tp", "1"], ("2", "ring"), ("1", "auto")),
    ],
)
def test_a_run_goes_on_with_more_or_with_fewer(begun, options, before, after, request, tmp_path, capsys, on_one_device):
    out = without_last_checkpoint(request.getfixturevalue(begun), tmp_path / "run")
    assert main(["train", "--resume", *options, "--out", str(out)]) == 0
    np.testing.assert_allclose(losses(out), losses(on_one_device), rtol=1e-4)
    parallel = "{{'tp': {}, 'fsdp': 1, 'transport': '{}'}}"
    note = f"note: parallel changed from {parallel} to {parallel}"
    shown = capsys.readouterr()
    assert note.format(*before, *after) in shown.err
    assert f"'count': {after[0]}}}: losses may differ in their last bits" in shown.err


def test_a_run_goes_on_as_it_was(on_two_devices, tmp_path, capsys):
    out = without_last_checkpoint(on_two_devices, tmp_path / "run")
    assert main(["train", "--resume", "--out", str(out)]) == 0
    assert (out / "log.jsonl").read_bytes() == (on_two_devices / "log.jsonl").read_bytes()
    assert not capsys.readouterr().err


def kinds_of(state):
    """Structure, shapes and dtypes."""
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)


@pytest.mark.parametrize("optimizer_state", ["f32", "bf16", "fp8"])
@pytest.mark.parametrize("recipe", _options.RECIPES)
@pytest.mark.parametrize("preset", ["tiny", "moe"])
def test_a_checkpoint_fits_whatever_options_a_resumed_run_changes(preset, recipe, optimizer_state):
    if (preset, recipe) == ("moe", "delayed"):
        pytest.skip("is refused")

    def stored(**changes):
        given = {"preset": preset, "recipe": recipe, "optimizer_state": optimizer_state, "compare": recipe != "none"}
        devices = changes.get("tp", 1) * changes.get("fsdp", 1)
        plan = plan_of(devices=devices, seq_len=256, **given, **changes)
        smaller = [model._replace(config=dataclasses.replace(model.config, num_layers=1)) for model in plan.models]
        learners = {model.loss_name: build_learner(plan, model) for model in smaller}
        return {name: kinds_of(each.stored(each.abstract_state())) for name, each in learners.items()}

    expected = stored()
    for changes in (
        *([] if recipe == "mxfp8" else [{"tp": 2}, {"tp": 2, "fsdp": 2, "offload": "activations,optimizer"}]),
        {"fsdp": 2},
        {"remat": True, "offload": "optimizer"},
        {"microbatches": 2, "deterministic": True},
    ):
        assert stored(**changes) == expected


@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_a_run_with_quantized_kernels_goes_on_with_more_or_with_fewer(before, after, tmp_path):
    """Kernels that one device quantizes with its optimizer, and two in each microbatch, are in no checkpoint."""
    out = tmp_path / "run"
    argv = ["train", "--preset", "nano", "--seq-len", "256", "--batch", "2", "--recipe", "block"]
    assert main([*argv, "--tp", str(before), "--devices", str(before), "--steps", "2", "--out", str(out)]) == 0
    whole = json.loads((out / "log.jsonl").read_text().splitlines()[-1])["loss"]
    assert main(["train", "--resume", "--tp", str(after), "--steps", "3", "--out", str(out)]) == 0
    assert losses(out)[-1] < whole


@pytest.mark.parametrize("tp", [1, 2])
def test_a_checkpoint_that_holds_quantized_kernels_is_restored_without_them(tp, tmp_path):
    """As older versions wrote it."""
    learner, _ = learner_of(1, recipe="block")
    state = learner.init(jax.random.key(0))
    assert jax.tree.leaves(state.kernels)
    folder = RunFolder.create(tmp_path / "run", {"kind": "header", "options": {}})
    try:
        folder.save(1, {"loss": state})
        resumed, _ = learner_of(tp, recipe="block")
        stored = folder.restore({"loss": resumed.stored(resumed.abstract_state())})["loss"]
    finally:
        folder.close()
    assert stored.kernels is None
    found = resumed.resumed(stored, None)
    assert jax.tree.structure(found) == jax.tree.structure(resumed.abstract_state())
    expected = state if tp == 1 else state._replace(kernels=found.kernels)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)


def resolve(given, stored):
    arguments = {field.name: None for field in dataclasses.fields(_options.Options)}
    return _options.resolve(argparse.Namespace(**arguments | given), StoredRun(Path("run"), {"options": stored}))


@pytest.mark.parametrize(
    ("stored", "given", "expected"),
    [
        ({"devices": 8, "tp": 2, "transport": "ring"}, {}, (8, 2, "ring")),
        ({"devices": 8, "tp": 2, "transport": "ring"}, {"tp": 1}, (4, 1, "auto")),
        ({"devices": 8, "tp": 2, "transport": "ring"}, {"tp": 4, "devices": 16}, (16, 4, "ring")),
        ({"devices": 8, "tp": 2, "transport": "ring"}, {"transport": "auto"}, (8, 2, "auto")),
        ({"devices": 4, "tp": 1, "transport": "auto"}, {"tp": 2, "transport": "p2p"}, (8, 2, "p2p")),
        ({"devices": 4, "tp": 1, "transport": "auto"}, {"tp": 2, "devices": 4}, (4, 2, "auto")),
        ({"devices": 4, "tp": 2, "transport": "ring"}, {"devices": 2}, (2, 2, "ring")),
    ],
)
def test_parts_of_the_batch_stay_what_they_are(stored, given, expected):
    """And as many devices as are asked for share the model for each of them, unless a number of devices is given."""
    options = resolve(given, stored)
    assert (options.devices, options.tp, options.transport) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (2, 4)),
        ({"devices": 16, "steps": 300}, (2, 4)),
        ({"devices": 8}, (None, None)),
        ({"tp": 1}, (None, None)),
        ({"fsdp": 8}, (None, 8)),
        ({"replicas": 4}, (4, None)),
        ({"cp": 2}, (None, None)),
    ],
)
def test_a_run_that_goes_on_keeps_its_mesh_unless_a_part_of_it_changes(given, expected):
    options = resolve(given, {"devices": 16, "replicas": 2, "fsdp": 4, "tp": 2})
    assert (options.replicas, options.fsdp) == expected


def test_auto_leaves_a_run_what_it_has():
    stored = {"dtype": "bfloat16", "implementation": "reference"}
    options = resolve({"dtype": "auto", "implementation": "auto"}, stored)
    assert {name: getattr(options, name) for name in stored} == stored


@pytest.mark.slow
def test_recipe_and_twin_on_a_mesh_of_data_and_parts(on_one_device, tmp_path, capsys):
    """The twin has neither recipe nor its own devices, so with float32 moments it is the run on one device."""
    out = tmp_path / "run"
    options = ["--tp", "2", "--devices", "4", "--recipe", "current", "--compare"]
    assert main([*ARGV, *options, "--out", str(out)]) == 0
    np.testing.assert_allclose(losses(out, name="float32_loss"), losses(on_one_device), rtol=1e-4)
    np.testing.assert_allclose(losses(out), losses(on_one_device), rtol=5e-2)
    assert (losses(out) != losses(out, name="float32_loss")).all()
    assert "4 cpu devices: replicas 1, fsdp 2, tp 2, transport auto\n" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ the compiled parts


def learner_of(tp, **options):
    plan = plan_of(tp=tp, **{"devices": tp, "seq_len": 256, "batch": 4, "steps": STEPS, "dtype": "float32", **options})
    return build_learner(plan, *plan.models), plan.placement


def steps_of(learner, placement, batches):
    state, found = learner.init(jax.random.key(0)), []
    for batch in batches:
        state, losses = learner.step(state, jax.device_put(batch, placement.windows))
        found.append(float(losses.objective))
    return state, found


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 2},
        {"tp": 1, "devices": 2},
        {"tp": 1, "devices": 2, "fsdp": 1},
        {"tp": 1, "cp": 2, "devices": 2},
        pytest.param({"tp": 2, "cp": 2, "devices": 4}, marks=pytest.mark.slow),
    ],
)
def test_packed_documents_are_learned_as_by_one_device(sizes, rng):
    shape = 3, 1, 4, 33
    begins = np.arange(33) == rng.integers(1, 33, (*shape[:-1], 1))  # one in a window: more give NaN
    batches = [*map(Tokens, rng.integers(0, 256, shape).astype(np.uint8), begins)]
    (_, expected), (_, found) = (steps_of(*learner_of(**each, pack=True), batches) for each in ({"tp": 1}, sizes))
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.slow
def test_the_states_of_adam_and_of_delayed_scaling_are_those_of_one_device(rng):
    batches = [Tokens(ids) for ids in rng.integers(0, 256, (3, 1, 4, 33)).astype(np.uint8)]
    learners = (learner_of(tp, optimizer_state="fp8", recipe="delayed") for tp in (1, 2))
    (before, expected), (after, found) = (steps_of(*learner, batches) for learner in learners)
    np.testing.assert_allclose(found, expected, rtol=1e-2)
    for of_layer, wanted in zip(after.scaling, before.scaling, strict=True):
        for name, state in of_layer.items():
            assert all(history.sharding.is_fully_replicated for history in jax.tree.leaves(state))
            np.testing.assert_array_equal(state.kernel[2], wanted[name].kernel[2])  # of the first step
            np.testing.assert_allclose(state.activation[2], wanted[name].activation[2], rtol=0.1)
            assert (np.asarray(state.gradient[:3]) > 0).all()

    # Moments in few bytes are split as parameters are, and a block of 128 values is not cut in two.
    adam = next(part for part in jax.tree.leaves(after.optimizer, is_leaf=lambda part: hasattr(part, "mu_bounds")))
    for tree in (after.params, adam.mu, adam.nu):
        assert tree["layers"][0]["down"].addressable_shards[0].data.shape == (48, 32)
        assert tree["layers"][0]["key"].sharding.is_fully_replicated  # one key head, of which two devices use the same
    assert adam.mu_bounds["head"].shape == (32, 2)
    assert adam.mu_bounds["head"].addressable_shards[0].data.shape == (32, 1)
    assert adam.mu_bounds["layers"][0]["gate"].sharding.is_fully_replicated


def test_a_step_moves_no_parameters(rng):
    learner, placement = learner_of(2)
    windows = Tokens(jax.ShapeDtypeStruct((1, 4, 33), np.uint8, sharding=placement.windows))
    hlo.assert_no_resharding(learner.step, learner.abstract_state(), windows, allowed=("all-reduce",))


def test_devices_that_do_not_share_the_model_share_the_batch(require_devices):
    require_devices(4)
    for tp, windows in ((1, 2), (2, 4)):
        placement = _placement.build_placement(jax.devices()[:4], Options(tp=tp), PRESETS["tiny"])
        assert placement.windows.shard_shape((3, 8, 33)) == (3, windows, 33)


@pytest.mark.parametrize(
    ("options", "devices", "expected"),
    [
        ({}, 8, "replicas 1, fsdp 8, tp 1"),
        ({"tp": 2}, 8, "replicas 1, fsdp 4, tp 2, transport auto"),
        ({"replicas": 2}, 8, "replicas 2, fsdp 4, tp 1"),
        ({"fsdp": 2, "tp": 2}, 8, "replicas 2, fsdp 2, tp 2, transport auto"),
        ({}, 6, "replicas 3, fsdp 2, tp 1 (fsdp 6 does not fit: hidden_size is 128, which 1 · 6 does not divide)"),
        ({"preset": "small"}, 6, "replicas 1, fsdp 6, tp 1"),
        (
            {"preset": "small", "recipe": "block"},
            8,
            "replicas 4, fsdp 2, tp 1 "
            "(fsdp 8 does not fit: query has shape (768, 768), and no dimension has parts that "
            "are whole blocks of 128)",
        ),
    ],
)
def test_as_many_devices_as_fit_share_the_parameters(options, devices, expected):
    options = Options(**options)
    config = _plan.build_config(options)
    placement = _placement.build_placement(jax.devices()[:devices], options, config)
    assert _placement.describe(placement, options, config) == f"{devices} cpu devices: {expected}"


def test_by_default_a_device_has_a_part_of_the_state():
    plan = plan_of(preset="small", devices=8, batch=8)
    params = build_learner(plan, *plan.models).abstract_state().params
    sizes = [(math.prod(leaf.sharding.shard_shape(leaf.shape)), leaf.size) for leaf in jax.tree.leaves(params)]
    assert all(part == size // 8 for part, size in sizes if size > 768)


def test_the_twin_with_the_loss_of_optax(rng):
    config = PRESETS["nano"]
    params = jax.jit(init, static_argnums=0)(config, jax.random.key(0))
    tokens, targets = rng.integers(0, 256, (2, 4, 32), np.int32)
    segments = np.arange(32) // np.array([[32], [8], [5], [1]])

    def loss_of(**options):
        plan = plan_of(**{"compare": True, "dtype": "float32", **options})
        return _step.build_loss(plan, plan.models[1])

    for ids in (None, segments):
        arguments = params, None, tokens, targets, ids
        found, expected = (jax.jit(loss_of(tp=tp, devices=tp))(*arguments) for tp in (2, 1))
        assert float(found.objective) == pytest.approx(float(expected.objective), rel=1e-6)
    in_bfloat16 = loss_of(dtype="bfloat16")
    assert jax.eval_shape(in_bfloat16, params, None, tokens, targets, None).objective.dtype == "float32"


# ----------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--tp", "0"], "--tp is 0: it must be at least 1"),
        (["--transport", "ring"], "--transport ring is for devices that share a model: add --tp N"),
        (
            ["--preset", "nano", "--tp", "4"],
            "--tp 4 does not fit --preset nano: num_heads is 2, which 4 does not divide; sizes that fit this decoder: "
            "1, 2; presets that 4 fits: tiny, small, moe, moe-3b, 8b",
        ),
        (["--preset", "small", "--tp", "3"], "presets that 3 fits: none"),
        (["--tp", "2", "--seq-len", "33"], "--seq-len 33 does not divide over --tp 2: choose a multiple of 2"),
        (["--tp", "2", "--recipe", "block"], "does not divide over --tp 2 in blocks of 128: choose a multiple of 256"),
        (
            ["--tp", "2", "--devices", "3"],
            "--tp 2 does not divide 3 cpu devices: choose --tp from 1, 3, or a multiple of 2 for --devices",
        ),
        (
            ["--tp", "2", "--transport", "p2p", "--implementation", "reference"],
            "p2p is native, and --implementation is reference",
        ),
        (["--cp", "0"], "--cp is 0: it must be at least 1"),
        (["--cp", "2", "--fsdp", "4"], "--cp is 2 and --fsdp 4: devices that share windows share the parameters, too"),
        (["--cp", "2", "--seq-len", "34"], "--seq-len is 34: with --cp 2 --tp 1 it must be a multiple of 4"),
        (["--cp", "4", "--devices", "6"], "--cp 4 does not fit 6 cpu devices"),
        (["--fsdp", "0"], "--fsdp is 0: it must be at least 1"),
        (["--replicas", "0"], "--replicas is 0: it must be at least 1"),
        (
            ["--fsdp", "3", "--devices", "6", "--batch", "6"],
            "--fsdp 3 does not fit 6 cpu devices and --preset tiny: hidden_size is 128, which 1 · 3 does not divide; "
            "sizes that fit: --replicas 6 --fsdp 1; --replicas 3 --fsdp 2, or choose another --devices",
        ),
        (
            ["--replicas", "8", "--tp", "2", "--devices", "4"],
            "--replicas 8 · --tp 2 does not fit 4 cpu devices and --preset tiny: --replicas · --fsdp · --tp must be 4; "
            "sizes that fit: --replicas 2 --fsdp 1; --replicas 1 --fsdp 2, or choose",
        ),
        (["--tp", "2", "--devices", "6"], "--batch 16 does not divide over 3 groups of --tp 2: choose a multiple of 3"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_written(argv, words, tmp_path, capsys):
    assert words in refused([*argv, "--out", str(tmp_path / "run")], capsys)
    assert not (tmp_path / "run").exists()


def test_devices_are_all_that_there_are_unless_fewer_are_asked_for(require_devices):
    require_devices(2)
    devices = jax.devices()
    for options in ({}, {"devices": len(devices)}, {"tp": 2}, {"fsdp": 2}):
        assert _placement.take_devices(Options(**options)) == devices
    assert _placement.take_devices(Options(devices=2, tp=2)) == devices[:2]


def test_too_few_devices_are_refused_with_the_flag_that_makes_them(tmp_path, capsys):
    if jax.default_backend() != "cpu" or jax.device_count() >= 16:
        pytest.skip("for fewer than 16 CPU devices")
    error = refused(["--preset", "8b", "--tp", "16", "--out", str(tmp_path / "run")], capsys)
    assert (
        f"--tp 16 is more than the {jax.device_count()} cpu devices present: start it with XLA_FLAGS=--xla_force"
        in error
    )
    assert "_host_platform_device_count=16" in error


def test_copies_between_devices_without_their_extension_are_refused(tmp_path, capsys, monkeypatch):
    def use_native(implementation, **_):
        if implementation == "native":
            raise native.NativeUnavailableError("the extension is missing")
        return False

    monkeypatch.setattr(native, "use_native", use_native)
    argv = ["--preset", "nano", "--tp", "2", "--transport", "p2p", "--out", str(tmp_path / "run")]
    assert "--transport p2p cannot run here: the extension is missing" in refused(argv, capsys)
    assert not (tmp_path / "run").exists()
