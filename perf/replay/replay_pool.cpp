#include "perf/replay/replay_pool.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/page_layout.h"
#include "perf/lib/workload.h"

namespace pegaflow::perf {
namespace {

constexpr std::size_t kKeyBytes = BlockKey::kMaxBytes;

/// The total time of some calls.
class Stopwatch {
 public:
  template <typename Call>
  auto time(Call&& call) {
    const auto begin = std::chrono::steady_clock::now();
    auto result = call();
    spent_ += std::chrono::steady_clock::now() - begin;
    return result;
  }
  [[nodiscard]] double microseconds() const {
    return std::chrono::duration<double, std::micro>(spent_).count();
  }

 private:
  std::chrono::steady_clock::duration spent_{};
};

/// Writes the key of a block at both ends of its page, so that a torn page is detected too.
void write_name(std::span<std::byte> page, const BlockKey& key) {
  std::memcpy(page.data(), key.bytes.data(), kKeyBytes);
  std::memcpy(page.last(kKeyBytes).data(), key.bytes.data(), kKeyBytes);
}

bool has_name(std::span<const std::byte> page, const BlockKey& key) {
  return std::memcmp(page.data(), key.bytes.data(), kKeyBytes) == 0 &&
         std::memcmp(page.last(kKeyBytes).data(), key.bytes.data(), kKeyBytes) == 0;
}

}  // namespace

ReplayPool::ReplayPool(harness::ServerProcess server, std::unique_ptr<harness::WireClient> client,
                       harness::Mapping pool, const Options& options)
    : server_(std::move(server)),
      client_(std::move(client)),
      pool_(std::move(pool)),
      blocks_(options.blocks),
      keys_(options.seed),
      page_(kSmallPageBytes) {}

Result<std::unique_ptr<ReplayPool>> ReplayPool::start(kj::AsyncIoContext& io,
                                                      const Options& options) {
  const std::uint64_t bytes = options.blocks * kSmallPageBytes;
  PEGA_TRY_LET(harness::ServerProcess server,
               harness::ServerProcess::start({.program = options.program,
                                              .pool_size = std::to_string(bytes),
                                              .arguments = {"--eviction", options.eviction}}));
  PEGA_TRY_LET(std::unique_ptr<harness::WireClient> client,
               harness::WireClient::connect(io, server.socket_path()));
  PEGA_TRY_LET(const harness::WireClient::Registered registered,
               client->register_worker("replay", kSmallPageBytes, 1));
  if (registered.pool_bytes != bytes) {
    return fail(
        Errc::kRefused,
        "the pool of the server has {} blocks, not {}; with reserved huge pages only multiples "
        "of 512 are possible",
        registered.pool_bytes / kSmallPageBytes, options.blocks);
  }
  PEGA_TRY_LET(harness::Mapping pool,
               harness::Mapping::shared(registered.pool.get(), registered.pool_bytes));
  return std::unique_ptr<ReplayPool>(
      new ReplayPool(std::move(server), std::move(client), std::move(pool), options));
}

Result<void> ReplayPool::replay(std::span<const Prompt> prompts) {
  for (const Prompt& prompt : prompts) PEGA_TRY(serve(prompt));
  return {};
}

Result<void> ReplayPool::serve(const Prompt& prompt) {
  std::vector<BlockKey> keys;
  keys.reserve(prompt.size());
  for (const std::uint64_t block : prompt) keys.push_back(keys_.key(block));
  PEGA_TRY_LET(const std::size_t found, load(prompt, keys));
  PEGA_TRY(save(prompt, found, std::span<const BlockKey>(keys).subspan(found)));
  ++seen_.requests;
  seen_.asked += prompt.size();
  seen_.found += found;
  return {};
}

Result<std::size_t> ReplayPool::load(const Prompt& prompt, std::span<const BlockKey> keys) {
  Stopwatch question;
  PEGA_TRY_LET(const std::uint32_t sealed, question.time([&] { return lookup(*client_, keys); }));
  std::uint32_t ready = 0;
  const Id128 token = Id128::random();
  if (sealed != 0) {
    PEGA_TRY_LET(const harness::WireClient::Found claimed,
                 question.time([&] { return client_->claim(token, keys.first(sealed)); }));
    ready = claimed.blocks;
    seen_.shortened += sealed - ready;
  }
  seen_.question_us.push_back(question.microseconds());
  if (ready == 0) return 0;

  Stopwatch load;
  const std::uint64_t pin = next_pin_++;
  PEGA_TRY_LET(const std::vector<std::uint32_t> slots,
               load.time([&] { return client_->open(token, 0, ready, pin); }));
  if (slots.size() != ready) {
    return fail(Errc::kInternal, "{} slots came for {} blocks", slots.size(), ready);
  }
  for (std::uint32_t i = 0; i < ready; ++i) {
    PEGA_TRY_LET(const std::span<std::byte> from, page(slots[i]));
    std::copy(from.begin(), from.end(), page_.begin());
    if (!has_name(page_, keys_.key(prompt[i]))) {
      return fail(Errc::kCorrupt, "the page of block {} holds the bytes of another block",
                  prompt[i]);
    }
  }
  PEGA_TRY(load.time([&] { return client_->end_load(pin, token); }));
  seen_.load_us.push_back(load.microseconds());
  return ready;
}

Result<void> ReplayPool::save(const Prompt& prompt, std::size_t first,
                              std::span<const BlockKey> keys) {
  if (keys.empty()) return {};
  Stopwatch save;
  const JobId job = client_->job(next_job_++);
  PEGA_TRY_LET(const std::vector<std::uint32_t> slots,
               save.time([&] { return client_->reserve(job, keys); }));
  if (slots.size() != prompt.size() - first) {
    return fail(Errc::kInternal, "{} slots came for {} blocks", slots.size(),
                prompt.size() - first);
  }
  std::uint64_t written = 0;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] == harness::WireClient::kNoFrame) continue;
    write_name(page_, keys_.key(prompt[first + i]));
    PEGA_TRY_LET(const std::span<std::byte> to, page(slots[i]));
    std::copy(page_.begin(), page_.end(), to.begin());
    ++written;
  }
  if (written != 0) {  // Else there is no reservation.
    PEGA_TRY(save.time([&] { return client_->publish(job); }));
  }
  seen_.saved += written;
  seen_.save_us.push_back(save.microseconds());
  return {};
}

