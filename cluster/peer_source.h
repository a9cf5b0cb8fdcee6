#pragma once
/// \file
/// The other nodes as a source of blocks: takes leases, reads in batches, and confirms the leases.

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include <kj/async.h>

#include "base/clock.h"
#include "cluster/lender.h"
#include "cluster/peer_stats.h"
#include "cluster/source.h"
#include "cluster/source_rate.h"
#include "transport/fabric.h"

namespace pegaflow::cluster {

/// Reads blocks from the pools of other nodes.
///
/// locate() queries every ready peer; lease() takes a lease from the peer that has the longest
/// prefix. Blocks count as arrived only after two checks. First, the lease had not ended by this
/// node's clock (CLOCK_BOOTTIME, counted from before the lease was requested) when the read
/// completed. Second, the owner confirms that it still held the lease, by its own clock. Each lease
/// has at most one confirmation in flight, which covers all blocks that were read before it; the
/// next blocks are read meanwhile.
///
/// An owner may answer with blocks that are pending: it reads them from its disks. They count as
/// leased. They wait here, in an order of their own, until the owner lends them, a part with each
/// further request; then they are read as all others. Blocks that do not become ready by the
/// deadline of their Request are rejected, and those that the owner gives up fail.
///
/// Each owner has one queue. Only as many bytes as arrive in kWindowTime are at the fabric (but at
/// least two batches), in batches that take about kBatchTime each. The rest stays in the queue, so
/// that blocks for which no claim waits any longer need not be read.
///
/// Every wait is bounded: a request to a peer has a deadline, and a read ends by the deadline of
/// its Request or kLeaseMargin before the end of its lease. Thread-bound: the RPC thread.
class PeerSource final : public Source, private kj::TaskSet::ErrorHandler {
 public:
  struct Options {
    std::chrono::milliseconds lease = kLease;        ///< The duration that is requested.
    std::size_t batch_bytes = std::size_t{8} << 20;  ///< Limit of the bytes of one batch.
    std::size_t batches = 256;           ///< Limit of batches at the fabrics; others wait.
    std::size_t batches_per_owner = 16;  ///< The same for one owner; at least 1.
    /// Bugs that a test plants to show that the simulator detects them.
    struct Mistakes {
      bool skips_confirmation = false;  ///< Blocks are sealed without the owner's confirmation.
    } mistakes{};
  };
  static constexpr std::chrono::milliseconds kLease{10000};
  /// The time that one batch should take at its owner's rate.
  static constexpr Duration kBatchTime = std::chrono::milliseconds(2);
  /// The time that all reads from one owner at the fabric should take.
  static constexpr Duration kWindowTime = std::chrono::milliseconds(6);
  /// Reads under a lease end this long before the lease does.
  static constexpr Duration kLeaseMargin = std::chrono::seconds(1);

  using Stats = PeerSourceStats;

  /// One transport to other nodes; a lane's number is its index in the list.
  struct Lane {
    Fabric* fabric = nullptr;
    RegionId pool{};  ///< The local pool, as registered with the fabric.
  };

  /// All references and fabrics outlive it. `boot` is a BootClock; `clock` is the clock of the
  /// fabrics. Tickets of its batches are below 2^63.
  PeerSource(Lenders& peers, std::vector<Lane> lanes, const Clock& clock, const Clock& boot,
             const Options& options);
  /// Cancels all requests; the Sink is not called again. The fabrics may write to frames until they
  /// are destroyed.
  ~PeerSource() noexcept(false) override;

  [[nodiscard]] bool is_ready() const override { return peers_.has_ready(); }
  kj::Promise<Located> locate(const Bytes32& space, std::span<const BlockKey> keys) override;
  kj::Promise<Located> locate_at(std::span<const Id128> nodes, const Bytes32& space,
                                 std::span<const BlockKey> keys) override;
  kj::Promise<std::vector<Holding>> locate_prefixes(const Bytes32& space,
                                                    std::span<const BlockKey> keys) override;
  kj::Promise<std::vector<Holding>> locate_each(const Bytes32& space,
                                                std::span<const BlockKey> keys) override;
  kj::Promise<SharedLease> lease(SharedRequest request, std::vector<BlockKey> keys,
                                 Located located) override;
  void read(const SharedRequest& request, const SharedLease& lease,
            std::vector<Block>&& blocks) override;
  void end(const SharedLease& lease) override;
  [[nodiscard]] std::optional<InPool> in_pool(const SharedLease& lease,
                                              std::string_view backend) const override;
  kj::Promise<bool> confirm_reads(const SharedLease& lease, Duration patience) override;

