#include "router/body/early_params.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "router/http/json_text.h"

namespace pegaflow::router {
namespace {

constexpr std::size_t kIdDigits = 32;
/// Numbers beyond it are not jobs: the connector rejects them.
constexpr std::uint64_t kMostJobs = std::uint64_t{1} << 61U;

bool is_id(std::string_view text) {
  return text.size() == kIdDigits &&
         text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

std::optional<std::uint64_t> job_of(const JsonMember* member) {
  if (member == nullptr) return std::nullopt;
  std::uint64_t job = 0;
  const char* const end = member->value.data() + member->value.size();
  const auto [stop, error] = std::from_chars(member->value.data(), end, job);
  if (error != std::errc() || stop != end || job > kMostJobs) return std::nullopt;
  return job;
}

}  // namespace

std::optional<PrefillPlace> place_of(std::string_view kv_params) {
  const auto outer = read_members(kv_params);
  if (!outer) return std::nullopt;
  const JsonMember* const ours = find_member(*outer, "pegaflow");
  if (ours == nullptr || ours->value.front() != '{') return std::nullopt;
  const auto members = read_members(ours->value);
  if (!members) return std::nullopt;
  const JsonMember* const early = find_member(*members, "early");
  const auto job = job_of(find_member(*members, "job"));
  PrefillPlace place{.node = text_of(*members, "node"),
                     .incarnation = text_of(*members, "incarnation"),
                     .job = job.value_or(0)};
  const bool is_early = early != nullptr && early->value == "true";
  if (!is_early || !job || !is_id(place.node) || !is_id(place.incarnation)) return std::nullopt;
  return place;
}

std::string early_params(const PrefillPlace& place, std::chrono::milliseconds wait) {
  return fmt::format(
      R"({{"pegaflow":{{"node":"{}","incarnation":"{}","job":{},"tokens":0,"wait_ms":{}}}}})",
      place.node, place.incarnation, place.job + 1, std::max<std::int64_t>(wait.count(), 1));
}

}  // namespace pegaflow::router
