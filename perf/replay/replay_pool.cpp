#include "perf/replay/replay_pool.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include <fmt/format.h>

#include "base/page_layout.h"
#include "engine/ssd/format.h"
#include "engine/types/depth.h"
#include "perf/lib/workload.h"

namespace pegaflow::perf {
namespace {

constexpr std::size_t kKeyBytes = BlockKey::kMaxBytes;

/// Blocks of a segment of 1 MiB: its table has one page.
constexpr std::uint64_t kSegmentBlocks = engine::ssd::kEntriesPerPage;
constexpr std::uint64_t kHeadSegments = engine::ssd::kLogOffset / (1 << 20);
/// A block that a disk does not deliver by then will not come.
constexpr Duration kDiskPatience = std::chrono::seconds(5);

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

ReplayPool::ReplayPool(std::optional<harness::TemporaryDirectory> disk,
                       harness::ServerProcess server, std::unique_ptr<harness::WireClient> client,
                       harness::Mapping pool, const Options& options)
    : disk_(std::move(disk)),
      server_(std::move(server)),
      client_(std::move(client)),
      pool_(std::move(pool)),
      blocks_(options.blocks),
      pause_(options.pause),
      keys_(options.seed),
      page_(kSmallPageBytes) {}

Result<std::unique_ptr<ReplayPool>> ReplayPool::start(kj::AsyncIoContext& io,
                                                      const Options& options) {
  const std::uint64_t bytes = options.blocks * kSmallPageBytes;
  std::vector<std::string> arguments = {"--eviction", options.eviction};
  std::optional<harness::TemporaryDirectory> disk;
  if (options.ssd_blocks != 0) {
    PEGA_TRY_LET(harness::TemporaryDirectory made, harness::TemporaryDirectory::create());
    disk.emplace(std::move(made));
    const std::uint64_t segments =
        (options.ssd_blocks + kSegmentBlocks - 1) / kSegmentBlocks + kHeadSegments;
    arguments.insert(arguments.end(),
                     {"--ssd-cache-path", disk->path() + "/ssd", "--ssd-cache-capacity",
                      fmt::format("{}mb", segments), "--ssd-segment-size", "1mb",
                      "--ssd-write-budget", std::to_string(options.ssd_write_budget)});
  }
  PEGA_TRY_LET(harness::ServerProcess server,
               harness::ServerProcess::start({.program = options.program,
                                              .pool_size = std::to_string(bytes),
                                              .arguments = std::move(arguments)}));
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
  return std::unique_ptr<ReplayPool>(new ReplayPool(std::move(disk), std::move(server),
                                                    std::move(client), std::move(pool), options));
}

Result<void> ReplayPool::replay(std::span<const Prompt> prompts) {
  for (const Prompt& prompt : prompts) {
    PEGA_TRY(serve(prompt));
    if (pause_ != Duration::zero()) std::this_thread::sleep_for(pause_);
  }
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
  PEGA_TRY_LET(const harness::WireClient::Found known,
               question.time([&] { return client_->lookup(keys); }));
  if (!known.complete) return fail(Errc::kRefused, "the instance is not complete");
  const std::uint32_t sealed = known.blocks + known.elsewhere;
  std::uint32_t claimed = 0;
  const Id128 token = Id128::random();
  if (sealed != 0) {
    PEGA_TRY_LET(const harness::WireClient::Found made,
                 question.time([&] { return client_->claim(token, keys.first(sealed)); }));
    claimed = made.blocks + made.elsewhere;
    seen_.shortened += sealed - claimed;
  }
  seen_.question_us.push_back(question.microseconds());
  if (claimed == 0) return 0;

  Stopwatch load;
  std::uint32_t opened = 0;
  std::vector<std::uint64_t> pins;
  while (opened < claimed) {
    pins.push_back(next_pin_++);
    const auto slots = load.time([&] {
      return client_->open(token, opened, claimed - opened, pins.back(), 0, kDiskPatience);
    });
    if (!slots || slots->empty()) {
      if (disk_) break;  // A block that the disk does not have any longer.
      return slots ? fail(Errc::kInternal, "no slot came for {} blocks", claimed)
                   : Result<std::size_t>(tl::unexpected<Error>(slots.error()));
    }
    PEGA_TRY(read(prompt, opened, *slots));
    opened += static_cast<std::uint32_t>(slots->size());
  }
  seen_.lost += claimed - opened;
  for (std::size_t i = 0; i + 1 < pins.size(); ++i) {
    PEGA_TRY(load.time([&] { return client_->release(pins[i]); }));
  }
  PEGA_TRY(load.time([&] { return client_->end_load(pins.back(), token); }));
  seen_.load_us.push_back(load.microseconds());
  return opened;
}

/// Copies the pages of the prompt's blocks from `first` on out of their slots, and checks them.
Result<void> ReplayPool::read(const Prompt& prompt, std::uint32_t first,
                              std::span<const std::uint32_t> slots) {
  for (std::size_t i = 0; i < slots.size(); ++i) {
    PEGA_TRY_LET(const std::span<std::byte> from, page(slots[i]));
    std::copy(from.begin(), from.end(), page_.begin());
    if (!has_name(page_, keys_.key(prompt[first + i]))) {
      return fail(Errc::kCorrupt, "the page of block {} holds the bytes of another block",
                  prompt[first + i]);
    }
  }
  return {};
}

Result<void> ReplayPool::save(const Prompt& prompt, std::size_t first,
                              std::span<const BlockKey> keys) {
  if (keys.empty()) return {};
  Stopwatch save;
  const JobId job = client_->job(next_job_++);
  std::vector<std::uint8_t> depths;
  for (std::size_t i = first; i < prompt.size(); ++i) {
    depths.push_back(engine::sent_depth(static_cast<std::uint32_t>(i)));
  }
  PEGA_TRY_LET(const std::vector<std::uint32_t> slots,
               save.time([&] { return client_->reserve(job, keys, 0, 0, depths, true); }));
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
  const Counted of_pool{.evictions = value("pegaflow_cache_block_evictions_total"),
                        .resident = value("pegaflow_cache_resident_blocks"),
                        .saved_bytes = value("pegaflow_save_bytes_total"),
                        .loaded_bytes = value("pegaflow_load_bytes_total")};
  Counted counted = of_pool;
  const std::string disk = disk_ ? "{disk=\"" + disk_->path() + "/ssd\"}" : "";
  if (disk_) {
    counted.ssd_written = value("pegaflow_ssd_written_blocks_total" + disk);
    counted.ssd_restored = value(R"(pegaflow_fetch_blocks_total{result="restored"})");
    counted.ssd_unwritten = value(R"(pegaflow_ssd_rejected_blocks_total{reason="slow"})");
    counted.ssd_blocks = value("pegaflow_ssd_blocks" + disk);
  }
  struct Pair {
    const char* what;
    std::uint64_t counted;
    std::uint64_t seen;
  };
  for (const Pair& pair :
       {Pair{"blocks saved", value("pegaflow_cache_block_insertions_total"), seen_.saved},
        Pair{"blocks saved and restored", counted.evictions + counted.resident,
             seen_.saved + counted.ssd_restored},
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
