#pragma once
/// \file
/// The directory as one node sees it, without threads and sockets, so that a simulation can run it.

#include <cstdint>
#include <functional>
#include <random>
#include <vector>

#include "base/clock.h"
#include "directory/announcer.h"
#include "directory/epoch_board.h"
#include "directory/lookups.h"
#include "directory/node_leases.h"
#include "directory/servers.h"
#include "directory/stats.h"

namespace pegaflow::directory {

/// The options of the parts.
struct AgentOptions {
  NodeLeases::Options leases{};
  Servers::Options servers{};
  Announcer::Options announcer{};
  EpochBoard::Options epochs{};
  std::uint64_t seed = 0;  ///< The seed of the random choices.
};

/// Assembles the parts. Thread-bound; the owner calls step() at next_step(), and after replies.
class Agent {
 public:
  using Options = AgentOptions;
  struct Events {
    std::function<void(Found&&)> found;
    std::function<void(const KnownEpochs&)> epochs;  ///< Receives epochs that another node wrote.
  };

  /// All but the options outlive it.
  Agent(const std::vector<Commands*>& servers, Keys keys, const Options& options,
        const Clock& clock, Events events);
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;

  void ask(Question question) { lookups_.ask(std::move(question)); }
  void take(const Announcement& announcement) { announcer_.take(announcement); }
  void publish(const KnownEpochs& known) { epochs_.publish(known); }
  /// With other anchors all names change: the caller announces its blocks anew.
  void set_keys(Keys keys);

  void step();
  [[nodiscard]] TimePoint next_step() const;
  /// Whether a lookup would be answered.
  [[nodiscard]] bool is_usable() const;
  [[nodiscard]] bool knows_epochs() const noexcept { return epochs_.is_known(); }
  [[nodiscard]] Stats stats() const;

 private:
  Keys keys_;
  Stats stats_;
  std::mt19937_64 random_;
  Servers servers_;
  NodeLeases leases_;
  Announcer announcer_;
  Lookups lookups_;
  EpochBoard epochs_;
};

}  // namespace pegaflow::directory
