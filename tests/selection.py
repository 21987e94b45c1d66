"""What `make test` leaves out as whole files."""

import pathlib

_TESTS = pathlib.Path(__file__).parent

# Files that are `slow` as a whole, unless they are named on the command line.
_SLOW = {
    "benchmarks/*_famil*.py",  # each family, with its peers
    "cli/test_train.py",  # trainings
    *("docs/test_examples.py", "conformance/test_golden.py"),
    *("parallel/test_p2p.py", "parallel/test_processes.py", "parallel/test_protocol.py"),
    "offload/test_offload_protocol.py",
}


def is_slow(path):
    """Whether `make test` leaves out this file of tests."""
    return path.is_file() and any(path.relative_to(_TESTS).match(pattern) for pattern in _SLOW)
