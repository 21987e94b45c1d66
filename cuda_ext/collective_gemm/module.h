// Functions of the extensions for te_jax.parallel, beside their targets.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "collective_gemm/collective_gemm.h"

namespace te::collective_gemm {

inline void Require(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.reason());
}

// create_segment(participants, number, rank, bytes): this participant's segment, described for its peers.
inline std::string CreateAttempt(const std::vector<int>& participants, int number, int rank, int64_t bytes) {
  const bool known = rank >= 0 && rank < static_cast<int>(participants.size());
  const int device = known ? OrdinalOf(participants[rank]) : -1;
  if (known && device < 0) {
    throw std::runtime_error("this process does not drive device " + NameOf(participants[rank]));
  }
  std::shared_ptr<SharedSegments> segments;
  Require(SharedSegments::Create(participants, rank, device, bytes, segments));
  KeepAttempt(participants, number, rank, segments);
  return segments->Describe();
}

// join_segments(participants, number, rank, descriptions of all, seconds)
inline void JoinAttempt(const std::vector<int>& participants, int number, int rank,
                        const std::vector<std::string>& descriptions, double seconds) {
  if (!IsTimeout(seconds)) throw std::runtime_error("seconds is none from 0 to 1e9: " + std::to_string(seconds));
  // Joining reads those of this process's other devices, which must outlast it if the attempt is forgotten meanwhile.
  std::vector<std::shared_ptr<SharedSegments>> all;
  for (size_t i = 0; i < participants.size(); ++i)
    all.push_back(FindAttempt(participants, number, static_cast<int>(i)));
  if (rank < 0 || rank >= static_cast<int>(all.size()) || all[rank] == nullptr) {
    throw std::runtime_error("the segment was not created");
  }
  const nanobind::gil_scoped_release release;
  Require(all[rank]->Join(descriptions, all, Timeout(seconds)));
  KeepSegments(participants, rank, all[rank]);
}

inline void DefineModule(nanobind::module_& module) {
  module.def("introduce", &SetOrdinals);
  module.def("create_segment", &CreateAttempt);
  module.def("join_segments", &JoinAttempt);
  module.def("forget_attempt", &ForgetAttempt);    // (participants, number): breaks segments that were not joined
  module.def("forget_segments", &ForgetSegments);  // of a job that is over, whose places now name other devices
}

}  // namespace te::collective_gemm
