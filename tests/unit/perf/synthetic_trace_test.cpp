#include "perf/replay/synthetic_trace.h"

#include <algorithm>
#include <map>
#include <set>

#include <doctest/doctest.h>

namespace pegaflow::perf {
namespace {

RequestTrace make(std::string_view kind, std::size_t requests = 6000, std::uint64_t seed = 1) {
  return synthesize(kind, seed, requests).value();
}

/// The number of requests for each block.
std::map<std::uint64_t, std::size_t> uses(const RequestTrace& trace) {
  std::map<std::uint64_t, std::size_t> counts;
  for (const Prompt& prompt : trace.requests) {
    for (const std::uint64_t block : prompt) ++counts[block];
  }
  return counts;
}

double share_of_requests(const RequestTrace& trace, const auto& has) {
  const auto count = std::count_if(trace.requests.begin(), trace.requests.end(), has);
  return static_cast<double>(count) / static_cast<double>(trace.requests.size());
}

TEST_SUITE("synthetic_trace") {
  TEST_CASE("equal seeds give equal requests, other seeds others") {
    for (const WorkloadKind& kind : workload_kinds()) {
      CAPTURE(kind.name);
      CHECK(make(kind.name, 2000).requests == make(kind.name, 2000).requests);
      if (kind.name != "loop") {  // It draws nothing.
        CHECK(make(kind.name, 2000).requests != make(kind.name, 2000, 2).requests);
      }
    }
  }

  TEST_CASE("a longer trace of a seed begins with the shorter one") {
    for (const WorkloadKind& kind : workload_kinds()) {
      CAPTURE(kind.name);
      const RequestTrace few = make(kind.name, 500);
      const RequestTrace many = make(kind.name, 2000);
      CHECK(std::equal(few.requests.begin(), few.requests.end(), many.requests.begin()));
    }
  }

  TEST_CASE("equal blocks have equal prefixes, as the hashes of an engine do") {
    for (const WorkloadKind& kind : workload_kinds()) {
      CAPTURE(kind.name);
      std::map<std::uint64_t, std::uint64_t> parents;
      bool same = true;
      for (const Prompt& prompt : make(kind.name).requests) {
        REQUIRE_FALSE(prompt.empty());
        REQUIRE(prompt.size() <= kMaxPromptBlocks);
        for (std::size_t i = 0; i < prompt.size(); ++i) {
          const std::uint64_t parent = i == 0 ? ~std::uint64_t{0} : prompt[i - 1];
          same = same && parents.emplace(prompt[i], parent).first->second == parent;
        }
      }
      CHECK(same);
    }
  }

  TEST_CASE("the name contains the seed") { CHECK(make("zipf", 1, 42).name == "zipf, seed 42"); }

  TEST_CASE("conversations grow, and half of them end with the first request") {
    const RequestTrace trace = make("conversation");
    // Each later turn of a conversation requests its earlier blocks again.
    const auto counts = uses(trace);
    const auto once = static_cast<double>(
        std::count_if(counts.begin(), counts.end(), [](auto& use) { return use.second == 1; }));
    CHECK(once / static_cast<double>(counts.size()) > 0.3);
    CHECK(once / static_cast<double>(counts.size()) < 0.8);
    const double later = share_of_requests(trace, [&](const Prompt& prompt) {
      // Begins with a system prompt and continues with the blocks of an earlier turn.
      return counts.at(prompt.back()) > 1 || prompt.size() > 60;
    });
    CHECK(later > 0.2);
    std::set<std::uint64_t> systems;
    for (const Prompt& prompt : trace.requests) systems.insert(prompt.front());
    CHECK(systems.size() == 5);
    CHECK(summarize(trace).reusable > summarize(trace).blocks / 2);
  }

  TEST_CASE("system prompts of shared-prefix follow Zipf's law, and their tails never recur") {
    const RequestTrace trace = make("shared-prefix", 20'000);
    std::map<std::uint64_t, std::size_t> systems;
    for (const Prompt& prompt : trace.requests) ++systems[prompt.front()];
    CHECK(systems.size() > 380);
    CHECK(systems.size() <= 400);
    std::vector<double> by_rank;
    for (const auto& [block, count] : systems) by_rank.push_back(static_cast<double>(count));
    std::sort(by_rank.rbegin(), by_rank.rend());
    // 10^0.8 = 6.3 between the first and the tenth, and between the tenth and the hundredth.
    CHECK(by_rank[0] / by_rank[9] == doctest::Approx(6.3).epsilon(0.25));
    CHECK(by_rank[9] / by_rank[99] == doctest::Approx(6.3).epsilon(0.35));
    const auto counts = uses(trace);
    CHECK(std::all_of(trace.requests.begin(), trace.requests.end(),
                      [&](const Prompt& prompt) { return counts.at(prompt.back()) == 1; }));
  }

  TEST_CASE("a quarter of a scan's requests are long and never recur") {
    const RequestTrace trace = make("scan");
    const auto counts = uses(trace);
    const double one_time = share_of_requests(trace, [&](const Prompt& prompt) {
      return prompt.size() >= 30 && counts.at(prompt.front()) == 1;
    });
    CHECK(one_time == doctest::Approx(0.25).epsilon(0.1));
  }

  TEST_CASE("popularity shifts, by a part of the ranks at a time") {
    const RequestTrace trace = make("zipf", 12'000);
    // The 20 most requested documents between two shifts.
    std::vector<std::set<std::uint64_t>> popular;
    for (std::size_t begin = 0; begin + 1500 <= trace.requests.size(); begin += 1500) {
      std::map<std::uint64_t, std::size_t> counts;
      for (std::size_t i = begin; i < begin + 1500; ++i) ++counts[trace.requests[i].front()];
      std::vector<std::pair<std::size_t, std::uint64_t>> ranks;
      for (const auto& [block, count] : counts) ranks.emplace_back(count, block);
      std::sort(ranks.rbegin(), ranks.rend());
      std::set<std::uint64_t>& top = popular.emplace_back();
      for (std::size_t i = 0; i < 20; ++i) top.insert(ranks[i].second);
    }
    const auto common = [&](std::size_t a, std::size_t b) {
      return std::count_if(popular[a].begin(), popular[a].end(),
                           [&](std::uint64_t block) { return popular[b].contains(block); });
    };
    CHECK(common(0, 1) >= 8);
    CHECK(common(0, 7) < common(0, 1));
  }

  TEST_CASE("agents share their starts, and most blocks of a step were requested before") {
    const RequestTrace trace = make("agents");
    std::set<std::uint64_t> systems;
    std::set<std::uint64_t> starts;
    for (const Prompt& prompt : trace.requests) {
      REQUIRE(prompt.size() > 14);
      systems.insert(prompt.front());
      starts.insert(prompt[13]);
    }
    CHECK(systems.size() == 4);
    CHECK(starts.size() == 20);
    const TraceSummary summary = summarize(trace);
    CHECK(static_cast<double>(summary.reusable) > 0.85 * static_cast<double>(summary.blocks));
  }

  TEST_CASE("a loop requests 4,000 blocks repeatedly in the same order") {
    const RequestTrace trace = make("loop", 1200);
    CHECK(summarize(trace).distinct == 4000);
    for (std::size_t i = 400; i < 1200; ++i) CHECK(trace.requests[i] == trace.requests[i - 400]);
  }

  TEST_CASE("mixed has all parts in their shares, with no block in common") {
    const RequestTrace trace = make("mixed", 12'000);
    const auto counts = uses(trace);
    const double one_time = share_of_requests(trace, [&](const Prompt& prompt) {
      return prompt.size() >= 30 && counts.at(prompt.front()) == 1;
    });
    CHECK(one_time == doctest::Approx(0.1 * 0.25).epsilon(0.3));
    // The four system prompts of agents and the five of conversations.
    std::vector<std::size_t> firsts;
    std::map<std::uint64_t, std::size_t> by_first;
    for (const Prompt& prompt : trace.requests) ++by_first[prompt.front()];
    for (const auto& [block, count] : by_first) firsts.push_back(count);
    std::sort(firsts.rbegin(), firsts.rend());
    std::size_t most = 0;
    for (std::size_t i = 0; i < 9; ++i) most += firsts[i];
    CHECK(static_cast<double>(most) / 12'000 == doctest::Approx(0.7).epsilon(0.1));
  }

  TEST_CASE("the error of an unknown kind lists all kinds") {
    const Result<RequestTrace> made = synthesize("chess", 1, 10);
    CHECK(made.error().code == Errc::kInvalidArgument);
    for (const WorkloadKind& kind : workload_kinds()) {
      CHECK(made.error().detail.find(kind.name) != std::string::npos);
    }
    CHECK(synthesize("scan", 1, 0).error().code == Errc::kInvalidArgument);
  }
}

}  // namespace
}  // namespace pegaflow::perf
