#include "router/routing/namespaces.h"

#include <algorithm>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "router/http/json_text.h"

namespace pegaflow::router {
namespace {

constexpr std::size_t kShownBytes = 120;  // Of one value.
constexpr std::size_t kShownInstances = 8;

Result<std::vector<std::string_view>> elements_of(const std::vector<JsonMember>& members,
                                                  std::string_view name) {
  const JsonMember* const list = find_member(members, name);
  if (list == nullptr || list->value.front() != '[') {
    return fail(Errc::kCorrupt, "the list \"{}\" is missing", name);
  }
  auto elements = read_elements(list->value);
  if (!elements) return fail(Errc::kCorrupt, "{}", elements.error().detail);
  return elements;
}

Result<std::vector<JsonMember>> object_of(std::string_view text) {
  auto members = read_members(text);
  if (!members) return fail(Errc::kCorrupt, "{}", members.error().detail);
  return members;
}

/// Whether these are the members of a connected instance or rank.
bool is_connected(const std::vector<JsonMember>& members) {
  const JsonMember* const connected = find_member(members, "connected");
  return connected != nullptr && connected->value == "true";
}

/// The memory that all connected ranks of an instance have alike. Older servers report none.
Result<std::optional<DirectMemory>> direct_of(const std::vector<JsonMember>& instance) {
  if (find_member(instance, "ranks") == nullptr) return std::nullopt;
  PEGA_TRY_LET(const auto ranks, elements_of(instance, "ranks"));
  std::optional<DirectMemory> all;
  bool is_first = true;
  for (const std::string_view element : ranks) {
    PEGA_TRY_LET(const auto rank, object_of(element));
    if (!is_connected(rank)) continue;
    std::optional<DirectMemory> one;
    const JsonMember* const direct = find_member(rank, "direct");
    if (direct != nullptr && direct->value != "null") {
      PEGA_TRY_LET(const auto fields, object_of(direct->value));
      one = DirectMemory{text_of(fields, "group"), text_of(fields, "lane")};
      if (one->group.empty()) return fail(Errc::kCorrupt, "a direct group has no name");
    }
    if (std::exchange(is_first, false)) all = one;
    if (all != one) return std::nullopt;
  }
  return all;
}

const std::string* value_of(const InstanceNamespace& instance, std::string_view factor) {
  for (const auto& [name, value] : instance.factors) {
    if (name == factor) return &value;
  }
  return nullptr;
}

/// The length of the common prefix of all values.
std::size_t common_prefix(const FactorDifference& difference) {
  std::size_t length = difference.values.front().value.size();
  for (const auto& each : difference.values) {
    const std::string& first = difference.values.front().value;
    const auto end =
        std::mismatch(first.begin(), first.end(), each.value.begin(), each.value.end()).first;
    length = std::min(length, static_cast<std::size_t>(end - first.begin()));
  }
  return length;
}

/// Up to kShownBytes of `text` from `from`, never cutting a character.
std::string cut(std::string_view text, std::size_t from) {
  while (from > 0 && from < text.size() &&
         (static_cast<unsigned char>(text[from]) & 0xC0) == 0x80) {
    --from;
  }
  std::size_t end = std::min(text.size(), from + kShownBytes);
  while (end < text.size() && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) ++end;
  return fmt::format("{}{}{}", from > 0 ? "..." : "", text.substr(from, end - from),
                     end < text.size() ? "..." : "");
}

std::string names(const std::vector<std::string>& instances) {
  std::string text;
  for (std::size_t i = 0; i < std::min(instances.size(), kShownInstances); ++i) {
    text += (i > 0 ? ", " : "") + instances[i];
  }
  if (instances.size() > kShownInstances) {
    text += fmt::format(" and {} more", instances.size() - kShownInstances);
  }
  return text;
}

}  // namespace

Result<std::vector<InstanceNamespace>> read_instances(std::string_view answer) {
  PEGA_TRY_LET(const auto top, object_of(answer));
  PEGA_TRY_LET(const auto list, elements_of(top, "instances"));
  std::vector<InstanceNamespace> found;
  for (const std::string_view element : list) {
    PEGA_TRY_LET(const auto members, object_of(element));
    if (!is_connected(members)) continue;
    InstanceNamespace one{text_of(members, "instance"), text_of(members, "namespace"), {}, {}};
    PEGA_TRY_LET(const auto factors, elements_of(members, "factors"));
    for (const std::string_view factor : factors) {
      PEGA_TRY_LET(const auto fields, object_of(factor));
      one.factors.emplace_back(text_of(fields, "name"), text_of(fields, "value"));
    }
    PEGA_TRY_LET(one.direct, direct_of(members));
    found.push_back(std::move(one));
  }
  return found;
}

NamespaceReport compare_namespaces(std::span<const InstanceNamespace> instances) {
  NamespaceReport report;
  report.instances = instances.size();
  std::set<std::string_view> hashes;
  std::vector<std::string_view> factors;  // In the order of the lists.
  for (const InstanceNamespace& each : instances) {
    hashes.insert(each.hash);
    for (const auto& [name, value] : each.factors) {
      if (std::find(factors.begin(), factors.end(), name) == factors.end()) factors.push_back(name);
    }
  }
  report.namespaces = hashes.size();
  if (hashes.size() < 2) return report;
  const auto look_at = [&](std::string_view factor, const auto& value_in) {
    FactorDifference difference{std::string(factor), {}};
    for (const InstanceNamespace& each : instances) {
      const std::string value = value_in(each);
      auto same = std::find_if(difference.values.begin(), difference.values.end(),
                               [&](const auto& known) { return known.value == value; });
      if (same == difference.values.end()) {
        same = difference.values.insert(difference.values.end(), {value, {}});
      }
      same->instances.push_back(each.instance);
    }
    if (difference.values.size() > 1) report.differences.push_back(std::move(difference));
  };
  for (const std::string_view factor : factors) {
    look_at(factor, [&](const InstanceNamespace& each) {
      const std::string* const value = value_of(each, factor);
      return value == nullptr ? std::string("(none)") : *value;
    });
  }
  if (report.differences.empty()) {
    look_at("namespace", [](const InstanceNamespace& each) { return each.hash; });
  }
  return report;
}

std::string NamespaceReport::text() const {
  std::string text;
  for (const FactorDifference& difference : differences) {
    text += fmt::format("{}{} is ", text.empty() ? "" : "; ", difference.factor);
    const std::size_t common = common_prefix(difference);
    for (std::size_t i = 0; i < difference.values.size(); ++i) {
      const auto& each = difference.values[i];
      text += fmt::format("{}\"{}\" for {}", i > 0 ? ", " : "",
                          cut(each.value, common > kShownBytes / 2 ? common - 8 : 0),
                          names(each.instances));
    }
  }
  return text;
}

bool NamespaceView::is_good() const {
  return report.namespaces < 2 &&
         std::all_of(servers.begin(), servers.end(), [](const Server& each) { return each.is_up; });
}

std::string NamespaceView::json() const {
  std::string out = fmt::format(R"({{"instances":{},"different":{},"differs":[)", report.instances,
                                report.namespaces);
  for (std::size_t i = 0; i < report.differences.size(); ++i) {
    const FactorDifference& difference = report.differences[i];
    out += fmt::format(R"({}{{"factor":{},"values":[)", i > 0 ? "," : "",
                       json_quote(difference.factor));
    for (std::size_t j = 0; j < difference.values.size(); ++j) {
      out += fmt::format(R"({}{{"value":{},"instances":[)", j > 0 ? "," : "",
                         json_quote(difference.values[j].value));
      const auto& instances_of = difference.values[j].instances;
      for (std::size_t k = 0; k < instances_of.size(); ++k) {
        out += (k > 0 ? "," : "") + json_quote(instances_of[k]);
      }
      out += "]}";
    }
    out += "]}";
  }
  out += R"(],"servers":[)";
  for (std::size_t i = 0; i < servers.size(); ++i) {
    out += fmt::format(R"({}{{"url":{},"up":{}}})", i > 0 ? "," : "", json_quote(servers[i].url),
                       servers[i].is_up);
  }
  return out + "]}";
}

}  // namespace pegaflow::router
