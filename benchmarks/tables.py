"""Turn result files into the tables and figures of README.md and docs/.

    python -m benchmarks.tables          # write them
    python -m benchmarks.tables --check  # change nothing; exit 1 with a diff where they differ

Every result file benchmarks/results/DEVICE/FAMILY.json gets a page beside it, FAMILY.md, with a table of all its rows.
In README.md and docs/ what stands between two markers is generated:

    <!-- summary: softmax_cross_entropy nvidia-h200 -->
    <!-- /summary -->

`summary` shows one line for each case of the family's headline figure, and `figure` that figure as a bar chart, whose
SVG goes to docs/images. The family accuracy is a folder of training runs: `summary` shows their final losses, `figure`
their curves. `<!-- gains -->` and `<!-- /gains -->` have the table of `GAINS` between them, `first_rows` that of
`FIRST`, `first_figure` the figure of `benchmarks.first_screen`, `changes` and `waiting` tables of `CHANGES`, `shared`
that of `SHARED`, `errors` that of recipes. In a sentence stands a number of times,

    <!-- ratio: FAMILY DEVICE OPERATION CASE IMPLEMENTATION PEER [FIGURE] -->1.43×<!-- /ratio -->

by which the peer's figure (median_ms, or another key of the rows) exceeds the implementation's. Without a result file,
the page says that it is not measured yet. `--check` also prints how old each result of README.md is, and refuses one
that was measured with local changes.
"""

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from benchmarks import accuracy_curves, first_screen
from benchmarks.harness import cell, columns_of, run_of

ROOT = Path(__file__).resolve().parent.parent
_FIGURE = "docs/images/first-screen.svg"

_PLACE = re.compile(
    r"(?P<open><!-- (?P<kind>summary|figure): (?P<family>\w+) (?P<device>[\w.-]+) -->\n)"
    r"(?P<content>.*?)"
    r"(?P<close><!-- /(?P=kind) -->)",
    re.DOTALL,
)
_RATIO = re.compile(
    r"(?P<open><!-- ratio: (?P<family>\w+) (?P<device>[\w.-]+) (?P<operation>\w+) (?P<case>\S+) "
    r"(?P<implementation>\w+) (?P<peer>\w+)(?: (?P<figure>\w+))? -->)"
    r"(?P<content>[^\n]*?)"
    r"(?P<close><!-- /ratio -->)"
)
_KINDS = "first_figure|first_rows|gains|whole|changes|waiting|shared|hosts|errors"
_OWN = re.compile(
    rf"(?P<open><!-- (?P<kind>{_KINDS}) -->\n)(?P<content>.*?)(?P<close><!-- /(?P=kind) -->)",
    re.DOTALL,
)
_MARKER = re.compile(rf"<!-- /?(?:table|summary|figure|ratio|{_KINDS})\b")

_H100, _H200 = "nvidia-h100-80gb-hbm3", "nvidia-h200"
_STEP = ("step", _H100, "step", "8b-8x1x8192")
_SHORT = ("step", _H200, "step", "8b-8x4x2048")
_FSDP = ("fsdp", _H100, "step", "8b-8x2x8192-remat")
_DEEP = ("fsdp", _H200, "step", "8b-32x4x8192-remat")
_WHOLE = ("whole_model", _H200, "step", "8b-32x1x8192")
_FLAX = ("flax_models", first_screen.DEVICE, "step")
_BLOCK = "block", "4x2048x4096x14336"
_HEAD = ("linear_cross_entropy", _H100, "master", "8192x4096x128256")
_POLICY = ("linear_cross_entropy", _H200, "policy", "8192x4096x151936")
_LOGITS = ("softmax_cross_entropy", _H200, "forward_backward", "8192x128256-bfloat16")
_PACKED = ("attention", _H200, "forward_backward", "1x8192x32x8x128-4documents")
_RING = ("attention", _H100, "forward_backward", "1x32768x32x8x128")
_EXPERTS = ("moe", _H100, "layer", "64x262144x2048x1024-balanced")
_GROUPED = ("moe", _H100, "forward", "8x32768x4096x14336-balanced")
_INPUT = ("offload", _H100, "input", "input-16x16384x4096x14336")
_HIDDEN = ("offload", _H100, "hidden", "hidden-16x16384x4096x14336")
_MUON = ("muon", _H200, "step", "8b-8x1x8192")
_MIXTURE = ("step", _H200, "step", "qwen3-30b-a3b-4x1x8192-4microbatches")
_SHARE = ("moe", _H200, "share", "128x262144x2048x768-balanced")
_TOKEN = ("generate", _H200, "token", "8b-1x512+128")
_GATHER = ("collective_matmul", _H200, "all_gather_matmul", "16384x4096x14336")
_BEST, _USERS, _PLAIN = "te_jax_block_fp8_head", "nnx_loss", "plain JAX, bfloat16"
FIRST = (
    ("train step of Llama 3 8B, all 32 layers, logits and gradients in FP8", "1 × H200", _WHOLE,
     "te_jax_block_fp8_logits", "bf16", _PLAIN),
    ("… with FSDP, gradients in FP8", "4 × H200", _DEEP, _BEST, "torch_fsdp2", "PyTorch's FSDP2, bfloat16"),
    ("train step, 8 layers of Llama 3 8B, 4 × 2048 tokens, both with layers in FP8 and a bfloat16 head", "1 × H200",
     _SHORT, "te_jax_block", "flax_fp8", "Flax's FP8"),
    ("attention with gradients, 4 documents in 8192 tokens, bfloat16", "1 × H200", _PACKED, "te_jax", "torch",
     "PyTorch's varlen_attn"),
    ("output head and GRPO's loss with gradients, vocabulary 151936, gradients in FP8", "1 × H200", _POLICY,
     "te_jax_fp8_backward", "optax", "jnp and optax, bfloat16"),
)  # fmt: skip
"""The rows of the first screen, like for like: gradients in the same precision, or the row says in which they are.

Each is: what, where, (family, device, operation, case), implementation, peer, and the peer in words.
"""

