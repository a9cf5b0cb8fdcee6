#pragma once
/// \file
/// Lookups: which nodes have announced blocks of a prompt.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/block_key.h"
#include "base/clock.h"
#include "base/id128.h"
#include "directory/announcer.h"
#include "directory/messages.h"
#include "directory/node_leases.h"
#include "directory/probes.h"
#include "directory/servers.h"

namespace pegaflow::directory {

/// Asks the servers in at most two rounds, each with one pipeline to each server, for at most
/// kMostProbes anchors. Ignores members of nodes that are not alive. Thread-bound.
class Lookups {
 public:
  static constexpr std::size_t kMostOwners = kMostFound;
  static constexpr std::size_t kMostOpen = 1024;  ///< Others are answered with kDown at once.

  using Answer = std::function<void(Found&&)>;
  /// All references outlive it.
  Lookups(Servers& servers, NodeLeases& leases, Announcer& announcer, const Keys& keys,
          const Clock& clock, Stats& stats, Answer answer);

  void ask(Question question);

 private:
  struct Open;
  using OneOpen = std::shared_ptr<Open>;
  /// The owners that a server names for one anchor.
  static constexpr std::string_view kMostMembers = "8";

  void begin_round(const OneOpen& open, std::vector<std::size_t> probes);
  void probe(const OneOpen& open, std::size_t index);
  void take(Open& open, std::size_t index, Anchor anchor, std::size_t server, const Reply& reply);
  void end_round(const OneOpen& open);
  void finish(const OneOpen& open);

  Servers& servers_;
  NodeLeases& leases_;
  Announcer& announcer_;
  const Keys& keys_;
  const Clock& clock_;
  Stats& stats_;
  const Answer answer_;
  std::size_t count_ = 0;
};

}  // namespace pegaflow::directory
