#pragma once
/// \file
/// The request to a decode engine: admission, retries, and the response to the client.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <boost/asio/awaitable.hpp>

#include "router/exchange/decode_attempt.h"
#include "router/exchange/response_writer.h"

namespace pegaflow::router {

/// Sends a request to decode engines, one after the other, until one of them responds or the
/// retries are used up, and sends the client a response. Thread-bound; run() is called once.
class DecodeLeg {
 public:
  /// All of them outlive the leg.
  DecodeLeg(ClientRequest& request, EngineNeeds& needs, ClientWait& wait, AccessRecord& record,
            ResponseWriter& writer);

  /// Runs the leg to its end. Returns false when the client's connection has to end. `body` must
  /// stay valid until the response has begun.
  boost::asio::awaitable<bool> run(std::string_view body);

 private:
  struct Admitted {
    std::optional<EnginePermit> permit{};
    std::string refusal{};  ///< Without a permit: the error response; empty when the client left.
  };
  /// Chooses an engine, or waits for one with room.
  boost::asio::awaitable<Admitted> admit();
  boost::asio::awaitable<Admitted> wait_in_line();
  /// The error response when no engine can be chosen; counts it.
  [[nodiscard]] std::string refusal_for(Fleet::Why why);
  /// Sends the request to one engine. Unless `is_last`, an error that another engine may avoid is
  /// not relayed.
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
  const bool may_repeat_;             ///< The request may run twice: no engine stores its response.
  std::vector<const Engine*> tried_;  ///< Engines that failed.
};

}  // namespace pegaflow::router
