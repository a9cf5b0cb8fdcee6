#pragma once
/// \file
/// Deadlines of many things at once, at the cost of two pointers each.

#include <functional>

#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>

#include "base/clock.h"

namespace pegaflow {

class Deadline;

/// Looks at all deadlines every 20 ms while there are any. A timer of its own for each would be
/// set anew with every piece of every stream; here that is a store. Thread-bound.
class Deadlines {
 public:
  explicit Deadlines(boost::asio::io_context& io) : timer_(io) {}
  ~Deadlines();
  Deadlines(const Deadlines&) = delete;
  Deadlines& operator=(const Deadlines&) = delete;

 private:
  friend class Deadline;
  void start();
  void look();

  boost::asio::steady_timer timer_;
  Deadline* first_ = nullptr;
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

  void set(Duration from_now) {
    at_ = std::chrono::steady_clock::now() + from_now;
    is_over_ = false;
  }
  void clear() { at_ = TimePoint::max(); }
  /// Whether the last one that was set ended by time.
  [[nodiscard]] bool is_over() const noexcept { return is_over_; }

 private:
  friend class Deadlines;
  Deadlines& all_;
  std::function<void()> act_;
  TimePoint at_ = TimePoint::max();
  bool is_over_ = false;
  Deadline* next_ = nullptr;
  Deadline* previous_ = nullptr;
};

}  // namespace pegaflow
