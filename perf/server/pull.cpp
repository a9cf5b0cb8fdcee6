/// \file
/// `pegaflow-perf pull`: the time until the first and the last page of a prefix from another node
/// are at the engine, and the share of the owner's confirmation of the lease in it.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iostream>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include "base/units.h"
#include "harness/engine_memory.h"
#include "harness/pattern.h"
#include "harness/server_process.h"
#include "perf/lib/command.h"
#include "perf/lib/keys.h"
#include "perf/lib/linked_engine.h"
#include "perf/server/loopback_nodes.h"
#include "perf/server/peer_question.h"
#include "transport/host/host_device.h"

namespace pegaflow::perf {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::uint64_t kSegmentBytes = std::uint64_t{32} << 10;
/// Fetched blocks use a part of the pool, in whole extents.
constexpr std::uint64_t kLeastPool = std::uint64_t{64} << 20;
/// Requests to the owner after each pull.
constexpr int kConfirmations = 20;

struct PullOptions {
  CommonOptions common;
  std::int64_t blocks = 64;
  std::uint64_t page_bytes = std::uint64_t{2} << 20;
  std::int64_t rounds = 10;
};

/// Records when the first batch after expect() was copied. Thread-safe, as every device.
class WatchedDevice final : public Device {
 public:
  explicit WatchedDevice(std::unique_ptr<HostDevice> device) : device_(std::move(device)) {}

  void expect() { first_ = Clock::time_point(); }
  /// The end of the first batch without an error; no value: there was none.
  [[nodiscard]] std::optional<Clock::time_point> first() const {
    const Clock::time_point at = first_;
    if (at == Clock::time_point()) return std::nullopt;
    return at;
  }

  using Device::attach;
  Result<void> attach(std::span<const PageLayout> layouts, std::span<std::byte> pool,
                      CompletionSink sink) override {
    return device_->attach(layouts, pool, [this, sink = std::move(sink)](Completion&& done) {
      Clock::time_point none{};
      if (!done.error) first_.compare_exchange_strong(none, Clock::now());
      sink(std::move(done));
    });
  }
  void detach() override { device_->detach(); }
  Result<void> add_peer(std::uint64_t peer, const PeerMemory& memory) override {
    return device_->add_peer(peer, memory);
  }
  void remove_peer(std::uint64_t peer) override { device_->remove_peer(peer); }
  Result<Event> record_event(Queue queue) override { return device_->record_event(queue); }
  Result<void> submit(Batch batch) override { return device_->submit(std::move(batch)); }
  void cancel(std::uint64_t ticket) override { device_->cancel(ticket); }

 private:
  std::unique_ptr<HostDevice> device_;
  std::atomic<Clock::time_point> first_{};
};

/// An engine with memory for one prefix.
class Engine {
 public:
  static Result<std::unique_ptr<Engine>> start(const PullOptions& options,
                                               const std::string& socket, const std::string& name) {
    const auto count = static_cast<std::uint64_t>(options.blocks);
    const std::uint64_t segment_bytes = std::min(kSegmentBytes, options.page_bytes);
    PEGA_TRY_LET(harness::EngineMemory memory,
                 harness::EngineMemory::create({.segments = options.page_bytes / segment_bytes,
                                                .segment_bytes = segment_bytes,
                                                .blocks = count}));
    PEGA_TRY_LET(auto device, HostDevice::create({}));
    std::unique_ptr<Engine> engine(new Engine(std::move(memory), std::move(device), count));
    PEGA_TRY_LET(
        engine->link_,
        LinkedEngine::connect({.socket = socket, .instance = name, .program = "pegaflow-perf pull"},
                              engine->memory_.layout(), engine->device_));
    return engine;
  }
  Result<void> save(std::uint64_t round, std::span<const BlockKey> keys) {
    memory_.fill_all(round);
    PEGA_TRY(link_->save(round, keys, blocks_));
    return link_->finish(1, blocks_.size());
  }

