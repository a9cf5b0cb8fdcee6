#pragma once
/// \file
/// Deadlines of many things at once, in one heap and behind one timer.

#include <cstddef>
#include <functional>
#include <vector>

#include "base/clock.h"

namespace pegaflow::router {

class Deadline;

/// The deadlines of one router. Knows no timer: `wake_at` sets one, which calls run().
///
/// A deadline that is set anew for later, as with each piece of a stream, is a store: its place in
/// the heap stays, and run() moves it when that place is due. So each deadline costs one wake-up in
/// the time that it is set for, and none while it is not in the heap. Places are rounded up to
/// kGrain, so that many share a wake-up; a deadline is late by as much at most, and never early.
///
/// Thread-bound.
class Deadlines {
 public:
  static constexpr std::chrono::milliseconds kGrain{20};

  /// `clock` outlives it. `wake_at` is called when the next run() has to be earlier than the last
  /// call said, and with TimePoint::max() when none is needed any more.
  Deadlines(const Clock& clock, std::function<void(TimePoint)> wake_at);
  ~Deadlines();
  Deadlines(const Deadlines&) = delete;
  Deadlines& operator=(const Deadlines&) = delete;

  /// Acts on all that are over.
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

/// One deadline, for as long as it lives. Thread-bound; outlived by its Deadlines.
class Deadline {
 public:
  /// `act` is called once each time a deadline that was set is over. It may set and clear
  /// deadlines, and destroys none.
  Deadline(Deadlines& all, std::function<void()> act);
  ~Deadline();
  Deadline(const Deadline&) = delete;
  Deadline& operator=(const Deadline&) = delete;

  void set(Duration from_now);
  void clear() { at_ = TimePoint::max(); }
  /// Whether the last one that was set ended by time.
  [[nodiscard]] bool is_over() const noexcept { return is_over_; }

 private:
  friend class Deadlines;
  static constexpr std::size_t kNowhere = static_cast<std::size_t>(-1);

  Deadlines& all_;
  std::function<void()> act_;
  TimePoint at_ = TimePoint::max();
  TimePoint place_{};             // In the heap: not after at_ rounded up.
  std::size_t index_ = kNowhere;  // In the heap.
  bool is_over_ = false;
};

}  // namespace pegaflow::router
