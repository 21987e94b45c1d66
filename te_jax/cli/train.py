"""Trains a small language model on text, on whatever devices JAX finds, and writes a log, checkpoints and the loss
curves to a folder. Ctrl-C and SIGTERM save a checkpoint first. A run that was stopped or killed goes on with --resume,
and ends with the same bits on CPUs and, with --deterministic, on GPUs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
import platform
import shlex
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import jaxlib.version

import te_jax
from te_jax import native, ops
from te_jax._core.terminal import reason_of
from te_jax.cli import _interruption, _options, _report, _run_folder, _text
from te_jax.cli._options import Options, add_arguments
from te_jax.cli._run_folder import RunFolder
from te_jax.cli.errors import UserError, is_out_of_memory, note
from te_jax.recipe import DelayedScaling, Recipe

if TYPE_CHECKING:
    import numpy as np

    from te_jax.cli._step import Learner, LossFunction, Placement
    from te_jax.cli._text import Corpus
    from te_jax.models import DecoderConfig, Losses

__all__ = ["add_arguments", "run"]

# By their modules, as in the extra [train].
_PACKAGES = {"optax": "optax", "orbax": "orbax-checkpoint", "matplotlib": "matplotlib", "tqdm": "tqdm"}

_EVALUATION_WINDOWS = 64

# Steps whose losses are still on the device while the host prepares the next: enough to hide the host, few enough that
# devices which share a host's cores do not wait for each other in several steps at once.
_STEPS_IN_FLIGHT = 2


def run(args: argparse.Namespace) -> int:
    """Trains, or continues to, until `--steps`.

    Args:
      args: parsed options of `add_arguments`.

    Returns:
      0, or 128 + the number of the signal that stopped the run before.

    Raises:
      UserError: an option cannot be met, or memory ran out.
    """
    missing = [package for module, package in _PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise UserError(f"te-jax train needs {', '.join(missing)}: pip install {' '.join(missing)}")
    from te_jax.cli import _step

    out = None if args.out is None else Path(args.out)
    stored = None
    if args.resume:
        out = out or _run_folder.newest_path()
        stored = _run_folder.read_header(out)
        if stored is None:
            raise UserError(f"--out {out} holds no run to resume: leave --resume out to start one")
    options = _options.resolve(args, out, stored)
    _options.check(options)
    if options.deterministic:
        os.environ.setdefault("TE_JAX_AUTOTUNE", "0")  # another process could choose other GEMMs, with other bits
    tokenizer = None if options.tokenizer is None else _text.Tokenizer(options.tokenizer)
    config = _options.build_config(options, tokenizer)
    _options.check_parallel(options, config)
    corpus = _text.load(options.text, tokenizer)
    if stored is not None and corpus.sha256 != stored.get("text", {}).get("sha256"):
        by = "" if tokenizer is None else f" with --tokenizer {options.tokenizer}"
        raise UserError(f"--text {corpus.source}{by} is not, or no longer, what the run in {out} was trained on")
    if stored is not None and config.vocab_size != (before := _vocab_size(stored, config)):
        raise UserError(
            f"--tokenizer {options.tokenizer} needs a vocabulary of {config.vocab_size}, and the model of the run in "
            f"{out} has {before}: give the run's own tokenizer, or start another run without --resume"
        )
    data = _text.split(corpus, options.seq_len)

    devices = _step.take_devices(options.devices, options.tp)
    parts = len(devices) // options.tp
    if options.batch % (parts * options.microbatches):
        over = f"{parts} devices" if options.tp == 1 else f"{parts} groups of --tp {options.tp}"
        over = over if options.microbatches == 1 else f"--microbatches {options.microbatches} on {over}"
        multiple = parts * options.microbatches
        raise UserError(f"--batch {options.batch} does not divide over {over}: choose a multiple of {multiple}")
    options = _options.settle(options, config, corpus, devices)
    config = dataclasses.replace(config, dtype=options.dtype)
    placement = _step.build_placement(devices, options.tp, options.transport, config.experts)
    implementation = _implementation(options)
    learners = _learners(options, config, placement, implementation)
    _check_memory(options, learners, devices)

    header = _header(options, config, corpus, devices, implementation)
    if out is None or stored is None:
        folder = RunFolder.create(out or _run_folder.new_path(), header)
    else:
        folder = RunFolder.resume(out, header)
        _note_changes(stored, header)
    try:
        if args.out is None:
            print(f"run in {folder.path}")
        if options.tp > 1:
            print(
                f"{len(devices)} {devices[0].platform} devices, {options.tp} share the model: "
                f"transport {options.transport}"
            )
        stopped = ""
        with _interruption.watching() as signals, _memory(options, config):
            try:
                step, cost = _train(folder, options, config, learners, placement, data, devices, signals)
            except Exception as error:
                # A signal to the process group ends compilers that XLA has started, and what reads a pipe.
                if not signals or isinstance(error, UserError) or is_out_of_memory(error):
                    raise
                folder.finish_saving()
                step, cost, stopped = folder.latest_step, "", f"stopped in a step ({reason_of(error)}); "
        if step < options.steps:
            saved = f"step {step} of {options.steps} is saved" if step else "no step is saved"
            print(
                f"te-jax: {signals[0].name}: {stopped}{saved}; continue with "
                f"te-jax train --resume --out {shlex.quote(str(folder.path))}",
                file=sys.stderr,
            )
            return 128 + signals[0]
        _conclude(folder, options, config, learners, corpus.unit, cost)
    finally:
        folder.close()
    return 0


def _vocab_size(stored: dict[str, Any], config: DecoderConfig) -> int:
    """That of the run that is resumed."""
    return stored.get("model", {}).get("vocab_size", config.vocab_size)


def _learners(
    options: Options, config: DecoderConfig, placement: Placement, implementation: native.Implementation
) -> dict[str, Learner]:
    """The run's own, and its twin's with --compare, by the name of their losses in the log."""
    from te_jax.cli import _step

    def learner(config: DecoderConfig, loss: LossFunction, states: str = options.optimizer_state) -> Learner:
        optimizer = _step.build_optimizer(
            _options.peak_rate(options, config),
            options.steps,
            warmup_steps=options.warmup_steps,
            clip_norm=options.clip_norm,
            state_dtype=_options.STATE_DTYPES[states],
            seed=options.seed,
            offload="optimizer" in _options.offloaded(options),
        )
        return _step.build_learner(
            config,
            loss,
            optimizer,
            placement,
            deterministic=options.deterministic,
            implementation=implementation,
        )

    loss = _step.te_jax_loss(config, implementation, placement)
    learners = {"loss": learner(config, loss)}
    # A twin differs in one thing, so that the distance of the two curves is what that costs.
    if options.compare and config.recipe is not None:
        plain = dataclasses.replace(config, recipe=None)
        learners[f"{config.dtype}_loss"] = learner(plain, _step.te_jax_loss(plain, implementation, placement))
    elif options.compare and options.optimizer_state != "f32":
        learners["f32_states_loss"] = learner(config, loss, "f32")
    elif options.compare:
        learners["optax_loss"] = learner(config, _step.optax_loss(config, placement))
    return learners


def _check_memory(options: Options, learners: dict[str, Learner], devices: list[Any]) -> None:
    """Refuses a model whose state alone exceeds a device's memory. On a CPU the kernel would kill the process."""
    from te_jax.cli import _step

    leaves = jax.tree.leaves([learner.abstract_state() for learner in learners.values()])
    on_device = [leaf for leaf in leaves if leaf.sharding.memory_kind != "pinned_host"]
    needed = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in on_device)
    present = _step.memory_of(devices)
    if needed > present:
        held = "parameters and Adam's moments" if options.recipe == "none" else "parameters, moments and the recipe"
        raise UserError(
            f"--preset {options.preset} needs {needed / 2**30:,.2f} GiB on each device for {held}, and a device has "
            f"{present / 2**30:,.2f} GiB: choose a smaller --preset, --optimizer-state fp8, --offload optimizer, or a "
            "larger --tp, which divides the model among devices"
        )