GAINS = (
    *FIRST,
    ("", "", _POLICY, "te_jax_fp8_backward", "maxtext_tiling", "chunks of tokens in plain JAX, bfloat16"),
    ("train step, 8 layers of Llama 3 8B, 8192 tokens, gradients in FP8", "1 × H100", _STEP, _BEST, "bf16", _PLAIN),
    ("", "", _STEP, _BEST, "flax_fp8", "Flax's FP8, its head in bfloat16"),
    ("… with Adam's moments in float32, as the peers have them", "", _STEP, "te_jax_block_float32_moments", "bf16",
     _PLAIN),
    ("… of a plain Flax NNX model, after three changes", "1 × H200", (*_FLAX, first_screen.CASE), _USERS, "nnx",
     "the model before"),
    ("… after six", "", (*_FLAX, first_screen.CASE), "nnx_attention", "nnx", "the model before"),
    ("", "", (*_FLAX, "8b-8x4x2048"), "nnx_attention", "nnx", "the model before, 4 × 2048 tokens"),
    ("the same step with FSDP and recomputation", "2 × H100", _FSDP, _BEST, "bf16", _PLAIN),
    ("", "", _FSDP, _BEST, "torch_fsdp2", "PyTorch's FSDP2, bfloat16"),
    ("… of the NNX model, after the same changes", "", _FSDP, _USERS, "bf16", _PLAIN),
    ("the step of Llama 3 8B with all 32 layers, FSDP", "4 × H200", _DEEP, _BEST, "bf16", _PLAIN),
    ("a Llama 3 8B block, 4 × 2048 tokens, gradients in FP8", "1 × H200", ("layer", _H200, *_BLOCK), "te_jax_block",
     "bf16", _PLAIN),
    ("loss and gradient of bfloat16 logits, vocabulary 128256", "1 × H200", _LOGITS, "te_jax", "optax", "optax"),
    ("output head and loss with gradients, vocabulary 128256, bfloat16", "1 × H100", _HEAD, "te_jax", "optax",
     "jnp and optax"),
    ("… gradients in FP8", "", _HEAD, "te_jax_fp8_backward", "optax", "jnp and optax, bfloat16"),
    ("a layer of 64 experts (OLMoE 7B), gradients in FP8", "1 × H100", _EXPERTS, "te_jax_block", "te_jax",
     "te_jax in bfloat16"),
    ("a grouped GEMM of 8 experts in FP8, block scaling", "1 × H100", _GROUPED, "te_jax_block", "te_jax",
     "te_jax in bfloat16"),
    ("", "", _GROUPED, "te_jax_block", "torch", "PyTorch's grouped GEMM, bfloat16"),
    ("one device's share of a layer of 128 experts (Qwen3 30B-A3B) on four, in a buffer for any load", "1 × H200",
     _SHARE, "te_jax_block", "te_jax_block_rows", "te_jax, rows gathered before they are quantized"),
    ("… in a buffer for this load", "", _SHARE, "te_jax_block_even", "te_jax_block",
     "te_jax in a buffer for any load"),
    ("train step, 4 layers of Qwen3 30B-A3B, 4 microbatches of 8192 tokens, gradients in FP8", "", _MIXTURE,
     "te_jax_block", "bf16", "plain JAX, bfloat16, by `lax.ragged_dot`"),
    ("a token of Llama 3 8B after a prompt of 512, bfloat16", "", _TOKEN, "te_jax", "transformers",
     "transformers, with its defaults"),
    ("16 layers in a scan with gradients, their inputs in host memory", "1 × H100", _INPUT, "te_jax_scan", "xla_scan",
     "JAX's offload policy"),
    ("… what each MLP multiplies in host memory, too, bfloat16", "", _HIDDEN, "te_jax_scan", "xla_scan",
     "JAX's offload policy"),
    ("… the same in FP8", "", _HIDDEN, "te_jax_fp8_scan", "xla_scan", "JAX's offload policy, bfloat16"),
    ("a step of Muon, kernels of 8 layers of Llama 3 8B, momentum in bfloat16", "1 × H200", _MUON, "te_jax", "optax",
     "optax's Muon, float32"),
    ("", "", _MUON, "te_jax", "optax_bf16", "optax's Muon, all in bfloat16"),
    ("attention with gradients, 32768 tokens, on two GPUs by ring_attention", "2 × H100", _RING, "te_jax_ring", "jax",
     "jax.nn on one GPU"),
    ("all-gather and GEMM, tensor parallel, bfloat16", "4 × H200", _GATHER, "te_jax", "xla", "XLA"),
    ("", "", _GATHER, "te_jax", "torch", "PyTorch"),
)  # fmt: skip
"""All gains, in the form of `FIRST`."""

