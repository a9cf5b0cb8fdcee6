#pragma once
/// \file
/// The request to a prefill engine, which computes the prompt before the decode engine.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
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
#include "router/state/kv_leg.h"

namespace pegaflow::router {

/// The outcome of a prefill.
struct Prefilled {
  Prefill what = Prefill::kLost;
  bool is_worth_another = false;  ///< Another prefill engine may succeed with the same body.
  std::string kv_params{};
  std::string response{};  ///< The whole body; kept only if its token is wanted.
};

/// Adds bytes to a sum for its lifetime.
class CountedBytes {
 public:
  CountedBytes(std::uint64_t& sum, std::uint64_t bytes) : sum_(sum), bytes_(bytes) {
    sum_ += bytes_;
  }
  ~CountedBytes() { sum_ -= bytes_; }
  CountedBytes(const CountedBytes&) = delete;
  CountedBytes& operator=(const CountedBytes&) = delete;

 private:
  std::uint64_t& sum_;
  std::uint64_t bytes_;
};

/// Sends the prompt to a prefill engine, and to a second one if the first fails. No failure reaches
/// the client: the decode engine can compute the prompt as well. Owns the list of engines that were
/// tried. Thread-bound; used once: begin(), then run(), or first() and rest().
class PrefillLeg {
 public:
  /// All of them outlive the leg.
  PrefillLeg(ClientRequest& request, EngineNeeds& needs, ClientWait& wait, AccessRecord& record);

  /// Decides whether the prompt goes to a prefill engine, and chooses it. `members` are of the
  /// client's body. `wants_token`: the response is needed with the token ids.
  void begin(const std::vector<JsonMember>& members, bool wants_token);
  /// Sends the prompt to the engine that begin() chose, if any, and to a second one if it fails.
  boost::asio::awaitable<Prefilled> run();

  /// Where the chosen engine's saves are, if a decode engine may receive the request at once;
  /// otherwise nullptr.
  [[nodiscard]] const PrefillPlace* place() const;
  /// The longest time of first().
  [[nodiscard]] Duration limit() const { return time_limit(body_.size()); }
  /// Prepares first() to run while the request is sent to a decode engine.
  void go_early();
  /// run(), with the chosen engine only.
  boost::asio::awaitable<Prefilled> first();
  /// The decode engine's response was late: the chosen engine's next requests are not early.
  void was_late();
  /// Continues after first(), which ended with `prefilled`: tries a second engine if that may help,
  /// and records the outcome.
  boost::asio::awaitable<Prefilled> rest(Prefilled prefilled);
  /// Records the outcome of first() without another try.
  void record(const Prefilled& prefilled);

 private:
  [[nodiscard]] Prefill decide_for(const std::vector<JsonMember>& members) const;
  /// Chooses the next engine. False when there is none.
  bool choose();
  /// The request to an engine ended.
  void ended(const Prefilled& prefilled);
  /// Whether a decode engine has so much of the prompt that no prefill pays.
  [[nodiscard]] bool is_cached() const;
  /// Whether a decode engine alone costs no more than a pair. Otherwise the pair may be chosen.
  [[nodiscard]] bool costs_more_than_decode() const;
  boost::asio::awaitable<Prefilled> send();
  /// Reads the whole response within `limit`.
  boost::asio::awaitable<Result<void>> read(UpstreamCall& call, Duration limit,
                                            std::string& response);
  [[nodiscard]] Duration time_limit(std::size_t body_bytes) const;
  Prefilled failed(EnginePermit& permit, const UpstreamCall& call, const Error& error);
  Prefilled handed_over(Engine& engine, std::string response);

  ClientRequest& request_;
  Shared& shared_;
  EngineNeeds& needs_;
  ClientWait& wait_;
  AccessRecord& record_;
  bool wants_token_ = false;
  bool is_early_ = false;
  Prefill decided_ = Prefill::kNoEngine;  // kDone: an engine was chosen.
  TimePoint began_{};
  std::string body_;
  std::string head_;  // Of the request to the chosen engine, when it is early.
  std::optional<CountedBytes> counted_;
  std::shared_ptr<Engine> engine_;      // The one that was chosen last.
  std::optional<EnginePermit> permit_;  // For its request.
  std::optional<KvLeg> kv_;
  std::vector<const Engine*> tried_;
};

}  // namespace pegaflow::router
