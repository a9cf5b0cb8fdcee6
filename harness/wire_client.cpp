#include "harness/wire_client.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

namespace pegaflow::harness {
namespace {

namespace api = ::pegaflow::wire;

/// The descriptor may be invalid.
class ProcessHandle final : public api::ProcessHandle::Server {
 public:
  explicit ProcessHandle(UniqueFd fd) : fd_(std::move(fd)) {}
  kj::Maybe<int> getFd() override {
    if (!fd_) return nullptr;
    return fd_.get();
  }

 private:
  UniqueFd fd_;
};

Result<UniqueFd> descriptor_for(WireClient::Handle handle) {
  UniqueFd fd;
  if (handle == WireClient::Handle::kOwnPidfd) {
    fd = UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
    if (!fd) return fail_errno(errno, "open a pidfd of this process");
  } else if (handle == WireClient::Handle::kNoPidfd) {
    fd = UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (!fd) return fail_errno(errno, "open /dev/null");
  }
  return fd;
}

tl::unexpected<Error> error_of(api::Error::Reader error) {
  return tl::unexpected<Error>(read_error(error));
}

/// Like write_keys(), with one copy of all bytes.
void set_keys(api::Keys::Builder wire, std::span<const BlockKey> keys) {
  static_assert(sizeof(BlockKey) == BlockKey::kMaxBytes);
  wire.setKeyBytes(BlockKey::kMaxBytes);
  wire.setPacked(kj::arrayPtr(reinterpret_cast<const kj::byte*>(keys.data()), keys.size_bytes()));
}

/// Room for the keys in the first segment of the message, so that they are copied once.
capnp::MessageSize room_for(std::span<const BlockKey> keys) {
  return {keys.size_bytes() / 8 + 32, 0};
}

template <typename Answer>
Result<std::vector<std::uint32_t>> read_slots(Answer&& answer) {
  if (answer.hasError()) return error_of(answer.getError());
  std::vector<std::uint32_t> slots;
  slots.reserve(answer.getSlots().size());
  for (const std::uint32_t slot : answer.getSlots()) slots.push_back(slot);
  return slots;
}

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

WireClient::WireClient(kj::AsyncIoContext& io, UniqueFd socket, OnLoss on_loss)
    : io_(io),
      on_loss_(on_loss),
      stream_(io.lowLevelProvider->wrapUnixSocketFd(kj::AutoCloseFd(socket.release()))),
      rpc_(*stream_, 1),
      gate_(rpc_.bootstrap().castAs<api::Gate>()),
      session_(nullptr) {}

template <typename Call>
auto WireClient::guarded(Call&& call) -> decltype(call()) {
  try {
    return call();
  } catch (const kj::Exception& problem) {
    if (on_loss_ == OnLoss::kThrow) throw;
    return fail(Errc::kPeerLost, "the server ended the connection: {}",
                problem.getDescription().cStr());
  }
}

Result<std::unique_ptr<WireClient>> WireClient::connect(kj::AsyncIoContext& io,
                                                        const std::string& socket_path) {
  PEGA_TRY_LET(UniqueFd socket, connect_unix(socket_path));
  auto client = std::make_unique<WireClient>(io, std::move(socket), OnLoss::kReturn);
  PEGA_TRY_LET(Greeting greeting, client->hello({.build = "pegaflow-perf"}));
  if (greeting.refused) return tl::unexpected<Error>(std::move(*greeting.refused));
  return client;
}

Result<WireClient::Greeting> WireClient::hello(const HelloOptions& options) {
  PEGA_TRY_LET(UniqueFd descriptor, descriptor_for(options.handle));
  process_ = options.process.is_none() ? Id128::random() : options.process;
  return guarded([&]() -> Result<Greeting> {
    auto request = gate_.helloRequest();
    request.setMinimum(options.minimum);
    request.setMaximum(options.maximum);
    write_id(process_, request.initProcess());
    write_id(options.previous_connection, request.initPreviousConnection());
    request.setQuiesced(options.quiesced);
    request.setBuild(options.build.c_str());
    if (options.handle != Handle::kNone) {
      request.setHandle(kj::heap<ProcessHandle>(std::move(descriptor)));
    }
    auto answer = request.send().wait(io_.waitScope);
    Greeting greeting{.version = answer.getVersion(),
                      .minimum = answer.getMinimum(),
                      .maximum = answer.getMaximum(),
                      .server = read_id(answer.getServer()),
                      .connection = read_id(answer.getConnection()),
                      .refused = std::nullopt};
    if (answer.hasRefused()) greeting.refused = read_error(answer.getRefused());
    if (answer.hasSession()) session_ = answer.getSession();
    return greeting;
  });
}

Result<WireClient::Registered> WireClient::register_rank(const Registration& registration) {
  return guarded([&]() -> Result<Registered> {
    auto request = session_.registerRequest();
    write_registration(registration, request);
    auto answer = request.send().wait(io_.waitScope);
    if (answer.hasRefused()) return error_of(answer.getRefused());
    kj::Maybe<int> descriptor = answer.getPool().getFd().wait(io_.waitScope);
    KJ_IF_MAYBE (fd, descriptor) {
      UniqueFd pool(::fcntl(*fd, F_DUPFD_CLOEXEC, 0));  // The capability closes its own descriptor.
      if (!pool) return fail_errno(errno, "keep the pool's descriptor");
      return Registered{.pool = std::move(pool),
                        .pool_bytes = answer.getPoolBytes(),
                        .namespace_hash = answer.getNamespace().cStr()};
    }
    return fail(Errc::kInternal, "the pool of the server has no descriptor");
  });
}

Result<void> WireClient::attach(const std::string& instance, const Id128& scheduler) {
  return guarded([&] {
    auto request = session_.attachRequest();
    request.setInstance(instance.c_str());
    write_id(scheduler, request.initScheduler());
    return read_done(request.send().wait(io_.waitScope));
  });
}

Result<WireClient::Registered> WireClient::register_worker(const std::string& instance,
                                                           std::uint64_t page_bytes,
                                                           std::uint64_t block_count) {
  PEGA_TRY_LET(Registered registered,
               register_rank({.instance = instance,
                              .factors = {{"program", "pegaflow-perf"},
                                          {"page_bytes", std::to_string(page_bytes)}},
                              .page_bytes = page_bytes,
                              .block_count = block_count}));
  PEGA_TRY(attach(instance));
  return registered;
}

Result<WireClient::Found> WireClient::lookup(std::span<const BlockKey> keys,
                                             std::uint32_t local_units) {
  return guarded([&]() -> Result<Found> {
    auto request = session_.lookupRequest(room_for(keys));
    set_keys(request, keys);
    request.setLocalUnits(local_units);
    auto answer = request.send().wait(io_.waitScope);
    return Found{.blocks = answer.getSealed(),
                 .elsewhere = answer.getReachable(),
                 .complete = answer.getComplete()};
  });
}

Result<WireClient::Found> WireClient::claim(const Id128& token, std::span<const BlockKey> keys,
                                            std::uint32_t local_units) {
  return guarded([&]() -> Result<Found> {
    auto request = session_.claimRequest(room_for(keys));
    write_id(token, request.initToken());
    set_keys(request.initKeys(), keys);
    request.getKeys().setLocalUnits(local_units);
    auto answer = request.send().wait(io_.waitScope);
    if (answer.hasError()) return error_of(answer.getError());
    Found found{.blocks = answer.getReady(),
                .elsewhere = answer.getComing(),
                .complete = answer.getComplete()};
    for (const api::Range::Reader range : answer.getRanges()) {
      found.ranges.push_back(
          {.kind = range.getKind(), .first = range.getFirst(), .count = range.getCount()});
    }
    return found;
  });
}

Result<WireClient::Boundaries> WireClient::boundaries(std::span<const BlockKey> keys,
                                                      std::uint32_t local_units) {
  return guarded([&]() -> Result<Boundaries> {
    auto request = session_.boundariesRequest(room_for(keys));
    set_keys(request, keys);
    request.setLocalUnits(local_units);
    auto answer = request.send().wait(io_.waitScope);
    if (answer.hasError()) return error_of(answer.getError());
    Boundaries found{.multiples = {}, .complete = answer.getComplete()};
    const capnp::Data::Reader bits = answer.getRestorable();
    for (std::uint32_t bit = 0; bit < 8 * bits.size(); ++bit) {
      if ((bits[bit / 8] >> (bit % 8) & 1) != 0) found.multiples.push_back(bit + 1);
    }
    return found;
  });
}

Result<void> WireClient::unclaim(const Id128& token) {
  return guarded([&] {
    auto request = session_.unclaimRequest();
    write_id(token, request.initToken());
    return read_done(request.send().wait(io_.waitScope));
  });
}

Result<std::vector<std::uint32_t>> WireClient::open(const Id128& token, std::uint32_t first,
                                                    std::uint32_t count, std::uint64_t pin,
                                                    std::uint8_t kind, Duration patience) {
  return guarded([&] {
    auto request = session_.openRequest();
    request.setPatienceMs(static_cast<std::uint32_t>(
        std::chrono::duration_cast<std::chrono::milliseconds>(patience).count()));
    write_id(token, request.initToken());
    request.setKind(kind);
    request.setFirst(first);
    request.setCount(count);
    request.setPin(pin);
    return read_slots(request.send().wait(io_.waitScope));
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

Result<void> WireClient::release(std::uint64_t pin) {
  return guarded([&] {
    auto request = session_.releaseRequest();
    request.setPin(pin);
    return read_done(request.send().wait(io_.waitScope));
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

Result<std::vector<std::uint32_t>> WireClient::reserve(const JobId& job,
                                                       std::span<const BlockKey> keys,
                                                       std::uint32_t first, std::uint8_t kind,
                                                       std::span<const std::uint8_t> depths,
                                                       bool may_refuse) {
  return guarded([&] {
    auto request = session_.reserveRequest(room_for(keys));
    write_job(job, request.initJob());
    request.setKind(kind);
    request.setFirst(first);
    request.setMayRefuse(may_refuse);
    if (!depths.empty()) request.setDepths({depths.data(), depths.size()});
    set_keys(request.initKeys(), keys);
    return read_slots(request.send().wait(io_.waitScope));
  });
}

Result<void> WireClient::publish(const JobId& job) {
  return guarded([&] {
    auto request = session_.publishRequest();
    write_job(job, request.initJob());
    return read_done(request.send().wait(io_.waitScope));
  });
}

Result<void> WireClient::abandon(const JobId& job) {
  return guarded([&] {
    auto request = session_.abandonRequest();
    write_job(job, request.initJob());
    return read_done(request.send().wait(io_.waitScope));
  });
}

Result<WireClient::Journal> WireClient::journal(std::uint64_t space, std::uint64_t position) {
  return guarded([&]() -> Result<Journal> {
    auto request = session_.journalRequest();
    request.setSpace(space);
    request.setPosition(position);
    auto answer = request.send().wait(io_.waitScope);
    if (answer.hasError()) return error_of(answer.getError());
    Journal journal{.space = answer.getSpace(),
                    .position = answer.getPosition(),
                    .lost = answer.getLost(),
                    .has_kinds = answer.getKinds().size() != 0,
                    .entries = {}};
    const capnp::Data::Reader keys = answer.getKeys();
    for (std::size_t i = 0; i < answer.getThere().size(); ++i) {
      JournalEntry& entry = journal.entries.emplace_back();
      std::memcpy(entry.key.bytes.data(), keys.begin() + i * BlockKey::kMaxBytes,
                  BlockKey::kMaxBytes);
      entry.kind = journal.has_kinds ? answer.getKinds()[i] : 0;
      entry.is_present = answer.getThere()[i] != 0;
    }
    return journal;
  });
}

Result<bool> WireClient::report_chain(std::uint64_t session, std::span<const std::uint64_t> keys,
                                      std::uint32_t block_tokens) {
  return guarded([&]() -> Result<bool> {
    auto request = session_.reportChainRequest();
    request.setSession(session);
    request.setBlockTokens(block_tokens);
    auto bytes = request.initKeys(static_cast<unsigned>(keys.size_bytes()));
    std::memcpy(bytes.begin(), keys.data(), keys.size_bytes());
    auto answer = request.send().wait(io_.waitScope);
    if (answer.hasError()) return error_of(answer.getError());
    return answer.getWanted();
  });
}

Result<std::uint64_t> WireClient::reset_cache() {
  return guarded([&]() -> Result<std::uint64_t> {
    auto answer = session_.resetCacheRequest().send().wait(io_.waitScope);
    if (answer.hasError()) return error_of(answer.getError());
    return answer.getGeneration();
  });
}

Result<void> WireClient::goodbye() {
  return guarded([&] { return read_done(session_.goodbyeRequest().send().wait(io_.waitScope)); });
}

}  // namespace pegaflow::harness
