#pragma once
/// \file
/// The facts about one request that the metrics and the access log contain.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "router/body/first_token.h"
#include "router/body/split.h"
#include "router/http/routes.h"
#include "router/routing/fleet.h"

namespace pegaflow::router {

struct Metrics;
struct Shared;

/// Filled in by the parts of an exchange. Plain values; thread-bound.
struct AccessRecord {
  TimePoint began{};
  unsigned status = 0;  ///< 0: no response was begun.
  std::optional<Prefill> prefill{};
  std::optional<FirstToken> first_token{};
  std::string prefill_engine{};
  std::string decode_engine{};
  std::optional<Duration> prefill_time{};
  std::optional<Handover> handover{};       ///< Unless the decode engine prefills.
  bool is_delivered = false;                ///< Its client had the response before it left.
  std::optional<TimePoint> prefilled_at{};  ///< When that prefill ended.
  std::optional<Duration> first_event_time{};
  std::uint64_t events = 0;
  std::uint64_t bytes_in = 0;
  std::uint64_t bytes_out = 0;
  unsigned retries = 0;
  bool has_late_error = false;  ///< A stream ended with an error frame.

  /// Counts a request that is sent to another engine of `role`.
  void count_retry(Metrics& metrics, Role role);

  /// The request whose record it is.
  struct Subject {
    const Route& route;
    std::string_view id;
    std::string_view key_name;
    bool is_gone = false;  ///< The client left.
  };
  /// Counts the request in the metrics and writes its line of the access log.
  void finish(Shared& shared, const Subject& subject) const;

 private:
  void count(Metrics& metrics, const Subject& subject, Duration whole) const;
  [[nodiscard]] std::string line(const Subject& subject, Duration whole) const;
};

}  // namespace pegaflow::router
