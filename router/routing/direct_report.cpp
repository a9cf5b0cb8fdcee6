#include "router/routing/direct_report.h"

#include <algorithm>

#include <fmt/format.h>

#include "router/http/json_text.h"

namespace pegaflow::router {
namespace {

constexpr std::size_t kShown = 8;

/// Why an instance has no partner; empty: it has one.
std::string why_alone(const ServedInstance& one, std::span<const ServedInstance> instances) {
  const InstanceNamespace& own = *one.instance;
  if (!own.direct) {
    return "its workers have registered no memory: pegaflow.direct_group is not set, or their logs "
           "have the reason";
  }
  std::size_t neighbors = 0;
  std::string other_lane;
  for (const ServedInstance& each : instances) {
    const InstanceNamespace& other = *each.instance;
    if (&other == &own || each.server != one.server || !other.direct) continue;
    if (other.direct->group != own.direct->group) continue;
    ++neighbors;
    if (other.direct->lane != own.direct->lane) {
      other_lane = other.direct->lane;
    } else if (other.hash == own.hash) {
      return {};
    }
  }
  const std::string& group = own.direct->group;
  if (neighbors == 0) {
    return fmt::format("no other engine of its server is in the direct group \"{}\"", group);
  }
  if (!other_lane.empty()) {
    return fmt::format(
        "the direct group \"{}\" has no other engine with the lane {}, and one with {}", group,
        own.direct->lane, other_lane);
  }
  return fmt::format("the other engines of the direct group \"{}\" have other namespaces", group);
}

}  // namespace

std::string DirectReport::text() const {
  std::string text;
  for (std::size_t i = 0; i < std::min(alone.size(), kShown); ++i) {
    text += fmt::format("{}{} at {}: {}", i > 0 ? "; " : "", alone[i].instance, alone[i].server,
                        alone[i].why);
  }
  if (alone.size() > kShown) text += fmt::format("; and {} more", alone.size() - kShown);
  return text;
}

std::string DirectReport::json() const {
  std::string out = fmt::format(R"({{"paired":{},"alone":[)", paired);
  for (std::size_t i = 0; i < alone.size(); ++i) {
    out += fmt::format(R"({}{{"instance":{},"server":{},"why":{}}})", i > 0 ? "," : "",
                       json_quote(alone[i].instance), json_quote(alone[i].server),
                       json_quote(alone[i].why));
  }
  return out + "]}";
}

DirectReport pair_engines(std::span<const ServedInstance> instances) {
  DirectReport report;
  for (const ServedInstance& one : instances) {
    report.has_groups = report.has_groups || one.instance->direct.has_value();
    std::string why = why_alone(one, instances);
    if (why.empty()) {
      ++report.paired;
    } else {
      report.alone.push_back({one.instance->instance, std::string(one.server), std::move(why)});
    }
  }
  return report;
}

}  // namespace pegaflow::router
