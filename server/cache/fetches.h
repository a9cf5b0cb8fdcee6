#pragma once
/// \file
/// Brings blocks from other nodes: who has them, a lease, the bytes, and the seal.

#include <array>
#include <cstdint>
#include <deque>
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
#include "cluster/lender.h"
#include "cluster/source_rate.h"
#include "server/cache/background.h"
#include "server/cache/cache_service.h"
#include "server/cache/histogram.h"
#include "transport/fabric.h"

namespace pegaflow::server {

/// Fetches what claims want and this node has not.
///
/// A fetch asks every peer how much of a prefix it has, takes a lease from the one with most, gets
/// frames for what was lent and reads into them, in the order of the prefix. When a read has ended,
/// and only if the lease had not by then (by CLOCK_BOOTTIME, counted from before it was asked for),
/// the owner is asked whether it still holds the lease, by its own clock; then the blocks are
/// sealed. Of one lease one such question is asked at a time, for all that was read before it,
/// while the next blocks are read. What fails is asked for once more from another owner, and from
/// one more; then it is given up, and whoever waits for it computes it. A frame that may still be
/// written to stays as it is until the fabric says that it is settled.
///
/// Each owner has one queue, in the order of the claims. What a few milliseconds of its rate bring
/// is at the fabric at a time, in batches of about kBatchTime. So what no claim waits for any more
/// is not read, except for those batches; what was read is sealed all the same.
///
/// A claim that names what computing takes gets blocks of another node only where they are
/// predicted to arrive sooner: by the rate of what was read from that node lately, behind what is
/// queued there. A node whose rate is not known, or was low and not measured for a while, is probed
/// with one batch. While a load waits for its blocks, the prediction is made anew each time
/// something arrives: open() ends the wait of a load that would be computed sooner by now, or whose
/// source has stopped answering. Of the loads of one engine that wait for such a source one ends at
/// once, and the others when that one is computed: a source that pauses for a moment costs no more.
///
/// A fetch belongs to the generation of the namespace in which its claim was made; after a reset it
/// brings nothing more.
///
/// Every wait has an end: a question to a peer its deadline, a read the fetch's own, which counts
/// from the claim. Thread-bound: the RPC thread.
class Fetches final : private kj::TaskSet::ErrorHandler {
 public:
  struct Options {
    Duration deadline = std::chrono::seconds(2);  ///< Of all bytes of a claim.
    std::chrono::milliseconds lease = kLease;
    std::size_t batch_bytes = std::size_t{8} << 20;  ///< Sealed together.
    std::size_t batches = 256;                       ///< At the fabrics; others wait.
    std::size_t batches_per_owner = 16;              ///< Of them; at least one.
    /// For tests that show that the simulator finds a broken rule.
    struct Mistakes {
      bool forgets_generation = false;  ///< A fetch goes on in the generation after a reset.
      bool skips_confirmation = false;  ///< Blocks are sealed by the reader's clock alone.
    } mistakes{};
  };
  static constexpr std::chrono::milliseconds kLease{10000};
  /// How long a batch takes at the rate of its owner, and what is at the fabric of one owner.
  static constexpr Duration kBatchTime = std::chrono::milliseconds(2);
  static constexpr Duration kWindowTime = std::chrono::milliseconds(6);
  /// Before a lease's end nothing more is read by it.
  static constexpr Duration kLeaseMargin = std::chrono::seconds(1);
  static constexpr std::size_t kMostOwners = 3;
  static constexpr std::size_t kMostLanes = 2;
  /// Parts of one chain that are taken from one owner after the other, before the claim is
  /// answered.
  static constexpr std::size_t kMostRuns = 8;

