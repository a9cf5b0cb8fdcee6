#include "router/request/turn_wait.h"

#include <functional>
#include <list>
#include <utility>

#include "router/kv/kv_routing.h"

namespace pegaflow::router {

namespace asio = boost::asio;

namespace {

/// Calls the function when placements arrive, during its own lifetime.
class OnPlacements {
 public:
  OnPlacements(Shared& shared, std::function<void()> call) : list_(shared.on_placements) {
    place_ = list_.insert(list_.end(), std::move(call));
  }
  ~OnPlacements() { list_.erase(place_); }
  OnPlacements(const OnPlacements&) = delete;
  OnPlacements& operator=(const OnPlacements&) = delete;

 private:
  std::list<std::function<void()>>& list_;
  std::list<std::function<void()>>::iterator place_;
};

}  // namespace

asio::awaitable<void> wait_for_turn(Shared& shared, const EngineNeeds& needs, Role role,
                                    ClientWait& wait) {
  const TimePoint arrived = shared.now();
  if (shared.replicas == nullptr || needs.view.kv == nullptr || needs.pinned ||
      shared.kv->is_turn(arrived)) {
    co_return;
  }
  const auto candidates = shared.fleet.candidates(role, needs.fleet_request({}));
  const Duration limit = shared.kv->turn_limit(candidates, *needs.view.kv, arrived);
  if (shared.kv->turn_end(arrived, limit) <= shared.now()) co_return;
  const OnPlacements woken(shared, [&wait] { wait.wake(); });
  while (true) {
    // Each placement may move it.
    const TimePoint end = shared.kv->turn_end(arrived, limit);
    const TimePoint now = shared.now();
    if (end <= now || !co_await wait.wait(end - now)) break;
  }
  shared.metrics.turn_wait.record(shared.now() - arrived);
}

}  // namespace pegaflow::router
