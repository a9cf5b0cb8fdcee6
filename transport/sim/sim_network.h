#pragma once
/// \file
/// A simulated network: its time comes from a clock of the caller's, its random numbers from a
/// seed.

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

/// Runs the events of several SimFabrics in the order of their times.
///
/// Nothing runs by itself: run() executes all events that are due by the clock, and next_time()
/// returns the time of the next. With a ManualClock that is set to next_time() before each run(),
/// only events cost time, and each seed yields one sequence of events. With a SteadyClock and a
/// thread that sleeps until next_time(), it behaves like a real network.
///
/// Thread-safe, by one mutex for the network and all its fabrics.
class SimNetwork {
 public:
  /// Probabilities for each read that a card begins; all 0 by default.
  struct Faults {
    double broken = 0;   ///< The path breaks during the read: another rail may retry.
    double corrupt = 0;  ///< The bytes are wrong, and the card reports it.
    double slow = 0;     ///< The read takes up to `slowest` longer.
    Duration slowest = std::chrono::seconds(1);
  };

  /// `clock` outlives the network.
  SimNetwork(const Clock& clock, std::uint64_t seed) : clock_(clock), random_(seed) {}
  /// All fabrics are destroyed before.
  ~SimNetwork();
  SimNetwork(const SimNetwork&) = delete;
  SimNetwork& operator=(const SimNetwork&) = delete;

  /// The time of the next event; TimePoint::max() when there is none.
  [[nodiscard]] TimePoint next_time() const;
  /// Executes all events that are due by the clock, and calls the sinks of completions.
  void run();
  /// Sets a function that is called, with the mutex held, when next_time() may have become earlier.
  /// For threads that sleep; set it before the first fabric.
  void on_schedule_change(std::function<void()> wake) { wake_ = std::move(wake); }

  void set_faults(const Faults& faults);
  /// Drops all traffic between the two fabrics, in both directions, until heal(). Reads in flight
  /// end with the reader's stall timeout.
  void cut(const SimFabric& one, const SimFabric& other);
  void heal(const SimFabric& one, const SimFabric& other);

 private:
  friend class SimFabric;
  struct Event {
    TimePoint at;
    std::uint64_t order = 0;  ///< Events of the same time run in the order of their creation.
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
  /// A random duration from 0 to `longest`.
  [[nodiscard]] Duration some(Duration longest);

  const Clock& clock_;
  mutable std::mutex mutex_;
  std::mt19937_64 random_;
  std::function<void()> wake_ = [] {};
  Faults faults_;
  std::map<std::uint64_t, SimFabric*> fabrics_;  ///< By number, which is also the address.
  std::uint64_t last_fabric_ = 0;
  std::set<std::pair<std::uint64_t, std::uint64_t>> cuts_;  ///< The lower number first.
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::uint64_t last_order_ = 0;
};

}  // namespace pegaflow