WHOLE = (
    ("plain JAX; XLA recomputes some values by itself", "bf16"),
    ("… with the first moment in bfloat16, products with kernels kept", "bf16_dots_mu_bf16"),
    ("… and blocks recomputed from their inputs", "bf16_remat_mu_bf16"),
    ("te_jax: blocks and head in FP8, FlashAttention 3, bfloat16 parameters with int16 remainders, moments in bfloat16",
     "te_jax_block_fp8_logits"),
    ("… with moments in FP8", "te_jax_block_fp8_moments"),
)  # fmt: skip
"""Steps of a whole model: in words, and names of implementations."""

CHANGES = (
    ("the plain model", ""),
    ("1. `convert`", "_convert"),
    ("2. `te_jax.optim.adamw`, moments in bfloat16", "_adam"),
    ("3. `linear_cross_entropy`", "_loss"),
    ("4. all of the head in FP8", "_logits"),
    ("5. bfloat16 parameters with int16 remainders", "_params"),
    ("6. `te_jax.ops.attention`, with FlashAttention 3", "_attention"),
    ("after 3: `TransformerBlock` in the place of the blocks", "_blocks"),
)
"""The changes of the fast step: in words, and in names of implementations. The numbered ones have those before them."""

SHARED = (
    ("plain JAX, bfloat16", "bf16"),
    ("torch's FSDP2, bfloat16", "torch_fsdp2"),
    ("te_jax, blocks and head in FP8", "te_jax_block_fp8_head"),
    ("… with `keep` of all layers", "te_jax_block_fp8_head_keep"),
    ("… with layers that two GPUs share by tensor parallelism", "te_jax_block_fp8_head_tensor"),
    ("a plain NNX model after the changes of the fast step", "nnx_loss"),
)
"""Steps whose parameters devices share: in words, and names of implementations."""


