#pragma once
/// \file
/// Engines and nodes, and the bits that stand for them in sets of holders.

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "base/error.h"
#include "index/memory/bit_row.h"

namespace pegaflow::index {

/// A holder's number in the index, below `max_holders`. The number of a removed holder is given to
/// another one only after all its cells have been swept.
using HolderId = std::uint32_t;

/// Owns the holders. Each has a bit in the sets. A holder that is cleared gets another bit: the old
/// one is dead, masked wherever a set is read, and free again when no cell's set has it.
///
/// Thread-bound.
class Holders {
 public:
  static constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();

  explicit Holders(std::uint32_t max_holders);

  /// Errors: kOutOfCapacity when all numbers are taken, or their cells not yet swept.
  Result<HolderId> add(bool is_node);
  /// Gives the holder another bit; needs has_free_bit(). Returns the dead one.
  std::uint32_t renew_bit(HolderId holder);
  /// The holder is gone; its number is free as soon as its bit, which is returned and dead, is.
  std::uint32_t remove(HolderId holder);
  /// No set has the dead `bit` any longer.
  void free_bit(std::uint32_t bit);

  void attach(HolderId engine, HolderId node);
  void detach(HolderId engine);

  [[nodiscard]] bool has_free_bit() const { return bits_in_use_ < holder_of_.size(); }
  [[nodiscard]] bool is_holder(HolderId holder) const {
    return holder < rows_.size() && (rows_[holder].kind == Kind::kEngine || is_node(holder));
  }
  [[nodiscard]] bool is_node(HolderId holder) const { return rows_[holder].kind == Kind::kNode; }
  [[nodiscard]] std::uint32_t bit_of(HolderId holder) const { return rows_[holder].bit; }
  [[nodiscard]] HolderId holder_of(std::uint32_t bit) const { return holder_of_[bit]; }
  /// The bits that are not dead, and have a holder.
  [[nodiscard]] ConstRow live_bits() const { return live_bits_; }
  /// The engines for which the blocks of `node` are local, by their numbers.
  [[nodiscard]] ConstRow engines_of(HolderId node) const { return rows_[node].engines; }
  /// Changes whenever the local engines of a set may have changed.
  [[nodiscard]] std::uint32_t epoch() const { return epoch_; }
  /// Words of a row that has all bits and numbers given so far.
  [[nodiscard]] std::size_t row_words() const { return live_bits_.size(); }
  [[nodiscard]] std::uint64_t count() const { return count_; }

  /// Blocks of the holder.
  std::uint64_t& blocks(HolderId holder) { return rows_[holder].blocks; }
  [[nodiscard]] std::uint64_t blocks(HolderId holder) const { return rows_[holder].blocks; }

 private:
  enum class Kind : std::uint8_t { kFree, kEngine, kNode, kRemoved };
  struct HolderRow {
    Kind kind = Kind::kFree;
    std::uint32_t bit = kNone;
    HolderId node = kNone;                 ///< The node of an engine.
    std::vector<std::uint64_t> engines{};  ///< The engines of a node.
    std::uint64_t blocks = 0;
  };

  std::uint32_t take_bit(HolderId holder);
  void widen(std::uint32_t most);

  std::vector<HolderRow> rows_;
  std::vector<HolderId> holder_of_;  ///< By bit; kNone if it is free.
  std::vector<std::uint64_t> live_bits_;
  std::size_t bits_in_use_ = 0;
  std::uint32_t epoch_ = 1;
  std::uint64_t count_ = 0;
};

}  // namespace pegaflow::index
