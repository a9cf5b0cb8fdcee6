#pragma once
/// \file
/// Requests that wait at their engines, and what the engines still have for them.

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "index/block_index.h"
#include "index/holders.h"
#include "index/key.h"
#include "index/match.h"

namespace pegaflow::index {

/// While a request waits in an engine's queue, the requests before it may evict blocks that it was
/// to reuse. The engine announces that before it begins with the request. Blocks that the pool of
/// its node has are not lost: they are loaded from there, and the engine reports them as cached.
///
/// An engine evicts the end of a chain first, so what is left of one is found from its end: one
/// probe of the index for each waiting request and batch of removals, and one for each block that
/// is gone. Beyond kMaxRequests, or kMaxBlocks of all of them, further ones are not followed.
/// Thread-bound.
class WaitingBlocks {
 public:
  static constexpr std::size_t kMaxRequests = 4096;
  static constexpr std::size_t kMaxBlocks = std::size_t{4} << 20U;  ///< 8 bytes each.

  /// `blocks` outlives the object; `max_holders` is its own.
  WaitingBlocks(const BlockIndex& blocks, std::uint32_t max_holders)
      : blocks_(blocks), match_(max_holders) {}

  /// The request was sent to an engine that has announced these blocks of it, the first ones of its
  /// prompt, and kept them since.
  void add(std::uint64_t request, HolderId engine, std::span<const Key> keys);

  /// A request of which the engine has fewer blocks than before.
  struct Loss {
    std::uint64_t request = 0;
    std::uint32_t lost = 0;  ///< Blocks, since the call before.
  };
  /// Blocks of the engine were removed from the index. The result is valid until the next call.
  std::span<const Loss> removed(HolderId engine);

  /// The engine has begun with the request: it has used what it reuses. Unknown ones are no error.
  void begun(std::uint64_t request);

  /// Blocks that the request has lost between add() and begun(); 0 for an unknown one.
  [[nodiscard]] std::uint32_t lost(std::uint64_t request);
  /// The request has ended. Unknown ones are no error.
  void remove(std::uint64_t request);
  /// The blocks of the engine are no longer known.
  void forget(HolderId engine);

  [[nodiscard]] std::size_t size() const noexcept { return engines_.size(); }
  [[nodiscard]] std::size_t blocks() const noexcept { return block_count_; }

 private:
  struct Waiting {
    std::uint64_t request = 0;
    std::vector<Key> keys;  // Those that are left; none once the engine has begun.
    std::uint32_t lost = 0;
  };

  using Requests = std::vector<Waiting>;

  [[nodiscard]] Waiting* find(std::uint64_t request);

  const BlockIndex& blocks_;
  Match match_;
  std::unordered_map<HolderId, Requests> waiting_;
  std::unordered_map<std::uint64_t, HolderId> engines_;  // By request.
  std::size_t block_count_ = 0;
  std::vector<Loss> losses_;
};

}  // namespace pegaflow::index
