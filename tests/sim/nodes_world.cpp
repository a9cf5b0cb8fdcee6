#include "tests/sim/nodes_world.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "server/resets.h"
#include "server/rpc_error.h"

namespace pegaflow::sim {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr std::size_t kWords = perf::SimCluster::kPageBytes / sizeof(std::uint64_t);
constexpr std::size_t kActions = 60;
/// Until everything has run out: leases, reservations, reads that are late.
constexpr Duration kLongEnough = seconds(120);
/// For a request when nothing goes wrong; below any lease.
constexpr Duration kSoonDone = milliseconds(500);

std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 31)) * 0xBF58476D1CE4E5B9ULL;
  return x ^ (x >> 29);
}

/// Word `i` of the page of `key` that was saved at `written`, which is word 0 as it is.
std::uint64_t word_of(const BlockKey& key, std::uint64_t written, std::size_t i) {
  if (i == 0) return written;
  return mix(key.hash() + mix(written) + (i + 1) * 0x9E3779B97F4A7C15ULL);
}

void write_page(std::span<std::byte> page, const BlockKey& key, std::uint64_t written,
                std::size_t from, std::size_t to) {
  for (std::size_t i = from; i < to; ++i) {
    const std::uint64_t word = word_of(key, written, i);
    std::memcpy(page.data() + i * sizeof word, &word, sizeof word);
  }
}

}  // namespace

/// What a page of an engine is.
struct NodesWorld::Page {
  BlockKey key;
  std::uint64_t time = 0;  ///< Of a write: when it was reserved. Of a read: no older one is right.
};

/// A process that loads and saves, with one connection.
struct NodesWorld::Engine final : kj::TaskSet::ErrorHandler {
  Engine(std::size_t of, const Id128& called) : node(of), process(called) {
    tasks = kj::heap<kj::TaskSet>(*this);
  }
  void taskFailed(kj::Exception&& exception) override {
    if (!failure) failure = error_from(exception).detail;
  }

  const std::size_t node;
  const Id128 process;
  Id128 connection;
  bool is_dead = false;
  std::map<std::uint32_t, Page> reads;  ///< Pages that it has pinned; one pin each at a time.
  std::map<std::uint32_t, std::uint32_t> pins;  ///< How often.
  std::map<std::uint32_t, Page> writes;
  std::optional<std::string> failure;
  kj::Own<kj::TaskSet> tasks;
};

struct NodesWorld::Load {
  std::shared_ptr<Engine> engine;
  std::vector<BlockKey> keys;
  Id128 token;
  std::uint64_t oldest = 0;  ///< What was saved before that must not be found.
  std::size_t total = 0;
  std::size_t next = 0;
  bool is_aborted = false;  ///< Its claim was ended.
};

NodesWorld::NodesWorld(std::uint64_t seed, kj::WaitScope& scope, NodesCoverage& coverage,
                       const NodesMistakes& mistakes)
    : random_(seed),
      coverage_(coverage),
      name_(mix(seed)),
      outlived_leases_(mistakes.outlived_leases) {
  chains_ = 2 + pick(6);
  // Some are longer than a peer is asked for at once.
  chain_blocks_ = 4 + pick(chance(0.2) ? 2 * Lenders::kFirstKeys : 20);
  perf::SimCluster::Options options;
  options.nodes = 2 + pick(3);
  options.blocks = 16 + pick(80);
  options.seed = random_();
  auto& store = options.service.store;
  store.remembered_losses = 64;
  store.max_claims = 256;
  store.max_pins = 1024;
  store.max_reservations = 256;
  store.max_leases = 64;
  store.eviction = kEvictionKinds[pick(kEvictionKinds.size())];
  store.fetch_share = chance(0.5) ? 0.25 : 0.6;
  store.lend_share = chance(0.5) ? 0.25 : 0.8;
  options.service.demand_windows = {seconds(60)};
  options.fabric.rails_bytes_per_s.assign(1 + pick(3), 1e9);
  options.fabric.batches = 300;
  options.fabric.stall_timeout = chance(0.5) ? seconds(2) : milliseconds(50);
  options.fetches.batch_bytes = perf::SimCluster::kPageBytes * (1 + pick(8));
  options.fetches.batches = chance(0.2) ? 2 : 256;
  options.fetches.deadline = chance(0.5) ? seconds(2) : seconds(60);
  options.fetches.lease = milliseconds(chance(0.5) ? 10000 : 1200 + pick(1000));
  options.on_read = [this](std::size_t node, const Fabric::Batch& batch) {
    for (const Fabric::Chunk& chunk : batch.chunks) {
      look_at_free(node,
                   static_cast<std::uint32_t>(chunk.local_offset / perf::SimCluster::kPageBytes),
                   "a fetch");
    }
  };
  options.on_locate = [this](std::size_t reader) {
    return [this, oldest = oldest_[reader]](std::size_t owner, std::span<const BlockKey> found) {
      if (oldest != 0) look_at_located(owner, found, oldest);
    };
  };
  options.on_wrong = [this](const std::string& what) { wrong(what); };
  uses_.assign(options.nodes, std::vector<Use>(options.blocks));
  engines_.resize(options.nodes);
  oldest_.resize(options.nodes);
  lives_.resize(options.nodes);
  options.mistakes = mistakes.nodes;
  options.fetches.mistakes = mistakes.fetches;
  cluster_ = std::make_unique<perf::SimCluster>(options, scope);
  for (std::size_t i = 0; i < options.nodes; ++i) add_engine(i);
}

