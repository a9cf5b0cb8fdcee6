#pragma once
/// \file
/// What all connections of one router have in common.

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <unordered_map>

#include <boost/asio/io_context.hpp>

#include "base/clock.h"
#include "router/body/cache_salt.h"
#include "router/config/access.h"
#include "router/config/options.h"
#include "router/http/deadlines.h"
#include "router/page/metrics.h"
#include "router/routing/fleet.h"
#include "router/routing/namespaces.h"
#include "router/routing/waiting_line.h"
#include "router/upstream/upstream.h"

namespace pegaflow::router {

/// Which engine made which response, for what follows on it. Forgets the oldest. Thread-bound.
class ResponseOwners {
 public:
  static constexpr std::size_t kLimit = 65'536;

  void learn(const std::string& response, const std::shared_ptr<Engine>& engine) {
    if (!owners_.emplace(response, engine).second) return;
    order_.push_back(response);
    if (order_.size() > kLimit) {
      owners_.erase(order_.front());
      order_.pop_front();
    }
  }
  /// nullptr when it is not known, or its engine is gone.
  [[nodiscard]] std::shared_ptr<Engine> find(const std::string& response) const {
    const auto found = owners_.find(response);
    return found == owners_.end() ? nullptr : found->second.lock();
  }

 private:
  std::unordered_map<std::string, std::weak_ptr<Engine>> owners_;
  std::deque<std::string> order_;
};

/// The parts of a router. Thread-bound; outlives all connections.
struct Shared {
  boost::asio::io_context& io;
  const RouterOptions& options;
  Flow flow = Flow::kStore;
  Fleet& fleet;
  EngineConnections& engine_connections;
  Deadlines& deadlines;
  std::optional<AccessList> access{};  ///< Without it everybody may.
  std::optional<CacheSalts> salts{};   ///< With it the prompts of tenants are cached apart.
  std::string engine_key{};            ///< Sent to engines; empty: none.
  Metrics metrics{};
  NamespaceView namespaces{};
  WaitingLine line{};
  ResponseOwners response_owners{};
  std::mt19937_64 random;
  TimePoint models_refreshed{};  ///< For a request of an unknown model, at all engines.
  bool is_leaving = false;       ///< /health is 503; connections are still accepted.
  bool is_draining = false;      ///< No new connections, and each answer ends its connection.

  [[nodiscard]] TimePoint now() const { return std::chrono::steady_clock::now(); }
};

/// One request that an engine has. Movable.
class Slot {
 public:
  Slot(Shared& shared, std::shared_ptr<Engine> engine)
      : shared_(&shared), engine_(std::move(engine)) {
    ++engine_->inflight;
    engine_->breaker.started(shared.now());
  }
  ~Slot() {
    if (!engine_) return;
    --engine_->inflight;
    if (!judged_) engine_->breaker.withdrawn();
    if (engine_->role == Role::kDecode) shared_->line.serve(shared_->fleet, engine_);
  }
  Slot(Slot&& other) noexcept
      : shared_(other.shared_), engine_(std::move(other.engine_)), judged_(other.judged_) {}
  Slot(const Slot&) = delete;
  Slot& operator=(const Slot&) = delete;
  Slot& operator=(Slot&&) = delete;

  void succeeded() {
    judged_ = true;
    engine_->breaker.succeeded();
  }
  void failed() {
    judged_ = true;
    ++engine_->counters.failures;
    engine_->breaker.failed(shared_->now());
  }
  [[nodiscard]] const std::shared_ptr<Engine>& engine() const { return engine_; }

 private:
  Shared* shared_;
  std::shared_ptr<Engine> engine_;
  bool judged_ = false;
};

}  // namespace pegaflow::router
