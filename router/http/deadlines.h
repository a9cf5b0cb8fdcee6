#pragma once
/// \file
/// Many deadlines in one heap, behind one timer.

#include <cstddef>
#include <functional>
#include <vector>

#include "base/clock.h"

namespace pegaflow::router {

class Deadline;

/// The deadlines of one router. Contains no timer: `wake_at` sets one, which calls run().
///
/// Postponing a deadline, as each piece of a stream does, is one store: its place in the heap
/// stays, and run() moves it when that place is due. Each deadline therefore costs one wake-up per
/// period that it is set for, and none while it is not in the heap. Places are rounded up to
/// kGrain, so that many deadlines share a wake-up. A deadline is late by at most kGrain, and never
/// early.
///
/// Thread-bound.
class Deadlines {
 public:
  static constexpr std::chrono::milliseconds kGrain{20};

  /// `clock` outlives the object. `wake_at` is called when the next run() has to be earlier than
  /// the last call requested, and with TimePoint::max() when no run() is needed.
  Deadlines(const Clock& clock, std::function<void(TimePoint)> wake_at);
  ~Deadlines();
  Deadlines(const Deadlines&) = delete;
  Deadlines& operator=(const Deadlines&) = delete;

  /// Calls the actions of all expired deadlines.
  void run();

 private:
  friend class Deadline;
  void place(Deadline& deadline);
  void remove(Deadline& deadline);
  void put(std::size_t index, Deadline* deadline);
  void sift_up(std::size_t index);
  void sift_down(std::size_t index);
  void arm();

  const Clock& clock_;
  std::function<void(TimePoint)> wake_at_;
  std::vector<Deadline*> heap_;  // The earliest place first.
  TimePoint armed_ = TimePoint::max();
  bool runs_ = false;
};

/// One deadline. Thread-bound; its Deadlines outlives it.
class Deadline {
 public:
  /// `act` is called once each time the deadline expires. It may set and clear deadlines, and
  /// destroys none.
  Deadline(Deadlines& all, std::function<void()> act);
  ~Deadline();
  Deadline(const Deadline&) = delete;
  Deadline& operator=(const Deadline&) = delete;

  void set(Duration from_now);
  void clear() { at_ = TimePoint::max(); }
  /// Whether the deadline that was set last has expired.
  [[nodiscard]] bool is_over() const noexcept { return is_over_; }

 private:
  friend class Deadlines;
  static constexpr std::size_t kNowhere = static_cast<std::size_t>(-1);

  Deadlines& all_;
  std::function<void()> act_;
  TimePoint at_ = TimePoint::max();
  TimePoint place_{};             // The sort key in the heap: at most at_, rounded up.
  std::size_t index_ = kNowhere;  // The position in the heap.
  bool is_over_ = false;
};

}  // namespace pegaflow::router
