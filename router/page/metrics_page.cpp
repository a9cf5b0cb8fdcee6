#include "base/program/metrics_page.h"

#include <string>

#include "router/page/kv_page.h"
#include "router/page/metrics.h"

namespace pegaflow::router {
namespace {

using Type = MetricsPage::Type;

MetricsPage::Labels engine_labels(const Engine& engine) {
  return {{"role", std::string(to_string(engine.role))}, {"engine", engine.url.text}};
}

void engines(MetricsPage& page, const Fleet& fleet, TimePoint now) {
  const auto each = [&](Type type, const char* name, const char* help, auto value) {
    page.begin(type, name, help);
    for (const auto& engine : fleet.engines()) {
      page.sample(value(*engine), engine_labels(*engine));
    }
  };
  each(Type::Gauge, "engine_up", "Whether the engine's health checks succeed",
       [](const Engine& e) { return e.is_up ? 1 : 0; });
  each(Type::Gauge, "engine_breaker",
       "State of the engine's circuit breaker: 0 closed, 1 open, 2 half open",
       [&](const Engine& e) { return static_cast<int>(e.breaker.state(now)); });
  each(Type::Gauge, "engine_inflight", "Requests in flight at the engine",
       [](const Engine& e) { return e.inflight; });
  each(Type::Gauge, "engine_models", "Models that the engine lists; 0 until it has listed them",
       [](const Engine& e) { return e.models.size(); });
  page.begin(
      Type::Gauge, "engine_handover_suspended",
      "1 while a prefill engine receives no prompts because its responses announce no blocks");
  for (const auto& engine : fleet.engines()) {
    if (engine->role != Role::kPrefill) continue;
    page.sample(engine->handover.is_suspended() ? 1 : 0, engine_labels(*engine));
  }
  each(Type::Counter, "engine_requests_total", "Requests sent to the engine",
       [](const Engine& e) { return e.counters.requests; });
  each(Type::Counter, "engine_failures_total",
       "Requests that ended without a response, or with a 5xx other than 503",
       [](const Engine& e) { return e.counters.failures; });
  each(Type::Counter, "engine_connects_total", "Connections made to the engine",
       [](const Engine& e) { return e.counters.connects; });
  each(Type::Counter, "engine_checks_failed_total", "Failed health checks of the engine",
       [](const Engine& e) { return e.counters.checks_failed; });
  each(Type::Counter, "engine_breaker_opened_total",
       "Number of times that the engine's circuit breaker opened",
       [](const Engine& e) { return e.breaker.opened(); });
}

void compared(MetricsPage& page, const NamespaceView& namespaces) {
  page.gauge("namespaces", "Distinct namespaces of the engines of --servers; 1 is correct",
             namespaces.report.namespaces);
  page.gauge("namespace_instances", "Connected engines whose namespaces are compared",
             namespaces.report.instances);
  page.begin(Type::Gauge, "namespace_values",
             "Distinct values of a namespace factor that is not the same for all engines");
  for (const FactorDifference& each : namespaces.report.differences) {
    page.sample(each.values.size(), {{"factor", each.factor}});
  }
  page.begin(Type::Gauge, "server_up", "Whether a server of --servers returns its instances");
  for (const NamespaceView::Server& each : namespaces.servers) {
    page.sample(each.is_up ? 1 : 0, {{"server", each.url}});
  }
  if (!namespaces.shows_direct()) return;
  page.gauge("direct_engines", "Connected engines with another one whose memory they can read",
             namespaces.direct.paired);
  page.gauge("direct_engines_alone", "Connected engines without such another one",
             namespaces.direct.alone.size());
}

void requests(MetricsPage& page, const Metrics& metrics) {
  page.begin(Type::Counter, "requests_total", "Requests by route and class of status");
  for (const auto& [key, count] : metrics.requests) {
    page.sample(count, {{"route", std::string(key.first)}, {"status", std::string(key.second)}});
  }
}

void outcomes(MetricsPage& page, const Metrics& metrics) {
  page.begin(Type::Counter, "prefill_total",
             "Outcomes of the prefill of requests that may be split, by reason");
  for (std::size_t i = 0; i < kPrefillCount; ++i) {
    page.sample(metrics.prefill[i], {{"reason", std::string(to_string(static_cast<Prefill>(i)))}});
  }
  page.begin(
      Type::Counter, "handover_total",
      "Requests with a prefill, by how its end and the decode engine's request followed each "
      "other");
  for (std::size_t i = 0; i < kHandoverCount; ++i) {
    page.sample(metrics.handovers[i],
                {{"result", std::string(to_string(static_cast<Handover>(i)))}});
  }
  page.begin(
      Type::Counter, "first_token_total",
      "Outcomes of --pd-first-token, by reason; sent: a prefill engine's token was sent first");
  for (std::size_t i = 0; i < kFirstTokenCount; ++i) {
    page.sample(metrics.first_token[i],
                {{"reason", std::string(to_string(static_cast<FirstToken>(i)))}});
  }
}

void durations(MetricsPage& page, const Metrics& metrics) {
  page.begin(Type::Histogram, "leg_seconds", "Time of an engine's whole response, by its role");
  for (std::size_t i = 0; i < kRoleCount; ++i) {
    page.histogram(metrics.leg[i], {{"role", std::string(to_string(static_cast<Role>(i)))}});
  }
  page.begin(Type::Histogram, "handover_added_seconds",
             "Time from the end of a prefill to the first event of the stream, by handover_total's "
             "result");
  for (std::size_t i = 0; i < kHandoverCount; ++i) {
    page.histogram(metrics.added[i],
                   {{"result", std::string(to_string(static_cast<Handover>(i)))}});
  }
  page.histogram("first_event_seconds", "Time from a request to the first event of its stream",
                 metrics.first_event);
  page.histogram("between_events_seconds", "Mean time between the events of a stream",
                 metrics.between_events);
  page.histogram("request_seconds", "Time from a request to the end of its response",
                 metrics.whole);
  page.histogram("queue_wait_seconds", "Time that requests waited for an engine",
                 metrics.queue_wait);
  page.counters("announced_requests_total", "Requests that clients announced, by outcome", "result",
                {{"fetched", static_cast<double>(metrics.announced_fetched)},
                 {"nothing", static_cast<double>(metrics.announced_nothing)}});
  page.histogram("turn_wait_seconds",
                 "Time that requests waited for the placements of other routers",
                 metrics.turn_wait);
}

void legs(MetricsPage& page, const Metrics& metrics) {
  page.begin(Type::Counter, "retries_total",
             "Requests that were sent again, by role of the engine");
  for (std::size_t i = 0; i < kRoleCount; ++i) {
    page.sample(metrics.retries[i], {{"role", std::string(to_string(static_cast<Role>(i)))}});
  }
  page.counter("suspect_requests_total",
               "Requests that were not tried again because two engines lost the connection or went "
               "down while they served them",
               metrics.suspect_requests);
  page.counter("unknown_models_total",
               "Requests that received 404 because no engine lists their model",
               metrics.unknown_models);
  page.counter("steering_removed_total",
               "Requests from which kv_transfer_params and the like were removed",
               metrics.steering_removed);
  page.counter("late_errors_total", "Streams that ended with an error frame", metrics.late_errors);
  page.counter("cancelled_legs_total", "Requests canceled at an engine because the client left",
               metrics.cancelled_legs);
}

void refusals(MetricsPage& page, const Metrics& metrics) {
  page.counter("refused_keys_total", "Requests without a known API key", metrics.refused_keys);
  page.counter("rate_limited_total", "Requests beyond the rate of their API key",
               metrics.rate_limited);
  page.counters(
      "queue_waits_total",
      "Requests that joined the queue, by reason: all engines have their limit of requests "
      "(room), or more to compute than --engine-queue-time (time)",
      "reason",
      {{"room", static_cast<double>(metrics.queue_waits_for_room)},
       {"time", static_cast<double>(metrics.queue_waits_for_time)}});
  page.counter("queue_refused_total", "Requests refused because the queue was full",
               metrics.queue_refused);
  page.counter("queue_timeouts_total",
               "Requests refused because they waited in the queue for too long",
               metrics.queue_timeouts);
  page.counter("no_engine_total", "Requests refused because no engine was up", metrics.no_engine);
  page.counter("memory_refused_total", "Requests refused because --body-memory was full",
               metrics.memory_refused);
  page.counter("bad_requests_total", "Connections closed after an invalid HTTP request",
               metrics.bad_requests);
  page.counter("slow_requests_total",
               "Requests refused with 408 because their head or body took too long to arrive",
               metrics.slow_requests);
  page.counter("connections_refused_total", "Connections refused because of --max-connections",
               metrics.connections_refused);
  page.counter("connections_per_address_refused_total",
               "Connections refused because of --max-connections-per-address",
               metrics.address_refused);
}

void configuration(MetricsPage& page, const Metrics& metrics) {
  page.counter("engine_list_errors_total", "Failed attempts to read --engines-file",
               metrics.engine_list_errors);
  page.counter(
      "key_file_errors_total",
      "Failed attempts to read --api-keys-file, --engine-api-key-file or --cache-salt-key-file",
      metrics.key_file_errors);
  page.counter("name_errors_total", "Failed lookups of dns:// names", metrics.name_errors);
}

void in_flight(MetricsPage& page, const Metrics& metrics) {
  page.gauge("connections", "Open connections of clients", metrics.connections);
  page.gauge("requests_in_flight", "Requests in flight", metrics.in_flight);
  page.gauge("queue_length", "Requests that wait for an engine", metrics.queued);
  page.gauge("queue_clients", "Clients with a request that waits for an engine",
             metrics.queue_clients);
  page.gauge("queue_tokens", "Tokens of the prompts that wait for an engine", metrics.queue_tokens);
  page.gauge("body_bytes", "Bytes of the request bodies in memory", metrics.body_bytes);
}

}  // namespace

std::string metrics_page(const Metrics& metrics, const Fleet& fleet,
                         const NamespaceView& namespaces, const KvRouting* kv, TimePoint now) {
  MetricsPage page("pegaflow_router_");
  requests(page, metrics);
  outcomes(page, metrics);
  durations(page, metrics);
  legs(page, metrics);
  refusals(page, metrics);
  configuration(page, metrics);
  in_flight(page, metrics);
  engines(page, fleet, now);
  if (namespaces.is_watched) compared(page, namespaces);
  if (kv != nullptr) kv_metrics(page, *kv, now);
  return page.text();
}

std::string index_metrics_page(const Metrics& metrics, const Fleet& fleet, const KvRouting& kv,
                               TimePoint now) {
  MetricsPage page("pegaflow_index_");
  requests(page, metrics);
  page.histogram("request_seconds", "Time from a request to the end of its response",
                 metrics.whole);
  refusals(page, metrics);
  configuration(page, metrics);
  in_flight(page, metrics);
  engines(page, fleet, now);
  kv_metrics(page, kv, now);
  return page.text();
}

}  // namespace pegaflow::router
