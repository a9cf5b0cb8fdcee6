// What the adaptive policy finds beside LRU, and what it refuses.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "engine/eviction/adaptive.h"
#include "tests/support/seed.h"

namespace pegaflow::engine {

namespace {

using Freed = EvictionPolicy::Freed;
using Prompt = std::vector<std::uint32_t>;

std::uint32_t hash_of(std::uint32_t name) {
  const std::uint64_t mixed = (name + 1) * 0x9E3779B97F4A7C15ULL;
  return static_cast<std::uint32_t>(mixed >> 32U);
}

/// A pool that serves prompts in the server's order of events.
class Pool {
 public:
  Pool(EvictionKind kind, std::uint32_t rows)
      : rows_(std::move(*BlockRows::create(rows))),
        policy_(std::move(*EvictionPolicy::create(kind, *rows_, rows))),
        names_(rows) {
    for (std::uint32_t row = rows; row-- != 0;) free_.push_back(row);
  }

  /// Returns how many blocks of the prompt were found.
  std::size_t serve(const Prompt& prompt, bool may_refuse = true) {
    std::size_t found = 0;
    while (found < prompt.size() && has(prompt[found])) ++found;
    policy_->claim_begins();
    for (std::size_t i = 0; i < found; ++i) policy_->taken(row_of_.at(prompt[i]));
    for (std::size_t i = found; i-- != 0;) policy_->released(row_of_.at(prompt[i]));
    asked += prompt.size();
    hits += found;
    save(prompt, found, may_refuse);
    return found;
  }
  [[nodiscard]] bool has(std::uint32_t name) const { return row_of_.contains(name); }
  [[nodiscard]] double rate() const {
    return static_cast<double>(hits) / static_cast<double>(asked);
  }
  [[nodiscard]] const AdaptivePolicy& adaptive() const {
    return dynamic_cast<const AdaptivePolicy&>(*policy_);
  }
  [[nodiscard]] Result<void> check() const {
    return policy_->check([](std::uint32_t) { return true; });
  }

  std::uint64_t asked = 0;
  std::uint64_t hits = 0;
  std::uint64_t refused = 0;

 private:
  void save(const Prompt& prompt, std::size_t from, bool may_refuse) {
    policy_->save_begins(may_refuse);
    std::vector<std::pair<std::uint32_t, std::uint32_t>> reserved;
    for (std::size_t i = from; i < prompt.size(); ++i) {
      if (has(prompt[i])) continue;
      if (free_.empty()) {
        const std::uint32_t victim = policy_->victim();
        if (victim == EvictionPolicy::kNone) continue;
        if (may_refuse && policy_->refuses(hash_of(prompt[i]))) {
          ++refused;
          continue;
        }
        policy_->freed(victim, hash_of(names_[victim]), Freed::kEvicted);
        row_of_.erase(names_[victim]);
        free_.push_back(victim);
      }
      reserved.emplace_back(prompt[i], free_.back());
      free_.pop_back();
    }
    while (!reserved.empty()) {
      const auto [name, row] = reserved.back();
      reserved.pop_back();
      row_of_[name] = row;
      names_[row] = name;
      policy_->sealed(row, hash_of(name));
    }
  }

