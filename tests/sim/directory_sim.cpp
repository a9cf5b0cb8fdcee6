// Many nodes with the real code of the directory, in virtual time over servers in memory: how much
// of what a view of all pools would find do they find, with how many round trips, and do memory and
// writes follow the formulas of docs/directory.md?
//
// PEGA_DIRECTORY_NODES, PEGA_DIRECTORY_SECONDS and PEGA_DIRECTORY_CHURN (nodes of 1,000 that end in
// a minute) set another size.
#include <algorithm>
#include <bitset>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <doctest/doctest.h>

#include "directory/agent.h"
#include "tests/support/seed.h"

namespace pegaflow::directory {
namespace {

using std::chrono::milliseconds;

constexpr std::size_t kMostNodes = 1024;
constexpr Duration kLatency = std::chrono::microseconds(200);

/// The data of one Redis server.
struct Store {
  struct Text {
    std::string value;
    TimePoint until = TimePoint::max();
  };
  std::unordered_map<std::string, Text> texts;
  std::unordered_map<std::string, std::set<std::string>> sets;
  std::uint64_t commands = 0;
  std::uint64_t writes = 0;  ///< To sorted sets of anchors.

  [[nodiscard]] std::size_t members() const {
    std::size_t count = 0;
    for (const auto& [key, members] : sets) count += key[0] == 'a' ? members.size() : 0;
    return count;
  }

  Reply run(const std::vector<std::string>& words, TimePoint now) {
    ++commands;
    const std::string& name = words[0];
    if (name == "SET") return set(words, now);
    if (name == "GET") return get(words[1], now);
    if (name == "PEXPIRE") return extend(words[1], milliseconds(std::stoll(words[2])), now);
    if (name == "MGET") {
      Reply all{.kind = Reply::Kind::kArray, .text = {}, .items = {}};
      for (std::size_t i = 1; i < words.size(); ++i) all.items.push_back(get(words[i], now));
      return all;
    }
    if (name == "ZRANGEBYLEX") return range(words);
    writes += words[1][0] == 'a' ? 1 : 0;
    const bool is_changed = name == "ZADD" ? sets[words[1]].insert(words[3]).second
                                           : sets[words[1]].erase(words[2]) != 0;
    return {.kind = Reply::Kind::kInteger, .integer = is_changed ? 1 : 0, .text = {}, .items = {}};
  }

  Reply get(const std::string& key, TimePoint now) {
    const auto found = texts.find(key);
    if (found == texts.end() || found->second.until <= now) return {};
    return {.kind = Reply::Kind::kText, .text = found->second.value, .items = {}};
  }
  Reply set(const std::vector<std::string>& words, TimePoint now) {
    const bool is_new_only = words.back() == "NX";
    if (is_new_only && get(words[1], now).is(Reply::Kind::kText)) return {};
    Text text{.value = words[2]};
    if (words.size() == 5) text.until = now + milliseconds(std::stoll(words[4]));
    texts[words[1]] = std::move(text);
    return {.kind = Reply::Kind::kStatus, .text = "OK", .items = {}};
  }
  Reply extend(const std::string& key, Duration length, TimePoint now) {
    const bool is_there = get(key, now).is(Reply::Kind::kText);
    if (is_there) texts[key].until = now + length;
    return {.kind = Reply::Kind::kInteger, .integer = is_there ? 1 : 0, .text = {}, .items = {}};
  }
  Reply range(const std::vector<std::string>& words) {
    Reply found{.kind = Reply::Kind::kArray, .text = {}, .items = {}};
    const std::set<std::string>& members = sets[words[1]];
    auto at = words[2] == "-" ? members.begin() : members.lower_bound(words[2].substr(1));
    const auto end = words[3] == "+" ? members.end() : members.lower_bound(words[3].substr(1));
    for (std::size_t left = std::stoul(words[6]); at != end && left > 0; ++at, --left) {
      found.items.push_back({.kind = Reply::Kind::kText, .text = *at, .items = {}});
    }
    return found;
  }
};

/// A connection of one node to a store, which answers after kLatency.
class Connection final : public Commands {
 public:
  Connection(Store& store, std::string name, const ManualClock& clock)
      : store_(store), name_(std::move(name)), clock_(clock) {}
  [[nodiscard]] const std::string& name() const noexcept override { return name_; }
  [[nodiscard]] bool is_up() const noexcept override { return true; }
  [[nodiscard]] std::uint64_t life() const noexcept override { return 1; }
  [[nodiscard]] bool is_late() const noexcept override { return false; }
  [[nodiscard]] std::size_t open() const noexcept override { return open_.size(); }
  void send(std::span<const std::string_view> arguments, Answer answer) override {
    open_.push_back({.at = clock_.now() + kLatency,
                     .words = {arguments.begin(), arguments.end()},
                     .answer = std::move(answer)});
  }
  /// Answers what is due.
  void step() {
    while (!open_.empty() && open_.front().at <= clock_.now()) {
      Sent sent = std::move(open_.front());
      open_.pop_front();
      sent.answer(store_.run(sent.words, clock_.now()));
    }
  }

