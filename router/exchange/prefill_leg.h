#pragma once
/// \file
/// The request to a prefill engine, which computes the prompt before the decode engine.

#include <cstddef>
#include <string>
#include <vector>

#include <boost/asio/awaitable.hpp>

#include "base/clock.h"
#include "base/error.h"
#include "router/body/split.h"
#include "router/http/json_text.h"
#include "router/request/access_record.h"
#include "router/request/client_request.h"
#include "router/request/client_wait.h"
#include "router/request/engine_needs.h"
#include "router/state/engine_permit.h"

namespace pegaflow::router {

/// The outcome of a prefill.
struct Prefilled {
  Prefill what = Prefill::kLost;
  bool is_worth_another = false;  ///< Another prefill engine may succeed with the same body.
  std::string kv_params{};
  std::string response{};  ///< The whole body; kept only if its token is wanted.
};

/// Sends the prompt to a prefill engine, and to a second one if the first fails. No failure reaches
/// the client: the decode engine can compute the prompt as well. Owns the list of engines that were
/// tried. Thread-bound; runs once.
class PrefillLeg {
 public:
  /// All of them outlive the leg.
  PrefillLeg(ClientRequest& request, EngineNeeds& needs, ClientWait& wait, AccessRecord& record);

  /// `members` are of the client's body and outlive the coroutine. `wants_token`: the response is
  /// needed with the token ids.
  boost::asio::awaitable<Prefilled> run(const std::vector<JsonMember>& members, bool wants_token);

 private:
  /// Whether a decode engine has so much of the prompt that no prefill pays.
  [[nodiscard]] bool is_cached() const;
  boost::asio::awaitable<Prefilled> try_engines(const std::string& body);
  boost::asio::awaitable<Prefilled> send(EnginePermit& permit, const std::string& body);
  /// Reads the whole response within `limit`.
  boost::asio::awaitable<Result<void>> read(UpstreamCall& call, const std::string& body,
                                            Duration limit, std::string& response);
  [[nodiscard]] Duration time_limit(std::size_t body_bytes) const;
  Prefilled failed(EnginePermit& permit, const UpstreamCall& call, const Error& error);
  Prefilled handed_over(Engine& engine, std::string response);

  ClientRequest& request_;
  Shared& shared_;
  EngineNeeds& needs_;
  ClientWait& wait_;
  AccessRecord& record_;
  std::vector<const Engine*> tried_;
};

}  // namespace pegaflow::router
