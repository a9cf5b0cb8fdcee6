#include "capnp/wire/rpc_connection.h"

#include <capnp/message.h>

namespace pegaflow {
namespace {

capnp::ReaderOptions reader_options() {
  capnp::ReaderOptions options;
  options.traversalLimitInWords = RpcConnection::kTraversalLimitWords;
  return options;
}

}  // namespace

RpcConnection::RpcConnection(kj::Own<kj::AsyncIoStream> stream)
    : stream_(kj::mv(stream)),
      network_(*stream_, capnp::rpc::twoparty::Side::CLIENT, reader_options()),
      rpc_(capnp::makeRpcClient(network_)),
      dropped_(kj::newPromiseAndFulfiller<void>()),
      over_(network_.onDisconnect().exclusiveJoin(kj::mv(dropped_.promise)).fork()) {}

RpcConnection::RpcConnection(kj::Own<kj::AsyncCapabilityStream> stream, unsigned fds_per_message)
    : stream_(kj::mv(stream)),
      network_(kj::downcast<kj::AsyncCapabilityStream>(*stream_), fds_per_message,
               capnp::rpc::twoparty::Side::CLIENT, reader_options()),
      rpc_(capnp::makeRpcClient(network_)),
      dropped_(kj::newPromiseAndFulfiller<void>()),
      over_(network_.onDisconnect().exclusiveJoin(kj::mv(dropped_.promise)).fork()) {}

capnp::Capability::Client RpcConnection::bootstrap() {
  capnp::MallocMessageBuilder message;
  auto server = message.initRoot<capnp::rpc::twoparty::VatId>();
  server.setSide(capnp::rpc::twoparty::Side::SERVER);
  return rpc_.bootstrap(server);
}

}  // namespace pegaflow
