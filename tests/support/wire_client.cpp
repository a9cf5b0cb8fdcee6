#include "tests/support/wire_client.h"

#include <cstring>
#include <stdexcept>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace pegaflow::testing {
namespace {

class HandleImpl final : public wire::ProcessHandle::Server {
 public:
  explicit HandleImpl(UniqueFd fd) : fd_(std::move(fd)) {}
  kj::Maybe<int> getFd() override {
    if (!fd_) return nullptr;
    return fd_.get();
  }

 private:
  UniqueFd fd_;
};

UniqueFd own_pidfd() {
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
}

kj::Own<kj::AsyncCapabilityStream> connect(kj::AsyncIoContext& io, const std::string& socket) {
  return io.provider->getNetwork()
      .parseAddress(kj::str("unix:", socket.c_str()))
      .wait(io.waitScope)
      ->connect()
      .wait(io.waitScope)
      .downcast<kj::AsyncCapabilityStream>();
}

template <typename Answer>
Result<std::vector<std::uint32_t>> read_slots(Answer&& answer) {
  if (answer.hasError()) return tl::unexpected<Error>(read_error(answer.getError()));
  std::vector<std::uint32_t> slots;
  for (const std::uint32_t slot : answer.getSlots()) slots.push_back(slot);
  return slots;
}

}  // namespace

MappedPool::MappedPool(MappedPool&& other) noexcept
    : fd(std::move(other.fd)),
      bytes(std::exchange(other.bytes, {})),
      page_bytes(other.page_bytes),
      namespace_hash(std::move(other.namespace_hash)) {}

MappedPool& MappedPool::operator=(MappedPool&& other) noexcept {
  std::swap(fd, other.fd);
  std::swap(bytes, other.bytes);
  std::swap(page_bytes, other.page_bytes);
  std::swap(namespace_hash, other.namespace_hash);
  return *this;
}

MappedPool::~MappedPool() {
  if (!bytes.empty()) ::munmap(bytes.data(), bytes.size());
}

WireClient::WireClient(kj::AsyncIoContext& io, const std::string& socket)
    : io_(io),
      stream_(connect(io, socket)),
      rpc_(*stream_, 1),
      gate_(rpc_.bootstrap().castAs<wire::Gate>()),
      session_(nullptr) {}

WireClient::Greeting WireClient::hello(const HelloOptions& options) {
  process_ = options.process.is_none() ? Id128::random() : options.process;
  auto request = gate_.helloRequest();
  request.setMinimum(options.minimum);
  request.setMaximum(options.maximum);
  write_id(process_, request.initProcess());
  write_id(options.previous_connection, request.initPreviousConnection());
  request.setQuiesced(options.quiesced);
  request.setBuild("a test");
  switch (options.handle) {
    case Handle::kOwnPidfd:
      request.setHandle(kj::heap<HandleImpl>(own_pidfd()));
      break;
    case Handle::kNone:
      break;
    case Handle::kNoDescriptor:
      request.setHandle(kj::heap<HandleImpl>(UniqueFd()));
      break;
    case Handle::kNoPidfd:
      request.setHandle(kj::heap<HandleImpl>(UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC))));
      break;
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
}

Result<MappedPool> WireClient::register_rank(const std::string& instance,
                                             std::uint64_t page_bytes) {
  return register_rank(Registration{.instance = instance,
                                    .rank = 0,
                                    .ranks = 1,
                                    .factors = {{"dtype", "float16"}, {"weights", "a"}},
                                    .page_bytes = page_bytes,
                                    .block_count = 100});
}

Result<MappedPool> WireClient::register_rank(const Registration& registration) {
  auto request = session_.registerRequest();
  write_registration(registration, request);
  auto answer = request.send().wait(io_.waitScope);
  if (answer.hasRefused()) return tl::unexpected<Error>(read_error(answer.getRefused()));
  auto pool = answer.getPool();
  MappedPool mapped;
  KJ_IF_MAYBE (fd, pool.getFd().wait(io_.waitScope)) {
    mapped.fd = UniqueFd(::fcntl(*fd, F_DUPFD_CLOEXEC, 0));
  } else {
    throw std::runtime_error("the pool came without a descriptor");
  }
  void* const base = ::mmap(nullptr, answer.getPoolBytes(), PROT_READ | PROT_WRITE, MAP_SHARED,
                            mapped.fd.get(), 0);
  if (base == MAP_FAILED) throw std::runtime_error("the pool cannot be mapped");
  mapped.bytes = {static_cast<std::byte*>(base), answer.getPoolBytes()};
  mapped.page_bytes = registration.page_bytes;
  mapped.namespace_hash = answer.getNamespace().cStr();
  return mapped;
}