  struct Stats {
    std::uint64_t claims = 0;         ///< That asked the peers.
    std::uint64_t claims_coming = 0;  ///< Of them, those that something came of.
    std::uint64_t lookups = 0;        ///< That asked the peers.
    std::uint64_t blocks = 0;         ///< Whole and in time.
    std::uint64_t bytes = 0;          ///< Of them.
    std::uint64_t given_up = 0;       ///< Blocks.
    std::uint64_t declined = 0;       ///< Blocks that were not fetched: computing is faster.
    std::uint64_t unwanted = 0;       ///< Blocks that were not asked for: their claims had ended.
    std::uint64_t retried = 0;        ///< Blocks, asked for from another owner.
    std::uint64_t outlived = 0;       ///< Blocks that came whole after their lease's end.
    std::uint64_t unconfirmed = 0;    ///< Blocks whose owner did not confirm the lease behind them.
    std::uint64_t corrupt = 0;        ///< Blocks with wrong bytes, by the lane's own checksum.
    /// Blocks given up while the lane could still write to their frames, which waited for it.
    std::uint64_t unquiesced = 0;
    std::array<std::uint64_t, kMostLanes> lane_bytes{};  ///< `bytes`, by lane.
    std::uint64_t leases = 0;
    std::size_t batches = 0;  ///< Under way now.
    Duration oldest{};        ///< Age of the oldest read that is not settled; 0 without one.
    Histogram duration;       ///< Of reads: from the fabric's acceptance to the answer.
  };

  /// A way for bytes into our pool; the number of one is its place in the list.
  struct Lane {
    Fabric* fabric = nullptr;
    RegionId pool{};  ///< Ours, on the fabric.
  };

  /// All outlive it. `boot` is a BootClock, `clock` the fabrics'. Tickets of batches are below
  /// 2^63.
  Fetches(CacheService& service, cluster::Lenders& peers, std::vector<Lane> lanes,
          Background& background, kj::Timer& timer, const Clock& clock, const Clock& boot,
          const Options& options);
  /// Answers nothing any more. Frames that are written to stay so until the fabrics are gone.
  ~Fetches() noexcept(false);

  /// How many of `keys`, none of which is here, one peer has from the first on.
  kj::Promise<std::size_t> reach(const Id128& connection, std::span<const BlockKey> keys);

  /// What a claim got from other nodes.
  struct Extension {
    std::size_t blocks = 0;
    cluster::Arrival arrival;
  };
  /// Makes the claim under `token`, which has the first `ready` of `keys`, longer by what is coming
  /// already and what can be fetched sooner than it is computed. Returns by how many blocks; their
  /// frames are there then.
  kj::Promise<Extension> extend(const Id128& connection, const Id128& token,
                                std::span<const BlockKey> keys, std::size_t ready,
                                const cluster::ComputeTime& compute = {});
  /// The claim was ended: an extend() that is under way must not make it anew.
  void ended(const Id128& token);

  /// Why an open() did not wait any longer.
  enum class Late : std::uint8_t {
    kNo,
    kStuck,  ///< The blocks' source does not answer.
    kSlow,   ///< The last of them is predicted to arrive too late.
  };
  struct Arrived {
    CacheService::Opened opened;
    Late late = Late::kNo;
  };
  /// How long a load may take until it is of no use.
  struct Wait {
    Duration patience{};  ///< For the first blocks, whatever happens.
    /// Until the last block; kForever: as long as the source answers; no value: for `patience`.
    std::optional<Duration> worth{};
    static constexpr Duration kForever = Duration::max();
    Duration computing{};  ///< Of the blocks, by the engine that waits; 0: not known.
  };
  /// CacheService::open_arrived(), once it has something to answer, or when waiting has no use.
  kj::Promise<Result<Arrived>> open(const Id128& connection, const Id128& token, std::size_t first,
                                    std::size_t count, engine::PinId pin, const Wait& wait);
  /// The worker lets go of a pin; an open() that waits under that name ends with kCancelled.
  void released(const Id128& connection, engine::PinId pin);

  /// From a fabric.
  void completed(const Fabric::Completion& completion);

  [[nodiscard]] Stats stats() const;
  /// Of what is read from that node; null before the first read.
  [[nodiscard]] const cluster::SourceRate* rate(const cluster::Lender& lender) const;

