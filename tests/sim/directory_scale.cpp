// A large cluster with the real code of the directory, in virtual time over servers in memory: do
// nodes find what a view of all pools would, and are memory and commands those of the sizing table
// in docs/directory.md?
//
// It runs one of PEGA_DIRECTORY_SLICE groups of users on nodes whose pools and rates are smaller by
// that factor. Anchors are independent of each other, and each prompt is in one group as a whole:
// the age at which a block is evicted, the anchors of a prompt, their owners, the round trips and
// all times stay as they are, and memory and the commands about anchors are the slice of the whole.
// The number of nodes, their leases and their ends are not reduced.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "directory/agent.h"
#include "tests/sim/directory_pools.h"
#include "tests/sim/directory_servers.h"
#include "tests/sim/directory_trace.h"
#include "tests/support/seed.h"

namespace pegaflow::directory {
namespace {

using std::chrono::milliseconds;

// The column of docs/directory.md.
constexpr double kPoolBlocks = 5e6;
constexpr double kLookupsPerSecond = 5;
constexpr std::size_t kServers = 4;

std::size_t setting(const char* name, std::size_t usual) {
  const char* const text = std::getenv(name);
  return text == nullptr ? usual : std::stoul(text);
}

struct Options {
  std::size_t nodes = setting("PEGA_DIRECTORY_SCALE_NODES", 40);
  std::size_t slice = setting("PEGA_DIRECTORY_SLICE", 16);
  std::size_t seconds = setting("PEGA_DIRECTORY_SCALE_SECONDS", 120);
  double churn = static_cast<double>(setting("PEGA_DIRECTORY_CHURN", 20)) / 1000;  ///< A minute.
};

BlockKey key_of(std::uint64_t unit, std::size_t block) {
  BlockKey key;
  const std::uint64_t word = named(unit, block);
  std::memcpy(key.bytes.data(), &word, sizeof word);
  return key;
}

double seconds_of(TimePoint time) {
  return std::chrono::duration<double>(time.time_since_epoch()).count();
}

/// Counts over the requests of a period.
struct Sums {
  std::uint64_t requests = 0;
  std::uint64_t lookups = 0;
  std::uint64_t without_anchor = 0;
  std::uint64_t blocks = 0;    ///< Blocks of all prompts.
  std::uint64_t missing = 0;   ///< Those that are not at the node.
  std::uint64_t possible = 0;  ///< Missing ones that one other node has, as a prefix.
  std::uint64_t found = 0;     ///< The same at a node that the directory named.
  std::uint64_t trips = 0;
  std::uint64_t anchors = 0;
  std::uint64_t most_trips = 0;
  std::uint64_t most_anchors = 0;
};

/// One node: its agent, and the answer to its present question.
struct Node {
  std::vector<std::unique_ptr<SimulatedNetwork::Connection>> connections;
  std::unique_ptr<Agent> agent;
  std::optional<Found> found;
  Announcement changes;
};

class Cluster {
 public:
  Cluster(const Options& options, const SiteTrace& trace, std::uint64_t seed)
      : options_(options),
        random_(seed),
        network_(clock_),
        servers_(kServers),
        nodes_(options.nodes),
        pools_(options.nodes, units_each(),
               [this](std::size_t node, std::uint64_t unit, std::uint8_t place, bool is_there) {
                 note(node, unit, place, is_there);
               }),
        sites_(trace,
               kLookupsPerSecond * static_cast<double>(options.nodes) /
                   static_cast<double>(options.slice),
               random_) {
    for (std::size_t i = 0; i < nodes_.size(); ++i) start(i);
  }

  /// Serves prompts, without the directory, until the pools are full.
  void fill() {
    for (std::size_t full = 0; full < nodes_.size();) {
      const ManySites::Prompt prompt = sites_.next();
      const std::size_t node = random_() % nodes_.size();
      const bool was_full = pools_.is_full(node);
      pools_.use(node, prompt.units);
      announce(node);
      full += !was_full && pools_.is_full(node) ? 1 : 0;
      offset_ = prompt.at;
    }
    offset_ -= now();
  }
  /// Advances the clock without requests until the servers have so large a part of all anchors.
  double run_until_stored(double share, double limit) {
    const double begin = now();
    while (static_cast<double>(members()) < share * static_cast<double>(anchors()) &&
           now() < begin + limit) {
      advance(milliseconds(100));
    }
    return now() - begin;
  }
  /// Serves prompts for that time while nodes end.
  void serve(double seconds, double churn_per_minute) {
    const double end = now() + seconds;
    double next_death = now();
    const double pause = 60 / (churn_per_minute * static_cast<double>(nodes_.size()));
    ManySites::Prompt prompt = sites_.next();
    while (now() < end) {
      const double at = prompt.at - offset_;
      if (now() < std::min(at, end)) {
        advance(std::chrono::duration_cast<Duration>(
            std::chrono::duration<double>(std::min(at, end) - now() + 1e-6)));
      }
      if (churn_per_minute > 0 && now() >= next_death + pause) {
        next_death += pause;
        replace(random_() % nodes_.size());
      }
      if (now() < at) continue;
      request(random_() % nodes_.size(), prompt.units);
      prompt = sites_.next();
    }
  }