@contextlib.contextmanager
def _memory(options: Options, config: DecoderConfig) -> Iterator[None]:
    """Turns an error of exhausted memory into one that names the ways out."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        others = [] if config.remat else ["--remat"]
        others += [] if options.optimizer_state == "fp8" else ["--optimizer-state fp8"]
        others += [] if len(_options.offloaded(options)) == 2 else ["--offload activations,optimizer"]
        raise UserError(
            f"--preset {options.preset} with --batch {options.batch} and --seq-len {options.seq_len} is out of memory "
            f"({reason_of(error)}): choose a smaller --preset, --batch or --seq-len, or "
            f"{', '.join([*others, 'a larger --microbatches or --tp'])}"
        ) from error


def _implementation(options: Options) -> native.Implementation:
    """Which implementation of te_jax's operations runs. Raises UserError where the one that was asked for cannot."""
    try:
        use_native = native.use_native(None if options.implementation == "auto" else options.implementation)
    except native.NativeUnavailableError as error:
        raise UserError(f"--implementation {options.implementation} cannot run here: {error}") from error
    if options.transport == "p2p":
        if options.implementation == "reference":
            raise UserError("--transport p2p is native, and --implementation is reference: leave one of them out")
        try:
            native.use_native("native")
        except native.NativeUnavailableError as error:
            raise UserError(f"--transport p2p cannot run here: {error}") from error
    _check_recipe(options)
    return "native" if use_native else "reference"