NodesWorld::~NodesWorld() noexcept(false) {
  for (std::size_t i = 0; i < engines_.size(); ++i) forget_engines(i);
}

// ---- chance

bool NodesWorld::chance(double probability) {
  return std::uniform_real_distribution<>(0, 1)(random_) < probability;
}
std::size_t NodesWorld::pick(std::size_t count) { return random_() % count; }
Duration NodesWorld::some(Duration longest) {
  // Mostly short, seldom long.
  const double part = std::uniform_real_distribution<>(0, 1)(random_);
  return Duration(
      static_cast<Duration::rep>(part * part * part * static_cast<double>(longest.count())));
}

BlockKey NodesWorld::key(std::size_t chain, std::size_t block) const {
  BlockKey made;
  const std::uint64_t words[2] = {mix(name_ + chain * 1000 + block), name_};
  std::memcpy(made.bytes.data(), words, sizeof words);
  return made;
}

std::vector<BlockKey> NodesWorld::some_keys(bool is_new) {
  const std::size_t chain = is_new ? 1000 + next_++ : pick(chains_);
  std::vector<BlockKey> keys(1 + pick(chain_blocks_));
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = key(chain, i);
  return keys;
}

std::optional<std::size_t> NodesWorld::living_node() {
  std::vector<std::size_t> living;
  for (std::size_t i = 0; i < cluster_->size(); ++i) {
    if (cluster_->node(i) != nullptr) living.push_back(i);
  }
  if (living.empty()) return std::nullopt;
  return living[pick(living.size())];
}

double NodesWorld::seconds_now() const {
  if (!cluster_) return 0;
  return std::chrono::duration<double>(cluster_->clock().now().time_since_epoch()).count();
}

// ---- what happens

void NodesWorld::wrong(const std::string& what) {
  if (failure_.empty()) failure_ = what;
}

void NodesWorld::stop_if_wrong() {
  for (const auto& engines : engines_) {
    for (const auto& engine : engines) {
      if (engine->failure) wrong(*engine->failure);
    }
  }
  if (!failure_.empty()) throw std::runtime_error(failure_);
}

void NodesWorld::run() {
  for (std::size_t i = 0; i < kActions; ++i) {
    act();
    const Duration longest = chance(0.05)  ? Duration(seconds(15))
                             : chance(0.2) ? Duration(milliseconds(100))
                                           : Duration(microseconds(200));
    cluster_->run_for(some(longest));
    stop_if_wrong();
  }
  end_all();
  stop_if_wrong();
}

void NodesWorld::act() {
  const std::size_t what = pick(100);
  if (what < outlived_leases_) return outlive_a_lease();
  if (what < 70) return begin_request(living_node(), chance(0.1));
  if (what < 76) return kill_or_start();
  if (what < 82) return cut_or_heal();
  if (what < 88) return change_faults();
  if (what < 92) return end_engine();
  const auto node = living_node();
  if (!node) return;
  if (what < 96) {
    const Duration time = some(seconds(15));
    note("node {} stands still for {} ms", *node, time.count() / 1000000);
    cluster_->freeze(*node, time);
  } else if (what < 98) {
    add_engine(*node);
  } else {
    for (const auto& engine : engines_[*node]) {
      if (engine->is_dead) continue;
      note("node {} forgets all", *node);
      reset(engine);
      return;
    }
  }
}

