#include "index/placement/placement.h"

#include <array>
#include <limits>
#include <set>

#include <doctest/doctest.h>

namespace pegaflow::index {
namespace {

constexpr std::uint32_t kBlockTokens = 100;

TimePoint at(double seconds) {
  return TimePoint(std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds)));
}

/// Nodes with one engine each: 10,000 tokens a second, 1 MB of KV a token, pools of 100 GB/s (1 ms
/// a block), links of 10 GB/s (10 ms a block).
struct Fleet {
  explicit Fleet(std::size_t nodes, Placement::Options options = {}) {
    options.bytes_per_token = 1e6;
    placement = std::move(*Placement::create(options));
    for (std::size_t i = 0; i < nodes; ++i) {
      const NodeId node = *placement->add_node();
      placement->set_pool(node, {.latency_seconds = 0, .bytes_per_second = 100e9});
      REQUIRE(placement->add_engine(
                  {.node = node,
                   .rate = {.start_tokens_per_second = 10000, .start_floor_seconds = 0}}) == node);
      candidates.push_back({.engine = node});
    }
    for (NodeId from = 0; from < nodes; ++from) {
      for (NodeId to = 0; to < nodes; ++to) {
        placement->set_link(from, to, {.latency_seconds = 0, .bytes_per_second = 10e9});
      }
    }
  }

  Decision choose(std::uint32_t tokens, std::vector<PullSource> sources = {}, double now = 0) {
    its_sources = std::move(sources);
    const auto decision = placement->choose({.prompt_tokens = tokens,
                                             .block_tokens = kBlockTokens,
                                             .candidates = candidates,
                                             .sources = its_sources},
                                            at(now));
    REQUIRE(decision);
    return *decision;
  }

  std::unique_ptr<Placement> placement;
  std::vector<Candidate> candidates;
  std::vector<PullSource> its_sources;
};

