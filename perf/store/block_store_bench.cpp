// The cost of the block store for the thread that owns it, at one million blocks.
//
// Times are CPU seconds of this thread, because a shared machine may suspend it at any time; the
// caches are emptied before each run, because other threads use them between two requests.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <time.h>
#include <unistd.h>

#include <fmt/core.h>

#include "base/assert.h"
#include "base/clock.h"
#include "engine/block_store.h"
#include "engine/demand/demand.h"

namespace pegaflow {
namespace {

constexpr std::uint32_t kBlocks = 1'000'000;
// Like the server.
constexpr std::uint32_t kSlice = 256;
constexpr std::uint32_t kPublishSlice = 1024;
constexpr std::size_t kClaimSlice = 1024;
constexpr std::size_t kOpenSlice = 2048;
constexpr std::uint32_t kShards = 8;  ///< A further shard costs nothing in the tables.
constexpr std::uint64_t kBlockBytes = kShards * std::uint64_t{32} * 1024;

double cpu_us() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

std::uint64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::uint64_t total = 0;
  std::uint64_t resident = 0;
  statm >> total >> resident;
  return resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

class CacheEmptier {
 public:
  void run() {
    for (std::size_t i = 0; i < bytes_.size(); i += 64) ++bytes_[i];
  }

 private:
  std::vector<unsigned char> bytes_ = std::vector<unsigned char>(std::size_t{96} << 20, 1);
};

/// The measurements of one figure, printed beside its bound with n and spread.
class Figures {
 public:
  Figures(std::string name, std::string unit, double bound)
      : name_(std::move(name)), unit_(std::move(unit)), bound_(bound) {}
  void add(double figure) { figures_.push_back(figure); }
  [[nodiscard]] double last() const { return figures_.back(); }
  void set_bound(double bound) { bound_ = bound; }
  /// Prints the median beside the bound.
  void print() { print(0.5, "median"); }
  /// Prints the maximum, for what must never be longer.
  void print_longest() { print(1.0, "longest"); }

 private:
  void print(double share, const char* which) {
    std::sort(figures_.begin(), figures_.end());
    const auto at = [&](double part) {
      return figures_[static_cast<std::size_t>(part * static_cast<double>(figures_.size() - 1))];
    };
    const std::string bound =
        bound_ == 0 ? "no bound of its own        "
                    : fmt::format("bound {:7.1f}  ratio {:5.2f}", bound_, at(share) / bound_);
    fmt::print("{:56} {:8.1f} {:2} {:7}  {}  n={} p10 {:.1f} p50 {:.1f} p90 {:.1f} max {:.1f}\n",
               name_, at(share), unit_, which, bound, figures_.size(), at(0.1), at(0.5), at(0.9),
               at(1.0));
    std::fflush(stdout);
  }

  std::string name_;
  std::string unit_;
  double bound_;
  std::vector<double> figures_;
};

class Bench {
 public:
  Bench() {
    engine::BlockStore::Options options;
    options.pool_bytes = kBlocks * kBlockBytes;
    options.instance_share = 1.0;
    options.server_share = 1.0;
    options.slice_blocks = kSlice;
    const std::uint64_t before = resident_bytes();
    auto store = engine::BlockStore::create(options, clock_);
    PEGA_ASSERT(store, "{}", store.error().detail);
    store_ = std::move(*store);
    const auto shape = store_->add_shape(
        {std::vector(kShards, engine::Shape::Shard{.page_bytes = kBlockBytes / kShards})});
    PEGA_ASSERT(shape, "{}", shape.error().detail);
    while (store_->work()) {
    }
    space_ = store_->make_space(*shape);
    holder_ = store_->add_holder(1, Id128{1, 1});
    // Chains of 512 blocks, filled in a random order, so that neighbors in time are not neighbors
    // in memory: the state of a store after hours.
    for (std::uint32_t i = 0; i < kBlocks; ++i) keys_.push_back(new_key());
    const std::uint64_t keys_bytes = keys_.capacity() * sizeof(BlockKey);
    std::vector<std::uint32_t> order(kBlocks);
    for (std::uint32_t i = 0; i < kBlocks; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random_);
    Figures seal("first fill: longest reserve or publish of 256", "us", 500);
    std::vector<BlockKey> batch;
    for (std::uint32_t i = 0; i < kBlocks; i += kSlice) {
      batch.clear();
      for (std::uint32_t j = i; j < std::min(i + kSlice, kBlocks); ++j) {
        batch.push_back(keys_[order[j]]);
      }
      double start = cpu_us();
      reserve(batch);
      seal.add(cpu_us() - start);
      start = cpu_us();
      publish();
      seal.add(cpu_us() - start);
    }
    const std::uint64_t grown = resident_bytes() - before - keys_bytes - order.capacity() * 4;
    seal.print_longest();
    Figures counted("memory a block of 8 shards, by memory_bytes()", "B", 128);
    counted.add(static_cast<double>(store_->memory_bytes()) / kBlocks);
    counted.print();
    Figures resident("memory a block of 8 shards, resident", "B", 128);
    resident.add(static_cast<double>(grown) / kBlocks);
    resident.print();
  }

