#pragma once
/// \file
/// The request to a decode engine: its admission, its retries, and the response to the client.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <boost/asio/awaitable.hpp>

#include "router/exchange/decode_attempt.h"
#include "router/exchange/response_writer.h"

namespace pegaflow::router {

/// Sends a body to decode engines, one after the other, until the client has a response. Owns the
/// list of engines that were tried. Thread-bound; runs once.
class DecodeLeg {
 public:
  /// All of them outlive the leg.
  DecodeLeg(ClientRequest& request, EngineNeeds& needs, ClientWait& wait, AccessRecord& record,
            ResponseWriter& writer);

  /// `body` outlives the coroutine until the response has begun. False when the connection has to
  /// end.
  boost::asio::awaitable<bool> run(std::string_view body);

 private:
  struct Admitted {
    std::optional<EnginePermit> permit{};
    std::string refusal{};  ///< The response without a permit; empty when the client left.
  };
  /// Waits for an engine with room.
  boost::asio::awaitable<Admitted> admit();
  boost::asio::awaitable<Admitted> wait_in_line();
  [[nodiscard]] std::string refusal_for(Fleet::Why why);
  boost::asio::awaitable<DecodeResult> attempt(EnginePermit& permit, std::string_view body,
                                               bool is_last);
  /// Whether another engine may receive the request after `error`.
  [[nodiscard]] bool may_try_again(const Error& error) const;

  ClientRequest& request_;
  Shared& shared_;
  EngineNeeds& needs_;
  ClientWait& wait_;
  AccessRecord& record_;
  ResponseWriter& writer_;
  DecodeAttempts attempts_;
  const bool may_repeat_;  // Executing the request twice has no effect beyond its response.
  std::vector<const Engine*> tried_;
};

}  // namespace pegaflow::router
