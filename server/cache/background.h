#pragma once
/// \file
/// The work of the RPC thread beside requests: slices of queued work, and deadlines.

#include <optional>

#include <kj/async-io.h>
#include <kj/async.h>

#include "base/clock.h"

namespace pegaflow::server {

class CacheService;

/// Resolves in the next event-loop iteration, after all requests whose bytes have arrived.
/// (kj::evalLater would run before the loop polls its descriptors again.)
inline kj::Promise<void> next_turn(kj::Timer& timer) {
  return timer.afterDelay(0 * kj::NANOSECONDS);
}

/// Runs the service's queued work, one slice in each event-loop iteration, and its deadlines.
///
/// While nothing is queued and nothing is reserved there is no timer. Thread-bound.
class Background final : private kj::TaskSet::ErrorHandler {
 public:
  /// `service`, `timer` and `clock` outlive it.
  Background(CacheService& service, kj::Timer& timer, const Clock& clock);
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  /// Checks for work. To be called after each call to the service that may leave work or start or
  /// end a reservation. Resets call it themselves.
  void poke();

 private:
  kj::Promise<void> work();
  void arm();
  void taskFailed(kj::Exception&& exception) override;

  CacheService& service_;
  kj::Timer& timer_;
  const Clock& clock_;
  bool is_working_ = false;
  std::optional<TimePoint> armed_for_;
  kj::Maybe<kj::Promise<void>> deadline_;
  kj::TaskSet tasks_;
};

}  // namespace pegaflow::server
