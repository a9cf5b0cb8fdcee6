#pragma once
/// \file
/// Answers the HTTP thread's questions, on the RPC thread.

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include <kj/async-io.h>

#include "base/clock.h"
#include "base/os/mailbox.h"
#include "engine/pool/pool.h"
#include "server/cache/background.h"
#include "server/cache/cache_service.h"
#include "server/http/admin_messages.h"
#include "server/http/http_server.h"
#include "server/http/router_requests.h"
#include "server/rpc/rpc_counters.h"

namespace pegaflow::server {

class DirectReads;
class Prefetches;

/// Thread-bound: the RPC thread. Copies numbers only; text is made on the HTTP thread.
class Admin final : private kj::TaskSet::ErrorHandler {
 public:
  /// Drops all blocks of the disks; calls its argument once that is durable.
  using CleanDisks = std::function<void(std::function<void(const SsdCleanupReport&)>)>;

  /// All references outlive it. `nodes` reports about other nodes, if any are configured.
  Admin(CacheService& service, Background& background, kj::Timer& timer, const Clock& clock,
        const RpcCounters& counters, const engine::Pool& pool,
        std::function<std::optional<NodesReport>()> nodes,
        std::function<std::optional<SsdReport>()> ssd,
        std::function<std::optional<KeptReport>()> kept, CleanDisks clean_disks,
        Prefetches& prefetches, const DirectReads& direct, const Id128& server, HttpServer& http,
        Mailbox<AdminQuestion>& questions);

  /// Handles every pending question. A cleanup is answered when it is done, event-loop iterations
  /// later.
  void read();

 private:
  void take(const AdminQuestion& question);
  void answer(std::uint64_t ticket, AdminAnswer answer);
  [[nodiscard]] Snapshot snapshot() const;
  [[nodiscard]] std::vector<InstanceInfo> instances() const;
  void start_cleanup(std::uint64_t ticket);
  kj::Promise<void> await_cleanup();
  [[nodiscard]] OverwriteReport overwrite(std::uint64_t recent) const;
  void taskFailed(kj::Exception&& exception) override;

  CacheService& service_;
  Background& background_;
  kj::Timer& timer_;
  const Clock& clock_;
  const RpcCounters& counters_;
  const engine::Pool& pool_;
  std::function<std::optional<NodesReport>()> nodes_;
  std::function<std::optional<SsdReport>()> ssd_;
  std::function<std::optional<KeptReport>()> kept_;
  CleanDisks clean_disks_;
  Prefetches& prefetches_;
  const DirectReads& direct_;
  HttpServer& http_;
  Mailbox<AdminQuestion>& questions_;
  std::vector<std::uint64_t> cleaning_for_;  ///< Tickets.
  RouterRequests routers_;
  kj::TaskSet tasks_;
};

}  // namespace pegaflow::server
