"""Which copies the passes of native offload wait for, on the threads of the CPU under ThreadSanitizer."""

import sanitizer

SOURCES = "tests/offload/protocol_test.cc", "cuda_ext/offload/pass.cc", "cuda_ext/offload/cpu.cc"


def test_no_copy_is_missed_or_out_of_order(tmp_path, rng):
    """Several executions run at a time, with random rows, slots and delays, and abandon some passes."""
    sanitizer.run(sanitizer.built(tmp_path, *SOURCES), 60, rng)
