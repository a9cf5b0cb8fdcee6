#include "tests/support/wire_client.h"

#include <cstring>
#include <stdexcept>
#include <utility>

namespace pegaflow::testing {
namespace {

template <typename T>
T value_of(Result<T> result) {
  if (!result) throw std::runtime_error(to_string(result.error()));
  return std::move(*result);
}

}  // namespace

WireClient::WireClient(kj::AsyncIoContext& io, const std::string& socket)
    : harness::WireClient(io, value_of(harness::connect_unix(socket)), OnLoss::kThrow) {}

WireClient::Greeting WireClient::hello(HelloOptions options) {
  options.build = "a test";
  return value_of(harness::WireClient::hello(options));
}

Result<MappedPool> WireClient::register_rank(const std::string& instance,
                                             std::uint64_t page_bytes) {
  return register_rank(Registration{.instance = instance,
                                    .factors = {{"dtype", "float16"}, {"weights", "a"}},
                                    .page_bytes = page_bytes,
                                    .block_count = 100});
}

Result<MappedPool> WireClient::register_rank(const Registration& registration) {
  PEGA_TRY_LET(Registered registered, harness::WireClient::register_rank(registration));
  harness::Mapping mapping =
      value_of(harness::Mapping::shared(registered.pool.get(), registered.pool_bytes));
  return MappedPool{.fd = std::move(registered.pool),
                    .mapping = std::move(mapping),
                    .page_bytes = registration.page_bytes,
                    .namespace_hash = std::move(registered.namespace_hash)};
}

Result<void> WireClient::attach(const std::string& instance, const Id128& scheduler) {
  return harness::WireClient::attach(instance, scheduler.is_none() ? process() : scheduler);
}

WireClient::Found WireClient::lookup(std::span<const BlockKey> keys, std::uint32_t local_units) {
  return value_of(harness::WireClient::lookup(keys, local_units));
}

kj::Promise<Result<void>> WireClient::await_job(const Id128& server, const JobId& job,
                                                std::uint32_t patience_ms) {
  return jobs_reached(server, job, patience_ms).then([](JobsReached&& reached) {
    return kj::mv(reached.ended);
  });
}

kj::Promise<JobsReached> WireClient::jobs_reached(const Id128& server, const JobId& job,
                                                  std::uint32_t patience_ms, bool begun) {
  auto request = session().awaitJobRequest();
  write_id(server, request.initServer());
  write_job(job, request.initJob());
  request.setPatienceMs(patience_ms);
  request.setBegun(begun);
  return request.send().then([](auto&& answer) { return read_reached(answer); });
}

Result<std::size_t> WireClient::save(const MappedPool& pool, const JobId& job,
                                     std::span<const BlockKey> keys) {
  PEGA_TRY_LET(const auto slots, reserve(job, keys));
  std::size_t written = 0;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] == kNoFrame) continue;
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
