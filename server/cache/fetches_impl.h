#pragma once
/// \file
/// What a fetch consists of. For the sources of Fetches alone.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "server/cache/fetches.h"

namespace pegaflow::server {

/// A block that is being read.
struct Fetches::Block {
  std::size_t place = 0;  ///< Of its key, in the plan's.
  engine::FrameIndex frame = engine::kNoFrame;
  std::vector<std::uint64_t> offsets;
  std::size_t lent = 0;  ///< Its place in the lease.
};

/// What an owner lent to one fetch.
struct Fetches::Lease {
  cluster::Lender* peer = nullptr;
  std::uint64_t life = 0;  ///< Of the peer, that granted it.
  cluster::Lender::Route route;
  std::uint64_t number = 0;
  TimePoint end;  ///< By our BootClock.
  std::vector<std::uint32_t> pages;
  std::vector<std::uint64_t> checksums;
  std::size_t blocks = 0;
  std::size_t users = 1;       ///< Batches that are not settled or confirmed, and who makes some.
  std::vector<Block> whole{};  ///< Read, and to be confirmed by the owner.
  bool is_confirming = false;  ///< It is asked about others.
};

/// What one claim wants.
struct Fetches::Plan {
  Id128 connection;
  Id128 token;
  CacheService::Wants wants;
  std::vector<BlockKey> keys;
  std::size_t claimed = 0;       ///< How many of them the claim has.
  std::size_t runs = 0;          ///< Owners that were asked for a part of them, one by one.
  cluster::ComputeTime compute;  ///< Of blocks that are fetched, if that is known.
  std::size_t ready = 0;         ///< Of the keys, those whose blocks were here.
  cluster::Arrival arrival;      ///< Of the others that the claim has.
  TimePoint deadline;            ///< By the fabric's clock.
  std::unique_ptr<cluster::SourceRate::Reserved> reserved{};  ///< Of the lease that is requested.
  std::vector<cluster::Lender*>
      failed{};  ///< Owners that lent nothing, or of which blocks did not come.

  void note_failed(cluster::Lender* owner) {
    if (std::find(failed.begin(), failed.end(), owner) == failed.end()) failed.push_back(owner);
  }

  [[nodiscard]] std::size_t shards() const { return wants.page_bytes.size(); }
};

/// What is read together.
struct Fetches::Batch {
  OnePlan plan;
  OneLease lease;
  std::vector<Block> blocks;
  std::optional<cluster::SourceRate::Queued> queued;
  TimePoint since{};         ///< When the fabric was given it.
  bool is_answered = false;  ///< The blocks that are left were given up, and are not settled.
};

struct Fetches::Opening {
  Id128 connection;
  Id128 token;
  std::size_t first = 0;
  std::size_t count = 0;
  engine::PinId pin{};
  TimePoint deadline;
  /// Until when the load is of use; max: not known; no value: the load is not judged.
  std::optional<TimePoint> worth_until{};
  Duration computing{};  ///< Of the blocks; 0: not known.
};

}  // namespace pegaflow::server