 private:
  struct Sent {
    TimePoint at;
    std::vector<std::string> words;
    Answer answer;
  };
  Store& store_;
  std::string name_;
  const ManualClock& clock_;
  std::deque<Sent> open_;
};

BlockKey key_of(std::uint64_t word) {
  BlockKey key;
  std::memcpy(key.bytes.data(), &word, sizeof word);
  return key;
}

/// One node: its agent and the blocks of its pool, the last used first.
struct Node {
  std::vector<std::unique_ptr<Connection>> connections;
  std::unique_ptr<Agent> agent;
  std::list<std::pair<std::uint64_t, bool>> recency;  ///< Block, and whether it is a head.
  std::unordered_map<std::uint64_t, decltype(recency)::iterator> blocks;
  std::optional<Found> found;
};

/// A cluster that serves prompts: conversations that grow, on prompts of the system that many
/// share.
class Cluster {
 public:
  struct Options {
    std::size_t nodes = 24;
    std::size_t pool_blocks = 6000;
    std::size_t servers = 3;
  };
  Cluster(const Options& options, std::uint64_t seed)
      : options_(options), random_(seed), stores_(options.servers), nodes_(options.nodes) {
    for (std::size_t i = 0; i < nodes_.size(); ++i) start(i);
  }

  void run(Duration time, double requests_per_second, double churn_per_minute) {
    const TimePoint end = clock_.now() + time;
    double requests = 0;
    double deaths = 0;
    while (clock_.now() < end) {
      advance(milliseconds(10));
      requests += requests_per_second / 100;
      while (requests >= 1) {
        requests -= 1;
        serve();
      }
      deaths += churn_per_minute * static_cast<double>(nodes_.size()) / 6000;
      while (deaths >= 1) {
        deaths -= 1;
        replace(random_() % nodes_.size());
      }
    }
  }

  // Sums of all requests since measure().
  void measure() {
    found_ = possible_ = lookups_ = 0;
    trips_ = members_ = 0;
    most_members_ = 0;
  }
  [[nodiscard]] double share() const {
    return static_cast<double>(found_) / static_cast<double>(std::max<std::uint64_t>(1, possible_));
  }
  [[nodiscard]] double trips() const { return per_lookup(trips_); }
  [[nodiscard]] double members() const { return per_lookup(members_); }
  [[nodiscard]] std::uint64_t most_members() const { return most_members_; }
  [[nodiscard]] std::uint64_t lookups() const { return lookups_; }
  [[nodiscard]] std::size_t stored() const {
    std::size_t count = 0;
    for (const Store& store : stores_) count += store.members();
    return count;
  }
  /// The anchors of the blocks in all pools, counted here.
  [[nodiscard]] std::size_t anchors() const {
    std::size_t count = 0;
    for (const Node& node : nodes_) {
      for (const auto& [block, is_head] : node.recency) {
        count += is_anchor(key_of(block), is_head) ? 1 : 0;
      }
    }
    return count;
  }
  void flush_server(std::size_t server) { stores_[server] = Store(); }
  [[nodiscard]] std::uint64_t commands() const {
    std::uint64_t count = 0;
    for (const Store& store : stores_) count += store.commands;
    return count;
  }

 private:
  [[nodiscard]] double per_lookup(std::uint64_t sum) const {
    return static_cast<double>(sum) / static_cast<double>(std::max<std::uint64_t>(1, lookups_));
  }

