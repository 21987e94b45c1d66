"""The family of Flax models: every change trains as the plain model does."""

import dataclasses

import jax
import pytest
from parameters import in_turns

from benchmarks import flax_models as family
from benchmarks.harness import QUICK
from benchmarks.shapes import FLAX_MODELS_CPU


@pytest.fixture(autouse=True)
def promotion_as_users_have_it():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize(("library", "case"), in_turns(["nnx", "linen"], FLAX_MODELS_CPU))
def test_changes_train_as_the_plain_model_does(library, case):
    case = dataclasses.replace(case, sequence=32, vocab=128, batch=1, depths=(1,))
    names = [library, *(f"{library}_{change}" for change in ("convert", "loss"))]
    result = family.run_case(case, names, QUICK)
    assert not result.skipped
    assert not result.wrong
    rows = {row["implementation"]: row for row in result.rows}
    assert list(rows) == ["bf16", *names]
    assert rows[f"{library}_loss"][f"time_over_{library}"] > 0
    assert rows["bf16"]["losses"] != rows[f"{library}_convert"]["losses"]
    if library == "nnx" and case.microbatches == 1:
        assert {"waited_jit_ms", "waited_cached_ms", "waited_split_ms"} <= rows["nnx_loss"].keys()