HOSTS = (
    ("plain JAX, bfloat16, FSDP over all GPUs", "bf16"),
    ("te_jax in FP8, FSDP over all GPUs", "te_jax_block_fp8_head"),
    ("te_jax in FP8, FSDP within a host, hosts are replicas (the default)", "te_jax_block_fp8_head_replicas"),
)
"""Layouts over several hosts: in words, and names of implementations."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check all pages and figures; see the module's docstring. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 with a diff where files differ")
    args = parser.parse_args(argv)
    try:
        ages = _ages(ROOT) if args.check else []
        wanted = generate(ROOT)
    except ValueError as error:
        print(f"benchmarks.tables: {error}", file=sys.stderr)
        return 1
    sys.stdout.writelines(ages)
    stale = {path: text for path, text in wanted.items() if _read(path) != text}
    for path, text in stale.items():
        name = path.relative_to(ROOT).as_posix()
        if args.check:
            before, after = (each.splitlines(keepends=True) for each in (_read(path), text))
            sys.stdout.writelines(difflib.unified_diff(before, after, name, f"{name} (from the results)"))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    if args.check and stale:
        print("Tables or figures differ from benchmarks/results; run: python -m benchmarks.tables", file=sys.stderr)
        return 1
    return 0


def generate(root: Path) -> dict[Path, str]:
    """What README.md, docs/**/*.md, their figures and the pages of results should hold, by path, in a checkout.

    Raises:
      ValueError: a marker has no partner, is misspelled, or names figures that a result file does not have.
    """
    wanted = {
        results.with_suffix(".md"): results_page(json.loads(results.read_text(encoding="utf-8")))
        for results in sorted((root / "benchmarks" / "results").glob("*/*.json"))
    }
    for page in (root / "README.md", *sorted((root / "docs").glob("**/*.md"))):
        text = _read(page)
        if not _MARKER.search(text):
            continue
        if len(_MARKER.findall(text)) != 2 * sum(len(kind.findall(text)) for kind in (_PLACE, _RATIO, _OWN)):
            raise ValueError(
                f"{page.relative_to(root)} has a marker without its partner, or one that is no summary, figure, "
                "ratio or table of this module"
            )
        text = _OWN.sub(
            lambda place, page=page: place["open"] + _TABLES[place["kind"]](root, page.parent) + place["close"], text
        )
        text = _RATIO.sub(lambda place: f"{place['open']}{_times(place, root)}{place['close']}", text)
        wanted[page] = _PLACE.sub(lambda place, page=page: _filled(place, page.parent, root, wanted), text)
        results = _results(root, *reversed(_FLAX[:2]))
        if "<!-- first_figure -->" in text and results.is_file():
            wanted[root / _FIGURE] = first_screen.two_panels(json.loads(results.read_text(encoding="utf-8")))
    return wanted


def _ages(root: Path) -> list[str]:
    """A line on the age of each result that README.md shows.

    Raises:
      ValueError: one was measured with local changes.
    """
    text = _read(root / "README.md")
    shown: dict[str, tuple[str, ...]] = {}
    if "<!-- first_figure -->" in text:
        shown["the figure"] = *_FLAX, first_screen.CASE
    shown |= {what: (*place, ours) for what, _, place, ours, *_ in FIRST if "<!-- first_rows -->" in text}
    for place in _PLACE.finditer(text):
        shown[place["open"].strip()] = place["family"], place["device"]
    for place in _RATIO.finditer(text):
        shown[place["open"].strip()] = place.group("family", "device", "operation", "case", "implementation")
    lines = []
    for what, (family, device, *of_rows) in shown.items():
        results = _results(root, device, family)
        if not results.is_file():
            continue
        document = json.loads(results.read_text(encoding="utf-8"))
        keys = ("operation", "case", "implementation")[: len(of_rows)]
        runs = [run_of(document, row) for row in document["rows"] if [row[key] for key in keys] == of_rows]
        if any(run["dirty"] for run in runs):
            raise ValueError(
                f"README.md shows {what}, and {results.relative_to(root)} was measured with local changes: commit and "
                "measure again, or show it in docs/benchmarks.md alone"
            )
        lines.append(f"README.md, {what}: {first_screen.age(root, min(runs, key=lambda run: run['date']))}\n")
    return lines


def _times(place: re.Match[str], root: Path) -> str:
    """The number of a `ratio`: how many times the implementation's figure goes into the peer's."""
    if place.string[: place.start()].endswith("\n"):
        raise ValueError(f"{place['open']} begins a line, and Markdown ends the paragraph there: move a word before it")
    results, figure = _results(root, place["device"], place["family"]), place["figure"] or "median_ms"
    if not results.is_file():
        return "(not measured yet)"
    document = json.loads(results.read_text(encoding="utf-8"))
    ours, theirs = _both(document, place["operation"], place["case"], place["implementation"], place["peer"])
    if not ours.get(figure) or not theirs.get(figure):
        raise ValueError(f"{results.relative_to(root)} has no {figure} of both in {place['open']}")
    return f"{_speed(ours, theirs) if figure == 'median_ms' else theirs[figure] / ours[figure]:.2f}×"


def _both(
    document: dict[str, Any], operation: str, case: str, implementation: str, peer: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rows of an implementation and of its peer; empty where there is none."""
    of = {
        row["implementation"]: row for row in document["rows"] if (row["operation"], row["case"]) == (operation, case)
    }
    return of.get(implementation, {}), of.get(peer, {})


