#pragma once
/// \file
/// PegaFlow's policy in the simulator: one router or several, with late and lost messages.

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "perf/lib/random_draws.h"
#include "perf/placement/sim_router.h"

namespace pegaflow::perf {

struct SimRouters {
  std::uint32_t routers = 1;    ///< Requests reach them in turns.
  bool shares = true;           ///< They exchange their placements.
  bool takes_turns = true;      ///< If they share, they choose one after the other.
  double share_delay = 0.0005;  ///< Seconds.
  double share_loss = 0;        ///< Share of records that are lost, each receiver for itself.
  double event_delay = 0;       ///< Seconds until the routers see what a node stored or evicted.
  double event_loss = 0;        ///< Share of events that never come, each router for itself.
  std::uint64_t seed = 1;
  double delay_weight = 0.5;  ///< As Placement::Options.
  double space_weight = 0.2;  ///< As Placement::Options.
};

/// Routers that each see all events, their own requests and, if they share, each other's
/// placements. Once a second they read the engines' reports (requests waiting and running) and send
/// heartbeats. Thread-bound.
class SimFleet final : public SimPolicy {
 public:
  /// Errors: as SimRouter::create().
  static Result<std::unique_ptr<SimFleet>> create(std::size_t nodes, const SimHardware& hardware,
                                                  const SimRouters& options);

  double wait(std::uint64_t id, const PlaceRequest& request, double now) override;
  SimChoice choose(std::uint64_t id, const PlaceRequest& request, std::vector<SimNode>& nodes,
                   double now) override;
  void first_token(std::uint64_t id, const PlaceRequest& request, std::uint32_t node,
                   const Served& served) override;
  void done(std::uint64_t id, double now) override;
  void changed(const BlockChanges& changes, double now) override;
  void advance(std::vector<SimNode>& nodes, double now) override;

  [[nodiscard]] SimRouter& router(std::size_t number) { return *routers_[number]; }

 private:
  struct Event {
    double at = 0;
    BlockChanges changes;
  };
  struct Message {
    double at = 0;
    std::uint32_t sender = 0;
    bool is_heartbeat = false;
    index::PlacementRecord record{};
    index::EngineSums sums{};
    const PlaceRequest* request = nullptr;
  };
  explicit SimFleet(const SimRouters& options) : options_(options), draws_(options.seed) {}
  void send(std::uint32_t sender, Message message, double now);
  void deliver(double now);
  [[nodiscard]] bool is_lost(double share) { return share > 0 && draws_.with_chance(share); }

  SimRouters options_;
  Draws draws_;
  std::vector<std::unique_ptr<SimRouter>> routers_;
  std::deque<Event> events_;
  std::deque<Message> messages_;
  double next_report_ = 0;
};

}  // namespace pegaflow::perf
