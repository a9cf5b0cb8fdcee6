#pragma once
/// \file
/// The stream that begins with the prefill engine's token (--pd-first-token).

#include <string>
#include <vector>

#include <boost/asio/awaitable.hpp>

#include "base/error.h"
#include "router/body/first_token.h"
#include "router/exchange/decode_attempt.h"
#include "router/exchange/prefill_leg.h"
#include "router/exchange/response_writer.h"
#include "router/exchange/stream_relay.h"
#include "router/http/json_text.h"
#include "router/request/held_bodies.h"

namespace pegaflow::router {

/// The outcome of a splice.
struct Spliced {
  FirstToken what = FirstToken::kSent;
  bool keeps = false;  ///< With kSent: the connection stays open.
};

/// Sends the prefill engine's token to the client, and then the stream of a decode engine that
/// continues after it. If that engine has accepted such a body before, the token is sent at once,
/// otherwise when it has accepted this one. Owns the opening event and the list of engines that
/// were tried. Thread-bound; runs once.
class FirstTokenSplice {
 public:
  /// All of them outlive the splice.
  FirstTokenSplice(ClientRequest& request, EngineNeeds& needs, ClientWait& wait,
                   AccessRecord& record, HeldBodies& bodies, ResponseWriter& writer);

  /// `members` are of the client's body. Any result but kSent leaves the request unanswered, and a
  /// DecodeLeg takes over. When the client left, the result is kSent.
  boost::asio::awaitable<Spliced> run(const std::vector<JsonMember>& members, Prefilled& prefilled);

 private:
  /// Builds the opening event and the continuation. Returns kSent, or the reason against them.
  FirstToken prepare(const std::vector<JsonMember>& members, Prefilled& prefilled);
  boost::asio::awaitable<DecodeResult> attempt(Engine& engine, EnginePermit& permit);

  ClientRequest& request_;
  Shared& shared_;
  EngineNeeds& needs_;
  ClientWait& wait_;
  AccessRecord& record_;
  HeldBodies& bodies_;
  ResponseWriter& writer_;
  DecodeAttempts attempts_;
  OpeningEvent opening_;
  std::vector<const Engine*> tried_;
};

}  // namespace pegaflow::router