  struct Times {
    Duration first{};
    Duration whole{};
  };
  /// Times from the claim to the first copied page, and to the report of the load.
  Result<Times> load(std::uint64_t round, std::span<const BlockKey> keys) {
    memory_.clear();
    device_.expect();
    const auto begin = Clock::now();
    PEGA_TRY_LET(const CacheSession::Answer claim, link_->claim(keys));
    if (claim.coming != blocks_.size()) {
      return fail(Errc::kInternal, "of {} blocks {} are in flight", blocks_.size(), claim.coming);
    }
    PEGA_TRY(link_->load(round, claim.token, blocks_));
    PEGA_TRY(link_->finish(1, blocks_.size()));
    const auto end = Clock::now();
    link_->unclaim(claim.token);
    const std::optional<Clock::time_point> first = device_.first();
    if (!first) return fail(Errc::kInternal, "a load without a copy");
    for (const std::uint32_t block : blocks_) {
      if (memory_.holds(block, harness::pattern_seed(round, block))) continue;
      return fail(Errc::kCorrupt, "block {} is not what was saved", block);
    }
    return Times{.first = *first - begin, .whole = end - begin};
  }

 private:
  Engine(harness::EngineMemory memory, std::unique_ptr<HostDevice> device, std::uint64_t count)
      : memory_(std::move(memory)), device_(std::move(device)), blocks_(count) {
    std::iota(blocks_.begin(), blocks_.end(), 0U);
  }

  harness::EngineMemory memory_;
  WatchedDevice device_;
  std::vector<std::uint32_t> blocks_;
  std::unique_ptr<LinkedEngine> link_;  ///< Destroyed before its device and memory.
};

Result<harness::ServerProcess> start_node(const PullOptions& options,
                                          const std::vector<std::string>& nodes,
                                          std::size_t which) {
  const std::uint64_t prefix_bytes =
      static_cast<std::uint64_t>(options.blocks) * options.page_bytes;
  return harness::ServerProcess::start(
      {.program = options.common.server,
       // Fetches may use a quarter of it.
       .pool_size = std::to_string(std::max(kLeastPool, 6 * prefix_bytes)),
       .arguments = {"--peers", nodes[0] + "," + nodes[1], "--peer-listen", nodes[which],
                     "--peer-deadline", "10s", "--fetch-deadline", "8s"}});
}

double ms(Duration time) { return std::chrono::duration<double, std::milli>(time).count(); }

/// Two nodes, an engine at each, and a connection to the owner that only confirms leases.
struct Stage {
  harness::ServerProcess owner;
  harness::ServerProcess reader;
  std::unique_ptr<Engine> saving;
  std::unique_ptr<Engine> loading;
  std::unique_ptr<PeerQuestion> question;

