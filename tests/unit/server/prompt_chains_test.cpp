#include "server/chains/prompt_chains.h"

#include <doctest/doctest.h>

#include "base/clock.h"

namespace pegaflow::server {
namespace {

constexpr std::size_t kAll = std::size_t{1} << 30U;

PromptChain chain(std::uint64_t session, std::size_t keys = 2) {
  return {
      .session = session, .block_tokens = 16, .keys = std::vector<std::uint64_t>(keys, session)};
}

std::vector<std::uint64_t> sessions(const PromptChains::Part& part) {
  std::vector<std::uint64_t> all;
  for (const PromptChain& each : part.chains) all.push_back(each.session);
  return all;
}

TEST_SUITE("prompt_chains") {
  TEST_CASE("nothing is kept before a router reads, and a minute after the last one has") {
    ManualClock clock;
    PromptChains chains({}, clock);
    CHECK(!chains.add("a", chain(1)));
    auto end = chains.read("a", PromptChains::kEnd, kAll).position;
    CHECK(chains.add("a", chain(2)));
    CHECK(sessions(chains.read("a", end, kAll)) == std::vector<std::uint64_t>{2});
    clock.advance(std::chrono::seconds(61));
    CHECK(!chains.add("a", chain(3)));
    CHECK(chains.stats().chains == 0);
    CHECK(chains.stats().bytes == 0);
    CHECK(chains.stats().unwanted == 2);
    // A position from before is good for what comes.
    end = chains.read("a", end, kAll).position;
    CHECK(chains.add("a", chain(4)));
    CHECK(sessions(chains.read("a", end, kAll)) == std::vector<std::uint64_t>{4});
  }

  TEST_CASE("a router gets the chains of its namespace, part by part, from its position on") {
    ManualClock clock;
    PromptChains chains({}, clock);
    const auto start = chains.read("a", PromptChains::kEnd, kAll).position;
    for (std::uint64_t i = 1; i <= 6; ++i) CHECK(chains.add(i % 2 == 0 ? "b" : "a", chain(i)));
    auto part = chains.read("a", start, 1);
    CHECK(sessions(part) == std::vector<std::uint64_t>{1});
    CHECK(part.has_more);
    part = chains.read("a", part.position, kAll);
    CHECK(sessions(part) == std::vector<std::uint64_t>{3, 5});
    CHECK(!part.has_more);
    CHECK(chains.read("a", part.position, kAll).chains.empty());
    CHECK(sessions(chains.read("b", start, kAll)) == std::vector<std::uint64_t>{2, 4, 6});
  }

  TEST_CASE("the oldest chains make room, by number and by bytes") {
    ManualClock clock;
    PromptChains few({.most_chains = 3}, clock);
    const auto start = few.read("a", PromptChains::kEnd, kAll).position;
    for (std::uint64_t i = 1; i <= 5; ++i) few.add("a", chain(i));
    CHECK(sessions(few.read("a", start, kAll)) == std::vector<std::uint64_t>{3, 4, 5});
    CHECK(few.stats().lost == 2);
    PromptChains small({.most_bytes = 20'000}, clock);
    (void)small.read("a", PromptChains::kEnd, kAll);
    for (std::uint64_t i = 1; i <= 9; ++i) small.add("a", chain(i, 1000));
    CHECK(small.stats().bytes <= 20'000);
    CHECK(sessions(small.read("a", start, kAll)) == std::vector<std::uint64_t>{8, 9});
    // One that is larger than all room is kept until the next.
    small.add("a", chain(10, 8000));
    CHECK(sessions(small.read("a", start, kAll)) == std::vector<std::uint64_t>{10});
  }

  TEST_CASE("the hook is called once, with the next chain") {
    ManualClock clock;
    PromptChains chains({}, clock);
    int calls = 0;
    chains.on_next([&calls] { ++calls; });
    chains.add("a", chain(1));
    CHECK(calls == 0);
    (void)chains.read("a", PromptChains::kEnd, kAll);
    chains.add("a", chain(2));
    chains.add("a", chain(3));
    CHECK(calls == 1);
  }
}

}  // namespace
}  // namespace pegaflow::server
