#pragma once
/// \file
/// The requirements of one request on its engines.

#include <memory>
#include <string>
#include <vector>

#include <boost/asio/awaitable.hpp>

#include "base/error.h"
#include "router/request/client_request.h"
#include "router/routing/fleet.h"
#include "router/routing/policy.h"
#include "router/upstream/upstream.h"

namespace pegaflow::router {

/// Which engines may receive a request. Remembers the engines that it may have crashed: after two
/// of them the request is suspect and is not sent again. Thread-bound.
class EngineNeeds {
 public:
  explicit EngineNeeds(ClientRequest& request) : request_(request) {}

  RequestView view{};                ///< For policies.
  std::string model{};               ///< Empty: any engine.
  std::shared_ptr<Engine> pinned{};  ///< The only engine that can respond, if set.

  /// The requirements for a choice after the engines `tried`. Refers to this object.
  [[nodiscard]] Fleet::Request fleet_request(const std::vector<const Engine*>& tried) const;

  /// Remembers the engine of a call that ended with `error`, if the engine ended the connection or
  /// went down after it had received the whole request.
  void note_end(const UpstreamCall& call, const Error& error);
  [[nodiscard]] bool has_crashed_any() const noexcept { return !crashed_.empty(); }
  [[nodiscard]] bool is_suspect() const noexcept { return crashed_.size() >= 2; }
  /// Counts and logs a suspect request.
  void report_suspect();
  /// Sends the response to a suspect request. False when the client left.
  boost::asio::awaitable<bool> refuse_suspect();

 private:
  ClientRequest& request_;
  std::vector<std::string> crashed_;  // URLs of engines that ended while they had the request.
};

}  // namespace pegaflow::router
