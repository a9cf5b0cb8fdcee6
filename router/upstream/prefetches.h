#pragma once
/// \file
/// Requests to pegaflow-servers to fetch blocks before an engine asks for them.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include <boost/asio/awaitable.hpp>

#include "base/clock.h"
#include "cluster/peer_proof.h"
#include "router/kv/kv_prefetch.h"
#include "router/routing/fleet.h"
#include "router/upstream/engine_connections.h"

namespace pegaflow::router {

class KvRouting;

/// Sends POST /prefetch and DELETE /prefetch/ID. No request of a client waits for it or fails by
/// it: a server that is slow, refuses, or has failed `breaker.failures` times in a row costs
/// prefetches only, and at a limit there is none. Outcomes are reported to KvRouting. Thread-bound.
class Prefetches {
 public:
  struct Options {
    Duration timeout = std::chrono::seconds(1);  ///< For each request to a server.
    std::size_t per_server = 64;                 ///< Requests in flight at one server.
    Breaker::Options breaker{};
    std::uint64_t seed = 1;  ///< Makes the ids this router's own.
  };
  /// All references outlive the object, and it outlives run() of the io_context. Without a secret
  /// nothing is requested.
  Prefetches(EngineConnections& connections, const std::optional<cluster::PeerSecrets>& secrets,
             KvRouting& routing, const Options& options);

  /// Begins a prefetch, and returns its number for cancel() or ended(); 0: nothing was requested.
  std::uint64_t start(PrefetchOrder order);
  /// The request will not use it: its client left, or another engine receives it.
  void cancel(std::uint64_t number);
  /// The engine has answered: there is nothing left to cancel.
  void ended(std::uint64_t number) { running_.erase(number); }

  [[nodiscard]] std::size_t running() const noexcept { return running_.size(); }

 private:
  struct Server {
    std::shared_ptr<Engine> place;  ///< The server's address, as an Engine outside the fleet.
    std::size_t in_flight = 0;
  };
  struct One {
    PrefetchOrder order;
    std::string id;
    std::shared_ptr<Server> server;
    bool is_answered = false;
    bool is_cancelled = false;
    bool was_sent = true;  ///< The server may have received it.
  };
  using Shared = std::shared_ptr<One>;

  /// nullptr: there are too many servers.
  std::shared_ptr<Server> server_of(const std::string& url);
  boost::asio::awaitable<void> post(Shared one);
  boost::asio::awaitable<void> remove(Shared one);
  [[nodiscard]] std::string head_for(const Server& server, std::string_view method,
                                     std::string_view target, std::string_view body) const;

  EngineConnections& connections_;
  const std::optional<cluster::PeerSecrets>& secrets_;
  KvRouting& routing_;
  const Options options_;
  std::map<std::string, std::shared_ptr<Server>> servers_;  // By URL.
  std::unordered_map<std::uint64_t, Shared> running_;
  std::uint64_t next_ = 1;
};

}  // namespace pegaflow::router
