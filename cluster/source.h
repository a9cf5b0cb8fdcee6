#pragma once
/// \file
/// The interface of a place that blocks are fetched from.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <kj/async.h>

#include "base/block_key.h"
#include "base/clock.h"
#include "base/id128.h"
#include "capnp/wire/peer_codec.h"
#include "cluster/source_rate.h"
#include "engine/ssd/proof.h"
#include "transport/region.h"

namespace pegaflow::cluster {

/// A place that blocks are fetched from, such as the other nodes.
///
/// The blocks of a source belong to *owners*, for example nodes. Each owner has one queue and one
/// SourceRate, which predicts when queued blocks arrive. A fetch takes three steps: locate() finds
/// the owners of a prefix, lease() makes one of them keep its blocks in place, and read() reads the
/// leased blocks into frames. The results of reads go to the Sink, batch by batch.
///
/// A frame that was passed to read() belongs to the source until the Sink receives its block in
/// remove_unwanted(), arrived(), failed(), rejected() or quiesced(). Thread-bound: the RPC thread.
class Source {
 public:
  /// A block and the frame that its bytes go to.
  struct Block {
    std::size_t place = 0;               ///< Index of its key in the request.
    std::uint32_t frame = 0;             ///< The caller's number of the frame.
    std::vector<std::uint64_t> offsets;  ///< Offsets of its pages in the pool, by shard.
    std::size_t leased = 0;              ///< Its index in the lease.
    /// Set by a source that is a disk of this node, once its bytes have arrived.
    std::optional<engine::ssd::Proven> proven{};
  };

  /// The blocks that one claim requests.
  struct Request {
    Bytes32 space{};                        ///< The namespace, by the name that nodes use for it.
    std::vector<std::uint64_t> page_bytes;  ///< Page sizes of a block, by shard.
    std::vector<BlockKey> keys;
    TimePoint deadline{};  ///< When all reads end, by the clock of the source.
    /// The bytes that are about to be leased, for predictions; read() moves them into the owner's
    /// queue.
    std::unique_ptr<SourceRate::Reserved> reserved{};
    /// The blocks are read from disks of this node for another one: they are sealed as replicas,
    /// and read from nowhere else.
    bool is_for_node = false;
    /// Owners, identified by their rates, that granted no lease or did not deliver a block. lease()
    /// skips them.
    std::vector<const SourceRate*> failed{};

    [[nodiscard]] std::size_t shards() const { return page_bytes.size(); }
    /// The pages of a block that have bytes.
    [[nodiscard]] std::size_t pages() const {
      return page_bytes.size() -
             static_cast<std::size_t>(std::count(page_bytes.begin(), page_bytes.end(), 0));
    }
    [[nodiscard]] std::uint64_t block_bytes() const {
      return std::accumulate(page_bytes.begin(), page_bytes.end(), std::uint64_t{0});
    }
    void note_failed(const SourceRate* owner) {
      if (std::find(failed.begin(), failed.end(), owner) == failed.end()) failed.push_back(owner);
    }
  };
  /// The source keeps a request until its last block has quiesced.
  using SharedRequest = std::shared_ptr<Request>;
  /// The most owners that one request may try.
  static constexpr std::size_t kMostOwners = 3;

  /// The owners of a prefix, in a form that only the source reads.
  struct Owners {
    Owners() = default;
    Owners(const Owners&) = delete;
    Owners& operator=(const Owners&) = delete;
    virtual ~Owners() = default;
  };
  struct Located {
    std::size_t blocks = 0;             ///< Length of the prefix that the best owner has.
    std::shared_ptr<SourceRate> rate;   ///< The best owner's; null without blocks.
    std::uint64_t batch_bytes = 0;      ///< Limit of the bytes of one batch.
    std::shared_ptr<const Owners> all;  ///< Null without blocks.
    /// Those of the blocks that the best owner, another node, first reads from its disks.
    OnDisks on_disks{};
    std::shared_ptr<SourceRate> disks{};  ///< The rate at which they became ready before.

    /// Whether the arrival of the blocks can be predicted.
    [[nodiscard]] bool is_known() const;
    /// Whether rates that were measured lately predict it.
    [[nodiscard]] bool is_fresh(TimePoint now) const;
    /// Bytes that are queued before the blocks.
    [[nodiscard]] std::uint64_t queued_bytes() const;
    /// When the owner counts as stuck; see SourceRate.
    [[nodiscard]] TimePoint stuck_at() const;
    /// Predicts when `bytes` of the blocks arrive, of which `disk_bytes` are on disks: these when
    /// they have been read and the last batch has followed over the lane.
    [[nodiscard]] Arrival predict(std::uint64_t bytes, std::uint64_t disk_bytes) const;
  };

  /// The blocks of one owner, among those that were asked for. The same owner has the same rate in
  /// each answer.
  struct Holding {
    std::shared_ptr<SourceRate> rate;
    std::uint64_t batch_bytes = 0;      ///< Limit of the bytes of one batch.
    std::vector<bool> has;              ///< By key.
    std::shared_ptr<const Owners> all;  ///< Only this owner.
    OnDisks on_disks{};                 ///< See Located; any of its blocks.
    std::shared_ptr<SourceRate> disks{};
    /// For a lease on `blocks` of them.
    [[nodiscard]] Located located(std::size_t blocks) const {
      Located made{.blocks = blocks, .rate = rate, .batch_bytes = batch_bytes, .all = all};
      made.on_disks = on_disks;
      made.on_disks.blocks = std::min(on_disks.blocks, blocks);
      made.disks = disks;
      return made;
    }
  };

