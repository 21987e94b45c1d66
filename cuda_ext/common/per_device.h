// A value for each device, made when it is first asked for and kept as long as the process: threads may still be
// launching while it ends.
#pragma once

#include <atomic>
#include <memory>

#include "common/status.h"

namespace te {

template <typename T>
class PerDevice {
 public:
  // Sets *value to that of a device. Where there is none yet, make(T&) fills in a new one; if it fails, the next call
  // tries again. It holds no lock: CUDA may load a module meanwhile, which can wait for work that another thread has
  // still to enqueue. So two threads may make one at the same time; that of the second is destroyed.
  template <typename Make>
  Status Of(int device, const Make& make, T** value) {
    Entry* latest = latest_.load(std::memory_order_acquire);
    if ((*value = In(latest, device)) != nullptr) return Status::Ok();
    auto made = std::make_unique<Entry>(device);
    TE_JAX_TRY(make(made->value));
    made->next = latest;
    while (!latest_.compare_exchange_weak(made->next, made.get(), std::memory_order_acq_rel)) {
      if ((*value = In(made->next, device)) != nullptr) return Status::Ok();
    }
    *value = &made.release()->value;
    return Status::Ok();
  }

  // Null where none was made.
  T* Find(int device) const { return In(latest_.load(std::memory_order_acquire), device); }

 private:
  struct Entry {
    explicit Entry(int device) : device(device) {}
    const int device;
    T value{};
    Entry* next = nullptr;
  };

  static T* In(Entry* entry, int device) {
    while (entry != nullptr && entry->device != device) entry = entry->next;
    return entry == nullptr ? nullptr : &entry->value;
  }

  std::atomic<Entry*> latest_{nullptr};
};

}  // namespace te