  void start(std::size_t number) {
    Node& node = nodes_[number];
    node = Node();
    std::vector<Commands*> commands;
    for (std::size_t server = 0; server < stores_.size(); ++server) {
      node.connections.push_back(std::make_unique<Connection>(
          stores_[server], "redis://" + std::to_string(server), clock_));
      commands.push_back(node.connections.back().get());
    }
    Agent::Options options;
    options.seed = random_();
    options.servers.bucket_bits = 10;
    options.leases.own = {
        .node = {random_(), random_()}, .address = std::to_string(number) + ":1", .lanes = ""};
    node.agent = std::make_unique<Agent>(
        std::move(commands), Keys{.anchors = {}, .all = {Bytes32{}}}, options, clock_,
        Agent::Events{.found = [&node](Found&& found) { node.found = std::move(found); },
                      .epochs = [](const KnownEpochs&) {}});
  }

  /// The node ends without a word, and another one begins at its address.
  void replace(std::size_t number) {
    for (const auto& [block, is_head] : nodes_[number].recency) holders_[block].reset(number);
    start(number);
  }

  void advance(Duration by) {
    for (Duration passed{}; passed < by; passed += kLatency) {
      clock_.advance(kLatency);
      bool is_open = false;
      for (Node& node : nodes_) {
        for (auto& connection : node.connections) {
          connection->step();
          is_open = is_open || connection->open() != 0;
        }
      }
      if (is_open) continue;
      clock_.advance(by - passed - kLatency);
      break;
    }
    for (Node& node : nodes_) {
      if (node.agent->next_step() <= clock_.now()) node.agent->step();
    }
  }

  /// The blocks of the next prompt: one of the system, then turns of a conversation.
  std::vector<std::uint64_t> next_prompt() {
    if (conversations_.size() < 40 * nodes_.size() || random_() % 4 == 0) {
      if (conversations_.size() >= 40 * nodes_.size()) conversations_.pop_front();
      const std::uint64_t system = random_() % 20;
      std::vector<std::uint64_t> blocks;
      const std::size_t length = 20 + 13 * system;
      for (std::size_t i = 0; i < length; ++i)
        blocks.push_back((system + 1) * 1'000'003 + i * 7919);
      conversations_.push_back(std::move(blocks));
      return extend(conversations_.back());
    }
    return extend(conversations_[random_() % conversations_.size()]);
  }
  std::vector<std::uint64_t> extend(std::vector<std::uint64_t>& conversation) {
    const std::size_t more = 10 + random_() % 150;
    for (std::size_t i = 0; i < more && conversation.size() < 2000; ++i) {
      conversation.push_back(random_());
    }
    return conversation;
  }

  void serve() {
    const std::size_t number = random_() % nodes_.size();
    Node& node = nodes_[number];
    const std::vector<std::uint64_t> blocks = next_prompt();
    std::size_t local = 0;
    while (local < blocks.size() && node.blocks.contains(blocks[local])) ++local;
    if (local < blocks.size()) look_up(number, blocks, local);
    for (std::size_t i = blocks.size(); i-- > 0;) use(number, blocks[i], i < kHeadBlocks);
  }

  /// How many blocks from `first` on a node has.
  std::size_t prefix_at(std::size_t number, const std::vector<std::uint64_t>& blocks,
                        std::size_t first) const {
    std::size_t at = first;
    while (at < blocks.size() && nodes_[number].blocks.contains(blocks[at])) ++at;
    return at - first;
  }

  void look_up(std::size_t number, const std::vector<std::uint64_t>& blocks, std::size_t local) {
    std::bitset<kMostNodes> holders;
    holders.set();
    std::size_t best = 0;
    for (std::size_t at = local; at < blocks.size(); ++at, ++best) {
      const auto found = holders_.find(blocks[at]);
      if (found == holders_.end() || (holders & found->second).none()) break;
      holders &= found->second;
    }
    possible_ += best;
    std::vector<BlockKey> keys;
    for (std::size_t at = local; at < blocks.size(); ++at) keys.push_back(key_of(blocks[at]));
    Question question{.ticket = 1, .candidates = candidates_of(keys)};
    if (question.candidates.empty()) return;
    question.deadline = clock_.now() + milliseconds(5);
    Node& node = nodes_[number];
    const Stats before = node.agent->stats();
    node.found.reset();
    node.agent->ask(std::move(question));
    while (!node.found) {
      clock_.advance(kLatency);
      for (auto& connection : node.connections) connection->step();
    }
    const Stats after = node.agent->stats();
    ++lookups_;
    trips_ += after.trips - before.trips;
    members_ += after.members - before.members;
    CHECK(after.trips - before.trips <= 2);
    most_members_ = std::max(most_members_, after.members - before.members);
    std::size_t most = 0;
    for (const Found::Owner& owner : node.found->owners) {
      const std::size_t other = std::stoul(owner.address);
      if (other != number) most = std::max(most, prefix_at(other, blocks, local));
    }
    found_ += std::min(most, best);
  }

