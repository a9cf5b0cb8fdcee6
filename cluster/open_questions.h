#pragma once
/// \file
/// Questions that a peer has not answered yet, and whether it is silent about them.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "base/clock.h"

namespace pegaflow::cluster {

/// Tells a peer that is slow for a moment from one that is lost.
///
/// A peer is *silent* from the first missed deadline to its next answer, whichever question that
/// answers; while it is silent it is asked nothing more. The silence counts from its last answer,
/// or from when the oldest open question was due, whichever is later: it is a time and never a
/// number of questions, of which many may be open at once. Thread-bound.
class OpenQuestions {
 public:
  using Number = std::uint64_t;

  /// A question whose answer may take the peer until `due`.
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
  /// A question ended without an answer, and is owed none any more.
  void ended(Number number) { open_.erase(number); }

  /// The caller of a question waits no longer; the peer still owes the answer. True when a silence
  /// begins with it.
  bool missed(Number number) {
    const auto found = open_.find(number);
    // An answer to something else since it was due: the peer is at work.
    if (is_silent_ || found == open_.end() || last_answer_ > found->second) return false;
    is_silent_ = true;
    return true;
  }

  [[nodiscard]] bool is_silent() const noexcept { return is_silent_; }

  /// When the present silence began; no value without one.
  [[nodiscard]] std::optional<TimePoint> silent_since() const {
    if (!is_silent_ || open_.empty()) return std::nullopt;
    TimePoint oldest = TimePoint::max();
    for (const auto& [number, due] : open_) oldest = std::min(oldest, due);
    return std::max(oldest, last_answer_);
  }

 private:
  std::map<Number, TimePoint> open_;  ///< When each was due.
  Number last_ = 0;
  TimePoint last_answer_ = TimePoint::min();
  bool is_silent_ = false;
};

}  // namespace pegaflow::cluster
