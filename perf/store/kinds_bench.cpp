// The cost of lookups and claims over several kinds of blocks, for the RPC thread: prompts of
// 8,192 units and four kinds, in a cache with a million other blocks.
//
// Times are CPU seconds of this thread, with cold caches: other threads use them between two
// requests.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include <time.h>

#include <fmt/core.h>

#include "base/assert.h"
#include "base/clock.h"
#include "server/cache/cache_service.h"

namespace pegaflow {
namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::size_t kUnits = 8192;
constexpr std::size_t kChains = 16;
constexpr std::size_t kOthers = 1'000'000;
constexpr int kRuns = 100;

double cpu_us() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

/// Prints the percentiles of the times of `run`, each after the caches were emptied.
template <typename Run>
void measure(const char* name, Run&& run) {
  static std::vector<unsigned char> other(std::size_t{96} << 20, 1);
  std::vector<double> times;
  for (int i = 0; i < kRuns; ++i) {
    for (std::size_t at = 0; at < other.size(); at += 64) ++other[at];
    times.push_back(run(i));
  }
  std::sort(times.begin(), times.end());
  fmt::print("{:62} {:8.1f} us median, p99 {:8.1f}, n={}\n", name, times[times.size() / 2],
             times[times.size() * 99 / 100], times.size());
}

Registration engine() {
  const auto kind = [](wire::Kind::Rule rule, std::uint32_t tokens, std::uint32_t block) {
    return RegisteredKind{
        .rule = rule, .tokens = tokens, .block_tokens = block, .page_bytes = kPage};
  };
  return {
      .instance = "engine",
      .factors = {{"weights", "a"}},
      .kinds = {kind(wire::Kind::Rule::PREFIX, 0, 16), kind(wire::Kind::Rule::TRAILING, 1023, 16),
                kind(wire::Kind::Rule::CHUNK, 8192, 16), kind(wire::Kind::Rule::STATE, 0, 512)},
      .unit_tokens = 16,
      .alignment_tokens = 512};
}

class Bench {
 public:
  Bench() {
    auto made = server::CacheService::create(
        {.store = {.pool_bytes = (kOthers + 4 * kChains * kUnits) * kPage,
                   .instance_share = 1.0,
                   .server_share = 1.0}},
        clock_, [](const Id128&) {});
    PEGA_ASSERT(made, "{}", made.error().detail);
    service_ = std::move(*made);
    const bool is_connected = service_
                                  ->connected(worker_, {.process = {2, 2},
                                                        .previous_connection = {},
                                                        .build = "bench",
                                                        .watch = std::make_shared<int>(0)})
                                  .has_value();
    PEGA_ASSERT(is_connected && service_->register_rank(worker_, engine()), "not registered");
    for (std::size_t chain = 0; chain < kChains; ++chain) chains_.push_back(new_keys(kUnits));
    // In slices of all chains in turn, between other blocks: neighbors in time are not neighbors
    // in memory.
    const std::size_t others = kOthers / (kUnits / 64 * kChains);
    for (std::size_t first = 0; first < kUnits; first += 64) {
      for (const std::vector<BlockKey>& chain : chains_) {
        save(0, std::span(chain).subspan(first, 64));
        save(1, std::span(chain).subspan(first, 64));
        save(2, std::span(chain).subspan(first, 64));
        save(3, std::vector<BlockKey>{chain[first + 31], chain[first + 63]});
        save(0, new_keys(others));
      }
    }
  }

  void lookup(const char* name, std::span<const std::vector<BlockKey>> prompts,
              std::size_t wanted) {
    measure(name, [&](int run) {
      const std::vector<BlockKey>& keys = prompts[static_cast<std::size_t>(run) % prompts.size()];
      const double start = cpu_us();
      const auto found = service_->restorable(worker_, keys, 0);
      const double time = cpu_us() - start;
      PEGA_ASSERT(found && found->units == wanted, "{} units found", found ? found->units : 0);
      return time;
    });
  }
  void claim() {
    measure("claim of 8,192 units, 4 kinds", [&](int run) {
      const Id128 token{3, static_cast<std::uint64_t>(run) + 1};
      const auto& keys = chains_[static_cast<std::size_t>(run) % kChains];
      const double start = cpu_us();
      const auto claimed = service_->claim_restorable(worker_, token, keys, 0);
      const double time = cpu_us() - start;
      PEGA_ASSERT(claimed && claimed->units == kUnits, "the claim is short");
      const bool is_ended = service_->unclaim(worker_, token).has_value();
      PEGA_ASSERT(is_ended, "the claim has not ended");
      while (service_->work()) {
      }
      return time;
    });
  }
  void run() {
    lookup("lookup of 8,192 units, 4 kinds, all restorable", chains_, kUnits);
    std::vector<std::vector<BlockKey>> unknown;
    for (int i = 0; i < 16; ++i) unknown.push_back(new_keys(kUnits));
    lookup("lookup of 8,192 unknown units", unknown, 0);
    // Full attention is there, and no state: the search goes down to the first boundary.
    std::vector<std::vector<BlockKey>> stateless;
    for (int i = 0; i < 4; ++i) {
      stateless.push_back(new_keys(kUnits));
      for (std::size_t first = 0; first < kUnits; first += 256) {
        save(0, std::span(stateless.back()).subspan(first, 256));
        save(1, std::span(stateless.back()).subspan(first, 256));
        save(2, std::span(stateless.back()).subspan(first, 256));
      }
    }
    lookup("lookup of 8,192 units without a state", stateless, 0);
    claim();
  }

 private:
  std::vector<BlockKey> new_keys(std::size_t count) {
    std::vector<BlockKey> keys(count);
    for (BlockKey& key : keys) {
      for (std::size_t word = 0; word < 4; ++word) {
        const std::uint64_t bits = random_();
        std::memcpy(key.bytes.data() + word * 8, &bits, sizeof bits);
      }
    }
    return keys;
  }
  void save(std::size_t kind, std::span<const BlockKey> keys) {
    const JobId job{{4, 4}, ++jobs_};
    const auto slots =
        service_->reserve(worker_, job, 0, keys, false, engine::BlockStore::NoRoom::kSkip, kind);
    PEGA_ASSERT(slots && service_->publish(worker_, job) == 0, "not saved");
  }

  SteadyClock clock_;
  std::mt19937_64 random_{1};  // NOLINT(cert-msc51-cpp): the same keys in each run.
  std::unique_ptr<server::CacheService> service_;
  Id128 worker_{1, 1};
  std::vector<std::vector<BlockKey>> chains_;
  std::uint64_t jobs_ = 0;
};

}  // namespace
}  // namespace pegaflow

int main() { pegaflow::Bench().run(); }
