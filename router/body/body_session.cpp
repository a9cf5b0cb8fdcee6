#include "router/body/body_session.h"

#include <fmt/format.h>

#include "router/http/json_text.h"

namespace pegaflow::router {

std::string with_session(std::string_view body, std::string_view session) {
  std::string out(body);
  const auto members = read_members(body);
  if (!members || find_member(*members, "session_id") != nullptr ||
      find_member(*members, "session_params") != nullptr) {
    return out;
  }
  const std::string added =
      fmt::format("\"session_id\":{}{}", json_quote(session), members->empty() ? "" : ",");
  return out.insert(body.find('{') + 1, added);
}

}  // namespace pegaflow::router
