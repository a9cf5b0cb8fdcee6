#include "server/cache/background.h"

#include <algorithm>

#include "base/assert.h"
#include "capnp/wire/rpc_error.h"
#include "server/cache/cache_service.h"

namespace pegaflow::server {

Background::Background(CacheService& service, kj::Timer& timer, const Clock& clock)
    : service_(service), timer_(timer), clock_(clock), tasks_(*this) {
  service_.on_reset([this] { poke(); });
}

Background::~Background() { service_.on_reset({}); }

void Background::poke() {
  if (!is_working_ && service_.has_work()) {
    is_working_ = true;
    tasks_.add(next_turn(timer_).then([this]() { return work(); }));
  }
  arm();
}

kj::Promise<void> Background::work() {
  if (service_.work()) return next_turn(timer_).then([this]() { return work(); });
  is_working_ = false;
  arm();
  return kj::READY_NOW;
}

void Background::arm() {
  const std::optional<TimePoint> wanted = service_.next_deadline();
  if (!wanted) {
    armed_for_.reset();
    deadline_ = nullptr;
    return;
  }
  // An earlier timer finds nothing due and arms the next.
  if (armed_for_ && *armed_for_ <= *wanted) return;
  armed_for_ = wanted;
  const auto left = std::max(Duration::zero(), *wanted - clock_.now());
  // The timer counts from the time that the loop last read, which is a little early.
  const kj::Duration delay = left.count() * kj::NANOSECONDS + 1 * kj::MILLISECONDS;
  deadline_ = timer_.afterDelay(delay)
                  .then([this]() {
                    // In a task of its own: poke() replaces the promise that runs this.
                    armed_for_.reset();
                    tasks_.add(kj::evalLater([this]() {
                      service_.expire();
                      poke();
                    }));
                  })
                  .eagerlyEvaluate(nullptr);
}

void Background::taskFailed(kj::Exception&& exception) {
  // Nothing in here throws, so it is a bug.
  PEGA_ASSERT(false, "background work failed: {}", error_from(exception).detail);
}

}  // namespace pegaflow::server
