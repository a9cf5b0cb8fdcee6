#pragma once
/// \file
/// Translates between messages of peer.capnp and structs: the only place that knows both.
///
/// Reading checks every bound, so that the receiver of a struct need not. Thread-safe: no state.

#include <chrono>
#include <cstdint>
#include <span>
#include <vector>

#include "base/error.h"
#include "capnp/peer.capnp.h"
#include "capnp/wire/peer_types.h"
#include "transport/region.h"

namespace pegaflow {

/// Versions of peer.capnp that this build speaks, apart from those of cache.capnp.
inline constexpr std::uint16_t kPeerWireMinimum = 1;
inline constexpr std::uint16_t kPeerWireMaximum = 3;
/// The first version whose nodes implement awaitJob.
inline constexpr std::uint16_t kPeerWireAwaitsJobs = 2;
/// The first version whose nodes implement epochs and confirm leases.
inline constexpr std::uint16_t kPeerWireKnowsEpochs = 3;
/// Features of `greet`, by bit, that this build implements; see the list in peer.capnp.
inline constexpr std::uint64_t kPeerWatches = 1;      ///< `watch`.
inline constexpr std::uint64_t kPeerLocatesEach = 2;  ///< `locateEach`.
inline constexpr std::uint64_t kPeerReadsDisks = 4;   ///< `onDisks`, `pending` and `staging`.
inline constexpr std::uint64_t kPeerReadsMemory =
    8;  ///< `begun`, `offered`, `openNext`, `endRead`.
inline constexpr std::uint64_t kPeerFeatures =
    kPeerWatches | kPeerLocatesEach | kPeerReadsDisks | kPeerReadsMemory;

/// Limit of pages in one lease, so that its list of pages fits one message for an instance of many
/// shards.
inline constexpr std::size_t kMaxPagesPerLease = 65536;

/// Errors: kInvalidArgument unless there are 32 bytes.
Result<Bytes32> read_bytes32(::capnp::Data::Reader data);
/// Views `bytes`.
::capnp::Data::Reader data_of(const Bytes32& bytes);

/// Reads all lanes of a node, at least one region on each.
/// Errors: kInvalidArgument as read_fabric(), for a lane without a region, and for too many lanes.
Result<std::vector<FabricDescriptor>> read_fabrics(wire::PeerGate::EnterResults::Reader reader);
void write_fabrics(std::span<const FabricDescriptor> fabrics,
                   wire::PeerGate::EnterResults::Builder builder);

/// The limit by which a counter may be ahead of this node's system clock. A node's own counter is
/// at most its clock plus one for each reset; one near the end would leave no room for later resets
/// in the whole cluster.
inline constexpr std::chrono::hours kMostEpochAhead{24};
/// Whether the counter is not further ahead than that.
bool is_in_time(const Epoch& epoch);
/// Errors: kInvalidArgument for a counter that is further ahead than that.
Result<Epoch> read_epoch(wire::Epoch::Reader reader);
void write_epoch(const Epoch& epoch, wire::Epoch::Builder builder);
/// Errors: those of read_epoch() and read_bytes32(); kInvalidArgument for more than a node keeps.
Result<KnownEpochs> read_epochs(wire::Epochs::Reader reader);
void write_epochs(const KnownEpochs& epochs, wire::Epochs::Builder builder);

/// Reads which of `keys` blocks are present. Errors: kInternal for more bits than keys.
Result<std::vector<bool>> read_present(::capnp::Data::Reader reader, std::size_t keys);
/// Bit i % 8 of byte i / 8 stands for block i.
std::vector<std::byte> pack_present(const std::vector<bool>& present);

/// The blocks that an owner lent.
struct LeaseGrant {
  std::uint64_t lease = 0;  ///< 0: nothing.
  std::chrono::milliseconds granted{};
  std::vector<std::uint32_t> pages{};      ///< Shard by shard, block by block; in units of 4 KiB.
  std::vector<std::uint64_t> checksums{};  ///< One for each page, or none at all.
  /// The blocks behind them that the owner reads from its disks into its pool.
  OnDisks pending{};
  std::uint64_t staging = 0;  ///< The number to request those with; 0: none is pending.
};
/// Errors: kInternal for more blocks than `most`.
Result<OnDisks> read_on_disks(wire::OnDisks::Reader reader, std::size_t most);
void write_on_disks(const OnDisks& blocks, wire::OnDisks::Builder builder);
/// Errors: the owner's; kInternal when the counts do not match each other, `keys` or `shards`.
Result<LeaseGrant> read_grant(wire::Peer::LeaseResults::Reader reader, std::size_t keys,
                              std::size_t shards);
void write_grant(const LeaseGrant& grant, wire::Peer::LeaseResults::Builder builder);

}  // namespace pegaflow
