#pragma once
/// \file
/// The requests that a peer has not answered yet, and whether it is silent.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "base/clock.h"

namespace pegaflow::cluster {

/// Distinguishes a peer that is slow for a moment from one that is lost.
///
/// A peer is *silent* from the first missed deadline to its next answer, to any request; while it
/// is silent it receives no further requests. The silence counts from its last answer, or from the
/// time at which the oldest open request was due, whichever is later: it is a time and not a count
/// of requests, of which many may be open at once. Thread-bound.
class OpenQuestions {
 public:
  using Number = std::uint64_t;

  /// Opens a question that the peer may answer until `due`.
  Number ask(TimePoint due) {
    open_.emplace(++last_, due);
    return last_;
  }

  /// The answer to a question came, in time or not.
  void answered(Number number, TimePoint now) {
    open_.erase(number);
    last_answer_ = now;
    is_silent_ = false;
  }
  /// A question ended without an answer, and will not receive one.
  void ended(Number number) { open_.erase(number); }

  /// The caller of a question waits no longer; its answer is still pending. Returns true when a
  /// silence begins with it.
  bool missed(Number number) {
    const auto found = open_.find(number);
    // The peer has answered another question since this one was due: it is working.
    if (is_silent_ || found == open_.end() || last_answer_ > found->second) return false;
    is_silent_ = true;
    return true;
  }

  [[nodiscard]] bool is_silent() const noexcept { return is_silent_; }

  /// The begin of the present silence; no value without one.
  [[nodiscard]] std::optional<TimePoint> silent_since() const {
    if (!is_silent_ || open_.empty()) return std::nullopt;
    TimePoint oldest = TimePoint::max();
    for (const auto& [number, due] : open_) oldest = std::min(oldest, due);
    return std::max(oldest, last_answer_);
  }

 private:
  std::map<Number, TimePoint> open_;  ///< With the time at which each is due.
  Number last_ = 0;
  TimePoint last_answer_ = TimePoint::min();
  bool is_silent_ = false;
};

}  // namespace pegaflow::cluster
