#include "router/exchange/prompt_render.h"

#include <cstdint>
#include <optional>
#include <vector>

#include "router/body/prompt_text.h"
#include "router/kv/kv_routing.h"
#include "router/score/renderers.h"

namespace pegaflow::router {

namespace asio = boost::asio;

namespace {

bool is_to_render(const Shared& shared, const KvRequest& request, const std::string& body) {
  if (shared.renderers == nullptr || request.token_count != 0 || request.is_truncated) return false;
  if (request.text_size < shared.options.render_min_bytes ||
      request.known.text_bytes * 2 >= request.text_size) {
    return false;
  }
  // Without the way in which an engine hashes, tokens would not be of use.
  if (shared.kv->fleet().hashing_rank(request.model, !request.cache_salt.empty()) == nullptr) {
    return false;
  }
  return !shared.renderers->asked().continues_one(request.text) && !has_media(body);
}

}  // namespace

asio::awaitable<void> render_prompt(Shared& shared, KvRequest& request, std::string_view route,
                                    const std::string& body, ClientWait& wait) {
  if (!is_to_render(shared, request, body)) co_return;
  // Also if it fails: the next turn costs no call either. A text that no server has room for is
  // not sent, and its next turn may be.
  if (shared.renderers->has_room()) shared.renderers->asked().add(request.text);
  const std::optional<std::vector<std::uint32_t>> tokens =
      co_await shared.renderers->tokens(route, body, &wait);
  if (tokens) shared.kv->rendered(request, *tokens);
}

}  // namespace pegaflow::router
