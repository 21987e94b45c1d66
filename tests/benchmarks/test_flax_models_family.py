"""The family of Flax models: every change trains as the plain model does."""

import dataclasses

import jax
import pytest

from benchmarks import flax_models as family
from benchmarks.harness import QUICK
from benchmarks.shapes import FLAX_MODELS_CPU


@pytest.fixture(autouse=True)
def promotion_as_users_have_it():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("case", FLAX_MODELS_CPU, ids=lambda case: case.name)
@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_every_change_trains_as_the_plain_model_does(library, case, monkeypatch):
    monkeypatch.setattr(family, "_WAITING", ("nnx_loss",) if case.microbatches == 1 else ())
    case = dataclasses.replace(case, sequence=32, vocab=128, batch=1)
    names = [name for name in family.IMPLEMENTATIONS if name.startswith(library)]
    result = family.run_case(case, names, QUICK)
    assert not result.skipped
    assert not result.wrong
    rows = {row["implementation"]: row for row in result.rows}
    assert list(rows) == ["bf16", *names]
    assert rows[f"{library}_loss"][f"time_over_{library}"] > 0
    assert rows["bf16"]["losses"] != rows[f"{library}_convert"]["losses"]
    if library == "nnx" and case.microbatches == 1:
        assert {"waited_jit_ms", "waited_cached_ms", "waited_split_ms"} <= rows["nnx_loss"].keys()
