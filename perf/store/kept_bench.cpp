// What it costs to keep the rows of a million blocks for the next process, and to adopt them.
//
// Times are CPU seconds of this thread; the caches are emptied before each measured call, because
// other threads use them between two requests. Both stores alternate.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <fmt/core.h>

#include "base/assert.h"
#include "base/clock.h"
#include "engine/block_store.h"
#include "engine/kept/kept_tables.h"

namespace pegaflow {
namespace {

using engine::BlockStore;
using engine::KeptTables;

constexpr std::uint64_t kBlocks = std::uint64_t{1} << 20;
constexpr std::uint64_t kPage = 4096;
constexpr std::size_t kSlice = 256;
constexpr int kRounds = 400;

double cpu_us() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

double quantile(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(part * static_cast<double>(values.size() - 1))];
}

/// Replaces the content of the caches.
void empty_caches() {
  static std::vector<unsigned char> bytes(std::size_t{96} << 20, 1);
  for (std::size_t i = 0; i < bytes.size(); i += 64) ++bytes[i];
}

/// A full store.
class Store {
 public:
  explicit Store(KeptTables* kept) {
    auto made = BlockStore::create(
        {.pool_bytes = kBlocks * kPage, .kept = kept, .slice_blocks = kSlice}, clock_);
    PEGA_ASSERT(made, "{}", made.error().detail);
    store_ = std::move(*made);
    const auto shape = store_->add_shape({{{.page_bytes = kPage}}});
    PEGA_ASSERT(shape, "{}", shape.error().detail);
    finish();
    space_ = store_->make_space(*shape);
    holder_ = store_->add_holder(1, Id128{1, 1});
    while (store_->stats().evictions == 0) save();
  }

  /// Microseconds of CPU of a reserve, by eviction, and of its publish.
  struct Cost {
    double reserve_us = 0;
    double publish_us = 0;
  };
  Cost save() {
    std::vector<BlockKey> keys(kSlice);
    for (BlockKey& key : keys) {
      for (std::size_t i = 0; i < key.bytes.size(); i += 8) {
        const std::uint64_t word = random_();
        std::memcpy(key.bytes.data() + i, &word, sizeof word);
      }
    }
    const JobId job{Id128{1, 1}, ++jobs_};
    if (is_cold_) empty_caches();
    Cost cost;
    double start = cpu_us();
    const auto frames = store_->reserve(holder_, space_, job, 0, keys);
    cost.reserve_us = cpu_us() - start;
    PEGA_ASSERT(frames, "{}", frames.error().detail);
    if (is_cold_) empty_caches();
    start = cpu_us();
    const auto left = store_->publish(holder_, job);
    cost.publish_us = cpu_us() - start;
    PEGA_ASSERT(left && *left == 0, "blocks are left");
    finish();
    return cost;
  }
  void be_cold() { is_cold_ = true; }
  [[nodiscard]] engine::SpaceId space() const { return space_; }
  [[nodiscard]] std::uint32_t sealed() const { return store_->stats().sealed; }

 private:
  void finish() {
    while (store_->work()) {
    }
  }
  SteadyClock clock_;
  std::mt19937_64 random_{3};
  std::unique_ptr<BlockStore> store_;
  engine::SpaceId space_{};
  engine::HolderId holder_{};
  std::uint64_t jobs_ = 0;
  bool is_cold_ = false;
};

void compare(const char* what, const std::vector<double>& kept, const std::vector<double>& plain,
             double target) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < kept.size(); ++i) ratios.push_back(kept[i] / plain[i]);
  fmt::print(
      "{:44} {:7.1f} us  without {:7.1f} us  ratio {:.3f}, target {:.2f}  n={} ratios p10 "
      "{:.2f} p90 {:.2f}\n",
      what, quantile(kept, 0.5), quantile(plain, 0.5), quantile(kept, 0.5) / quantile(plain, 0.5),
      target, kept.size(), quantile(ratios, 0.1), quantile(ratios, 0.9));
}

void measure_saves(Store& kept, Store& plain) {
  kept.be_cold();
  plain.be_cold();
  std::vector<double> reserve;
  std::vector<double> reserve_plain;
  std::vector<double> publish;
  std::vector<double> publish_plain;
  for (int round = 0; round < kRounds; ++round) {
    const Store::Cost with = kept.save();
    const Store::Cost without = plain.save();
    reserve.push_back(with.reserve_us);
    reserve_plain.push_back(without.reserve_us);
    publish.push_back(with.publish_us);
    publish_plain.push_back(without.publish_us);
  }
  compare("publish of 256, cold caches", publish, publish_plain, 1.03);
  compare("reserve of 256 by eviction, cold caches", reserve, reserve_plain, 1.05);
}

void measure_adoption(const KeptTables& tables, engine::SpaceId space, std::uint32_t sealed) {
  std::vector<double> seconds;
  for (int round = 0; round < 7; ++round) {
    auto opened = KeptTables::open(UniqueFd(::fcntl(tables.fd(), F_DUPFD_CLOEXEC, 0)));
    PEGA_ASSERT(opened, "{}", opened.error().detail);
    const SteadyClock clock;
    empty_caches();
    const TimePoint start = clock.now();
    auto store = BlockStore::create({.pool_bytes = kBlocks * kPage, .kept = &*opened}, clock);
    PEGA_ASSERT(store, "{}", store.error().detail);
    const BlockStore::FormerShape shape{0, {{{.page_bytes = kPage}}}};
    const BlockStore::FormerSpace live{space, 0};
    const auto adopted = (*store)->adopt(std::span(&shape, 1), std::span(&live, 1));
    seconds.push_back(std::chrono::duration<double>(clock.now() - start).count());
    PEGA_ASSERT(adopted && adopted->blocks == sealed, "blocks are missing");
  }
  fmt::print("{:44} {:7.3f} s   of {} blocks, target 0.8 s to serving  n=7 min {:.3f} max {:.3f}\n",
             "adoption", quantile(seconds, 0.5), sealed, quantile(seconds, 0),
             quantile(seconds, 1));
}

void run() {
  const SteadyClock clock;
  auto tables = KeptTables::create({.pool = {1, 1}, .pool_bytes = kBlocks * kPage}, clock);
  PEGA_ASSERT(tables, "{}", tables.error().detail);
  engine::SpaceId space{};
  std::uint32_t sealed = 0;
  {
    Store kept(&*tables);
    Store plain(nullptr);
    measure_saves(kept, plain);
    space = kept.space();
    sealed = kept.sealed();
  }
  measure_adoption(*tables, space, sealed);
}

}  // namespace
}  // namespace pegaflow

int main() {
  pegaflow::run();
  return 0;
}