def _speed(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """How many times as fast a row is as its peer in the same run, where the row of a file may be of another one."""
    if ours.get("run") == theirs.get("run"):
        return theirs["median_ms"] / ours["median_ms"]
    try:
        return ours["speedup_over"][theirs["implementation"]]
    except KeyError:
        names = ours["implementation"], theirs["implementation"]
        raise ValueError(f"no run of {ours['case']} has {' and '.join(names)}") from None


def _results(root: Path, device: str, family: str) -> Path:
    return root / "benchmarks" / "results" / device / f"{family}.json"


def first_figure(root: Path, page_folder: Path) -> str:
    """The figure of the first screen, which `generate` draws."""
    family, device, _ = _FLAX
    if not _results(root, device, family).is_file():
        return f"Not measured yet on {device}: run `te-jax bench {family}` there.\n"
    return f"![{first_screen.LABEL}: speed and memory]({_relative(root / _FIGURE, page_folder)})\n"


def gains_table(root: Path, page_folder: Path, gains: Sequence[Any]) -> str:
    """Rows of `GAINS`, with the memory of steps: XLA's plan of arguments, results and temporaries; torch's peak."""
    body = []
    for what, where, (family, device, operation, case), implementation, peer, words in gains:
        results = _results(root, device, family)
        if not results.is_file():
            continue
        document = json.loads(results.read_text(encoding="utf-8"))
        ours, theirs = _both(document, operation, case, implementation, peer)
        if not ours or not theirs:
            raise ValueError(
                f"{results.relative_to(root)} has no median_ms of both {implementation} and {peer}, {case}"
            )
        held, held_by_peer = ours.get("peak_bytes"), theirs.get("peak_bytes")
        link = f"[{words}]({_relative(results.with_suffix('.md'), page_folder)})"
        saved = f"{held / held_by_peer:.2f}×" if held and held_by_peer else ""
        run, times = run_of(document, ours), _speed(ours, theirs)
        measured = run["date"][:10] + (" with local changes" if run["dirty"] else "")
        body.append([what, where, link, f"**{times:.2f}×**", saved, measured])
    return _markdown_table(["", "GPU", "compared with", "speed", "memory", "measured"], body, left=3)


def whole_table(root: Path, page_folder: Path) -> str:
    """Time, tokens and memory of a step of a model with all of its layers on one GPU, of one microbatch and of four."""
    results = [_results(root, _H200, family) for family in ("whole_model", "whole_model_4microbatches")]
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in results]
    one, four = ({row["implementation"]: row for row in document["rows"]} for document in documents)
    body = []

    without_memory = {each["implementation"] for each in documents[1]["skipped"] if "Out of memory" in each["reason"]}

    def tokens_and_memory(row: dict[str, Any] | None, name: str) -> tuple[str, str]:
        if row:
            return f"{row['tokens_per_second']:,.0f}", f"{row['peak_bytes'] / 1e9:.1f}"
        return "out of memory" if name in without_memory else "", ""

    for words, name in WHOLE:
        row = one[name]
        speed = f"{_speed(row, one['bf16']):.2f}×"
        body.append(
            [
                words,
                f"{row['median_ms']:.1f}",
                speed,
                *tokens_and_memory(row, name),
                *tokens_and_memory(four.get(name), name),
            ]
        )
    headings = ["", "ms", "as fast", "tokens/s", "GB", "4 microbatches: tokens/s", "GB"]
    links = (f"[All rows]({_relative(path.with_suffix('.md'), page_folder)})" for path in results)
    return "\n".join(
        [
            _markdown_table(headings, body, left=1),
            *(f"{link}. {provenance(of)}\n" for link, of in zip(links, documents, strict=True)),
        ]
    )


def changes_table(root: Path, page_folder: Path) -> str:
    """What each of `CHANGES` makes of the time and the memory of a step."""

    def milliseconds(row: dict[str, Any], plain: dict[str, Any]) -> str:
        return f"{row['median_ms']:.1f}"

    def times(row: dict[str, Any], plain: dict[str, Any]) -> str:
        return f"{_speed(row, plain):.2f}×"

    def memory(row: dict[str, Any], plain: dict[str, Any]) -> str:
        return f"{row['peak_bytes'] / 1e9:.1f}"

    columns = (
        ("NNX, ms", "8b-8x1x8192", milliseconds),
        ("speed", "8b-8x1x8192", times),
        ("GB", "8b-8x1x8192", memory),
        ("4 × 2048 tokens", "8b-8x4x2048", times),
    )
    return _of_changes(root, page_folder, columns)


def waiting_table(root: Path, page_folder: Path) -> str:
    """What a step takes if the host reads each loss before it begins the next step."""

    def of(figure: str) -> Any:
        return lambda row, plain: f"{row[figure]:.1f}" if figure in row else None

    case = "8b-8x1x8192"
    columns = (
        ("ms: no loss is waited for", case, of("median_ms")),
        ("each is, `nnx.jit`", case, of("waited_jit_ms")),
        ("`nnx.cached_partial`", case, of("waited_cached_ms")),
        ("split once, `jax.jit`", case, of("waited_split_ms")),
    )
    return _of_changes(root, page_folder, columns)


def _of_changes(root: Path, page_folder: Path, columns: Sequence[tuple[str, str, Any]]) -> str:
    """A line for each of `CHANGES` with all figures of the first case; columns: a heading, a case, and its figure."""
    family, device, operation = _FLAX
    results = _results(root, device, family)
    if not results.is_file():
        return f"Not measured yet on {device}: run `te-jax bench {family}` there.\n"
    document = json.loads(results.read_text(encoding="utf-8"))
    rows = {(row["case"], row["implementation"]): row for row in document["rows"] if row["operation"] == operation}
    body = []
    for words, change in CHANGES:
        pairs = [(rows.get((case, "nnx" + change)), rows.get((case, "nnx"))) for _, case, _ in columns]
        found = [None if None in pair else column[2](*pair) for column, pair in zip(columns, pairs, strict=True)]
        if all(
            figure is not None or case != columns[0][1] for figure, (_, case, _) in zip(found, columns, strict=True)
        ):
            body.append([words, *(figure or "" for figure in found)])
    table = _markdown_table(["", *(heading for heading, *_ in columns)], body, left=1)
    link = _relative(results.with_suffix(".md"), page_folder)
    return f"{table}\n[All rows]({link}). {provenance(document)}\n"


