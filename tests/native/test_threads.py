"""What threads of the extensions share: values of devices, and loops whose bodies throw."""

import pytest
import sanitizer


@pytest.mark.parametrize("name", ["thread", "address"])
def test_loops_end_before_their_errors_are_reported_and_devices_have_one_value(name, tmp_path, rng):
    sanitizer.run(sanitizer.built(tmp_path, "tests/native/threads_test.cc", name=name), 1000, rng)
