"""Does training in FP8 cost loss? The same decoder in bfloat16 and in FP8, with several seeds each.

    python -m benchmarks.accuracy_text TEXT                          # text and tokenizer, in a folder
    python -m benchmarks.accuracy --text TEXT --out RUNS             # all runs, one on each GPU at a time
    python -m benchmarks.tables                                      # table and figure

Every run is a `te-jax train` in a folder of its own, RUNS/VARIANT-SEED. After `--seconds` those under way save their
checkpoints and stop, and the same command goes on with them. In the last 90 of these seconds no run is begun, because
a run that is stopped while it compiles ends after its first step. A finished run leaves its losses in
benchmarks/results/DEVICE/accuracy/VARIANT-SEED.json, and is not begun again while that file exists.

Runs of one seed have the same initial parameters and the same batches.
"""

import argparse
import json
import os
import queue
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import jax

from benchmarks import harness

VARIANTS = {
    "bf16": ("--parameters", "float32"),
    "block": ("--recipe", "block"),
    "current": ("--recipe", "current"),
    "block_fp8_head": ("--recipe", "block", "--head-recipe", "block"),
    "block_fp8_logits": (
        *("--recipe", "block", "--head-recipe", "block", "--fp8-logits"),
        *("--parameters", "bfloat16", "--optimizer-state", "bf16"),
    ),
}
"""Options of `te-jax train` by name; the first one is what the others are compared with."""

# 126 million parameters with a vocabulary of 2^15, and 100 million tokens.
OPTIONS = ("--preset", "small", "--batch", "32", "--seq-len", "1024", "--steps", "3052", "--eval-every", "100")

_FINAL = 10  # the last tenth of the steps, in which the learning rate is below a twelfth of its peak
_TO_FIRST_STEP = 90.0  # seconds; a run that is stopped while it compiles ends after its first step
_POINTS = 300  # of a curve, at most twice as many


class Run(NamedTuple):
    """One training."""

    variant: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.variant}-{self.seed}"


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is not finished; see the module's docstring. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--text", type=Path, required=True, help="folder of text.txt and tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs, with 3 GB of checkpoints for each")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="of these alone (all)")
    parser.add_argument("--seeds", type=int, default=2, help="seeds of each variant (2)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which runs stop (never)")
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder of result files")
    parser.add_argument("--commit", help="recorded in the place of what git says")
    parser.add_argument(
        "options", nargs="*", help="after --: options of te-jax train in the place of the published ones"
    )
    args = parser.parse_args(argv)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # this process only asks which devices there are
    record = harness.environment(args.commit)
    runs = [Run(variant, seed) for seed in range(args.seeds) for variant in args.variants]
    options = ["--text", str(args.text / "text.txt"), "--tokenizer", str(args.text / "tokenizer.json"), *OPTIONS]
    folder = args.results / harness.slug(record["device"]["kind"]) / "accuracy"
    return train(runs, [*options, *args.options], args.out, folder, record, args.seconds)


def train(
    runs: Sequence[Run], options: Sequence[str], out: Path, results: Path, record: dict[str, Any], seconds: float
) -> int:
    """Trains runs in order, one on each GPU at a time, and writes the result of each that finishes.

    Args:
      runs: those that have a result are left out.
      options: of `te-jax train`, for all of them.
      out: a folder; runs whose folder is in it go on.
      results: a folder for result files.
      record: of `harness.environment`.
      seconds: after which runs are stopped by SIGTERM; in the last 90 none is begun.

    Returns:
      0 if all runs are finished, 1 if one failed, 2 if time was up.
    """
    deadline = time.monotonic() + seconds
    gpus: queue.SimpleQueue[int] = queue.SimpleQueue()
    count = jax.device_count() if record["device"]["platform"] == "gpu" else 1
    for gpu in range(count):
        gpus.put(gpu)

    def finish(run: Run) -> str:
        result = results / f"{run.name}.json"
        if result.exists():
            return "finished"
        gpu = gpus.get()
        outcome = _train(run, [*options, *VARIANTS[run.variant]], out / run.name, gpu, deadline)
        gpus.put(gpu)
        if outcome == "finished":
            results.mkdir(parents=True, exist_ok=True)
            result.write_text(json.dumps(record | condensed(out / run.name, run), indent=1) + "\n")
        print(f"{run.name}: {outcome}", flush=True)
        return outcome

    with ThreadPoolExecutor(count) as threads:
        outcomes = set(threads.map(finish, runs))
    if any(outcome.startswith("failed") for outcome in outcomes):
        return 1
    return 2 if outcomes - {"finished"} else 0


def _train(run: Run, options: Sequence[str], folder: Path, gpu: int, deadline: float) -> str:
    """Begins a run or goes on with it. Returns "finished", "stopped", "waits" or "failed: " and why."""
    if time.monotonic() > deadline - _TO_FIRST_STEP:
        return "waits"
    folder.mkdir(parents=True, exist_ok=True)
    log, output = folder / "log.jsonl", folder / "output.txt"
    command = [sys.executable, "-m", "te_jax.cli", "train", *options, "--seed", str(run.seed), "--out", str(folder)]
    if log.exists() and log.stat().st_size:
        command.append("--resume")
    environment = {name: value for name, value in os.environ.items() if name != "XLA_PYTHON_CLIENT_PREALLOCATE"}
    environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
    with (
        output.open("a") as lines,
        subprocess.Popen(command, env=environment, stdout=lines, stderr=subprocess.STDOUT) as process,
    ):
        try:
            status = process.wait(None if deadline == float("inf") else max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.terminate()  # te-jax train saves a checkpoint, and ends with 143
            status = process.wait()
    if status in (128 + signal.SIGTERM, -signal.SIGTERM):  # the latter before it has anything to save
        return "stopped"
    return "finished" if status == 0 else f"failed: {output.read_text()[-2000:]}"


def condensed(folder: Path, run: Run) -> dict[str, Any]:
    """What is kept of a run: means of its training losses, its validation losses, and where it was stopped."""
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    header = next(record for record in reversed(records) if record["kind"] == "header")
    training = [record["loss"] for record in records if record["kind"] == "train"]
    validation = [(record["step"], record["loss"]) for record in records if record["kind"] == "validation"]
    options, output = header["options"], (folder / "output.txt").read_text()
    (text_tokens,) = (size for name, size in header["text"].items() if name in ("tokens", "bytes"))
    every = max(1, len(training) // _POINTS)
    final = max(1, len(training) // _FINAL)
    return {
        "family": "accuracy",
        "variant": run.variant,
        "seed": run.seed,
        "parameters": header["model"]["num_parameters"],
        "steps": options["steps"],
        "tokens": options["steps"] * options["batch"] * options["seq_len"],
        "text": {"tokens": text_tokens, "sha256": header["text"]["sha256"]},
        "learning_rate": options["learning_rate"],
        "stopped_after": [int(step) for step in re.findall(r"step (\d+) of \d+ is saved", output)],
        "final_steps": final,
        "final_training": round(fmean(training[-final:]), 6),
        "final_validation": round(validation[-1][1], 6),
        "every": every,
        "training": [
            round(fmean(training[start : start + every]), 5) for start in range(0, len(training) - every + 1, every)
        ],
        "validation": {str(step): round(loss, 5) for step, loss in validation},
    }


if __name__ == "__main__":
    sys.exit(main())
