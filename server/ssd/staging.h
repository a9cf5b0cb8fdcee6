#pragma once
/// \file
/// Blocks of this node's disks that are read into the pool for other nodes.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include <kj/async-io.h>

#include "base/block_key.h"
#include "base/clock.h"
#include "base/id128.h"
#include "cluster/lender.h"
#include "cluster/source.h"
#include "server/cache/cache_service.h"

namespace pegaflow::server {

class Background;
class Fetches;

/// Finds blocks for other nodes in the pool and on the disks, and reads those on disks into the
/// pool, from where they are lent. Only disks are asked, never a third node, so no two nodes wait
/// for each other's fetches.
///
/// A *staging* is a claim of this node's own on the blocks that one request of a peer is to get,
/// under which the disks read them. It ends when all blocks were lent, when a block does not
/// arrive, when its peer ends it or is disconnected, or after `idle` without a request. Its blocks
/// are sealed as replicas: they are evicted before all others, and not written to a disk again.
///
/// All stagings together hold at most `most_bytes` of the pool, and there are at most `most` of
/// them. At a limit fewer blocks, or none, are staged. Thread-bound: the RPC thread.
class Staging final : private kj::TaskSet::ErrorHandler {
 public:
  struct Options {
    std::uint64_t most_bytes = 0;
    std::size_t most = 256;
    Duration idle = std::chrono::seconds(1);
    Duration deadline = std::chrono::seconds(2);  ///< For all reads of one staging.
  };

  /// All references outlive it. `fetches` is the Sink of `disks`.
  Staging(CacheService& service, cluster::Source& disks, Fetches& fetches, Background& background,
          kj::Timer& timer, const Clock& clock, const Options& options);
  ~Staging() noexcept(false);
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  /// The longest prefix of `keys`, which need not outlive the call, whose blocks are in the pool or
  /// on a disk. Holds nothing.
  kj::Promise<cluster::Lender::Prefix> locate(const Bytes32& space, std::span<const BlockKey> keys);
  /// Which of `keys` are in the pool or on a disk.
  kj::Promise<cluster::Lender::Present> locate_each(const Bytes32& space,
                                                    std::span<const BlockKey> keys);

  /// Blocks that are read from disks into the pool.
  struct Pending {
    std::uint64_t number = 0;  ///< Names the staging; 0: no block is pending.
    OnDisks blocks{};
  };
  /// Starts to read the longest prefix of `keys`, which need not outlive the call, for `peer`, a
  /// connection. The first of them is not in the pool.
  kj::Promise<Pending> begin(const Id128& peer, const Bytes32& space,
                             std::span<const BlockKey> keys);
  /// The next blocks that can be lent. None: the wait is over, or the staging is.
  struct Ready {
    Bytes32 space{};
    std::vector<BlockKey> keys;
  };
  /// Waits until blocks of at least kWorthAnAnswer, or all that are pending, can be lent, for at
  /// most `patience`.
  kj::Promise<Ready> await_next(const Id128& peer, std::uint64_t number, Duration patience);
  /// The first `count` of the blocks that await_next() returned were lent. Returns what is left;
  /// the staging is over if that is nothing, or if `count` is 0 although blocks were returned.
  Pending lent(const Id128& peer, std::uint64_t number, std::size_t ready, std::size_t count);
  /// Unknown numbers are fine: the staging may be over.
  void end(const Id128& peer, std::uint64_t number);
  /// That connection has ended, and so do its stagings.
  void peer_left(const Id128& peer);

  /// An answer with fewer bytes costs the peer more in requests than it saves in waiting.
  static constexpr std::uint64_t kWorthAnAnswer = std::uint64_t{1} << 20;

  struct Stats {
    std::size_t stagings = 0;
    std::uint64_t bytes = 0;  ///< Bytes of the pool that they hold or are about to.
  };
  [[nodiscard]] Stats stats() const noexcept {
    return {.stagings = stagings_.size(), .bytes = bytes_};
  }

 private:
  struct One;
  using Shared = std::shared_ptr<One>;

  [[nodiscard]] bool may_read(const cluster::Source::Located& located) const;
  [[nodiscard]] Shared find(const Id128& peer, std::uint64_t number) const;
  [[nodiscard]] bool is_live(const One& one) const;
  kj::Promise<void> lease(const Shared& one, cluster::Source::Located&& located);
  kj::Promise<void> take_frames(const Shared& one, const cluster::Source::SharedLease& lease);
  kj::Promise<Ready> wait(const Shared& one, TimePoint until);
  kj::Promise<void> watch(const Shared& one);
  [[nodiscard]] OnDisks report(const One& one, std::uint64_t queued_bytes) const;
  void end(const Shared& one);
  void taskFailed(kj::Exception&& exception) override;

  CacheService& service_;
  cluster::Source& disks_;
  Fetches& fetches_;
  Background& background_;
  kj::Timer& timer_;
  const Clock& clock_;
  const Options options_;
  std::map<std::uint64_t, Shared> stagings_;  ///< By number.
  std::uint64_t last_number_ = 0;
  std::uint64_t bytes_ = 0;
  kj::TaskSet tasks_;
};

}  // namespace pegaflow::server
