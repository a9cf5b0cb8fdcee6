// Random interleavings of one event stream against a model: an engine with a cache, a publisher
// with a replay buffer, a network that loses, repeats and reorders, restarts, and replays that are
// refused, cut off or late.
//
// What the source's actions build up is compared with the engine's cache whenever nothing is in
// flight: an exact stream knows the cache, a partial one a part of it, and nothing else.
#include <algorithm>
#include <cstdlib>
#include <deque>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "index/events/source.h"
#include "tests/support/seed.h"

namespace pegaflow::index {
namespace {

using std::chrono::milliseconds;

// What one batch says; KvBatch itself cannot be copied.
struct Published {
  std::uint64_t sequence = 0;
  double timestamp = 0;
  EventKind kind = EventKind::kStored;
  std::vector<std::uint64_t> hashes;

  [[nodiscard]] KvBatch batch() const {
    KvBatch batch;
    batch.timestamp = timestamp;
    batch.wire_bytes = 50 + 9 * hashes.size();
    batch.hashes = hashes;
    KvEvent event;
    event.kind = kind;
    event.block_size = 16;
    event.hashes = batch.hashes;
    batch.events.push_back(event);
    return batch;
  }
};

// One engine behind one address, through its restarts.
class Engine {
 public:
  explicit Engine(std::mt19937_64& random) : random_(random) {}

  Published publish(double timestamp) {
    Published batch;
    batch.sequence = sequence_++;
    batch.timestamp = timestamp;
    const std::uint64_t dice = random_() % 100;
    if (dice < 2) {
      batch.kind = EventKind::kCleared;
      cache.clear();
    } else if (dice < 40 && !cache.empty()) {
      batch.kind = EventKind::kRemoved;
      auto victim = cache.begin();
      std::advance(victim, static_cast<std::ptrdiff_t>(random_() % cache.size()));
      batch.hashes.push_back(*victim);
      cache.erase(victim);
    } else {
      for (std::uint64_t i = 0; i <= random_() % 3; ++i) {
        batch.hashes.push_back(random_() % 64);
        cache.insert(batch.hashes.back());
      }
    }
    buffer.push_back(batch);
    if (buffer.size() > kBuffer) buffer.pop_front();
    return batch;
  }
  void restart() {
    cache.clear();
    buffer.clear();
    sequence_ = 0;
  }

  static constexpr std::size_t kBuffer = 12;
  std::set<std::uint64_t> cache;
  std::deque<Published> buffer;

 private:
  std::mt19937_64& random_;
  std::uint64_t sequence_ = 0;
};

// The source, what its actions built up, and the network before it.
class World {
 public:
  World(std::mt19937_64& random, bool can_replay, bool ignores_forgets = false)
      : random_(random),
        can_replay_(can_replay),
        ignores_forgets_(ignores_forgets),
        engine(random),
        source({.can_replay = can_replay, .held_batches = 8}) {
    source.connected(now);
    take();
  }

  void step() {
    now += milliseconds(1 + static_cast<int>(random_() % 50));
    const std::uint64_t dice = random_() % 1000;
    if (dice < 450) {
      publish();
    } else if (dice < 800) {
      deliver();
    } else if (dice < 960) {
      deliver_replay();
    } else if (dice < 970) {
      reconnect(false);
    } else if (dice < 980) {
      reconnect(true);
    } else if (dice < 985) {
      engine.restart();  // The connection is kept by a proxy: only numbers and contents tell.
      live.clear();
      replies.clear();
      owner_knows_restart_ = false;
    } else if (dice < 990) {
      source.overflowed(now);
    } else {
      now += milliseconds(random_() % 3000);
      source.tick(now);
    }
    take();
  }

  // Until nothing is in flight and no replay is open.
  void settle() {
    if (!owner_knows_restart_) source.restarted("a new start time", now);
    owner_knows_restart_ = true;
    faults = false;
    take();
    publish();  // Every loss shows in the next number.
    for (int round = 0; round < 1000; ++round) {
      while (!live.empty()) deliver();
      while (!replies.empty()) deliver_replay();
      if (live.empty() && replies.empty() && !source.next_deadline()) break;
      now += milliseconds(500);
      source.tick(now);
      take();
    }
    faults = true;
  }

  // What is wrong while nothing is in flight; empty if nothing is.
  [[nodiscard]] std::string violation() const {
    if (source.next_deadline()) return "a replay stays open";
    if (!source.gives_credit()) return "no credit: " + source.reason();
    if (!std::ranges::includes(engine.cache, known)) return "a block that is not cached is known";
    const bool exact = source.trust() == Trust::kExact;
    return exact && known != engine.cache ? "a cached block is not known: " + source.reason() : "";
  }