  [[nodiscard]] double now() const { return seconds_of(clock_.now()); }
  [[nodiscard]] std::size_t groups() const { return sites_.groups(); }
  [[nodiscard]] std::uint64_t inserted_blocks() const { return pools_.inserted() * kUnitBlocks; }
  [[nodiscard]] std::size_t members() const {
    std::size_t count = 0;
    for (const SimulatedServer& server : servers_) count += server.members();
    return count;
  }
  [[nodiscard]] std::size_t buckets() const {
    std::size_t count = 0;
    for (const SimulatedServer& server : servers_) count += server.buckets();
    return count;
  }
  [[nodiscard]] std::size_t blocks() const {
    std::size_t count = 0;
    for (std::size_t i = 0; i < nodes_.size(); ++i) count += pools_.size(i) * kUnitBlocks;
    return count;
  }
  [[nodiscard]] std::size_t anchors() const noexcept { return anchors_; }
  [[nodiscard]] SimulatedServer::Counts counts() const {
    SimulatedServer::Counts sum;
    for (const SimulatedServer& server : servers_) {
      sum.anchor_writes += server.counts().anchor_writes;
      sum.anchor_lookups += server.counts().anchor_lookups;
      sum.sweeps += server.counts().sweeps;
      sum.long_buckets += server.counts().long_buckets;
      sum.other += server.counts().other;
      sum.lease_bytes += server.counts().lease_bytes;
    }
    return sum;
  }
  void flush_server(std::size_t server) { servers_[server].flush(); }
  Sums sums;

 private:
  [[nodiscard]] std::size_t units_each() const {
    return static_cast<std::size_t>(kPoolBlocks / static_cast<double>(options_.slice)) /
           kUnitBlocks;
  }
  /// Some 47 anchors a bucket, as in the column.
  [[nodiscard]] unsigned bucket_bits() const {
    const double all = 0.04 * kPoolBlocks / static_cast<double>(options_.slice) *
                       static_cast<double>(options_.nodes);
    unsigned bits = kLeastBucketBits;
    while (64.0 * static_cast<double>(kServers) * static_cast<double>(std::uint64_t{1} << bits) <
           all) {
      ++bits;
    }
    return bits;
  }

  void start(std::size_t number) {
    Node& node = nodes_[number];
    node = Node();
    std::vector<Commands*> commands;
    for (std::size_t server = 0; server < servers_.size(); ++server) {
      node.connections.push_back(std::make_unique<SimulatedNetwork::Connection>(
          network_, servers_[server], "redis://" + std::to_string(server)));
      commands.push_back(node.connections.back().get());
    }
    Agent::Options options;
    options.seed = random_();
    options.servers.bucket_bits = bucket_bits();
    options.announcer.slow_rate /= static_cast<double>(options_.slice);
    options.announcer.fast_rate /= static_cast<double>(options_.slice);
    // As long an address and lanes as in a cluster.
    options.leases.own = {.node = {random_(), random_()},
                          .address = std::to_string(number) + ":10.100.100.100:50055",
                          .lanes = "rdma,tcp"};
    node.agent = std::make_unique<Agent>(
        std::move(commands), Keys{.anchors = {}, .all = {Bytes32{}}}, options, clock_,
        Agent::Events{.found = [&node](Found&& found) { node.found = std::move(found); },
                      .epochs = [](const KnownEpochs&) {}});
  }

  /// The node ends without a word, and another one begins at its address.
  void replace(std::size_t number) {
    anchors_ -= node_anchors_[number];
    node_anchors_[number] = 0;
    pools_.clear(number);
    start(number);
  }

