#include "server/rpc/bounded_network.h"

#include <cstddef>
#include <utility>

namespace pegaflow::server {

class BoundedNetwork::Message final : public capnp::OutgoingRpcMessage {
 public:
  Message(kj::Own<capnp::OutgoingRpcMessage> message, kj::Function<void()>& sent)
      : message_(kj::mv(message)), sent_(sent) {}

  capnp::AnyPointer::Builder getBody() override { return message_->getBody(); }
  void setFds(kj::Array<int> fds) override { message_->setFds(kj::mv(fds)); }
  void send() override {
    message_->send();
    sent_();
  }
  std::size_t sizeInWords() override { return message_->sizeInWords(); }

 private:
  kj::Own<capnp::OutgoingRpcMessage> message_;
  kj::Function<void()>& sent_;
};

/// The connection below, with our messages.
class BoundedNetwork::Route final : public capnp::TwoPartyVatNetworkBase::Connection {
 public:
  Route(kj::Own<capnp::TwoPartyVatNetworkBase::Connection> connection, kj::Function<void()>& sent)
      : connection_(kj::mv(connection)), sent_(sent) {}

  kj::Own<capnp::RpcFlowController> newStream() override { return connection_->newStream(); }
  capnp::rpc::twoparty::VatId::Reader getPeerVatId() override {
    return connection_->getPeerVatId();
  }
  kj::Own<capnp::OutgoingRpcMessage> newOutgoingMessage(unsigned first_segment_words) override {
    return kj::heap<Message>(connection_->newOutgoingMessage(first_segment_words), sent_);
  }
  kj::Promise<kj::Maybe<kj::Own<capnp::IncomingRpcMessage>>> receiveIncomingMessage() override {
    return connection_->receiveIncomingMessage();
  }
  kj::Promise<void> shutdown() override { return connection_->shutdown(); }

 private:
  kj::Own<capnp::TwoPartyVatNetworkBase::Connection> connection_;
  kj::Function<void()>& sent_;
};

kj::Maybe<kj::Own<capnp::TwoPartyVatNetworkBase::Connection>> BoundedNetwork::connect(
    capnp::rpc::twoparty::VatId::Reader host) {
  auto connected = network_.connect(host);
  KJ_IF_MAYBE (connection, connected) {
    return kj::Own<capnp::TwoPartyVatNetworkBase::Connection>(
        kj::heap<Route>(kj::mv(*connection), sent_));
  }
  return nullptr;
}

kj::Promise<kj::Own<capnp::TwoPartyVatNetworkBase::Connection>> BoundedNetwork::accept() {
  return network_.accept().then(
      [this](kj::Own<capnp::TwoPartyVatNetworkBase::Connection>&& connection)
          -> kj::Own<capnp::TwoPartyVatNetworkBase::Connection> {
        return kj::heap<Route>(kj::mv(connection), sent_);
      });
}

}  // namespace pegaflow::server