void NodesWorld::reset(const std::shared_ptr<Engine>& engine) {
  const std::uint64_t now = ++time_;
  perf::SimCluster::Node& node = *cluster_->node(engine->node);
  const auto made = node.service().reset_cache(engine->connection);
  if (!made) return wrong("a reset fails: " + made.error().detail);
  node.poke();
  oldest_[engine->node] = now;
  ++coverage_["reset"];
  engine->tasks->add(
      spread_reset(node.service(), node.lenders(), cluster_->clock(), made->space)
          .then([this, now, lives = lives_](const std::vector<std::string>& unconfirmed) {
            ++coverage_[unconfirmed.empty() ? "reset confirmed" : "reset not confirmed"];
            for (std::size_t i = 0; i < cluster_->size(); ++i) {
              const std::string name = "node " + std::to_string(i);
              if (cluster_->node(i) == nullptr || lives_[i] != lives[i] ||
                  std::find(unconfirmed.begin(), unconfirmed.end(), name) != unconfirmed.end()) {
                continue;
              }
              oldest_[i] = std::max(oldest_[i], now);
            }
          }));
}

/// An owner names blocks only to a reader that may have them as they are.
void NodesWorld::look_at_located(std::size_t owner, std::span<const BlockKey> found,
                                 std::uint64_t oldest) {
  const auto& engines = engines_[owner];
  const auto living = std::find_if(engines.begin(), engines.end(),
                                   [](const auto& engine) { return !engine->is_dead; });
  if (living == engines.end()) return;
  CacheService& service = cluster_->node(owner)->service();
  const Id128 token{4, next_++};
  const auto claimed = service.claim((*living)->connection, token, found);
  if (!claimed || claimed->blocks == 0) return;
  const PinId pin{next_++};
  if (const auto opened = service.open((*living)->connection, token, 0, claimed->blocks, pin)) {
    for (std::size_t i = 0; i < opened->slots.size(); ++i) {
      look_at(**living, opened->slots[i], {found[i], oldest});
    }
    ++coverage_["located blocks looked at"];
    (void)service.release((*living)->connection, pin);
  }
  (void)service.unclaim((*living)->connection, token);
}

void NodesWorld::kill_or_start() {
  const std::size_t node = pick(cluster_->size());
  if (cluster_->node(node) == nullptr) {
    note("node {} starts", node);
    cluster_->start(node);
    add_engine(node);
    return;
  }
  note("node {} is killed", node);
  count_up(node);
  forget_engines(node);
  std::fill(uses_[node].begin(), uses_[node].end(), Use{});
  oldest_[node] = 0;
  ++lives_[node];
  cluster_->kill(node);
  ++coverage_["killed"];
}

void NodesWorld::cut_or_heal() {
  const std::size_t one = pick(cluster_->size());
  const std::size_t other = (one + 1 + pick(cluster_->size() - 1)) % cluster_->size();
  const bool cuts = chance(0.5);
  note("the way from {} to {} {}", one, other, cuts ? "is cut" : "heals");
  cuts ? cluster_->cut(one, other) : cluster_->heal(one, other);
}

void NodesWorld::change_faults() {
  SimNetwork::Faults faults;
  if (chance(0.7)) {
    faults = {.broken = chance(0.3) ? 0.2 : 0,
              .corrupt = chance(0.3) ? 0.2 : 0,
              .slow = chance(0.7) ? 0.4 : 0,
              .slowest = chance(0.5) ? Duration(seconds(15)) : Duration(milliseconds(5))};
  }
  note("reads break {:.1f}, are wrong {:.1f}, slow {:.1f}", faults.broken, faults.corrupt,
       faults.slow);
  cluster_->network().set_faults(faults);
  cluster_->set_lost(chance(0.2) ? 0.2 : 0);
}

void NodesWorld::add_engine(std::size_t node) {
  auto engine = std::make_shared<Engine>(node, Id128{1, next_++});
  engine->connection = cluster_->node(node)->add_engine(engine->process);
  engines_[node].push_back(std::move(engine));
}

