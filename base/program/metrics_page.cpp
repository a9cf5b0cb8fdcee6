#include "base/program/metrics_page.h"

#include <sstream>

#include <prometheus/text_serializer.h>

namespace pegaflow {

void MetricsPage::begin(Type type, const char* name, const char* help) {
  prometheus::MetricFamily& made = families_.emplace_back();
  made.name = prefix_ + name;
  made.help = help;
  made.type = type;
}

void MetricsPage::add(double value, Labels labels) {
  prometheus::MetricFamily& family = families_.back();
  prometheus::ClientMetric metric;
  metric.label = std::move(labels);
  (family.type == Type::Gauge ? metric.gauge.value : metric.counter.value) = value;
  family.metric.push_back(std::move(metric));
}

void MetricsPage::by_label(Type type, const char* name, const char* help, const char* label,
                           std::initializer_list<Sample> samples) {
  begin(type, name, help);
  for (const auto& [value, number] : samples) sample(number, {{label, value}});
}

std::string MetricsPage::text() const {
  std::ostringstream out;
  prometheus::TextSerializer().Serialize(out, families_);
  return out.str();
}

}  // namespace pegaflow