Result<void> WireClient::attach(const std::string& instance, const Id128& scheduler) {
  auto request = session_.attachRequest();
  request.setInstance(instance.c_str());
  write_id(scheduler.is_none() ? process_ : scheduler, request.initScheduler());
  return read_done(request.send().wait(io_.waitScope));
}

kj::Promise<Result<void>> WireClient::await_job(const Id128& server, const JobId& job,
                                                std::uint32_t patience_ms) {
  auto request = session_.awaitJobRequest();
  write_id(server, request.initServer());
  write_job(job, request.initJob());
  request.setPatienceMs(patience_ms);
  return request.send().then([](auto&& answer) { return read_done(answer); });
}

WireClient::Found WireClient::lookup(std::span<const BlockKey> keys) {
  auto request = session_.lookupRequest();
  write_keys(keys, BlockKey::kMaxBytes, request);
  auto answer = request.send().wait(io_.waitScope);
  return {.blocks = answer.getSealed(), .complete = answer.getComplete()};
}

Result<WireClient::Found> WireClient::claim(const Id128& token, std::span<const BlockKey> keys) {
  auto request = session_.claimRequest();
  write_id(token, request.initToken());
  write_keys(keys, BlockKey::kMaxBytes, request.initKeys());
  auto answer = request.send().wait(io_.waitScope);
  if (answer.hasError()) return tl::unexpected<Error>(read_error(answer.getError()));
  return Found{.blocks = answer.getReady(), .complete = answer.getComplete()};
}

Result<void> WireClient::unclaim(const Id128& token) {
  auto request = session_.unclaimRequest();
  write_id(token, request.initToken());
  return read_done(request.send().wait(io_.waitScope));
}

Result<std::vector<std::uint32_t>> WireClient::open(const Id128& token, std::uint32_t first,
                                                    std::uint32_t count, std::uint64_t pin) {
  auto request = session_.openRequest();
  write_id(token, request.initToken());
  request.setFirst(first);
  request.setCount(count);
  request.setPin(pin);
  return read_slots(request.send().wait(io_.waitScope));
}

Result<void> WireClient::release(std::uint64_t pin) {
  auto request = session_.releaseRequest();
  request.setPin(pin);
  return read_done(request.send().wait(io_.waitScope));
}

Result<std::vector<std::uint32_t>> WireClient::reserve(const JobId& job,
                                                       std::span<const BlockKey> keys,
                                                       std::uint32_t first) {
  auto request = session_.reserveRequest();
  write_job(job, request.initJob());
  request.setFirst(first);
  write_keys(keys, BlockKey::kMaxBytes, request.initKeys());
  return read_slots(request.send().wait(io_.waitScope));
}

Result<void> WireClient::publish(const JobId& job) {
  auto request = session_.publishRequest();
  write_job(job, request.initJob());
  return read_done(request.send().wait(io_.waitScope));
}

Result<void> WireClient::abandon(const JobId& job) {
  auto request = session_.abandonRequest();
  write_job(job, request.initJob());
  return read_done(request.send().wait(io_.waitScope));
}

Result<std::uint64_t> WireClient::reset_cache() {
  auto answer = session_.resetCacheRequest().send().wait(io_.waitScope);
  if (answer.hasError()) return tl::unexpected<Error>(read_error(answer.getError()));
  return answer.getGeneration();
}

Result<void> WireClient::goodbye() {
  return read_done(session_.goodbyeRequest().send().wait(io_.waitScope));
}

Result<std::size_t> WireClient::save(const MappedPool& pool, const JobId& job,
                                     std::span<const BlockKey> keys) {
  PEGA_TRY_LET(const auto slots, reserve(job, keys));
  std::size_t written = 0;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] == ~std::uint32_t{0}) continue;
    const auto page = pool.slot(slots[i]);
    std::memset(page.data(), std::to_integer<int>(keys[i].bytes[0]), page.size());
    ++written;
  }
  PEGA_TRY(publish(job));
  return written;
}

std::vector<BlockKey> make_keys(std::uint64_t chain, std::size_t count, std::size_t first) {
  std::vector<BlockKey> keys(count);
  for (std::size_t i = 0; i < count; ++i) {
    std::uint64_t state = chain * 0x9E3779B97F4A7C15ULL + first + i + 1;
    for (std::size_t word = 0; word < 4; ++word) {  // splitmix64
      std::uint64_t z = (state += 0x9E3779B97F4A7C15ULL);
      z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9ULL;
      z = (z ^ (z >> 27U)) * 0x94D049BB133111EBULL;
      z ^= z >> 31U;
      std::memcpy(keys[i].bytes.data() + word * 8, &z, 8);
    }
  }
  return keys;
}

}  // namespace pegaflow::testing
