#pragma once
/// \file
/// Which cores the threads of this process may use.

#include <cstddef>
#include <utility>
#include <vector>

#include "base/error.h"

namespace pegaflow::perf {

/// Puts all threads of this process on the same few cores, and on others from round to round.
///
/// Cores of a virtual machine differ by a quarter when their twin is busy elsewhere. Two programs
/// that are compared on one core each, not the same one, then compare the cores.
///
/// Thread-bound. The threads may go where they could before once this object is gone; threads that
/// were made meanwhile too.
class SameCores {
 public:
  /// Remembers where this process may run now. Errors: the kernel's.
  static Result<SameCores> create();
  SameCores(SameCores&& other) noexcept : allowed_(std::move(other.allowed_)) {}
  SameCores& operator=(SameCores&&) = delete;
  ~SameCores();

  /// Moves every thread that exists now to `count` cores, others for each `round`; to all of them
  /// when there are not more than `count`. Threads made later by a moved thread follow it.
  /// Errors: the kernel's.
  [[nodiscard]] Result<void> use(std::size_t round, std::size_t count) const;

  /// The cores that use() chooses, as the kernel counts them.
  [[nodiscard]] std::vector<std::size_t> chosen(std::size_t round, std::size_t count) const;

 private:
  explicit SameCores(std::vector<std::size_t> allowed) : allowed_(std::move(allowed)) {}
  std::vector<std::size_t> allowed_;
};

}  // namespace pegaflow::perf
