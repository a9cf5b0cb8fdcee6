#include "router/routing/policy.h"

#include <algorithm>
#include <random>
#include <vector>

#include <xxhash.h>

namespace pegaflow::router {
namespace {

class RoundRobin final : public Policy {
 public:
  std::size_t choose(std::span<const Candidate> candidates, const RequestView&) override {
    // A single candidate uses no turn: otherwise a retry at the only other engine would make the
    // next request begin at the failing engine again.
    return candidates.size() == 1 ? 0 : next_++ % candidates.size();
  }

 private:
  std::size_t next_ = 0;
};

class LeastLoad final : public Policy {
 public:
  std::size_t choose(std::span<const Candidate> candidates, const RequestView&) override {
    // Begins after the last choice, so that equals take turns.
    const std::size_t begin = next_++ % candidates.size();
    std::size_t best = begin;
    for (std::size_t i = 1; i < candidates.size(); ++i) {
      const std::size_t at = (begin + i) % candidates.size();
      if (candidates[at].inflight < candidates[best].inflight) best = at;
    }
    return best;
  }

 private:
  std::size_t next_ = 0;
};

class PowerOfTwo final : public Policy {
 public:
  explicit PowerOfTwo(std::uint64_t seed) : random_(seed) {}
  std::size_t choose(std::span<const Candidate> candidates, const RequestView&) override {
    if (candidates.size() == 1) return 0;
    const std::size_t first = random_() % candidates.size();
    // One of the other candidates, each equally likely.
    const std::size_t second =
        (first + 1 + random_() % (candidates.size() - 1)) % candidates.size();
    return candidates[second].inflight < candidates[first].inflight ? second : first;
  }

 private:
  std::mt19937_64 random_;
};

class ConsistentHash final : public Policy {
 public:
  std::size_t choose(std::span<const Candidate> candidates, const RequestView& request) override {
    if (request.affinity == 0) return least_load_.choose(candidates, request);
    std::size_t sum = 1;  // Includes the request to be placed.
    for (const Candidate& each : candidates) sum += each.inflight;
    // ceil(1.25 x mean): at least one engine is always below it.
    const std::size_t limit = (5 * sum + 4 * candidates.size() - 1) / (4 * candidates.size());
    std::size_t best = candidates.size();
    std::uint64_t best_weight = 0;
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      if (candidates[i].inflight + 1 > limit) continue;
      const std::uint64_t pair[2] = {candidates[i].id, request.affinity};
      const std::uint64_t weight = XXH3_64bits(pair, sizeof(pair));
      if (best == candidates.size() || weight > best_weight) {
        best = i;
        best_weight = weight;
      }
    }
    return best;
  }

 private:
  LeastLoad least_load_;
};

}  // namespace

Result<std::unique_ptr<Policy>> make_policy(std::string_view name, std::uint64_t seed) {
  if (name == "round-robin") return std::make_unique<RoundRobin>();
  if (name == "least-load") return std::make_unique<LeastLoad>();
  if (name == "power-of-two") return std::make_unique<PowerOfTwo>(seed);
  if (name == "consistent-hash") return std::make_unique<ConsistentHash>();
  return fail(
      Errc::kInvalidArgument,
      "unknown policy \"{}\"; the policies are kv-aware, round-robin, least-load, power-of-two and "
      "consistent-hash",
      name);
}

std::uint64_t hash_key(std::string_view text) {
  const std::uint64_t hash = XXH3_64bits(text.data(), text.size());
  return hash == 0 ? 1 : hash;
}

}  // namespace pegaflow::router
