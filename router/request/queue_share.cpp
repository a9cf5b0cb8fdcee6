#include "router/request/queue_share.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include <fmt/format.h>

#include "router/kv/kv_routing.h"
#include "router/routing/policy.h"

namespace pegaflow::router {

namespace {

constexpr double kBytesPerToken = 4;
/// Clients come back within this in any case.
constexpr double kMostSeconds = 3600;

}  // namespace

std::uint64_t queue_key(const ClientRequest& request) {
  if (!request.key_name().empty()) return hash_key("name " + request.key_name());
  for (const char* const name : {"authorization", "x-api-key"}) {
    const std::string* const field = find_field(request.head().fields, name);
    if (field != nullptr && !field->empty()) return hash_key("key " + *field);
  }
  return hash_key("address " + request.client().address());
}

std::uint64_t queue_tokens(const RequestView& view, std::size_t body_bytes) {
  if (view.kv != nullptr && view.kv->prompt_tokens > 0) return view.kv->prompt_tokens;
  return std::max<std::uint64_t>(
      1, static_cast<std::uint64_t>(static_cast<double>(body_bytes) / kBytesPerToken));
}

Duration predicted_wait(const Shared& shared, const Fleet::Request& request, std::uint64_t key,
                        std::uint64_t tokens) {
  if (const auto wait = shared.line.predicted_wait(key, tokens, shared.now())) return *wait;
  double seconds = 1;
  if (shared.kv != nullptr) {
    const auto candidates = shared.fleet.candidates(Role::kDecode, request);
    const KvRouting::Outlook outlook = shared.kv->outlook(candidates, shared.now());
    if (outlook.is_known && outlook.tokens_per_second > 0) {
      const double limit = std::chrono::duration<double>(shared.options.engine_queue_time).count();
      const auto before = static_cast<double>(shared.line.tokens_before(key, tokens) + tokens);
      seconds = std::max(0.0, outlook.least_queue - limit) + before / outlook.tokens_per_second;
    }
  }
  return std::chrono::duration_cast<Duration>(
      std::chrono::duration<double>(std::min(seconds, kMostSeconds)));
}

std::string retry_after(Duration wait) {
  const double seconds = std::ceil(std::chrono::duration<double>(wait).count());
  return fmt::format("Retry-After: {:.0f}\r\n", std::clamp(seconds, 1.0, kMostSeconds));
}

}  // namespace pegaflow::router
