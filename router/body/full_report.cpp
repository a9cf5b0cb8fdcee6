#include "router/body/full_report.h"

#include <cstddef>

#include "router/http/json_text.h"

namespace pegaflow::router {

std::string with_full_report(std::string_view body) {
  constexpr std::string_view kMode = R"("kv_cache_report_mode":"full")";
  std::string out(body);
  const auto members = read_members(body);
  if (!members) return out;
  const JsonMember* const xargs = find_member(*members, "vllm_xargs");
  if (xargs == nullptr) {
    std::string added = R"("vllm_xargs":{)";
    added += kMode;
    added += members->empty() ? "}" : "},";
    return out.insert(body.find('{') + 1, added);
  }
  if (xargs->value.front() != '{') return out;
  const auto inner = read_members(xargs->value);
  if (!inner) return out;
  std::string added(kMode);
  if (!inner->empty()) added += ',';
  return out.insert(static_cast<std::size_t>(xargs->value.data() - body.data()) + 1, added);
}

}  // namespace pegaflow::router
