#pragma once
/// \file
/// One request to one decode engine.

#include <functional>
#include <string_view>

#include <boost/asio/awaitable.hpp>

#include "base/error.h"
#include "router/exchange/response_writer.h"
#include "router/request/access_record.h"
#include "router/request/client_request.h"
#include "router/request/client_wait.h"
#include "router/request/engine_needs.h"
#include "router/state/engine_permit.h"
#include "router/upstream/upstream.h"

namespace pegaflow::router {

/// Whether a status is a failure of the engine; 503 only means that it is busy.
constexpr bool is_engine_failure(unsigned status) { return status >= 500 && status != 503; }

/// The outcome of one attempt.
struct DecodeResult {
  Relayed how = Relayed::kNothingSent;
  unsigned status = 0;  ///< 0: the engine sent no head.
  Error error{};        ///< The engine's failure, if any.
};

/// Sends requests to decode engines, and reports each outcome to the engine's breaker, the metrics
/// and the needs of the request. Thread-bound.
class DecodeAttempts {
 public:
  /// All of them outlive the object.
  DecodeAttempts(ClientRequest& request, EngineNeeds& needs, ClientWait& wait, AccessRecord& record)
      : request_(request), needs_(needs), wait_(wait), record_(record) {}

  /// Handles the response of a call whose head was read. Sets the error when the engine failed.
  using OnHead = std::function<boost::asio::awaitable<Relayed>(UpstreamCall&, Error&)>;

  /// Sends `body` to the engine of `permit`. `on_head` outlives the coroutine; so does `body` until
  /// `on_head` runs.
  /// After kGone there is no outcome to report.
  boost::asio::awaitable<DecodeResult> send(EnginePermit& permit, std::string_view body,
                                            Resend resend, const OnHead& on_head);

 private:
  ClientRequest& request_;
  EngineNeeds& needs_;
  ClientWait& wait_;
  AccessRecord& record_;
};

}  // namespace pegaflow::router
