#pragma once
/// \file
/// Reads of this node's workers out of the memory of workers of other nodes.

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kj/async.h>

#include "base/block_key.h"
#include "base/id128.h"
#include "capnp/wire/peer_direct.h"
#include "server/direct/offers.h"

namespace pegaflow::cluster {
class Peers;
}

namespace pegaflow::server {

class CacheService;

/// The guards of a read that has begun, as they are sent.
[[nodiscard]] std::vector<PeerPiece::Guard> guards_of(const Offers::Found& found);

/// Asks the nodes of prefill engines for the blocks that their workers offer, and keeps what this
/// node knows of those workers. The nodes decide nothing about bytes: readers compare guards.
/// Thread-bound: the RPC thread.
class FarReads {
 public:
  /// Workers of other nodes whose memory is kept.
  static constexpr std::size_t kMostSources = 256;

  /// All outlive it.
  FarReads(CacheService& service, Offers& offers, cluster::Peers& peers)
      : service_(service), offers_(offers), peers_(peers) {}

  /// Whether all workers of the caller's engine have registered memory with a network, and the node
  /// can be asked.
  [[nodiscard]] bool may_read(const Id128& connection, const Id128& node) const;

  /// How many leading keys are in that node's pool, or can be read out of the memory of its
  /// workers. 0 if it cannot be asked. The promise may be dropped.
  kj::Promise<std::size_t> reach(const Id128& connection, const Id128& node,
                                 std::span<const BlockKey> keys) const;

  /// A name for a read.
  [[nodiscard]] std::uint64_t new_read() { return ++last_read_; }
  /// The question of a worker for the leading keys, under the name `read`. Call end() for it in any
  /// case. Errors: those of PeerLink::open_next(); kGone when the node cannot be asked.
  kj::Promise<Result<PeerPiece>> ask(const Id128& connection, const Id128& node,
                                     std::span<const BlockKey> keys, PeerQuestion question);
  /// Ends a read, or a question without an answer.
  void end(const Id128& node, std::uint64_t read) const;

  /// A worker of another node.
  struct Source {
    SourceId name{};  ///< Here.
    const OfferedMemory* memory = nullptr;
  };
  /// These workers of that node have left.
  void forget(const Id128& node, std::span<const std::uint64_t> gone);
  /// The source of an answer of that node. Errors: kInternal if its memory is not known, or does
  /// not have the blocks or guards; the connection to the node then ends.
  Result<Source> source_of(const Id128& node, PeerPiece& piece);
  /// Whether the name is that of a worker of another node, which is connected.
  [[nodiscard]] bool has(SourceId source) const;

  /// A worker of this node has begun such a read of `blocks` under its pin.
  void began(const Id128& connection, std::uint64_t pin, const Id128& node, std::uint64_t read,
             std::size_t blocks);
  /// It has ended it. Unknown pins are fine.
  void ended(const Id128& connection, std::uint64_t pin);
  /// The worker's connection has ended.
  void left(const Id128& connection);
  /// Adds the reads so far.
  void count(DirectStats& stats) const {
    stats.far_begun = begun_;
    stats.far_blocks = blocks_;
  }

 private:
  struct Known {
    SourceId name{};
    OfferedMemory memory;
  };
  using Far = std::pair<Id128, std::uint64_t>;  ///< A node, and its name for the worker.
  using Pin = std::pair<Id128, std::uint64_t>;

  Result<Source> checked_source(const Id128& node, PeerPiece& piece);
  void forget_lost();

  CacheService& service_;
  Offers& offers_;
  cluster::Peers& peers_;
  std::map<Far, Known> sources_;
  std::map<Pin, Far> reads_;  ///< To the node and the name of the read.
  std::uint64_t last_read_ = 0;
  std::uint64_t begun_ = 0;
  std::uint64_t blocks_ = 0;
};

}  // namespace pegaflow::server
