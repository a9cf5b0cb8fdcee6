#pragma once
/// \file
/// Blocks that are fetched into the pool before an engine requests them.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <kj/async-io.h>

#include "base/block_key.h"
#include "base/clock.h"
#include "base/id128.h"
#include "server/cache/cache_service.h"
#include "server/fetches/fetches.h"
#include "server/prefetch/prefetch_types.h"

namespace pegaflow::server {

/// Fetches what is missing of a prefix from other nodes and from disks of this node, as replicas.
///
/// A prefetch is a claim of this node's own, which ends when its last block has arrived: it pins
/// nothing, evicts replicas only, and an engine's claim that comes meanwhile joins its fetches. All
/// together fill at most `most_bytes` of the pool, those of one tenant a quarter of that; at a
/// limit a prefetch is for fewer blocks, or for none. Cancelling one ends the reads that are not at
/// a lane yet and that no engine has joined. Thread-bound: the RPC thread.
class Prefetches final : private kj::TaskSet::ErrorHandler {
 public:
  struct Options {
    std::uint64_t most_bytes = 0;
    std::size_t most = 256;  ///< Prefetches at a time.
    /// For all reads of one prefetch: owners lend for 10 s.
    Duration deadline = std::chrono::seconds(8);
  };
  /// All references outlive it.
  Prefetches(CacheService& service, Fetches& fetches, Background& background, kj::Timer& timer,
             const Clock& clock, const Options& options);
  ~Prefetches() noexcept(false);
  Prefetches(const Prefetches&) = delete;
  Prefetches& operator=(const Prefetches&) = delete;

  using Wanted = PrefetchWanted;
  void start(const CacheService::Wants& wants, Wanted wanted);
  /// Unknown ids are fine: the prefetch may have ended.
  void cancel(const std::string& id);

  [[nodiscard]] PrefetchStats stats() const;

 private:
  struct One;
  using Shared = std::shared_ptr<One>;

  /// Shortens the keys to what the limits allow, and returns the bytes of the missing ones.
  std::uint64_t fit(const CacheService::Wants& wants, Wanted& wanted) const;
  [[nodiscard]] bool is_live(const One& one) const;
  kj::Promise<void> wait(const Shared& one);
  void end(const Shared& one, std::uint64_t& counter);
  void taskFailed(kj::Exception&& exception) override;

  CacheService& service_;
  Fetches& fetches_;
  Background& background_;
  kj::Timer& timer_;
  const Clock& clock_;
  const Options options_;
  std::map<std::string, Shared> running_;          ///< By id.
  std::map<std::string, std::uint64_t> bytes_of_;  ///< By tenant, while it has some.
  std::uint64_t bytes_ = 0;
  PrefetchStats counted_;
  kj::TaskSet tasks_;
};

}  // namespace pegaflow::server
