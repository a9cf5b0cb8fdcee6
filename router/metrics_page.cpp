#include <limits>
#include <sstream>
#include <utility>
#include <vector>

#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>

#include "router/metrics.h"

namespace pegaflow {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = std::vector<ClientMetric::Label>;

class Page {
 public:
  /// A family; samples are added to the last one.
  void begin(MetricType type, const char* name, const char* help) {
    MetricFamily& made = families_.emplace_back();
    made.name = std::string("pegaflow_router_") + name;
    made.help = help;
    made.type = type;
  }
  void sample(double value, Labels labels = {}) {
    ClientMetric metric;
    metric.label = std::move(labels);
    (families_.back().type == MetricType::Gauge ? metric.gauge.value : metric.counter.value) =
        value;
    families_.back().metric.push_back(std::move(metric));
  }
  void sample(const LatencyHistogram& from, Labels labels = {}) {
    ClientMetric metric;
    metric.label = std::move(labels);
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < from.counts.size(); ++i) {
      sum += from.counts[i];
      metric.histogram.bucket.push_back({sum, i < LatencyHistogram::kBounds.size()
                                                  ? LatencyHistogram::kBounds[i]
                                                  : std::numeric_limits<double>::infinity()});
    }
    metric.histogram.sample_count = sum;
    metric.histogram.sample_sum = from.sum_seconds;
    families_.back().metric.push_back(std::move(metric));
  }
  void one(MetricType type, const char* name, const char* help, std::uint64_t value) {
    begin(type, name, help);
    sample(static_cast<double>(value));
  }
  void one(const char* name, const char* help, const LatencyHistogram& value) {
    begin(MetricType::Histogram, name, help);
    sample(value);
  }
  [[nodiscard]] std::string text() const {
    std::ostringstream out;
    prometheus::TextSerializer().Serialize(out, families_);
    return out.str();
  }

 private:
  std::vector<MetricFamily> families_;
};

Labels engine_labels(const Engine& engine) {
  return {{"role", std::string(to_string(engine.role))}, {"engine", engine.url.text}};
}

void engines(Page& page, const Fleet& fleet, TimePoint now) {
  const auto each = [&](MetricType type, const char* name, const char* help, auto value) {
    page.begin(type, name, help);
    for (const auto& engine : fleet.engines()) {
      page.sample(static_cast<double>(value(*engine)), engine_labels(*engine));
    }
  };
  each(MetricType::Gauge, "engine_up", "Whether its health checks succeed",
       [](const Engine& e) { return e.is_up ? 1 : 0; });
  each(MetricType::Gauge, "engine_breaker", "0 closed, 1 open, 2 half open",
       [&](const Engine& e) { return static_cast<int>(e.breaker.state(now)); });
  each(MetricType::Gauge, "engine_inflight", "Requests that it has now",
       [](const Engine& e) { return e.inflight; });
  each(MetricType::Counter, "engine_requests_total", "Requests sent to it",
       [](const Engine& e) { return e.counters.requests; });
  each(MetricType::Counter, "engine_failures_total",
       "Requests that it did not answer, or with a 5xx other than 503",
       [](const Engine& e) { return e.counters.failures; });
  each(MetricType::Counter, "engine_connects_total", "Connections made to it",
       [](const Engine& e) { return e.counters.connects; });
  each(MetricType::Counter, "engine_checks_failed_total", "Health checks that failed",
       [](const Engine& e) { return e.counters.checks_failed; });
  each(MetricType::Counter, "engine_breaker_opened_total", "How often its breaker opened",
       [](const Engine& e) { return e.breaker.opened(); });
}

}  // namespace

std::string metrics_page(const Metrics& metrics, const Fleet& fleet, TimePoint now) {
  constexpr auto kCounter = MetricType::Counter;
  constexpr auto kGauge = MetricType::Gauge;
  Page page;
  page.begin(kCounter, "requests_total", "Requests by route and class of status");
  for (const auto& [key, count] : metrics.requests) {
    page.sample(static_cast<double>(count),
                {{"route", std::string(key.first)}, {"status", std::string(key.second)}});
  }
  page.begin(kCounter, "prefill_total",
             "What became of the prefill of requests that may be split, by reason");
  for (std::size_t i = 0; i < kPrefillCount; ++i) {
    page.sample(static_cast<double>(metrics.prefill[i]),
                {{"reason", std::string(to_string(static_cast<Prefill>(i)))}});
  }
  page.begin(MetricType::Histogram, "leg_seconds", "Time of an engine's answer, by its role");
  for (std::size_t i = 0; i < kRoleCount; ++i) {
    page.sample(metrics.leg[i], {{"role", std::string(to_string(static_cast<Role>(i)))}});
  }
  page.one("first_event_seconds", "From a request to the first event of its stream",
           metrics.first_event);
  page.one("between_events_seconds", "Mean time between the events of a stream",
           metrics.between_events);
  page.one("request_seconds", "From a request to the end of its answer", metrics.whole);
  page.one("queue_wait_seconds", "How long requests waited for an engine", metrics.queue_wait);
  page.begin(kCounter, "retries_total", "Requests sent again, by role");
  for (std::size_t i = 0; i < kRoleCount; ++i) {
    page.sample(static_cast<double>(metrics.retries[i]),
                {{"role", std::string(to_string(static_cast<Role>(i)))}});
  }
  page.one(kCounter, "late_errors_total", "Streams that ended with an error frame",
           metrics.late_errors);
  page.one(kCounter, "cancelled_legs_total", "Requests ended at an engine because the client left",
           metrics.cancelled_legs);
  page.one(kCounter, "refused_keys_total", "Requests without a known API key",
           metrics.refused_keys);
  page.one(kCounter, "rate_limited_total", "Requests beyond their key's rate",
           metrics.rate_limited);
  page.one(kCounter, "queue_refused_total", "Requests refused because the queue was full",
           metrics.queue_refused);
  page.one(kCounter, "queue_timeouts_total", "Requests that waited for too long",
           metrics.queue_timeouts);
  page.one(kCounter, "no_engine_total", "Requests refused because no engine was up",
           metrics.no_engine);
  page.one(kCounter, "memory_refused_total", "Requests refused because --body-memory was full",
           metrics.memory_refused);
  page.one(kCounter, "bad_requests_total", "Connections that sent what is no request",
           metrics.bad_requests);
  page.one(kCounter, "connections_refused_total", "Connections beyond --max-connections",
           metrics.connections_refused);
  page.one(kCounter, "engine_list_errors_total", "Times that --engines-file could not be used",
           metrics.engine_list_errors);
  page.one(kGauge, "connections", "Connections of clients", metrics.connections);
  page.one(kGauge, "requests_in_flight", "Requests that are not answered yet", metrics.in_flight);
  page.one(kGauge, "queue_length", "Requests that wait for an engine", metrics.queued);
  page.one(kGauge, "body_bytes", "Bytes of requests that are kept", metrics.body_bytes);
  engines(page, fleet, now);
  return page.text();
}

}  // namespace pegaflow
