#include "perf/placement/place_report.h"

#include <utility>

namespace pegaflow::perf {
namespace {

constexpr double kMostOfRoundRobin = 0.35;
constexpr double kMostOfDynamo = 0.95;
constexpr double kMostOfTail = 0.8;
constexpr double kMostTraffic = 0.6;
constexpr double kMostVariation = 0.05;
constexpr double kMostOfOneRouter = 1.05;
constexpr double kPointsOfMessages = 0.5;  ///< Percentage points, for late and lost messages.
constexpr std::size_t kManyNodes = 64;
constexpr std::size_t kLeastForTail = 100;  ///< Requests of a class, to speak of a p99.

/// The distance from the ceiling that is allowed, in percentage points.
double points(const PlaceOptions& options) { return options.nodes >= kManyNodes ? 0.3 : 1.0; }

const SimResult* find(const PlaceOutcome& outcome, std::string_view name) {
  for (const SimResult& result : outcome.results) {
    if (result.policy == name) return &result;
  }
  return nullptr;
}

double percent(double share) { return share * 100; }

/// Adds figures of one policy.
class FiguresOf {
 public:
  FiguresOf(const SimResult& result, const PlaceOptions& options, std::vector<Figure>& figures)
      : result_(result), figures_(figures) {
    params_ = {{"policy", result.policy},
               {"parameters", result.parameters},
               {"nodes", static_cast<std::int64_t>(options.nodes)}};
  }

  void add(std::string run, double figure, std::string unit) {
    figures_.push_back({.run = std::move(run),
                        .params = params_,
                        .figure = figure,
                        .unit = std::move(unit),
                        .target = std::nullopt,
                        .n = static_cast<std::size_t>(result_.requests),
                        .spread = "one seed"});
  }
  /// Gives the newest figure a bound.
  void beside(double bound, std::string name, double target, Side side = Side::kAtMost) {
    Figure& figure = figures_.back();
    figure.bound = bound;
    figure.bound_name = std::move(name);
    figure.target = target;
    figure.side = side;
  }
  /// A rate in percent beside another one, at most `less` percentage points below.
  void at_most_below(double bound, std::string name, double less) {
    if (bound > less) beside(bound, std::move(name), (bound - less) / bound, Side::kAtLeast);
  }

