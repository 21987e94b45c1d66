#include "collective_gemm/module.h"
#include "common/module.h"
#include "gemm/gemm.h"
#include "offload/offload.h"

namespace nb = nanobind;

namespace {

// te_gemm multiplies by the BLAS that scipy brings; a PyCapsule carries its C signature as its name.
void UseSgemm(nb::capsule sgemm) { te::gemm::UseSgemm(sgemm.data(), sgemm.name() ? sgemm.name() : ""); }

}  // namespace

NB_MODULE(_te_cpu, module) {
  te::DefineModule(module);
  te::collective_gemm::DefineModule(module);
  module.def("disturb_offload", &te::offload::Disturb);
  module.def("build", &te::BuildFacts);
  module.def("use_sgemm", &UseSgemm);
}