  void advance(Duration by) {
    const TimePoint end = clock_.now() + by;
    while (clock_.now() < end) {
      network_.run_until(std::min(end, clock_.now() + milliseconds(5)));
      for (Node& node : nodes_) {
        if (node.agent->next_step() <= clock_.now()) node.agent->step();
      }
    }
  }

  /// A unit came to the node, or left it.
  void note(std::size_t number, std::uint64_t unit, std::uint8_t place, bool is_there) {
    Node& node = nodes_[number];
    for (std::size_t block = 0; block < kUnitBlocks; ++block) {
      const BlockKey key = key_of(unit, block);
      if (!is_anchor(key, place * kUnitBlocks + block < kHeadBlocks)) continue;
      node.changes.blocks.emplace_back(key, is_there);
      anchors_ += is_there ? 1 : -1;
      node_anchors_[number] += is_there ? 1 : -1;
    }
  }
  void announce(std::size_t number) {
    Node& node = nodes_[number];
    if (node.changes.blocks.empty()) return;
    node.changes.space = 1;
    node.agent->take(node.changes);
    node.changes.blocks.clear();
  }

  void request(std::size_t number, std::span<const std::uint64_t> units) {
    const std::size_t local = pools_.prefix(number, units);
    ++sums.requests;
    sums.blocks += units.size() * kUnitBlocks;
    if (local < units.size()) look_up(number, units.subspan(local));
    pools_.use(number, units);
    announce(number);
  }

  void look_up(std::size_t number, std::span<const std::uint64_t> units) {
    sums.missing += units.size() * kUnitBlocks;
    const std::size_t possible = pools_.longest_elsewhere(number, units);
    sums.possible += possible * kUnitBlocks;
    std::vector<BlockKey> keys;
    for (const std::uint64_t unit : units) {
      for (std::size_t block = 0; block < kUnitBlocks; ++block) keys.push_back(key_of(unit, block));
    }
    Question question{.ticket = 1, .candidates = candidates_of(keys)};
    if (question.candidates.empty()) {
      ++sums.without_anchor;
      return;
    }
    question.deadline = clock_.now() + milliseconds(5);
    Node& node = nodes_[number];
    const Stats before = node.agent->stats();
    node.found.reset();
    node.agent->ask(std::move(question));
    while (!node.found) network_.run_until(clock_.now() + SimulatedNetwork::kLatency);
    const Stats after = node.agent->stats();
    ++sums.lookups;
    sums.trips += after.trips - before.trips;
    sums.most_trips = std::max(sums.most_trips, after.trips - before.trips);
    sums.anchors += after.members - before.members;
    sums.most_anchors = std::max(sums.most_anchors, after.members - before.members);
    std::size_t most = 0;
    for (const Found::Owner& owner : node.found->owners) {
      const std::size_t other = std::stoul(owner.address);
      if (other != number) most = std::max(most, pools_.prefix(other, units));
    }
    sums.found += std::min(most, possible) * kUnitBlocks;
  }