  void lookup() {
    // The bound of the same run: the bare cache misses of any such lookup, one in 16 MiB of index
    // and one in 64 MiB of rows for each key, 32 in flight at a time.
    std::vector<std::uint64_t> index(std::size_t{2} << 20, 1);
    std::vector<std::uint64_t> rows(std::size_t{8} << 20, 1);
    std::vector<double> bare;
    Figures figures("lookup of 8,192 of 1 M keys, cold caches", "us", 0);
    for (int run = 0; run < 100; ++run) {
      bare.push_back(bare_misses(index, rows));
      const auto keys = random_keys(8192);
      emptier_.run();
      const double start = cpu_us();
      const std::size_t found = store_->lookup(space_, keys);
      figures.add(cpu_us() - start);
      looked_up_us_.push_back(figures.last());
      PEGA_ASSERT(found == keys.size(), "{} found", found);
    }
    std::sort(bare.begin(), bare.end());
    figures.set_bound(bare[bare.size() / 2]);
    figures.print();
  }

  /// The cost of the estimated ceilings of hit rates, beside the lookup that they observe.
  void demand() {
    std::sort(looked_up_us_.begin(), looked_up_us_.end());
    using std::chrono::hours;
    auto demand = engine::Demand::create({std::chrono::minutes(5), hours(1), hours(24)}, clock_);
    PEGA_ASSERT(demand, "{}", demand.error().detail);
    const double lookup_us = looked_up_us_[looked_up_us_.size() / 2];
    Figures found("these keys counted in 3 windows' sketches, beside lookup", "us", lookup_us);
    Figures fresh("8,192 new keys counted there, beside lookup", "us", lookup_us);
    for (int run = 0; run < 100; ++run) {
      const auto keys = random_keys(8192);
      emptier_.run();
      double start = cpu_us();
      (*demand)->requested(space_, keys, keys.size(), kBlockBytes);
      found.add(cpu_us() - start);
      std::vector<BlockKey> unknown;
      for (int i = 0; i < 8192; ++i) unknown.push_back(new_key());
      emptier_.run();
      start = cpu_us();
      (*demand)->requested(space_, unknown, 0, kBlockBytes);
      fresh.add(cpu_us() - start);
    }
    found.print();
    fresh.print();
  }

  void claim() {
    Figures claim("claim of 8,192 of 1 M keys, cold caches", "us", 0);
    Figures claim_slice("its longest slice, 1,024 keys", "us", 500);
    Figures unclaim("unclaim of them, longest slice", "us", 500);
    Figures open("open of them, cold caches", "us", 0);
    Figures open_slice("its longest slice, 2,048 blocks", "us", 500);
    for (int run = 0; run < 50; ++run) {
      const auto keys = random_keys(8192);
      const Id128 token{2, ++names_};
      emptier_.run();
      double sum = 0;
      for (std::size_t i = 0; i < keys.size(); i += kClaimSlice) {
        const auto slice = std::span(keys).subspan(i, kClaimSlice);
        const double start = cpu_us();
        const auto count = i == 0 ? store_->claim(holder_, space_, slice, token)
                                  : store_->claim_more(holder_, token, slice);
        claim_slice.add(cpu_us() - start);
        sum += claim_slice.last();
        PEGA_ASSERT(count && *count == slice.size(), "the claim is short");
      }
      claim.add(sum);
      emptier_.run();
      sum = 0;
      for (std::size_t i = 0; i < keys.size(); i += kOpenSlice) {
        const double start = cpu_us();
        const auto pages =
            store_->open(holder_, token, 0, keys.size(), engine::PinId{names_}, kOpenSlice);
        open_slice.add(cpu_us() - start);
        sum += open_slice.last();
        PEGA_ASSERT(pages && pages->frames.size() == kOpenSlice, "the pin is short");
      }
      open.add(sum);
      store_->release(holder_, engine::PinId{names_});
      finish(nullptr);
      emptier_.run();
      const double start = cpu_us();
      store_->unclaim(holder_, token);
      unclaim.add(cpu_us() - start);
      finish(&unclaim);
    }
    claim.print();
    claim_slice.print_longest();
    open.print();
    open_slice.print_longest();
    unclaim.print_longest();
  }

