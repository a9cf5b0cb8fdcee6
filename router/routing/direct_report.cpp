#include "router/routing/direct_report.h"

#include <algorithm>
#include <map>
#include <utility>

#include <fmt/format.h>

#include "router/http/json_text.h"

namespace pegaflow::router {
namespace {

constexpr std::size_t kShown = 8;

/// The instances of a server in one direct group, by server and group.
using Groups =
    std::map<std::pair<std::string_view, std::string_view>, std::vector<const InstanceNamespace*>>;

Groups groups_of(std::span<const ServedInstance> instances) {
  Groups groups;
  for (const auto& [server, instance] : instances) {
    if (!instance->direct) continue;
    groups[{server, instance->direct->group}].push_back(instance);
  }
  return groups;
}

/// Why an instance has no partner; empty: it has one.
std::string why_alone(const ServedInstance& one, const Groups& groups) {
  const InstanceNamespace& own = *one.instance;
  if (!own.direct) {
    return "its workers have registered no memory: pegaflow.direct_group is not set, or their logs "
           "have the reason";
  }
  const std::string& group = own.direct->group;
  const std::vector<const InstanceNamespace*>& members = groups.at({one.server, group});
  if (members.size() == 1) {
    return fmt::format("no other engine of its server is in the direct group \"{}\"", group);
  }
  std::string_view other_lane;
  bool has_same_lane = false;
  for (const InstanceNamespace* const other : members) {
    if (other == &own) continue;
    if (other->direct->lane != own.direct->lane) {
      other_lane = other->direct->lane;
    } else if (other->hash == own.hash) {
      return {};
    } else {
      has_same_lane = true;
    }
  }
  if (has_same_lane) {
    return fmt::format("the other engines of the direct group \"{}\" have other namespaces", group);
  }
  return fmt::format(
      "the direct group \"{}\" has no other engine with the lane {}, and one with {}", group,
      own.direct->lane, other_lane);
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
  const Groups groups = groups_of(instances);
  DirectReport report;
  report.has_groups = !groups.empty();
  for (const ServedInstance& one : instances) {
    std::string why = why_alone(one, groups);
    if (why.empty()) {
      ++report.paired;
    } else {
      report.alone.push_back({one.instance->instance, std::string(one.server), std::move(why)});
    }
  }
  return report;
}

}  // namespace pegaflow::router
