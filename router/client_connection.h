#pragma once
/// \file
/// One client's connection: its requests, its responses, and its end.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include <boost/asio/awaitable.hpp>
#include <boost/asio/ip/tcp.hpp>

#include "router/http/deadlines.h"
#include "router/http/http_message.h"
#include "router/request/client.h"
#include "router/state/shared.h"

namespace pegaflow::router {

/// The unit of --max-connections-per-address: an IPv4 address, or the first 64 bits of an IPv6
/// address, which is the usual network of one customer. Empty when the client has left.
std::string address_of(const boost::asio::ip::tcp::socket& socket);

/// Reads requests one after the other and passes each to an Exchange. Thread-bound; lives as long
/// as run(), or as any reference to it.
class ClientConnection final : public Client,
                               public std::enable_shared_from_this<ClientConnection> {
 public:
  /// `shared` outlives the connection.
  ClientConnection(boost::asio::ip::tcp::socket socket, Shared& shared);
  ~ClientConnection();

  boost::asio::awaitable<void> run();

  using Client::send;
  boost::asio::awaitable<bool> send(std::string_view first, std::string_view second) override;
  void watch(std::function<void()> on_gone) override;
  void unwatch() override;
  [[nodiscard]] bool is_gone() const noexcept override { return is_gone_; }
  [[nodiscard]] std::string address() const override { return address_of(socket_); }
  void end_with_this_response() noexcept override { is_last_ = true; }
  void release_body() noexcept override;

  /// Called when the router shuts down. Closes a connection that waits for its next request. Still
  /// serves a request of which any byte has arrived, or which arrives within a second on a new
  /// connection.
  void drain();
  /// Ends the pending operation, as if the client had left.
  void abort();

 private:
  /// Serves one request. False when the connection has to end.
  boost::asio::awaitable<bool> serve_one();
  boost::asio::awaitable<bool> read_head(RequestParser& parser);
  boost::asio::awaitable<bool> receive();
  boost::asio::awaitable<bool> read_body(RequestParser& parser);
  /// The time limit for the next piece of a body that has been arriving for `passed`.
  [[nodiscard]] Duration body_patience(std::size_t received, Duration passed) const;
  /// Sends 408 to a client whose request takes too long.
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
  std::string received_;  // Bytes that are not parsed yet.
  std::function<void()> on_gone_;
  std::uint64_t watch_ = 0;
  std::uint64_t body_bytes_ = 0;  // The current request's share of Metrics::body_bytes.
  bool is_gone_ = false;
  bool is_idle_ = true;  // No request is being read or answered.
  bool is_new_ = true;   // No byte has arrived yet.
  bool is_last_ = false;
  bool is_reading_ = false;  // A request is being read: a slow client receives 408.
};

}  // namespace pegaflow::router