  void save() { measure_save("reserve + publish of 4,096 blocks, all by eviction"); }

  /// Like save(), and a reader takes the new entries after each save, like the connector.
  void save_with_journal() {
    const auto kept = store_->keep_journal();
    PEGA_ASSERT(kept, "{}", kept.error().detail);
    std::uint64_t position = store_->journal(space_, engine::BlockStore::kJournalEnd, 0).next;
    Figures read("journal of a save of 4,096 read, cold caches", "us", 500);
    measure_save("the same with a journal for KV events", [&] {
      emptier_.run();
      const double start = cpu_us();
      const engine::BlockStore::JournalPart part = store_->journal(space_, position, 1 << 20);
      read.add(cpu_us() - start);
      PEGA_ASSERT(!part.has_lost && !part.has_more, "a part of the journal is missing");
      PEGA_ASSERT(part.entries.size() == 2 * 4096, "{} entries", part.entries.size());
      position = part.next;
    });
    read.print();
  }

  void holder_gone() {
    const engine::HolderId reader = store_->add_holder(2, Id128{1, 2});
    const auto keys = std::span(keys_).last(100'000);
    const std::size_t there = store_->lookup(space_, keys);
    PEGA_ASSERT(there == keys.size(), "{} of the latest blocks are present", there);
    for (std::size_t i = 0; i < keys.size(); i += 1000) {
      const Id128 token{3, ++names_};
      const auto count = store_->claim(reader, space_, keys.subspan(i, 1000), token);
      PEGA_ASSERT(count && *count == 1000, "the claim is short");
      for (std::size_t j = 0; j < 1000; ++j) {
        const auto pages = store_->open(reader, token, j, 1, engine::PinId{++names_});
        PEGA_ASSERT(pages, "{}", pages.error().detail);
      }
    }
    Figures slices("holder_lost, then gone with 100,000 pins: longest slice", "us", 500);
    emptier_.run();
    const double start = cpu_us();
    store_->holder_lost(reader);
    slices.add(cpu_us() - start);
    const double then = cpu_us();
    store_->holder_gone(reader);
    slices.add(cpu_us() - then);
    finish(&slices);
    PEGA_ASSERT(store_->stats().pins == 0 && store_->is_idle(), "pins are left");
    slices.print_longest();
  }

  void reset_and_cleanup() {
    Figures slices("cleanup of 1 M blocks: longest slice", "us", 500);
    emptier_.run();
    const double start = cpu_us();
    store_->start_cleanup();
    slices.add(cpu_us() - start);
    finish(&slices);
    PEGA_ASSERT(store_->cleanup().evicted_blocks == kBlocks, "a block is left");
    slices.print_longest();
  }

 private:
  void measure_save(
      const char* what, const std::function<void()>& then = [] {}) {
    Figures total(what, "us", 1500);
    Figures longest("its longest call, 256 blocks reserved or 1,024 published", "us", 500);
    for (int run = 0; run < 100; ++run) {
      std::vector<BlockKey> fresh;
      for (int i = 0; i < 4096; ++i) fresh.push_back(new_key());
      emptier_.run();
      double sum = 0;
      double worst = 0;
      ++names_;
      const auto timed = [&](const std::function<void()>& call) {
        const double start = cpu_us();
        call();
        sum += cpu_us() - start;
        worst = std::max(worst, cpu_us() - start);
      };
      for (std::size_t i = 0; i < fresh.size(); i += kSlice) {
        timed([&] { reserve_slice(std::span(fresh).subspan(i, kSlice)); });
      }
      std::size_t left = 1;
      while (left != 0) {
        timed([&] { left = *store_->publish(holder_, job(), kPublishSlice); });
      }
      total.add(sum);
      longest.add(worst);
      // lookup() finds them again; the blocks that they replaced are missing.
      for (const BlockKey& key : fresh) keys_.push_back(key);
      PEGA_ASSERT(store_->lookup(space_, fresh) == fresh.size(), "a saved block is missing");
      then();
    }
    total.print();
    longest.print_longest();
  }
  BlockKey new_key() {
    BlockKey key;
    for (std::size_t i = 0; i < key.bytes.size(); i += 8) {
      const std::uint64_t word = random_();
      std::memcpy(key.bytes.data() + i, &word, sizeof word);
    }
    return key;
  }
  std::vector<BlockKey> random_keys(std::size_t count) {
    std::vector<BlockKey> keys(count);
    for (BlockKey& key : keys) key = keys_[random_() % kBlocks];
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    while (keys.size() < count) keys.push_back(keys_[random_() % kBlocks]);
    std::shuffle(keys.begin(), keys.end(), random_);
    return keys;
  }
  JobId job() const { return {Id128{1, 1}, names_}; }
  double bare_misses(const std::vector<std::uint64_t>& index,
                     const std::vector<std::uint64_t>& rows) {
    std::vector<std::uint64_t> places(8192);
    for (std::uint64_t& place : places) place = random_();
    emptier_.run();
    std::uint64_t sum = 0;
    const double start = cpu_us();
    for (std::size_t begin = 0; begin < places.size(); begin += 32) {
      const auto each = [&](auto&& use) {
        for (std::size_t i = begin; i < begin + 32; ++i) use(places[i]);
      };
      each([&](std::uint64_t place) { __builtin_prefetch(&index[place % index.size()]); });
      each([&](std::uint64_t place) { __builtin_prefetch(&rows[place % rows.size()]); });
      each([&](std::uint64_t place) {
        sum += index[place % index.size()] + rows[place % rows.size()];
      });
    }
    const double took = cpu_us() - start;
    PEGA_ASSERT(sum == 2 * places.size(), "{}", sum);
    return took;
  }
  void reserve_slice(std::span<const BlockKey> keys) {
    const auto frames = store_->reserve(holder_, space_, job(), 0, keys);
    PEGA_ASSERT(
        frames && std::find(frames->begin(), frames->end(), engine::kNoFrame) == frames->end(),
        "a block got no frame");
  }
  void reserve(std::span<const BlockKey> keys) {
    ++names_;
    reserve_slice(keys);
  }
  void publish() {
    const auto left = store_->publish(holder_, job());
    PEGA_ASSERT(left && *left == 0, "blocks are left");
  }
  void finish(Figures* slices) {
    while (store_->has_work()) {
      const double start = cpu_us();
      store_->work();
      if (slices != nullptr) slices->add(cpu_us() - start);
    }
  }

  SteadyClock clock_;
  std::mt19937_64 random_{1};
  CacheEmptier emptier_;
  std::unique_ptr<engine::BlockStore> store_;
  engine::SpaceId space_{};
  engine::HolderId holder_{};
  std::vector<BlockKey> keys_;
  std::uint64_t names_ = 0;
  std::vector<double> looked_up_us_;
};

/// A full store on one or two NUMA nodes whose blocks all lie on the first.
class FullStore {
 public:
  struct Options {
    std::uint64_t bytes_of_node = 0;
    std::uint32_t numa_nodes = 1;
    std::uint64_t page_bytes = 0;
    /// The page size of a second shape that saves as much; 0: there is none.
    std::uint64_t rival_page_bytes = 0;
  };
  explicit FullStore(const Options& wanted) {
    engine::BlockStore::Options options;
    options.pool_bytes = wanted.bytes_of_node * wanted.numa_nodes;
    options.numa_nodes = wanted.numa_nodes;
    options.instance_share = 1.0;
    options.server_share = 1.0;
    options.slice_blocks = kSlice;
    auto store = engine::BlockStore::create(options, clock_);
    PEGA_ASSERT(store, "{}", store.error().detail);
    store_ = std::move(*store);
    add_shape(wanted.page_bytes);
    if (wanted.rival_page_bytes != 0) add_shape(wanted.rival_page_bytes);
    holder_ = store_->add_holder(1, Id128{1, 1});
    while (store_->stats().evictions == 0) save_all();
  }