def _check_recipe(options: Options) -> None:
    """Refuses a recipe for which this GPU has no kernels, unless the reference is asked for by name."""
    recipe = _options.RECIPES[options.recipe]
    if recipe is None:
        return
    state = recipe.init() if isinstance(recipe, DelayedScaling) else None
    implementation = None if options.implementation == "auto" else options.implementation
    layer = functools.partial(ops.dense, recipe=recipe, scaling_state=state, implementation=implementation)
    try:
        jax.eval_shape(layer, *[jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 2)
    except native.NativeUnavailableError as error:
        raise UserError(f"--recipe {options.recipe} cannot run here: {error}") from error


def _header(
    options: Options, config: DecoderConfig, corpus: Corpus, devices: list[Any], implementation: native.Implementation
) -> dict[str, Any]:
    import optax

    return {
        "kind": "header",
        "options": dataclasses.asdict(options),
        "model": {
            **dataclasses.asdict(config),
            "recipe": _describe(config.recipe),
            "num_parameters": config.num_parameters,
            "num_active_parameters": config.num_active_parameters,
        },
        "text": {"source": corpus.source, f"{corpus.unit}s": corpus.data.size, "sha256": corpus.sha256},
        "implementation": implementation,
        "parallel": {"tp": options.tp, "transport": options.transport},
        "device": {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)},
        "versions": {
            "te_jax": te_jax.__version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.version.__version__,
            "optax": optax.__version__,
            "python": platform.python_version(),
        },
    }


def _describe(recipe: Recipe | None) -> dict[str, Any] | None:
    if recipe is None:
        return None
    values = {name: str(v) if name.endswith("dtype") else v for name, v in dataclasses.asdict(recipe).items()}
    return {"name": type(recipe).__name__, **values}


def _note_changes(stored: dict[str, Any], header: dict[str, Any]) -> None:
    """Says why a resumed run may differ from an uninterrupted one."""
    for subject in ("implementation", "parallel", "device", "versions"):
        if (before := stored.get(subject, header[subject])) != header[subject]:  # older versions lack some
            note(f"{subject} changed from {before} to {header[subject]}: losses may differ in their last bits")
    steps = header["options"]["steps"]
    before = stored["options"].get("steps", steps)
    if before != steps:
        note(f"--steps changed from {before} to {steps}: the learning rate continues on the schedule of {steps} steps")