def shared_table(root: Path, page_folder: Path) -> str:
    """Time and memory of `SHARED` on two H100s; and speeds, also with microbatches and on four H200s."""
    small, deep = (_results(root, device, "fsdp") for device in ("nvidia-h100-80gb-hbm3", "nvidia-h200"))
    documents = [json.loads(results.read_text(encoding="utf-8")) for results in (small, deep)]
    rows = {(row["case"], row["implementation"]): row for document in documents for row in document["rows"]}
    first, microbatches, layers = "8b-8x2x8192-remat", "8b-8x2x8192-4microbatches-remat", "8b-32x4x8192-remat"

    def speed(case: str, name: str) -> str:
        row = rows.get((case, name))
        return f"{_speed(row, rows[case, 'bf16']):.2f}×" if row else ""

    body = []
    for words, name in SHARED:
        row = rows[first, name]
        figures = f"{row['median_ms']:.1f}", speed(first, name), f"{row['peak_bytes'] / 1e9:.1f}"
        body.append([words, *figures, speed(microbatches, name), speed(layers, name)])
    table = _markdown_table(["", "ms", "speed", "GB", "4 microbatches", "32 layers, 4 × H200"], body, left=1)
    links = (f"[All rows]({_relative(results.with_suffix('.md'), page_folder)})" for results in (small, deep))
    return "\n".join([table, *(f"{link}. {provenance(of)}\n" for link, of in zip(links, documents, strict=True))])


def hosts_table(root: Path, page_folder: Path) -> str:
    """What compiled steps of `HOSTS` hold and exchange."""
    del page_folder
    document = json.loads((root / "benchmarks" / "results" / "compiled.json").read_text(encoding="utf-8"))
    programs = {program["name"]: program for program in document["programs"]}

    def gibibytes(program: dict[str, Any], *names: str) -> str:
        return f"{sum(each['size'] for each in program['collectives'] if each['name'] in names) / 2**30:.2f}"

    body = []
    for words, name in HOSTS:
        program = programs[name]
        exchanged = (gibibytes(program, kind) for kind in ("all-gather", "reduce-scatter", "all-reduce"))
        body.append([words, f"{program['peak'] / 2**30:.1f}", *exchanged, f"{program['launches']}"])
    table = _markdown_table(["", "GiB a GPU", "gathered", "scattered", "summed", "launches"], body, left=1)
    where = f"{document['devices']} × H100 of {document['hosts']} hosts, `{document['case']}`, jax {document['jax']}"
    changed = " with local changes" if document["dirty"] else ""
    return f"{table}\n{where}; commit {document['commit'][:12]}{changed}; {document['date'][:10]}.\n"


def errors_table(root: Path, page_folder: Path) -> str:
    """Relative errors of an FP8 layer's result and gradients for each recipe."""
    device, case = "nvidia-h100-80gb-hbm3", "8192x14336x4096"
    results = _results(root, device, "dense")
    if not results.is_file():
        return f"Not measured yet on {device}: run `te-jax bench dense` there.\n"
    document = json.loads(results.read_text(encoding="utf-8"))
    body = [
        [f"`{row['implementation']}`", *(f"{row[error]:.4f}" for error in ("y_error", "dx_error", "dkernel_error"))]
        for row in document["rows"]
        if (row["operation"], row["case"]) == ("forward_backward", case) and "dx_error" in row
        if not row["implementation"].endswith(("_split", "_once"))  # whose errors are the same, but for 0.0001
    ]
    table = _markdown_table([case, "y", "dx", "dkernel"], body, left=1)
    link = _relative(results.with_suffix(".md"), page_folder)
    return f"{table}\n[All rows]({link}). {provenance(document)}\n"


_TABLES = {
    "first_figure": first_figure,
    "first_rows": lambda root, page_folder: gains_table(root, page_folder, FIRST),
    "gains": lambda root, page_folder: gains_table(root, page_folder, GAINS),
    "whole": whole_table,
    "changes": changes_table,
    "waiting": waiting_table,
    "shared": shared_table,
    "hosts": hosts_table,
    "errors": errors_table,
}


def _filled(place: re.Match[str], page_folder: Path, root: Path, wanted: dict[Path, str]) -> str:
    """A place with its content. Adds the figure, if it shows one, to `wanted`."""
    family, device = place["family"], place["device"]
    if family == "accuracy":
        return f"{place['open']}{_losses(place['kind'], device, page_folder, root, wanted)}{place['close']}"
    results = _results(root, device, family)
    if not results.is_file():
        content = f"Not measured yet on {device}: run `te-jax bench {family}` there.\n"
    else:
        document = json.loads(results.read_text(encoding="utf-8"))
        if place["kind"] == "figure":
            figure = root / "docs" / "images" / f"{family}-{device}.svg"
            wanted[figure] = bar_chart(document)
            content = f"![{document['headline']['label']}]({_relative(figure, page_folder)})\n"
        else:
            content = summary_table(document)
    return f"{place['open']}{content}{place['close']}"


