#pragma once
/// \file
/// The longest prefix of a prompt that is restorable from this node and one other.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <kj/async.h>

#include "base/block_key.h"
#include "cluster/source.h"
#include "engine/block_store.h"
#include "engine/kinds/block_kinds.h"
#include "engine/kinds/restorable.h"
#include "engine/kinds/unit_keys.h"
#include "server/cache/cache_service.h"

namespace pegaflow::server {

/// One search over several kinds of blocks. A prefix is found if each block that its rules name is
/// here or at one owner of the source, the same one for all of them.
///
/// The owners are asked in two steps. The first asks for the blocks of prefix kinds that are not
/// here; it bounds how long the prefix may become. The second asks for each block of
/// the other kinds that a boundary between the local prefix and this bound needs and that is not
/// here. It is left out if no longer boundary is possible, so that a prompt that no owner has costs
/// no more than with one kind. Nothing is held meanwhile. Thread-bound: the RPC thread.
class PeerSearch {
 public:
  /// The blocks of one kind that the found prefix needs.
  struct Part {
    std::size_t kind = 0;
    engine::BlockRange blocks;
    std::vector<BlockKey> keys;        ///< Those of `blocks`.
    std::vector<std::size_t> missing;  ///< Places in `keys` of those that are not here.
    cluster::Source::Located owner;    ///< For a lease on the missing ones.
  };
  struct Found {
    std::uint64_t tokens = 0;  ///< 0: nothing longer than the local prefix.
    std::vector<Part> parts;
    /// The owner, for predictions; without a rate if no block is missing. Blocks of any part may be
    /// on its disks.
    cluster::Source::Located owner;
  };

  /// `store` and `source` outlive it.
  PeerSearch(const engine::BlockStore& store, cluster::Source& source,
             CacheService::WantsOfKinds wants, std::span<const BlockKey> units);
  PeerSearch(const PeerSearch&) = delete;
  PeerSearch& operator=(const PeerSearch&) = delete;

  [[nodiscard]] const CacheService::WantsOfKinds& wants() const noexcept { return wants_; }
  /// The restorable prefix of this node alone, in tokens.
  [[nodiscard]] std::uint64_t local() const noexcept { return local_; }
  /// Whether any longer prefix exists.
  [[nodiscard]] bool may_find_more() const noexcept;
  /// Keep the object until the promise has ended; call it once.
  kj::Promise<Found> run();

 private:
  /// An owner and the blocks that it has, by kind.
  struct Owner {
    std::vector<std::vector<bool>> has;
    std::vector<cluster::Source::Holding> holdings;  ///< By kind; without a rate: none.
  };
  /// The blocks of one kind that were asked for.
  struct Asked {
    std::size_t kind = 0;
    std::vector<std::size_t> blocks;
  };
  class Union;

  /// The blocks of one kind that are here, in groups of 64, each as it was at the first look.
  struct Here {
    std::vector<std::uint64_t> groups;
    std::vector<bool> looked_at;
  };

  [[nodiscard]] std::size_t blocks_of(std::size_t kind) const;
  [[nodiscard]] std::uint64_t aligned(std::uint64_t tokens) const;
  [[nodiscard]] std::uint64_t here(std::size_t kind, std::size_t group) const;
  [[nodiscard]] bool is_here(std::size_t kind, std::size_t block) const;
  [[nodiscard]] bool is_at(const Owner* owner, std::size_t kind, std::size_t block) const;
  /// The longest prefix for which the prefix kinds have all blocks, here or at the owner.
  [[nodiscard]] std::uint64_t prefix_limit(const Owner* owner) const;
  [[nodiscard]] std::uint64_t longest(const Owner* owner) const;
  /// The blocks of a prefix kind that are not here. An owner answers with the first of them that it
  /// has, up to the first one that it lacks: behind that one no prefix is whole.
  [[nodiscard]] Asked missing_of_prefix(std::size_t kind) const;
  /// The blocks of another kind that are not here, for boundaries up to `tokens`.
  [[nodiscard]] Asked needed_until(std::size_t kind, std::uint64_t tokens) const;
  kj::Promise<void> ask(Asked asked);
  void note(const Asked& asked, std::vector<cluster::Source::Holding> answers);
  kj::Promise<void> ask_prefixes();
  kj::Promise<void> ask_others();
  [[nodiscard]] Found choose() const;

  const engine::BlockStore& store_;
  cluster::Source& source_;
  const CacheService::WantsOfKinds wants_;
  const std::vector<BlockKey> units_;
  const engine::UnitKeys keys_;
  mutable std::vector<Here> here_;  ///< By kind.
  std::uint64_t local_ = 0;
  std::vector<Owner> owners_;
};

}  // namespace pegaflow::server