  std::unique_ptr<BlockRows> rows_;
  std::unique_ptr<EvictionPolicy> policy_;
  std::vector<std::uint32_t> names_;
  std::vector<std::uint32_t> free_;
  std::unordered_map<std::uint32_t, std::uint32_t> row_of_;
};

/// `count` blocks of a prompt of that number.
Prompt prompt_of(std::uint32_t number, std::uint32_t count) {
  Prompt made(count);
  for (std::uint32_t i = 0; i < count; ++i) made[i] = number * 1024 + i;
  return made;
}

// ---- requests that no rule was chosen for

/// By Zipf's law; half of the popular ones change places now and then.
struct Zipf {
  explicit Zipf(std::uint64_t seed) : random(seed) {
    for (std::uint32_t i = 0; i < 2000; ++i) order.push_back(i);
    std::vector<double> weights;
    for (int i = 1; i <= 2000; ++i) weights.push_back(std::pow(i, -0.8));
    ranks = std::discrete_distribution<std::uint32_t>(weights.begin(), weights.end());
  }
  Prompt operator()() {
    if (++count % 2000 == 0) std::shuffle(order.begin(), order.begin() + 200, random);
    return prompt_of(order[ranks(random)], 4);
  }
  std::mt19937_64 random;
  std::vector<std::uint32_t> order;
  std::discrete_distribution<std::uint32_t> ranks;
  int count = 0;
};

/// Some users at a time, whose prompts grow; each pauses now and then.
struct Users {
  Users(std::uint64_t seed, std::uint32_t users) : random(seed), lengths(users, 5), names(users) {
    for (std::uint32_t i = 0; i < users; ++i) names[i] = next++;
  }
  Prompt operator()() {
    if (random() % 8 == 0) active = random() % lengths.size();
    const std::size_t user =
        random() % 3 == 0 ? random() % lengths.size() : (active + random() % 4) % lengths.size();
    lengths[user] += static_cast<std::uint32_t>(random() % 3);
    if (lengths[user] > 60) {
      lengths[user] = 5;
      names[user] = next++;
    }
    return prompt_of(100'000 + names[user], lengths[user]);
  }
  std::mt19937_64 random;
  std::vector<std::uint32_t> lengths;
  std::vector<std::uint32_t> names;
  std::size_t active = 0;
  std::uint32_t next = 0;
};

/// A window of documents, from which the oldest disappears and to which new ones come.
struct Window {
  explicit Window(std::uint64_t seed) : random(seed) {}
  Prompt operator()() {
    if (++count % 20 == 0) ++first;
    return prompt_of(1'000'000 + first + static_cast<std::uint32_t>(random() % 150), 8);
  }
  std::mt19937_64 random;
  std::uint32_t first = 0;
  int count = 0;
};

/// The documents of a list one after the other, and again; with some that never recur.
struct Scans {
  Scans(std::uint64_t seed, std::uint32_t length) : random(seed), documents(length) {}
  Prompt operator()() {
    if (random() % 5 == 0) return prompt_of(3'000'000 + count++, 8);
    return prompt_of(2'000'000 + at++ % documents, 8);
  }
  std::mt19937_64 random;
  std::uint32_t documents;
  std::uint32_t at = 0;
  std::uint32_t count = 0;
};

struct Mixture {
  explicit Mixture(std::uint64_t seed)
      : random(seed), zipf(seed), users(seed, 24), window(seed), scans(seed, 60) {}
  Prompt operator()() {
    // Each has its time, so that the best rule changes.
    const std::uint64_t turn = count++ / 3000 % 4;
    if (random() % 4 == 0) return zipf();
    return turn == 0 ? zipf() : turn == 1 ? users() : turn == 2 ? window() : scans();
  }
  std::mt19937_64 random;
  Zipf zipf;
  Users users;
  Window window;
  Scans scans;
  std::uint64_t count = 0;
};

}  // namespace

TEST_SUITE("AdaptivePolicy") {
  TEST_CASE("it finds part of a loop that LRU evicts before each use") {
    Pool lru(EvictionKind::kLru, 1000);
    Pool adaptive(EvictionKind::kAdaptive, 1000);
    for (std::uint32_t i = 0; i < 6000; ++i) {
      const Prompt prompt = prompt_of(i % 150, 10);
      lru.serve(prompt);
      adaptive.serve(prompt);
    }
    CHECK(lru.rate() == 0);
    CHECK(adaptive.rate() > 0.4);
    CHECK(adaptive.refused > 0);
    CHECK(adaptive.check());
  }

  TEST_CASE("where saves may not be refused, it refuses none") {
    Pool pool(EvictionKind::kAdaptive, 1000);
    for (std::uint32_t i = 0; i < 6000; ++i) {
      pool.serve(prompt_of(i % 150, 10), false);
      REQUIRE_FALSE(pool.adaptive().rule().may_refuse());
    }
    CHECK(pool.refused == 0);
  }

  TEST_CASE("a prompt is refused from some block on, never in its middle") {
    Pool pool(EvictionKind::kAdaptive, 1000);
    for (std::uint32_t i = 0; i < 6000; ++i) {
      const Prompt prompt = prompt_of(i % 45, 40);
      const std::uint64_t before = pool.refused;
      pool.serve(prompt);
      if (pool.refused == before) continue;
      bool has_ended = false;
      for (const std::uint32_t name : prompt) {
        if (!pool.has(name)) has_ended = true;
        REQUIRE_FALSE((has_ended && pool.has(name)));
      }
    }
    CHECK(pool.refused > 0);
  }

  TEST_CASE("it forgets a working set after requests for it end") {
    Pool pool(EvictionKind::kAdaptive, 1000);
    for (std::uint32_t i = 0; i < 6000; ++i) pool.serve(prompt_of(i % 150, 10));
    REQUIRE(pool.adaptive().rule().may_refuse());
    std::size_t found = 0;
    for (std::uint32_t i = 0; i < 3000; ++i) {
      const std::size_t now = pool.serve(prompt_of(10'000 + i % 50, 10));
      if (i >= 2000) found += now;
    }
    CHECK(found == 10'000);
  }

  TEST_CASE("on requests that it was not made for it finds at least 95 % of LRU's blocks") {
    const std::uint64_t seed = testing::seed();
    CAPTURE(seed);
    const std::vector<std::pair<std::string, std::function<std::function<Prompt()>()>>> kinds = {
        {"zipf", [&] { return Zipf(seed); }},
        {"users", [&] { return Users(seed, 40); }},
        {"window", [&] { return Window(seed); }},
        {"scans", [&] { return Scans(seed, 140); }},
        {"mixture", [&] { return Mixture(seed); }}};
    for (const auto& [name, make] : kinds) {
      for (const std::uint32_t rows : {300U, 1000U, 3000U}) {
        CAPTURE(name);
        CAPTURE(rows);
        Pool lru(EvictionKind::kLru, rows);
        Pool adaptive(EvictionKind::kAdaptive, rows);
        const auto next = make();
        for (int i = 0; i < 12'000; ++i) {
          const Prompt prompt = next();
          lru.serve(prompt);
          adaptive.serve(prompt);
        }
        REQUIRE(adaptive.check());
        CHECK(adaptive.rate() >= 0.95 * lru.rate());
      }
    }
  }
}

}  // namespace pegaflow::engine