void NodesWorld::forget_engines(std::size_t node) {
  // Their tasks hold them, and go before what they speak to.
  for (const auto& engine : engines_[node]) engine->tasks = nullptr;
  engines_[node].clear();
}

void NodesWorld::end_engine() {
  const auto node = living_node();
  if (!node || engines_[*node].empty()) return;
  auto& engines = engines_[*node];
  const std::size_t which = pick(engines.size());
  const std::shared_ptr<Engine> engine = engines[which];
  CacheService& service = cluster_->node(*node)->service();
  if (!engine->is_dead) {
    note("engine {} of node {} disconnects", engine->process.low, *node);
    engine->is_dead = true;
    engine->tasks = nullptr;
    service.disconnected(engine->connection);
  } else {
    // Its copies went on until now.
    note("engine {} of node {} is gone", engine->process.low, *node);
    for (const auto& [page, count] : engine->pins) {
      look_at(*engine, page, engine->reads.at(page));
      uses_[*node][page].readers -= count;
    }
    for (const auto& [page, written] : engine->writes) {
      const std::span<std::byte> bytes = cluster_->node(*node)->page(page);
      std::fill(bytes.begin(), bytes.end(), std::byte{0xEE});
      uses_[*node][page].is_written = false;
    }
    service.process_gone(engine->connection);
    engines.erase(engines.begin() + static_cast<std::ptrdiff_t>(which));
    ++coverage_["engine gone"];
    if (engines.empty()) add_engine(*node);
  }
  cluster_->node(*node)->poke();
}

void NodesWorld::begin_request(std::optional<std::size_t> node, bool is_new) {
  if (!node || cluster_->node(*node) == nullptr) return;
  const auto engine = engines_[*node][pick(engines_[*node].size())];
  if (!engine->is_dead) engine->tasks->add(request(engine, is_new));
}

void NodesWorld::outlive_a_lease() {
  // What a lease's end is for: a reader stands still while its card goes on, and the owner needs
  // the room.
  const auto node = living_node();
  if (!node) return;
  cluster_->network().set_faults({.slow = 1, .slowest = seconds(15)});
  for (int i = 0; i < 3; ++i) begin_request(*node, false);
  cluster_->run_for(microseconds(300));
  // A machine that its hypervisor pauses does not see that time passes.
  const bool is_paused = chance(0.5);
  note("node {} {} for 16 s, with reads in flight", *node,
       is_paused ? "is paused" : "stands still");
  is_paused ? cluster_->pause_machine(*node, seconds(16)) : cluster_->freeze(*node, seconds(16));
  if (is_paused) ++coverage_["paused from outside"];
  cluster_->network().set_faults({});
  cluster_->run_for(milliseconds(2000 + pick(10000)));
  for (int i = 0; i < 30; ++i) {
    const auto other = living_node();
    if (other == node) continue;
    begin_request(other, true);
    cluster_->run_for(milliseconds(5));
  }
}

// ---- what an engine does

kj::Promise<void> NodesWorld::pause(Duration longest) {
  return cluster_->timer().afterDelay(some(longest).count() * kj::NANOSECONDS);
}

kj::Promise<void> NodesWorld::request(const std::shared_ptr<Engine>& engine, bool is_new) {
  perf::SimCluster::Node& node = *cluster_->node(engine->node);
  auto made = std::make_shared<Load>();
  made->engine = engine;
  made->keys = some_keys(is_new);
  made->token = {2, next_++};
  made->oldest = oldest_[engine->node];
  const auto found = node.service().claim(engine->connection, made->token, made->keys);
  node.poke();
  const std::size_t ready = found ? found->blocks : 0;
  note("engine {} of node {} claims {} blocks of {:x}, {} are there", engine->process.low,
       engine->node, made->keys.size(), made->keys[0].hash(), ready);
  auto extended = found ? node.fetches()
                              .extend(engine->connection, made->token, made->keys, ready)
                              .then([](const Fetches::Extension& more) { return more.blocks; })
                        : kj::Promise<std::size_t>(std::size_t{0});
  auto aborted = chance(0.05) ? pause(milliseconds(1)).then([this, made]() {
    // Before it is answered, perhaps.
    perf::SimCluster::Node& self = *cluster_->node(made->engine->node);
    self.fetches().ended(made->token);
    (void)self.service().unclaim(made->engine->connection, made->token);
    self.poke();
    made->is_aborted = true;
    ++coverage_["aborted"];
  })
                              : kj::Promise<void>(kj::READY_NOW);
  return extended
      .then([this, made, ready](std::size_t coming) {
        made->total = ready + coming;
        if (coming != 0) ++coverage_["coming"];
        return pause(milliseconds(1));
      })
      .then([this, made]() { return load(made); })
      .then([this, made]() {
        // Once only: what is made anew behind an abort would be left.
        if (made->is_aborted) return kj::Promise<void>(kj::READY_NOW);
        perf::SimCluster::Node& self = *cluster_->node(made->engine->node);
        self.fetches().ended(made->token);
        (void)self.service().unclaim(made->engine->connection, made->token);
        self.poke();
        return save(made->engine, {made->keys.begin() + static_cast<std::ptrdiff_t>(made->next),
                                   made->keys.end()});
      })
      .attach(aborted.eagerlyEvaluate(nullptr));
}

