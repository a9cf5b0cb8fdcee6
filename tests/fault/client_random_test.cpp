// Thousands of random saves and loads of two engines, while their server is killed and stopped and
// their connections are cut. Loaded bytes must be those that were saved under the key, and every
// accepted job must be reported once.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <optional>
#include <random>
#include <thread>

#include <doctest/doctest.h>

#include "tests/support/seed.h"
#include "tests/support/server_process.h"
#include "tests/support/test_engine.h"
#include "transport/host/host_device.h"

namespace pegaflow::testing {
namespace {

using std::chrono::milliseconds;
using Blocks = std::vector<std::uint32_t>;
using Numbers = std::vector<std::uint64_t>;

constexpr std::size_t kBlocks = 256;
constexpr std::uint64_t kKeys = 600;  ///< More than the pool has slots, so that it evicts.
constexpr std::uint64_t kGarbage = 0xBAD;

std::size_t jobs_wanted() {
  const char* const given = std::getenv("PEGA_RANDOM_JOBS");
  return given != nullptr ? std::stoul(given) : 10'000;
}

/// One engine with its blocks and its jobs in flight.
class Player {
 public:
  Player(const std::string& socket, const std::string& instance, int threads, Mover::Verify verify)
      : memory_(engine_memory(2, 2048, kBlocks)),
        device_(HostDevice::create({.threads = threads}).value()) {
    TestEngine::Options options;
    // The deadlines of real engines, since the server is stopped at times.
    options.session = LinkOptions();
    options.mover = Mover::Options();
    options.socket = socket;
    options.instance = instance;
    options.session.reconnect_interval = options.mover.link.reconnect_interval = milliseconds(10);
    options.session.breaker_probe_interval = options.mover.link.breaker_probe_interval =
        milliseconds(10);
    options.mover.max_jobs = 64;
    options.mover.verify = verify;
    engine_ = std::make_unique<TestEngine>(options, memory_, *device_);
    for (std::uint32_t block = 0; block < kBlocks; ++block) free_.push_back(block);
  }

  TestEngine& engine() { return *engine_; }

  /// True when a job was accepted.
  bool save(std::mt19937_64& random) {
    const Numbers numbers = some_numbers(random);
    const std::optional<Blocks> blocks = take_blocks(random, numbers.size());
    if (!blocks) return false;
    const std::uint64_t job = ++engine_->last_job;
    if (!engine_->start_save(job, numbers, *blocks)) return give_back(*blocks);
    under_way_[{Mover::Finished::Kind::kSave, job}] = {numbers, *blocks, {}};
    return true;
  }

  bool load(std::mt19937_64& random) {
    Numbers numbers = some_numbers(random);
    const auto claimed = engine_->claim(numbers);
    if (!claimed || claimed->blocks == 0) return false;
    const std::size_t first = random() % claimed->blocks;
    numbers.resize(claimed->blocks);
    numbers.erase(numbers.begin(), numbers.begin() + static_cast<std::ptrdiff_t>(first));
    const std::optional<Blocks> blocks = take_blocks(random, numbers.size());
    const std::uint64_t load = ++engine_->last_job;
    if (!blocks || !engine_->mover().load(load, claimed->token, first, *blocks)) {
      engine_->session().unclaim(claimed->token);
      return blocks ? give_back(*blocks) : false;
    }
    under_way_[{Mover::Finished::Kind::kLoad, load}] = {numbers, *blocks, claimed->token};
    if (random() % 10 == 0) engine_->mover().cancel_load(load);
    return true;
  }

  void take_reports() {
    for (const Mover::Finished& report : engine_->mover().take_finished()) settle(report);
  }
  void wait_for_all() {
    while (!under_way_.empty()) settle(engine_->next_finished());
  }

  struct Counts {
    std::size_t saved = 0;
    std::size_t loaded = 0;
    std::size_t failed_blocks = 0;
    std::size_t wrong = 0;
    std::size_t reported_twice = 0;
    std::size_t verified = 0;
    std::size_t corrupt = 0;
  };
  Counts counts;

 private:
  struct UnderWay {
    Numbers numbers;
    Blocks blocks;
    Id128 token;
  };

  static Numbers some_numbers(std::mt19937_64& random) {
    return numbers_from(1 + random() % kKeys, 1 + random() % 24);
  }

