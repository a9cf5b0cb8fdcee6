#include "router/body/steering.h"

#include <algorithm>
#include <utility>

namespace pegaflow::router {
namespace {

bool is_steering(const JsonMember& member) {
  for (const std::string_view name :
       {"kv_transfer_params", "ec_transfer_params", "kv_hints", "kv_cache_report_mode"}) {
    if (member.is(name)) return true;
  }
  return member.is("session_id") && is_own_session(json_unescape(member.value));
}

}  // namespace

bool is_own_session(std::string_view id) { return id.substr(0, 4) == "pf1:"; }

bool may_steer(const std::vector<JsonMember>& members) {
  return std::any_of(members.begin(), members.end(), [](const JsonMember& member) {
    return member.is("vllm_xargs") || is_steering(member);
  });
}

Result<std::optional<std::string>> without_steering(std::string_view body, SteeringDepth depth) {
  std::vector<JsonCut> cuts;
  PEGA_TRY(find_members(
      body,
      [&](std::size_t level, const JsonMember* parent, const JsonMember& member) {
        const bool is_read = depth == SteeringDepth::kAnywhere || level == 1 ||
                             (level == 2 && parent != nullptr && parent->is("vllm_xargs"));
        return is_read && is_steering(member);
      },
      cuts));
  if (cuts.empty()) return std::optional<std::string>();
  // Cuts within an object that is cut itself lie inside the cut of that object.
  std::sort(cuts.begin(), cuts.end(),
            [](const JsonCut& a, const JsonCut& b) { return a.begin < b.begin; });
  std::string out;
  out.reserve(body.size());
  std::size_t at = 0;
  for (const JsonCut& cut : cuts) {
    if (cut.begin > at) out += body.substr(at, cut.begin - at);
    at = std::max(at, cut.end);
  }
  out += body.substr(at);
  return std::optional<std::string>(std::move(out));
}

}  // namespace pegaflow::router
