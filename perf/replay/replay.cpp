/// \file
/// `pegaflow-perf replay`: hit rates of eviction policies for a request trace, in pools of real
/// servers.

#include <algorithm>
#include <charconv>
#include <iostream>

#include "engine/eviction/eviction.h"
#include "perf/lib/command.h"
#include "perf/replay/replay_nodes.h"
#include "perf/replay/replay_pool.h"
#include "perf/replay/replay_report.h"
#include "perf/replay/request_trace.h"
#include "perf/replay/synthetic_trace.h"

namespace pegaflow::perf {
namespace {

constexpr std::size_t kSyntheticRequests = 12'000;  // About as many as in Mooncake's trace.
constexpr std::uint64_t kMostBlocks = 10'000'000;

struct ReplayOptions {
  CommonOptions common;
  std::string trace;
  std::string workload;
  std::vector<std::string> blocks = {"1000", "3000", "10000", "30000"};
  std::vector<std::string> eviction = {"lru", "slru", "s3-fifo", "weighted-lru"};
  std::int64_t requests = 0;
  std::int64_t rounds = 24;
  std::int64_t ssd_blocks = 0;
  std::uint64_t ssd_write_budget = 0;
  Duration pause{};
  std::int64_t nodes = 1;
  std::string deal = "round-robin";
};

std::string about() {
  return "Replays a request trace through pools of real servers and reports the hit rate of each "
         "eviction policy. Prompts follow one another without pauses.\n"
         "Example: pegaflow-perf replay --trace conversation_trace.jsonl --blocks 1000,10000";
}

std::string workload_sentence() {
  std::string text = "A synthetic workload in place of a trace:";
  for (const WorkloadKind& kind : workload_kinds()) {
    text += fmt::format("{} {} ({})", &kind == workload_kinds().data() ? "" : ";", kind.name,
                        kind.sentence);
  }
  return text + ".";
}

Result<std::vector<std::uint64_t>> pool_sizes(const std::vector<std::string>& texts) {
  std::vector<std::uint64_t> sizes;
  for (const std::string& text : texts) {
    std::uint64_t blocks = 0;
    const char* const end = text.data() + text.size();
    const auto [rest, status] = std::from_chars(text.data(), end, blocks);
    if (status != std::errc() || rest != end) {
      return fail(Errc::kInvalidArgument, "--blocks: '{}' is not a whole number", text);
    }
    if (blocks < kLeastPoolBlocks || blocks > kMostBlocks) {
      return fail(
          Errc::kInvalidArgument,
          "--blocks: {} is not from {}, the smallest pool of a server in blocks of 4 KiB, to {}",
          blocks, kLeastPoolBlocks, kMostBlocks);
    }
    sizes.push_back(blocks);
  }
  if (sizes.empty()) return fail(Errc::kInvalidArgument, "--blocks: give at least one size");
  return sizes;
}

Result<void> check_policies(const std::vector<std::string>& names) {
  if (names.empty()) return fail(Errc::kInvalidArgument, "--eviction: give at least one policy");
  for (const std::string& name : names) {
    if (const auto known = engine::eviction_kind(name); !known) {
      return fail(Errc::kInvalidArgument, "--eviction: {}", known.error().detail);
    }
  }
  return {};
}

Result<RequestTrace> trace_of(const ReplayOptions& options) {
  if (options.trace.empty() == options.workload.empty()) {
    return fail(Errc::kInvalidArgument,
                "give either --trace or --workload; --help lists the workloads");
  }
  const auto limit = static_cast<std::size_t>(options.requests);
  if (!options.trace.empty()) return read_trace_file(options.trace, limit);
  return synthesize(options.workload, static_cast<std::uint64_t>(options.common.seed),
                    limit == 0 ? kSyntheticRequests : limit);
}

/// Replays the trace in pools of one size. The policies alternate after each part of the trace, so
/// that a disturbance affects all of them, and each part begins with the next policy.
Result<std::vector<ReplayResult>> replay_size(const ReplayOptions& options, std::uint64_t blocks,
                                              const RequestTrace& trace) {
  kj::AsyncIoContext io = kj::setupAsyncIo();
  std::vector<std::unique_ptr<ReplayPool>> pools;
  std::vector<ReplayResult> results;
  for (const std::string& name : options.eviction) {
    PEGA_TRY_LET(auto pool, ReplayPool::start(
                                io, {.program = options.common.server,
                                     .blocks = blocks,
                                     .eviction = name,
                                     .seed = static_cast<std::uint64_t>(options.common.seed),
                                     .ssd_blocks = static_cast<std::uint64_t>(options.ssd_blocks),
                                     .ssd_write_budget = options.ssd_write_budget,
                                     .pause = options.pause}));
    pools.push_back(std::move(pool));
    results.push_back({.blocks = blocks, .eviction = name});
  }
  const std::span<const Prompt> all = trace.requests;
  const std::size_t parts = std::min(static_cast<std::size_t>(options.rounds), all.size());
  std::vector<Duration> spent(pools.size());
  for (std::size_t part = 0; part < parts; ++part) {
    const std::size_t begin = all.size() * part / parts;
    const std::size_t end = all.size() * (part + 1) / parts;
    for (std::size_t turn = 0; turn < pools.size(); ++turn) {
      const std::size_t which = (part + turn) % pools.size();
      PEGA_TRY_LET(const Duration before, pools[which]->cpu_time());
      PEGA_TRY(pools[which]->replay(all.subspan(begin, end - begin)));
      PEGA_TRY_LET(const Duration after, pools[which]->cpu_time());
      spent[which] += after - before;
      results[which].cpu_us.push_back(
          std::chrono::duration<double, std::micro>(after - before).count() /
          static_cast<double>(end - begin));
    }
  }
  for (std::size_t i = 0; i < pools.size(); ++i) {
    PEGA_TRY_LET(results[i].counted, pools[i]->count());
    results[i].seen = pools[i]->seen();
    results[i].mean_cpu_us = std::chrono::duration<double, std::micro>(spent[i]).count() /
                             static_cast<double>(all.size());
  }
  return results;
}

/// Replays the trace over several nodes, for each size and policy, beside one pool of their total
/// size.
Result<std::vector<Figure>> replay_nodes(const ReplayOptions& options,
                                         std::span<const std::uint64_t> sizes,
                                         const RequestTrace& trace) {
  PEGA_TRY_LET(const NodeChoice choice, node_choice(options.deal));
  std::vector<Figure> figures;
  for (const std::uint64_t blocks : sizes) {
    for (const std::string& name : options.eviction) {
      progress(fmt::format("{} nodes with {} blocks, {}", options.nodes, grouped(blocks), name));
      PEGA_TRY_LET(const engine::EvictionKind eviction, engine::eviction_kind(name));
      NodesReplayOptions of_nodes{.nodes = static_cast<std::size_t>(options.nodes),
                                  .blocks = blocks,
                                  .eviction = eviction,
                                  .choice = choice,
                                  .seed = static_cast<std::uint64_t>(options.common.seed)};
      PEGA_TRY_LET(const NodesReplayResult nodes, replay_over_nodes(of_nodes, trace));
      NodesReplayOptions of_one = of_nodes;
      of_one.blocks *= of_one.nodes;
      of_one.nodes = 1;
      PEGA_TRY_LET(const NodesReplayResult one, replay_over_nodes(of_one, trace));
      std::vector<Figure> more = nodes_figures(of_nodes, trace, nodes, one);
      std::move(more.begin(), more.end(), std::back_inserter(figures));
    }
  }
  return figures;
}

void declare(OptionTable& table, ReplayOptions& options) {
  declare(table, options.common);
  table.text("trace", options.trace,
             "A trace in Mooncake's format: one JSON object per line with timestamp, input_length, "
             "output_length and hash_ids. \"-\" reads standard input.");
  table.text("workload", options.workload, workload_sentence());
  table.list("blocks", options.blocks, "Pool sizes in blocks of 4 KiB, at least 256.");
  table.list("eviction", options.eviction,
             "Policies: " + engine::eviction_names() +
                 ". If lru is among them, its figures are the bounds of the others.");
  table.integer("requests", options.requests, 0, 100'000'000,
                "Limit of the number of requests; 0: all of a trace, 12,000 of a workload.");
  table.integer("rounds", options.rounds, 1, 10'000,
                "Parts of the trace, between which the policies alternate. A part of some hundred "
                "requests is long compared with the resolution of a process's CPU clock.");
  table.integer("ssd-blocks", options.ssd_blocks, 0, 100'000'000,
                "Blocks that a disk below each pool takes: a file of the SSD tier in the temporary "
                "directory; 0: none.");
  table.bytes("ssd-write-budget", options.ssd_write_budget, 0, std::uint64_t{1} << 60,
              "The option of the server: bytes a day; 0: no limit. The replay of an hour takes a "
              "minute, so its budget is 1,440 times what it may write.");
  table.duration("pause", options.pause, Duration::zero(), std::chrono::seconds(1),
                 "Pause after each request, in which a disk may write what is evicted next: traces "
                 "are replayed hundreds of times faster than they were recorded.");
  table.integer(
      "nodes", options.nodes, 1, 64,
      "Number of nodes with pools of --blocks each that fetch from each other: real stores "
      "in this process over a simulated network, beside one pool of their total size.");
  table.text("deal", options.deal, "Choice of the node for each request: round-robin or random.");
}

}  // namespace

Outcome run_replay(int argc, const char* const* argv) {
  ReplayOptions options;
  OptionTable table("pegaflow-perf replay", about());
  declare(table, options);
  PEGA_TRY_LET(const OptionTable::Next next, table.parse(argc, argv, std::cout));
  if (next == OptionTable::Next::kExit) return std::nullopt;

  PEGA_TRY_LET(const std::vector<std::uint64_t> sizes, pool_sizes(options.blocks));
  PEGA_TRY(check_policies(options.eviction));
  if (options.nodes > 1 && options.ssd_blocks != 0) {
    return fail(Errc::kInvalidArgument, "--ssd-blocks: several --nodes have no disks here");
  }
  PEGA_TRY_LET(const RequestTrace trace, trace_of(options));
  PEGA_TRY_LET(const Conditions conditions, begin_run(options.common));
  const std::string what = fmt::format("{}: {}", trace.name, describe(trace));
  std::cerr << what << '\n' << std::flush;
  if (options.nodes > 1) {
    PEGA_TRY_LET(std::vector<Figure> of_nodes, replay_nodes(options, sizes, trace));
    return Report{.title = "pegaflow-perf replay, " + what,
                  .figures = std::move(of_nodes),
                  .conditions = conditions,
                  .json = options.common.json};
  }
  std::vector<ReplayResult> results;
  std::vector<Figure> figures;
  for (const std::uint64_t blocks : sizes) {
    progress(fmt::format("pools of {} blocks", grouped(blocks)));
    PEGA_TRY_LET(std::vector<ReplayResult> of_size, replay_size(options, blocks, trace));
    PEGA_TRY_LET(std::vector<Figure> more, replay_figures(trace, of_size));
    std::move(of_size.begin(), of_size.end(), std::back_inserter(results));
    std::move(more.begin(), more.end(), std::back_inserter(figures));
  }
  std::string text =
      heading("pegaflow-perf replay, " + what, conditions) + replay_table(results, figures);
  return Report{.title = "pegaflow-perf replay",
                .figures = std::move(figures),
                .conditions = conditions,
                .json = options.common.json,
                .text = std::move(text)};
}

}  // namespace pegaflow::perf