 private:
  void publish() {
    const Published batch = engine.publish(static_cast<double>(++clock_));
    if (faults && random_() % 100 < 5) return;  // Lost.
    live.push_back(batch);
    if (faults && random_() % 100 < 5) live.push_back(batch);
    if (faults && random_() % 100 < 5 && live.size() > 1) {
      std::swap(live.back(), live[live.size() - 2]);
    }
  }
  void deliver() {
    if (live.empty()) return;
    const Published batch = std::move(live.front());
    live.pop_front();
    source.live(batch.sequence, batch.batch(), now);
    take();
  }
  void reconnect(bool restarts) {
    source.disconnected(now);
    live.clear();  // What was in the connection is lost.
    replies.clear();
    if (restarts) {
      engine.restart();
      owner_knows_restart_ = true;
    }
    for (std::uint64_t i = 0; i < random_() % 6; ++i) engine.publish(static_cast<double>(++clock_));
    source.connected(now);
  }

  struct Reply {
    std::uint64_t ticket = 0;
    bool is_end = false;
    bool complete = true;
    Published batch;
  };
  void answer(std::uint64_t ticket, std::uint64_t from) {
    const std::uint64_t dice = faults ? random_() % 100 : 99;
    if (dice < 5) return;  // Never answered.
    if (dice < 10) {
      replies.push_back({.ticket = ticket, .is_end = true, .complete = false, .batch = {}});
      return;
    }
    for (const Published& batch : engine.buffer) {
      if (batch.sequence < from) continue;
      if (faults && random_() % 100 < 3) continue;
      replies.push_back({.ticket = ticket, .batch = batch});
    }
    if (dice >= 15) replies.push_back({.ticket = ticket, .is_end = true, .batch = {}});
  }
  void deliver_replay() {
    if (replies.empty()) return;
    const Reply reply = std::move(replies.front());
    replies.pop_front();
    if (reply.is_end) {
      source.replay_ended(reply.ticket, reply.complete, now);
    } else {
      source.replayed(reply.ticket, reply.batch.sequence, reply.batch.batch(), now);
    }
    take();
  }

  void take() {
    for (SourceAction action; source.next(action);) {
      if (action.kind == SourceAction::Kind::kForget) {
        if (!ignores_forgets_) known.clear();
      } else if (action.kind == SourceAction::Kind::kReplay) {
        REQUIRE(can_replay_);
        answer(action.ticket, action.from);
      } else if (action.kind == SourceAction::Kind::kApply) {
        for (const KvEvent& event : action.batch.events) apply(event);
      }
    }
    REQUIRE(source.held_batches() <= 8);
  }
  void apply(const KvEvent& event) {
    if (event.kind == EventKind::kCleared) known.clear();
    for (const std::uint64_t hash : event.hashes) {
      if (event.kind == EventKind::kStored) known.insert(hash);
      if (event.kind == EventKind::kRemoved) known.erase(hash);
    }
  }

  std::mt19937_64& random_;
  bool can_replay_;
  bool ignores_forgets_;  // A planted mistake.
  bool owner_knows_restart_ = true;
  int clock_ = 0;

 public:
  Engine engine;
  Source source;
  TimePoint now{};
  bool faults = true;
  std::deque<Published> live;
  std::deque<Reply> replies;
  std::set<std::uint64_t> known;
};

int schedules() {
  const char* const text = std::getenv("PEGA_SOURCE_SCHEDULES");
  return text != nullptr ? std::atoi(text) : 2000;
}

}  // namespace

TEST_SUITE("Source against a model") {
  TEST_CASE("what a stream knows is in the engine's cache, and all of it when it is exact") {
    int exact = 0;
    int partial = 0;
    Source::Stats sums;
    for (int schedule = 0; schedule < schedules(); ++schedule) {
      CAPTURE(schedule);
      std::mt19937_64 random(testing::seed() + static_cast<std::uint64_t>(schedule));
      World world(random, random() % 4 != 0);
      for (int round = 0; round < 4; ++round) {
        for (int i = 0; i < 60; ++i) world.step();
        world.settle();
        CAPTURE(round);
        REQUIRE(world.violation() == "");
        ++(world.source.trust() == Trust::kExact ? exact : partial);
      }
      const Source::Stats& stats = world.source.stats();
      sums.duplicates += stats.duplicates;
      sums.filled += stats.filled;
      sums.lost += stats.lost;
      sums.restarts += stats.restarts;
      sums.replays += stats.replays;
    }
    MESSAGE("exact " << exact << ", partial " << partial << "; duplicates " << sums.duplicates
                     << ", holes filled " << sums.filled << ", batches lost " << sums.lost
                     << ", restarts " << sums.restarts << ", replays " << sums.replays);
    // Each kind of trouble was met.
    CHECK(exact > 0);
    CHECK(partial > 0);
    CHECK(sums.duplicates > 0);
    CHECK(sums.filled > 0);
    CHECK(sums.lost > 0);
    CHECK(sums.restarts > 0);
  }

  TEST_CASE("an owner that ignores forgets is found") {
    bool found = false;
    for (int schedule = 0; schedule < 200 && !found; ++schedule) {
      std::mt19937_64 random(testing::seed() + static_cast<std::uint64_t>(schedule));
      World world(random, random() % 4 != 0, true);
      for (int i = 0; i < 60; ++i) world.step();
      world.settle();
      found = !world.violation().empty();
    }
    CHECK(found);
  }
}

}  // namespace pegaflow::index
