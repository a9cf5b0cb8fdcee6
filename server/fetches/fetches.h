#pragma once
/// \file
/// Blocks in flight from other nodes: extends claims by them, seals them on arrival, and lets
/// workers wait for them.

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <kj/async-io.h>

#include "base/block_key.h"
#include "base/clock.h"
#include "cluster/source.h"
#include "cluster/source_rate.h"
#include "server/cache/background.h"
#include "server/cache/cache_service.h"
#include "server/fetches/fetch_stats.h"
#include "server/fetches/pool_reads.h"

namespace pegaflow::server {

class PeerSearch;

/// Hints of a router about the blocks of a prompt. They may be wrong: the owners decide.
struct FetchHints {
  /// The most nodes.
  static constexpr std::size_t kMost = 8;
  std::vector<Id128> nodes{};  ///< Asked first, instead of all; empty: all are asked.
  bool no_nodes = false;       ///< Computing is faster than reading from any node.
};

/// Fetches the blocks that claims want and this node does not have.
///
/// A fetch locates the missing prefix in the source, takes a lease from the owner that has the most
/// of it, reserves frames for the leased blocks, and passes them to the source, which reads them in
/// the order of the prefix. Blocks that arrive are sealed. Blocks that fail are requested from
/// another owner, until Source::kMostOwners have been tried. Then they are given up, and the
/// engines that wait for them compute them. A frame to which a device may still write is not reused
/// until the source reports it as quiesced.
///
/// An engine may send with a claim how fast it computes. Then blocks are fetched only if they are
/// predicted to arrive before the engine would have computed them. The prediction follows from the
/// recent rate of their owner and the bytes that are queued there. An owner whose rate is unknown,
/// or was low and has not been measured lately, is probed with one batch.
///
/// While a load waits, the prediction is repeated whenever the source makes progress. open() stops
/// waiting when the engine would now compute the blocks sooner, or when their owner has stopped
/// responding. If several loads of one engine wait for such an owner, one ends at once, and the
/// others only if the owner still does not respond when the engine has had time to compute that
/// one. So a short pause of an owner costs one load.
///
/// A fetch belongs to the namespace generation of its claim; after a reset it delivers no block.
///
/// Without a source no block is ever in flight. Every read ends by the deadline of its claim.
/// Thread-bound: the RPC thread.
class Fetches final : private cluster::Source::Sink, private kj::TaskSet::ErrorHandler {
 public:
  struct Options {
    Duration deadline = std::chrono::seconds(2);  ///< For all reads of a claim, from its start.
    /// Which blocks workers read out of the pools of other nodes themselves.
    PoolReads::Use direct_pool = PoolReads::Use::kAuto;
    /// Bugs that a test plants to show that the simulator detects them.
    struct Mistakes {
      bool forgets_generation = false;  ///< A fetch continues in the new generation after a reset.
    } mistakes{};
  };
  /// The most parts of one prefix, each leased from another owner, that extend() fetches before the
  /// claim is answered.
  static constexpr std::size_t kMostRuns = 8;

  using Stats = FetchStats;

  /// `source` is null where blocks are only in the local pool. It and all references outlive the
  /// object. `clock` is the source's.
  Fetches(CacheService& service, cluster::Source* source, Background& background, kj::Timer& timer,
          const Clock& clock, const Options& options);
  /// Ends every wait. The source must not be called afterwards: this object is its Sink.
  ~Fetches() noexcept(false);

  /// Whether blocks can be in flight, so that an open() may have to wait.
  [[nodiscard]] bool has_source() const noexcept { return source_ != nullptr; }

  /// Whether other tiers can be searched now: reach() may find more than the pool has.
  [[nodiscard]] bool may_reach() const { return source_ != nullptr && source_->is_ready(); }

  using Hints = FetchHints;

  /// Returns the length of the prefix of `keys`, none of which is local, that the best owner has.
  /// Returns no promise when no owner can be queried, so that purely local lookups stay cheap.
  kj::Maybe<kj::Promise<std::size_t>> reach(const Id128& connection, std::span<const BlockKey> keys,
                                            const Hints& hints = {});

