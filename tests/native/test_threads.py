"""What threads of the extensions share: loops whose bodies throw."""

import pytest
import sanitizer


@pytest.mark.parametrize("name", ["thread", "address"])
def test_loops_end_before_their_errors_are_reported(name, tmp_path, rng):
    sanitizer.run(sanitizer.built(tmp_path, "tests/native/threads_test.cc", name=name), 1000, rng)
