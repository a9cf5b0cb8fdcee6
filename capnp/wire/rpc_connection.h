#pragma once
/// \file
/// The dialing side of an RPC connection, as clients and nodes use it.

#include <cstddef>
#include <cstdint>

#include <capnp/rpc-twoparty.h>
#include <kj/async-io.h>

namespace pegaflow {

/// A stream with Cap'n Proto's RPC system on it.
///
/// Messages beyond kTraversalLimitWords are not read, so that a broken peer cannot make this side
/// allocate without limit. Destroying it ends all calls. Capabilities that came over it are to be
/// destroyed before it. Bound to the thread of its event loop.
class RpcConnection {
 public:
  /// The largest answer, the grant of a lease, has some 800 KiB.
  static constexpr std::uint64_t kTraversalLimitWords = 1 << 20;

  explicit RpcConnection(kj::Own<kj::AsyncIoStream> stream);
  /// Messages may carry `fds_per_message` descriptors.
  RpcConnection(kj::Own<kj::AsyncCapabilityStream> stream, unsigned fds_per_message);

  /// The interface that the peer offers first.
  template <typename Interface>
  typename Interface::Client bootstrap() {
    return bootstrap().castAs<Interface>();
  }

  /// Resolves when the peer has closed the connection, or after drop().
  kj::Promise<void> on_over() { return over_.addBranch(); }
  /// Resolves on_over() because this side gives up the connection. Idempotent.
  void drop() { dropped_.fulfiller->fulfill(); }

  /// Bytes that wait for the peer to read them.
  [[nodiscard]] std::size_t queued_bytes() { return network_.getCurrentQueueSize(); }

 private:
  capnp::Capability::Client bootstrap();

  // Destroyed from the last to the first.
  kj::Own<kj::AsyncIoStream> stream_;
  capnp::TwoPartyVatNetwork network_;
  capnp::RpcSystem<capnp::rpc::twoparty::VatId> rpc_;
  kj::PromiseFulfillerPair<void> dropped_;
  kj::ForkedPromise<void> over_;
};

}  // namespace pegaflow