kj::Promise<void> NodesWorld::load(const std::shared_ptr<Load>& load) {
  if (load->is_aborted || load->next == load->total || chance(0.05)) return kj::READY_NOW;
  perf::SimCluster::Node& node = *cluster_->node(load->engine->node);
  const PinId pin{next_++};
  const std::size_t count = chance(0.7) ? load->total - load->next : 1;
  return node.fetches()
      .open(load->engine->connection, load->token, load->next, count, pin, some(seconds(3)))
      .then([this, load, pin](Result<CacheService::Opened>&& opened) -> kj::Promise<void> {
        if (!opened || opened->slots.empty()) {
          ++coverage_[opened ? "open: not yet" : "open: gone"];
          return kj::READY_NOW;
        }
        Engine& engine = *load->engine;
        const std::vector<std::uint32_t> pages = opened->slots;
        for (std::size_t i = 0; i < pages.size(); ++i) {
          const Page page{load->keys[load->next + i], load->oldest};
          look_at(engine, pages[i], page);
          ++uses_[engine.node][pages[i]].readers;
          ++engine.pins[pages[i]];
          engine.reads[pages[i]] = page;
        }
        coverage_["opened"] += pages.size();
        return pause(milliseconds(20)).then([this, load, pin, pages]() {
          Engine& reader = *load->engine;
          for (std::size_t i = 0; i < pages.size(); ++i) {
            look_at(reader, pages[i], {load->keys[load->next + i], load->oldest});
            --uses_[reader.node][pages[i]].readers;
            if (--reader.pins[pages[i]] == 0) reader.pins.erase(pages[i]);
          }
          perf::SimCluster::Node& self = *cluster_->node(reader.node);
          (void)self.service().release(reader.connection, pin);
          self.poke();
          load->next += pages.size();
          return this->load(load);
        });
      });
}

kj::Promise<void> NodesWorld::save(const std::shared_ptr<Engine>& engine,
                                   std::vector<BlockKey> keys) {
  if (keys.empty()) return kj::READY_NOW;
  perf::SimCluster::Node& node = *cluster_->node(engine->node);
  const JobId job{.scheduler = engine->process, .number = next_++};
  const auto slots = node.service().reserve(engine->connection, job, 0, keys);
  node.poke();
  if (!slots) return kj::READY_NOW;
  std::vector<std::uint32_t> pages;
  const std::uint64_t now = ++time_;
  for (std::size_t i = 0; i < slots->size(); ++i) {
    const std::uint32_t page = (*slots)[i];
    if (page == CacheService::kNoPage) continue;
    look_at_free(engine->node, page, "a save");
    uses_[engine->node][page].is_written = true;
    engine->writes[page] = {keys[i], now};
    write_page(node.page(page), keys[i], now, 0, kWords / 2);
    pages.push_back(page);
  }
  if (pages.empty()) return kj::READY_NOW;
  return pause(chance(0.02) ? Duration(seconds(40)) : Duration(milliseconds(2)))
      .then([this, engine, job, pages]() {
        perf::SimCluster::Node& self = *cluster_->node(engine->node);
        for (const std::uint32_t page : pages) {
          const Page& written = engine->writes.at(page);
          write_page(self.page(page), written.key, written.time, kWords / 2, kWords);
          uses_[engine->node][page].is_written = false;
          engine->writes.erase(page);
        }
        if (chance(0.1)) {
          (void)self.service().abandon(engine->connection, job);
        } else {
          Result<std::size_t> left = std::size_t{1};
          while (left && *left != 0) left = self.service().publish(engine->connection, job);
          ++coverage_[left ? "saved" : "saved too late"];
        }
        self.poke();
      });
}

