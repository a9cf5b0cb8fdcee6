#include "router/kv/kv_prefetch.h"

#include <fmt/format.h>

#include "base/hex.h"

namespace pegaflow::router {

std::string_view to_string(PrefetchState state) noexcept {
  switch (state) {
    case PrefetchState::kSent:
      return "sent";
    case PrefetchState::kAccepted:
      return "accepted";
    case PrefetchState::kRefused:
      return "refused";
    case PrefetchState::kFailed:
      return "failed";
    case PrefetchState::kBusy:
      return "busy";
    case PrefetchState::kSuspended:
      return "suspended";
    case PrefetchState::kUnknownKeys:
      return "unknown_keys";
  }
  return "";
}

std::string PrefetchOrder::body(std::string_view id) const {
  std::string text = fmt::format(R"({{"namespace":"{}","id":"{}",)", space, id);
  if (!sources.empty()) text += fmt::format(R"("sources":{},)", sources);
  if (!tenant.empty()) text += fmt::format(R"("tenant":"{}",)", tenant);
  text += R"("keys":")";
  text.reserve(text.size() + keys.size() * 2 * BlockKey::kMaxBytes + 2);
  for (const BlockKey& key : keys) text += to_hex(key.bytes);
  text += "\"}";
  return text;
}

}  // namespace pegaflow::router
