"""`te-jax plot`: figures of a run, as far as it has come."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from te_jax.cli import _log, _options
from te_jax.cli.errors import UserError

_DESCRIPTION = """\
Draws the losses of a run of te-jax train, and its statistics if there are any, into the folder of the run. The run may
go on meanwhile."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `te-jax plot` to a parser."""
    parser.description = _DESCRIPTION
    parser.add_argument(
        "run",
        type=_options.path,
        nargs="?",
        metavar="DIR",
        help="folder of the run (the runs/train-… of the highest number)",
    )


def run(args: argparse.Namespace) -> int:
    """Draws.

    Args:
      args: parsed options of `add_arguments`.

    Returns:
      0.

    Raises:
      UserError: there is no run, it has no losses yet, or its folder cannot be written.
    """
    from te_jax.cli import _run_folder

    path = _run_folder.newest_path("DIR") if args.run is None else args.run
    drawn = draw(path, _run_folder.read_header(path, "DIR"))
    if not drawn.files:
        raise UserError(f"{path} has no losses yet: let the run take a step")
    print(drawn.summary)
    print(f"{path}: {', '.join(drawn.files)}")
    return 0


class Drawn(NamedTuple):
    """What `draw` has made."""

    files: list[str]  # by their names
    summary: str  # where the losses ended; "" where there are none


def draw(path: Path, header: Mapping[str, Any], cost: str = "") -> Drawn:
    """Draws what is in the log of a run. Figures that are newer than the log are kept, with the cost that they show.

    Args:
      path: folder of the run.
      header: of its log.
      cost: speed and memory of its steps.
    """
    from te_jax.cli import _report, _run_folder

    training, validation = (_log.records(path, kind) for kind in ("train", "validation"))
    # A damaged record may lack its twin.
    names = {name for record in training for name in record if name == "loss" or name.endswith("_loss")}
    training, validation = ([each for each in some if names <= each.keys()] for some in (training, validation))
    label, title = _words_of(header)
    files, summary = [], ""
    if training and validation:
        figure, unit = path / "loss.png", "token" if "tokens" in header.get("text", {}) else "byte"
        if _is_older(figure, path):
            with _run_folder.writing(path):
                _report.draw_losses(figure, title, label, training, validation, unit, cost)
        files, summary = [figure.name], _report.summary(label, training, validation, unit)
    if statistics := _log.records(path, "statistics"):
        figure = path / "statistics.png"
        if _is_older(figure, path):
            with _run_folder.writing(path):
                _report.draw_statistics(figure, title, statistics)
        files.append(figure.name)
    return Drawn(files, summary)


def _is_older(figure: Path, path: Path) -> bool:
    return not figure.exists() or figure.stat().st_mtime_ns < (path / _log.LOG).stat().st_mtime_ns


def _words_of(header: Mapping[str, Any]) -> tuple[str, str]:
    """What a run has that its twin lacks, and the title of its figures."""
    options, model = header["options"], header.get("model", {})
    chosen = [f"{options['recipe']} scaling"] * (options.get("recipe", "none") != "none")
    if (head := options.get("head_recipe", "none")) != "none":
        chosen.append(f"{head} head" + " with logits" * options.get("fp8_logits", False))
    chosen = [" and ".join(chosen)] if chosen else []
    if (state := options.get("optimizer_state", "f32")) != "f32":
        chosen.append(f"{state} states")
    chosen = chosen or ["te_jax"]
    shared = [f"{name} {size}" for name in ("fsdp", "cp", "tp") if (size := options.get(name) or 1) > 1]
    shared = [f"{words} ({options['transport']})" if words.startswith("tp") else words for words in shared]
    folder = options.get("from_")
    size = f"{model.get('num_parameters', 0):,} parameters"
    size += f", {model['num_active_parameters']:,} active" if model.get("experts") else ""
    name = options.get("preset", "") if folder is None else Path(folder).name
    return chosen[0], f"te-jax train · {name}, {size} · {', '.join([*chosen, *shared])}"
