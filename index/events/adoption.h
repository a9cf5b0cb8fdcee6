#pragma once
/// \file
/// The blocks of another router's snapshot, entered into the index slice by slice.

#include <cstddef>
#include <span>
#include <unordered_set>
#include <vector>

#include "index/key.h"

namespace pegaflow::index {

/// The keys to be entered for one rank. A key that its engine removes meanwhile is left out. Its
/// memory is that of the keys, and of the removed ones. Thread-bound.
class Adoption {
 public:
  /// Blocks of one slice: about 1 ms of the index, 3 ms where nothing of it is in the CPU's cache.
  static constexpr std::size_t kSlice = 16'384;

  void begin(std::vector<Key> keys);
  /// Drops what is left.
  void stop();
  [[nodiscard]] bool is_active() const noexcept { return at_ < keys_.size(); }

  /// Events of the engine about these blocks, which are newer than the snapshot.
  void removed(std::span<const Key> keys);
  void stored(std::span<const Key> keys);

  /// The next keys, kSlice at most; valid until the next call. Possibly none.
  std::span<const Key> next();

 private:
  std::vector<Key> keys_;
  std::size_t at_ = 0;
  std::unordered_set<Key> removed_;
  std::vector<Key> slice_;
};

}  // namespace pegaflow::index
