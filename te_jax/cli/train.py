"""A run of `te-jax train`: planned, trained, written to its folder."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import shlex
import signal
import sys
from collections import deque
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
import numpy as np
import optax

import te_jax
from te_jax import debug
from te_jax._core.terminal import reason_of
from te_jax.cli import (
    _config,
    _interruption,
    _memory,
    _options,
    _placement,
    _plan,
    _processes,
    _report,
    _run_folder,
    _statistics,
    _step,
    _text,
    _watchdog,
    plot,
)
from te_jax.cli._plan import Plan
from te_jax.cli._run_folder import RunFolder, RunShare, StoredRun
from te_jax.cli._state import TrainState
from te_jax.cli._step import Learner
from te_jax.cli._text import Tokens
from te_jax.cli.errors import UserError, is_out_of_memory, note
from te_jax.models import Losses, from_hf, peft
from te_jax.models.config import kernel_facts
from te_jax.recipe import Recipe

__all__ = ["run"]

_EVALUATION_WINDOWS = 64

# Steps whose losses are still on the device while the host prepares the next: enough to hide the host, few enough that
# devices which share a host's cores do not wait for each other in several steps at once.
_STEPS_IN_FLIGHT = 2


def run(args: argparse.Namespace) -> int:
    """Trains, or continues to, until `--steps`.

    Args:
      args: parsed options of `_options.add_arguments`.

    Returns:
      0, or 128 + the number of the signal that stopped the run before.

    Raises:
      UserError: an option cannot be met, or memory ran out.
    """
    # JAX's own share, three quarters, leaves room for programs that this one does not expect.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    with _processes.joined():
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    out = None if args.out is None else Path(args.out)
    stored = _processes.from_first(lambda: _stored(out)) if args.resume else None
    stored = None if stored is None else StoredRun(Path(stored[0]), stored[1])
    options = _options.resolve(args, stored)
    if options.precision.deterministic:
        os.environ.setdefault("TE_JAX_AUTOTUNE", "0")  # another process could choose other GEMMs, with other bits
    plan, data = _plan.decide(options, stored)
    learners = {model.loss_name: _step.build_learner(plan, model) for model in plan.models}
    _memory.check_state(plan, learners)
    if args.memory:
        _memory.tell(plan, _memory.fitted(plan, learners, data[0]), data[0])
        return 0

    if options.output.tensorboard:
        _report.summary_writer()
    folder = _open_folder(out, stored, _header(plan))
    try:
        if args.out is None:
            print(f"run in {folder.path}")
        if len(plan.placement.devices) > 1:
            print(_placement.describe(plan.placement, plan.options.mesh, plan.config))
        if plan.num_documents is not None:
            print(f"{plan.num_documents:,} documents, packed")
        stopped = ""
        with _interruption.watching() as signals, _memory.explained(plan):
            try:
                step, cost = _train(plan, folder, learners, data, signals)
            except Exception as error:
                if isinstance(error, UserError) or is_out_of_memory(error):
                    raise
                if _processes.count() > 1 and isinstance(error, jax.errors.JaxRuntimeError):
                    raise _lost_step(folder, error) from error
                # A signal to the process group ends compilers that XLA has started, and what reads a pipe.
                if not signals or _processes.count() > 1:
                    raise
                folder.finish_saving()
                step, cost, stopped = folder.latest_step, "", f"stopped in a step ({reason_of(error)}); "
        if _processes.is_first():
            _conclude(plan, folder, cost)
        if step < plan.options.training.steps:
            saved = f"step {step} of {plan.options.training.steps} is saved" if step else "no step is saved"
            print(f"te-jax: {signals[0].name}: {stopped}{saved}; {_continue(folder)}", file=sys.stderr)
            return 128 + signals[0]
    finally:
        # A process that fails among several would wait for a checkpoint that the others never finish.
        if _processes.count() == 1 or sys.exc_info()[1] is None:
            folder.close()
    return 0


def _stored(out: Path | None) -> tuple[str, dict[str, Any]]:
    """Path and header of the run to resume."""
    path = out or _run_folder.newest_path()
    return str(path), _run_folder.read_header(path)


def _open_folder(out: Path | None, stored: StoredRun | None, header: dict[str, Any]) -> RunFolder:
    """The folder of a run that starts or goes on. Process 0 holds it."""

    def opened() -> tuple[str, int, dict[str, Any]]:
        nonlocal folder
        if stored is None:
            folder = RunFolder.create(out or _run_folder.new_path(), header)
        else:
            folder = RunFolder.resume(stored.path, header)
            _note_changes(stored.header, header)
        return str(folder.path.absolute()), folder.latest_step, header

    folder: RunFolder | None = None
    path, latest_step, first = _processes.from_first(opened)
    if folder is not None:
        return folder
    local_header = json.loads(json.dumps(header))
    if differing := [subject for subject in local_header if local_header[subject] != first.get(subject)]:
        raise UserError(
            f"process {_processes.index()} has other values of {', '.join(differing)} than process 0: start all with "
            "the same arguments, text, devices and versions"
        )
    return RunShare(Path(path), latest_step)


def _lost_step(folder: RunFolder, error: Exception) -> UserError:
    return UserError(
        f"a step failed in process {_processes.index()} ({reason_of(error)}), as it does when another process has "
        f"died: its last lines say why; {_continue(folder)}"
    )


def _continue(folder: RunFolder) -> str:
    return f"continue with te-jax train --resume --out {shlex.quote(str(folder.path))}"


def _header(plan: Plan) -> dict[str, Any]:
    config, devices = plan.config, plan.placement.devices
    origin, mesh = plan.options.model, plan.options.mesh
    return {
        "kind": "header",
        "options": plan.recorded_options(),
        "model": {
            **dataclasses.asdict(config),
            "recipe": _describe(config.recipe),
            "head_recipe": _describe(config.head_recipe),
            "num_parameters": config.num_parameters,
            "num_active_parameters": config.num_active_parameters,
            **({} if origin.lora is None else {"base_sha256": _config.sha256_of(str(origin.from_))}),
        },
        "text": {
            "source": plan.text,
            f"{plan.token}s": plan.num_tokens,
            **({} if plan.num_documents is None else {"documents": plan.num_documents}),
            "sha256": plan.sha256,
        },
        "implementation": plan.implementation or "xla",
        "parallel": {"tp": mesh.tp, "fsdp": plan.placement.fsdp, "transport": mesh.transport}
        | ({"cp": mesh.cp} if mesh.cp > 1 else {}),
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
    plan: Plan,
    folder: RunFolder,
    learners: dict[str, Learner],
    data: tuple[Tokens, Tokens],
    signals: list[signal.Signals],
) -> tuple[int, str]:
    """Trains until the last step or a signal. Returns the last step that was taken and saved, and what its
    steps cost: "" where it took none."""
    options, output, steps = plan.options, plan.options.output, plan.options.training.steps
    batch_size, seq_len, microbatches = options.data.batch, options.data.seq_len, options.memory.microbatches
    training, held_out = data
    learners = _memory.fitted(plan, learners, training)
    if folder.latest_step:
        restored = folder.restore({name: each.stored(each.abstract_state()) for name, each in learners.items()})
        states = {
            name: learner.resumed(restored[name], _model(learner, plan) if options.model.lora else None)
            for name, learner in learners.items()
        }
    else:
        states = {name: _first_state(learner, plan) for name, learner in learners.items()}
    done = step = folder.latest_step
    microbatch = batch_size // microbatches
    batches = math.ceil(_EVALUATION_WINDOWS / microbatch)
    starts = _text.evaluation_starts(held_out.ids.size, count=batches * microbatch, seq_len=seq_len)
    windows = _windows(held_out, starts.reshape(batches, microbatch), plan)

    flops = len(learners) * plan.config.flops_per_token(seq_len)
    tokens = batch_size * seq_len
    progress = _report.Progress(steps, done, tokens, flops, plan.placement.devices)
    watch = _statistics.Watch(delayed=options.precision.recipe == "delayed") if output.statistics else None
    in_fp8 = plan.config.recipe is not None or plan.config.head_recipe is not None
    hint = "; --resume --statistics 1 names the layer where it begins" if in_fp8 and output.statistics != 1 else ""
    writer = None
    if output.tensorboard and _processes.is_first():
        # What was written of later steps is not shown.
        writer = _report.summary_writer()(str(folder.path / "tensorboard"), purge_step=done + 1)
    records = _Records(folder, progress, watch, hint, writer)
    vote = _processes.Vote(plan.placement.mesh)

    def evaluate(step: int) -> None:
        records.add("validation", step, {name: it.evaluate(states[name], windows) for name, it in learners.items()})
        records.flush()

    watchdog = _watchdog.Watchdog(output.hang_timeout, done, _continue(folder))
    try:
        if not done:
            evaluate(0)
        for step in range(done + 1, steps + 1):
            # On the host this takes less than a millisecond, while devices compute the steps before.
            starts = _text.training_starts(
                training.ids.size, seed=options.training.seed, step=step, batch=batch_size, seq_len=seq_len
            )
            batch = _windows(training, starts.reshape(microbatches, microbatch), plan)
            looks = watch is not None and step % output.statistics == 0
            if looks:
                records.flush()
                progress.stop_timing()
            losses = {}
            for name, learner in learners.items():
                if looks and name == plan.models[0].loss_name:
                    assert learner.step_with_statistics is not None
                    states[name], losses[name], statistics = learner.step_with_statistics(states[name], batch)
                    records.add_statistics(step, statistics)
                else:
                    states[name], losses[name] = learner.step(states[name], batch)
            records.add("train", step, losses)
            watchdog.progressed(step)
            if (asked := vote(signals[0] if signals else 0)) and not signals:
                signals.append(signal.Signals(asked))
            stops = step == steps or asked > 0
            evaluates = step % output.eval_every == 0 or step == steps
            saves = step % plan.checkpoint_every == 0 or stops
            # Not timed: the first step, which waits for the compiler, those with statistics, validations, and copies
            # for checkpoints.
            if step == done + 1 or looks or evaluates or saves:
                records.flush()
                if evaluates:
                    evaluate(step)
                if saves:
                    folder.save_behind(step, {name: it.stored(states[name]) for name, it in learners.items()})
                if stops:
                    break
                progress.time_steps()
        watchdog.stop()  # a slow disk may take longer
        folder.finish_saving()
    finally:
        watchdog.stop()
        progress.close()
        if writer is not None:
            writer.close()
    return step, " · ".join(progress.speed_and_memory()) if step > done else ""


def _first_state(learner: Learner, plan: Plan) -> TrainState:
    """The state before the first step: of random parameters, or of the model that --from names."""
    origin = plan.options.model
    if origin.from_ is None:
        return learner.init(jax.random.key(plan.options.training.seed))
    if not isinstance(origin.lora, str):
        return learner.begin(_model(learner, plan))
    with _config.reading(origin.lora):
        adapters = peft.read(Path(origin.lora), plan.config)[1]
    return learner.begin(_model(learner, plan), adapters)


def _model(learner: Learner, plan: Plan) -> Any:
    """The parameters of the model that --from names."""
    folder = plan.options.model.from_
    assert folder is not None
    places = jax.tree.map(lambda param: param.sharding, learner.params)
    dtype = learner.params["embedding"].dtype
    if plan.models[0].parameters == "bfloat16" and _config.is_bfloat16(folder):
        dtype = plan.models[0].parameters  # float32 copies would say the same, and may not fit
    config = plan.models[0].config
    kept = config.lora is not None and kernel_facts(config).name == "block_128x128"
    recipe = config.recipe if kept else None
    with _config.reading(folder):
        return from_hf(folder, param_dtype=dtype, shardings=lambda _: places, keep_fp8=kept, recipe=recipe)[1]


def _windows(data: Tokens, starts: np.ndarray, plan: Plan) -> Tokens:
    """[batches, batch, seq_len + 1]: the windows that begin at starts [batches, batch]. Devices get only their own."""
    seq_len = plan.options.data.seq_len

    def windows_of(array: np.ndarray) -> jax.Array:
        def of_device(index: Any) -> np.ndarray:
            return _text.windows_at(array, starts[index[:2]], seq_len)

        return jax.make_array_from_callback((*starts.shape, seq_len + 1), plan.placement.windows, of_device)

    return jax.tree.map(windows_of, data)


class _Records:
    """Losses that are still on the devices: fetched a few steps late, so that the devices never wait for the host."""

    def __init__(
        self,
        folder: RunFolder,
        progress: _report.Progress,
        watch: _statistics.Watch | None = None,
        hint: str = "",
        writer: debug.Writer | None = None,
    ):
        self._folder = folder
        self._progress = progress
        self._watch = watch
        self._writer = writer
        self._hint = hint  # at the end of the error of a loss that is not finite
        self._pending: deque[tuple[str, int, dict[str, Losses]]] = deque()

    def add(self, kind: str, step: int, losses: dict[str, Losses]) -> None:
        self._pending.append((kind, step, losses))
        while len(self._pending) > _STEPS_IN_FLIGHT:
            self._fetch()

    def add_statistics(self, step: int, statistics: Any) -> None:
        assert self._watch is not None
        record = _statistics.record_of(step, statistics)
        self._folder.append(record)
        if self._writer is not None:
            debug.write(statistics, self._writer, step)
        for sentence in self._watch.look(record):
            self._progress.note(sentence)

    def flush(self) -> None:
        while self._pending:
            self._fetch()

    def _fetch(self) -> None:
        kind, step, losses = self._pending.popleft()
        for name, each in losses.items():
            if not math.isfinite(objective := float(each.objective)):
                words = name.replace("_", " ")
                origin = self._watch and self._watch.nonfinite
                where = f" ({origin})" if origin else self._hint
                raise UserError(
                    f"the {kind} {words} is {objective} at step {step}: try a smaller --learning-rate{where}"
                )
        record = {name: float(each.cross_entropy) for name, each in losses.items()}
        if (load := losses["loss"].largest_load) is not None:
            record["largest_load"] = float(load)
        self._folder.append({"kind": kind, "step": step, **record})
        if self._writer is not None:
            for name, value in record.items():
                self._writer.add_scalar(f"{kind}/{name}", value, step)
        if kind == "train":
            self._progress.step(step, record)
        else:
            self._progress.validation(step, record)


def _conclude(plan: Plan, folder: RunFolder, cost: str) -> None:
    """Draws the run as far as it has come, and says what is in its folder."""
    options, files = plan.options, ["log.jsonl", "checkpoints"]
    drawn = plot.draw(folder.path, folder.header, cost)
    if folder.latest_step < options.training.steps:
        return
    if drawn.summary:
        print(drawn.summary)
    how = "" if options.mesh.tp == 1 else f" with tp {options.mesh.tp}, transport {options.mesh.transport},"
    print(f"{options.training.steps} steps{how} in {folder.path}: {', '.join([*files, *drawn.files])}")
