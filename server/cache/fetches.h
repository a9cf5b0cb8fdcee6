#pragma once
/// \file
/// Blocks in flight: the claims that they extend, the workers that wait for them, and their seal.

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include <kj/async-io.h>

#include "base/block_key.h"
#include "base/clock.h"
#include "cluster/source.h"
#include "cluster/source_rate.h"
#include "server/cache/background.h"
#include "server/cache/cache_service.h"
#include "server/cache/fetch_stats.h"

namespace pegaflow::server {

/// Fetches the blocks that claims want and this node does not have.
///
/// A fetch locates the prefix in the source, takes a lease from the owner that has most of it, gets
/// frames for the leased blocks, and has them read in the order of the prefix. Blocks that arrived
/// are sealed. Blocks that failed are requested from another owner, Source::kMostOwners in all;
/// then they are given up, and the engines that wait for them compute them. A frame that may still
/// be written to is not used again before the source reports that it is quiesced.
///
/// A claim that contains the time of computing gets blocks of the source only where they are
/// predicted to arrive sooner: by the recent rate of their owner, behind what is queued there. An
/// owner whose rate is unknown, or was low and has not been measured for a while, is probed with
/// one batch. While a load waits for its blocks, the prediction is renewed with each progress:
/// open() ends the wait of a load that the engine would by now compute sooner, or whose owner has
/// stopped responding. Of the loads of one engine that wait for such an owner, one ends at once,
/// and the others when that one is computed, so that a short pause of an owner costs one load.
///
/// A fetch belongs to the namespace generation in which its claim was made; after a reset it
/// delivers nothing more.
///
/// Without a source no block is ever in flight. Every read ends by the deadline of its claim.
/// Thread-bound: the RPC thread.
class Fetches final : private cluster::Source::Sink, private kj::TaskSet::ErrorHandler {
 public:
  struct Options {
    Duration deadline = std::chrono::seconds(2);  ///< For all bytes of a claim.
    /// For tests that show that the simulator finds a broken rule.
    struct Mistakes {
      bool forgets_generation = false;  ///< A fetch continues in the generation after a reset.
    } mistakes{};
  };
  /// Parts of one chain that are taken from one owner after the other, before the claim is
  /// answered.
  static constexpr std::size_t kMostRuns = 8;

  using Stats = FetchStats;

  /// `source` is null where blocks are only in the local pool. It and all references outlive the
  /// object; after that the source is not called again. `clock` is the source's.
  Fetches(CacheService& service, cluster::Source* source, Background& background, kj::Timer& timer,
          const Clock& clock, const Options& options);
  /// Cancels every wait.
  ~Fetches() noexcept(false);

  /// Whether blocks can be in flight, so that an open() may have to wait.
  [[nodiscard]] bool has_source() const noexcept { return source_ != nullptr; }

  /// The length of the prefix of `keys`, none of which is local, at the best owner. None: no source
  /// can be queried. No promise is made then, so that a local lookup does not pay for it.
  kj::Maybe<kj::Promise<std::size_t>> reach(const Id128& connection,
                                            std::span<const BlockKey> keys);

  /// The blocks that a claim got beyond the local ones.
  struct Extension {
    std::size_t blocks = 0;
    cluster::Arrival arrival;
  };
  /// Extends the claim under `token`, which has the first `ready` of `keys`, by blocks that are in
  /// flight and by those that can be fetched sooner than computed. Resolves when their frames are
  /// reserved. None: there is nothing to extend it by.
  kj::Maybe<kj::Promise<Extension>> extend(const Id128& connection, const Id128& token,
                                           std::span<const BlockKey> keys, std::size_t ready,
                                           const cluster::ComputeTime& compute = {});
  /// The claim has ended: an extend() in flight must not make it anew. Idempotent.
  void ended(const Id128& token);

