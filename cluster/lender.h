#pragma once
/// \file
/// Other nodes, as the source of blocks that this node fetches.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <kj/async.h>

#include "base/block_key.h"
#include "base/clock.h"
#include "base/error.h"
#include "capnp/wire/peer_codec.h"
#include "cluster/epochs.h"
#include "cluster/peer_proof.h"
#include "transport/fabric.h"

namespace pegaflow::cluster {

/// Another node, which may lend us blocks.
///
/// It is *ready* while it can be asked and read from. Each time that it becomes ready begins
/// another *life*: what was asked of one life is never carried to the next. Thread-bound: the RPC
/// thread.
class Lender {
 public:
  virtual ~Lender() noexcept(false) = default;

  [[nodiscard]] virtual bool is_ready() const noexcept = 0;
  [[nodiscard]] virtual std::uint64_t life() const noexcept = 0;
  /// What it is called in logs.
  [[nodiscard]] virtual const std::string& address() const noexcept = 0;
  /// The address turned out to be our own.
  [[nodiscard]] virtual bool is_this_node() const noexcept { return false; }
  /// Where to read from.
  struct Route {
    std::size_t lane = 0;  ///< Which of our fabrics.
    Fabric::PeerId peer{};
    RegionId pool{};  ///< Of the peer.
    bool operator==(const Route&) const = default;
  };
  /// Of one that is ready. It may change in one life: what was leased before is read as it was.
  [[nodiscard]] virtual const Route& route() const = 0;

  /// How many of `keys`, from the first on, it has in the epoch of the namespace that this node
  /// knows; a newer one in its answer is learned. Errors: kPeerLost when it is not ready or ends,
  /// kTimeout, kBusy while it owes answers, and kInternal for nonsense.
  virtual kj::Promise<Result<std::size_t>> locate(const Bytes32& space,
                                                  std::span<const BlockKey> keys) = 0;
  /// Asks for a lease on the longest prefix of `keys`, which it may shorten, as locate() in the
  /// epoch that we know. Errors: those of locate(), and its own. A grant that comes too late is
  /// given back.
  virtual kj::Promise<Result<LeaseGrant>> lease(const Bytes32& space,
                                                std::span<const BlockKey> keys, std::size_t shards,
                                                std::chrono::milliseconds time) = 0;
  /// Whether a lease that was granted in that life can still be released: it is one of the process
  /// that is, or was last, at the other end.
  [[nodiscard]] virtual bool can_release(std::uint64_t granted_in) const {
    return is_ready() && life() == granted_in;
  }
  /// Whether the owner has kept the pages of `lease` in place until it was asked, by its own clock.
  /// True of a peer that is too old to be asked. Only while can_release().
  /// Errors: those of locate(), without kBusy.
  virtual kj::Promise<Result<bool>> confirm(std::uint64_t lease, Duration patience) = 0;
  /// Sends the epoch of a reset. Returns the epoch that the peer has then. Errors: those of
  /// locate(); kRefused for a peer that is too old.
  virtual kj::Promise<Result<Epoch>> reset(const Bytes32& space, const Epoch& epoch,
                                           Duration patience) = 0;
  /// No local read uses this lease any more. Only while can_release().
  virtual void release(std::uint64_t lease) = 0;
  /// The fabric, or an answer, showed that this life is over.
  virtual void lost(std::uint64_t life, const std::string& why) = 0;
  /// The fabric showed that `way`, which it had in this life, is broken. With it ends the life,
  /// unless there is another one.
  virtual void route_lost(std::uint64_t life, const Route& route, const std::string& why) = 0;
};

/// All of them, and questions to all at once. Thread-bound: the RPC thread.
class Lenders {
 public:
  virtual ~Lenders() noexcept(false) = default;

  /// `lender` outlives it.
  void add(Lender& lender) { lenders_.push_back(&lender); }

  [[nodiscard]] virtual bool has_ready() const;
  [[nodiscard]] const std::vector<Lender*>& all() const noexcept { return lenders_; }

  struct Owner {
    Lender* peer = nullptr;
    std::uint64_t life = 0;  ///< Of the peer when it said so.
    std::size_t blocks = 0;
  };
  /// Each peer is probed with so many keys, and only peers that hold all of them receive the rest.
  /// Most requests are for blocks that no peer has; this way they cost a kilobyte per peer, however
  /// long the prompt is. A peer that has a prefix receives two requests, which cost little compared
  /// with reading it.
  static constexpr std::size_t kFirstKeys = 32;

  /// Who has blocks of the prefix `keys`: most first, and among equals the one that was added
  /// first. Answers when all have, or the deadlines of their questions are over.
  virtual kj::Promise<std::vector<Owner>> owners(const Bytes32& space,
                                                 std::span<const BlockKey> keys);

 private:
  /// What is asked in the second question.
  struct Rest {
    Bytes32 space;
    std::vector<BlockKey> keys;
  };
  static kj::Promise<Owner> ask(Lender& lender, const Bytes32& space,
                                std::span<const BlockKey> first,
                                const std::shared_ptr<const Rest>& rest);

  std::vector<Lender*> lenders_;
};

}  // namespace pegaflow::cluster
