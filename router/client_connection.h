#pragma once
/// \file
/// One client's connection: its requests, its answers, and whether it is still there.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include <boost/asio/awaitable.hpp>
#include <boost/asio/ip/tcp.hpp>

#include "router/http/deadlines.h"
#include "router/http/http_message.h"
#include "router/state/shared.h"

namespace pegaflow::router {

/// Reads requests one after the other and has each answered by an Exchange. Thread-bound; lives as
/// long as run(), or as somebody holds it.
class ClientConnection : public std::enable_shared_from_this<ClientConnection> {
 public:
  /// `shared` outlives the connection.
  ClientConnection(boost::asio::ip::tcp::socket socket, Shared& shared);
  ~ClientConnection();

  boost::asio::awaitable<void> run();

  /// Sends both texts as one write. False when the client is gone, or took nothing for
  /// --client-timeout; then it is closed.
  boost::asio::awaitable<bool> send(std::string_view first, std::string_view second = {});

  /// Calls `on_gone` once when the client leaves, until unwatch(). A client that has sent more than
  /// its request cannot be watched: whether the connection ended shows only behind those bytes.
  void watch(std::function<void()> on_gone);
  void unwatch();
  [[nodiscard]] bool is_gone() const noexcept { return is_gone_; }

  /// Whether it ends with the answer that is under way: only that answer's head can say so.
  void ends_with_this_answer() noexcept { is_last_ = true; }
  /// The router ends. A connection that waits for its next request is closed; what has come of a
  /// request already, and whatever comes within a second on a new connection, is answered.
  void drain();
  /// Ends whatever is under way, as if the client had left.
  void abort();

 private:
  /// False when the connection has to end.
  boost::asio::awaitable<bool> serve_one();
  boost::asio::awaitable<bool> receive();
  boost::asio::awaitable<bool> read_body(RequestParser& parser);
  /// How long the rest of a body that has come for `passed` may be silent now.
  [[nodiscard]] Duration body_patience(std::size_t received, Duration passed) const;
  /// Answers 408 to a client that took too long for its request.
  boost::asio::awaitable<void> time_out(const RequestParser& parser);
  void deadline_over();
  Result<void> feed(RequestParser& parser);
  boost::asio::awaitable<void> refuse(const RequestParser& parser);
  boost::asio::awaitable<void> linger();
  void look_again();
  void close();
  [[nodiscard]] bool has_unread() const;

  boost::asio::ip::tcp::socket socket_;
  Shared& shared_;
  Deadline deadline_;
  std::string received_;  // And not parsed.
  std::function<void()> on_gone_;
  std::uint64_t watch_ = 0;
  std::uint64_t body_bytes_ = 0;  // Counted in the metrics for the present request.
  bool is_gone_ = false;
  bool is_idle_ = true;  // No request is being read or answered.
  bool is_new_ = true;   // Nothing has come yet.
  bool is_last_ = false;
  bool is_reading_ = false;  // A request: a client that is too slow is told so.

  friend class Exchange;
};

}  // namespace pegaflow::router
