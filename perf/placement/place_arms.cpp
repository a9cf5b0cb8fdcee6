#include "perf/placement/place_arms.h"

#include <memory>
#include <utility>

#include "perf/lib/command.h"

namespace pegaflow::perf {
namespace {

constexpr double kDecodeScales[] = {0, 0.001, 0.01, 0.1, 1};
constexpr double kPoolCredits[] = {1, 0.5};

SimResult named(SimResult result, std::string name, std::string parameters) {
  result.policy = std::move(name);
  result.parameters = std::move(parameters);
  return result;
}

SimResult best_dynamo(const std::vector<PlaceRequest>& requests, const PlaceOptions& options) {
  SimResult best;
  for (const double decode_scale : kDecodeScales) {
    for (const double pool_credit : kPoolCredits) {
      const DynamoWeights weights{.decode_scale = decode_scale, .pool_credit = pool_credit};
      const auto policy = make_dynamo_policy(weights, options.seed);
      SimResult result = simulate(requests, *policy, options.nodes, options.hardware);
      if (!best.ttft.empty() && result.mean_ttft() >= best.mean_ttft()) continue;
      best = named(std::move(result), "dynamo",
                   fmt::format("best of {} weights: prefill {}, decode {}, credit of the pool {}",
                               std::size(kDecodeScales) * std::size(kPoolCredits),
                               weights.prefill_scale, decode_scale, pool_credit));
    }
  }
  return best;
}

std::string parameters_of(const SimRouters& routers) {
  std::string text = fmt::format("{} router{}", routers.routers, routers.routers == 1 ? "" : "s");
  if (routers.routers > 1) {
    text += routers.shares ? fmt::format(", placements shared after {} ms, {} % lost",
                                         routers.share_delay * 1000, routers.share_loss * 100)
                           : ", placements not shared";
  }
  return text + fmt::format(", events after {} s, {} % lost", routers.event_delay,
                            routers.event_loss * 100);
}

Result<SimResult> run_fleet(const std::vector<PlaceRequest>& requests, const PlaceOptions& options,
                            SimRouters routers, const char* name) {
  routers.seed = options.seed;
  PEGA_TRY_LET(const auto fleet, SimFleet::create(options.nodes, options.hardware, routers));
  return named(simulate(requests, *fleet, options.nodes, options.hardware), name,
               parameters_of(routers));
}

bool is_ideal(const SimRouters& routers) {
  return routers.routers == 1 && routers.event_delay == 0 && routers.event_loss == 0;
}

}  // namespace

Result<PlaceOutcome> run_policies(const std::vector<PlaceRequest>& requests,
                                  const PlaceOptions& options) {
  if (requests.empty()) return fail(Errc::kInvalidArgument, "place: there is no request");
  const SimHardware& hardware = options.hardware;
  PlaceOutcome outcome{.requests = requests.size(),
                       .seconds = requests.back().at - requests.front().at,
                       .ceiling = shared_cache_hits(requests, options.nodes * hardware.pool_blocks),
                       .wider_ceiling = shared_cache_hits(
                           requests, options.nodes * (hardware.pool_blocks + hardware.gpu_blocks)),
                       .results = {}};
  for (const std::string& name : options.policies) {
    progress(fmt::format("{}, {} nodes", name, options.nodes));
    if (name == kPegaflow) {
      PEGA_TRY_LET(SimResult ideal, run_fleet(requests, options,
                                              {.delay_weight = options.routers.delay_weight,
                                               .space_weight = options.routers.space_weight},
                                              kPegaflow));
      outcome.results.push_back(std::move(ideal));
      if (is_ideal(options.routers)) continue;
      PEGA_TRY_LET(SimResult given,
                   run_fleet(requests, options, options.routers, kPegaflowAsGiven));
      outcome.results.push_back(std::move(given));
    } else if (name == "dynamo") {
      outcome.results.push_back(best_dynamo(requests, options));
    } else {
      PEGA_TRY_LET(const auto policy,
                   make_simple_policy(name, options.nodes, hardware, options.seed));
      outcome.results.push_back(named(simulate(requests, *policy, options.nodes, hardware), name,
                                      parameters_of(std::string_view(name))));
    }
  }
  return outcome;
}

std::string place_policy_names() {
  return "round-robin, round-robin+pull, least-load, shortest-queue, shortest-queue+pull, smg, "
         "llm-d, dynamo, pegaflow";
}

}  // namespace pegaflow::perf