  std::optional<Blocks> take_blocks(std::mt19937_64& random, std::size_t count) {
    if (free_.size() < count) return std::nullopt;
    Blocks blocks;
    for (std::size_t i = 0; i < count; ++i) {
      std::swap(free_[random() % free_.size()], free_.back());
      blocks.push_back(free_.back());
      free_.pop_back();
    }
    return blocks;
  }

  bool give_back(const Blocks& blocks) {
    free_.insert(free_.end(), blocks.begin(), blocks.end());
    return false;
  }

  void settle(const Mover::Finished& report) {
    const auto found = under_way_.find({report.kind, report.id});
    if (found == under_way_.end()) {
      ++counts.reported_twice;
      return;
    }
    const auto& [numbers, blocks, token] = found->second;
    if (report.kind == Mover::Finished::Kind::kLoad) {
      counts.wrong += engine_->wrong_blocks(numbers, blocks, report.failed_blocks);
      counts.wrong += report.blocks + report.failed_blocks.size() == blocks.size() ? 0 : 1;
      counts.loaded += report.blocks;
      counts.verified += report.verified;
      counts.corrupt += report.corrupt;
      counts.failed_blocks += report.failed_blocks.size();
      engine_->session().unclaim(token);
    } else {
      counts.saved += report.blocks;
    }
    // A copy that continues after its report would now write garbage into the pool, or damage the
    // next save from this block.
    for (const std::uint32_t block : blocks) memory_.fill(block, kGarbage);
    give_back(blocks);
    under_way_.erase(found);
  }

  EngineMemory memory_;
  std::unique_ptr<HostDevice> device_;
  std::unique_ptr<TestEngine> engine_;
  Blocks free_;
  std::map<std::pair<Mover::Finished::Kind, std::uint64_t>, UnderWay> under_way_;
};

TEST_CASE("random jobs, kills, stops and cuts: right bytes, and each job reported once") {
  std::mt19937_64 random(seed());
  ServerProcess::Options options;
  options.pool_size = "2mb";  // 512 pages of 4 KiB.
  ServerProcess server(options);
  // One engine's pages have checksums, the other's rarely: in the same slots, one after the other.
  Player players[] = {{server.socket(), "one", 1, Mover::Verify::kAll},
                      {server.socket(), "two", 2, Mover::Verify::kSample}};
  for (Player& player : players) player.engine().wait_ready();

  const std::size_t wanted = jobs_wanted();
  std::size_t accepted = 0;
  std::size_t kills = 0;
  std::size_t stops = 0;
  std::size_t cuts = 0;
  while (accepted < wanted) {
    Player& player = players[random() % 2];
    player.take_reports();
    const std::uint64_t dice = random() % 1'000'000;
    if (dice < 1'500) {
      server.kill();
      ++kills;
      server.start();
      continue;
    }
    if (dice < 3'000) {
      ++cuts;
      cut_connections(server.socket());
    } else if (dice < 4'000) {
      ++stops;
      server.signal(SIGSTOP);
      for (int i = 0; i < 5; ++i)
        static_cast<void>(random() % 2 ? player.save(random) : player.load(random));
      server.signal(SIGCONT);
    }
    const bool was_accepted = random() % 5 < 2 ? player.save(random) : player.load(random);
    was_accepted ? static_cast<void>(++accepted) : std::this_thread::yield();
  }
  for (Player& player : players) player.wait_for_all();

  std::size_t loaded = 0;
  for (Player& player : players) {
    CHECK(player.counts.wrong == 0);
    CHECK(player.counts.reported_twice == 0);
    CHECK(player.counts.saved > 0);
    // No process overwrote a page, so a wrong checksum would be another page's.
    CHECK(player.counts.verified > 0);
    CHECK(player.counts.corrupt == 0);
    loaded += player.counts.loaded;
    std::printf("saved %zu blocks, loaded %zu, %zu failed\n", player.counts.saved,
                player.counts.loaded, player.counts.failed_blocks);
    player.engine().wait_ready();
  }
  std::printf("%zu jobs, %zu kills, %zu stops, %zu cuts\n", accepted, kills, stops, cuts);
  CHECK(loaded > wanted / 2);
  CHECK(server.metric_becomes("pegaflow_pins", 0));
  CHECK(server.metric_becomes("pegaflow_claims", 0));
  CHECK(server.metric_becomes("pegaflow_reservations", 0));
  CHECK(server.metric_becomes("pegaflow_pool_slots{state=\"quarantined\"}", 0));
  CHECK(server.metric_becomes("pegaflow_quarantine_slots{reason=\"reader_lost\"}", 0));
}

}  // namespace
}  // namespace pegaflow::testing
