#pragma once
/// \file
/// One request of a client, from its head to the end of its response.

#include <memory>
#include <string>
#include <vector>

#include <boost/asio/awaitable.hpp>

#include "base/error.h"
#include "router/exchange/response_writer.h"
#include "router/http/http_message.h"
#include "router/http/json_text.h"
#include "router/kv/kv_request.h"
#include "router/request/access_record.h"
#include "router/request/client.h"
#include "router/request/client_request.h"
#include "router/request/client_wait.h"
#include "router/request/engine_models.h"
#include "router/request/engine_needs.h"
#include "router/request/held_bodies.h"
#include "router/state/shared.h"

namespace pegaflow::router {

/// Composes the parts that handle a request: the legs to the engines (PrefillLeg, FirstTokenSplice,
/// DecodeLeg), and the state that they share. Decides only which of them run. Thread-bound.
class Exchange {
 public:
  /// All of them outlive the exchange.
  Exchange(Client& client, Shared& shared, const RequestHead& head);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  /// The whole response to a request that needs no body to be answered (path, method, key, rate);
  /// empty for all others.
  std::string refusal();

  /// Sends the response. False when the connection has to end.
  boost::asio::awaitable<bool> run(std::string body);

  /// Counts the request and writes its line of the access log.
  void finished();

 private:
  boost::asio::awaitable<bool> send_own_page();
  boost::asio::awaitable<bool> send_models();
  boost::asio::awaitable<bool> send_unknown_model();
  /// Reads the client's body, and sets the needs. The members are views into the body.
  Result<std::vector<JsonMember>> read_body();
  /// Looks up what the policy kv-aware knows of the prompt.
  void read_prompt(const std::vector<JsonMember>& members);
  /// Responds to a request that will come.
  boost::asio::awaitable<bool> announce(const std::vector<JsonMember>& members);
  /// Sends a request with a valid body to engines.
  boost::asio::awaitable<bool> serve(const std::vector<JsonMember>& members);
  boost::asio::awaitable<bool> split(const std::vector<JsonMember>& members);
  /// Whether a decode engine may receive the request together with the prefill.
  [[nodiscard]] bool may_be_early(const std::vector<JsonMember>& members, bool wants_token) const;
  boost::asio::awaitable<bool> decode(std::vector<const Engine*> tried = {});

  Shared& shared_;
  Client& client_;
  AccessRecord record_;
  ClientRequest request_;
  std::unique_ptr<KvRequest> kv_;
  EngineNeeds needs_;
  ClientWait wait_;
  ClientWait prefill_wait_;  // Of a prefill beside a decode leg.
  EngineModels models_;
  HeldBodies bodies_;
  ResponseWriter writer_;
};

}  // namespace pegaflow::router
