#include "harness/wire_client.h"

#include <cstring>
#include <utility>

#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "capnp/wire/codec.h"

namespace pegaflow::harness {
namespace {

namespace api = ::pegaflow::wire;

/// Passes a pidfd, by which the server detects the end of this process.
class OwnProcess final : public api::ProcessHandle::Server {
 public:
  explicit OwnProcess(int pidfd) : pidfd_(pidfd) {}
  kj::Maybe<int> getFd() override { return pidfd_.get(); }

 private:
  UniqueFd pidfd_;
};

tl::unexpected<Error> error_of(api::Error::Reader error) {
  return tl::unexpected<Error>(read_error(error));
}

void set_keys(api::Keys::Builder wire, std::span<const std::byte> keys) {
  wire.setKeyBytes(BlockKey::kMaxBytes);
  wire.setPacked(kj::arrayPtr(reinterpret_cast<const kj::byte*>(keys.data()), keys.size()));
}

std::vector<std::uint32_t> numbers_of(capnp::List<std::uint32_t>::Reader wire) {
  std::vector<std::uint32_t> numbers;
  numbers.reserve(wire.size());
  for (const std::uint32_t number : wire) numbers.push_back(number);
  return numbers;
}

/// Room for the keys in the first segment of the message, so that they are copied once.
capnp::MessageSize room_for(std::span<const std::byte> keys) { return {keys.size() / 8 + 32, 0}; }

}  // namespace

Result<UniqueFd> connect_unix(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) {
    return fail(Errc::kInvalidArgument, "the socket path {} is longer than {} bytes", path,
                sizeof address.sun_path - 1);
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket) return fail_errno(errno, "make a Unix socket");
  for (const int option : {SO_SNDBUF, SO_RCVBUF}) {
    ::setsockopt(socket.get(), SOL_SOCKET, option, &kSocketBufferBytes, sizeof kSocketBufferBytes);
  }
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    return fail(Errc::kPeerLost, "connect to {}: {}", path, std::strerror(errno));
  }
  return socket;
}

WireClient::WireClient(kj::AsyncIoContext& io, UniqueFd socket)
    : io_(io),
      stream_(io.lowLevelProvider->wrapUnixSocketFd(kj::AutoCloseFd(socket.release()))),
      rpc_(*stream_, 1),
      session_(nullptr),
      scheduler_(Id128::random()) {}

template <typename Call>
auto WireClient::guarded(Call&& call) -> decltype(call()) {
  try {
    return call();
  } catch (const kj::Exception& problem) {
    return fail(Errc::kPeerLost, "the server ended the connection: {}",
                problem.getDescription().cStr());
  }
}

Result<std::unique_ptr<WireClient>> WireClient::connect(kj::AsyncIoContext& io,
                                                        const std::string& socket_path) {
  PEGA_TRY_LET(UniqueFd socket, connect_unix(socket_path));
  std::unique_ptr<WireClient> client(new WireClient(io, std::move(socket)));
  const int pidfd = static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0));
  if (pidfd < 0) return fail_errno(errno, "open a pidfd of this process");
  const Result<void> greeted = client->guarded([&]() -> Result<void> {
    auto hello = client->rpc_.bootstrap().castAs<api::Gate>().helloRequest();
    hello.setMinimum(kWireMinimum);
    hello.setMaximum(kWireMaximum);
    write_id(client->scheduler_, hello.initProcess());
    hello.setBuild("pegaflow-perf");
    hello.setHandle(kj::heap<OwnProcess>(pidfd));
    auto answer = hello.send().wait(io.waitScope);
    if (answer.getVersion() == 0) return error_of(answer.getRefused());
    client->session_ = answer.getSession();
    return {};
  });
  PEGA_TRY(greeted);
  return client;
}

Result<WireClient::Registered> WireClient::register_worker(const std::string& instance,
                                                           std::uint64_t page_bytes,
                                                           std::uint64_t block_count) {
  return guarded([&]() -> Result<Registered> {
    auto request = session_.registerRequest();
    request.setInstance(instance.c_str());
    request.setRank(0);
    request.setRanks(1);
    auto factors = request.initFactors(2);
    factors[0].setName("program");
    factors[0].setValue("pegaflow-perf");
    factors[1].setName("page_bytes");
    factors[1].setValue(std::to_string(page_bytes).c_str());
    request.setPageBytes(page_bytes);
    request.setBlockCount(block_count);
    auto answer = request.send().wait(io_.waitScope);
    if (answer.hasRefused() && !answer.hasPool()) return error_of(answer.getRefused());
    kj::Maybe<int> descriptor = answer.getPool().getFd().wait(io_.waitScope);
    KJ_IF_MAYBE (fd, descriptor) {
      UniqueFd pool(::dup(*fd));  // The capability closes its own descriptor.
      if (!pool) return fail_errno(errno, "keep the pool's descriptor");
      auto attach = session_.attachRequest();
      attach.setInstance(instance.c_str());
      PEGA_TRY(read_done(attach.send().wait(io_.waitScope)));
      return Registered{.pool = std::move(pool), .pool_bytes = answer.getPoolBytes()};
    }
    return fail(Errc::kInternal, "the pool of the server has no descriptor");
  });
}

