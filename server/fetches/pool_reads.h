#pragma once
/// \file
/// Blocks of claims that workers read out of the pools of other nodes themselves.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include <kj/async.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"
#include "cluster/source.h"
#include "cluster/source_rate.h"
#include "engine/types/ids.h"
#include "server/fetches/fetch_stats.h"
#include "server/fetches/recent_keys.h"
#include "transport/region.h"

namespace pegaflow::server {

class CacheService;

/// The reads of workers past the pool of this node: an engine's network card reads a block out of
/// its owner's pool into the engine's memory.
///
/// Such blocks are the end of a claim. They stay leased until the claim has ended and no worker
/// reads them. A worker counts them only after confirm(), for which their owner is asked whether
/// the lease held until then. Thread-bound: the RPC thread.
class PoolReads {
 public:
  enum class Use : std::uint8_t {
    kOff,
    kAuto,   ///< Blocks that no request needed lately, in pieces that are worth a request each,
             ///< of an owner whose rate is known.
    kForce,  ///< All blocks.
  };
  /// Limits of the claims with such blocks, and of reads in flight.
  static constexpr std::size_t kMostClaims = 4096;
  static constexpr std::size_t kMostReads = std::size_t{1} << 16;
  /// An engine that could not read a node's pool does not read it again before this has passed.
  static constexpr std::chrono::seconds kPause{30};
  /// With kAuto: the least mean size of the pieces in which a worker reads a page. The server reads
  /// it as a whole.
  static constexpr std::uint64_t kLeastPiece = std::uint64_t{32} << 10;
  /// The bytes of one read of a worker. More blocks are opened by a further call.
  static constexpr std::uint64_t kReadBytes = std::uint64_t{256} << 20;

  /// All outlive it. `source` is null without other nodes.
  PoolReads(CacheService& service, cluster::Source* source, const Clock& clock, Use use)
      : service_(service), source_(source), clock_(clock), use_(use) {}

  // ---- claims

  /// How the leading blocks of a part of a claim are read.
  struct Choice {
    bool past_pool = false;  ///< By the workers; else into the pool of this node.
    std::size_t blocks = 0;  ///< Those of which this is true.
  };
  /// `keys`: of an engine with that scheduler, in that generation of its namespace; the first
  /// `wanted` of what was `located`.
  [[nodiscard]] Choice choose(const Id128& scheduler, engine::SpaceId generation,
                              std::span<const BlockKey> keys,
                              const cluster::Source::Located& located, std::size_t wanted);

  /// The end of a claim.
  struct Part {
    Id128 token;
    Id128 scheduler;  ///< Its connection.
    engine::SpaceId generation{};
    std::size_t first = 0;                   ///< The place of its first block in the claim.
    cluster::Source::SharedRequest request;  ///< That of the claim.
    cluster::Source::SharedLease lease;
    Duration expected{};  ///< The predicted time until its last block has arrived; 0: unknown.
  };
  /// Whether the workers can read the leased blocks, and their owner is the one with that rate.
  [[nodiscard]] bool can_read(const Part& part,
                              const std::shared_ptr<cluster::SourceRate>& rate) const;
  /// Adds the leased blocks to their claim, as its end. Until they are opened, or as long as they
  /// are expected to take, predictions count them. False: their owner was lost meanwhile, and the
  /// lease stays the caller's.
  bool add(const Part& part);
  /// Predictions no longer count blocks that were expected by now.
  void forget_expected();
  /// The place of the first such block in the claim; no value: it has none.
  [[nodiscard]] std::optional<std::size_t> begin_of(const Id128& token) const;
  /// The place behind the last one. The claim has such blocks.
  [[nodiscard]] std::size_t end_of(const Id128& token) const;
  /// The request of the claim. It has such blocks.
  [[nodiscard]] const cluster::Source::SharedRequest& request_of(const Id128& token) const;
  /// The claim has ended.
  void ended(const Id128& token);
  /// A worker of the claim's engine gets the blocks from the place `first` on through the pool of
  /// this node. Unless one of them was read and not confirmed, the engine cannot read the owner's
  /// pool, and pauses.
  void skip(const Id128& token, std::size_t first);

