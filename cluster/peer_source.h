#pragma once
/// \file
/// The other nodes as a source of blocks: leases, reads in batches, and their confirmation.

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
/// prefix. When a read has completed, and only if the lease had not ended by then (by
/// CLOCK_BOOTTIME, counted from before it was requested), the owner is asked whether it still holds
/// the lease, by its own clock; then the blocks have arrived. Each lease has at most one such
/// request in flight, for all blocks that were read before it, while the next blocks are read.
///
/// Each owner has one queue. The fabric has as many bytes of one owner as arrive in kWindowTime, in
/// batches of about kBatchTime. Therefore blocks that no claim waits for are not read, except for
/// those batches.
///
/// Every wait has an end: the deadline of a request to a peer, and for a read the deadline of its
/// Request or the end of its lease. Thread-bound: the RPC thread.
class PeerSource final : public Source, private kj::TaskSet::ErrorHandler {
 public:
  struct Options {
    std::chrono::milliseconds lease = kLease;
    std::size_t batch_bytes = std::size_t{8} << 20;  ///< The most in one batch.
    std::size_t batches = 256;                       ///< The most at the fabrics; others wait.
    std::size_t batches_per_owner = 16;              ///< At the fabrics, for one owner; at least 1.
    /// For tests that show that the simulator finds a broken rule.
    struct Mistakes {
      bool skips_confirmation = false;  ///< Blocks are sealed by the reader's clock alone.
    } mistakes{};
  };
  static constexpr std::chrono::milliseconds kLease{10000};
  /// Duration of one batch at its owner's rate, and of all reads from one owner at the fabric.
  static constexpr Duration kBatchTime = std::chrono::milliseconds(2);
  static constexpr Duration kWindowTime = std::chrono::milliseconds(6);
  /// Reads by a lease end this long before it does.
  static constexpr Duration kLeaseMargin = std::chrono::seconds(1);

  using Stats = PeerSourceStats;

  /// One transport into the local pool; a lane's number is its index in the list.
  struct Lane {
    Fabric* fabric = nullptr;
    RegionId pool{};  ///< The local pool, on the fabric.
  };

  /// All outlive it. `boot` is a BootClock, `clock` the fabrics'. Tickets of batches are below
  /// 2^63.
  PeerSource(Lenders& peers, std::vector<Lane> lanes, const Clock& clock, const Clock& boot,
             const Options& options);
  /// Cancels what is in flight; the Sink receives no more calls. The fabrics may write to frames
  /// until they are destroyed.
  ~PeerSource() noexcept(false);

  [[nodiscard]] bool is_ready() const override { return peers_.has_ready(); }
  kj::Promise<Located> locate(const Bytes32& space, std::span<const BlockKey> keys) override;
  kj::Promise<SharedLease> lease(SharedRequest request, std::vector<BlockKey> keys,
                                 Located located) override;
  void read(const SharedRequest& request, const SharedLease& lease,
            std::vector<Block>&& blocks) override;
  void end(const SharedLease& lease) override;

  /// A completion of a fabric.
  void completed(const Fabric::Completion& completion);

  [[nodiscard]] Stats stats() const;
  /// The rate of reads from that node; null before the first.
  [[nodiscard]] const SourceRate* rate(const Lender& lender) const;

 private:
  struct Batch;
  struct PeerLease;
  struct Candidates;
  /// The results of one completion.
  struct Verdict {
    std::vector<Block> failed;
    std::optional<Errc> why;  ///< The last chunk's error; none: the lease had ended.
    bool is_in_time = false;
  };
  /// The reads from one node.
  struct Queue {
    std::shared_ptr<SourceRate> rate = std::make_shared<SourceRate>();
    std::deque<std::unique_ptr<Batch>> waiting{};  ///< Not at the fabric yet.
    std::uint64_t last_ticket = 0;                 ///< The last that was given to the fabric.
  };
  using OneLease = std::shared_ptr<PeerLease>;

  kj::Promise<SharedLease> lease_from(SharedRequest request, std::vector<BlockKey> keys,
                                      std::vector<Lenders::Owner> owners);
  OneLease note_granted(const Lenders::Owner& owner, LeaseGrant&& grant, std::size_t shards,
                        TimePoint requested);
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
  std::unordered_map<const Lender*, Queue> queues_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Batch>> batches_;  ///< By ticket, not quiesced.
  std::size_t waiting_ = 0;                                            ///< Batches in queues.
  std::size_t confirming_ = 0;  ///< Leases with a confirmation in flight.
  Stats stats_;
  kj::TaskSet tasks_;
};

}  // namespace pegaflow::cluster
