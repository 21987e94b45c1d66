"""Every pair of options of `te-jax train`: a run that begins with it, or one sentence that says why there is none.

Rows of options are drawn such that each pair of values is in one of them at least. A row is planned as the command does
it, and its steps are traced with the shapes and shardings of a run; XLA compiles nothing.
"""

import argparse
import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from parameters import covering_rows, drawn, parts

from te_jax.cli import _options, _plan, _step
from te_jax.cli._text import Tokens
from te_jax.cli.errors import UserError
from te_jax.cli.main import main
from te_jax.models import PRESETS, Lora, init, split_adapters, to_hf, to_peft
from te_jax.models.config import ATTENTION

pytestmark = pytest.mark.usefixtures("as_in_a_process_of_its_own", "_eight_cpus")

# Kernels that FSDP gathers, in parts that are whole blocks.
DENSE = dataclasses.replace(
    PRESETS["tiny"], num_layers=1, hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=128, mlp_size=512
)
CONFIGS = {"dense": DENSE, "experts": dataclasses.replace(DENSE, experts=PRESETS["moe"].experts)}
BATCH, SEQ_LEN = 16, 512

TENSOR = ("--devices 2 --tp 2", *(f"--devices 4 --{name} 2 --tp 2" for name in ("fsdp", "cp", "replicas")))
NO_TENSOR = (
    *("--devices 1", "--devices 2 --fsdp 2", "--devices 2 --cp 2", "--devices 2 --replicas 2"),
    *("--devices 4 --replicas 2 --fsdp 2", "--devices 8"),
)
OPTIONS = {
    "model": ("--from dense", "--from experts", "--preset tiny", "--preset moe"),
    "mesh": (*NO_TENSOR, *TENSOR),
    "recipe": tuple(f"--recipe {name}" for name in _options.RECIPES),
    "head": tuple(f"--head-recipe {name}" for name in _options.RECIPES if name != "delayed"),
    "logits": ("", "--fp8-logits"),
    "optimizer": ("", "--optimizer muon"),
    "state": tuple(f"--optimizer-state {name}" for name in _options.STATE_DTYPES),
    "remat": ("", "--remat", "--remat attention"),
    "parameters": ("", "--parameters float32"),  # auto is bfloat16 here
    "offload": ("", "--offload activations", "--offload optimizer", "--offload activations,optimizer"),
    "compare": ("", "--compare"),
    "statistics": ("", "--statistics 1"),
    "microbatches": ("", "--microbatches 2"),
    "pack": ("", "--pack"),
    "lora": ("", "--lora 4", "--lora peft"),
    "transport": ("", "--transport xla", "--transport ring", "--transport p2p"),
    "implementation": ("", "--implementation native", "--implementation xla", "--implementation reference"),
    "dtype": ("--dtype auto", "--dtype float32"),  # auto is bfloat16 here
    "deterministic": ("", "--deterministic"),
    "clip": ("", "--clip-norm 0"),
}
_TRANSPORTS = OPTIONS["transport"][1:]
_LORA = OPTIONS["lora"][1:]
_WITH_EXPERTS = ("--from experts", "--preset moe")
_WITHOUT = {"recipe": ("--recipe none",), "head": ("--head-recipe none",)}
_XLA = ("--implementation xla",)

REFUSED = [
    ({"remat": ("--remat attention",), "deterministic": ("--deterministic",)}, "leave the word attention out"),
    ({"model": ("--preset tiny", "--preset moe"), "lora": _LORA}, "add --from DIR"),
    ({"mesh": TENSOR, "lora": _LORA}, "choose --fsdp in the place of --tp"),
    ({"mesh": TENSOR, "recipe": ("--recipe mxfp8",)}, "choose current, rowwise or block, or --fsdp in the place"),
    ({"model": _WITH_EXPERTS, "recipe": ("--recipe delayed",)}, "choose block, current, rowwise or none"),
    ({"head": ("--head-recipe none",), "logits": ("--fp8-logits",)}, "add --head-recipe"),
    ({**_WITHOUT, "statistics": ("--statistics 1",)}, "has nothing to show"),
    ({"model": _WITH_EXPERTS, **_WITHOUT, "state": ("--optimizer-state f32",), "compare": ("--compare",)},
     "add --recipe, --head-recipe or --optimizer-state"),
    ({"mesh": NO_TENSOR, "transport": _TRANSPORTS}, "add --tp N"),
    (
        {"transport": ("--transport p2p",), "implementation": ("--implementation xla", "--implementation reference")},
        "leave one of them out",
    ),
    # Of a CPU:
    *(
        ({name: (f"{option} mxfp8",), "implementation": ("--implementation native",)}, "no native kernel")
        for name, option in (("recipe", "--recipe"), ("head", "--head-recipe"))
    ),
    *(
        ({name: (f"{option} rowwise", f"{option} block"), "implementation": _XLA}, "XLA")
        for name, option in (("recipe", "--recipe"), ("head", "--head-recipe"))
    ),
    ({"model": _WITH_EXPERTS, "recipe": ("--recipe current", "--recipe mxfp8"), "implementation": _XLA},
     "XLA has no FP8 product of groups of rows"),
]  # fmt: skip
"""Values that do not go together, and words of the sentence that says so."""

