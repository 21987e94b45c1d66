// The parts that both extension modules share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "offload/offload.h"
#include "targets.h"
#include "xla/ffi/api/c_api.h"

#define TE_JAX_DECLARE(target) extern "C" XLA_FFI_Error* target(XLA_FFI_CallFrame*);
#define TE_JAX_DECLARE_NAMES(target) extern "C" const char* target##_names();
TE_JAX_TARGETS(TE_JAX_DECLARE)
TE_JAX_TARGETS(TE_JAX_DECLARE_NAMES)
#undef TE_JAX_DECLARE_NAMES
#ifdef TE_JAX_CUDA
#define TE_JAX_DECLARE_INITIALIZE(target) TE_JAX_DECLARE(target##_initialize)
TE_JAX_INITIALIZED_TARGETS(TE_JAX_DECLARE_INITIALIZE)
#undef TE_JAX_DECLARE_INITIALIZE
#endif
#undef TE_JAX_DECLARE

namespace te {

// A handler after whose failure, whatever it was, no copy of offload is under way: XLA ends the execution, and with it
// passes that other handlers have begun, and gives their memory to others.
template <XLA_FFI_Error* (*kHandler)(XLA_FFI_CallFrame*)>
XLA_FFI_Error* CallAndSettle(XLA_FFI_CallFrame* frame) {
  XLA_FFI_Error* const error = kHandler(frame);
  if (error != nullptr) offload::Settle();
  return error;
}

template <XLA_FFI_Error* (*kHandler)(XLA_FFI_CallFrame*)>
nanobind::capsule AsCapsule() {
  return nanobind::capsule(reinterpret_cast<void*>(CallAndSettle<kHandler>));
}

// {target name: handler as a PyCapsule, or handlers by stage}, for jax.ffi.register_ffi_target.
inline nanobind::dict Registrations() {
  nanobind::dict targets;
#define TE_JAX_ADD(target) targets[#target] = AsCapsule<target>();
  TE_JAX_TARGETS(TE_JAX_ADD)
#undef TE_JAX_ADD
#ifdef TE_JAX_CUDA
#define TE_JAX_ADD_INITIALIZE(target)                        \
  {                                                          \
    nanobind::dict stages;                                   \
    stages["execute"] = targets[#target];                    \
    stages["initialize"] = AsCapsule<target##_initialize>(); \
    targets[#target] = stages;                               \
  }
  TE_JAX_INITIALIZED_TARGETS(TE_JAX_ADD_INITIALIZE)
#undef TE_JAX_ADD_INITIALIZE
#endif
  return targets;
}

// {target name: "(operands) -> (results)"}, empty where their number depends on attributes.
inline nanobind::dict Buffers() {
  nanobind::dict names;
#define TE_JAX_ADD(target) names[#target] = target##_names();
  TE_JAX_TARGETS(TE_JAX_ADD)
#undef TE_JAX_ADD
  return names;
}

// Facts for error messages and `te-jax doctor`.
inline nanobind::dict BuildFacts() {
  nanobind::dict facts;
  facts["te_jax"] = TE_JAX_VERSION;
  facts["jaxlib headers"] = TE_JAX_JAXLIB_VERSION;
  facts["compiler"] = TE_JAX_COMPILER;
  return facts;
}

inline void DefineModule(nanobind::module_& module) {
  module.def("registrations", &Registrations);
  module.def("buffers", &Buffers);
  module.attr("ffi_api") = nanobind::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
}

}  // namespace te
