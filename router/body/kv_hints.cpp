#include "router/body/kv_hints.h"

#include <cstddef>

#include <fmt/format.h>

namespace pegaflow::router {

std::string with_hint(std::string_view body, std::string_view hint) {
  const std::size_t at = body.find('{') + 1;
  const std::size_t next = body.find_first_not_of(" \t\r\n", at);
  const bool is_empty = next == std::string_view::npos || body[next] == '}';
  return fmt::format(R"({}"kv_transfer_params":{{"pegaflow":{{"hints":{}}}}}{}{})",
                     body.substr(0, at), hint, is_empty ? "" : ",", body.substr(at));
}

}  // namespace pegaflow::router