def _losses(kind: str, device: str, page_folder: Path, root: Path, wanted: dict[Path, str]) -> str:
    """The tables or the figure of the training runs of `benchmarks.accuracy`."""
    runs = accuracy_curves.load(root / "benchmarks" / "results" / device / "accuracy")
    if not runs:
        return f"Not measured yet on {device}: run `python -m benchmarks.accuracy` there.\n"
    if kind == "figure":
        figure = root / "docs" / "images" / f"accuracy-{device}.svg"
        wanted[figure] = accuracy_curves.curves(runs)
        return f"![{accuracy_curves.LABEL}]({_relative(figure, page_folder)})\n"
    parts = []
    for name in ("training", "validation"):
        headings, rows = accuracy_curves.table(runs, f"final_{name}")
        parts.append(_markdown_table([f"{name} loss", *headings[1:]], rows, left=1))
    return "\n".join([*parts, accuracy_curves.sentences(runs), f"{provenance(next(iter(runs.values())))}\n"])


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


# Markdown


def results_page(document: dict[str, Any]) -> str:
    """Every row of a result file, in a Markdown table for each operation, with a line on where it was measured."""
    operations = list(dict.fromkeys(row["operation"] for row in document["rows"]))
    device = document["device"]
    where = "CPU" if device["platform"] == "cpu" else device["kind"]
    parts = [
        f"# {document['family']}, {where}\n",
        f"Generated from {document['family']}.json. Columns and implementations are explained in "
        "[Benchmarks](../../../docs/benchmarks.md).\n",
        f"{provenance(document)}\n",
    ]
    for operation in operations:
        rows = [row for row in document["rows"] if row["operation"] == operation]
        peers = list(dict.fromkeys(peer for row in rows for peer in row["speedup_over"]))
        columns = [column for column in columns_of(rows) if column.key != "breakdown_ms"]
        headings = ["case", "implementation", "ms", "IQR, ms", *(column.heading for column in columns)]
        headings += [f"{peer} ÷ it" for peer in peers]
        body = [
            [
                row["case"],
                f"`{row['implementation']}`",
                f"{row['median_ms']:.3f}",
                f"{row['spread']['iqr_ms']:.3f}",
                *(cell(row, column) for column in columns),
                *(_ratio(row["speedup_over"].get(peer)) for peer in peers),
            ]
            for row in rows
        ]
        parts.append(f"## {operation}\n\n{_markdown_table(headings, body, left=2)}")
        if any(row.get("breakdown_ms") for row in rows):
            parts.append(f"GPU time by kind, ms:\n\n{_times_by_kind(rows)}")
    if document["skipped"]:
        lines = dict.fromkeys(
            f"- {entry['case']}, {entry['operation']}, `{entry['implementation']}`: {entry['reason']}\n"
            for entry in document["skipped"]
        )
        parts.append("## Not measured\n\n" + "".join(lines))
    return "\n".join(parts)


def _times_by_kind(rows: Sequence[dict[str, Any]]) -> str:
    """A table of its own: nine numbers do not fit into a column."""
    profiled = [(row, row["breakdown_ms"]) for row in rows if row.get("breakdown_ms")]
    kinds = [kind for kind in profiled[0][1] if any(times.get(kind, 0) >= 0.05 for _, times in profiled)]
    body = [
        [row["case"], f"`{row['implementation']}`", *(f"{times.get(kind, 0):.1f}" for kind in kinds)]
        for row, times in profiled
    ]
    return _markdown_table(["case", "implementation", *kinds], body, left=2)


def summary_table(document: dict[str, Any]) -> str:
    """The headline figure: a line for each case, a column for each implementation, with a line on its provenance."""
    headline = document["headline"]
    cases, implementations, value = _headline_values(document)
    body = [
        [case, *(_ratio(value.get((case, implementation))) for implementation in implementations)] for case in cases
    ]
    headings = ["case", *(f"`{implementation}`" for implementation in implementations)]
    return f"{headline['label']}.\n\n{_markdown_table(headings, body, left=1)}\n{provenance(document)}\n"


def provenance(document: dict[str, Any]) -> str:
    """One line: device, driver, versions, commit and date of a result file, and of rows that are of another commit."""
    software = ("jax", "optax", "torch", "flash-attn3-jax", "dew-flash-attn-cu13", "cuBLAS", "cuDNN")
    versions = ", ".join(f"{name} {document['versions'][name]}" for name in software if name in document["versions"])
    device = document["device"]
    on_gpu = f"{device['kind']}, driver {device['driver'] or 'unknown'}"
    where = f"CPU: {device['host']}" if device["platform"] == "cpu" else on_gpu
    return f"{where}; {versions}; {_of_run(run_of(document, {}))}.{_of_others(document)}"


