// What the extensions offer to te_jax.parallel beside their targets.
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

// open_space(members, number, rank, bytes): what this member shares, as text for the others.
inline std::string OpenSpace(const std::vector<int>& members, int number, int rank, int64_t bytes) {
  std::shared_ptr<Space> space;
  Require(Space::Make(members, rank, OrdinalOf(members[rank]), bytes, space));
  KeepOpening(members, number, rank, space);
  return space->Describe();
}

// join_space(members, number, rank, texts of all, seconds)
inline void JoinSpace(const std::vector<int>& members, int number, int rank, const std::vector<std::string>& texts,
                      double seconds) {
  // Joining looks into those of this process's other devices, which it may give up meanwhile.
  std::vector<std::shared_ptr<Space>> others;
  for (size_t i = 0; i < members.size(); ++i) others.push_back(FindOpening(members, number, static_cast<int>(i)));
  const std::shared_ptr<Space> space = FindOpening(members, number, rank);
  if (space == nullptr) throw std::runtime_error("the space was not opened");
  const nanobind::gil_scoped_release release;
  Require(space->Join(texts, std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9))));
  KeepSpace(members, rank, space);
}

inline void DefineModule(nanobind::module_& module) {
  module.def("introduce", &SetOrdinals);
  module.def("open_space", &OpenSpace);
  module.def("join_space", &JoinSpace);
  module.def("forget_opening", &ForgetOpening);  // (members, number): those that were not joined are given up
  module.def("forget_spaces", &ForgetSpaces);    // of a job that is over: places are others' now
}

}  // namespace te::collective_gemm
