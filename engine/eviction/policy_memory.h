#pragma once
/// \file
/// The memory of a policy's own tables, which may outlive the process.

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/error.h"
#include "engine/tables/zero_pages.h"

namespace pegaflow::engine {

/// Pages of this process, or parts of memory that a later process continues with. A policy takes
/// its tables in a fixed order, so that the policy of the later process gets the same ones.
///
/// The process may die between any two stores. A policy therefore keeps only what is harmless when
/// half of a change is missing, or detects that.
class PolicyMemory {
 public:
  /// The meaning of what policies keep, in the upper half of an owner. Raise it with each change to
  /// their tables and units or to the order of Contest::rules(): then they begin anew, and the
  /// blocks stay.
  static constexpr std::uint64_t kMeaning = 1;

  /// Pages of this process.
  PolicyMemory() = default;
  /// `kept` begins at a page, outlives the tables, and is zero or what a former policy left there.
  explicit PolicyMemory(std::span<std::byte> kept) noexcept : kept_(kept) {}

  /// Call it first. `owner` is not 0 and names the policy and its size: what another owner left is
  /// cleared.
  void begin(std::uint64_t owner) noexcept;

  /// Whether what is taken outlives the process, as far as there is room.
  [[nodiscard]] bool is_kept() const noexcept { return !kept_.empty(); }

  /// The next table. Pages of this process where the kept memory is full.
  /// Errors: kOutOfCapacity.
  template <typename T>
  Result<ZeroPages<T>> take(std::size_t count, PageUse use = PageUse::kSparse) {
    const std::span<std::byte> found = take_kept(count, sizeof(T));
    if (found.empty()) return ZeroPages<T>::create(count, use);
    return ZeroPages<T>::shared({reinterpret_cast<T*>(found.data()), count});
  }

 private:
  /// Empty when there is no room for them.
  std::span<std::byte> take_kept(std::size_t count, std::size_t bytes_each) noexcept;

  std::span<std::byte> kept_;
  std::size_t taken_ = 0;
};

}  // namespace pegaflow::engine
