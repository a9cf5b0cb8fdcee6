#include "router/http/deadlines.h"

#include <utility>

#include "base/assert.h"

namespace pegaflow::router {
namespace {

TimePoint rounded_up(TimePoint at) {
  constexpr Duration kGrain = Deadlines::kGrain;
  const Duration since = at.time_since_epoch();
  return TimePoint((since + kGrain - Duration(1)) / kGrain * kGrain);
}

}  // namespace

Deadlines::Deadlines(const Clock& clock, std::function<void(TimePoint)> wake_at)
    : clock_(clock), wake_at_(std::move(wake_at)) {}

Deadlines::~Deadlines() { PEGA_ASSERT(heap_.empty(), "a deadline outlives its owner"); }

void Deadlines::put(std::size_t index, Deadline* deadline) {
  heap_[index] = deadline;
  deadline->index_ = index;
}

void Deadlines::sift_up(std::size_t index) {
  Deadline* const moved = heap_[index];
  while (index > 0) {
    const std::size_t parent = (index - 1) / 2;
    if (heap_[parent]->place_ <= moved->place_) break;
    put(index, heap_[parent]);
    index = parent;
  }
  put(index, moved);
}

void Deadlines::sift_down(std::size_t index) {
  Deadline* const moved = heap_[index];
  while (true) {
    std::size_t child = 2 * index + 1;
    if (child >= heap_.size()) break;
    if (child + 1 < heap_.size() && heap_[child + 1]->place_ < heap_[child]->place_) ++child;
    if (moved->place_ <= heap_[child]->place_) break;
    put(index, heap_[child]);
    index = child;
  }
  put(index, moved);
}

void Deadlines::place(Deadline& deadline) {
  deadline.place_ = rounded_up(deadline.at_);
  if (deadline.index_ == Deadline::kNowhere) {
    heap_.push_back(nullptr);
    put(heap_.size() - 1, &deadline);
  }
  sift_up(deadline.index_);  // place() only ever moves a deadline forward.
  arm();
}

void Deadlines::remove(Deadline& deadline) {
  const std::size_t index = std::exchange(deadline.index_, Deadline::kNowhere);
  Deadline* const last = heap_.back();
  heap_.pop_back();
  if (last != &deadline) {
    put(index, last);
    sift_up(index);
    sift_down(last->index_);
  }
  if (heap_.empty() && !runs_ && armed_ != TimePoint::max()) {
    armed_ = TimePoint::max();
    wake_at_(armed_);
  }
}

void Deadlines::arm() {
  if (runs_ || heap_.empty() || heap_.front()->place_ >= armed_) return;
  armed_ = heap_.front()->place_;
  wake_at_(armed_);
}

void Deadlines::run() {
  const TimePoint now = clock_.now();
  armed_ = TimePoint::max();
  runs_ = true;
  while (!heap_.empty() && heap_.front()->place_ <= now) {
    Deadline& first = *heap_.front();
    if (first.at_ == TimePoint::max()) {
      remove(first);
    } else if (first.at_ > now) {
      first.place_ = rounded_up(first.at_);
      sift_down(0);
    } else {
      remove(first);
      first.at_ = TimePoint::max();
      first.is_over_ = true;
      first.act_();
    }
  }
  runs_ = false;
  arm();
}

Deadline::Deadline(Deadlines& all, std::function<void()> act) : all_(all), act_(std::move(act)) {}

Deadline::~Deadline() {
  if (index_ != kNowhere) all_.remove(*this);
}

void Deadline::set(Duration from_now) {
  at_ = all_.clock_.now() + from_now;
  is_over_ = false;
  if (index_ == kNowhere || rounded_up(at_) < place_) all_.place(*this);
}

}  // namespace pegaflow::router
