#pragma once
/// \file
/// One request of a client: its head, its identity, and the heads of the messages that follow it.

#include <cstddef>
#include <string>
#include <string_view>

#include <boost/asio/awaitable.hpp>

#include "router/http/http_message.h"
#include "router/http/routes.h"
#include "router/request/access_record.h"
#include "router/request/client.h"
#include "router/state/shared.h"

namespace pegaflow::router {

/// Owns the request's id, route and key name. Thread-bound.
class ClientRequest {
 public:
  /// All of them outlive the request.
  ClientRequest(Client& client, Shared& shared, const RequestHead& head, AccessRecord& record);

  [[nodiscard]] Client& client() const noexcept { return client_; }
  [[nodiscard]] Shared& shared() const noexcept { return shared_; }
  [[nodiscard]] const RequestHead& head() const noexcept { return head_; }
  [[nodiscard]] const Route& route() const noexcept { return route_; }
  /// The engines that receive the request first, or would receive the announced one: those that
  /// compute its prompt.
  [[nodiscard]] Role first_role() const noexcept;
  [[nodiscard]] const std::string& id() const noexcept { return id_; }
  [[nodiscard]] const std::string& cors() const noexcept { return cors_; }
  [[nodiscard]] const std::string& key_name() const noexcept { return key_name_; }
  [[nodiscard]] bool is_head() const noexcept { return head_.method == "HEAD"; }
  /// Whether bodies of unknown length are sent to the client in chunks.
  [[nodiscard]] bool is_chunked() const noexcept { return !head_.is_http_10; }

  /// Whether the request is served only with a token that covers its body.
  [[nodiscard]] bool needs_token() const noexcept { return needs_token_; }
  void set_needs_token() noexcept { needs_token_ = true; }

  void set_route(const Route& route) { route_ = route; }
  void set_key_name(std::string_view name) { key_name_ = name; }

  /// Whether the connection stays open after the response whose head is built now. If not, the
  /// client's connection ends with it.
  bool keeps_connection();

  /// The head of a request to an engine, for a body of `body_size` bytes. With `kv` it names the
  /// request's session and the engine's rank.
  [[nodiscard]] std::string engine_head(const Engine& engine, std::size_t body_size,
                                        bool is_prefill, const KvRequest* kv = nullptr) const;
  /// The head of a response that an engine has sent. `framing` are the lines for its length.
  [[nodiscard]] std::string response_head(const ResponseHead& head, std::string_view framing);
  /// The head of a response of the router's own. `fields` are whole lines.
  [[nodiscard]] std::string own_head(unsigned status, std::string_view type, std::size_t size,
                                     std::string_view fields);
  /// A whole error response with the request's id. Records the status. `fields` are whole lines.
  [[nodiscard]] std::string error(unsigned status, std::string_view text,
                                  std::string_view fields = {});

  /// Sends a whole response and counts its bytes. False when the client left.
  boost::asio::awaitable<bool> send(std::string response);
  /// Sends error(). False when the client left.
  boost::asio::awaitable<bool> send_error(unsigned status, std::string_view text,
                                          std::string_view fields = {});

 private:
  Client& client_;
  Shared& shared_;
  const RequestHead& head_;
  AccessRecord& record_;
  Route route_;
  bool needs_token_ = false;
  std::string id_;
  std::string cors_;      // Lines of each response.
  std::string key_name_;  // A copy: the list of keys may be replaced during the request.
};

}  // namespace pegaflow::router
