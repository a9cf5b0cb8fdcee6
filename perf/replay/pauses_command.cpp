/// \file
/// `pegaflow-perf pauses`: the gain of hints about conversations that pause.

#include <charconv>
#include <iostream>

#include "perf/lib/command.h"
#include "perf/replay/pauses.h"

namespace pegaflow::perf {

namespace {

struct PausesOptions {
  CommonOptions common;
  std::string trace;
  std::vector<std::string> blocks = {"1000", "3000"};
};

Result<std::vector<Figure>> figures_of(const PausesOptions& options, const RequestTrace& trace) {
  std::vector<Figure> figures;
  for (const std::string& text : options.blocks) {
    std::uint64_t blocks = 0;
    const char* const end = text.data() + text.size();
    const auto [rest, status] = std::from_chars(text.data(), end, blocks);
    if (status != std::errc() || rest != end || blocks == 0) {
      return fail(Errc::kInvalidArgument, "--blocks: '{}' is not a whole number above 0", text);
    }
    progress(fmt::format("a pool of {} blocks", blocks));
    const double lru = replay_pauses(trace, blocks, KeepOrder::kLru).hit_rate();
    const double min = replay_pauses(trace, blocks, KeepOrder::kMin).hit_rate();
    const double hints = replay_pauses(trace, blocks, KeepOrder::kHints).hit_rate();
    Figure figure{
        .run = "hits with hints, share of the gap from LRU to MIN",
        .params = {{"blocks", static_cast<std::int64_t>(blocks)}},
        .figure = min > lru ? (hints - lru) / (min - lru) : 0,
        .unit = "of the gap",
        .bound = 1,
        .bound_name = "MIN",
        .side = Side::kAtLeast,
        .target = 0.5,
        .n = trace.requests.size(),
        .spread = fmt::format("hits: LRU {:.4f}, hints {:.4f}, MIN {:.4f}", lru, hints, min)};
    figures.push_back(std::move(figure));
  }
  return figures;
}

}  // namespace

Outcome run_pauses(int argc, const char* const* argv) {
  PausesOptions options;
  OptionTable table("pegaflow-perf pauses",
                    "Simulates a pool that gives up the blocks of conversations that are expected "
                    "to return latest, by hints that know only past requests, beside LRU and MIN.");
  declare(table, options.common);
  table.text("trace", options.trace,
             "A trace in Mooncake's format, as for replay; \"-\" reads standard input.");
  table.list("blocks", options.blocks, "Pool sizes in blocks of the trace.");
  PEGA_TRY_LET(const OptionTable::Next next, table.parse(argc, argv, std::cout));
  if (next == OptionTable::Next::kExit) return std::nullopt;
  if (options.trace.empty()) return fail(Errc::kInvalidArgument, "give --trace");
  PEGA_TRY_LET(const RequestTrace trace, read_trace_file(options.trace, 0));
  PEGA_TRY_LET(const Conditions conditions, begin_run(options.common));
  PEGA_TRY_LET(std::vector<Figure> figures, figures_of(options, trace));
  return Report{.title = "pegaflow-perf pauses, " + trace.name,
                .figures = std::move(figures),
                .conditions = conditions,
                .json = options.common.json};
}

}  // namespace pegaflow::perf
