#pragma once
/// \file
/// The disks of a simulated node.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <tuple>
#include <vector>

#include <kj/async.h>
#include <kj/timer.h>

#include "base/block_key.h"
#include "base/clock.h"
#include "cluster/source.h"
#include "engine/frames/block_listener.h"
#include "server/cache/cache_service.h"

namespace pegaflow::harness {

/// Disks as a source of blocks, as SsdSource is one: in virtual time, without a file. Every block
/// that an engine saves is written soon afterwards, with the bytes that it has then, and is never
/// lost. One block is read after the other. Thread-bound.
class SimDisks final : public cluster::Source,
                       private engine::BlockListener,
                       private kj::TaskSet::ErrorHandler {
 public:
  struct Faults {
    double failed = 0;  ///< Probability that a read fails.
    double slow = 0;    ///< Probability that a read takes up to `slowest`.
    Duration slowest{};
  };
  /// Rules that the disks break.
  struct Mistakes {
    bool drops_epoch = false;  ///< Blocks of any epoch are found.
  };

  /// All references outlive it. `pool` is the memory of the service's blocks.
  SimDisks(server::CacheService& service, std::span<std::byte> pool, kj::Timer& timer,
           const Clock& clock, std::uint64_t seed, const Mistakes& mistakes);
  ~SimDisks() noexcept override;
  SimDisks(const SimDisks&) = delete;
  SimDisks& operator=(const SimDisks&) = delete;

  void set_faults(const Faults& faults) { faults_ = faults; }
  /// Whether a read may still write to the page at that offset of the pool.
  [[nodiscard]] bool is_writing(std::uint64_t offset) const { return writing_.contains(offset); }

  [[nodiscard]] bool is_ready() const override { return true; }
  kj::Promise<Located> locate(const Bytes32& space, std::span<const BlockKey> keys) override;
  kj::Promise<std::vector<Holding>> locate_prefixes(const Bytes32& space,
                                                    std::span<const BlockKey> keys) override;
  kj::Promise<std::vector<Holding>> locate_each(const Bytes32& space,
                                                std::span<const BlockKey> keys) override;
  kj::Promise<SharedLease> lease(SharedRequest request, std::vector<BlockKey> keys,
                                 Located located) override;
  void read(const SharedRequest& request, const SharedLease& lease,
            std::vector<Block>&& blocks) override;
  void end(const SharedLease& /*lease*/) override {}

 private:
  struct DiskLease;
  struct Reading;
  struct Owner : Owners {};
  /// A block's name on a disk: namespace, epoch and key.
  using Name = std::tuple<Bytes32, std::uint64_t, std::uint64_t, BlockKey>;

  void sealed(engine::FrameIndex frame, From from) override;
  void dropped(engine::FrameIndex /*frame*/, bool /*is_evicted*/) override {}
  void write();
  [[nodiscard]] const std::vector<std::byte>* find(const engine::ssd::Origin& origin,
                                                   const BlockKey& key) const;
  [[nodiscard]] Duration some_time();
  void read_next();
  void give_up(const std::shared_ptr<Reading>& reading);
  void ended(const std::shared_ptr<Reading>& reading);
  [[nodiscard]] bool chance(double probability);
  void taskFailed(kj::Exception&& exception) override;

  server::CacheService& service_;
  std::span<std::byte> pool_;
  kj::Timer& timer_;
  const Clock& clock_;
  const Mistakes mistakes_;
  std::mt19937_64 random_;
  Faults faults_;
  std::shared_ptr<cluster::SourceRate> rate_ = std::make_shared<cluster::SourceRate>();
  std::shared_ptr<const Owner> owner_ = std::make_shared<Owner>();
  std::map<Name, std::vector<std::byte>> blocks_;
  std::vector<engine::FrameIndex> unwritten_;
  std::set<std::uint64_t> writing_;  ///< Offsets in the pool.
  std::deque<std::shared_ptr<Reading>> waiting_;
  bool is_reading_ = false;
  std::uint64_t last_read_ = 0;
  kj::TaskSet tasks_;
};

/// Blocks come from other nodes; the results of reads from disks go to the same receiver.
class SimTiers final : public cluster::Source {
 public:
  SimTiers(SimDisks& disks, cluster::Source& nodes) : disks_(disks), nodes_(nodes) {}
  void deliver_to(Sink& to) override {
    Source::deliver_to(to);
    disks_.deliver_to(to);
    nodes_.deliver_to(to);
  }
  [[nodiscard]] bool is_ready() const override { return nodes_.is_ready(); }
  kj::Promise<Located> locate(const Bytes32& space, std::span<const BlockKey> keys) override {
    return nodes_.locate(space, keys);
  }
  kj::Promise<std::vector<Holding>> locate_prefixes(const Bytes32& space,
                                                    std::span<const BlockKey> keys) override {
    return nodes_.locate_prefixes(space, keys);
  }
  kj::Promise<std::vector<Holding>> locate_each(const Bytes32& space,
                                                std::span<const BlockKey> keys) override {
    return nodes_.locate_each(space, keys);
  }
  kj::Promise<SharedLease> lease(SharedRequest request, std::vector<BlockKey> keys,
                                 Located located) override {
    return nodes_.lease(std::move(request), std::move(keys), std::move(located));
  }
  void read(const SharedRequest& request, const SharedLease& lease,
            std::vector<Block>&& blocks) override {
    nodes_.read(request, lease, std::move(blocks));
  }
  void end(const SharedLease& lease) override { nodes_.end(lease); }

 private:
  SimDisks& disks_;
  cluster::Source& nodes_;
};

}  // namespace pegaflow::harness