def _train(
    folder: RunFolder,
    options: Options,
    config: DecoderConfig,
    learners: dict[str, Learner],
    placement: Placement,
    data: tuple[np.ndarray, np.ndarray],
    devices: list[Any],
    signals: list[Any],
) -> tuple[int, str]:
    """Trains until the last step or a signal. Returns the last step that was taken and saved, and what its
    steps cost: "" where it took none."""
    assert options.checkpoint_every is not None  # since `settle`
    training, held_out = data
    if folder.latest_step:
        restored = folder.restore({name: each.stored(each.abstract_state()) for name, each in learners.items()})
        states = {name: learner.resumed(restored[name]) for name, learner in learners.items()}
    else:
        states = {name: learner.init(jax.random.key(options.seed)) for name, learner in learners.items()}
    done = step = folder.latest_step
    microbatch = options.batch // options.microbatches
    batches = math.ceil(_EVALUATION_WINDOWS / microbatch)
    windows = _text.evaluation_windows(held_out, count=batches * microbatch, seq_len=options.seq_len)
    windows = jax.device_put(windows.reshape(batches, microbatch, -1), placement.windows)

    flops = len(learners) * config.flops_per_token(options.seq_len)
    progress = _report.Progress(options.steps, done, options.batch * options.seq_len, flops, devices)
    records = _Records(folder, progress)

    def evaluate(step: int) -> None:
        records.add("validation", step, {name: it.evaluate(states[name], windows) for name, it in learners.items()})
        records.flush()

    try:
        if not done:
            evaluate(0)
        for step in range(done + 1, options.steps + 1):
            # On the host this takes less than a millisecond, while devices compute the steps before.
            batch = _text.training_windows(
                training, seed=options.seed, step=step, batch=options.batch, seq_len=options.seq_len
            )
            batch = jax.device_put(batch.reshape(options.microbatches, microbatch, -1), placement.windows)
            losses = {}
            for name, learner in learners.items():
                states[name], losses[name] = learner.step(states[name], batch)
            records.add("train", step, losses)
            stops = step == options.steps or bool(signals)
            evaluates = step % options.eval_every == 0 or step == options.steps
            saves = step % options.checkpoint_every == 0 or stops
            # Not timed: the first step, which waits for the compiler, validations, and copies for checkpoints.
            if step == done + 1 or evaluates or saves:
                records.flush()
                if evaluates:
                    evaluate(step)
                if saves:
                    folder.save_behind(step, {name: it.stored(states[name]) for name, it in learners.items()})
                if stops:
                    break
                progress.time_steps()
        folder.finish_saving()
    finally:
        progress.close()
    return step, " · ".join(progress.speed_and_memory()) if step > done else ""


class _Records:
    """Losses that are still on the devices: fetched a few steps late, so that the devices never wait for the host."""

    def __init__(self, folder: RunFolder, progress: _report.Progress):
        self._folder = folder
        self._progress = progress
        self._pending: deque[tuple[str, int, dict[str, Losses]]] = deque()

    def add(self, kind: str, step: int, losses: dict[str, Losses]) -> None:
        self._pending.append((kind, step, losses))
        while len(self._pending) > _STEPS_IN_FLIGHT:
            self._fetch()

    def flush(self) -> None:
        while self._pending:
            self._fetch()

    def _fetch(self) -> None:
        kind, step, losses = self._pending.popleft()
        for name, each in losses.items():
            if not math.isfinite(objective := float(each.objective)):
                words = name.replace("_", " ")
                raise UserError(f"the {kind} {words} is {objective} at step {step}: try a smaller --learning-rate")
        record = {name: float(each.cross_entropy) for name, each in losses.items()}
        if (load := losses["loss"].largest_load) is not None:
            record["largest_load"] = float(load)
        self._folder.append({"kind": kind, "step": step, **record})
        if kind == "train":
            self._progress.step(step, record)
        else:
            self._progress.validation(step, record)


def _conclude(
    folder: RunFolder, options: Options, config: DecoderConfig, learners: dict[str, Learner], unit: str, cost: str
) -> None:
    training, validation = (
        [record for record in folder.records(kind) if learners.keys() <= record.keys()]  # damage may cost one its twin
        for kind in ("train", "validation")
    )
    figure = folder.path / "loss.png"
    chosen = [] if config.recipe is None else [f"{options.recipe} scaling"]
    chosen += [] if options.optimizer_state == "f32" else [f"{options.optimizer_state} states"]
    chosen = chosen or ["te_jax"]
    label = chosen[0]  # what a twin lacks
    chosen += [] if options.tp == 1 else [f"tp {options.tp} ({options.transport})"]
    size = f"{config.num_parameters:,} parameters"
    size += "" if config.experts is None else f", {config.num_active_parameters:,} active"
    title = f"te-jax train · {options.preset}, {size} · {', '.join(chosen)}"
    files = ["log.jsonl", "checkpoints"]
    if training and validation:  # a damaged log may have neither
        if cost or not figure.exists():  # a finished run keeps the figure with what its steps cost
            with _run_folder.writing(folder.path):
                _report.draw_losses(figure, title, label, training, validation, unit, cost)
        print(_report.summary(label, training, validation, unit))
        files.append(figure.name)
    how = "" if options.tp == 1 else f" with tp {options.tp}, transport {options.transport},"
    print(f"{options.steps} steps{how} in {folder.path}: {', '.join(files)}")