  /// The node has the block, used last; another one gives way.
  void use(std::size_t number, std::uint64_t block, bool is_head) {
    Node& node = nodes_[number];
    if (const auto found = node.blocks.find(block); found != node.blocks.end()) {
      node.recency.splice(node.recency.begin(), node.recency, found->second);
      return;
    }
    if (node.blocks.size() >= options_.pool_blocks) {
      const auto [victim, was_head] = node.recency.back();
      node.recency.pop_back();
      node.blocks.erase(victim);
      holders_[victim].reset(number);
      announce(node, victim, was_head, false);
    }
    node.recency.emplace_front(block, is_head);
    node.blocks.emplace(block, node.recency.begin());
    holders_[block].set(number);
    announce(node, block, is_head, true);
  }
  static void announce(Node& node, std::uint64_t block, bool is_head, bool is_findable) {
    const BlockKey key = key_of(block);
    if (!is_anchor(key, is_head)) return;
    node.agent->take({.space = 1, .blocks = {{key, is_findable}}});
  }

  const Options options_;
  std::mt19937_64 random_;
  ManualClock clock_;
  std::vector<Store> stores_;
  std::vector<Node> nodes_;
  std::unordered_map<std::uint64_t, std::bitset<kMostNodes>> holders_;
  std::deque<std::vector<std::uint64_t>> conversations_;
  std::uint64_t found_ = 0;
  std::uint64_t possible_ = 0;
  std::uint64_t lookups_ = 0;
  std::uint64_t trips_ = 0;
  std::uint64_t members_ = 0;
  std::uint64_t most_members_ = 0;
};

std::size_t setting(const char* name, std::size_t usual) {
  const char* const text = std::getenv(name);
  return text == nullptr ? usual : std::stoul(text);
}

TEST_SUITE("directory_sim") {
  TEST_CASE("nodes find 98 % of what a view of all pools would, while nodes end") {
    const std::size_t nodes = setting("PEGA_DIRECTORY_NODES", 24);
    const std::chrono::seconds time(setting("PEGA_DIRECTORY_SECONDS", 90));
    Cluster cluster({.nodes = nodes}, testing::seed());
    const double rate = 1.5 * static_cast<double>(nodes);
    cluster.run(std::chrono::seconds(30), rate, 0);
    cluster.measure();
    const std::uint64_t commands = cluster.commands();
    cluster.run(time, rate, static_cast<double>(setting("PEGA_DIRECTORY_CHURN", 50)) / 1000);

    const double per_second =
        static_cast<double>(cluster.commands() - commands) / static_cast<double>(time.count());
    std::printf(
        "nodes %zu, %zu s, %lu lookups: %.4f of a view of all pools, %.2f round trips and %.1f "
        "anchors a lookup (%lu at most), %zu members for %zu anchors, %.0f commands/s\n",
        nodes, static_cast<std::size_t>(time.count()), cluster.lookups(), cluster.share(),
        cluster.trips(), cluster.members(), cluster.most_members(), cluster.stored(),
        cluster.anchors(), per_second);
    CHECK(cluster.lookups() > 100);
    CHECK(cluster.share() >= 0.98);
    CHECK(cluster.trips() <= 2);
    CHECK(cluster.most_members() <= kMostProbes);
    // Members of nodes that ended are removed over time; nothing else is more than the anchors.
    CHECK(static_cast<double>(cluster.stored()) <= 1.1 * static_cast<double>(cluster.anchors()));
    CHECK(static_cast<double>(cluster.stored()) >= 0.9 * static_cast<double>(cluster.anchors()));
  }

  TEST_CASE("a server that lost its data has all anchors again within a minute") {
    Cluster cluster({.nodes = 8}, testing::seed());
    cluster.run(std::chrono::seconds(20), 12, 0);
    const std::size_t before = cluster.stored();
    cluster.flush_server(1);
    CHECK(cluster.stored() < before);
    cluster.run(std::chrono::seconds(60), 12, 0);
    CHECK(static_cast<double>(cluster.stored()) >= 0.97 * static_cast<double>(cluster.anchors()));
  }
}

}  // namespace
}  // namespace pegaflow::directory