  /// Why an open() stopped waiting.
  enum class Late : std::uint8_t {
    kNo,
    kStuck,  ///< The blocks' owner does not respond.
    kSlow,   ///< The last block is predicted to arrive too late.
  };
  struct Arrived {
    CacheService::Opened opened;
    Late late = Late::kNo;
  };
  /// The time after which a load is of no use.
  struct Wait {
    Duration patience{};  ///< For the first blocks, unconditionally.
    /// Until the last block; kForever: while the owner responds; no value: for `patience`.
    std::optional<Duration> worth{};
    static constexpr Duration kForever = Duration::max();
    Duration computing{};  ///< Time in which the waiting engine computes the blocks; 0: unknown.
  };
  /// Calls CacheService::open_arrived() once blocks have arrived, or when waiting has no use.
  /// Errors: those of open_arrived(); kCancelled after released().
  kj::Promise<Result<Arrived>> open(const Id128& connection, const Id128& token, std::size_t first,
                                    std::size_t count, engine::PinId pin, const Wait& wait);
  /// The worker releases a pin; an open() that waits under that name ends with kCancelled.
  /// Idempotent.
  void released(const Id128& connection, engine::PinId pin);

  [[nodiscard]] Stats stats() const noexcept { return stats_; }

 private:
  using Block = cluster::Source::Block;
  using SharedRequest = cluster::Source::SharedRequest;
  using SharedLease = cluster::Source::SharedLease;
  /// An engine that computes what it has stopped loading.
  struct Recomputing {
    TimePoint stuck_at{};  ///< When the blocks' owner counted as stuck.
    TimePoint until{};
  };
  struct Plan;
  struct Opening;
  /// The queue position of a block in flight.
  struct Coming {
    const cluster::SourceRate* rate = nullptr;  ///< Its owner's.
    std::uint64_t end = 0;                      ///< The end of its batch, as a position of `rate`.
  };
  using OnePlan = std::shared_ptr<Plan>;

  // ---- claims
  kj::Promise<void> query_source(const OnePlan& plan);
  std::size_t worth_fetching(Plan& plan, const cluster::Source::Located& located);
  void note_joined(Plan& plan) const;
  kj::Promise<void> take_frames(const OnePlan& plan, const SharedLease& lease,
                                std::size_t leased_from);
  // ---- results of the source
  void remove_unwanted(std::vector<Block>& blocks) override;
  void queued(std::span<const Block> blocks, const cluster::SourceRate& rate,
              std::uint64_t end) override;
  kj::Promise<void> arrived(SharedRequest request, SharedLease lease,
                            std::vector<Block> blocks) override;
  void failed(const SharedRequest& request, std::vector<Block>&& blocks) override;
  void rejected(std::span<const Block> blocks) override;
  void given_up(std::span<const Block> blocks) override;
  void quiesced(std::span<const Block> blocks) override;
  void progressed() override;
  void seal(const cluster::Source::Request& request, const cluster::Source::Lease& lease,
            std::span<const Block> blocks);
  void retry(const SharedRequest& request, std::vector<Block>&& blocks);
  void quiesce(engine::FrameIndex frame);
  // ---- waiting opens
  void wake_openings();
  kj::Promise<Result<Arrived>> wait_and_open(const std::shared_ptr<Opening>& opening);
  [[nodiscard]] const Coming* coming(const Id128& token, std::size_t place) const;
  [[nodiscard]] TimePoint stuck_at(const Opening& opening) const;
  void note_recomputing(const Opening& opening, TimePoint now);
  [[nodiscard]] Late is_late(const Opening& opening, TimePoint now) const;
  [[nodiscard]] TimePoint judged_at(const Opening& opening) const;
  void taskFailed(kj::Exception&& exception) override;

  CacheService& service_;
  cluster::Source* const source_;
  Background& background_;
  kj::Timer& timer_;
  const Clock& clock_;
  const Options options_;
  std::unordered_map<engine::FrameIndex, Coming> coming_;
  std::set<Id128> extending_;                           ///< Claims with an extend() in flight.
  std::set<std::pair<Id128, engine::PinId>> opening_;   ///< Waiting, by connection and name.
  std::unordered_map<Id128, Recomputing> recomputing_;  ///< By connection; some are over.
  kj::Own<kj::PromiseFulfiller<void>> progress_;
  kj::ForkedPromise<void> progress_made_;
  Stats stats_;
  kj::TaskSet tasks_;
};

}  // namespace pegaflow::server