 private:
  const SimResult& result_;
  std::vector<Figure>& figures_;
  Params params_;
};

Result<void> add_common(FiguresOf& of, const SimResult& result) {
  PEGA_TRY_LET(const Samples ttft, Samples::of(result.ttft));
  of.add("blocks found", percent(result.hit_rate()), "%");
  of.add("blocks found in GPU caches",
         percent(static_cast<double>(result.gpu_hits) / static_cast<double>(result.blocks)), "%");
  of.add("blocks pulled from peers", percent(result.pulled_rate()), "%");
  of.add("blocks predicted wrongly",
         percent(static_cast<double>(result.mispredicted) / static_cast<double>(result.blocks)),
         "%");
  of.add("first token, mean", result.mean_ttft(), "s");
  for (const auto& [name, fraction] :
       {std::pair{"p50", 0.5}, std::pair{"p90", 0.9}, std::pair{"p99", 0.99}}) {
    of.add(fmt::format("first token, {}", name), ttft.quantile(fraction), "s");
  }
  for (std::size_t i = 0; i < kLengthClasses.size(); ++i) {
    if (result.ttft_of_class[i].empty()) continue;
    PEGA_TRY_LET(const Samples of_class, Samples::of(result.ttft_of_class[i]));
    of.add(fmt::format("first token, p99 of prompts {} tokens", kLengthClasses[i].name),
           of_class.quantile(0.99), "s");
  }
  of.add("load variation", result.load_variation, "");
  of.add("utilization of engines", percent(result.utilization), "%");
  return {};
}

/// Adds the figures of PegaFlow's policy that have a target.
Result<void> add_targets(FiguresOf& of, const SimResult& result, const PlaceOutcome& outcome,
                         const PlaceOptions& options) {
  of.add("blocks found, beside the ceiling", percent(result.hit_rate()), "%");
  of.at_most_below(percent(outcome.ceiling), "one shared cache", points(options));
  of.add("load variation, beside its limit", result.load_variation, "");
  of.beside(kMostVariation, "limit", 1);
  if (const SimResult* const other = find(outcome, "round-robin")) {
    of.add("first token, mean, beside round robin", result.mean_ttft(), "s");
    of.beside(other->mean_ttft(), "round-robin", kMostOfRoundRobin);
    for (std::size_t i = 0; i < kLengthClasses.size(); ++i) {
      if (result.ttft_of_class[i].size() < kLeastForTail) continue;
      PEGA_TRY_LET(const Samples ours, Samples::of(result.ttft_of_class[i]));
      PEGA_TRY_LET(const Samples theirs, Samples::of(other->ttft_of_class[i]));
      of.add(fmt::format("first token, p99 of prompts {} tokens, beside round robin",
                         kLengthClasses[i].name),
             ours.quantile(0.99), "s");
      of.beside(theirs.quantile(0.99), "round-robin", kMostOfTail);
    }
  }
  if (const SimResult* const other = find(outcome, "dynamo")) {
    of.add("first token, mean, beside Dynamo's cost", result.mean_ttft(), "s");
    of.beside(other->mean_ttft(), "dynamo", kMostOfDynamo);
  }
  if (const SimResult* const other = find(outcome, "shortest-queue+pull")) {
    of.add("blocks pulled from peers, beside shortest queue", percent(result.pulled_rate()), "%");
    of.beside(percent(other->pulled_rate()), "shortest-queue+pull", kMostTraffic);
  }
  const SimResult* const ideal = find(outcome, kPegaflow);
  if (ideal != nullptr && ideal != &result) {
    of.add("first token, mean, beside one router", result.mean_ttft(), "s");
    of.beside(ideal->mean_ttft(), kPegaflow, kMostOfOneRouter);
    of.add("blocks found, beside immediate events", percent(result.hit_rate()), "%");
    of.at_most_below(percent(ideal->hit_rate()), kPegaflow, kPointsOfMessages);
  }
  return {};
}

}  // namespace

Result<std::vector<Figure>> place_figures(const PlaceOutcome& outcome,
                                          const PlaceOptions& options) {
  std::vector<Figure> figures;
  for (const SimResult& result : outcome.results) {
    FiguresOf of(result, options, figures);
    PEGA_TRY(add_common(of, result));
    if (result.policy.starts_with(kPegaflow)) PEGA_TRY(add_targets(of, result, outcome, options));
  }
  return figures;
}

Result<std::string> place_table(const PlaceOutcome& outcome, const PlaceOptions& options) {
  std::string text = fmt::format(
      "{} nodes, {} requests in {:.0f} s of virtual time\n"
      "ceiling of the hits: one shared cache with the blocks of all pools {:.2f} %, of all pools "
      "and GPUs {:.2f} %\n\n",
      options.nodes, outcome.requests, outcome.seconds, percent(outcome.ceiling),
      percent(outcome.wider_ceiling));
  text += fmt::format("{:<20} {:>6} {:>6} {:>7} | {:>7} {:>7} {:>7} {:>7} |", "policy", "hits %",
                      "GPU %", "peers %", "mean s", "p50", "p90", "p99");
  for (const LengthClass& its : kLengthClasses) text += fmt::format(" {:>10}", its.name);
  text += fmt::format(" | {:>6} {:>6}\n", "load", "wrong %");
  for (const SimResult& result : outcome.results) {
    PEGA_TRY_LET(const Samples ttft, Samples::of(result.ttft));
    const auto blocks = static_cast<double>(result.blocks);
    text += fmt::format("{:<20} {:>6.2f} {:>6.1f} {:>7.2f} | {:>7.3f} {:>7.3f} {:>7.3f} {:>7.3f} |",
                        result.policy, percent(result.hit_rate()),
                        percent(static_cast<double>(result.gpu_hits) / blocks),
                        percent(result.pulled_rate()), result.mean_ttft(), ttft.median(),
                        ttft.quantile(0.9), ttft.quantile(0.99));
    for (const std::vector<double>& its : result.ttft_of_class) {
      if (its.empty()) {
        text += fmt::format(" {:>10}", "-");
        continue;
      }
      PEGA_TRY_LET(const Samples of_class, Samples::of(its));
      text += fmt::format(" {:>10.3f}", of_class.quantile(0.99));
    }
    const bool predicts = result.policy.starts_with(kPegaflow);
    text += fmt::format(
        " | {:>6.3f} {:>6}\n", result.load_variation,
        predicts ? fmt::format("{:.2f}", percent(static_cast<double>(result.mispredicted) / blocks))
                 : "-");
  }
  text +=
      "\nTimes to the first token; the four columns are the p99 of prompts by length in tokens.\n";
  for (const SimResult& result : outcome.results) {
    if (!result.parameters.empty())
      text += fmt::format("{}: {}\n", result.policy, result.parameters);
  }
  return text;
}

}  // namespace pegaflow::perf
