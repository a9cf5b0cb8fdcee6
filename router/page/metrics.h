#pragma once
/// \file
/// The counters of the router.

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/histogram.h"
#include "router/body/first_token.h"
#include "router/body/split.h"
#include "router/routing/fleet.h"
#include "router/routing/namespaces.h"

namespace pegaflow::router {

/// Bounds in seconds, from the router's own time to a long response.
inline constexpr std::array<double, 17> kLatencyBounds = {50e-6, 100e-6, 250e-6, 1e-3, 2.5e-3, 5e-3,
                                                          10e-3, 25e-3,  50e-3,  0.1,  0.25,   0.5,
                                                          1.0,   2.5,    10.0,   60.0, 300.0};

using LatencyHistogram = TimeHistogram<kLatencyBounds>;

/// Plain values of the router's thread.
struct Metrics {
  /// By route and status class; "gone": the client left before the response.
  std::map<std::pair<std::string_view, std::string_view>, std::uint64_t> requests;
  std::array<std::uint64_t, kPrefillCount> prefill{};
  std::array<std::uint64_t, kHandoverCount> handovers{};  ///< Requests with a prefill.
  std::array<LatencyHistogram, kHandoverCount> added;     ///< From the prefill to the first event.
  std::array<std::uint64_t, kFirstTokenCount> first_token{};  ///< With --pd-first-token.
  std::array<LatencyHistogram, kRoleCount> leg;  ///< From the request to the end of the response.
  LatencyHistogram first_event;                  ///< From the request to the first event sent.
  LatencyHistogram between_events;               ///< Mean of one stream.
  LatencyHistogram whole;                        ///< From the request to the end of the response.
  LatencyHistogram queue_wait;
  LatencyHistogram turn_wait;  ///< For other routers' placements.
  std::array<std::uint64_t, kRoleCount> retries{};
  std::uint64_t suspect_requests = 0;  ///< Requests that crashed two engines.
  std::uint64_t unknown_models = 0;    ///< 404 of the router itself.
  std::uint64_t steering_removed = 0;  ///< Requests with members that only a router may send.
  std::uint64_t late_errors = 0;       ///< Streams that ended with an error frame.
  std::uint64_t cancelled_legs = 0;    ///< Requests to engines ended because the client left.
  std::uint64_t refused_keys = 0;
  std::uint64_t rate_limited = 0;
  std::uint64_t queue_refused = 0;         ///< 429: the queue was full.
  std::uint64_t queue_waits_for_room = 0;  ///< Requests that have joined the queue, by reason.
  std::uint64_t queue_waits_for_time = 0;
  std::uint64_t queue_timeouts = 0;     ///< 503: waited too long.
  std::uint64_t announced_fetched = 0;  ///< Announced requests whose blocks are fetched.
  std::uint64_t announced_nothing = 0;  ///< Those without a block to fetch, or beyond a limit.
  std::uint64_t no_engine = 0;          ///< 503: no engine was up.
  std::uint64_t memory_refused = 0;     ///< 503: --body-memory was full.
  std::uint64_t bad_requests = 0;       ///< Invalid HTTP requests.
  std::uint64_t slow_requests = 0;      ///< 408.
  std::uint64_t connections = 0;        ///< Current.
  std::uint64_t connections_refused = 0;
  std::uint64_t address_refused = 0;  ///< Connections beyond --max-connections-per-address.
  std::uint64_t in_flight = 0;        ///< Current requests.
  std::uint64_t queued = 0;           ///< Current.
  std::uint64_t queue_clients = 0;    ///< With a request in the queue, when the page is read.
  std::uint64_t queue_tokens = 0;     ///< The sum of its prompts, when the page is read.
  std::uint64_t body_bytes = 0;       ///< Current, of all requests.
  std::uint64_t engine_list_errors = 0;
  std::uint64_t key_file_errors = 0;
  std::uint64_t name_errors = 0;  ///< Failed lookups of dns:// names.
};

class KvRouting;

/// The page /metrics, for Prometheus. `kv` is nullptr when no policy is kv-aware.
std::string metrics_page(const Metrics& metrics, const Fleet& fleet,
                         const NamespaceView& namespaces, const KvRouting* kv, TimePoint now);

/// The metrics of pegaflow-index: the same names with another prefix, without those of requests to
/// engines.
std::string index_metrics_page(const Metrics& metrics, const Fleet& fleet, const KvRouting& kv,
                               TimePoint now);

}  // namespace pegaflow::router
