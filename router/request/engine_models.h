#pragma once
/// \file
/// Requests the lists of models from all engines at once.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <boost/asio/awaitable.hpp>

#include "router/request/client_request.h"
#include "router/request/client_wait.h"
#include "router/request/engine_needs.h"

namespace pegaflow::router {

/// The models of the engines that are up, for one request. Thread-bound.
class EngineModels {
 public:
  /// Both outlive the object.
  EngineModels(ClientRequest& request, ClientWait& wait) : request_(request), wait_(wait) {}

  /// Whether no engine serves the request's model. Before it returns true, it polls all engines,
  /// but at most once in kModelsPause for the whole router.
  boost::asio::awaitable<bool> is_unknown(const EngineNeeds& needs);

  /// The bodies of all engines' responses to GET /v1/models, as this client sees them.
  boost::asio::awaitable<std::vector<std::string>> lists();

 private:
  /// Begins a poll of each engine that is up, and waits for all of them, or until the client left.
  boost::asio::awaitable<void> poll(
      const std::function<boost::asio::awaitable<void>(std::shared_ptr<Engine>)>& poll_one);

  ClientRequest& request_;
  ClientWait& wait_;
};

}  // namespace pegaflow::router
