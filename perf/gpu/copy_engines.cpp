#include "perf/gpu/copy_engines.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include <sys/mman.h>

#include "base/os/unique_fd.h"
#include "base/units.h"
#include "harness/engine_memory.h"
#include "harness/pattern.h"
#include "harness/server_process.h"
#include "perf/lib/cores.h"
#include "perf/lib/keys.h"
#include "perf/lib/linked_engine.h"
#include "transport/host/host_device.h"

namespace pegaflow::perf {
namespace {

using Clock = std::chrono::steady_clock;
using Blocks = std::vector<std::uint32_t>;
/// The first round loads nothing.
constexpr std::uint64_t kWarmUpRounds = 1;

/// Shared memory like a pool's, with every page present.
Result<harness::Mapping> like_a_pool(std::uint64_t bytes) {
  const UniqueFd fd(::memfd_create("pegaflow-perf", MFD_CLOEXEC));
  if (!fd) return fail_errno(errno, "memfd_create");
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) return fail_errno(errno, "ftruncate");
  PEGA_TRY_LET(harness::Mapping mapping, harness::Mapping::shared(fd.get(), bytes));
  std::memset(mapping.bytes().data(), 1, bytes);
  return mapping;
}

/// One engine with its own memory, threads and connections. It saves the first half of its blocks
/// and loads into the second, both in shuffled order, as after hours of serving.
class Engine {
 public:
  static Result<std::unique_ptr<Engine>> start(const EnginesRun& run, const std::string& socket,
                                               std::uint32_t number, std::uint64_t page_bytes) {
    const std::uint64_t count = kCopyRoundBytes / page_bytes;
    const std::uint64_t segment_bytes = std::min(kCopySegmentBytes, page_bytes);
    PEGA_TRY_LET(harness::EngineMemory memory,
                 harness::EngineMemory::create({.segments = page_bytes / segment_bytes,
                                                .segment_bytes = segment_bytes,
                                                .blocks = 2 * count}));
    PEGA_TRY_LET(auto device, HostDevice::create({.threads = static_cast<int>(run.threads)}));
    PEGA_TRY_LET(harness::Mapping target, like_a_pool(2 * kCopyRoundBytes));
    auto engine = std::unique_ptr<Engine>(new Engine(run.seed + number, count, std::move(memory),
                                                     std::move(device), std::move(target)));
    PEGA_TRY_LET(engine->link_, LinkedEngine::connect({.socket = socket,
                                                       .instance = fmt::format("engine {}", number),
                                                       .program = "pegaflow-perf copy"},
                                                      engine->memory_.layout(), *engine->device_));
    return engine;
  }

  /// Prepares the keys of a round; a real engine has them from its own hashing.
  void prepare(std::uint64_t round) { saved_ = std::exchange(saving_, names(round)); }

  /// Saves the blocks of this round and loads those of the round before, if there was one.
  Result<void> work(std::uint64_t round) {
    PEGA_TRY(link_->save(round + 1, saving_, from_));
    std::optional<Id128> token;
    if (round != 0) {
      PEGA_TRY_LET(const CacheSession::Answer claim, link_->claim(saved_));
      token = claim.token;
      PEGA_TRY(link_->load(round, *token, to_));
    }
    PEGA_TRY(link_->finish(token ? 2 : 1, count_));
    if (token) link_->unclaim(*token);
    return {};
  }

  /// Copies the share of thread `thread` of `threads` with memcpy. Loads first, as the device does.
  void copy_alone(unsigned thread, unsigned threads) {
    for (const auto direction : {Device::Direction::kLoad, Device::Direction::kSave}) {
      const bool is_load = direction == Device::Direction::kLoad;
      const Blocks& blocks = is_load ? to_ : from_;
      std::byte* const pages = target_.bytes().data() + (is_load ? 0 : kCopyRoundBytes);
      for (std::size_t i = count_ * thread / threads; i < count_ * (thread + 1) / threads; ++i) {
        memory_.copy(blocks[i], pages + i * memory_.layout().page_bytes(), direction);
      }
    }
  }

  void write_pattern(std::uint64_t salt) { memory_.fill_all(salt); }
  /// Whether the loaded blocks hold the bytes of write_pattern(`salt`).
  [[nodiscard]] Result<void> check(std::uint64_t salt) const {
    for (std::size_t i = 0; i < count_; ++i) {
      if (!memory_.holds(to_[i], harness::pattern_seed(salt, from_[i]))) {
        return fail(Errc::kCorrupt, "block {} is not what was saved", to_[i]);
      }
    }
    return {};
  }

 private:
  Engine(std::uint64_t seed, std::uint64_t count, harness::EngineMemory memory,
         std::unique_ptr<HostDevice> device, harness::Mapping target)
      : seed_(seed),
        count_(count),
        memory_(std::move(memory)),
        device_(std::move(device)),
        target_(std::move(target)),
        from_(count),
        to_(count) {
    std::mt19937_64 random(seed);
    std::iota(from_.begin(), from_.end(), 0U);
    std::iota(to_.begin(), to_.end(), static_cast<std::uint32_t>(count));
    std::shuffle(from_.begin(), from_.end(), random);
    std::shuffle(to_.begin(), to_.end(), random);
  }

