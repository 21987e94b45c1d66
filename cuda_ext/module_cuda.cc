#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <string>

#include "collective_gemm/module.h"
#include "common/block_limits.h"
#include "common/module.h"
#include "offload/offload.h"

namespace nb = nanobind;

namespace {

std::string Version(int64_t packed, int64_t major_unit, int64_t minor_unit) {
  return std::to_string(packed / major_unit) + "." + std::to_string(packed % major_unit / minor_unit);
}

nb::dict Build() {
  nb::dict facts = te::BuildFacts();
  facts["cuda architectures"] = TE_JAX_CUDA_ARCHITECTURES;
  facts["cuda architectures of products"] = TE_JAX_CUDA_PRODUCT_ARCHITECTURES;
  facts["cuda headers"] = Version(CUDART_VERSION, 1000, 10);
  int version = 0;
  if (cudaRuntimeGetVersion(&version) == cudaSuccess) facts["cuda runtime"] = Version(version, 1000, 10);
  if (cudaDriverGetVersion(&version) == cudaSuccess) {
    facts["cuda driver"] = version == 0 ? std::string("none") : Version(version, 1000, 10);
  }
  facts["cublasLt"] = Version(static_cast<int64_t>(cublasLtGetVersion()), 10000, 100);
  return facts;
}

// peer_access()[i][j]: whether GPU i can read GPU j's memory directly. Starts no context.
nb::list PeerAccess() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    count = 0;
  }
  nb::list rows;
  for (int i = 0; i < count; ++i) {
    nb::list row;
    for (int j = 0; j < count; ++j) {
      int can = i == j;
      if (i != j && cudaDeviceCanAccessPeer(&can, i, j) != cudaSuccess) {
        static_cast<void>(cudaGetLastError());
        can = 0;
      }
      row.append(can != 0);
    }
    rows.append(row);
  }
  return rows;
}

// (bytes of shared memory of a thread block, whether there are clusters), as kernels of the current GPU choose by them.
nb::tuple BlockLimits() {
  int bytes = 0;
  bool clusters = false;
  if (!te::CountSharedBytes(&bytes).ok() || !te::HasClusters(&clusters).ok()) return nb::make_tuple(0, false);
  return nb::make_tuple(bytes, clusters);
}

}  // namespace

NB_MODULE(_te_cuda, module) {
  te::DefineModule(module);
  te::collective_gemm::DefineModule(module);
  module.def("disturb_offload", &te::offload::Disturb);
  module.def("build", &Build);
  module.def("peer_access", &PeerAccess);
  module.def("block_limits", &BlockLimits);
}
