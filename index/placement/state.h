#pragma once
/// \file
/// The inside of Placement: the fleet, its rates, and the terms of the cost. Included by the files
/// that implement Placement only.

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "index/placement/accounts.h"
#include "index/placement/decision.h"
#include "index/placement/turns.h"

namespace pegaflow::index {

/// Random numbers of SplitMix64, the same for one seed everywhere.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : state_(seed) {}
  /// In [0, limit); `limit` is above 0.
  std::uint64_t below(std::uint64_t limit) noexcept {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15U);
    z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27U)) * 0x94D049BB133111EBU;
    return (z ^ (z >> 31U)) % limit;
  }

 private:
  std::uint64_t state_;
};

/// A rate per second over the last minute or so. The choice hardly depends on the span: from 30 s
/// to 400 s the simulator finds the same hits.
class RecentRate {
 public:
  void add(double amount, double now) noexcept {
    sum_ = sum_ * decay(now) + amount;
    at_ = now;
  }
  [[nodiscard]] double per_second(double now) const noexcept { return sum_ * decay(now) / kSpan; }

 private:
  static constexpr double kSpan = 60;
  [[nodiscard]] double decay(double now) const noexcept {
    return now <= at_ ? 1 : std::exp((at_ - now) / kSpan);
  }
  double sum_ = 0;
  double at_ = 0;
};

struct PlacementState {
  explicit PlacementState(const PlacementOptions& its_options);

  struct Engine {
    bool used = false;
    EngineSetup setup{};
    PrefillRate rate;
    double rate_at = 0;  ///< Time of its last sample.
    PredictionError error;
    EngineLoad load{};
    double load_at = -1;
    std::uint32_t strangers = 0;  ///< Requests in its queue that no router of ours had placed.
    RecentRate inflow;            ///< Tokens that were new to its caches.
  };
  struct Node {
    bool used = false;
    LinkRate pool{};
    // When the pulls that were placed will have left its network card, and arrived at it.
    double sends_until = 0;
    double receives_until = 0;
  };
  /// A link; a rate of 0 is unmeasured.
  struct Link {
    float latency_seconds = 0;
    float bytes_per_second = 0;
  };
  /// The values that all candidates of one request share.
  struct Shared {
    double tokens = 0;
    double block_tokens = 0;
    double block_bytes = 0;
    double inflow = 0;    ///< New tokens a second, the mean of the engines.
    double arrivals = 0;  ///< Requests a second and engine.
    double idle = 1;      ///< Share of the fleet's time without prefill.
    // Of the engines that have computed just now: 0 when there are none.
    std::uint32_t busy = 0;
    double busy_floor = 0;  ///< Mean floor of their prefills, in seconds.
    double busy_slope = 0;  ///< Mean seconds for a token.
  };

  [[nodiscard]] bool has_engine(EngineId id) const noexcept {
    return id < engines.size() && engines[id].used;
  }
  [[nodiscard]] bool has_node(NodeId id) const noexcept {
    return id < nodes.size() && nodes[id].used;
  }
  [[nodiscard]] LinkRate link(NodeId from, NodeId to) const noexcept;

  /// Checks the request. Errors: as Placement::choose().
  [[nodiscard]] Result<void> check(const PlacementRequest& request) const;
  [[nodiscard]] Shared shared(const PlacementRequest& request, double now) const noexcept;
  /// Copies the sources worth considering to `shortlist`, the longest first.
  void shorten(std::span<const PullSource> sources, double now);
  /// The terms of one candidate with its cheapest source of `shortlist`.
  [[nodiscard]] Terms terms(const Candidate& candidate, const Shared& request, double now) const;
  /// Fills `candidates` with the terms of all candidates.
  void price(const PlacementRequest& request, double now);

  /// The predicted computation of so many tokens. An idle engine that has not computed for a while
  /// may have become as fast as the others are: it counts as slower the less, the older its rate
  /// is. One with a prefill in its queue computes, and keeps its rate.
  [[nodiscard]] double prefill_seconds(EngineId id, double tokens, const Shared& request,
                                       double now) const noexcept;
  [[nodiscard]] double queue(EngineId id, double now) const noexcept;
  [[nodiscard]] double decode_share(EngineId id) const noexcept;
  [[nodiscard]] double room(EngineId id, double prefill, double now) const noexcept;
  /// The best pair of the priced `candidates`, for the prompt, and `partners`, or the best of
  /// `partners` alone.
  [[nodiscard]] PairDecision pair(const PlacementRequest& decode);
  /// One of `partners` for a prompt that `from` has computed; nullopt when no node is known.
  [[nodiscard]] std::optional<PairDecision> partner_of(EngineId from,
                                                       const PlacementRequest& decode);
  /// A pair with its cost, or infinity when its nodes are unknown.
  [[nodiscard]] PairDecision cost_of_pair(const Terms& from, const Terms& to,
                                          const PlacementRequest& decode) const;
  /// The cost of one more answer at an engine.
  [[nodiscard]] double decode_load(const Terms& terms) const;

  /// Engines that have not been measured are taken to be as fast as this one. Taken for faster than
  /// they are, they would attract requests from the engines that have their blocks.
  void lend_rate(const PrefillRate& measured);

  /// Accounts for a placement of any router.
  Result<void> record(const PlacementRecord& record, std::uint32_t predicted_cached, double now);

  PlacementOptions options;
  Draw draw;
  Accounts accounts;
  Turns turns;
  std::vector<Engine> engines;
  std::vector<Node> nodes;
  std::vector<Link> links;  ///< From row to column.
  std::uint32_t engine_count = 0;
  // The placements of all routers.
  RecentRate inflow;    ///< Tokens that were new to the caches.
  RecentRate arrivals;  ///< Requests.
  RecentRate work;      ///< Seconds of prefill.
  PlacementStats counts;

  // Scratch of one decision.
  std::vector<Terms> candidates;
  std::vector<Terms> partners;  ///< Decode engines of a pair.
  std::array<PullSource, kMaxSources> shortlist{};
  std::size_t shortlisted = 0;
  std::array<PullSource, 3> owners{};
};

/// Seconds since the clock's epoch.
inline double seconds_of(TimePoint time) noexcept {
  return std::chrono::duration<double>(time.time_since_epoch()).count();
}

}  // namespace pegaflow::index
