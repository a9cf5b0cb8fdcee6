#include "router/deadlines.h"

#include <utility>

#include "base/assert.h"

namespace pegaflow {
namespace {
constexpr std::chrono::milliseconds kTick(20);
}

Deadlines::~Deadlines() { PEGA_ASSERT(first_ == nullptr, "a deadline outlives its owner"); }

void Deadlines::start() {
  if (runs_) return;
  runs_ = true;
  timer_.expires_after(kTick);
  timer_.async_wait([this](const boost::system::error_code& ec) {
    if (ec) return;
    runs_ = false;
    look();
    if (first_ != nullptr) start();
  });
}

void Deadlines::look() {
  const TimePoint now = std::chrono::steady_clock::now();
  for (Deadline* each = first_; each != nullptr; each = each->next_) {
    if (each->at_ > now) continue;
    each->at_ = TimePoint::max();
    each->is_over_ = true;
    each->act_();
  }
}

Deadline::Deadline(Deadlines& all, std::function<void()> act) : all_(all), act_(std::move(act)) {
  next_ = all_.first_;
  if (next_ != nullptr) next_->previous_ = this;
  all_.first_ = this;
  all_.start();
}

Deadline::~Deadline() {
  if (previous_ != nullptr) {
    previous_->next_ = next_;
  } else {
    all_.first_ = next_;
  }
  if (next_ != nullptr) next_->previous_ = previous_;
}

}  // namespace pegaflow
