"""The flags of XLA, for this process and for those that tests start."""

import os
import re

import jax

# Compiling for the CPU is most of the time of these tests, and code that runs for microseconds need not be good.
# XLA_FLAGS that name the level, 3 being XLA's own, have their way. Nor is it worth dividing what is compiled.
_LEVEL = "xla_backend_optimization_level"
_COUNT = "xla_force_host_platform_device_count"


def compile_quickly():
    """Before jax starts a backend. Values may differ in their last bits from those of other flags."""
    flags = os.environ.get("XLA_FLAGS", "")
    if os.environ.get("JAX_PLATFORMS") == "cpu" and _LEVEL not in flags:
        flags += f" --{_LEVEL}=0 --xla_cpu_parallel_codegen_split_count=1"
        if jax.__version_info__ < (0, 11):  # later ones have no other emitters
            flags += " --xla_cpu_use_fusion_emitters=false"
        os.environ["XLA_FLAGS"] = flags.strip()


def asks_for_devices():
    return _COUNT in os.environ.get("XLA_FLAGS", "")


def environment_without_devices():
    """For a process that shall ask for its devices itself."""
    flags = re.sub(rf"--{_COUNT}=\S*", "", os.environ.get("XLA_FLAGS", ""))
    return {**os.environ, "XLA_FLAGS": flags}