 private:
  /// An engine that computes what it has stopped loading.
  struct Recomputing {
    TimePoint stuck_at{};  ///< When its source counted as stuck.
    TimePoint until{};
  };
  struct Lease;
  struct Plan;
  struct Block;
  struct Batch;
  struct Opening;
  /// One owner of blocks that are read.
  struct Source {
    std::shared_ptr<cluster::SourceRate> rate = std::make_shared<cluster::SourceRate>();
    std::deque<std::unique_ptr<Batch>> queue{};  ///< Not at the fabric yet.
    std::uint64_t last_ticket = 0;               ///< Of what the fabric was given last.
  };
  /// Where a block is that has not arrived.
  struct Coming {
    Source* source = nullptr;
    std::uint64_t end = 0;  ///< Of its batch, as a position of the source.
  };
  using OnePlan = std::shared_ptr<Plan>;
  using OneLease = std::shared_ptr<Lease>;

  kj::Promise<void> ask_peers(const OnePlan& plan);
  std::size_t worth_fetching(Plan& plan, const cluster::Lenders::Owner& owner);
  void note_joined(Plan& plan) const;
  kj::Promise<OneLease> take_lease(OnePlan plan, std::vector<BlockKey> keys,
                                   std::vector<cluster::Lenders::Owner> owners);
  kj::Promise<void> take_frames(const OnePlan& plan, const OneLease& lease, std::size_t lent_from);
  void read(const OnePlan& plan, const OneLease& lease, std::vector<Block>&& blocks);
  bool submit(Source& source, std::unique_ptr<Batch> batch);
  void submit_some(Source& source);
  void submit_all();
  void forget_unwanted(std::vector<Block>& blocks);
  void confirm(const OnePlan& plan, const OneLease& lease);
  kj::Promise<void> seal(OnePlan plan, OneLease lease, std::vector<Block> blocks);
  void seal_some(const Plan& plan, const Lease& lease, std::span<const Block> blocks);
  void retry(const OnePlan& plan, std::vector<Block>&& blocks);
  void drop(const std::vector<Block>& blocks);
  void settle(engine::FrameIndex frame);
  void let_go(Lease& lease);
  void progressed();
  kj::Promise<Result<Arrived>> wait_and_open(const std::shared_ptr<Opening>& opening);
  [[nodiscard]] const Coming* coming(const Id128& token, std::size_t place) const;
  [[nodiscard]] TimePoint stuck_at(const Opening& opening) const;
  void note_recomputing(const Opening& opening, TimePoint now);
  [[nodiscard]] Late is_late(const Opening& opening, TimePoint now) const;
  [[nodiscard]] TimePoint judged_at(const Opening& opening) const;
  void taskFailed(kj::Exception&& exception) override;

  CacheService& service_;
  cluster::Lenders& peers_;
  const std::vector<Lane> lanes_;
  Background& background_;
  kj::Timer& timer_;
  const Clock& clock_;
  const Clock& boot_;
  const Options options_;
  std::uint64_t last_ticket_ = 0;
  std::unordered_map<const cluster::Lender*, Source> sources_;
  std::unordered_map<engine::FrameIndex, Coming> coming_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Batch>> batches_;  ///< By ticket, not settled.
  std::size_t waiting_ = 0;                             ///< Batches in the queues of sources.
  std::size_t confirming_ = 0;                          ///< Leases whose owners are asked.
  std::set<Id128> extending_;                           ///< Claims that extend() is at work on.
  std::set<std::pair<Id128, engine::PinId>> opening_;   ///< Waiting, by connection and name.
  std::unordered_map<Id128, Recomputing> recomputing_;  ///< By connection; some are over.
  kj::Own<kj::PromiseFulfiller<void>> progress_;
  kj::ForkedPromise<void> progress_made_;
  Stats stats_;
  kj::TaskSet tasks_;
};

}  // namespace pegaflow::server