def _of_others(document: dict[str, Any]) -> str:
    """A sentence for each other run that rows are of: their cases, with implementations where others are not of it."""
    runs: dict[str, dict[str, list[str]]] = {}
    for row in document.get("rows", ()):
        names = runs.setdefault(_of_run(run_of(document, row)), {}).setdefault(row["case"], [])
        names += [row["implementation"]] * (row["implementation"] not in names)
    runs.pop(_of_run(run_of(document, {})), None)
    line = ""
    for run, cases in runs.items():
        of_case = {case: {row["implementation"] for row in document["rows"] if row["case"] == case} for case in cases}
        parts = (
            f"`{case}`" if set(names) == of_case[case] else f"`{case}` by {', '.join(f'`{name}`' for name in names)}"
            for case, names in cases.items()
        )
        line += f" {'; '.join(parts)}: {run}."
    return line


def _of_run(run: dict[str, Any]) -> str:
    changed = " with local changes" if run["dirty"] else ""
    return f"commit {run['commit'][:12]}{changed}; {run['date'][:10]}"


def _headline_values(document: dict[str, Any]) -> tuple[list[str], list[str], dict[tuple[str, str], float]]:
    """Cases and implementations that the headline has figures for, in order, and the figures.

    They are of the first operation measured, where the headline's was not.
    """
    headline, rows = document["headline"], document["rows"]
    operations = [row["operation"] for row in rows]
    operation = headline["operation"] if headline["operation"] in operations else operations[0]
    value = {
        (row["case"], row["implementation"]): row[headline["figure"]]
        for row in rows
        if row["operation"] == operation and row["implementation"] in headline["implementations"]
        if headline["figure"] in row  # which a ratio is not where what it compares with was not measured
    }
    cases = list(dict.fromkeys(case for case, _ in value))
    measured = {implementation for _, implementation in value}
    return cases, [name for name in headline["implementations"] if name in measured], value


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> str:
    """A Markdown table whose first `left` columns are flush left and the others flush right."""
    rule = ["---" if index < left else "---:" for index in range(len(headings))]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (headings, rule, *rows))


# The figure

_WIDTH, _MARGIN, _LABELS, _BAR, _GAP, _GROUP_GAP, _TOP = 720, 16, 200, 16, 4, 18, 44
# White ground: an image does not know whether the page around it is dark, only whether the system is.
_STYLE = (
    "svg{background:#fff}text{font:13px system-ui,sans-serif;fill:#24292f;stroke:#fff;stroke-width:3px}"
    "text{paint-order:stroke}.title,.case{font-weight:600}.small{font-size:11px}.te{fill:#0969da}.peer{fill:#8c959f}"
    ".axis{stroke:#8c959f}.one{stroke-dasharray:3}"
)


def bar_chart(document: dict[str, Any]) -> str:
    """The headline figure, a multiple, as an SVG: horizontal bars for each case, shorter is better, and a line at 1.

    Written without a plotting library, so that the same results give the same bytes everywhere and `--check` can
    compare them.
    """
    headline = document["headline"]
    cases, implementations, value = _headline_values(document)
    scale = (_WIDTH - _LABELS - 70) / max([1.0, *value.values()])
    shapes = [f'<text class="title" x="0" y="18">{escape(headline["label"])} (shorter is better)</text>']
    y = _TOP
    for case in cases:
        shapes.append(f'<text class="case" x="0" y="{y + 13}">{escape(case)}</text>')
        y += 22
        top, bars = y, []
        for implementation in implementations:
            ratio = value.get((case, implementation))
            if ratio is None:
                continue
            style = "te" if implementation.startswith("te_jax") else "peer"
            width = ratio * scale
            bars.append(
                f'<text x="{_LABELS - 8}" y="{y + 13}" text-anchor="end">{escape(implementation)}</text>'
                f'<rect class="{style}" x="{_LABELS}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="2"/>'
                f'<text x="{_LABELS + width + 6:.1f}" y="{y + 13}">{ratio:.2f}</text>'
            )
            y += _BAR + _GAP
        shapes += [
            f'<line class="{style}" x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{y - _GAP}"/>'
            for style, x in (("axis", _LABELS), ("axis one", _LABELS + scale))
        ]
        shapes += bars  # over the lines
        y += _GROUP_GAP
    device, _, software = provenance({**document, "rows": ()}).partition("; ")
    shapes += [
        f'<text class="small" x="0" y="{y + line}">{escape(text)}</text>'
        for line, text in ((4, device), (20, software))
    ]
    width, height = _WIDTH + 2 * _MARGIN, y + 20 + 2 * _MARGIN
    body = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{-_MARGIN} {-_MARGIN // 2} {width} {height}" '
        f'width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(headline["label"], {chr(34): "&quot;"})}">\n'
        f"<style>{_STYLE}</style>\n{body}\n</svg>\n"
    )


if __name__ == "__main__":
    sys.exit(main())
