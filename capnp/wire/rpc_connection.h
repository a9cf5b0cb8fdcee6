#pragma once
/// \file
/// The dialing side of an RPC connection, for clients and for nodes that dial their peers.

#include <cstddef>
#include <cstdint>

#include <capnp/rpc-twoparty.h>
#include <kj/async-io.h>

namespace pegaflow {

/// Owns a stream and runs Cap'n Proto's RPC system over it.
///
/// Messages larger than kTraversalLimitWords are rejected, so that a faulty peer cannot make this
/// side allocate without limit. Destroying the connection cancels all calls. Destroy all
/// capabilities that were received over it first. Bound to the thread of its event loop.
class RpcConnection {
 public:
  /// 8 MiB. The largest response, the grant of a lease, has about 800 KiB.
  static constexpr std::uint64_t kTraversalLimitWords = 1 << 20;

  explicit RpcConnection(kj::Own<kj::AsyncIoStream> stream);
  /// Messages may carry up to `fds_per_message` file descriptors.
  RpcConnection(kj::Own<kj::AsyncCapabilityStream> stream, unsigned fds_per_message);

  /// The peer's bootstrap capability, as Cap'n Proto calls it.
  template <typename Interface>
  typename Interface::Client bootstrap() {
    return bootstrap().castAs<Interface>();
  }

  /// Resolves when the peer has closed the connection, or after drop().
  kj::Promise<void> on_over() { return over_.addBranch(); }
  /// Makes on_over() resolve, because this side gives up the connection. Idempotent.
  void drop() { dropped_.fulfiller->fulfill(); }

  /// Bytes of messages that wait to be sent, because the peer reads too slowly.
  [[nodiscard]] std::size_t queued_bytes() { return network_.getCurrentQueueSize(); }

 private:
  capnp::Capability::Client bootstrap();

  // The order matters: members are destroyed from the last to the first.
  kj::Own<kj::AsyncIoStream> stream_;
  capnp::TwoPartyVatNetwork network_;
  capnp::RpcSystem<capnp::rpc::twoparty::VatId> rpc_;
  kj::PromiseFulfillerPair<void> dropped_;
  kj::ForkedPromise<void> over_;
};

}  // namespace pegaflow
