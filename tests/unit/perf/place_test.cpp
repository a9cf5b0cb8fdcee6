#include <algorithm>
#include <sstream>

#include <doctest/doctest.h>

#include "perf/placement/place_report.h"
#include "perf/placement/sim_fleet.h"
#include "perf/replay/synthetic_trace.h"

namespace pegaflow::perf {
namespace {

constexpr std::uint64_t kSeed = 3;

std::vector<PlaceRequest> generated(const char* kind, std::size_t count, std::uint32_t nodes) {
  return *arrivals_of(*synthesize(kind, kSeed, count),
                      {.load = 1.0, .nodes = nodes, .seed = kSeed});
}

PlaceRequest request(double at, std::vector<index::Key> chain) {
  const auto tokens = static_cast<std::uint32_t>(chain.size()) * kTraceBlockTokens;
  return {.at = at, .input_tokens = tokens, .output_tokens = 10, .chain = std::move(chain)};
}

const SimResult& of(const PlaceOutcome& outcome, std::string_view name) {
  const auto found = std::find_if(outcome.results.begin(), outcome.results.end(),
                                  [&](const SimResult& result) { return result.policy == name; });
  REQUIRE(found != outcome.results.end());
  return *found;
}

TEST_SUITE("LruBlocks") {
  TEST_CASE(
      "the block that was used longest ago leaves, and the end of a prompt before its start") {
    LruBlocks cache(3);
    std::vector<index::Key> evicted;

    cache.use(std::vector<index::Key>{1, 2, 3}, 0, evicted);
    cache.use(std::vector<index::Key>{1, 4}, 5, evicted);

    CHECK(evicted == std::vector<index::Key>{3});
    CHECK(cache.prefix(std::vector<index::Key>{1, 2, 3}) == 2);
    CHECK(cache.complete_prefix(std::vector<index::Key>{1, 4}, 4) == 1);
    CHECK(cache.complete_prefix(std::vector<index::Key>{1, 4}, 5) == 2);
  }
}

TEST_SUITE("SimNode") {
  TEST_CASE(
      "a prompt is computed once, found again, and pulled by another node when it is complete") {
    const SimHardware hardware;
    SimNode first(0, hardware);
    SimNode second(1, hardware);
    BlockChanges changes;
    const PlaceRequest prompt = request(0, {1, 2, 3, 4});

    const Served cold = first.serve(prompt, nullptr, 0, changes);
    CHECK(cold.hits == 0);
    CHECK(cold.first_token == doctest::Approx(2048.0 / 15000));
    CHECK(changes.gpu_stored.size() == 4);
    CHECK(changes.pool_stored.size() == 4);

    CHECK(first.pool_prefix(prompt, 0.1) == 0);  // It is still being computed.
    const Served warm = first.serve(prompt, nullptr, 1, changes);
    CHECK(warm.gpu == 4);
    CHECK(warm.uncached_tokens == 1);

    const Served pulled = second.serve(prompt, &first, 2, changes);
    CHECK(pulled.pulled == 4);
    CHECK(pulled.first_token ==
          doctest::Approx(2 + 0.0002 + 4 * 512 * 131072 / 20e9 + 1 / 15000.0));
  }
}

TEST_SUITE("arrivals of a trace") {
  TEST_CASE("times are scaled, and requests of one time stamp are spread or follow one another") {
    std::istringstream lines(
        R"({"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}
           {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 3]}
           {"timestamp": 4000, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]})");
    const RequestTrace trace = *read_trace(lines, "lines", 0);

    const auto plain = *arrivals_of(trace, {.scale = 2, .burst_gap_seconds = 0.01});
    CHECK(plain[1].at == doctest::Approx(0.01));
    CHECK(plain[2].at == doctest::Approx(2));
    CHECK(plain[0].chain == plain[2].chain);
    CHECK(plain[0].chain[0] == plain[1].chain[0]);

    const auto spread = *arrivals_of(trace, {.scale = 1, .spread = true});
    CHECK(spread[1].at == doctest::Approx(2));