// ---- what is looked at

void NodesWorld::look_at(const Engine& engine, std::uint32_t page, const Page& expected) {
  const std::span<const std::byte> bytes = cluster_->node(engine.node)->page(page);
  std::uint64_t written = 0;
  std::memcpy(&written, bytes.data(), sizeof written);
  for (std::size_t i = 1; i < kWords; ++i) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + i * sizeof word, sizeof word);
    if (word == word_of(expected.key, written, i)) continue;
    return wrong(fmt::format("page {} of node {} has other bytes than block {:x}, from word {} on",
                             page, engine.node, expected.key.hash(), i));
  }
  if (written >= expected.time) return;
  wrong(fmt::format("node {} serves block {:x} as it was saved at {}, before the reset at {}",
                    engine.node, expected.key.hash(), written, expected.time));
}

void NodesWorld::look_at_free(std::size_t node, std::uint32_t page, const char* whose) {
  const Use& use = uses_[node][page];
  const auto place = cluster_->node(node)->place(page * perf::SimCluster::kPageBytes,
                                                 perf::SimCluster::kPageBytes);
  const bool is_brought = cluster_->node(node)->fabric().is_written(place);
  if (use.readers == 0 && !use.is_written && !is_brought) return;
  wrong(fmt::format("{} gets page {} of node {}, which {}", whose, page, node,
                    is_brought       ? "a card may still write"
                    : use.is_written ? "an engine writes"
                                     : "is pinned"));
}

std::string NodesWorld::unrest() const {
  for (std::size_t i = 0; i < cluster_->size(); ++i) {
    perf::SimCluster::Node& node = *cluster_->node(i);
    const BlockStore::Stats stats = node.service().stats().store;
    if (node.fetches().stats().batches != 0) {
      return fmt::format("node {} has {} batches", i, node.fetches().stats().batches);
    }
    if (node.fabric().batches() != 0) {
      return fmt::format("the fabric of node {} has {} batches", i, node.fabric().batches());
    }
    if (node.ready_peers() + 1 != cluster_->size()) {
      return fmt::format("node {} has {} peers", i, node.ready_peers());
    }
    if (!node.service().store().is_at_rest() || node.service().has_work()) {
      return fmt::format(
          "the store of node {} is not at rest: {} coming, {} given up, {} reserved, {} held, {} "
          "claims, {} pins, {} leases",
          i, stats.coming, stats.quarantined_fetch, stats.reserved, stats.held, stats.claims,
          stats.pins, stats.leases);
    }
  }
  return {};
}

void NodesWorld::count_up(std::size_t node) {
  const Fetches::Stats fetches = cluster_->node(node)->fetches().stats();
  const BlockStore::Stats store = cluster_->node(node)->service().stats().store;
  coverage_["blocks fetched"] += fetches.blocks;
  coverage_["blocks given up"] += fetches.given_up;
  coverage_["blocks retried"] += fetches.retried;
  coverage_["blocks too late for their lease"] += fetches.outlived;
  coverage_["blocks not confirmed"] += fetches.unconfirmed;
  coverage_["blocks corrupt"] += fetches.corrupt;
  coverage_["fetches joined"] += store.fetches_joined;
  coverage_["fetches without room"] += store.fetches_no_room;
  coverage_["evictions"] += store.evictions;
  coverage_["replicas evicted"] += store.evicted_replicas;
  coverage_["leases run out"] += store.leases_expired;
  coverage_["reservations timed out"] += store.reservations_timed_out;
  coverage_["claims revoked"] += store.claims_revoked;
}

