#pragma once
/// \file
/// The kinds of blocks that a mover moves: their pages, and the places of members in them.

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/page_layout.h"
#include "client/kinds.h"

namespace pegaflow {

/// The pages of one kind.
struct KindPages {
  /// A member's part of each page.
  struct Member {
    std::size_t layout = 0;   ///< Its index among the device's layouts.
    std::uint64_t begin = 0;  ///< Its first byte in the page,
    std::uint64_t bytes = 0;  ///< and their number.
    std::uint64_t block_count = 0;
  };
  BlockRule rule = BlockRule::kPrefix;
  std::uint32_t tokens = 0;
  std::uint32_t block_tokens = 0;
  std::vector<Member> members;
  std::uint64_t page_bytes = 0;  ///< 0: this rank has no layer of the kind.
  /// Whether the members are cells: parts of one block, which has one number for all of them.
  bool is_cut = false;

  /// The engine's block numbers for each key.
  [[nodiscard]] std::size_t blocks_per_key() const noexcept { return is_cut ? 1 : members.size(); }
};

/// Immutable.
class KindTable {
 public:
  /// One kind of full attention, which is registered without kinds.
  static KindTable plain(PageLayout layout);
  /// The same, cut into cells that engines of other tensor-parallel sizes share, in their order.
  /// `apart`: each cell is copied by itself, so that it has a checksum of its own; else the page is
  /// copied as a whole.
  /// Errors: kInvalidArgument without cells, and for cells of different sizes or together beyond
  /// kMaxPageBytes.
  static Result<KindTable> of_cells(std::span<const PageLayout> cells, bool apart);
  /// Errors: kInvalidArgument for no kind or more than kMaxKinds, for kinds without any layer, and
  /// for pages beyond kMaxPageBytes. The server checks the rules.
  static Result<KindTable> create(const MoverKinds& kinds);

  [[nodiscard]] std::size_t size() const noexcept { return kinds_.size(); }
  [[nodiscard]] const KindPages& operator[](std::size_t kind) const { return kinds_[kind]; }
  [[nodiscard]] std::span<const PageLayout> layouts() const noexcept { return layouts_; }
  /// Whether the rank registers with a list of kinds.
  [[nodiscard]] bool has_kinds() const noexcept { return alignment_tokens_ != 0; }
  [[nodiscard]] std::uint32_t unit_tokens() const noexcept { return unit_tokens_; }
  [[nodiscard]] std::uint32_t alignment_tokens() const noexcept { return alignment_tokens_; }
  [[nodiscard]] std::uint64_t largest_page() const noexcept;
  /// The number of blocks of the member with the most.
  [[nodiscard]] std::uint64_t block_count() const noexcept;

  /// Checks the engine's blocks for `count` blocks of a kind.
  /// Errors: kInvalidArgument for an unknown kind, another number than count x blocks_per_key(), or
  /// a block beyond its member's layout.
  [[nodiscard]] Result<void> check(std::size_t kind, std::size_t count,
                                   std::span<const std::uint32_t> blocks) const;

 private:
  void add(BlockRule rule, std::uint32_t tokens, std::uint32_t block_tokens,
           std::span<const PageLayout> members);

  std::vector<KindPages> kinds_;
  std::vector<PageLayout> layouts_;
  std::uint32_t unit_tokens_ = 0;
  std::uint32_t alignment_tokens_ = 0;
};

}  // namespace pegaflow