  [[nodiscard]] std::vector<BlockKey> names(std::uint64_t round) const {
    const KeySource keys(~seed_);
    std::vector<BlockKey> names;
    names.reserve(count_);
    for (std::uint64_t i = 0; i < count_; ++i) names.push_back(keys.key(round * count_ + i));
    return names;
  }

  std::uint64_t seed_;
  std::uint64_t count_;
  harness::EngineMemory memory_;
  std::unique_ptr<HostDevice> device_;
  harness::Mapping target_;  ///< Takes the place of the pool for memcpy.
  Blocks from_;
  Blocks to_;
  std::vector<BlockKey> saving_;
  std::vector<BlockKey> saved_;
  std::unique_ptr<LinkedEngine> link_;  ///< Destroyed before its device and memory.
};

using Engines = std::vector<std::unique_ptr<Engine>>;

/// Runs `body(i)` on `count` threads that start together; returns the time until the last ends.
template <typename Body>
Clock::duration together(std::size_t count, Body&& body) {
  std::atomic<bool> go{false};
  std::atomic<std::size_t> waiting{0};
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      waiting.fetch_add(1);
      waiting.notify_one();
      go.wait(false);
      body(i);
    });
  }
  // All threads wait for the start, so that their creation is not measured.
  for (std::size_t there = waiting.load(); there < count; there = waiting.load()) {
    waiting.wait(there);
  }
  const auto begin = Clock::now();
  go.store(true);
  go.notify_all();
  for (std::thread& thread : threads) thread.join();
  return Clock::now() - begin;
}

/// Runs one round of all engines; returns the sum of their GB/s.
Result<double> work_together(const Engines& engines, std::uint64_t round) {
  std::vector<Result<void>> outcomes(engines.size());
  for (const auto& engine : engines) engine->prepare(round);
  const auto took =
      together(engines.size(), [&](std::size_t i) { outcomes[i] = engines[i]->work(round); });
  for (const Result<void>& outcome : outcomes) PEGA_TRY(outcome);
  const auto bytes = static_cast<double>(2 * kCopyRoundBytes * engines.size());
  return bytes / std::chrono::duration<double>(took).count() / 1e9;
}

double memcpy_together(const Engines& engines, unsigned threads) {
  const auto took = together(engines.size() * threads, [&](std::size_t i) {
    engines[i / threads]->copy_alone(static_cast<unsigned>(i % threads), threads);
  });
  const auto bytes = static_cast<double>(2 * kCopyRoundBytes * engines.size());
  return bytes / std::chrono::duration<double>(took).count() / 1e9;
}

}  // namespace

Result<Figure> measure_engines(const EnginesRun& run, std::uint64_t page_bytes) {
  // Room for the blocks that this round saves, those that the last one saved and loaded, and some
  // evictable ones. With lru the oldest are evicted, so all of these stay; the default policy would
  // rather keep loaded blocks.
  PEGA_TRY_LET(const harness::ServerProcess server,
               harness::ServerProcess::start(
                   {.program = run.server,
                    .pool_size = std::to_string(kCopyRoundBytes * run.engines * 7 / 2),
                    .arguments = {"--eviction", "lru"}}));
  Engines engines;
  for (std::uint32_t number = 0; number < run.engines; ++number) {
    PEGA_TRY_LET(auto engine, Engine::start(run, server.socket_path(), number, page_bytes));
    engines.push_back(std::move(engine));
  }
  // Both sides of a round use the same cores; the server may use any.
  PEGA_TRY_LET(const SameCores cores, SameCores::create());
  const std::size_t threads = std::size_t{run.engines} * run.threads;
  const auto salt = [&](std::uint64_t round) { return run.seed + round; };

  for (const auto& engine : engines) engine->write_pattern(salt(0));
  PEGA_TRY(work_together(engines, 0));
  Rounds rounds;
  for (std::uint64_t round = 1; round <= run.rounds + kWarmUpRounds; ++round) {
    const bool is_checked = run.check || round == 1;
    if (is_checked) {
      for (const auto& engine : engines) engine->write_pattern(salt(round));
    }
    PEGA_TRY(cores.use(round, threads));
    PEGA_TRY_LET(const double ours, work_together(engines, round));
    if (is_checked) {
      for (const auto& engine : engines) PEGA_TRY(engine->check(salt(round - 1)));
    }
    const double bound = memcpy_together(engines, run.threads);
    if (round > kWarmUpRounds) rounds.add({ours}, {bound});
  }
  PEGA_TRY_LET(const Rounds::Comparison compared, rounds.compare());
  return Figure{
      .run = fmt::format("{} engines save and load at once, pages of {}", run.engines,
                         format_bytes(page_bytes)),
      .params = {{"page_bytes", static_cast<std::int64_t>(page_bytes)},
                 {"segment_bytes",
                  static_cast<std::int64_t>(std::min(kCopySegmentBytes, page_bytes))},
                 {"engines", static_cast<std::int64_t>(run.engines)},
                 {"threads", static_cast<std::int64_t>(run.threads)}},
      .figure = compared.figure.median(),
      .unit = "GB/s",
      .bound = compared.bound.median(),
      .bound_name = "memcpy",
      .side = Side::kAtLeast,
      .target = 0.85,
      .n = compared.rounds,
      .spread = fmt::format("ratio {:.2f} to {:.2f}", compared.ratio_low, compared.ratio_high)};
}

}  // namespace pegaflow::perf