  /// Blocks that one owner keeps in place.
  struct Lease {
    Lease() = default;
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    virtual ~Lease() = default;

    /// Length of the leased prefix, with the blocks behind it that the owner reads from its disks:
    /// read() waits for them.
    std::size_t blocks = 0;
    std::vector<std::uint64_t> checksums;  ///< One per page, block by block; empty: none known.
  };
  using SharedLease = std::shared_ptr<Lease>;

  /// Leased blocks in the pool of their owner, for processes of this node that read them
  /// themselves.
  struct InPool {
    Id128 node;                                ///< The owner.
    std::shared_ptr<SourceRate> rate;          ///< As in Located.
    const FabricDescriptor* fabric = nullptr;  ///< How to read its pool, the first region.
    /// The offset of each page in the pool in units of kSlotAlignment: all shards of the first
    /// block, then of the second, and so on.
    std::span<const std::uint32_t> pages{};
  };

  /// Receives the results of reads.
  class Sink {
   public:
    /// Removes the blocks that no claim waits for, and frees their frames. Called before each batch
    /// is read.
    virtual void remove_unwanted(std::vector<Block>& blocks) = 0;
    /// The blocks are queued as one batch, which ends at position `end` of the queue of `rate`.
    virtual void queued(std::span<const Block> blocks, const SourceRate& rate,
                        std::uint64_t end) = 0;
    /// The bytes of the blocks are in their frames, and the lease covered the reads. The promise
    /// resolves when the blocks are sealed.
    virtual kj::Promise<void> arrived(SharedRequest request, SharedLease lease,
                                      std::vector<Block> blocks) = 0;
    /// The blocks did not arrive, and their frames are quiesced: another owner may be tried.
    virtual void failed(const SharedRequest& request, std::vector<Block>&& blocks) = 0;
    /// The blocks were not read, because no time was left or the fabric rejected the batch. Their
    /// frames are quiesced.
    virtual void rejected(std::span<const Block> blocks) = 0;
    /// The blocks did not arrive, and a device may still write to their frames until quiesced().
    virtual void given_up(std::span<const Block> blocks) = 0;
    /// No device can write to the frames of these given-up blocks any longer.
    virtual void quiesced(std::span<const Block> blocks) = 0;
    /// Blocks arrived or failed, or their predicted arrival changed.
    virtual void progressed() = 0;

   protected:
    ~Sink() = default;
  };

  virtual ~Source() noexcept(false) = default;

  /// Call it once, before the first read(). The source must not be called once `sink` is gone.
  virtual void deliver_to(Sink& sink) { sink_ = &sink; }

  /// Whether an owner can be queried now.
  [[nodiscard]] virtual bool is_ready() const = 0;
  /// Finds the owners of the longest prefixes of `keys`, which need not outlive the call.
  virtual kj::Promise<Located> locate(const Bytes32& space, std::span<const BlockKey> keys) = 0;
  /// The same at these nodes, by their incarnations, and at no other. What is on disks of this node
  /// is found as well. `nodes` is not empty and need not outlive the call.
  virtual kj::Promise<Located> locate_at(std::span<const Id128> nodes, const Bytes32& space,
                                         std::span<const BlockKey> keys) {
    static_cast<void>(nodes);  // A source without nodes.
    return locate(space, keys);
  }
  /// The prefix of `keys` that each owner has.
  virtual kj::Promise<std::vector<Holding>> locate_prefixes(const Bytes32& space,
                                                            std::span<const BlockKey> keys) = 0;
  /// Which of `keys` each owner has.
  virtual kj::Promise<std::vector<Holding>> locate_each(const Bytes32& space,
                                                        std::span<const BlockKey> keys) = 0;
  /// Takes a lease on a prefix of `keys` from the best of the located owners that grants one. The
  /// promise resolves to null when none does before the request's deadline.
  virtual kj::Promise<SharedLease> lease(SharedRequest request, std::vector<BlockKey> keys,
                                         Located located) = 0;
  /// Queues the blocks behind all earlier reads from that owner. Their order is kept.
  virtual void read(const SharedRequest& request, const SharedLease& lease,
                    std::vector<Block>&& blocks) = 0;
  /// The caller will start no further read under this lease. It is released after the last read.
  virtual void end(const SharedLease& lease) = 0;

  /// Where the blocks of the lease are, if all of them are in the pool of another node, which is
  /// read over a fabric of this backend, and the lease has not ended. The result is valid in this
  /// event-loop iteration.
  [[nodiscard]] virtual std::optional<InPool> in_pool(const SharedLease& lease,
                                                      std::string_view backend) const {
    static_cast<void>(lease);
    static_cast<void>(backend);
    return std::nullopt;
  }
  /// Whether the owner has kept the blocks in place until now, for blocks that in_pool() has found.
  /// Not after end(). False as well if it has not answered within `patience`.
  virtual kj::Promise<bool> confirm_reads(const SharedLease& lease, Duration patience) {
    static_cast<void>(lease);
    static_cast<void>(patience);
    return false;
  }

 protected:
  Sink& sink() noexcept { return *sink_; }

 private:
  Sink* sink_ = nullptr;
};

}  // namespace pegaflow::cluster
