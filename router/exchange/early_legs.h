#pragma once
/// \file
/// A prefill and the decode engine's request at once.

#include <chrono>
#include <exception>
#include <memory>
#include <string_view>
#include <vector>

#include <boost/asio/awaitable.hpp>
#include <boost/asio/steady_timer.hpp>

#include "router/exchange/prefill_leg.h"
#include "router/http/deadlines.h"

namespace pegaflow::router {

class DecodeLeg;
class ResponseWriter;

/// The outcome of both legs.
struct EarlyOutcome {
  bool is_answered = false;  ///< The client has its response, or has left.
  bool keeps = false;        ///< Whether its connection may be kept then.
  Prefilled prefilled{};     ///< Otherwise: how the prefill ended, for the decode leg that follows.
  std::vector<const Engine*> tried{};  ///< Decode engines that failed, for that leg.
};

/// Sends the prompt to the prefill engine and the request to a decode engine, which waits for the
/// prefill's blocks. If the prefill fails, the decode leg is withdrawn; also if the decode engine
/// has the request and the prefill's blocks for kLate and sends nothing, or for as long as the
/// prefill took if that is longer, but for no more than half of what is left of the answer timeout:
/// as long as the client has received nothing, one leg may still follow the other. A late request
/// keeps its engine while no other place is free. Thread-bound; runs once.
class EarlyLegs {
 public:
  static constexpr std::chrono::seconds kLate{2};

  /// All of them outlive the legs. `prefill` has begun with an engine that has a place.
  /// `prefill_wait` is for the prefill alone, `wait` for the decode leg.
  EarlyLegs(ClientRequest& request, EngineNeeds& needs, ClientWait& wait, ClientWait& prefill_wait,
            AccessRecord& record, ResponseWriter& writer, PrefillLeg& prefill);
  ~EarlyLegs();
  EarlyLegs(const EarlyLegs&) = delete;
  EarlyLegs& operator=(const EarlyLegs&) = delete;

  /// `body` is for the decode engine, and valid until its response has begun.
  boost::asio::awaitable<EarlyOutcome> run(std::string_view body);

 private:
  void start_prefill();
  void prefill_ended();
  void decode_is_late();
  /// Returns when the prefill has ended.
  boost::asio::awaitable<void> join();

  /// Whether a request that is withdrawn gets an engine at once.
  [[nodiscard]] bool has_place() const;

  ClientRequest& request_;
  Shared& shared_;
  EngineNeeds& needs_;
  ClientWait& prefill_wait_;
  AccessRecord& record_;
  ResponseWriter& writer_;
  PrefillLeg& prefill_;
  std::unique_ptr<DecodeLeg> decode_;
  Deadline late_;                    // After the end of the prefill.
  boost::asio::steady_timer ended_;  // Canceled when the prefill ends.
  bool has_ended_ = false;
  Duration patience_ = kLate;
  bool is_late_ = false;
  Prefilled prefilled_{};
  std::exception_ptr failure_;
};

}  // namespace pegaflow::router
