#include "router/request/access_record.h"

#include <algorithm>
#include <array>
#include <chrono>

#include <fmt/format.h>

#include "base/log.h"
#include "router/page/metrics.h"
#include "router/state/shared.h"

namespace pegaflow::router {
namespace {

constexpr Log kAccessLog{"access"};

double milliseconds_of(Duration time) {
  return std::chrono::duration<double, std::milli>(time).count();
}

}  // namespace

void AccessRecord::count_retry(Metrics& metrics, Role role) {
  ++metrics.retries[static_cast<std::size_t>(role)];
  ++retries;
}

void AccessRecord::count(Metrics& metrics, const Subject& subject, Duration whole) const {
  constexpr std::array<std::string_view, 6> kClasses = {"gone", "1xx", "2xx", "3xx", "4xx", "5xx"};
  const std::string_view its_class = subject.is_gone ? kClasses[0] : kClasses[status / 100 % 6];
  ++metrics.requests[{subject.route.name, its_class}];
  if (first_token && !subject.is_gone) {
    ++metrics.first_token[static_cast<std::size_t>(*first_token)];
  }
  if (status != 0 && !subject.is_gone) metrics.whole.record(whole);
  if (handover && !subject.is_gone) {
    ++metrics.handovers[static_cast<std::size_t>(*handover)];
    if (first_event_time && prefilled_at) {
      metrics.added[static_cast<std::size_t>(*handover)].record(
          std::max<Duration>(began + *first_event_time - *prefilled_at, Duration::zero()));
    }
  }
  if (first_event_time) {
    metrics.first_event.record(*first_event_time);
    if (events > 1) {
      metrics.between_events.record((whole - *first_event_time) /
                                    static_cast<std::int64_t>(events - 1));
    }
  }
}

std::string AccessRecord::line(const Subject& subject, Duration whole) const {
  std::string line =
      fmt::format("answered id={} route={} status={} in={} out={} ms={:.3f}", subject.id,
                  subject.route.name, status, bytes_in, bytes_out, milliseconds_of(whole));
  const auto text = [&](std::string_view name, std::string_view value) {
    if (!value.empty()) line += fmt::format(" {}={}", name, value);
  };
  text("key", subject.key_name);
  text("prefill", prefill ? to_string(*prefill) : std::string_view());
  text("legs", handover ? to_string(*handover) : std::string_view());
  text("first_token", first_token ? to_string(*first_token) : std::string_view());
  text("p", prefill_engine);
  text("d", decode_engine);
  if (prefill_time) line += fmt::format(" p_ms={:.3f}", milliseconds_of(*prefill_time));
  if (first_event_time) {
    line += fmt::format(" first_ms={:.3f} events={}", milliseconds_of(*first_event_time), events);
  }
  if (retries > 0) line += fmt::format(" retries={}", retries);
  if (has_late_error) line += " late_error=1";
  if (subject.is_gone) line += " gone=1";
  return line;
}

void AccessRecord::finish(Shared& shared, const Subject& subject) const {
  const Duration whole = shared.now() - began;
  count(shared.metrics, subject, whole);
  const bool is_own =
      subject.route.kind == RouteKind::kHealth || subject.route.kind == RouteKind::kMetrics;
  if (shared.options.access_log && !is_own) kAccessLog.info("{}", line(subject, whole));
}

}  // namespace pegaflow::router