Result<std::span<std::byte>> ReplayPool::page(std::uint32_t slot) const {
  const std::uint64_t offset = slot * kSlotAlignment;
  if (offset + kSmallPageBytes > pool_.bytes().size()) {
    return fail(Errc::kInternal, "slot {} lies beyond the pool", slot);
  }
  return pool_.bytes().subspan(offset, kSmallPageBytes);
}

Result<ReplayPool::Counted> ReplayPool::count() const {
  PEGA_TRY_LET(const harness::ServerProcess::Metrics metrics, server_.metrics());
  const auto value = [&](std::string_view name) -> std::uint64_t {
    const auto found = metrics.find(name);
    return found == metrics.end() ? ~std::uint64_t{0} : static_cast<std::uint64_t>(found->second);
  };
  const Counted counted{.evictions = value("pegaflow_cache_block_evictions_total"),
                        .resident = value("pegaflow_cache_resident_blocks"),
                        .saved_bytes = value("pegaflow_save_bytes_total"),
                        .loaded_bytes = value("pegaflow_load_bytes_total")};
  struct Pair {
    const char* what;
    std::uint64_t counted;
    std::uint64_t seen;
  };
  for (const Pair& pair :
       {Pair{"blocks saved", value("pegaflow_cache_block_insertions_total"), seen_.saved},
        Pair{"blocks saved", counted.evictions + counted.resident, seen_.saved},
        Pair{"bytes saved", counted.saved_bytes, seen_.saved * kSmallPageBytes},
        Pair{"bytes loaded", counted.loaded_bytes, seen_.found * kSmallPageBytes},
        Pair{"claims left", value("pegaflow_claims"), 0},
        Pair{"pins left", value("pegaflow_pins"), 0},
        Pair{"reservations left", value("pegaflow_reservations"), 0}}) {
    if (pair.counted != pair.seen) {
      return fail(Errc::kInternal, "{}: the server counts {}, the engine {}", pair.what,
                  pair.counted, pair.seen);
    }
  }
  if (counted.resident > blocks_ || (counted.evictions != 0 && counted.resident != blocks_)) {
    return fail(Errc::kInternal, "{} blocks are in a pool of {} after {} evictions",
                counted.resident, blocks_, counted.evictions);
  }
  return counted;
}

}  // namespace pegaflow::perf