Result<std::uint32_t> WireClient::lookup(std::span<const std::byte> keys) {
  return guarded([&]() -> Result<std::uint32_t> {
    auto request = session_.lookupRequest(room_for(keys));
    set_keys(request, keys);
    auto answer = request.send().wait(io_.waitScope);
    if (!answer.getComplete()) return fail(Errc::kRefused, "the instance is not complete");
    return answer.getSealed();
  });
}

Result<std::uint32_t> WireClient::claim(const Id128& token, std::span<const std::byte> keys) {
  return guarded([&]() -> Result<std::uint32_t> {
    auto request = session_.claimRequest(room_for(keys));
    write_id(token, request.initToken());
    set_keys(request.initKeys(), keys);
    auto answer = request.send().wait(io_.waitScope);
    if (answer.hasError()) return error_of(answer.getError());
    return answer.getReady();
  });
}

Result<void> WireClient::open_each(const Id128& token, std::uint32_t count,
                                   std::uint64_t first_pin) {
  return guarded([&]() -> Result<void> {
    // Requests in flight: far below the server's limit for one connection.
    constexpr std::uint32_t kAtOnce = 64;
    for (std::uint32_t begin = 0; begin < count; begin += kAtOnce) {
      std::vector<capnp::RemotePromise<api::Session::OpenResults>> answers;
      for (std::uint32_t i = begin; i < std::min(count, begin + kAtOnce); ++i) {
        auto request = session_.openRequest();
        write_id(token, request.initToken());
        request.setFirst(i);
        request.setCount(1);
        request.setPin(first_pin + i);
        answers.push_back(request.send());
      }
      for (auto& promise : answers) {
        auto answer = promise.wait(io_.waitScope);
        if (answer.hasError()) return error_of(answer.getError());
      }
    }
    return {};
  });
}

Result<std::vector<std::uint32_t>> WireClient::open(const Id128& token, std::uint32_t first,
                                                    std::uint32_t count, std::uint64_t pin) {
  return guarded([&]() -> Result<std::vector<std::uint32_t>> {
    auto request = session_.openRequest();
    write_id(token, request.initToken());
    request.setFirst(first);
    request.setCount(count);
    request.setPin(pin);
    auto answer = request.send().wait(io_.waitScope);
    if (answer.hasError()) return error_of(answer.getError());
    return numbers_of(answer.getSlots());
  });
}

Result<void> WireClient::end_load(std::uint64_t pin, const Id128& token) {
  return guarded([&]() -> Result<void> {
    auto release = session_.releaseRequest();
    release.setPin(pin);
    auto released = release.send();
    auto unclaim = session_.unclaimRequest();
    write_id(token, unclaim.initToken());
    auto unclaimed = unclaim.send();
    PEGA_TRY(read_done(released.wait(io_.waitScope)));
    return read_done(unclaimed.wait(io_.waitScope));
  });
}

Result<std::vector<std::uint32_t>> WireClient::reserve(std::uint64_t job,
                                                       std::span<const std::byte> keys) {
  return guarded([&]() -> Result<std::vector<std::uint32_t>> {
    auto request = session_.reserveRequest(room_for(keys));
    write_job({.scheduler = scheduler_, .number = job}, request.initJob());
    set_keys(request.initKeys(), keys);
    auto answer = request.send().wait(io_.waitScope);
    if (answer.hasError()) return error_of(answer.getError());
    return numbers_of(answer.getSlots());
  });
}

Result<void> WireClient::publish(std::uint64_t job) {
  return guarded([&]() -> Result<void> {
    auto request = session_.publishRequest();
    write_job({.scheduler = scheduler_, .number = job}, request.initJob());
    return read_done(request.send().wait(io_.waitScope));
  });
}

Result<void> WireClient::abandon(std::uint64_t job) {
  return guarded([&]() -> Result<void> {
    auto request = session_.abandonRequest();
    write_job({.scheduler = scheduler_, .number = job}, request.initJob());
    return read_done(request.send().wait(io_.waitScope));
  });
}

}  // namespace pegaflow::harness
