#pragma once
/// \file
/// The request to a decode engine: admission, retries, and the response to the client.

#include <cstddef>
#include <cstdint>
#include <memory>
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
  /// All of them outlive the leg. `tried`: engines that failed before it, which are its last
  /// choice.
  DecodeLeg(ClientRequest& request, EngineNeeds& needs, ClientWait& wait, AccessRecord& record,
            ResponseWriter& writer, std::vector<const Engine*> tried = {});

  /// Runs the leg to its end. Returns false when the client's connection has to end. `body` must
  /// stay valid until the response has begun.
  boost::asio::awaitable<bool> run(std::string_view body);

  /// Ends the leg if the client has received nothing: run() returns, and is_withdrawn() is true.
  /// The engine sees that its caller leaves.
  void withdraw();
  [[nodiscard]] bool is_withdrawn() const noexcept { return is_withdrawn_; }
  /// Engines that failed, during the leg or before it.
  [[nodiscard]] const std::vector<const Engine*>& tried() const noexcept { return tried_; }
  /// When the request was given to the engine that has it; nullopt: none has it.
  [[nodiscard]] std::optional<TimePoint> sent_at() const noexcept { return sent_at_; }

 private:
  /// The client's share of the queue, for a request of so many bytes.
  struct Share {
    std::uint64_t key = 0;
    std::uint64_t tokens = 1;
  };
  struct Admitted {
    std::optional<EnginePermit> permit{};
    std::string refusal{};  ///< Without a permit: the error response; empty when the client left.
  };
  /// Chooses an engine, or waits for one with room.
  boost::asio::awaitable<Admitted> admit(std::size_t body_bytes);
  boost::asio::awaitable<Admitted> wait_in_line(std::size_t body_bytes);
  /// Gives the request to the engine.
  void occupy(Admitted& result, const std::shared_ptr<Engine>& engine);
  /// Refuses a request that got no engine: counts it in `counter`.
  [[nodiscard]] std::string refuse_busy(unsigned status, std::string_view text, const Share& share,
                                        std::uint64_t& counter);
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
  bool is_withdrawn_ = false;
  std::optional<TimePoint> sent_at_;
  bool is_refusing_ = false;  ///< The client receives an error of the router.
};

}  // namespace pegaflow::router
