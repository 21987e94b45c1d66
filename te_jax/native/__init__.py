"""The only door to the compiled extensions: load, register, call.

An operation uses `use_native` to decide, and `call` to run a target on local arrays. Neither knows any operation.
"""

from te_jax.native.call import call, call_in_order, call_once
from te_jax.native.cuda_libraries import versions as cuda_library_versions
from te_jax.native.extension import (
    ExtensionStatus,
    Implementation,
    NativeUnavailableError,
    available,
    compute_capability,
    device_name,
    export_checks,
    extension_module,
    gpu_mixture,
    has_gpu,
    peer_access,
    register,
    runtime_ffi_api,
    status,
    takes,
    use_native,
    validate_implementation,
)

__all__ = [
    "ExtensionStatus",
    "Implementation",
    "NativeUnavailableError",
    "available",
    "call",
    "call_in_order",
    "call_once",
    "compute_capability",
    "cuda_library_versions",
    "device_name",
    "export_checks",
    "extension_module",
    "gpu_mixture",
    "has_gpu",
    "peer_access",
    "register",
    "runtime_ffi_api",
    "status",
    "takes",
    "use_native",
    "validate_implementation",
]
