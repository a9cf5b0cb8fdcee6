#include "router/request/announcement.h"

#include <string>
#include <utility>

#include <fmt/format.h>

#include "router/kv/kv_routing.h"
#include "router/routing/policy.h"
#include "router/upstream/prefetches.h"

namespace pegaflow::router {

namespace asio = boost::asio;

namespace {

constexpr std::string_view kAnswer = "{}\n";
/// The tenant of announcements without an API key; a hash has other digits.
constexpr std::string_view kKeyless = "announced";

/// Whether blocks are being fetched now.
bool fetch(ClientRequest& request, const EngineNeeds& needs, KvRequest& prompt) {
  Shared& shared = request.shared();
  const TimePoint now = shared.now();
  const auto candidates = shared.fleet.candidates(request.first_role(), needs.fleet_request({}));
  auto order = shared.kv->announce(candidates, prompt, now);
  if (!order) return false;
  // Names of clients stay here. Without a key all are one tenant, which leaves room for requests.
  order->tenant = request.key_name().empty() ? std::string(kKeyless)
                                             : fmt::format("{:016x}", hash_key(request.key_name()));
  // First: a prefetch that is refused ends it.
  shared.kv->expect(*order, now);
  const std::uint64_t number = shared.prefetches->start(std::move(*order));
  if (number == 0) return false;
  // There is no request that could leave: the server ends it by itself.
  shared.prefetches->ended(number);
  return true;
}

}  // namespace

asio::awaitable<bool> serve_announcement(ClientRequest& request, const EngineNeeds& needs,
                                         KvRequest* prompt, AccessRecord& record) {
  Metrics& metrics = request.shared().metrics;
  const bool fetches = prompt != nullptr && !needs.pinned && fetch(request, needs, *prompt);
  ++(fetches ? metrics.announced_fetched : metrics.announced_nothing);
  record.status = 202;
  const std::string head = request.own_head(202, "application/json", kAnswer.size(),
                                            fmt::format("X-Request-Id: {}\r\n", request.id()));
  record.bytes_out += kAnswer.size();
  co_return co_await request.client().send(head, kAnswer);
}

}  // namespace pegaflow::router
