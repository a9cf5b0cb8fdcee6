#include "capnp/wire/peer_codec.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>

#include "capnp/wire/codec.h"

namespace pegaflow {
namespace {

constexpr unsigned kMaxLanes = 8;

}  // namespace

Result<Bytes32> read_bytes32(::capnp::Data::Reader data) {
  Bytes32 bytes;
  if (data.size() != bytes.size()) {
    return fail(Errc::kInvalidArgument, "{} bytes instead of {}", data.size(), bytes.size());
  }
  std::memcpy(bytes.data(), data.begin(), bytes.size());
  return bytes;
}

::capnp::Data::Reader data_of(const Bytes32& bytes) {
  return {reinterpret_cast<const kj::byte*>(bytes.data()), bytes.size()};
}

Result<std::vector<FabricDescriptor>> read_fabrics(wire::PeerGate::EnterResults::Reader reader) {
  const auto others = reader.getOthers();
  if (others.size() >= kMaxLanes) return fail(Errc::kInvalidArgument, "{} lanes", others.size());
  std::vector<FabricDescriptor> fabrics;
  PEGA_TRY_LET(fabrics.emplace_back(), read_fabric(reader.getFabric()));
  for (const wire::Fabric::Reader other : others) {
    PEGA_TRY_LET(fabrics.emplace_back(), read_fabric(other));
  }
  for (const FabricDescriptor& fabric : fabrics) {
    if (fabric.regions.empty()) {
      return fail(Errc::kInvalidArgument, "a lane of {} names no region", fabric.backend);
    }
  }
  return fabrics;
}

void write_fabrics(std::span<const FabricDescriptor> fabrics,
                   wire::PeerGate::EnterResults::Builder builder) {
  write_fabric(fabrics.front(), builder.initFabric());
  auto others = builder.initOthers(static_cast<unsigned>(fabrics.size() - 1));
  for (unsigned i = 0; i < others.size(); ++i) write_fabric(fabrics[i + 1], others[i]);
}

bool is_in_time(const Epoch& epoch) {
  const auto latest = std::chrono::system_clock::now().time_since_epoch() + kMostEpochAhead;
  const auto limit = std::chrono::duration_cast<std::chrono::microseconds>(latest).count();
  return epoch.counter <= static_cast<std::uint64_t>(std::max<std::int64_t>(0, limit));
}

Result<Epoch> read_epoch(wire::Epoch::Reader reader) {
  const Epoch epoch{.counter = reader.getCounter(), .id = reader.getId()};
  if (!is_in_time(epoch)) {
    return fail(Errc::kInvalidArgument,
                "an epoch with counter {}, more than a day ahead of the clock here",
                reader.getCounter());
  }
  return epoch;
}

void write_epoch(const Epoch& epoch, wire::Epoch::Builder builder) {
  builder.setCounter(epoch.counter);
  builder.setId(epoch.id);
}

Result<KnownEpochs> read_epochs(wire::Epochs::Reader reader) {
  const auto entries = reader.getOf();
  if (entries.size() > KnownEpochs::kMaxSpaces) {
    return fail(Errc::kInvalidArgument, "epochs of {} namespaces, the limit is {}", entries.size(),
                KnownEpochs::kMaxSpaces);
  }
  KnownEpochs known;
  PEGA_TRY_LET(known.floor, read_epoch(reader.getFloor()));
  known.spaces.reserve(entries.size());
  for (const wire::Epochs::Entry::Reader entry : entries) {
    PEGA_TRY_LET(const Bytes32 space, read_bytes32(entry.getSpace()));
    PEGA_TRY_LET(const Epoch epoch, read_epoch(entry.getEpoch()));
    known.spaces.emplace_back(space, epoch);
  }
  return known;
}

void write_epochs(const KnownEpochs& epochs, wire::Epochs::Builder builder) {
  auto entries = builder.initOf(static_cast<unsigned>(epochs.spaces.size()));
  for (unsigned i = 0; i < entries.size(); ++i) {
    const auto& [space, epoch] = epochs.spaces[i];
    entries[i].setSpace({reinterpret_cast<const ::kj::byte*>(space.data()), space.size()});
    write_epoch(epoch, entries[i].initEpoch());
  }
  write_epoch(epochs.floor, builder.initFloor());
}

Result<std::vector<bool>> read_present(::capnp::Data::Reader reader, std::size_t keys) {
  if (reader.size() > (keys + 7) / 8) {
    return fail(Errc::kInternal, "the peer reports {} bytes of bits for {} blocks", reader.size(),
                keys);
  }
  std::vector<bool> present(keys);
  for (std::size_t i = 0; i < reader.size() * 8; ++i) {
    if ((reader[i / 8] >> (i % 8) & 1) == 0) continue;
    if (i >= keys) return fail(Errc::kInternal, "the peer reports block {} of {}", i, keys);
    present[i] = true;
  }
  return present;
}

std::vector<std::byte> pack_present(const std::vector<bool>& present) {
  std::vector<std::byte> packed((present.size() + 7) / 8);
  for (std::size_t i = 0; i < present.size(); ++i) {
    if (present[i]) packed[i / 8] |= std::byte{1} << (i % 8);
  }
  return packed;
}

Result<OnDisks> read_on_disks(wire::OnDisks::Reader reader, std::size_t most) {
  if (reader.getBlocks() > most) {
    return fail(Errc::kInternal, "{} of {} blocks are on disks", reader.getBlocks(), most);
  }
  return OnDisks{.blocks = reader.getBlocks(),
                 .bytes_per_second = reader.getBytesPerSecond(),
                 .queued_bytes = reader.getQueuedBytes()};
}

void write_on_disks(const OnDisks& blocks, wire::OnDisks::Builder builder) {
  builder.setBlocks(static_cast<std::uint32_t>(blocks.blocks));
  builder.setBytesPerSecond(blocks.bytes_per_second);
  builder.setQueuedBytes(blocks.queued_bytes);
}

Result<LeaseGrant> read_grant(wire::Peer::LeaseResults::Reader reader, std::size_t keys,
                              std::size_t shards) {
  if (reader.hasError()) return tl::unexpected<Error>(read_error(reader.getError()));
  const auto pages = reader.getPages();
  const auto checksums = reader.getChecksums();
  if (pages.size() % shards != 0 || pages.size() > keys * shards ||
      (checksums.size() != 0 && checksums.size() != pages.size()) ||
      (pages.size() != 0) != (reader.getLease() != 0)) {
    return fail(Errc::kInternal, "{} pages and {} checksums for {} blocks of {} pages",
                pages.size(), checksums.size(), keys, shards);
  }
  LeaseGrant grant;
  grant.lease = reader.getLease();
  grant.granted = std::chrono::milliseconds(reader.getGranted());
  grant.pages.reserve(pages.size());
  for (const std::uint32_t page : pages) grant.pages.push_back(page);
  grant.checksums.reserve(checksums.size());
  for (const std::uint64_t checksum : checksums) grant.checksums.push_back(checksum);
  PEGA_TRY_LET(grant.pending, read_on_disks(reader.getPending(), keys - pages.size() / shards));
  grant.staging = reader.getStaging();
  if ((grant.pending.blocks != 0) != (grant.staging != 0)) {
    return fail(Errc::kInternal, "{} blocks are pending in staging {}", grant.pending.blocks,
                grant.staging);
  }
  return grant;
}

void write_grant(const LeaseGrant& grant, wire::Peer::LeaseResults::Builder builder) {
  builder.setLease(grant.lease);
  builder.setGranted(static_cast<std::uint32_t>(grant.granted.count()));
  write_numbers<std::uint32_t>(grant.pages,
                               builder.initPages(static_cast<unsigned>(grant.pages.size())));
  write_numbers<std::uint64_t>(
      grant.checksums, builder.initChecksums(static_cast<unsigned>(grant.checksums.size())));
  if (grant.pending.blocks == 0) return;
  write_on_disks(grant.pending, builder.initPending());
  builder.setStaging(grant.staging);
}

}  // namespace pegaflow