  /// The blocks that a claim got beyond the local ones.
  struct Extension {
    std::size_t blocks = 0;
    cluster::Arrival arrival;
  };
  /// Extends the claim under `token`, which has the first `ready` of `keys`, by blocks that are in
  /// flight already and by blocks that can be fetched sooner than computed. Resolves when their
  /// frames are reserved. Returns no promise when there is nothing to extend it by.
  kj::Maybe<kj::Promise<Extension>> extend(const Id128& connection, const Id128& token,
                                           std::span<const BlockKey> keys, std::size_t ready,
                                           const cluster::ComputeTime& compute = {},
                                           const Hints& hints = {});
  /// As reach(), for a namespace with several kinds of blocks: the restorable units of the prompt,
  /// each block here or at one owner. 0: no more than are restorable from this node, or too many to
  /// be fetched within the limits of the store.
  kj::Maybe<kj::Promise<std::size_t>> reach_kinds(const Id128& connection,
                                                  std::span<const BlockKey> units,
                                                  std::size_t local_units);
  /// A claim on several kinds of blocks, of which some are in flight.
  struct ClaimOfKinds {
    CacheService::Restorable claimed;  ///< 0 units: none was made.
    cluster::Arrival arrival;
    bool is_ended = false;  ///< ended() was called for it: no claim may be made under its token.
  };
  /// Claims, under `token`, the longest prefix for which each block is here or at one owner, if it
  /// is longer than the one that is restorable from this node and the missing blocks can be fetched
  /// sooner than computed. All of them are leased before the first frame is taken; if one of them
  /// cannot be leased, or gets no frame, there is no claim. No frame is taken, and so no block
  /// evicted, where the limits of the store are too small for all of them. Returns no promise when
  /// no owner can have more. `compute` is in units.
  kj::Maybe<kj::Promise<ClaimOfKinds>> claim_kinds(const Id128& connection, const Id128& token,
                                                   std::span<const BlockKey> units,
                                                   std::size_t local_units,
                                                   const cluster::ComputeTime& compute = {});
  /// Call it when the claim has ended: an extend() or claim_kinds() in flight must not create it
  /// again. Idempotent.
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
    /// If the blocks are in the pool of another node: `opened` has no slots then.
    std::optional<PoolReads::Opened> in_pool{};
  };
  /// How long open() waits.
  struct Wait {
    Duration patience{};  ///< The longest wait for the first block, in any case.
    /// Waiting is useful if the last block is predicted to arrive within this time. kForever: as
    /// long as the owner responds. No value: for `patience`, without a prediction.
    std::optional<Duration> worth{};
    static constexpr Duration kForever = Duration::max();
    Duration computing{};  ///< The engine's time to compute the blocks; 0: unknown.
    /// The worker does not read the pools of other nodes: such blocks are fetched for it.
    bool through_pool = false;
    std::vector<std::uint64_t> known{};  ///< The names of the pools that it knows.
  };
  /// An answer to open() costs the worker a release and another open, several messages on this
  /// thread: for blocks that arrive one by one from a fast disk, more than all the rest. So open()
  /// gathers blocks, but no longer than this time, and no more bytes of the worker's pages.
  static constexpr Duration kGatherTime = std::chrono::milliseconds(4);
  static constexpr std::uint64_t kGatherBytes = std::uint64_t{16} << 20;
  /// Bytes that are copied in less time than another answer takes.
  static constexpr std::uint64_t kLeastGathered = std::uint64_t{2} << 20;
  /// Calls CacheService::open_arrived() once blocks have arrived, or when waiting is no longer
  /// useful.
  ///
  /// The first block of a claim is answered when it arrives. Later, while more of the blocks are in
  /// flight, open() waits until as many have arrived as there are before `first`, or half of
  /// `count`, within the limits above. So the answers grow at the start of a load and shrink at its
  /// end: copies never wait long for blocks that have arrived, and the load ends soon after its
  /// last block has arrived. The blocks of a slow source are answered one by one.
  /// Errors: those of open_arrived() and PoolReads::open(); kCancelled after released(); kGone for
  /// blocks that were to be fetched into the pool and were not.
  kj::Promise<Result<Arrived>> open(const Id128& connection, const Id128& token, std::size_t first,
                                    std::size_t count, engine::PinId pin, const Wait& wait);
  /// See PoolReads.
  kj::Promise<Result<bool>> confirm(const Id128& connection, engine::PinId pin) {
    return pools_.confirm(connection, pin);
  }
  /// Call it when the worker releases a pin: an open() that still waits for the blocks of this pin
  /// ends with kCancelled. Idempotent.
  void released(const Id128& connection, engine::PinId pin);
  /// Call it when a client's connection has ended.
  void left(const Id128& connection);
  /// Errors: kInvalidArgument for the token of a claim that has no block in this node's pool, or
  /// that is being made. The store knows the others.
  [[nodiscard]] Result<void> check_unused(const Id128& token) const;

  // ---- before an engine asks; see Prefetches

  /// Starts to fetch what is missing of a prefix of `keys` under a claim of this node's own, named
  /// `token`, for which only replicas are evicted. Claims of engines join it. Resolves to the
  /// number of blocks of the claim when their frames are reserved; 0: there is no claim. The caller
  /// ends it with ended() and CacheService::end_staging().
  kj::Promise<std::size_t> prefetch(CacheService::Wants wants, const Id128& token,
                                    std::vector<BlockKey> keys, Hints hints, Duration deadline);

  // ---- for other nodes; see Staging

  /// This frame is in flight for another node: unless an engine of this node claims its block until
  /// it arrives, the block is sealed as a replica.
  void note_staged(engine::FrameIndex frame) { staged_.insert(frame); }
  /// Resolves when the source has made progress.
  kj::Promise<void> progress();

  [[nodiscard]] Stats stats() const {
    Stats stats = stats_;
    pools_.count(stats);
    return stats;
  }

