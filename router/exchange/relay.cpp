#include "router/exchange/relay.h"

#include <utility>

#include <fmt/format.h>

#include "router/exchange/stream_relay.h"
#include "router/http/log.h"

namespace pegaflow::router {

namespace asio = boost::asio;

namespace {

/// A response that is not streamed is kept up to this size until it is complete, so that another
/// engine can replace one that fails within it.
constexpr std::size_t kWholeBytes = std::size_t{256} * 1024;

/// Sends a long response piece by piece, beginning with `out`, the head, and `body`.
asio::awaitable<Relayed> relay_rest(ResponseWriter& writer, UpstreamCall& call, std::string body,
                                    bool is_chunked, std::string out, Error& error) {
  ClientRequest& request = writer.request();
  while (true) {
    append_piece(out, body, is_chunked);
    if (call.is_complete() && is_chunked) out += "0\r\n\r\n";
    const bool sent = co_await request.client().send(out);
    if (!sent) co_return Relayed::kGone;
    if (call.is_complete()) co_return Relayed::kWhole;
    out.clear();
    body.clear();
    Result<void> got = co_await call.more(body, request.shared().options.event_timeout);
    if (!got) {
      // The length, or the missing last chunk, shows the client that the response is incomplete.
      error = std::move(got.error());
      g_log.warn("an engine failed within a response id={} error=\"{}\"", request.id(),
                 error.detail);
      co_return request.client().is_gone() ? Relayed::kGone : Relayed::kBroken;
    }
    writer.record().bytes_out += body.size();
  }
}

asio::awaitable<Relayed> relay_whole(ResponseWriter& writer, UpstreamCall& call, Error& error) {
  ClientRequest& request = writer.request();
  std::string body;
  do {
    Result<void> got = co_await call.more(body, request.shared().options.event_timeout);
    if (!got) {
      error = std::move(got.error());
      co_return Relayed::kNothingSent;
    }
  } while (!call.is_complete() && body.size() <= kWholeBytes);
  writer.begin(body, call);
  writer.note_piece(body);
  writer.record().bytes_out += body.size();
  if (call.is_complete()) {
    const std::string head =
        writer.head(call.head(), fmt::format("Content-Length: {}\r\n", body.size()));
    const bool sent = co_await request.client().send(head, body);
    co_return sent ? Relayed::kWhole : Relayed::kGone;
  }
  const bool is_chunked = !call.head().content_length && request.is_chunked();
  std::string head = writer.head(
      call.head(), call.head().content_length
                       ? fmt::format("Content-Length: {}\r\n", *call.head().content_length)
                   : is_chunked ? "Transfer-Encoding: chunked\r\n"
                                : "");
  co_return co_await relay_rest(writer, call, std::move(body), is_chunked, std::move(head), error);
}

}  // namespace

asio::awaitable<Relayed> relay_response(ResponseWriter& writer, UpstreamCall& call, Error& error) {
  if (!is_event_stream(call.head())) co_return co_await relay_whole(writer, call, error);
  StreamRelay stream(writer, call, nullptr);
  co_return co_await stream.run(error);
}

}  // namespace pegaflow::router