  /// Handles a completion of a batch, on any lane.
  void completed(const Fabric::Completion& completion);

  [[nodiscard]] Stats stats() const;
  /// The rate of reads from this node; null if it was never a candidate for a lease.
  [[nodiscard]] const SourceRate* rate(const Lender& lender) const;

 private:
  struct Batch;
  struct PeerLease;
  struct Staged;
  struct Candidates;
  /// The blocks of a batch that did not arrive, and the reason.
  struct Verdict {
    std::vector<Block> failed;
    std::optional<Errc> why;  ///< The error of the last failed block; none: the lease had ended.
    bool is_in_time = false;  ///< The lease had not ended.
  };
  /// The reads from one node.
  struct Queue {
    std::shared_ptr<SourceRate> rate = std::make_shared<SourceRate>();
    /// How fast blocks that are pending at the node became ready.
    std::shared_ptr<SourceRate> disks = std::make_shared<SourceRate>();
    std::deque<std::unique_ptr<Batch>> waiting{};  ///< Not at the fabric yet.
    std::uint64_t last_ticket = 0;                 ///< Ticket of the last batch at the fabric.
  };
  using OneLease = std::shared_ptr<PeerLease>;

  kj::Promise<SharedLease> lease_from(SharedRequest request, std::vector<BlockKey> keys,
                                      std::vector<Lenders::Owner> owners);
  Holding holding(Lender& peer, std::uint64_t life, std::vector<bool> has, const OnDisks& on_disks);
  OneLease note_granted(const Lenders::Owner& owner, LeaseGrant&& grant, std::size_t shards,
                        TimePoint requested);
  void queue_batches(const SharedRequest& request, const OneLease& lease, std::span<Block> blocks);
  // ---- blocks that are pending at their owner
  void wait_for_pending(const SharedRequest& request, PeerLease& lease, std::span<Block> blocks);
  void request_pending(const OneLease& lease);
  void note_pending(const OneLease& lease, Result<LeaseGrant>&& grant, TimePoint requested);
  void read_pending(PeerLease& lease, LeaseGrant&& grant, TimePoint requested);
  void lose_pending(PeerLease& lease, std::size_t from);
  void measure_pending(PeerLease& lease);
  void end_staging(PeerLease& lease);
  [[nodiscard]] Fabric::Batch to_fabric(const Batch& batch, TimePoint now) const;
  bool submit(Queue& queue, std::unique_ptr<Batch> batch);
  void submit_some(Queue& queue);
  void submit_all();
  void end_read(Batch& batch, const Fabric::Completion& completion);
  Verdict judge(Batch& batch, const Fabric::Completion& completion);
  void note_failure(const Batch& batch, const Verdict& verdict,
                    const Fabric::Completion& completion);
  void confirm(const SharedRequest& request, const OneLease& lease);
  kj::Promise<void> confirmed(const SharedRequest& request, const OneLease& lease,
                              std::vector<Block>&& blocks, const Result<bool>& held);
  void let_go(PeerLease& lease);
  void taskFailed(kj::Exception&& exception) override;

  Lenders& peers_;
  const std::vector<Lane> lanes_;
  const Clock& clock_;
  const Clock& boot_;
  const Options options_;
  std::uint64_t last_ticket_ = 0;
  std::uint64_t last_measured_ = 0;  ///< See Staged::measured.
  std::unordered_map<const Lender*, Queue> queues_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Batch>> batches_;  ///< By ticket; not quiesced.
  std::size_t waiting_ = 0;                                            ///< Batches in queues.
  std::size_t confirming_ = 0;  ///< Leases with a confirmation in flight.
  std::size_t staging_ = 0;     ///< Leases with blocks that are pending at their owner.
  Stats stats_;
  kj::TaskSet tasks_;
};

}  // namespace pegaflow::cluster
