"""Who waits for whom in the collective products' own calls, on simulated devices under ThreadSanitizer."""

import pytest
import sanitizer

SOURCES = (sanitizer.ROOT / "cuda_ext/collective_gemm").glob("shared_*.cc")


@pytest.fixture(scope="module")
def simulation(tmp_path_factory):
    return sanitizer.built(tmp_path_factory.mktemp("protocol"), "tests/parallel/protocol_test.cc", *SOURCES)


def test_nothing_is_read_or_written_out_of_order(simulation, rng):
    """Random calls, of which some fail on one device, and to some one does not come."""
    sanitizer.run(simulation, 60, rng)