 private:
  using Block = cluster::Source::Block;
  using SharedRequest = cluster::Source::SharedRequest;
  using SharedLease = cluster::Source::SharedLease;
  /// An engine that computes a load which it has given up.
  struct Recomputing {
    TimePoint stuck_at{};  ///< When the blocks' owner began to count as stuck.
    TimePoint until{};     ///< When the engine will have computed it.
  };
  struct Plan;
  struct PlanOfKinds;
  struct PartOfKind;
  struct Opening;
  /// Blocks of a claim that its workers were to read, and that are fetched into the pool instead.
  struct IntoPool {
    bool is_made = false;  ///< Their frames are reserved.
    std::size_t end = 0;   ///< The place behind the last one in the claim.
  };
  /// The queue position of a block in flight.
  struct Coming {
    const cluster::SourceRate* rate = nullptr;  ///< Its owner's.
    std::uint64_t end = 0;                      ///< The end of its batch, as a position of `rate`.
  };
  using OnePlan = std::shared_ptr<Plan>;
  using OnePlanOfKinds = std::shared_ptr<PlanOfKinds>;

  // ---- claims
  kj::Promise<void> query_source(const OnePlan& plan);
  kj::Promise<cluster::Source::Located> locate(const Bytes32& space, std::span<const BlockKey> keys,
                                               const Hints& hints);
  [[nodiscard]] Result<CacheService::Fetch> fetch_slice(const Plan& plan, std::size_t first,
                                                        std::span<const BlockKey> keys,
                                                        std::size_t fetchable);
  std::size_t worth_fetching(Plan& plan, const cluster::Source::Located& located);
  void note_joined(Plan& plan) const;
  kj::Promise<void> take_frames(const OnePlan& plan, const SharedLease& lease,
                                std::size_t leased_from);
  std::size_t choose(Plan& plan, const cluster::Source::Located& located);
  kj::Promise<void> use(const OnePlan& plan, const SharedLease& lease);
  bool set_aside(const OnePlan& plan, const SharedLease& lease);
  kj::Promise<void> join_and_query(const OnePlan& plan);
  kj::Promise<void> read_pending(const OnePlan& plan);
  void add_pending(Plan& plan);
  // ---- claims on several kinds
  std::shared_ptr<PeerSearch> search_for(const Id128& connection, std::span<const BlockKey> units,
                                         std::size_t local_units);
  kj::Promise<ClaimOfKinds> make_claim(const OnePlanOfKinds& plan);
  bool is_worth(PlanOfKinds& plan);
  kj::Promise<void> lease_all(const OnePlanOfKinds& plan);
  kj::Promise<void> lease_rest(const OnePlanOfKinds& plan, std::size_t part);
  kj::Promise<bool> take_all_frames(const OnePlanOfKinds& plan);
  bool take_some_frames(PlanOfKinds& plan, PartOfKind& part, std::size_t count);
  void read_all(PlanOfKinds& plan);
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
  void note_joined_staging(const Id128& token, std::size_t first, std::size_t count);
  // ---- waiting opens
  void wake_openings();
  kj::Promise<Result<Arrived>> open_in_pool(const Id128& connection, const Id128& token,
                                            std::size_t first, std::size_t count, engine::PinId pin,
                                            const Wait& wait);
  kj::Promise<Result<Arrived>> open_here(const Id128& connection, const Id128& token,
                                         std::size_t first, std::size_t count, std::size_t behind,
                                         engine::PinId pin, const Wait& wait);
  void fetch_into_pool(const Id128& token);
  kj::Promise<Result<Arrived>> await_pool(const Id128& connection, const Id128& token,
                                          std::size_t first, std::size_t count, engine::PinId pin,
                                          const Wait& wait);
  kj::Promise<Result<Arrived>> wait_and_open(const std::shared_ptr<Opening>& opening);
  kj::Promise<Result<Arrived>> wait(const std::shared_ptr<Opening>& opening, TimePoint now,
                                    TimePoint until);
  [[nodiscard]] std::optional<TimePoint> gathers_until(Opening& opening, TimePoint now);
  [[nodiscard]] std::size_t enough_for(const Opening& opening);
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
  std::unordered_set<engine::FrameIndex> staged_;  ///< In flight for other nodes only.
  std::set<Id128> extending_;  ///< Claims with an extend() or claim_kinds() in flight.
  std::set<std::pair<Id128, engine::PinId>> opening_;   ///< Waiting, by connection and pin.
  std::unordered_map<Id128, Recomputing> recomputing_;  ///< By connection; may be outdated.
  kj::Own<kj::PromiseFulfiller<void>> progress_;
  kj::ForkedPromise<void> progress_made_;
  bool has_waiting_ = false;  ///< progress_made_ has a branch.
  Stats stats_;
  PoolReads pools_;
  std::unordered_map<Id128, IntoPool> into_pool_;  ///< By the token of the claim.
  kj::TaskSet tasks_;
};

}  // namespace pegaflow::server