  /// A reserve of 256 blocks of the first shape, all by eviction, with cold caches.
  double reserve_us() {
    for (std::size_t rival = 1; rival < spaces_.size(); ++rival) save(spaces_[rival]);
    emptier_.run();
    return save(spaces_[0]);
  }

 private:
  void add_shape(std::uint64_t page_bytes) {
    const auto shape = store_->add_shape({{engine::Shape::Shard{.page_bytes = page_bytes}}});
    PEGA_ASSERT(shape, "{}", shape.error().detail);
    while (store_->work()) {
    }
    spaces_.push_back(store_->make_space(*shape));
  }
  void save_all() {
    for (const engine::SpaceId space : spaces_) save(space);
  }
  double save(engine::SpaceId space) {
    std::vector<BlockKey> keys(kSlice);
    for (BlockKey& key : keys) {
      for (std::size_t i = 0; i < key.bytes.size(); i += 8) {
        const std::uint64_t word = random_();
        std::memcpy(key.bytes.data() + i, &word, sizeof word);
      }
    }
    const JobId job{Id128{1, 1}, ++jobs_};
    const double start = cpu_us();
    const auto frames = store_->reserve(holder_, space, job, 0, keys);
    const double took = cpu_us() - start;
    PEGA_ASSERT(frames, "{}", frames.error().detail);
    PEGA_ASSERT(store_->publish(holder_, job), "job {} was forgotten", jobs_);
    while (store_->work()) {
    }
    return took;
  }

