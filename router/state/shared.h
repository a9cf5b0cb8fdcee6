#pragma once
/// \file
/// The state that all connections of one router share.

#include <chrono>
#include <functional>
#include <list>
#include <optional>
#include <random>
#include <string>

#include <boost/asio/io_context.hpp>

#include "base/clock.h"
#include "cluster/peer_proof.h"
#include "router/body/cache_salt.h"
#include "router/body/split.h"
#include "router/config/access.h"
#include "router/config/options.h"
#include "router/http/deadlines.h"
#include "router/page/metrics.h"
#include "router/routing/fleet.h"
#include "router/routing/namespaces.h"
#include "router/routing/waiting_line.h"
#include "router/state/response_owners.h"

namespace pegaflow::router {

class EngineConnections;
class EventEndpoints;
class KvRouting;
class Prefetches;
class ReplicaSet;
class Renderers;

/// The parts of one router. Thread-bound; outlives all connections.
struct Shared {
  boost::asio::io_context& io;
  const RouterOptions& options;
  Flow flow = Flow::kStore;
  Fleet& fleet;
  EngineConnections& engine_connections;
  Deadlines& deadlines;
  std::optional<AccessList> access{};             ///< Empty: every client has access.
  std::optional<CacheSalts> salts{};              ///< Empty: prompts are not salted.
  std::string engine_key{};                       ///< Sent to engines; empty: none.
  std::optional<cluster::PeerSecrets> secrets{};  ///< Shared with servers; empty: none.
  Metrics metrics{};
  NamespaceView namespaces{};
  WaitingLine line{};
  KvRouting* kv = nullptr;           ///< nullptr: no policy is kv-aware.
  Prefetches* prefetches = nullptr;  ///< nullptr: there are none.
  ReplicaSet* replicas = nullptr;    ///< nullptr: without --replicas.
  bool sends_snapshot = false;       ///< One at a time.
  /// Those of --kv-events; nullptr: none.
  const EventEndpoints* event_endpoints = nullptr;
  /// Called when other routers' placements have arrived; each entry belongs to a request that waits
  /// for them.
  std::list<std::function<void()>> on_placements{};
  Renderers* renderers = nullptr;  ///< nullptr: texts are not made token ids.
  ResponseOwners response_owners{};
  std::mt19937_64 random;
  TimePoint models_refreshed{};  ///< The last poll of all engines for an unknown model.
  bool is_leaving = false;       ///< /health is 503; connections are still accepted.
  bool is_draining = false;      ///< No new connections, and each response ends its connection.

  [[nodiscard]] TimePoint now() const { return std::chrono::steady_clock::now(); }
};

}  // namespace pegaflow::router