  const Options options_;
  std::mt19937_64 random_;
  ManualClock clock_;
  SimulatedNetwork network_;
  std::vector<SimulatedServer> servers_;
  std::vector<Node> nodes_;
  std::vector<std::int64_t> node_anchors_ = std::vector<std::int64_t>(options_.nodes);
  std::int64_t anchors_ = 0;
  Pools pools_;
  ManySites sites_;
  double offset_ = 0;  ///< The time of the next prompt at the start of the clock.
};

/// A measured figure beside the sizing table's; returns their ratio.
double print(const char* what, double measured, double table) {
  std::printf("%-46s %14.0f   table %14.0f   ratio %.3f\n", what, measured, table,
              measured / table);
  return measured / table;
}

double per(std::uint64_t sum, std::uint64_t count) {
  return static_cast<double>(sum) / static_cast<double>(std::max<std::uint64_t>(1, count));
}

void print_lookups(const Sums& sums) {
  std::printf(
      "%lu requests, %.0f blocks each, %.0f of them missing there; %lu lookups, %lu without an "
      "anchor\n%.4f of a view of all pools (%.4f of the missing blocks); round trips %.2f a "
      "lookup, %lu at most; anchors %.1f a lookup, %lu at most\n",
      sums.requests, per(sums.blocks, sums.requests), per(sums.missing, sums.requests),
      sums.lookups, sums.without_anchor, per(sums.found, sums.possible),
      per(sums.possible, sums.missing), per(sums.trips, sums.lookups), sums.most_trips,
      per(sums.anchors, sums.lookups), sums.most_anchors);
}

TEST_SUITE("directory_scale") {
  TEST_CASE("a large cluster finds 98 % of a view of all pools, with the commands of the table") {
    const Options options;
    const char* const file = std::getenv("PEGA_DIRECTORY_TRACE");
    const SiteTrace trace =
        file != nullptr ? SiteTrace::read(file) : SiteTrace::generate(testing::seed());
    Cluster cluster(options, trace, testing::seed());
    cluster.fill();
    std::printf("%zu nodes with 1/%zu of %.0f blocks, %s, %zu groups of users, %zu anchors\n",
                options.nodes, options.slice, kPoolBlocks, trace.name.c_str(), cluster.groups(),
                cluster.anchors());
    std::printf("all anchors announced in %.1f s\n", cluster.run_until_stored(0.999, 300));
    std::fflush(stdout);
    cluster.serve(30, 0);

    const std::uint64_t saved_before = cluster.inserted_blocks();
    const SimulatedServer::Counts before = cluster.counts();
    const double begin = cluster.now();
    cluster.sums = Sums();
    cluster.serve(static_cast<double>(options.seconds), options.churn);

    const double seconds = cluster.now() - begin;
    const SimulatedServer::Counts now = cluster.counts();
    const Sums& sums = cluster.sums;
    print_lookups(sums);
    const auto nodes = static_cast<double>(options.nodes);
    const auto slice = static_cast<double>(options.slice);
    const double saves = static_cast<double>(cluster.inserted_blocks() - saved_before) / seconds;
    // The table's formulas, with the blocks, saves and lookups that were measured.
    const double share = per(cluster.anchors(), cluster.blocks());
    const double most_share =
        1.0 / 32 + 63 * (1.0 / 8 - 1.0 / 32) / per(sums.blocks, sums.requests);
    std::printf(
        "blocks of all nodes %.0f, saves a second and node %.0f, anchors a block %.4f (%.4f at "
        "most), members a bucket %.1f\n",
        static_cast<double>(cluster.blocks()) * slice, saves * slice / nodes, share, most_share,
        per(cluster.members(), cluster.buckets()));
    const double searches = nodes * 100 / 16;
    const double pass = static_cast<double>(cluster.buckets()) * slice / searches;
    const double ended =
        options.churn / 60 * pass * (1 - std::exp(-static_cast<double>(options.seconds) / pass));
    const double members =
        print("members, with those of ended nodes", static_cast<double>(cluster.members()) * slice,
              static_cast<double>(cluster.anchors()) * slice * (1 + ended));
    const auto rate = [&](std::uint64_t later, std::uint64_t earlier) {
      return static_cast<double>(later - earlier) / seconds;
    };
    const double writes =
        print("writes of anchors a second", rate(now.anchor_writes, before.anchor_writes) * slice,
              2 * saves * slice * share + nodes * 100);
    const double rest = rate(now.long_buckets, before.long_buckets) * slice;
    const double swept = print("searches of buckets a second",
                               rate(now.sweeps, before.sweeps) * slice - rest, searches);
    std::printf("second searches a second, of long buckets: %.0f\n", rest);
    const double asked = rate(now.anchor_lookups, before.anchor_lookups) * slice;
    std::printf("commands of lookups a second: %.0f\n", asked);
    const double other =
        print("commands of leases, markers and epochs", rate(now.other, before.other) / kServers,
              nodes * 2.5 +
                  nodes * (1 + std::ceil(nodes / 256)) / (kServers * std::max(2.0, nodes * 0.01)));
    const double lease_bytes =
        print("bytes of leases a second", rate(now.lease_bytes, before.lease_bytes),
              70 * nodes * nodes / std::max(2.0, nodes * 0.01));

    CHECK(sums.lookups > 100);
    CHECK(per(sums.found, sums.possible) >= 0.98);
    CHECK(sums.most_trips <= 2);
    CHECK(sums.most_anchors <= kMostProbes);
    CHECK(share <= most_share * 1.02);
    for (const double ratio : {members, writes, swept, other, lease_bytes}) {
      CHECK(ratio >= 0.9);
      CHECK(ratio <= 1.1);
    }

    const std::size_t stored = cluster.members();
    cluster.flush_server(1);
    CHECK(cluster.members() < stored);
    const double rebuilt = cluster.run_until_stored(0.99, 300);
    std::printf("a flushed server had its anchors again after %.1f s\n", rebuilt);
    CHECK(rebuilt < 60);
  }
}

}  // namespace
}  // namespace pegaflow::directory