void NodesWorld::end_all() {
  note("the end begins");
  cluster_->network().set_faults({});
  cluster_->set_lost(0);
  for (std::size_t i = 0; i < cluster_->size(); ++i) {
    if (cluster_->node(i) == nullptr) {
      cluster_->start(i);
      add_engine(i);
    }
    for (std::size_t j = 0; j < i; ++j) cluster_->heal(i, j);
  }
  const TimePoint end = cluster_->clock().now() + kLongEnough;
  for (auto& engines : engines_) {
    std::vector<std::shared_ptr<Engine>> dead;
    for (const auto& engine : engines) {
      if (engine->is_dead) dead.push_back(engine);
    }
    for (const auto& engine : dead) {
      for (const auto& [page, count] : engine->pins) {
        look_at(*engine, page, engine->reads.at(page));
        uses_[engine->node][page].readers -= count;
      }
      for (const auto& [page, written] : engine->writes)
        uses_[engine->node][page].is_written = false;
      cluster_->node(engine->node)->service().process_gone(engine->connection);
      cluster_->node(engine->node)->poke();
    }
    std::erase_if(engines, [](const auto& engine) { return engine->is_dead; });
  }
  while (!unrest().empty() && cluster_->clock().now() < end) cluster_->run_for(seconds(1));
  stop_if_wrong();
  if (const std::string why = unrest(); !why.empty()) return wrong("something is left: " + why);
  give_back();
  stop_if_wrong();
  // All have greeted each other: no node has missed a reset that another one knows.
  const std::uint64_t newest = *std::max_element(oldest_.begin(), oldest_.end());
  std::fill(oldest_.begin(), oldest_.end(), newest);
  look_at_everything();
}

void NodesWorld::give_back() {
  cluster_->run_for(seconds(20));  // Nobody stands still for longer.
  const auto stats = [this](std::size_t node) {
    return cluster_->node(node)->service().stats().store;
  };
  // A way that was cut may show only now, by a read that fails: then its lease runs out, whether
  // its blocks come from another owner or not at all.
  const auto failed = [this]() {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < cluster_->size(); ++i) {
      const auto told = cluster_->node(i)->fetches().stats();
      sum += told.given_up + told.retried;
    }
    return sum;
  };
  const std::uint64_t failed_before = failed();
  std::vector<BlockStore::Stats> before;
  for (std::size_t i = 0; i < cluster_->size(); ++i) {
    before.push_back(stats(i));
    if (engines_[i].empty()) add_engine(i);
    begin_request(i, false);
  }
  cluster_->run_for(kSoonDone);
  for (std::size_t i = 0; failed() == failed_before && i < cluster_->size(); ++i) {
    const BlockStore::Stats now = stats(i);
    coverage_["leases given back at the end"] += now.leases_made - before[i].leases_made;
    if (now.claims + now.pins != 0) {
      wrong(fmt::format("a request at node {} waits for what has come", i));
    }
    if (now.leases == 0 && now.leases_expired == before[i].leases_expired) continue;
    wrong(fmt::format("of node {} {} leases are not given back", i,
                      now.leases + now.leases_expired - before[i].leases_expired));
  }
  const TimePoint end = cluster_->clock().now() + kLongEnough;
  while (!unrest().empty() && cluster_->clock().now() < end) cluster_->run_for(seconds(1));
}

void NodesWorld::look_at_everything() {
  for (std::size_t i = 0; i < cluster_->size(); ++i) {
    count_up(i);
    perf::SimCluster::Node& node = *cluster_->node(i);
    if (engines_[i].empty()) add_engine(i);
    const Engine& engine = *engines_[i].front();
    for (std::size_t chain = 0; chain < chains_; ++chain) {
      for (std::size_t block = 0; block < chain_blocks_; ++block) {
        const BlockKey one = key(chain, block);
        const Id128 token{3, next_++};
        const PinId pin{next_++};
        const auto found = node.service().claim(engine.connection, token, {&one, 1});
        if (!found || found->blocks == 0) continue;
        const auto opened = node.service().open(engine.connection, token, 0, 1, pin);
        if (!opened) return wrong("a block that is claimed at rest is not opened");
        look_at(engine, opened->slots[0], {one, oldest_[i]});
        ++coverage_["blocks at the end"];
        (void)node.service().release(engine.connection, pin);
        (void)node.service().unclaim(engine.connection, token);
      }
    }
    while (node.service().work()) {
    }
    const auto checked = node.service().store().check();
    if (!checked) wrong(fmt::format("node {}: {}", i, checked.error().detail));
  }
}

}  // namespace pegaflow::sim
