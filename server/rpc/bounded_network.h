#pragma once
/// \file
/// A hook where answers are produced, which Cap'n Proto's RPC system does not have.

#include <capnp/rpc-twoparty.h>
#include <kj/function.h>

namespace pegaflow::server {

/// Hands every message to the network below and calls a function after each one that is sent.
///
/// Calls may answer long after they arrived, all at once: a bound on what is queued has to be
/// checked where the queue grows. Thread-bound.
class BoundedNetwork final : public capnp::TwoPartyVatNetworkBase {
 public:
  /// `network` outlives it. `sent` is called from within the RPC system: it may not end the
  /// connection before it returns.
  BoundedNetwork(capnp::TwoPartyVatNetwork& network, kj::Function<void()> sent)
      : network_(network), sent_(kj::mv(sent)) {}

  kj::Maybe<kj::Own<capnp::TwoPartyVatNetworkBase::Connection>> connect(
      capnp::rpc::twoparty::VatId::Reader host) override;
  kj::Promise<kj::Own<capnp::TwoPartyVatNetworkBase::Connection>> accept() override;

 private:
  class Route;
  class Message;

  capnp::TwoPartyVatNetwork& network_;
  kj::Function<void()> sent_;
};

}  // namespace pegaflow::server
