#pragma once
/// \file
/// A hook after each sent message, which Cap'n Proto's RPC system does not have.

#include <capnp/rpc-twoparty.h>
#include <kj/function.h>

namespace pegaflow::server {

/// Passes every message to the network below and calls a function after each sent message.
///
/// Calls may be answered long after they arrived, all at once, so the bound of the queue has to be
/// checked where the queue grows. Thread-bound.
class BoundedNetwork final : public capnp::TwoPartyVatNetworkBase {
 public:
  /// `network` outlives it. `sent` is called from within the RPC system: it must not end the
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
