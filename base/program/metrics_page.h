#pragma once
/// \file
/// A page of metrics in Prometheus' text format.

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <prometheus/metric_family.h>

namespace pegaflow {

/// Builds a page family by family from values that other classes count. Bound to its owner's
/// thread.
class MetricsPage {
 public:
  using Type = prometheus::MetricType;
  using Labels = std::vector<prometheus::ClientMetric::Label>;
  using Sample = std::pair<const char*, double>;  ///< A label's value, and the number.

  /// `prefix` stands before the name of every family.
  explicit MetricsPage(std::string prefix) : prefix_(std::move(prefix)) {}

  /// Begins a family, to which sample() and histogram() add.
  void begin(Type type, const char* name, const char* help);
  template <typename Number>
  void sample(Number value, Labels labels = {}) {
    add(static_cast<double>(value), std::move(labels));
  }
  /// Adds durations or ages: `kBounds` in seconds, `counts` (one more than bounds), `sum_seconds`.
  template <typename From>
  void histogram(const From& from, Labels labels = {}) {
    prometheus::ClientMetric metric;
    metric.label = std::move(labels);
    std::uint64_t cumulative = 0;
    for (std::size_t i = 0; i < from.counts.size(); ++i) {
      cumulative += from.counts[i];
      metric.histogram.bucket.push_back(
          {cumulative,
           i < From::kBounds.size() ? From::kBounds[i] : std::numeric_limits<double>::infinity()});
    }
    metric.histogram.sample_count = cumulative;
    metric.histogram.sample_sum = from.sum_seconds;
    families_.back().metric.push_back(std::move(metric));
  }

  // ---- whole families, with one number or one for each value of a label

  template <typename Number>
  void gauge(const char* name, const char* help, Number value) {
    begin(Type::Gauge, name, help);
    sample(value);
  }
  void counter(const char* name, const char* help, std::uint64_t value) {
    begin(Type::Counter, name, help);
    sample(value);
  }
  template <typename From>
  void histogram(const char* name, const char* help, const From& from) {
    begin(Type::Histogram, name, help);
    histogram(from);
  }
  void gauges(const char* name, const char* help, const char* label,
              std::initializer_list<Sample> samples) {
    by_label(Type::Gauge, name, help, label, samples);
  }
  void counters(const char* name, const char* help, const char* label,
                std::initializer_list<Sample> samples) {
    by_label(Type::Counter, name, help, label, samples);
  }

  [[nodiscard]] std::string text() const;

 private:
  void add(double value, Labels labels);
  void by_label(Type type, const char* name, const char* help, const char* label,
                std::initializer_list<Sample> samples);

  std::string prefix_;
  std::vector<prometheus::MetricFamily> families_;
};

}  // namespace pegaflow