TEST_SUITE("Placement") {
  TEST_CASE("a prompt goes to the engine that holds it") {
    Fleet fleet(3);
    fleet.candidates[1].gpu_blocks = fleet.candidates[1].local_blocks = 8;

    const Decision decision = fleet.choose(1000);

    CHECK(decision.best().engine == 1);
    CHECK(decision.best().reach_blocks == 8);
    CHECK(decision.best().uncached_tokens == 200);
    CHECK(decision.best().prefill == doctest::Approx(0.02));
    CHECK(decision.predicted_cached_tokens == 800);
    CHECK(decision.terms.size() == 3);
    CHECK(decision.terms[0].prefill == doctest::Approx(0.1));
  }

  TEST_CASE("a long queue outweighs a cached prompt") {
    Fleet fleet(2);
    fleet.candidates[1].gpu_blocks = fleet.candidates[1].local_blocks = 8;
    REQUIRE(fleet.placement->placed(1, {.engine = 1, .uncached_tokens = 20000}, 20000, at(0)));

    CHECK(fleet.choose(1000).best().engine == 0);

    fleet.placement->first_token(1, at(2));
    CHECK(fleet.choose(1000, {}, 2).best().engine == 1);
  }

  TEST_CASE("blocks of the own pool cost their load, which overlaps the queue") {
    Fleet fleet(1);
    fleet.candidates[0] = {.engine = 0, .gpu_blocks = 2, .local_blocks = 8};

    const Terms idle = fleet.choose(1000).best();
    CHECK(idle.fetch == doctest::Approx(0.006));
    CHECK(idle.first_token() == doctest::Approx(0.026));

    REQUIRE(fleet.placement->placed(1, {.engine = 0, .uncached_tokens = 1000}, 1000, at(0)));
    CHECK(fleet.choose(1000).best().first_token() == doctest::Approx(0.12));
  }

  TEST_CASE("blocks are pulled from a peer when that is faster than computing them") {
    Fleet fleet(2);
    fleet.candidates.erase(fleet.candidates.begin());  // The owner's engine is no candidate.

    const Decision pulls = fleet.choose(10000, {{.node = 0, .blocks = 90}});
    CHECK(pulls.best().source == kNoNode);  // 0.9 s to pull, 0.9 s to compute.
    CHECK(pulls.sources.empty());

    fleet.placement->set_link(0, 1, {.latency_seconds = 0, .bytes_per_second = 40e9});
    const Decision faster = fleet.choose(10000, {{.node = 0, .blocks = 90}});
    CHECK(faster.best().source == 0);
    CHECK(faster.best().pull_bytes == 9'000'000'000);
    CHECK(faster.best().reach_blocks == 90);
    CHECK(faster.best().fetch == doctest::Approx(0.225));
    REQUIRE(faster.sources.size() == 1);
    CHECK(faster.sources[0].blocks == 90);
  }

  TEST_CASE("a shorter prefix behind a faster link is preferred when it is cheaper") {
    Fleet fleet(3);
    fleet.candidates = {{.engine = 2}};
    fleet.placement->set_link(1, 2, {.latency_seconds = 0, .bytes_per_second = 100e9});

    const Decision decision =
        fleet.choose(10000, {{.node = 0, .blocks = 90}, {.node = 1, .blocks = 85}});

    CHECK(decision.best().source == 1);
    REQUIRE(decision.sources.size() == 2);
    CHECK(decision.sources[0].node == 1);
    CHECK(decision.sources[1].node == 0);
  }

  TEST_CASE("a pull waits for the pulls before it on the same card") {
    Fleet fleet(3);
    fleet.placement->set_link(0, 1, {.latency_seconds = 0, .bytes_per_second = 40e9});
    fleet.placement->set_link(0, 2, {.latency_seconds = 0, .bytes_per_second = 40e9});
    fleet.candidates = {{.engine = 1}};
    const Terms first = fleet.choose(10000, {{.node = 0, .blocks = 80}}).best();
    REQUIRE(fleet.placement->placed(1, first, 10000, at(0)));
    fleet.candidates = {{.engine = 2}};

    CHECK(fleet.choose(10000, {{.node = 0, .blocks = 80}}).best().fetch == doctest::Approx(0.4));
    CHECK(fleet.choose(10000, {{.node = 0, .blocks = 80}}, 1).best().fetch == doctest::Approx(0.2));
  }

  TEST_CASE("equal engines are drawn by chance, and a seed gives the same draws") {
    std::vector<EngineId> draws[2];
    for (auto& its : draws) {
      Fleet fleet(4, {.seed = 5});
      for (int i = 0; i < 100; ++i) its.push_back(fleet.choose(1000).best().engine);
    }

    CHECK(draws[0] == draws[1]);
    CHECK(std::set<EngineId>(draws[0].begin(), draws[0].end()).size() == 4);
  }

  TEST_CASE("among near-equals the one that pulls least is chosen") {
    Fleet fleet(2);
    fleet.placement->set_link(0, 1, {.latency_seconds = 0, .bytes_per_second = 1e15});
    fleet.candidates[0].gpu_blocks = fleet.candidates[0].local_blocks = 9;

    for (int i = 0; i < 50; ++i) {
      const Decision decision = fleet.choose(1000, {{.node = 0, .blocks = 9}});
      CHECK(decision.near_equals == 2);
      CHECK(decision.best().engine == 0);
    }
  }

  TEST_CASE("engines whose caches take many new blocks are dearer for more of them") {
    Fleet fleet(2);
    for (std::uint64_t i = 0; i < 20; ++i) {
      REQUIRE(fleet.placement->placed(i, {.engine = 0, .uncached_tokens = 10000}, 10000, at(0)));
      fleet.placement->first_token(i, at(0));
      fleet.placement->done(i, at(0));
    }

    const Decision decision = fleet.choose(1000, {}, 1);

    CHECK(decision.terms[0].queue == 0);
    CHECK(decision.terms[0].space > 0.01);
    CHECK(decision.terms[1].space == 0);
    CHECK(decision.best().engine == 1);
  }

  TEST_CASE("decodes and a full KV memory make an engine dearer") {
    Fleet fleet(1);
    const double alone = fleet.choose(1000).best().cost;

    REQUIRE(fleet.placement->placed(1, {.engine = 0, .uncached_tokens = 1}, 1000, at(0)));
    fleet.placement->first_token(1, at(0.0001));
    CHECK(fleet.choose(1000, {}, 0.0001).best().decode > 0);

    fleet.placement->set_load(0, {.kv_use = 0.95}, at(0.0001));
    const Terms full = fleet.choose(1000, {}, 0.0001).best();
    CHECK(full.room > 0);
    CHECK(full.cost > alone);
    fleet.placement->set_load(0, {.kv_use = 0.89}, at(0.0001));
    CHECK(fleet.choose(1000, {}, 0.0001).best().room == 0);
  }

  TEST_CASE("a queue that only the engine reports counts, while the report is fresh") {
    Fleet fleet(1);
    fleet.placement->set_load(0, {.waiting = 3}, at(0));

    const double at_once = fleet.choose(1000, {}, 0).best().queue;
    CHECK(at_once > 0.2);
    CHECK(fleet.choose(1000, {}, 0.1).best().queue == doctest::Approx(at_once - 0.1));
    CHECK(fleet.choose(1000, {}, 10).best().queue == 0);
  }

  TEST_CASE("requests of ours that have left the queue since its report do not count as others'") {
    Fleet fleet(1);
    for (std::uint64_t i = 1; i <= 3; ++i) {
      REQUIRE(fleet.placement->placed(i, {.engine = 0, .uncached_tokens = 4000}, 4000, at(0)));
    }
    fleet.placement->set_load(0, {.waiting = 3}, at(0));
    for (std::uint64_t i = 1; i <= 3; ++i) REQUIRE(fleet.placement->done(i, at(0.1)));

    CHECK(fleet.choose(1000, {}, 0.1).best().queue == 0);
  }

  TEST_CASE("a report of full KV memory counts only while it is fresh") {
    Fleet fleet(1);
    fleet.placement->set_load(0, {.kv_use = 0.95}, at(0));

    CHECK(fleet.choose(1000, {}, 9).best().room > 0);
    CHECK(fleet.choose(1000, {}, 11).best().room == 0);
  }

  TEST_CASE("the rate of an engine is learned from its first tokens") {
    Fleet fleet(1);
    double now = 0;
    for (std::uint64_t i = 0; i < 100; ++i) {
      const std::uint32_t tokens = 1000 + 500 * static_cast<std::uint32_t>(i % 5);
      REQUIRE(
          fleet.placement->placed(i, {.engine = 0, .uncached_tokens = tokens}, tokens, at(now)));
      now += tokens / 25000.0;
      REQUIRE(fleet.placement->first_token(i, at(now)));
      REQUIRE(fleet.placement->done(i, at(now)));
    }

    CHECK(fleet.placement->rate(0).tokens_per_second() == doctest::Approx(25000).epsilon(0.02));
    CHECK(fleet.placement->error(0).time_error() < 0.1);
  }

  TEST_CASE("an engine that was never measured starts with the rate of one that was") {
    Fleet fleet(3, {.space_weight = 0});
    const auto serve = [&](EngineId engine, double seconds, double now) {
      REQUIRE(fleet.placement->placed(engine, {.engine = engine, .uncached_tokens = 2000}, 2000,
                                      at(now)));
      REQUIRE(fleet.placement->first_token(engine, at(now + seconds)));
      REQUIRE(fleet.placement->done(engine, at(now + seconds)));
    };

    serve(0, 1, 0);

    const double measured = fleet.placement->rate(0).seconds(2000);
    CHECK(measured == doctest::Approx(1).epsilon(0.1));
    CHECK(fleet.placement->rate(1).seconds(2000) == doctest::Approx(measured));
    CHECK(fleet.placement->rate(1).samples() == 0);
    const Decision decision = fleet.choose(2000, {}, 2);
    CHECK(decision.near_equals == 3);

    serve(1, 0.1, 3);
    CHECK(fleet.placement->rate(0).seconds(2000) == doctest::Approx(measured));
    CHECK(fleet.placement->rate(1).seconds(2000) < 0.5);
  }

  TEST_CASE("an answer that comes later than its first token teaches no rate") {
    Fleet fleet(1);
    for (const std::uint64_t id : {1U, 2U}) {
      REQUIRE(fleet.placement->placed(id, {.engine = 0, .uncached_tokens = 8000}, 8000, at(0)));
    }

    CHECK(fleet.placement->computed(2, at(9)));

    // The engine began with the other one at that time at the latest.
    CHECK(fleet.placement->queue_seconds(0, at(9)) == doctest::Approx(0.8));
    CHECK(fleet.placement->rate(0).samples() == 0);
    CHECK_FALSE(fleet.placement->computed(2, at(9)));
    CHECK_FALSE(fleet.placement->computed(7, at(9)));
    CHECK_FALSE(fleet.placement->first_token(2, at(10)));
    CHECK(fleet.placement->done(2, at(10)));
  }

  TEST_CASE("an engine that was slow long ago is tried again beside busy ones") {
    Fleet fleet(2);
    std::uint64_t id = 0;
    const auto serve = [&](EngineId engine, double seconds, double now) {
      const Terms terms{.engine = engine, .uncached_tokens = 2000};
      REQUIRE(fleet.placement->placed(++id, terms, 2000, at(now)));
      CHECK(fleet.placement->first_token(id, at(now + seconds)));
      CHECK(fleet.placement->done(id, at(now + seconds)));
    };
    const auto price_of = [&](EngineId engine, double now) {
      return fleet.choose(2000, {}, now).terms[engine].prefill;
    };
    for (int i = 0; i < 20; ++i) serve(1, 2.0, 3.0 * i);
    for (int i = 0; i < 60; ++i) serve(0, 0.5, 62.0 + 2.0 * i);

    CHECK(price_of(1, 64) == doctest::Approx(2.0).epsilon(0.1));
    CHECK(price_of(1, 181) < 0.6);
    CHECK(price_of(0, 181) == doctest::Approx(0.5).epsilon(0.1));
    // Without others to compare it with, its own rate is the best guess.
    CHECK(price_of(1, 1000) == doctest::Approx(2.0).epsilon(0.1));
  }

  TEST_CASE("an engine with a prefill in its queue keeps its own rate however long that takes") {
    Fleet fleet(2);
    std::uint64_t id = 0;
    const auto place = [&](EngineId engine, double now) {
      const Terms terms{.engine = engine, .uncached_tokens = 2000};
      REQUIRE(fleet.placement->placed(++id, terms, 2000, at(now)));
      return id;
    };
    const auto serve = [&](EngineId engine, double seconds, double now) {
      const std::uint64_t placed = place(engine, now);
      CHECK(fleet.placement->first_token(placed, at(now + seconds)));
      CHECK(fleet.placement->done(placed, at(now + seconds)));
    };
    for (int i = 0; i < 20; ++i) serve(1, 2.0, 3.0 * i);
    const std::uint64_t waiting = place(1, 62);
    for (int i = 0; i < 60; ++i) serve(0, 0.5, 62.0 + 2.0 * i);

    const auto price = [&] { return fleet.choose(2000, {}, 181).terms[1].prefill; };
    CHECK(price() == doctest::Approx(2.0).epsilon(0.1));
    CHECK(fleet.placement->done(waiting, at(181)));
    CHECK(price() < 0.6);
  }

  TEST_CASE("tokens that an engine evicts before it begins with a request are its work") {
    Fleet fleet(1);
    const Terms terms{.engine = 0, .uncached_tokens = 100};
    REQUIRE(fleet.placement->placed(1, terms, 10'000, at(0)));
    CHECK(fleet.placement->queue_seconds(0, at(0)) == doctest::Approx(0.01));
    fleet.placement->lost(1, 4'900);
    CHECK(fleet.placement->queue_seconds(0, at(0)) == doctest::Approx(0.5));
    CHECK(fleet.placement->sums(0).prefill_tokens == 5'000);
    fleet.placement->lost(1, 1'000'000);
    CHECK(fleet.placement->queue_seconds(0, at(0)) == doctest::Approx(1.0));
    CHECK(fleet.placement->first_token(1, at(1)));
    fleet.placement->lost(1, 100);
    fleet.placement->lost(2, 100);
    CHECK(fleet.placement->queue_seconds(0, at(1)) == 0);
    CHECK(fleet.placement->rate(0).tokens_per_second() == doctest::Approx(10'000).epsilon(0.1));
  }

  TEST_CASE("reported cached tokens give the error of the prediction") {
    Fleet fleet(1);
    REQUIRE(fleet.placement->placed(1, {.engine = 0, .uncached_tokens = 200}, 1000, at(0)));

    fleet.placement->reported_cached(1, 400);
    fleet.placement->reported_cached(99, 0);

    CHECK(fleet.placement->error(0).cached_error() == doctest::Approx(0.4));
  }

  TEST_CASE("placements of another router make the same queue as the router's own") {
    Fleet ours(2);
    Fleet theirs(2);
    auto record = *theirs.placement->placed(7, {.engine = 0, .uncached_tokens = 5000}, 5000, at(0));
    record.router = 1;

    ours.placement->apply(record, at(0));
    CHECK(ours.placement->queue_seconds(0, at(0)) == doctest::Approx(0.5));
    ours.placement->apply(record, at(0));  // A repeated record.
    CHECK(ours.placement->queue_seconds(0, at(0)) == doctest::Approx(0.5));

    record.stage = Stage::kFirstToken;
    ours.placement->apply(record, at(0.5));
    CHECK(ours.placement->queue_seconds(0, at(0.5)) == 0);
    record.stage = Stage::kDone;
    ours.placement->apply(record, at(1));
    CHECK(ours.placement->stats().inflight == 0);
  }

  TEST_CASE("heartbeats heal lost records, and a silent router is forgotten") {
    Fleet fleet(1);
    fleet.placement->apply(
        EngineSums{.router = 1, .engine = 0, .prefills = 1, .decodes = 0, .prefill_tokens = 5000},
        at(0));
    CHECK(fleet.placement->queue_seconds(0, at(0)) == doctest::Approx(0.5));
    CHECK(fleet.placement->stats().healed == 1);

    fleet.placement->forget_router(1, at(1));
    CHECK(fleet.placement->queue_seconds(0, at(1)) == 0);
  }

  TEST_CASE("a placement without any message ends by its time limit") {
    Fleet fleet(1);
    fleet.placement->apply(
        PlacementRecord{
            .router = 1, .request = 1, .engine = 0, .prompt_tokens = 1000, .uncached_tokens = 1000},
        at(0));
    REQUIRE(fleet.placement->placed(1, {.engine = 0, .uncached_tokens = 1000}, 1000, at(0)));

    CHECK(fleet.placement->expire(at(2)) == 0);
    CHECK(fleet.placement->expire(at(4)) == 1);
    CHECK(fleet.placement->stats().timed_out == 1);

    // The router's own request is open, however late the engine is.
    CHECK(fleet.placement->expire(at(1700)) == 0);
    CHECK(fleet.placement->expire(at(1900)) == 1);
    CHECK_FALSE(fleet.placement->first_token(1, at(1900)));
    CHECK_FALSE(fleet.placement->done(1, at(1900)));
  }

  TEST_CASE("a full account is busy and the decision is still made") {
    Fleet fleet(1, {.max_requests = 1});
    REQUIRE(fleet.placement->placed(1, {.engine = 0, .uncached_tokens = 1}, 1, at(0)));

    CHECK(fleet.placement->placed(2, {.engine = 0, .uncached_tokens = 1}, 1, at(0)).error().code ==
          Errc::kBusy);
    CHECK(fleet.choose(1000).best().engine == 0);
    CHECK(fleet.placement->stats().uncounted == 1);
  }

  TEST_CASE("removed engines and nodes are no candidates and no sources") {
    Fleet fleet(3);
    fleet.candidates[0].gpu_blocks = fleet.candidates[0].local_blocks = 9;
    fleet.placement->remove_engine(0);
    fleet.placement->remove_engine(0);
    fleet.placement->set_link(1, 2, {.latency_seconds = 0, .bytes_per_second = 1e12});
    fleet.placement->remove_node(1);

    const Decision decision =
        fleet.choose(1000, {{.node = 1, .blocks = 9}, {.node = 77, .blocks = 9}});

    CHECK(decision.terms.size() == 2);
    CHECK(decision.best().source == kNoNode);
    CHECK(fleet.placement->add_engine({.node = 1}).error().code == Errc::kInvalidArgument);
    CHECK(*fleet.placement->add_engine({.node = 2}) == 0);
  }

  TEST_CASE("an engine without a node has no pool and pulls nothing") {
    Fleet fleet(1);
    const EngineId alone = *fleet.placement->add_engine({});
    fleet.candidates = {{.engine = alone, .gpu_blocks = 1, .local_blocks = 9}};

    const Terms terms = fleet.choose(1000, {{.node = 0, .blocks = 9}}).best();

    CHECK(terms.local_blocks == 1);
    CHECK(terms.source == kNoNode);
  }

  TEST_CASE("a prompt that is cached completely still computes one token") {
    Fleet fleet(1);
    fleet.candidates[0].gpu_blocks = fleet.candidates[0].local_blocks = 10;

    const Decision decision = fleet.choose(1000);

    CHECK(decision.best().uncached_tokens == 1);
    CHECK(decision.predicted_cached_tokens == 999);
  }

  TEST_CASE("requests and options that make no sense are refused by name") {
    Fleet fleet(1);
    const Candidate unknown{.engine = 9};

    CHECK(fleet.placement->choose({.prompt_tokens = 1, .candidates = {&unknown, 1}}, at(0))
              .error()
              .detail == "placement: none of 1 candidates is an engine");
    CHECK(fleet.placement->choose({.prompt_tokens = 0, .candidates = fleet.candidates}, at(0))
              .error()
              .code == Errc::kInvalidArgument);
    CHECK(Placement::create({.max_engines = 0}).error().detail ==
          "placement: max_engines is 0, not 1 to 4096");
    CHECK(Placement::create({.band_share = -1}).error().code == Errc::kInvalidArgument);
    CHECK(Placement::create({.room_from = 1}).error().code == Errc::kInvalidArgument);
    CHECK(fleet.placement->placed(1, {.engine = 9}, 1, at(0)).error().code ==
          Errc::kInvalidArgument);
    const double none = std::numeric_limits<double>::quiet_NaN();
    fleet.placement->set_link(0, 0, {.latency_seconds = 0, .bytes_per_second = none});
    CHECK(fleet.placement->link(0, 0).bytes_per_second == doctest::Approx(10e9));
    CHECK(Placement::create({.max_engines = 1, .max_nodes = 1}).value()->add_node().value() == 0);
  }
}

TEST_SUITE("Placement of pairs") {
  struct Pairs : Fleet {
    Pairs() : Fleet(4) {}
    PairDecision pair(std::uint32_t tokens) {
      const auto made = placement->choose_pair({.prompt_tokens = tokens,
                                                .block_tokens = kBlockTokens,
                                                .candidates = std::span(candidates).first(2)},
                                               {.prompt_tokens = tokens,
                                                .block_tokens = kBlockTokens,
                                                .candidates = std::span(candidates).last(2)},
                                               at(0));
      REQUIRE(made);
      return *made;
    }
  };

  TEST_CASE("a short prompt skips the prefill leg, because the transfer costs more") {
    Pairs fleet;

    const PairDecision decision = fleet.pair(1000);

    CHECK(decision.skips_prefill);
    CHECK(decision.pairs == 4);
    CHECK(decision.decode.engine >= 2);
    CHECK(decision.cost == decision.alone_cost);
  }

  TEST_CASE("a prompt behind busy decode engines takes the prefill leg") {
    Pairs fleet;
    for (const EngineId engine : {2U, 3U}) {
      REQUIRE(fleet.placement->placed(engine, {.engine = engine, .uncached_tokens = 50000}, 50000,
                                      at(0)));
    }

    const PairDecision decision = fleet.pair(1000);

    CHECK_FALSE(decision.skips_prefill);
    CHECK(decision.prefill.engine < 2);
    CHECK(decision.decode.engine >= 2);
    CHECK(decision.transfer == doctest::Approx(0.1));
    CHECK(decision.cost < decision.alone_cost);
  }

  TEST_CASE("the pair with the faster link is chosen") {
    Pairs fleet;
    for (const EngineId engine : {2U, 3U}) {
      REQUIRE(fleet.placement->placed(engine, {.engine = engine, .uncached_tokens = 50000}, 50000,
                                      at(0)));
    }
    fleet.placement->set_link(1, 3, {.latency_seconds = 0, .bytes_per_second = 100e9});

    const PairDecision decision = fleet.pair(1000);

    CHECK(decision.prefill.engine == 1);
    CHECK(decision.decode.engine == 3);
  }

  TEST_CASE("a decode engine that holds the prompt skips the prefill leg") {
    Pairs fleet;
    fleet.candidates[3].gpu_blocks = fleet.candidates[3].local_blocks = 9;

    const PairDecision decision = fleet.pair(1000);

    CHECK(decision.skips_prefill);
    CHECK(decision.decode.engine == 3);
  }

  TEST_CASE("after a prefill the decode engine is the one with the faster link, or a near-equal") {
    Pairs fleet;
    const auto choose = [&](EngineId from) {
      return fleet.placement->choose_decode(from,
                                            {.prompt_tokens = 1000,
                                             .block_tokens = kBlockTokens,
                                             .candidates = std::span(fleet.candidates).last(2)},
                                            at(0));
    };
    std::array<int, 4> chosen{};
    for (int i = 0; i < 100; ++i) ++chosen.at(choose(0)->decode.engine);
    CHECK(chosen[2] > 20);
    CHECK(chosen[3] > 20);

    fleet.placement->set_link(0, 3, {.latency_seconds = 0, .bytes_per_second = 100e9});
    for (int i = 0; i < 20; ++i) CHECK(choose(0)->decode.engine == 3);
    CHECK(choose(0)->transfer < 0.1);

    fleet.placement->remove_node(0);
    CHECK(choose(0).error().code == Errc::kInvalidArgument);
  }
}

}  // namespace
}  // namespace pegaflow::index
