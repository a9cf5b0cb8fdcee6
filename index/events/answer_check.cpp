#include "index/events/answer_check.h"

#include <algorithm>

namespace pegaflow::index {
namespace {

double seconds(Duration time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

AnswerCheck::Verdict AnswerCheck::add(std::uint64_t predicted, std::uint64_t reported,
                                      bool knows_all) {
  answers_.push_back({predicted, reported});
  if (answers_.size() > window_) answers_.pop_front();
  if (answers_.size() < window_) return Verdict::kOpen;
  AnswerSums sums;
  std::uint64_t error = 0;
  for (const Answer& answer : answers_) {
    ++sums.answers;
    sums.predicted += answer.predicted;
    sums.reported += answer.reported;
    if (answer.predicted > answer.reported) {
      error += answer.predicted - answer.reported;
    } else if (knows_all) {
      error += answer.reported - answer.predicted;
    }
  }
  const auto most = static_cast<double>(std::max(sums.predicted, sums.reported));
  if (static_cast<double>(error) <= tolerated_error_ * most) return Verdict::kGood;
  bad_ = sums;
  answers_.clear();
  return Verdict::kBad;
}

void SilenceCheck::event(TimePoint now) {
  if (last_ && now > *last_) {
    // A burst of batches is one event: the interval between bursts is what matters.
    const double passed = seconds(now - *last_);
    usual_seconds_ = usual_seconds_ == 0 ? passed : 0.8 * usual_seconds_ + 0.2 * passed;
  }
  last_ = now;
  computed_ = 0;
  probed_ = 0;
  probing_ = false;
}

SilenceCheck::Verdict SilenceCheck::judge(TimePoint now) {
  if (!last_ || computed_ < answers_) return Verdict::kFine;
  if (silent_seconds(now) < std::max(seconds(least_), factor_ * usual_seconds_)) {
    return Verdict::kFine;
  }
  if (probing_) return Verdict::kSilent;
  probing_ = true;
  probed_ = computed_;
  computed_ = 0;
  return Verdict::kProbe;
}

void SilenceCheck::reset(TimePoint now) {
  last_ = now;
  computed_ = 0;
  probed_ = 0;
  probing_ = false;
}

double SilenceCheck::silent_seconds(TimePoint now) const {
  return last_ ? seconds(now - *last_) : 0;
}

}  // namespace pegaflow::index
