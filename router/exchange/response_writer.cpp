#include "router/exchange/response_writer.h"

#include <memory>

#include <fmt/format.h>

#include "router/body/usage.h"
#include "router/http/log.h"
#include "router/kv/kv_routing.h"
#include "router/page/pages.h"

namespace pegaflow::router {

namespace asio = boost::asio;

namespace {

/// Remembers the engine of a response of /v1/responses.
void learn_owner(Shared& shared, std::string_view begin, const std::shared_ptr<Engine>& engine) {
  // The id is in the first object, streamed or not: "id":"resp_...".
  constexpr std::string_view kBegin = "\"resp_";
  const std::size_t at = begin.substr(0, 4096).find(kBegin);
  if (at == std::string_view::npos) return;
  const std::size_t end = begin.find('"', at + 1);
  if (end == std::string_view::npos || end - at > 128) return;
  shared.response_owners.learn(std::string(begin.substr(at + 1, end - at - 1)), engine);
}

}  // namespace

bool is_event_stream(const ResponseHead& head) {
  const std::string* const type = find_field(head.fields, "content-type");
  constexpr std::string_view kStream = "text/event-stream";
  return type != nullptr && type->size() >= kStream.size() &&
         equals_ignoring_case(std::string_view(*type).substr(0, kStream.size()), kStream);
}

void append_piece(std::string& out, std::string_view bytes, bool is_chunked) {
  if (bytes.empty()) return;  // An empty chunk would be the last one.
  if (is_chunked) out += fmt::format("{:x}\r\n", bytes.size());
  out += bytes;
  if (is_chunked) out += "\r\n";
}

std::string ResponseWriter::head(const ResponseHead& head, std::string_view framing) {
  record_.status = head.status;
  return request_.response_head(head, framing);
}

void ResponseWriter::begin(std::string_view first_bytes, const UpstreamCall& call) {
  has_begun_ = true;
  if (request_.route().kind == RouteKind::kResponses) {
    learn_owner(request_.shared(), first_bytes, call.engine());
  }
  // The first byte of a response that is not streamed comes with its last token.
  if (kv_ != nullptr) {
    Shared& shared = request_.shared();
    if (is_event_stream(call.head())) {
      shared.kv->first_token(*kv_, shared.now());
    } else if (call.head().status == 200) {
      shared.kv->computed(*kv_, shared.now());
    }
    KvRouting::release_text(*kv_);
  }
  bodies_.release();
}

void ResponseWriter::note_piece(std::string_view bytes) {
  if (kv_ == nullptr || has_report_) return;
  const auto usage = find_usage(bytes);
  if (!usage) return;
  has_report_ = usage->cached_tokens.has_value();
  Shared& shared = request_.shared();
  shared.kv->reported(*kv_, usage->prompt_tokens, usage->cached_tokens, shared.now());
}

asio::awaitable<bool> ResponseWriter::end_stream_with_error(const Error& error, bool is_in_event) {
  record_.has_late_error = true;
  ++request_.shared().metrics.late_errors;
  g_log.warn("an engine failed within a stream id={} error=\"{}\"", request_.id(), error.detail);
  const std::string frame =
      (is_in_event ? "\n\n" : "") + error_frame(request_.route().is_anthropic, error.code);
  std::string out;
  append_piece(out, frame, request_.is_chunked());
  if (request_.is_chunked()) out += "0\r\n\r\n";
  co_return co_await request_.client().send(out);
}

}  // namespace pegaflow::router