  SteadyClock clock_;
  std::mt19937_64 random_{2};
  CacheEmptier emptier_;
  std::unique_ptr<engine::BlockStore> store_;
  std::vector<engine::SpaceId> spaces_;
  engine::HolderId holder_{};
  std::uint64_t jobs_ = 0;
};

/// The cost of a large pool for a reserve: free units of another NUMA node, free units that are too
/// few for an extent, extents of another shape that might be taken. The bound is a store without
/// these and with blocks of the same size; the two alternate, so that both see the same machine.
void reserve_in_large_pools() {
  constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
  constexpr std::uint64_t kTiB = std::uint64_t{1} << 40;
  constexpr std::uint64_t kUnit = 64 * kMiB;
  constexpr std::uint64_t kUnits = 32'766;  // A multiple of 3, just below 2 TiB.
  struct Row {
    const char* what;
    FullStore::Options plain;
    FullStore::Options beside;
  };
  const FullStore::Options one_node{.bytes_of_node = 2 * kTiB, .page_bytes = 2 * kMiB};
  const FullStore::Options two_nodes{
      .bytes_of_node = 2 * kTiB, .numa_nodes = 2, .page_bytes = 2 * kMiB};
  FullStore::Options two_shapes = two_nodes;
  two_shapes.rival_page_bytes = 3 * kMiB;
  for (const Row& row : {
           Row{"4 TiB, two NUMA nodes, one full, pages of 2 MiB", one_node, two_nodes},
           Row{"2 TiB, one unit left, blocks of 1.5 units",
               {.bytes_of_node = kUnits * kUnit, .page_bytes = kUnit * 3 / 2},
               {.bytes_of_node = (kUnits + 1) * kUnit, .page_bytes = kUnit * 3 / 2}},
           Row{"4 TiB, two NUMA nodes, beside a second shape", two_nodes, two_shapes},
       }) {
    FullStore plain(row.plain);
    FullStore beside(row.beside);
    std::vector<double> bound;
    Figures figures(fmt::format("reserve of 256: {}", row.what), "us", 0);
    for (int run = 0; run < 100; ++run) {
      bound.push_back(plain.reserve_us());
      figures.add(beside.reserve_us());
    }
    std::sort(bound.begin(), bound.end());
    figures.set_bound(bound[bound.size() / 2]);
    figures.print();
  }
}

}  // namespace
}  // namespace pegaflow

int main() {
  pegaflow::reserve_in_large_pools();
  pegaflow::Bench bench;
  bench.lookup();
  bench.demand();
  bench.claim();
  bench.save();
  bench.save_with_journal();
  bench.holder_gone();
  bench.reset_and_cleanup();
  return 0;
}
