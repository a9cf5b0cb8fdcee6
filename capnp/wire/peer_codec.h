#pragma once
/// \file
/// Between messages of peer.capnp and our structs: the only place that knows both.
///
/// Reading checks every bound, so that whoever gets a struct need not. Thread-safe: no state.

#include <chrono>
#include <cstdint>
#include <span>
#include <vector>

#include "base/error.h"
#include "capnp/peer.capnp.h"
#include "capnp/wire/peer_types.h"
#include "transport/region.h"

namespace pegaflow {

/// Versions of peer.capnp that this build speaks. Not those of cache.capnp.
inline constexpr std::uint16_t kPeerWireMinimum = 1;
inline constexpr std::uint16_t kPeerWireMaximum = 3;
/// The version from which on a peer knows awaitJob.
inline constexpr std::uint16_t kPeerWireAwaitsJobs = 2;
/// The version from which on a peer knows epochs, and confirms leases.
inline constexpr std::uint16_t kPeerWireKnowsEpochs = 3;
/// Features of `greet`, by bit, that this build implements; see the list in peer.capnp.
inline constexpr std::uint64_t kPeerWatches = 1;  ///< `watch`.
inline constexpr std::uint64_t kPeerFeatures = kPeerWatches;

/// Keys of a question to a peer. A page more than a message of cache.capnp would make the list of
/// pages of a wide instance too long for one message.
inline constexpr std::size_t kMaxPagesPerLease = 65536;

/// Errors: kInvalidArgument unless there are 32 bytes.
Result<Bytes32> read_bytes32(::capnp::Data::Reader data);
/// Views `bytes`.
::capnp::Data::Reader data_of(const Bytes32& bytes);

/// Errors: kInvalidArgument for more regions, or longer words of the backend, than are sensible.
Result<FabricDescriptor> read_fabric(wire::Fabric::Reader reader);
void write_fabric(const FabricDescriptor& fabric, wire::Fabric::Builder builder);
/// All lanes of a node, at least one region on each.
/// Errors: kInvalidArgument as read_fabric(), for a lane without a region, and for too many lanes.
Result<std::vector<FabricDescriptor>> read_fabrics(wire::PeerGate::EnterResults::Reader reader);
void write_fabrics(std::span<const FabricDescriptor> fabrics,
                   wire::PeerGate::EnterResults::Builder builder);

/// How far ahead of this node's system clock a counter may be. A node's own is at most its clock
/// and one for each reset; one near the end would leave no room for later resets in the whole
/// cluster.
inline constexpr std::chrono::hours kMostEpochAhead{24};
/// Errors: kInvalidArgument for a counter that is further ahead than that.
Result<Epoch> read_epoch(wire::Epoch::Reader reader);
void write_epoch(const Epoch& epoch, wire::Epoch::Builder builder);
/// Errors: those of read_epoch() and read_bytes32(); kInvalidArgument for more than a node keeps.
Result<KnownEpochs> read_epochs(wire::Epochs::Reader reader);
void write_epochs(const KnownEpochs& epochs, wire::Epochs::Builder builder);

/// What an owner lent.
struct LeaseGrant {
  std::uint64_t lease = 0;  ///< 0: nothing.
  std::chrono::milliseconds granted{};
  std::vector<std::uint32_t> pages;      ///< Shard by shard, block by block; in units of 4 KiB.
  std::vector<std::uint64_t> checksums;  ///< A page each, or none at all.
};
/// Errors: the owner's; kInternal when the numbers do not fit each other, `keys` or `shards`.
Result<LeaseGrant> read_grant(wire::Peer::LeaseResults::Reader reader, std::size_t keys,
                              std::size_t shards);
void write_grant(const LeaseGrant& grant, wire::Peer::LeaseResults::Builder builder);

}  // namespace pegaflow
