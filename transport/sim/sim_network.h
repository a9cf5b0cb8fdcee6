#pragma once
/// \file
/// A network that exists only here: its time is whoever's drives it, its chance comes from a seed.

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <queue>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "base/clock.h"

namespace pegaflow {

class SimFabric;

/// What happens between several SimFabrics, in the order of its times.
///
/// Nothing happens by itself: run() does what is due by the clock, and next_time() says when that
/// will be. With a ManualClock that is set to next_time() before each run() a second costs what
/// happens in it, and one seed always gives one course of things; with a SteadyClock and a thread
/// that sleeps until then it is a network like others.
///
/// Thread-safe, by one mutex for the network and all its fabrics.
class SimNetwork {
 public:
  /// Of each read that a card begins; all 0 at first.
  struct Faults {
    double broken = 0;   ///< The way breaks while it is under way: another rail may bring it.
    double corrupt = 0;  ///< Its bytes are others, which the card says.
    double slow = 0;     ///< It takes up to `slowest` longer.
    Duration slowest = std::chrono::seconds(1);
  };

  /// `clock` outlives it.
  SimNetwork(const Clock& clock, std::uint64_t seed) : clock_(clock), random_(seed) {}
  /// The fabrics are gone by then.
  ~SimNetwork();
  SimNetwork(const SimNetwork&) = delete;
  SimNetwork& operator=(const SimNetwork&) = delete;

  /// When something will happen next; TimePoint::max(): nothing will.
  [[nodiscard]] TimePoint next_time() const;
  /// Does all that is due by the clock, and hands completions to their sinks.
  void run();
  /// Called, with the mutex held, when next_time() may be earlier than before. For threads that
  /// sleep; set it before the first fabric.
  void on_news(std::function<void()> wake) { wake_ = std::move(wake); }

  void set_faults(const Faults& faults);
  /// Nothing gets through between the two, either way, until heal(). Reads under way end when the
  /// reader's patience does.
  void cut(const SimFabric& one, const SimFabric& other);
  void heal(const SimFabric& one, const SimFabric& other);

 private:
  friend class SimFabric;
  struct Event {
    TimePoint at;
    std::uint64_t order = 0;  ///< Events of one time happen in the order in which they were made.
    std::function<void()> act;
    bool operator>(const Event& other) const noexcept {
      return std::pair(at, order) > std::pair(other.at, other.order);
    }
  };

  // All with the mutex held.
  void at(TimePoint time, std::function<void()> act);
  [[nodiscard]] SimFabric* find(std::uint64_t number) const;
  [[nodiscard]] bool is_cut(std::uint64_t one, std::uint64_t other) const;
  [[nodiscard]] bool chance(double probability);
  /// From 0 to `longest`.
  [[nodiscard]] Duration some(Duration longest);

  const Clock& clock_;
  mutable std::mutex mutex_;
  std::mt19937_64 random_;
  std::function<void()> wake_ = [] {};
  Faults faults_;
  std::map<std::uint64_t, SimFabric*> fabrics_;  ///< By their numbers, which are their addresses.
  std::uint64_t last_fabric_ = 0;
  std::set<std::pair<std::uint64_t, std::uint64_t>> cuts_;  ///< The lower number first.
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::uint64_t last_order_ = 0;
};

}  // namespace pegaflow
