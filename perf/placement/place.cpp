/// \file
/// `pegaflow-perf place`: policies of a router over a request trace, on simulated nodes in virtual
/// time.

#include <charconv>
#include <cmath>
#include <iostream>

#include "perf/lib/command.h"
#include "perf/placement/place_report.h"
#include "perf/replay/synthetic_trace.h"

namespace pegaflow::perf {
namespace {

constexpr std::size_t kGeneratedRequests = 12'000;

struct Options {
  CommonOptions common;
  std::string trace;
  std::string workload = "conversation";
  std::int64_t requests = 0;
  std::int64_t nodes = 8;
  std::vector<std::string> policies = {
      "round-robin", "shortest-queue+pull", "smg", "llm-d", "dynamo", "pegaflow"};
  std::string arrival_scale = "2";
  std::int64_t copies = 1;
  bool spread = false;
  Duration burst_gap = std::chrono::milliseconds(1);
  std::string load = "1.0";
  std::uint64_t link = 20'000'000'000;
  std::int64_t gpu_blocks = 1000;
  std::int64_t pool_blocks = 5000;
  std::int64_t routers = 1;
  bool alone = false;
  bool at_once = false;
  Duration share_delay = std::chrono::microseconds(500);
  std::string share_loss = "0";
  Duration event_delay{};
  std::string event_loss = "0";
};

std::string about() {
  return "Simulates nodes in virtual time and sends them the requests of a trace by several "
         "policies. PegaFlow's policy is the router's own code; the others follow their published "
         "formulas.\n"
         "Example: pegaflow-perf place --trace conversation_trace.jsonl --nodes 8";
}

Result<double> number(const char* name, const std::string& text, double least, double most) {
  double value = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, status] = std::from_chars(text.data(), end, value);
  if (status != std::errc() || rest != end || !(value >= least && value <= most)) {
    return fail(Errc::kInvalidArgument, "--{}: '{}' is not a number from {} to {}", name, text,
                least, most);
  }
  return value;
}

double seconds(Duration duration) { return std::chrono::duration<double>(duration).count(); }

void declare(OptionTable& table, Options& options) {
  declare(table, options.common);
  table.text("trace", options.trace,
             "A trace in Mooncake's format with blocks of 512 tokens; \"-\" reads standard input.");
  table.text("workload", options.workload,
             "A generated workload when no trace is given; `pegaflow-perf replay --help` describes "
             "them.");
  table.integer("requests", options.requests, 0, 100'000'000,
                "Limit of the number of requests; 0: all of a trace, 12,000 of a workload.");
  table.integer("nodes", options.nodes, 1, 1024, "Number of nodes, each with one engine.");
  table.list("policies", options.policies, "Policies: " + place_policy_names() + ".");
  table.text("arrival-scale", options.arrival_scale,
             "Requests of a trace arrive so many times as fast as they were recorded.");
  table.integer(
      "copies", options.copies, 1, 1024,
      "So many groups of users run the trace at once, each with its own blocks except for "
      "common first blocks, and at its own place in the recorded time.");
  table.flag("spread", options.spread,
             "Requests of one time stamp are spread evenly until the next: recorders round.");
  table.duration("burst-gap", options.burst_gap, Duration::zero(), std::chrono::seconds(1),
                 "Without --spread, the time between requests of one time stamp.");
  table.text("load", options.load,
             "Load of a generated workload: prefill time without any cache, as a share of the "
             "engines' time.");
  table.bytes("link", options.link, 1'000'000, 1'000'000'000'000,
              "Bytes a second of each node's network card, for pulls from peers.");
  table.integer("gpu-blocks", options.gpu_blocks, 16, 10'000'000,
                "Blocks of 512 tokens in each engine's GPU cache.");
  table.integer("pool-blocks", options.pool_blocks, 16, 10'000'000,
                "Blocks of 512 tokens in each node's pool.");
  table.integer("routers", options.routers, 1, 16,
                "Routers that receive the requests in turns; PegaFlow's policy only.");
  table.flag("alone", options.alone, "Routers do not share their placements.");
  table.flag("at-once", options.at_once,
             "Routers that share their placements do not choose one after the other.");
  table.duration("share-delay", options.share_delay, Duration::zero(), std::chrono::seconds(10),
                 "Time until the other routers receive a placement.");
  table.text("share-loss", options.share_loss, "Share of placements that another router misses.");
  table.duration("event-delay", options.event_delay, Duration::zero(), std::chrono::seconds(600),
                 "Time until the routers receive what a node stored and evicted.");
  table.text("event-loss", options.event_loss, "Share of events that a router never receives.");
}

Result<PlaceOptions> place_options(const Options& options) {
  PlaceOptions place{.nodes = static_cast<std::size_t>(options.nodes),
                     .hardware = {},
                     .routers = {},
                     .policies = options.policies,
                     .seed = static_cast<std::uint64_t>(options.common.seed)};
  place.hardware.gpu_blocks = static_cast<std::size_t>(options.gpu_blocks);
  place.hardware.pool_blocks = static_cast<std::size_t>(options.pool_blocks);
  place.hardware.link_bytes_per_second = static_cast<double>(options.link);
  place.routers.routers = static_cast<std::uint32_t>(options.routers);
  place.routers.shares = !options.alone;
  place.routers.takes_turns = !options.at_once;
  place.routers.share_delay = seconds(options.share_delay);
  place.routers.event_delay = seconds(options.event_delay);
  PEGA_TRY_LET(place.routers.share_loss, number("share-loss", options.share_loss, 0, 1));
  PEGA_TRY_LET(place.routers.event_loss, number("event-loss", options.event_loss, 0, 1));
  return place;
}

Result<RequestTrace> trace_of(const Options& options) {
  const auto limit = static_cast<std::size_t>(options.requests);
  if (!options.trace.empty()) return read_trace_file(options.trace, limit);
  return synthesize(options.workload, static_cast<std::uint64_t>(options.common.seed),
                    limit == 0 ? kGeneratedRequests : limit);
}

}  // namespace