    const auto copies = *arrivals_of(trace, {.copies = 2});
    CHECK(copies.size() == 6);
    CHECK(shared_cache_hits(copies, 100) == doctest::Approx(7.0 / 12));
  }

  TEST_CASE("a request with fewer tokens than its blocks need is refused") {
    std::istringstream lines(
        R"({"timestamp": 0, "input_length": 100, "output_length": 1, "hash_ids": [1, 2]})");

    const auto arrivals = arrivals_of(*read_trace(lines, "lines", 0), {});

    CHECK(arrivals.error().detail == "lines, request 1: 100 tokens do not fill 2 blocks of 512");
  }
}

TEST_SUITE("pegaflow-perf place") {
  TEST_CASE("PegaFlow's policy finds nearly what one shared cache finds, with few pulls") {
    MESSAGE("seed ", kSeed);
    const auto requests = generated("conversation", 3000, 8);
    PlaceOptions options{.nodes = 8,
                         .hardware = {},
                         .routers = {},
                         .policies = {"round-robin", "shortest-queue+pull", "pegaflow"},
                         .seed = kSeed};

    const PlaceOutcome outcome = *run_policies(requests, options);

    const SimResult& ours = of(outcome, "pegaflow");
    CHECK(ours.requests == 3000);
    CHECK(ours.hit_rate() > outcome.ceiling - 0.02);
    CHECK(ours.hit_rate() > 1.5 * of(outcome, "round-robin").hit_rate());
    CHECK(ours.pulled_rate() < 0.6 * of(outcome, "shortest-queue+pull").pulled_rate());
    CHECK(ours.mean_ttft() < 0.8 * of(outcome, "round-robin").mean_ttft());
    // The index of the router has seen every event: what it predicts comes true.
    CHECK(ours.mispredicted < ours.blocks / 100);
    CHECK(place_figures(outcome, options)->size() > 30);
    CHECK(place_table(outcome, options)->find("pegaflow") != std::string::npos);
  }

  TEST_CASE("four routers that share their placements, with late and lost events, find the same") {
    MESSAGE("seed ", kSeed);
    const auto requests = generated("conversation", 2000, 8);
    PlaceOptions options{
        .nodes = 8, .hardware = {}, .routers = {}, .policies = {"pegaflow"}, .seed = kSeed};
    options.routers.routers = 4;
    options.routers.share_loss = 0.01;
    options.routers.event_delay = 5;
    options.routers.event_loss = 0.01;

    const PlaceOutcome outcome = *run_policies(requests, options);

    CHECK(of(outcome, kPegaflowAsGiven).hit_rate() > of(outcome, kPegaflow).hit_rate() - 0.01);
    CHECK(of(outcome, kPegaflowAsGiven).mean_ttft() < 1.2 * of(outcome, kPegaflow).mean_ttft());
  }

  TEST_CASE("no request stays in the accounts of any router") {
    const auto requests = generated("shared-prefix", 500, 4);
    const SimHardware hardware;
    auto fleet = *SimFleet::create(4, hardware, {.routers = 2, .seed = kSeed});
    (void)simulate(requests, *fleet, 4, hardware);
    std::vector<SimNode> nodes;
    for (std::uint32_t i = 0; i < 4; ++i) nodes.emplace_back(i, hardware);

    for (int second = 0; second < 5; ++second) fleet->advance(nodes, 1e5 + second);

    CHECK(fleet->router(0).placement().stats().inflight == 0);
    CHECK(fleet->router(1).placement().stats().inflight == 0);
  }

  TEST_CASE("two runs with one seed are equal") {
    const auto requests = generated("agents", 500, 4);
    const PlaceOptions options{
        .nodes = 4, .hardware = {}, .routers = {}, .policies = {"pegaflow", "smg"}, .seed = kSeed};

    const PlaceOutcome first = *run_policies(requests, options);
    const PlaceOutcome second = *run_policies(requests, options);

    for (const char* const name : {"pegaflow", "smg"}) {
      CHECK(of(first, name).ttft == of(second, name).ttft);
    }
  }

  TEST_CASE("an unknown policy is refused with the names of all") {
    const auto outcome =
        run_policies(generated("loop", 10, 1),
                     {.nodes = 1, .hardware = {}, .routers = {}, .policies = {"best"}});

    CHECK(outcome.error().detail.find("there is no policy 'best'; choose from round-robin") == 0);
  }
}

}  // namespace
}  // namespace pegaflow::perf
