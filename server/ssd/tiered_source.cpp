#include "server/ssd/tiered_source.h"

#include <iterator>
#include <utility>

namespace pegaflow::server {

void TieredSource::deliver_to(Sink& sink) {
  Source::deliver_to(sink);
  disks_.deliver_to(sink);
  nodes_.deliver_to(sink);
}

kj::Promise<cluster::Source::Located> TieredSource::locate(const Bytes32& space,
                                                           std::span<const BlockKey> keys) {
  return locate_at({}, space, keys);
}

kj::Promise<cluster::Source::Located> TieredSource::locate_at(std::span<const Id128> nodes,
                                                              const Bytes32& space,
                                                              std::span<const BlockKey> keys) {
  if (!nodes_.is_ready()) return disks_.locate(space, keys);
  return disks_.locate(space, keys)
      .then([this, nodes = std::vector<Id128>(nodes.begin(), nodes.end()), space,
             keys = std::vector<BlockKey>(keys.begin(), keys.end())](
                Located&& found) -> kj::Promise<Located> {
        if (found.blocks != 0) return kj::mv(found);
        if (nodes.empty()) return nodes_.locate(space, keys);
        return nodes_.locate_at(nodes, space, keys);
      });
}

kj::Promise<std::vector<cluster::Source::Holding>> TieredSource::with_nodes(
    std::vector<Holding>&& found, kj::Promise<std::vector<Holding>>&& at_nodes) {
  return at_nodes.then([found = std::move(found)](std::vector<Holding>&& more) mutable {
    found.insert(found.end(), std::make_move_iterator(more.begin()),
                 std::make_move_iterator(more.end()));
    return std::move(found);
  });
}

kj::Promise<std::vector<cluster::Source::Holding>> TieredSource::locate_prefixes(
    const Bytes32& space, std::span<const BlockKey> keys) {
  auto at_disks = disks_.locate_prefixes(space, keys);
  if (!nodes_.is_ready()) return at_disks;
  auto at_nodes = nodes_.locate_prefixes(space, keys);
  return at_disks.then([this, at_nodes = kj::mv(at_nodes)](std::vector<Holding>&& found) mutable {
    return with_nodes(std::move(found), kj::mv(at_nodes));
  });
}

kj::Promise<std::vector<cluster::Source::Holding>> TieredSource::locate_each(
    const Bytes32& space, std::span<const BlockKey> keys) {
  auto at_disks = disks_.locate_each(space, keys);
  if (!nodes_.is_ready()) return at_disks;
  auto at_nodes = nodes_.locate_each(space, keys);
  return at_disks.then([this, at_nodes = kj::mv(at_nodes)](std::vector<Holding>&& found) mutable {
    return with_nodes(std::move(found), kj::mv(at_nodes));
  });
}

kj::Promise<cluster::Source::SharedLease> TieredSource::lease(SharedRequest request,
                                                              std::vector<BlockKey> keys,
                                                              Located located) {
  if (located.all == nullptr) return SharedLease();
  cluster::Source& from = SsdSource::is_ours(*located.all) ? static_cast<Source&>(disks_) : nodes_;
  return from.lease(std::move(request), std::move(keys), std::move(located));
}

cluster::Source& TieredSource::of(const Lease& lease) {
  return SsdSource::is_ours(lease) ? static_cast<Source&>(disks_) : nodes_;
}

void TieredSource::read(const SharedRequest& request, const SharedLease& lease,
                        std::vector<Block>&& blocks) {
  of(*lease).read(request, lease, std::move(blocks));
}

void TieredSource::end(const SharedLease& lease) { of(*lease).end(lease); }

std::optional<cluster::Source::InPool> TieredSource::in_pool(const SharedLease& lease,
                                                             std::string_view backend) const {
  if (SsdSource::is_ours(*lease)) return std::nullopt;
  return nodes_.in_pool(lease, backend);
}

kj::Promise<bool> TieredSource::confirm_reads(const SharedLease& lease, Duration patience) {
  return of(*lease).confirm_reads(lease, patience);
}

}  // namespace pegaflow::server
