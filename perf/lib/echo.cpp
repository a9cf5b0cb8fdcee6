#include "perf/lib/echo.h"

#include <cstring>
#include <utility>

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/block_key.h"
#include "harness/wire_client.h"

namespace pegaflow::perf {
namespace {

class EchoServer final : public pegaflow::echo::Echo::Server {
 public:
  kj::Promise<void> count(CountContext context) override {
    const auto bytes = context.getParams().getPacked().size();
    context.releaseParams();
    auto answer = context.getResults(capnp::MessageSize{8, 0});
    answer.setSealed(static_cast<std::uint32_t>(bytes));
    answer.setComplete(true);
    return kj::READY_NOW;
  }

  kj::Promise<void> back(BackContext context) override {
    const auto bytes = context.getParams().getPacked();
    context.getResults(capnp::MessageSize{bytes.size() / 8 + 32, 0}).setPacked(bytes);
    return kj::READY_NOW;
  }
};

kj::ArrayPtr<const kj::byte> as_data(std::span<const std::byte> bytes) {
  return kj::arrayPtr(reinterpret_cast<const kj::byte*>(bytes.data()), bytes.size());
}

template <typename Request>
Request filled(Request request, std::span<const std::byte> bytes) {
  request.setKeyBytes(BlockKey::kMaxBytes);
  request.setPacked(as_data(bytes));
  return request;
}

}  // namespace

Result<void> serve_echo(int listener) {
  const UniqueFd connection(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
  if (!connection) return fail_errno(errno, "accept a connection to the echo");
  for (const int option : {SO_SNDBUF, SO_RCVBUF}) {
    ::setsockopt(connection.get(), SOL_SOCKET, option, &harness::kSocketBufferBytes,
                 sizeof harness::kSocketBufferBytes);
  }
  kj::AsyncIoContext io = kj::setupAsyncIo();
  auto stream = io.lowLevelProvider->wrapUnixSocketFd(connection.get());
  // With room for a descriptor, as in the server: receiving without it takes another path.
  capnp::TwoPartyVatNetwork network(*stream, 1, capnp::rpc::twoparty::Side::SERVER);
  auto rpc = capnp::makeRpcServer(network, pegaflow::echo::Echo::Client(kj::heap<EchoServer>()));
  network.onDisconnect().wait(io.waitScope);
  return {};
}

Result<EchoProcess> EchoProcess::start() {
  PEGA_TRY_LET(harness::TemporaryDirectory directory, harness::TemporaryDirectory::create());
  const std::string path = directory.path() + "/echo.sock";
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  // The child inherits a listening socket, so its clients need not wait for it.
  const UniqueFd listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!listener ||
      ::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      ::listen(listener.get(), 4) != 0) {
    return fail_errno(errno, "listen on " + path);
  }
  PEGA_TRY_LET(const std::string program, harness::own_path());
  PEGA_TRY_LET(
      harness::Child child,
      harness::Child::start({.command = {program, "serve-echo", std::to_string(listener.get())},
                             .log_file = {},
                             .inherited_fd = listener.get()}));
  return EchoProcess(std::move(directory), std::move(child), path);
}

EchoClient::EchoClient(kj::AsyncIoContext& io, UniqueFd socket)
    : io_(io),
      stream_(io.lowLevelProvider->wrapUnixSocketFd(kj::AutoCloseFd(socket.release()))),
      rpc_(*stream_, 1),
      echo_(rpc_.bootstrap().castAs<pegaflow::echo::Echo>()) {}

Result<std::unique_ptr<EchoClient>> EchoClient::connect(kj::AsyncIoContext& io,
                                                        const std::string& socket_path) {
  PEGA_TRY_LET(UniqueFd socket, harness::connect_unix(socket_path));
  return std::unique_ptr<EchoClient>(new EchoClient(io, std::move(socket)));
}

std::size_t EchoClient::count(std::span<const std::byte> bytes) {
  return filled(echo_.countRequest(capnp::MessageSize{bytes.size() / 8 + 32, 0}), bytes)
      .send()
      .wait(io_.waitScope)
      .getSealed();
}

std::size_t EchoClient::back(std::span<const std::byte> bytes) {
  return filled(echo_.backRequest(capnp::MessageSize{bytes.size() / 8 + 32, 0}), bytes)
      .send()
      .wait(io_.waitScope)
      .getPacked()
      .size();
}

}  // namespace pegaflow::perf