  // ---- workers

  struct Opened {
    std::vector<std::uint32_t> pages;          ///< Those of the worker's shard.
    std::uint64_t source = 0;                  ///< The name of the owner's pool.
    std::optional<FabricDescriptor> fabric{};  ///< How to read it, unless the worker knows.
  };
  /// Opens blocks of the claim, from the place `first` on, under a pin. No value: their owner
  /// cannot be read at present. Errors: those of CacheService::pool_reader(); kInvalidArgument for
  /// a claim of another namespace, blocks that it does not have, or a pin in use;
  /// kBusy for too many reads.
  Result<std::optional<Opened>> open(const Id128& connection, const Id128& token, std::size_t first,
                                     std::size_t count, engine::PinId pin,
                                     std::span<const std::uint64_t> known);
  /// Whether the bytes that were read under the pin before this call are those of its blocks.
  /// Errors: kInvalidArgument for a pin that has none.
  kj::Promise<Result<bool>> confirm(const Id128& connection, engine::PinId pin);
  /// The worker reads no longer. Unknown pins are fine.
  void released(const Id128& connection, engine::PinId pin);
  /// A worker's or a scheduler's connection has ended. Returns the claims of the latter, which end
  /// with ended().
  std::vector<Id128> left(const Id128& connection);

  /// Adds what is in flight, and the counts so far.
  void count(FetchStats& stats) const;

 private:
  /// Leased blocks, in use by their claim and by reads. Ends the lease with its last user.
  struct Leased {
    Leased(cluster::Source& its_source, Part its_part,
           std::shared_ptr<cluster::SourceRate> its_rate)
        : source(its_source), part(std::move(its_part)), rate(std::move(its_rate)) {}
    ~Leased() { source.end(part.lease); }
    Leased(const Leased&) = delete;
    Leased& operator=(const Leased&) = delete;

    cluster::Source& source;
    Part part;
    std::shared_ptr<cluster::SourceRate> rate;
    std::unique_ptr<cluster::SourceRate::Reserved> expected{};  ///< Until the first open.
    TimePoint expected_until{};
    bool was_unconfirmed = false;  ///< A read was in vain although the pool can be read.
    [[nodiscard]] std::size_t blocks() const { return part.lease->blocks; }
  };
  struct Read {
    std::shared_ptr<Leased> leased;
    std::size_t blocks = 0;
    /// Its bytes, until they are confirmed.
    std::shared_ptr<cluster::SourceRate::Reserved> queued;
  };
  using Pin = std::pair<Id128, engine::PinId>;
  using Reader = std::pair<Id128, Id128>;  ///< A scheduler's connection, and a node.

  /// Where the blocks are, for the workers of the claim's engine.
  [[nodiscard]] std::optional<cluster::Source::InPool> place_of(const Part& part) const;
  [[nodiscard]] bool is_paused(const Id128& scheduler, const Id128& node) const;
  std::uint64_t name_of(const Id128& fabric);
  bool note_confirmed(const Id128& connection, const Read& read, bool held);

  CacheService& service_;
  cluster::Source* const source_;
  const Clock& clock_;
  const Use use_;
  RecentKeys recent_;
  std::unordered_map<Id128, std::shared_ptr<Leased>> claims_;  ///< By token.
  std::map<Pin, Read> reads_;
  std::map<Reader, TimePoint> paused_;              ///< Until then.
  std::unordered_map<Id128, std::uint64_t> names_;  ///< By the incarnation of the fabric.
  std::uint64_t last_name_ = 0;
  std::uint64_t blocks_ = 0;
  std::uint64_t bytes_ = 0;
  std::uint64_t unconfirmed_ = 0;
  std::uint64_t skipped_ = 0;
};

}  // namespace pegaflow::server
