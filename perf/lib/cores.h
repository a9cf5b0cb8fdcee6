#pragma once
/// \file
/// The cores that the threads of this process may use.

#include <cstddef>
#include <utility>
#include <vector>

#include "base/error.h"

namespace pegaflow::perf {

/// Moves all threads of this process to the same few cores, other ones in each round.
///
/// Cores of a virtual machine differ by a quarter when their sibling is busy. A comparison of two
/// programs on different cores then compares the cores.
///
/// Thread-bound. The destructor gives all threads, new ones too, the cores that they had before.
class SameCores {
 public:
  /// Remembers the cores that this process may use now. Errors: the kernel's.
  static Result<SameCores> create();
  SameCores(SameCores&& other) noexcept : allowed_(std::move(other.allowed_)) {}
  SameCores& operator=(SameCores&&) = delete;
  ~SameCores();

  /// Moves every existing thread to `count` cores, other ones for each `round`, or to all cores
  /// when there are at most `count`. Threads that a moved thread creates inherit its cores. Errors:
  /// the kernel's.
  [[nodiscard]] Result<void> use(std::size_t round, std::size_t count) const;

  /// The kernel's numbers of the cores that use() chooses.
  [[nodiscard]] std::vector<std::size_t> chosen(std::size_t round, std::size_t count) const;

 private:
  explicit SameCores(std::vector<std::size_t> allowed) : allowed_(std::move(allowed)) {}
  std::vector<std::size_t> allowed_;
};

}  // namespace pegaflow::perf
