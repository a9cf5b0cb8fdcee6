#include "tests/sim/nodes_world.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "server/cache/resets.h"
#include "tests/sim/nodes_world_impl.h"

namespace pegaflow::sim {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr std::size_t kActions = 60;

void write_page(std::span<std::byte> page, const BlockKey& key, std::uint64_t written,
                std::size_t from, std::size_t to) {
  for (std::size_t i = from; i < to; ++i) {
    const std::uint64_t word = word_of(key, written, i);
    std::memcpy(page.data() + i * sizeof word, &word, sizeof word);
  }
}

}  // namespace

struct NodesWorld::Load {
  std::shared_ptr<Engine> engine;
  std::vector<BlockKey> keys;
  Id128 token;
  std::uint64_t oldest = 0;  ///< Blocks that were saved before it must not be found.
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
  // Some are longer than one request to a peer.
  chain_blocks_ = 4 + pick(chance(0.2) ? 2 * cluster::Lenders::kFirstKeys : 20);
  harness::SimCluster::Options options;
  options.nodes = 2 + pick(3);
  options.blocks = 16 + pick(80);
  options.seed = random_();
  options.clocks = some_clocks(options.nodes);
  auto& store = options.service.store;
  store.remembered_losses = 64;
  store.max_claims = 256;
  store.max_pins = 1024;
  store.max_reservations = 256;
  store.max_leases = 64;
  store.eviction = engine::kEvictionKinds[pick(engine::kEvictionKinds.size())];
  store.fetch_share = chance(0.5) ? 0.25 : 0.6;
  store.lend_share = chance(0.5) ? 0.25 : 0.8;
  options.service.demand_windows = {seconds(60)};
  options.fabric.rails_bytes_per_s.assign(1 + pick(3), 1e9);
  options.fabric.batches = 300;
  options.fabric.stall_timeout = chance(0.5) ? seconds(2) : milliseconds(50);
  options.source.batch_bytes = harness::SimCluster::kPageBytes * (1 + pick(8));
  options.source.batches = chance(0.2) ? 2 : 256;
  options.fetches.deadline = chance(0.5) ? seconds(2) : seconds(60);
  options.has_disks = chance(0.5);
  if (chance(0.2)) options.staging.most = 2;
  options.staging.deadline = options.fetches.deadline;
  options.source.lease = milliseconds(chance(0.5) ? 10000 : 1200 + pick(1000));
  options.on_read = [this](std::size_t node, const Fabric::Batch& batch) {
    for (const Fabric::Chunk& chunk : batch.chunks) {
      look_at_free(node,
                   static_cast<std::uint32_t>(chunk.local_offset / harness::SimCluster::kPageBytes),
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
  options.source.mistakes = mistakes.source;
  options.fetches.mistakes = mistakes.fetches;
  cluster_ = std::make_unique<harness::SimCluster>(options, scope);
  for (std::size_t i = 0; i < options.nodes; ++i) add_engine(i);
}

NodesWorld::~NodesWorld() noexcept(false) {
  for (std::size_t i = 0; i < engines_.size(); ++i) forget_engines(i);
}

// ---- random choices

bool NodesWorld::chance(double probability) {
  return std::uniform_real_distribution<>(0, 1)(random_) < probability;
}
std::size_t NodesWorld::pick(std::size_t count) { return random_() % count; }
Duration NodesWorld::some(Duration longest) {
  // Mostly short, rarely long.
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

Duration NodesWorld::some_system_time() {
  return std::chrono::microseconds(pick(7'200'000'000)) - std::chrono::hours(1);
}

std::vector<harness::SimCluster::Options::Clocks> NodesWorld::some_clocks(std::size_t nodes) {
  std::vector<harness::SimCluster::Options::Clocks> clocks(nodes);
  const bool are_alike = chance(0.3);
  const double most = chance(0.5) ? 0.001 : 0.5;
  system_clocks_agree_ = chance(0.5);
  for (auto& one : clocks) {
    if (!are_alike) {
      // Between 1 / (1 + most) and 1 + most.
      const double faster = 1 + std::uniform_real_distribution<>(0, most)(random_);
      one.rate = chance(0.5) ? faster : 1 / faster;
      one.ahead = std::chrono::hours(pick(1000));
    }
    if (!system_clocks_agree_) one.system_ahead = some_system_time();
  }
  return clocks;
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

// ---- events

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
    stand_still(*node);
  } else if (what < 98) {
    add_engine(*node);
  } else {
    for (const auto& engine : engines_[*node]) {
      if (engine->is_dead) continue;
      note("a reset at node {}", *node);
      reset(engine);
      return;
    }
  }
}

void NodesWorld::stand_still(std::size_t node) {
  const Duration time = some(seconds(15));
  const bool is_paused = chance(0.4);
  note("node {} {} for {} ms", node, is_paused ? "is paused" : "freezes", time.count() / 1000000);
  is_paused ? cluster_->pause_machine(node, time) : cluster_->freeze(node, time);
  if (is_paused) ++coverage_["paused from outside"];
  if (system_clocks_agree_ || !chance(0.5)) return;
  note("the system clock of node {} is set", node);
  cluster_->set_system_clock(node, some_system_time());
  ++coverage_["system clock set"];
}

void NodesWorld::reset(const std::shared_ptr<Engine>& engine) {
  const std::uint64_t now = ++time_;
  harness::SimCluster::Node& node = *cluster_->node(engine->node);
  const auto made = node.service().reset_cache(engine->connection);
  if (!made) return wrong("a reset fails: " + made.error().detail);
  node.poke();
  // By another clock an epoch that this node does not know may be above its reset.
  if (system_clocks_agree_) oldest_[engine->node] = now;
  ++coverage_["reset"];
  engine->tasks->add(
      spread_reset(node.service(), node.lenders(), nullptr, cluster_->clock(), made->space)
          .then([this, now, lives = lives_](const std::vector<std::string>& unconfirmed) {
            ++coverage_[unconfirmed.empty() ? "reset confirmed" : "reset not confirmed"];
            if (!system_clocks_agree_) {
              if (!unconfirmed.empty()) return;
              ++coverage_["reset confirmed, system clocks disagree"];
            }
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
  note("the link from {} to {} {}", one, other, cuts ? "is cut" : "heals");
  cuts ? cluster_->cut(one, other) : cluster_->heal(one, other);
}

void NodesWorld::change_faults() {
  using harness::SimDisks;
  SimNetwork::Faults faults;
  if (chance(0.7)) {
    faults = {.broken = chance(0.3) ? 0.2 : 0,
              .corrupt = chance(0.3) ? 0.2 : 0,
              .slow = chance(0.7) ? 0.4 : 0,
              .slowest = chance(0.5) ? Duration(seconds(15)) : Duration(milliseconds(5))};
  }
  SimDisks::Faults disks;
  if (chance(0.5)) {
    disks = {.failed = chance(0.5) ? 0.1 : 0,
             .slow = chance(0.5) ? 0.3 : 0,
             .slowest = chance(0.5) ? Duration(seconds(15)) : Duration(milliseconds(5))};
  }
  cluster_->set_disk_faults(disks);
  note("reads of disks fail {:.1f}, are slow {:.1f}", disks.failed, disks.slow);
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
  // Their tasks hold them, and end before the services that they call.
  for (const auto& engine : engines_[node]) engine->tasks = nullptr;
  engines_[node].clear();
}

void NodesWorld::end_engine() {
  const auto node = living_node();
  if (!node || engines_[*node].empty()) return;
  auto& engines = engines_[*node];
  const std::size_t which = pick(engines.size());
  const std::shared_ptr<Engine> engine = engines[which];
  server::CacheService& service = cluster_->node(*node)->service();
  if (!engine->is_dead) {
    note("engine {} of node {} disconnects", engine->process.low, *node);
    engine->is_dead = true;
    engine->tasks = nullptr;
    service.disconnected(engine->connection);
  } else {
    // Its copies continued until now.
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
  // The reason for a lease's end: a reader is frozen while its card continues, and the owner needs
  // the frames.
  const auto node = living_node();
  if (!node) return;
  cluster_->network().set_faults({.slow = 1, .slowest = seconds(15)});
  for (int i = 0; i < 3; ++i) begin_request(node, false);
  cluster_->run_for(microseconds(300));
  // A machine that its hypervisor pauses does not notice that time passes.
  const bool is_paused = chance(0.5);
  note("node {} {} for 16 s, with reads in flight", *node, is_paused ? "is paused" : "freezes");
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

// ---- requests of an engine

kj::Promise<void> NodesWorld::pause(Duration longest) {
  return cluster_->timer().afterDelay(some(longest).count() * kj::NANOSECONDS);
}

kj::Promise<void> NodesWorld::request(const std::shared_ptr<Engine>& engine, bool is_new) {
  harness::SimCluster::Node& node = *cluster_->node(engine->node);
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
  kj::Promise<std::size_t> extended = std::size_t{0};
  if (found) {
    KJ_IF_MAYBE (extending,
                 node.fetches().extend(engine->connection, made->token, made->keys, ready)) {
      extended =
          extending->then([](const server::Fetches::Extension& more) { return more.blocks; });
    }
  }
  auto aborted = chance(0.05) ? pause(milliseconds(1)).then([this, made]() {
    // Possibly before its response.
    harness::SimCluster::Node& self = *cluster_->node(made->engine->node);
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
        // Once only: a claim that is made again behind an abort would be left.
        if (made->is_aborted) return kj::Promise<void>(kj::READY_NOW);
        harness::SimCluster::Node& self = *cluster_->node(made->engine->node);
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
  harness::SimCluster::Node& node = *cluster_->node(load->engine->node);
  const engine::PinId pin{next_++};
  const std::size_t count = chance(0.7) ? load->total - load->next : 1;
  server::Fetches::Wait wait{.patience = some(seconds(3))};
  if (chance(0.5))
    wait.worth = chance(0.5) ? server::Fetches::Wait::kForever : some(milliseconds(500));
  if (wait.worth && chance(0.5)) wait.computing = some(milliseconds(100));
  return node.fetches()
      .open(load->engine->connection, load->token, load->next, count, pin, wait)
      .then([this, load, pin](Result<server::Fetches::Arrived>&& arrived) -> kj::Promise<void> {
        if (!arrived || arrived->opened.slots.empty()) {
          const bool is_late = arrived && arrived->late != server::Fetches::Late::kNo;
          ++coverage_[is_late ? "open: late" : arrived ? "open: not yet" : "open: gone"];
          return kj::READY_NOW;
        }
        Engine& engine = *load->engine;
        const std::vector<std::uint32_t> pages = arrived->opened.slots;
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
          harness::SimCluster::Node& self = *cluster_->node(reader.node);
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
  harness::SimCluster::Node& node = *cluster_->node(engine->node);
  const JobId job{.scheduler = engine->process, .number = next_++};
  const auto slots = node.service().reserve(engine->connection, job, 0, keys);
  node.poke();
  if (!slots) return kj::READY_NOW;
  std::vector<std::uint32_t> pages;
  const std::uint64_t now = ++time_;
  for (std::size_t i = 0; i < slots->size(); ++i) {
    const std::uint32_t page = (*slots)[i];
    if (page == server::CacheService::kNoPage) continue;
    look_at_free(engine->node, page, "a save");
    uses_[engine->node][page].is_written = true;
    engine->writes[page] = {keys[i], now};
    write_page(node.page(page), keys[i], now, 0, kWords / 2);
    pages.push_back(page);
  }
  if (pages.empty()) return kj::READY_NOW;
  return pause(chance(0.02) ? Duration(seconds(40)) : Duration(milliseconds(2)))
      .then([this, engine, job, pages]() {
        harness::SimCluster::Node& self = *cluster_->node(engine->node);
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

}  // namespace pegaflow::sim