Outcome run_place(int argc, const char* const* argv) {
  Options options;
  OptionTable table("pegaflow-perf place", about());
  declare(table, options);
  PEGA_TRY_LET(const OptionTable::Next next, table.parse(argc, argv, std::cout));
  if (next == OptionTable::Next::kExit) return std::nullopt;

  PEGA_TRY_LET(const PlaceOptions place, place_options(options));
  PEGA_TRY_LET(const double scale, number("arrival-scale", options.arrival_scale, 1e-3, 1e6));
  PEGA_TRY_LET(const double load, number("load", options.load, 1e-3, 1e3));
  PEGA_TRY_LET(const RequestTrace trace, trace_of(options));
  PEGA_TRY_LET(const auto requests,
               arrivals_of(trace, {.scale = trace.arrivals.empty() ? 1 : scale,
                                   .copies = static_cast<std::uint32_t>(options.copies),
                                   .spread = options.spread,
                                   .burst_gap_seconds = seconds(options.burst_gap),
                                   .load = load,
                                   .nodes = static_cast<std::uint32_t>(options.nodes),
                                   .tokens_per_second = place.hardware.tokens_per_second,
                                   .seed = place.seed}));
  PEGA_TRY_LET(const Conditions conditions, begin_run(options.common));
  PEGA_TRY_LET(const PlaceOutcome outcome, run_policies(requests, place));
  PEGA_TRY_LET(std::vector<Figure> figures, place_figures(outcome, place));
  PEGA_TRY_LET(std::string text, place_table(outcome, place));
  std::vector<Figure> targets;
  for (const Figure& figure : figures) {
    if (figure.bound) targets.push_back(figure);
  }
  const std::string title = "pegaflow-perf place, " + trace.name;
  text = heading(title, conditions) + text;
  if (!targets.empty()) text += "\n" + pegaflow::perf::table("targets", targets, conditions);
  return Report{.title = title,
                .figures = std::move(figures),
                .conditions = conditions,
                .json = options.common.json,
                .text = std::move(text)};
}

}  // namespace pegaflow::perf
