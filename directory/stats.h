#pragma once
/// \file
/// The statistics of the directory: plain values for metrics and /health.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "directory/redis/server_info.h"

namespace pegaflow::directory {

/// Counts since the start, and the present state.
struct Stats {
  // Lookups that the directory answered.
  std::uint64_t found = 0;
  std::uint64_t none = 0;     ///< No node has announced the blocks.
  std::uint64_t down = 0;     ///< No server could be asked.
  std::uint64_t members = 0;  ///< Anchors that were asked for.
  std::uint64_t trips = 0;    ///< Round trips.

  // What this node announces.
  std::size_t anchors = 0;  ///< Now.
  std::size_t pending = 0;  ///< Changes that are not sent yet.
  std::uint64_t added = 0;
  std::uint64_t removed = 0;
  std::uint64_t repeated = 0;  ///< Announced again, to heal lost writes.
  std::uint64_t dropped = 0;   ///< Removals for which a queue was full: sweeps find them.
  std::uint64_t rebuilds = 0;  ///< Servers that had lost their data, or writes of this node.

  // What others left behind.
  std::uint64_t dead = 0;      ///< Members of nodes that are gone, ignored.
  std::uint64_t repaired = 0;  ///< Members that this node removed for them.

  // What was ignored because no node with the secret wrote it.
  std::uint64_t bad_members = 0;
  std::uint64_t bad_leases = 0;
  std::uint64_t bad_epochs = 0;
  std::uint64_t bad_replies = 0;  ///< Replies of another type than the command has.
  std::uint64_t errors = 0;       ///< Error replies, for example of a full server.

  std::size_t nodes = 0;             ///< Alive, this one included.
  std::uint64_t conflicts = 0;       ///< Times that another node had the same number.
  std::uint64_t epochs_learned = 0;  ///< Resets of others, learned from the directory.

  struct Server {
    std::string name;
    std::string state;
    std::string why;  ///< Why it is not ready.
    bool is_ready = false;
    std::uint64_t connects = 0;
    std::uint64_t losses = 0;
    std::uint64_t failures = 0;
    std::uint64_t commands = 0;
    std::uint64_t late = 0;
    std::uint64_t corrupt = 0;
    Duration round_trip{};
    ServerInfo info{};
  };
  std::vector<Server> servers;
};

}  // namespace pegaflow::directory
