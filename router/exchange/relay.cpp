// The part of Exchange that brings an engine's answer to the client.
#include <utility>

#include <boost/asio/awaitable.hpp>

#include "base/log.h"
#include "router/client_connection.h"
#include "router/exchange/exchange.h"
#include "router/http/cors.h"
#include "router/http/sse.h"
#include "router/page/pages.h"

namespace pegaflow::router {

namespace asio = boost::asio;

namespace {

constexpr Log kLog{"router"};

/// Up to here an answer that is not streamed is kept until it is whole, so that an engine which
/// fails in its middle can be replaced by another.
constexpr std::size_t kWholeBytes = std::size_t{256} * 1024;
/// An event that is longer goes out in pieces.
constexpr std::size_t kEventBytes = std::size_t{256} * 1024;

/// Bytes of a body on their way to a client, with their chunk's frame if there is one.
void append_piece(std::string& out, std::string_view bytes, bool is_chunked) {
  if (bytes.empty()) return;  // An empty chunk would be the last one.
  if (is_chunked) out += fmt::format("{:x}\r\n", bytes.size());
  out += bytes;
  if (is_chunked) out += "\r\n";
}

}  // namespace

bool is_event_stream(const ResponseHead& head) {
  const std::string* const type = find_field(head.fields, "content-type");
  constexpr std::string_view kStream = "text/event-stream";
  return type != nullptr && type->size() >= kStream.size() &&
         equals_ignoring_case(std::string_view(*type).substr(0, kStream.size()), kStream);
}

std::string Exchange::answer_head(const ResponseHead& head, std::string_view framing) {
  status_ = head.status;
  std::string out;
  out.reserve(512);
  out += fmt::format("HTTP/1.1 {} {}\r\n", head.status, head.reason);
  bool has_id = false;
  const bool answers = answers_cors(shared_.options.cors_origins);
  for (const HttpField& field : head.fields) {
    if (answers && is_cors_field(field.name)) continue;
    if (equals_ignoring_case(field.name, "content-length") ||
        is_hop_by_hop(field.name, head.fields)) {
      continue;
    }
    has_id = has_id || equals_ignoring_case(field.name, "x-request-id");
    out += field.name;
    out += ": ";
    out += field.value;
    out += "\r\n";
  }
  if (!has_id) out += fmt::format("X-Request-Id: {}\r\n", request_id_);
  out += cors_;
  out += framing;
  if (!keeps_connection()) out += "Connection: close\r\n";
  out += "\r\n";
  return out;
}

void Exchange::learn_response(std::string_view begin, const std::shared_ptr<Engine>& engine) {
  // The id is in the first object, streamed or not: "id":"resp_...".
  constexpr std::string_view kBegin = "\"resp_";
  const std::size_t at = begin.substr(0, 4096).find(kBegin);
  if (at == std::string_view::npos) return;
  const std::size_t end = begin.find('"', at + 1);
  if (end == std::string_view::npos || end - at > 128) return;
  shared_.response_owners.learn(std::string(begin.substr(at + 1, end - at - 1)), engine);
}

asio::awaitable<Exchange::Relay> Exchange::relay(UpstreamCall& call, Error& error) {
  if (is_event_stream(call.head())) co_return co_await relay_stream(call, error);
  co_return co_await relay_whole(call, error);
}

asio::awaitable<Exchange::Relay> Exchange::relay_whole(UpstreamCall& call, Error& error) {
  std::string body;
  do {
    Result<void> got = co_await call.more(body, shared_.options.event_timeout);
    if (!got) {
      error = std::move(got.error());
      co_return Relay::kNothingSent;
    }
  } while (!call.is_complete() && body.size() <= kWholeBytes);
  forget_body();
  if (route_.kind == RouteKind::kResponses) learn_response(body, call.engine());
  bytes_out_ += body.size();
  if (call.is_complete()) {
    const std::string head =
        answer_head(call.head(), fmt::format("Content-Length: {}\r\n", body.size()));
    const bool sent = co_await client_.send(head, body);
    co_return sent ? Relay::kWhole : Relay::kGone;
  }
  const bool is_chunked = !call.head().content_length && !head_.is_http_10;
  std::string out = answer_head(
      call.head(), call.head().content_length
                       ? fmt::format("Content-Length: {}\r\n", *call.head().content_length)
                   : is_chunked ? "Transfer-Encoding: chunked\r\n"
                                : "");
  while (true) {
    append_piece(out, body, is_chunked);
    if (call.is_complete() && is_chunked) out += "0\r\n\r\n";
    const bool sent = co_await client_.send(out);
    if (!sent) co_return Relay::kGone;
    if (call.is_complete()) co_return Relay::kWhole;
    out.clear();
    body.clear();
    Result<void> got = co_await call.more(body, shared_.options.event_timeout);
    if (!got) {
      // The client sees by the length, or by the missing last chunk, that it is not whole.
      error = std::move(got.error());
      kLog.warn("an engine failed in the middle of an answer id={} error=\"{}\"", request_id_,
                error.detail);
      co_return client_.is_gone() ? Relay::kGone : Relay::kBroken;
    }
    bytes_out_ += body.size();
  }
}

asio::awaitable<bool> Exchange::end_with_error(const Error& error, bool is_in_event) {
  late_error_ = true;
  ++shared_.metrics.late_errors;
  kLog.warn("an engine failed in the middle of a stream id={} error=\"{}\"", request_id_,
            error.detail);
  const bool is_chunked = !head_.is_http_10;
  std::string out;
  const std::string frame =
      (is_in_event ? "\n\n" : "") + error_frame(route_.is_anthropic, error.code);
  append_piece(out, frame, is_chunked);
  if (is_chunked) out += "0\r\n\r\n";
  co_return co_await client_.send(out);
}

asio::awaitable<Exchange::Relay> Exchange::relay_stream(UpstreamCall& call, Error& error) {
  const bool is_chunked = !head_.is_http_10;
  SseTracker tracker;
  std::string pending;  // From the end of the last event on.
  std::string out;
  bool has_begun = false;    // The client has our head, and something of this engine's.
  bool is_in_event = false;  // It has a piece of an event that was too long to be kept.
  if (splice_ && !splice_->is_begun) {
    out = answer_head(call.head(), is_chunked ? "Transfer-Encoding: chunked\r\n" : "");
    append_piece(out, splice_->event, is_chunked);
    bytes_out_ += splice_->event.size();
    first_event_time_ = shared_.now() - began_;
    splice_->is_begun = true;
    const bool sent = co_await client_.send(out);
    if (!sent) co_return Relay::kGone;
  }
  while (true) {
    const std::size_t before = pending.size();
    Result<void> got = co_await call.more(
        pending, has_begun ? shared_.options.event_timeout : shared_.options.answer_timeout);
    if (!got) {
      error = std::move(got.error());
      if (client_.is_gone()) co_return Relay::kGone;
      if (!has_begun) co_return Relay::kNothingSent;
      break;
    }
    const std::size_t ended = tracker.feed(std::string_view(pending).substr(before));
    std::size_t size = ended > 0 ? before + ended : 0;
    if (call.is_complete() || pending.size() - size > kEventBytes) size = pending.size();
    events_ = tracker.events() + (splice_ ? 1 : 0);
    if (size == 0 && !call.is_complete()) continue;
    is_in_event = size != before + ended;
    out.clear();
    if (!has_begun && !splice_) {
      out = answer_head(call.head(), is_chunked ? "Transfer-Encoding: chunked\r\n" : "");
      first_event_time_ = shared_.now() - began_;
      if (route_.kind == RouteKind::kResponses) learn_response(pending, call.engine());
    }
    if (!std::exchange(has_begun, true)) forget_body();  // From here on nothing is sent again.
    const std::string_view piece = std::string_view(pending).substr(0, size);
    if (splice_) {
      append_piece(out, with_first_token_counted(piece), is_chunked);
    } else {
      append_piece(out, piece, is_chunked);
    }
    if (call.is_complete() && is_chunked) out += "0\r\n\r\n";
    bytes_out_ += size;
    if (size == pending.size()) {
      pending.clear();
      if (pending.capacity() > 4096) pending.shrink_to_fit();
    } else {
      pending.erase(0, size);
    }
    const bool sent = co_await client_.send(out);
    if (!sent) co_return Relay::kGone;
    if (call.is_complete()) co_return Relay::kWhole;
    if (out.capacity() > 4096) out = std::string();
  }
  // The engine is gone in the middle. If its last event was the closing one, nothing is missing.
  if (!tracker.is_finished()) {
    const bool sent = co_await end_with_error(error, is_in_event);
    co_return sent ? Relay::kErrorFrame : Relay::kGone;
  }
  out = is_chunked ? "0\r\n\r\n" : "";
  const bool sent = co_await client_.send(out);
  co_return sent ? Relay::kErrorFrame : Relay::kGone;
}

}  // namespace pegaflow::router
