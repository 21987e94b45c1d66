// The result of a kernel's entry point: success, or why it could not run.
#pragma once

#include <string>
#include <utility>

namespace te {

class [[nodiscard]] Status {
 public:
  static Status Ok() { return Status(""); }
  static Status Failed(std::string reason) { return Status(std::move(reason)); }

  bool ok() const { return reason_.empty(); }
  const std::string& reason() const { return reason_; }

 private:
  explicit Status(std::string reason) : reason_(std::move(reason)) {}
  std::string reason_;
};

}  // namespace te

// Returns from the caller where a step fails.
#define TE_JAX_TRY(step)                                        \
  do {                                                          \
    if (Status status_ = (step); !status_.ok()) return status_; \
  } while (false)
