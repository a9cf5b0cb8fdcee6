#pragma once
/// \file
/// Judgment of a stream by its engine's answers: are cached tokens as predicted, and do events
/// arrive while the engine computes?

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>

#include "base/clock.h"

namespace pegaflow::index {

/// Sums of the answers that were judged, in tokens.
struct AnswerSums {
  std::uint32_t answers = 0;
  std::uint64_t predicted = 0;
  std::uint64_t reported = 0;
};

/// Compares predicted with reported cached tokens over a window of answers. Thread-bound.
class AnswerCheck {
 public:
  AnswerCheck(std::uint32_t window, double tolerated_error)
      : window_(window), tolerated_error_(tolerated_error) {}

  enum class Verdict : std::uint8_t {
    kOpen,  ///< The window is not full.
    kGood,
    kBad,  ///< The error is above the tolerated one; the window starts anew.
  };
  /// `knows_all` is false for a stream whose history is incomplete: more cached tokens than
  /// predicted are then no error. The error is the sum of the differences, divided by the larger of
  /// both sums.
  Verdict add(std::uint64_t predicted, std::uint64_t reported, bool knows_all);
  void reset() { answers_.clear(); }
  /// Sums of the window of the last kBad.
  [[nodiscard]] const AnswerSums& bad() const noexcept { return bad_; }

 private:
  struct Answer {
    std::uint64_t predicted = 0;
    std::uint64_t reported = 0;
  };
  std::uint32_t window_;
  double tolerated_error_;
  std::deque<Answer> answers_;
  AnswerSums bad_;
};

/// Detects a stream that went silent while its engine computes prompts. Thread-bound.
class SilenceCheck {
 public:
  SilenceCheck(std::uint32_t answers, double factor, Duration least)
      : answers_(answers), factor_(factor), least_(least) {}

  enum class Verdict : std::uint8_t {
    kFine,
    kProbe,   ///< Long without events: request full reports.
    kSilent,  ///< Full reports brought nothing either.
  };
  /// A batch arrived.
  void event(TimePoint now);
  /// The engine computed a prompt in which new blocks became full.
  void computed() { ++computed_; }
  Verdict judge(TimePoint now);
  void reset(TimePoint now);
  /// Seconds since the last batch, and prompts computed since then.
  [[nodiscard]] double silent_seconds(TimePoint now) const;
  [[nodiscard]] std::uint64_t computed_prompts() const noexcept { return computed_ + probed_; }

 private:
  std::uint32_t answers_;
  double factor_;
  Duration least_;
  std::optional<TimePoint> last_;
  double usual_seconds_ = 0;  // Between events, smoothed.
  std::uint64_t computed_ = 0;
  std::uint64_t probed_ = 0;  // Of them, before the probe.
  bool probing_ = false;
};

}  // namespace pegaflow::index
