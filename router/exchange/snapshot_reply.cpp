#include "router/exchange/snapshot_reply.h"

#include <chrono>
#include <string>

#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <fmt/format.h>

#include "router/exchange/response_writer.h"
#include "router/http/log.h"
#include "router/replicas/snapshot.h"

namespace pegaflow::router {

namespace asio = boost::asio;

namespace {

constexpr double kBytesPerSecond = 50e6;

/// Set while a snapshot is sent, also if an exception ends the scope.
class OneAtATime {
 public:
  explicit OneAtATime(Shared& shared) : shared_(shared) { shared_.sends_snapshot = true; }
  ~OneAtATime() { shared_.sends_snapshot = false; }
  OneAtATime(const OneAtATime&) = delete;
  OneAtATime& operator=(const OneAtATime&) = delete;

 private:
  Shared& shared_;
};

}  // namespace

asio::awaitable<bool> send_snapshot(ClientRequest& request, AccessRecord& record) {
  Shared& shared = request.shared();
  if (shared.sends_snapshot) {
    co_return co_await request.send_error(503, "another snapshot is being sent",
                                          "Retry-After: 1\r\n");
  }
  record.status = 200;
  const bool is_chunked = request.is_chunked();
  if (!is_chunked) request.client().end_with_this_response();
  const ResponseHead head{.status = 200,
                          .reason = "OK",
                          .keep_alive = true,
                          .content_length = {},
                          .fields = {{"Content-Type", "application/octet-stream"}}};
  const std::string first =
      request.response_head(head, is_chunked ? "Transfer-Encoding: chunked\r\n" : "");
  if (request.is_head()) co_return co_await request.client().send(first);
  const OneAtATime guard(shared);
  if (!co_await request.client().send(first)) co_return false;
  SnapshotWriter writer(*shared.replicas, nonce_of(request.head().target));
  asio::steady_timer pause(shared.io);
  std::string piece;
  const TimePoint began = shared.now();
  double sent = 0;
  for (std::string part = writer.next(); !part.empty(); part = writer.next()) {
    piece.clear();
    append_piece(piece, part, is_chunked);
    sent += static_cast<double>(part.size());
    record.bytes_out += part.size();
    if (!co_await request.client().send(piece)) co_return false;
    boost::system::error_code ignored;
    pause.expires_at(began + std::chrono::duration_cast<Duration>(
                                 std::chrono::duration<double>(sent / kBytesPerSecond)));
    co_await pause.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
    if (shared.replicas == nullptr) co_return false;
  }
  g_log.info("a snapshot was sent bytes={:.0f}", sent);
  if (!is_chunked) co_return false;
  co_return co_await request.client().send("0\r\n\r\n");
}

}  // namespace pegaflow::router
