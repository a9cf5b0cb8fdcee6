#pragma once
/// \file
/// Another part of the router that follows the policy kv-aware: the exchange with other routers.

#include <cstdint>
#include <span>
#include <string>

#include "base/clock.h"
#include "base/program/metrics_page.h"
#include "index/key.h"
#include "index/placement/record.h"
#include "index/text.h"
#include "router/kv/kv_fleet.h"

namespace pegaflow::router {

/// Receives what happens to the requests of this router, as it happens. Thread-bound; its functions
/// neither block nor call back.
class KvObserver {
 public:
  /// A request was sent to `rank`. `chunks` are those of its text, for the time of the call.
  virtual void placed(const index::PlacementRecord& record, const KvFleet::Rank& rank,
                      std::span<const std::uint64_t> chunks) = 0;
  virtual void first_token(std::uint64_t request) = 0;
  virtual void ended(std::uint64_t request) = 0;
  /// The blocks of a text were learned from an engine's events.
  virtual void learned(const index::Text& text, std::span<const index::Key> keys) = 0;

  /// Its members of the object `kv_aware` of /health, each followed by a comma.
  [[nodiscard]] virtual std::string health(TimePoint now) const = 0;
  [[nodiscard]] virtual bool is_good() const = 0;
  virtual void metrics(MetricsPage& page) const = 0;

 protected:
  ~KvObserver() = default;
};

}  // namespace pegaflow::router
