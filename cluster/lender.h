#pragma once
/// \file
/// Other nodes that lend blocks to this node.

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
#include "base/id128.h"
#include "capnp/wire/peer_codec.h"
#include "cluster/epochs.h"
#include "cluster/peer_proof.h"
#include "transport/fabric.h"

namespace pegaflow::cluster {

/// Another node, which may lend blocks to this one.
///
/// It is *ready* while it responds and can be read from. Each time that it becomes ready begins
/// another *life*: a request to one life never has a result in the next. Thread-bound: the RPC
/// thread.
class Lender {
 public:
  virtual ~Lender() noexcept(false) = default;

  [[nodiscard]] virtual bool is_ready() const noexcept = 0;
  [[nodiscard]] virtual std::uint64_t life() const noexcept = 0;
  /// The incarnation of the node, while it is ready.
  [[nodiscard]] virtual Id128 node() const noexcept { return {}; }
  /// Its name in logs.
  [[nodiscard]] virtual const std::string& address() const noexcept = 0;
  /// The address turned out to be this node's own.
  [[nodiscard]] virtual bool is_this_node() const noexcept { return false; }
  /// The place to read from.
  struct Route {
    std::size_t lane = 0;  ///< The number of the local fabric.
    Fabric::PeerId peer{};
    RegionId pool{};  ///< The peer's.
    bool operator==(const Route&) const = default;
  };
  /// Only while it is ready. It may change in one life; earlier leases keep their route.
  [[nodiscard]] virtual const Route& route() const = 0;
  /// Describes the peer's end of that route, for other processes of this node. Null while it is
  /// not ready.
  [[nodiscard]] virtual const FabricDescriptor* fabric() const { return nullptr; }

  /// A prefix of the blocks that were asked for.
  struct Prefix {
    std::size_t blocks = 0;
    OnDisks on_disks{};  ///< Those of them that are only on its disks.
  };
  /// Which of the blocks that were asked for it has.
  struct Present {
    std::vector<bool> has;  ///< By key.
    OnDisks on_disks{};     ///< As in Prefix.
  };

  /// The prefix of `keys` that it has in the epoch of the namespace that this node
  /// knows; a newer epoch in its response is learned. Errors: kPeerLost when it is not ready or
  /// its connection ends, kTimeout, kBusy while it has too many requests in flight, and kInternal
  /// for an invalid response.
  virtual kj::Promise<Result<Prefix>> locate(const Bytes32& space,
                                             std::span<const BlockKey> keys) = 0;
  /// Which of the blocks it has; otherwise as locate(). Errors: also kRefused for a peer that has
  /// no such request.
  virtual kj::Promise<Result<Present>> locate_each(const Bytes32& space,
                                                   std::span<const BlockKey> keys) = 0;
  /// Requests a lease on the longest prefix of `keys`, which it may shorten; like locate(), in the
  /// epoch that this node knows. Errors: those of locate(), and the peer's. A late grant is
  /// released.
  virtual kj::Promise<Result<LeaseGrant>> lease(const Bytes32& space,
                                                std::span<const BlockKey> keys, std::size_t shards,
                                                std::chrono::milliseconds time) = 0;
  /// Blocks that are pending at the owner, as a request names them.
  struct Staging {
    Bytes32 space{};           ///< The namespace of the blocks.
    std::uint64_t number = 0;  ///< LeaseGrant::staging.
    std::size_t pending = 0;   ///< Blocks that were not lent yet.
    std::size_t shards = 1;
  };
  /// Requests a lease on the next pending blocks. The peer answers once it can lend a part of them
  /// that is worth a request, and after `patience` in any case, with its blocks so far: the grant
  /// may be empty. Only in the life of the lease() that returned the number. Errors: those of
  /// lease(). Once it fails or reports that no block is pending, the staging is over.
  virtual kj::Promise<Result<LeaseGrant>> lease_pending(const Staging& staging,
                                                        std::chrono::milliseconds time,
                                                        std::chrono::milliseconds patience) = 0;
  /// This node wants none of the pending blocks any longer. Only in the same life.
  virtual void end_staging(std::uint64_t number) = 0;
  /// Whether a lease that was granted in that life can still be released: the process that granted
  /// it is, or was last, at the other end.
  [[nodiscard]] virtual bool can_release(std::uint64_t granted_in) const {
    return is_ready() && life() == granted_in;
  }
  /// Whether the owner has kept the pages of `lease` in place until this request, by its own clock.
  /// True for a peer whose version has no such request. Only while can_release().
  /// Errors: those of locate(), without kBusy.
  virtual kj::Promise<Result<bool>> confirm(std::uint64_t lease, Duration patience) = 0;
  /// Sends the epoch of a reset. Returns the epoch that the peer has then. Errors: those of
  /// locate(); kRefused for a peer whose version has no resets.
  virtual kj::Promise<Result<Epoch>> reset(const Bytes32& space, const Epoch& epoch,
                                           Duration patience) = 0;
  /// No local read uses this lease from now on. Only while can_release().
  virtual void release(std::uint64_t lease) = 0;
  /// The fabric, or a response, showed that this life is over.
  virtual void lost(std::uint64_t life, const std::string& why) = 0;
  /// The fabric showed that `route`, which it had in this life, is broken. The life ends with it,
  /// unless the peer has another route.
  virtual void route_lost(std::uint64_t life, const Route& route, const std::string& why) = 0;
};

/// All other nodes, and requests to all of them at once. Thread-bound: the RPC thread.
class Lenders {
 public:
  virtual ~Lenders() noexcept(false) = default;

  /// `lender` outlives it.
  void add(Lender& lender) { lenders_.push_back(&lender); }

  [[nodiscard]] virtual bool has_ready() const;
  [[nodiscard]] const std::vector<Lender*>& all() const noexcept { return lenders_; }

  struct Owner {
    Lender* peer = nullptr;
    std::uint64_t life = 0;  ///< The peer's life in which it responded.
    std::size_t blocks = 0;
    OnDisks on_disks{};  ///< See Lender::Prefix.
  };
  /// Each peer is probed with this many keys, and only peers that hold all of them receive the
  /// rest. Most requests are for blocks that no peer has; with a probe they cost a kilobyte per
  /// peer, however long the prompt is. A peer that has a prefix receives two requests, which cost
  /// little compared with reading it.
  static constexpr std::size_t kFirstKeys = 32;

  /// The peers that have blocks of the prefix `keys`: most first, and among equals the one that was
  /// added first. Resolves when all have responded or timed out. `only`: no other node than these
  /// incarnations receives a request; empty: every peer does.
  virtual kj::Promise<std::vector<Owner>> owners(const Bytes32& space,
                                                 std::span<const BlockKey> keys,
                                                 std::span<const Id128> only = {});

  struct Holder {
    Lender* peer = nullptr;
    std::uint64_t life = 0;  ///< The peer's life in which it responded.
    std::vector<bool> has;   ///< By key.
    OnDisks on_disks{};      ///< See Lender::Present.
  };
  /// The peers that have some of the blocks, in the order in which they were added. Resolves when
  /// all have responded or timed out.
  virtual kj::Promise<std::vector<Holder>> holders(const Bytes32& space,
                                                   std::span<const BlockKey> keys);

 protected:
  /// The same of these nodes only, by their incarnations; empty: of all.
  kj::Promise<std::vector<Holder>> holders(const Bytes32& space, std::span<const BlockKey> keys,
                                           std::span<const Id128> only);

 private:
  /// The keys of the second request.
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
