#include "client/breaker.h"

#include "base/assert.h"

namespace pegaflow {

Breaker::Breaker(const Clock& clock, int failures, Duration window)
    : clock_(clock), window_(window) {
  PEGA_ASSERT(failures >= 1, "{} failures", failures);
  missed_.assign(static_cast<std::size_t>(failures), TimePoint::min());
}

bool Breaker::on_deadline_missed() {
  const TimePoint now = clock_.now();
  missed_[oldest_] = now;
  oldest_ = (oldest_ + 1) % missed_.size();
  const TimePoint first = missed_[oldest_];
  if (open_ || first == TimePoint::min() || now - first > window_) return false;
  open_ = true;
  return true;
}

void Breaker::close() {
  missed_.assign(missed_.size(), TimePoint::min());
  open_ = false;
}

}  // namespace pegaflow
