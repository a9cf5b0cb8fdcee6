#pragma once
/// \file
/// The client of a request, as an exchange sees it.

#include <functional>
#include <string>
#include <string_view>

#include <boost/asio/awaitable.hpp>

namespace pegaflow::router {

/// The connection that a request came from. Thread-bound; outlives the exchange.
class Client {
 public:
  /// Sends both texts as one write. False when the client is gone, or received nothing for
  /// --client-timeout; then the connection is closed.
  virtual boost::asio::awaitable<bool> send(std::string_view first, std::string_view second) = 0;
  boost::asio::awaitable<bool> send(std::string_view text) { return send(text, {}); }

  /// Calls `on_gone` once when the client leaves, until unwatch(). A client that has sent more
  /// bytes than its request cannot be watched: the end of the connection is visible only after
  /// them.
  virtual void watch(std::function<void()> on_gone) = 0;
  virtual void unwatch() = 0;
  [[nodiscard]] virtual bool is_gone() const noexcept = 0;

  /// The client's address, of IPv6 the first 64 bits; empty: it is not known.
  [[nodiscard]] virtual std::string address() const = 0;

  /// Ends the connection after the current response, whose head announces it.
  virtual void end_with_this_response() noexcept = 0;
  /// Removes the request's body from Metrics::body_bytes, because its memory is free.
  virtual void release_body() noexcept = 0;

 protected:
  ~Client() = default;
};

}  // namespace pegaflow::router