_IMPLIED = [
    {"lora": _LORA, "transport": _TRANSPORTS},
    {"recipe": ("--recipe mxfp8",), "transport": _TRANSPORTS},
]


@pytest.fixture(scope="module", autouse=True)
def _models(tmp_path_factory):
    """Presets and folders of small models, and a text, in the working folder."""
    root = tmp_path_factory.mktemp("pairs")
    (root / "text").mkdir()
    for number in range(24):
        (root / "text" / f"{number}.txt").write_text(f"This is document {number}. " * 60)
    rng = np.random.default_rng(0)
    with pytest.MonkeyPatch.context() as patch:
        for preset, name in (("tiny", "dense"), ("moe", "experts")):
            shapes = jax.eval_shape(functools.partial(init, CONFIGS[name]), jax.random.key(0))
            params = jax.tree.map(lambda x: (0.05 * rng.standard_normal(x.shape)).astype(np.float32), shapes)
            to_hf(root / name, CONFIGS[name], params, dtype="bfloat16")
            patch.setitem(PRESETS, preset, CONFIGS[name])
        adapted = dataclasses.replace(DENSE, lora=Lora(4, names=ATTENTION))
        to_peft(root / "peft", adapted, jax.jit(lambda: split_adapters(init(adapted, jax.random.key(0)))[0])())
        patch.chdir(root)
        yield


@pytest.fixture
def _eight_cpus(require_devices):
    require_devices(8)
    if jax.default_backend() != "cpu":
        pytest.skip("what a GPU refuses depends on the GPU")


def arguments(row):
    """The command line of a row."""
    return f"--text text --batch {BATCH} --seq-len {SEQ_LEN} {' '.join(row.values())}".split()


def plan_of(row):
    parser = argparse.ArgumentParser()
    _options.add_arguments(parser)
    return _plan.decide(_options.resolve(parser.parse_args(arguments(row)), None))[0]


def trace(row):
    """Traces what a run of these options calls, but for validations."""
    plan = plan_of(row)
    count = plan.options.memory.microbatches

    def windows(dtype):
        shape = count, BATCH // count, SEQ_LEN + 1
        return jax.ShapeDtypeStruct(shape, dtype, sharding=plan.placement.windows)

    batch = Tokens(windows(np.uint8), windows(bool) if plan.options.data.pack else None)
    for model in plan.models:
        learner, state = begun(plan, model)
        watched = plan.options.output.statistics and model is plan.models[0]
        step = learner.step_with_statistics if watched else learner.step
        assert _types(jax.eval_shape(step, state, batch)[0]) == _types(state)


def begun(plan, model):
    """The functions of a run and the types of its state, which are those of all ways to make one."""
    learner = _step.build_learner(plan, model)
    state = learner.abstract_state()
    if plan.options.model.lora is not None:
        own = [state.params] if isinstance(plan.options.model.lora, str) else []
        begun = jax.eval_shape(learner.begin, learner.params, *own)
        restored = jax.eval_shape(learner.resumed, learner.stored(state), learner.params)
        assert _types(begun) == _types(restored) == _types(state)
    return learner, state


def _types(state):
    return jax.tree.structure(state), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]


_PARTS = 34  # of the rows, of which `make test` has the first
_WITH_MOST_PAIRS = 16
"""Parts of the first rows, which have 92% of the pairs, and which CI runs; `pytest -m ""` runs all."""


@functools.cache
def rows():
    return covering_rows(OPTIONS, [*_IMPLIED, *(values for values, _ in REFUSED)])


@pytest.mark.parametrize("part", parts(_PARTS, _WITH_MOST_PAIRS))
def test_each_pair_of_options_begins(part):
    faults = {}
    size = -(-len(rows()) // _PARTS)
    for row in rows()[part * size : (part + 1) * size]:
        try:
            trace(row)
        except Exception as error:
            faults[" ".join(arguments(row))] = f"{type(error).__name__}: {error}"
    assert not faults


@pytest.mark.parametrize("recipe", _options.RECIPES)
def test_adapters_in_bfloat16_beside_kernels_that_are_quantized_once(recipe):
    plan = plan_of({"model": "--from dense", "lora": "--lora 4", "recipe": f"--recipe {recipe}", "mesh": "--devices 1"})
    learner, state = begun(plan, *plan.models)
    assert all(leaf.dtype == "bfloat16" for leaf in jax.tree.leaves((state.frozen["final_norm"], learner.params)))
    assert all(leaf.dtype == "float32" for leaf in jax.tree.leaves(state.params))


@pytest.mark.parametrize(("values", "words"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_does_not_go_together_is_refused_by_the_names_of_its_options(values, words):
    for row in (dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())):
        begun = {"model": "--from dense", "mesh": TENSOR[0] if "transport" in row else NO_TENSOR[0]} | row
        with pytest.raises(UserError) as raised:
            plan_of(begun)
        sentence = str(raised.value)
        assert words in sentence
        flags = [("--from", "--preset"), ("--tp",), *([value.split()[0]] for value in row.values())]
        assert sum(any(flag in sentence for flag in each) for each in flags) >= 2, sentence


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("place", range(2))
def test_some_of_them_take_a_step(place, tmp_path):
    argv = arguments(drawn(rows(), place))
    print("te-jax train", *argv)
    assert main(["train", *argv, "--steps", "1", "--out", str(tmp_path / "run")]) == 0
