#include "perf/placement/sim_fleet.h"

#include <utility>

namespace pegaflow::perf {

namespace {

constexpr double kReportSeconds = 1;
constexpr std::uint32_t kRequestsPerNode = 4096;

}  // namespace

Result<std::unique_ptr<SimFleet>> SimFleet::create(std::size_t nodes, const SimHardware& hardware,
                                                   const SimRouters& options) {
  std::unique_ptr<SimFleet> fleet(new SimFleet(options));
  for (std::uint32_t i = 0; i < options.routers; ++i) {
    PEGA_TRY_LET(auto router, SimRouter::create(nodes, hardware,
                                                {.max_engines = static_cast<std::uint32_t>(nodes),
                                                 .max_nodes = static_cast<std::uint32_t>(nodes),
                                                 .max_requests = static_cast<std::uint32_t>(nodes) *
                                                                 kRequestsPerNode,
                                                 .max_routers = options.routers + 1,
                                                 .seed = options.seed * 64 + i,
                                                 .bytes_per_token = hardware.bytes_per_token,
                                                 .delay_weight = options.delay_weight,
                                                 .space_weight = options.space_weight}));
    // A router is 0 to itself and its place plus one to the others.
    std::vector<index::RouterId> before;
    std::vector<index::RouterId> after;
    for (std::uint32_t j = 0; j < options.routers; ++j) {
      if (j != i) (j < i ? before : after).push_back(static_cast<index::RouterId>(j + 1));
    }
    if (options.shares && options.takes_turns) router->placement().set_turns(before, after);
    fleet->routers_.push_back(std::move(router));
  }
  return fleet;
}

void SimFleet::send(std::uint32_t sender, Message message, double now) {
  if (!options_.shares || routers_.size() < 2) return;
  message.at = now + options_.share_delay;
  message.sender = sender;
  // A router is 0 to itself and its place plus one to the others.
  message.record.router = message.sums.router = static_cast<index::RouterId>(sender + 1);
  messages_.push_back(message);
}

double SimFleet::wait(std::uint64_t id, const PlaceRequest& request, double now) {
  return routers_[id % routers_.size()]->turn(request, now);
}

SimChoice SimFleet::choose(std::uint64_t id, const PlaceRequest& request,
                           std::vector<SimNode>& /*nodes*/, double now) {
  const auto number = static_cast<std::uint32_t>(id % routers_.size());
  const SimRouter::Choice made = routers_[number]->choose(id, request, now);
  send(number, {.record = made.record, .request = &request}, now);
  return made.choice;
}

void SimFleet::first_token(std::uint64_t id, const PlaceRequest& request, std::uint32_t node,
                           const Served& served) {
  const auto number = static_cast<std::uint32_t>(id % routers_.size());
  routers_[number]->first_token(id, request, node, served);
  send(number,
       {.record = {.stage = index::Stage::kFirstToken, .request = id, .engine = node},
        .request = &request},
       served.first_token);
}

void SimFleet::done(std::uint64_t id, double now) {
  const auto number = static_cast<std::uint32_t>(id % routers_.size());
  routers_[number]->placement().done(id, time_point(now));
  send(number, {.record = {.stage = index::Stage::kDone, .request = id}}, now);
}

void SimFleet::changed(const BlockChanges& changes, double now) {
  events_.push_back({.at = now + options_.event_delay, .changes = changes});
}

void SimFleet::deliver(double now) {
  while (!events_.empty() && events_.front().at <= now) {
    const BlockChanges& changes = events_.front().changes;
    for (const auto& router : routers_) {
      const auto lost = [&] { return is_lost(options_.event_loss); };
      if (!lost()) router->erased(changes.node, false, changes.gpu_erased);
      if (!lost()) router->erased(changes.node, true, changes.pool_erased);
      if (!lost()) router->stored(changes.node, false, changes.gpu_stored);
      if (!lost()) router->stored(changes.node, true, changes.pool_stored);
    }
    events_.pop_front();
  }
  while (!messages_.empty() && messages_.front().at <= now) {
    const Message& message = messages_.front();
    for (std::uint32_t i = 0; i < routers_.size(); ++i) {
      if (i == message.sender || is_lost(options_.share_loss)) continue;
      if (message.is_heartbeat) {
        routers_[i]->placement().apply(message.sums, time_point(now));
      } else if (message.request != nullptr) {
        routers_[i]->apply(message.record, *message.request, now);
      } else {
        routers_[i]->placement().apply(message.record, time_point(now));
      }
    }
    messages_.pop_front();
  }
}

void SimFleet::advance(std::vector<SimNode>& nodes, double now) {
  deliver(now);
  if (now < next_report_) return;
  next_report_ = now + kReportSeconds;
  for (std::uint32_t i = 0; i < routers_.size(); ++i) {
    index::Placement& placement = routers_[i]->placement();
    placement.expire(time_point(now));
    for (std::uint32_t engine = 0; engine < nodes.size(); ++engine) {
      // The engine's own queue counts what does not compute yet.
      const std::uint32_t waiting = nodes[engine].waiting;
      placement.set_load(
          engine, {.waiting = waiting > 0 ? waiting - 1 : 0, .running = nodes[engine].decoding},
          time_point(now));
      send(i, {.is_heartbeat = true, .sums = placement.sums(engine)}, now);
    }
  }
}

}  // namespace pegaflow::perf
