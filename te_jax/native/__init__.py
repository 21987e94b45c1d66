"""The only door to the compiled extensions: load, register, call, and shard.

An operation uses three things: `use_native` to decide, `call` to run a target on local arrays, and `per_shard` to
say how that call may be split over devices. None of them knows any operation.
"""

from te_jax.native.call import call, result_type, varying_axes, varying_over
from te_jax.native.extension import (
    ExtensionStatus,
    Implementation,
    NativeUnavailableError,
    available,
    compute_capability,
    extension_module,
    has_gpu,
    peer_access,
    register,
    runtime_ffi_api,
    status,
    use_native,
)
from te_jax.native.local_call import INLINE, batched_first
from te_jax.native.rule import axes_of_entry
from te_jax.native.sharding import per_shard, split_as_last

__all__ = [
    "INLINE",
    "ExtensionStatus",
    "Implementation",
    "NativeUnavailableError",
    "available",
    "axes_of_entry",
    "batched_first",
    "call",
    "compute_capability",
    "extension_module",
    "has_gpu",
    "peer_access",
    "per_shard",
    "register",
    "result_type",
    "runtime_ffi_api",
    "split_as_last",
    "status",
    "use_native",
    "varying_axes",
    "varying_over",
]
