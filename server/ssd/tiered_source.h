#pragma once
/// \file
/// The disks of this node and the other nodes as one source.

#include <span>
#include <vector>

#include "cluster/source.h"
#include "server/ssd/ssd_source.h"

namespace pegaflow::server {

/// Searches the disks first, and other nodes for what the disks do not have. Thread-bound: the RPC
/// thread.
class TieredSource final : public cluster::Source {
 public:
  /// Both outlive it; their results go to the sink of this one.
  TieredSource(SsdSource& disks, cluster::Source& nodes) : disks_(disks), nodes_(nodes) {}

  void deliver_to(Sink& sink) override;
  [[nodiscard]] bool is_ready() const override { return disks_.is_ready() || nodes_.is_ready(); }
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

 private:
  cluster::Source& of(const Lease& lease);
  kj::Promise<std::vector<Holding>> with_nodes(std::vector<Holding>&& found,
                                               kj::Promise<std::vector<Holding>>&& at_nodes);

  SsdSource& disks_;
  cluster::Source& nodes_;
};

}  // namespace pegaflow::server
