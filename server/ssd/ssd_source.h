#pragma once
/// \file
/// The disks of this node as a source of blocks.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include <kj/async-io.h>

#include "base/clock.h"
#include "cluster/source.h"
#include "cluster/source_rate.h"
#include "engine/ssd/proof.h"
#include "server/cache/cache_service.h"
#include "server/ssd/ssd_disks.h"

namespace pegaflow::server {

/// Reads blocks from the disks straight into frames of the pool. To predictions all disks are one
/// owner with one queue.
///
/// A lease keeps nothing in place: a block whose segment was used again since fails, and so does
/// one that does not prove itself; another source may then be tried. At the deadline of a request
/// its blocks are given up, and their frames stay with this object until the disk reports their
/// end. Thread-bound: the RPC thread.
class SsdSource final : public cluster::Source, private kj::TaskSet::ErrorHandler {
 public:
  /// All of them outlive it. `pool` is the memory that offsets of blocks refer to.
  SsdSource(SsdDisks& disks, CacheService& service, std::span<std::byte> pool, kj::Timer& timer,
            const Clock& clock);
  ~SsdSource() noexcept(false) override;

  [[nodiscard]] bool is_ready() const override;
  kj::Promise<Located> locate(const Bytes32& space, std::span<const BlockKey> keys) override;
  kj::Promise<std::vector<Holding>> locate_prefixes(const Bytes32& space,
                                                    std::span<const BlockKey> keys) override;
  kj::Promise<std::vector<Holding>> locate_each(const Bytes32& space,
                                                std::span<const BlockKey> keys) override;
  kj::Promise<SharedLease> lease(SharedRequest request, std::vector<BlockKey> keys,
                                 Located located) override;
  void read(const SharedRequest& request, const SharedLease& lease,
            std::vector<Block>&& blocks) override;
  void end(const SharedLease& lease) override;

  /// Whether this source made them.
  [[nodiscard]] static bool is_ours(const Owners& owners);
  [[nodiscard]] static bool is_ours(const Lease& lease);

  struct Stats {
    std::uint64_t reads_in_flight = 0;  ///< Blocks, given-up ones included.
    std::uint64_t given_up = 0;         ///< Blocks that did not arrive before their deadline.
    double bytes_per_second = 0;        ///< The recent rate; 0: unknown.
    std::uint64_t queued_bytes = 0;
  };
  [[nodiscard]] Stats stats() const;

 private:
  struct DiskOwner;
  struct DiskLease;
  struct Batch;
  struct Reading;

  [[nodiscard]] std::size_t prefix(const Bytes32& space, std::span<const BlockKey> keys) const;
  [[nodiscard]] Located located(std::size_t blocks);
  void submit_some();
  void submit(const Batch& batch, Block block);
  void ended(std::uint64_t number, SsdDisk::Loaded&& loaded);
  void expire(const SharedRequest& request);
  void taskFailed(kj::Exception&& exception) override;

  SsdDisks& disks_;
  CacheService& service_;
  std::span<std::byte> pool_;
  kj::Timer& timer_;
  const Clock& clock_;
  std::shared_ptr<cluster::SourceRate> rate_;
  std::shared_ptr<const DiskOwner> owner_;
  std::deque<std::unique_ptr<Batch>> waiting_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Reading>> reading_;
  std::uint64_t reading_bytes_ = 0;
  std::uint64_t last_number_ = 0;
  std::uint64_t given_up_ = 0;
  bool is_submitting_ = false;
  kj::TaskSet tasks_;
};

}  // namespace pegaflow::server
