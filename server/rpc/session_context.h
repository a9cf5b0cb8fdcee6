#pragma once
/// \file
/// The dependencies of the objects of client connections.

#include <cstdint>
#include <string>
#include <vector>

#include <kj/async-io.h>
#include <kj/async-unix.h>
#include <kj/function.h>

#include "base/block_key.h"
#include "base/clock.h"
#include "base/id128.h"
#include "server/rpc/rpc_counters.h"

namespace pegaflow::cluster {
class EpochWatches;
class Peers;
}  // namespace pegaflow::cluster

namespace pegaflow::server {

class Background;
class CacheService;
class DirectReads;
class Fetches;
class PoolKeeping;
class SsdTier;

/// Dependencies of every connection's objects, which it outlives.
struct SessionContext {
  CacheService& service;
  Background& background;
  RpcCounters& counters;
  kj::UnixEventPort& port;
  kj::Timer& timer;
  const Clock& clock;
  int pool_fd = -1;
  std::uint64_t pool_bytes = 0;
  Fetches& fetches;
  /// Has no source. For clients of a version without blocks in flight; may be `fetches`.
  Fetches& local_fetches;
  DirectReads& direct;
  cluster::Peers* peers = nullptr;           ///< Null: there are no other nodes.
  cluster::EpochWatches* watches = nullptr;  ///< The same.
  SsdTier* ssd = nullptr;                    ///< Null: there are no disks.
  PoolKeeping* keeping = nullptr;            ///< Null: the pool ends with this server.
  Id128 server;                              ///< This server's incarnation.
  std::string build;                         ///< Program and version, for clients' logs.
  /// The process of a connection ended. Called from the watch's own event, so it only schedules.
  kj::Function<void(const Id128&)> process_gone;
  std::vector<BlockKey> keys;  ///< Scratch for calls that finish in their own iteration.
};

}  // namespace pegaflow::server
