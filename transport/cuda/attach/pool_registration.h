#pragma once
/// \file
/// Makes the pool's memory known to CUDA, so that copy engines reach it.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/error.h"
#include "transport/cuda/driver.h"

namespace pegaflow::cuda {

/// Page-locks a pool while it lives. Movable, thread-bound.
///
/// One call for a pool of 32 GiB on pages of 4 KiB takes 3 s (0.6 s on huge pages), so the pool is
/// cut into ranges that several threads register. A transfer may not cross from one range into the
/// next, which CopyPlan ensures.
class PoolRegistration {
 public:
  PoolRegistration() = default;
  /// Errors: CUDA's for the first range that failed; none is registered then.
  static Result<PoolRegistration> create(std::shared_ptr<Driver> driver, Context context,
                                         std::span<std::byte> pool, std::uint64_t range_bytes,
                                         unsigned threads);

  PoolRegistration(PoolRegistration&& other) noexcept = default;
  PoolRegistration& operator=(PoolRegistration&& other) noexcept;
  /// Requires that no copy is in flight.
  ~PoolRegistration();

 private:
  void release();

  std::shared_ptr<Driver> driver_;
  Context context_ = nullptr;
  std::vector<std::byte*> ranges_;
  unsigned threads_ = 1;
};

}  // namespace pegaflow::cuda
