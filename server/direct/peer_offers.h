#pragma once
/// \file
/// Blocks in the memory of this node's workers that workers of other nodes read.

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kj/async-io.h>

#include "base/block_key.h"
#include "base/clock.h"
#include "base/id128.h"
#include "capnp/wire/peer_direct.h"
#include "capnp/wire/peer_types.h"

namespace pegaflow::server {

class CacheService;
class DirectReads;

/// Answers `offered`, `openNext` and `endRead` of peer.capnp. The namespace of a call is one whose
/// epoch is that of the reader's node, which the caller has compared. Thread-bound: the RPC thread.
class PeerOffers {
 public:
  /// Limit of calls of one connection that wait.
  static constexpr std::size_t kMostWaits = 1024;

  /// All outlive it.
  PeerOffers(CacheService& service, DirectReads& direct, kj::Timer& timer, const Clock& clock)
      : service_(service), direct_(direct), timer_(timer), clock_(clock) {}

  /// The prefix of `keys` in the pool, and the blocks after it that each of the readers could read.
  [[nodiscard]] PeerOffer offered(const Bytes32& space, std::span<const BlockKey> keys,
                                  std::span<const PeerReader> readers) const;

  /// The call of a connection for the leading `keys`.
  struct Call {
    Id128 connection;
    Bytes32 space{};
    std::vector<BlockKey> keys;  ///< At least one.
    PeerQuestion question;
  };
  /// Errors: kInvalidArgument for a name of a read that waits already; kBusy for too many waits.
  kj::Promise<Result<PeerPiece>> open_next(Call call);
  void end_read(const Id128& connection, std::uint64_t read);
  /// The connection has ended, and with it its reads.
  void left(const Id128& connection);

 private:
  struct Opening;
  using OneOpening = std::shared_ptr<Opening>;
  using Read = std::pair<Id128, std::uint64_t>;

  kj::Promise<Result<PeerPiece>> try_open(const OneOpening& opening);
  [[nodiscard]] PeerPiece look(const Opening& opening);
  [[nodiscard]] std::size_t waits_of(const Id128& connection) const;

  CacheService& service_;
  DirectReads& direct_;
  kj::Timer& timer_;
  const Clock& clock_;
  std::map<Read, OneOpening> waiting_;
};

}  // namespace pegaflow::server
