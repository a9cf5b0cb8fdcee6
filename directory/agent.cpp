#include "directory/agent.h"

#include <algorithm>
#include <utility>

namespace pegaflow::directory {

Agent::Agent(const std::vector<Commands*>& servers, Keys keys, const Options& options,
             const Clock& clock, Events events)
    : keys_(std::move(keys)),
      random_(options.seed),
      servers_(servers, options.servers, clock, stats_),
      leases_(servers_, keys_, options.leases, clock, stats_, random_),
      announcer_(servers_, leases_, keys_, options.announcer, clock, stats_, random_),
      lookups_(servers_, leases_, announcer_, keys_, clock, stats_, std::move(events.found)),
      epochs_(servers_, keys_, options.epochs, clock, stats_, std::move(events.epochs)) {
  servers_.on_loss([this](std::size_t server) {
    announcer_.rebuild(server);
    leases_.lost(server);
  });
  leases_.on_lapse([this](std::size_t server) { announcer_.rebuild(server); });
  leases_.on_number([this]() { announcer_.rebuild(); });
}

void Agent::set_keys(Keys keys) {
  if (keys == keys_) return;
  if (keys.anchors != keys_.anchors) announcer_.forget();
  keys_ = std::move(keys);
  leases_.renew_soon();
}

void Agent::step() {
  servers_.step();
  leases_.step();
  epochs_.step();
  announcer_.step();
}

TimePoint Agent::next_step() const {
  return std::min(
      {servers_.next_step(), leases_.next_step(), announcer_.next_step(), epochs_.next_step()});
}

bool Agent::is_usable() const {
  if (!leases_.is_known()) return false;
  for (std::size_t server = 0; server < servers_.count(); ++server) {
    if (servers_.is_prompt(server)) return true;
  }
  return false;
}

Stats Agent::stats() const {
  Stats stats = stats_;
  for (std::size_t server = 0; server < servers_.count(); ++server) {
    stats.servers.push_back({.name = servers_.commands(server).name(),
                             .state = {},
                             .why = servers_.why(server),
                             .is_ready = servers_.is_ready(server)});
  }
  return stats;
}

}  // namespace pegaflow::directory
