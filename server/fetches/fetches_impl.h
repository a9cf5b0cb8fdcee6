#pragma once
/// \file
/// The claims and the waiting opens of Fetches. Only for its own source files.

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "server/fetches/fetches.h"
#include "server/fetches/peer_search.h"

namespace pegaflow::server {

/// A claim while it is extended, and the request for its blocks.
struct Fetches::Plan : cluster::Source::Request {
  Id128 connection;
  Id128 token;
  engine::SpaceId generation{};  ///< The namespace generation of the claim.
  std::size_t ready = 0;         ///< Keys whose blocks were local.
  std::size_t claimed = 0;       ///< Keys that the claim has now.
  std::size_t runs = 0;          ///< Owners that delivered a part, one after the other.
  cluster::ComputeTime compute;  ///< Time to compute the blocks that are fetched, if known.
  cluster::Arrival arrival;      ///< Predicted for the claimed keys behind `ready`.
  Hints hints{};                 ///< For the first part; void once it was asked for.
  /// The namespace of a prefetch, which belongs to no connection.
  std::optional<CacheService::Wants> prefetched{};
  bool through_pool = false;  ///< Its workers read nothing out of the pools of other nodes.
  bool past_pool = false;     ///< They read the part that is leased next, if it is whole.
  std::size_t wanted = 0;     ///< The blocks of the part that is leased next.
  std::shared_ptr<cluster::SourceRate> rate{};  ///< That of its best owner.
  /// The part that they read if nothing follows: the part of a claim in the pool has no gaps. It
  /// refers to this plan, so it does not stay.
  std::optional<PoolReads::Part> pending{};
};

/// The blocks of one kind that a claim on several waits for, and the request for them.
struct Fetches::PartOfKind {
  PeerSearch::Part wanted;
  Id128 token;  ///< Names the claim on this kind.
  engine::SpaceId generation{};
  cluster::Source::SharedRequest request;
  struct Leased {
    SharedLease lease;
    std::size_t from = 0;  ///< The index of its first block in `wanted.missing`.
    std::vector<Block> blocks;
  };
  std::vector<Leased> leases;
  std::size_t leased = 0;   ///< Number of `wanted.missing` that are leased.
  std::size_t claimed = 0;  ///< Number of `wanted.keys` that are claimed.
};

/// A claim on several kinds while it is made.
struct Fetches::PlanOfKinds {
  Id128 connection;
  Id128 token;
  std::shared_ptr<PeerSearch> search;
  TimePoint deadline{};
  cluster::ComputeTime compute;
  PeerSearch::Found found;
  cluster::Arrival arrival;
  std::vector<PartOfKind> parts;
};

/// A worker that waits for blocks.
struct Fetches::Opening {
  Id128 connection;
  Id128 token;
  std::size_t first = 0;
  std::size_t count = 0;
  engine::PinId pin{};
  TimePoint deadline;
  /// End of the load's use; max: unknown; no value: the load is not judged.
  std::optional<TimePoint> worth_until{};
  Duration computing{};  ///< Time to compute the blocks; 0: unknown.
  // See gathers_until().
  TimePoint gathered_at{};  ///< When no more blocks are waited for than have arrived.
  std::size_t behind = 0;   ///< Blocks behind `count` that another call opens.
  std::size_t here = 0;     ///< Blocks that had arrived when they were last counted.
};

}  // namespace pegaflow::server