  static Result<Stage> start(const PullOptions& options) {
    const std::vector<std::string> nodes = loopback_addresses(2);
    PEGA_TRY_LET(harness::ServerProcess owner, start_node(options, nodes, 0));
    PEGA_TRY_LET(harness::ServerProcess reader, start_node(options, nodes, 1));
    PEGA_TRY_LET(auto saving, Engine::start(options, owner.socket_path(), "saves"));
    PEGA_TRY_LET(auto loading, Engine::start(options, reader.socket_path(), "loads"));
    PEGA_TRY(wait_until_ready(reader, nodes[0]));
    PEGA_TRY_LET(auto question, PeerQuestion::greet(nodes[0]));
    return Stage{.owner = std::move(owner),
                 .reader = std::move(reader),
                 .saving = std::move(saving),
                 .loading = std::move(loading),
                 .question = std::move(question)};
  }
};

struct Pulls {
  Rounds first_pages;    ///< Milliseconds, beside those of the whole pull.
  Rounds confirmations;  ///< Likewise.
  std::vector<double> rates;
};

Result<Pulls> measure(Stage& stage, const PullOptions& options) {
  const auto blocks = static_cast<std::uint64_t>(options.blocks);
  const KeySource source(static_cast<std::uint64_t>(options.common.seed));
  Pulls pulls;
  for (std::uint64_t round = 1; round <= static_cast<std::uint64_t>(options.rounds) + 1; ++round) {
    std::vector<BlockKey> keys;
    for (std::uint64_t i = 0; i < blocks; ++i) keys.push_back(source.key(round * blocks + i));
    PEGA_TRY(stage.saving->save(round, keys));
    PEGA_TRY_LET(const Engine::Times times, stage.loading->load(round, keys));
    std::vector<double> answers;
    for (int i = 0; i < kConfirmations; ++i) {
      PEGA_TRY_LET(const Duration answer, stage.question->confirm());
      answers.push_back(ms(answer));
    }
    if (round == 1) continue;  // Warms both sides up.
    pulls.first_pages.add({ms(times.first)}, {ms(times.whole)});
    pulls.confirmations.add(std::move(answers), {ms(times.whole)});
    pulls.rates.push_back(static_cast<double>(blocks * options.page_bytes) / ms(times.whole) / 1e6);
  }
  return pulls;
}

std::vector<Figure> figures_of(const PullOptions& options, const Rounds::Comparison& compared,
                               const Rounds::Comparison& confirmed, const Samples& rate) {
  const Params params = {{"blocks", options.blocks},
                         {"page_bytes", static_cast<std::int64_t>(options.page_bytes)},
                         {"lane", std::string("tcp")}};
  std::vector<Figure> figures;
  figures.push_back({.run = fmt::format("first of {} pages of {} from another node, at the engine",
                                        options.blocks, format_bytes(options.page_bytes)),
                     .params = params,
                     .figure = compared.figure.median(),
                     .unit = "ms",
                     .bound = compared.bound.median(),
                     .bound_name = "the whole pull",
                     .side = Side::kAtMost,
                     // One page is the whole pull.
                     .target = options.blocks == 1 ? std::nullopt : std::optional(0.2),
                     .n = compared.rounds,
                     .spread = fmt::format("ratio {:.2f} to {:.2f} (p10 to p90 of the rounds)",
                                           compared.ratio_low, compared.ratio_high)});
  // Only the last batch of a lease waits for it.
  figures.push_back({.run = "the owner's confirmation of a lease, one round trip",
                     .params = params,
                     .figure = confirmed.figure.median(),
                     .unit = "ms",
                     .bound = confirmed.bound.median(),
                     .bound_name = "the whole pull",
                     .side = Side::kAtMost,
                     .target = std::nullopt,
                     .n = confirmed.rounds,
                     .spread = fmt::format("ratio {:.3f} to {:.3f} (p10 to p90 of the rounds)",
                                           confirmed.ratio_low, confirmed.ratio_high)});
  figures.push_back({.run = "the whole pull, from claim to report",
                     .params = params,
                     .figure = rate.median(),
                     .unit = "GB/s",
                     .side = Side::kAtLeast,
                     .target = std::nullopt,
                     .n = rate.count(),
                     .spread = fmt::format("p10 {:.2f} to p90 {:.2f} GB/s", rate.quantile(0.1),
                                           rate.quantile(0.9))});
  return figures;
}

}  // namespace

Outcome run_pull(int argc, const char* const* argv) {
  PullOptions options;
  OptionTable table("pegaflow-perf pull",
                    "Measures the load of a prefix from another node, with two servers on this "
                    "machine over loopback sockets: the time until the first page is in the "
                    "engine's memory, beside the time until all are. Compares every byte.");
  declare(table, options.common);
  table.integer("blocks", options.blocks, 1, 4096, "Blocks of the prefix.");
  table.bytes("page", options.page_bytes, 65536, 64 << 20,
              "Page size of a block; a multiple of 64 KiB.");
  table.integer("rounds", options.rounds, 1, 1000, "Prefixes, each with new blocks.");
  PEGA_TRY_LET(const OptionTable::Next next, table.parse(argc, argv, std::cout));
  if (next == OptionTable::Next::kExit) return std::nullopt;
  if (options.page_bytes % 65536 != 0) {
    return fail(Errc::kInvalidArgument, "--page: {} is not a multiple of 64 KiB",
                format_bytes(options.page_bytes));
  }
  PEGA_TRY_LET(const Conditions conditions, begin_run(options.common));

  progress("start two nodes");
  PEGA_TRY_LET(Stage stage, Stage::start(options));
  progress("save on one node, load on the other");
  PEGA_TRY_LET(Pulls pulls, measure(stage, options));
  PEGA_TRY_LET(const Rounds::Comparison compared, pulls.first_pages.compare());
  PEGA_TRY_LET(const Rounds::Comparison confirmed, pulls.confirmations.compare());
  PEGA_TRY_LET(const Samples rate, Samples::of(std::move(pulls.rates)));
  return Report{.title = "pegaflow-perf pull, two nodes on this machine",
                .figures = figures_of(options, compared, confirmed, rate),
                .conditions = conditions,
                .json = options.common.json};
}

}  // namespace pegaflow::perf
