#pragma once
/// \file
/// One request of a client, from its head to the end of its answer.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <boost/asio/awaitable.hpp>
#include <boost/asio/steady_timer.hpp>

#include "base/clock.h"
#include "base/error.h"
#include "router/body/first_token.h"
#include "router/body/split.h"
#include "router/http/http_message.h"
#include "router/http/routes.h"
#include "router/state/shared.h"
#include "router/upstream/upstream.h"

namespace pegaflow::router {

class ClientConnection;

/// Whether an answer is a stream of events, by its type.
bool is_event_stream(const ResponseHead& head);

/// Whether a status is a failure of the engine; 503 only means that it is busy.
constexpr bool is_engine_failure(unsigned status) { return status >= 500 && status != 503; }

/// Decides where a request goes, sends it there, and relays the answer. Thread-bound.
class Exchange {
 public:
  /// Both outlive the exchange.
  Exchange(ClientConnection& client, const RequestHead& head);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  /// The whole answer to what can be refused by its head alone (path, method, key, rate); else "".
  std::string refusal();

  /// Answers. False when the connection has to end.
  boost::asio::awaitable<bool> run(std::string body);

  /// Counts it and writes its line of the access log.
  void finished();

 private:
  /// How the answer of an engine ended.
  enum class Relay : unsigned char {
    kWhole,
    kNothingSent,  ///< It failed, and the client knows nothing of it.
    kBroken,       ///< It failed in the middle; the connection has to end.
    kErrorFrame,   ///< It failed in the middle of a stream, and the client was told.
    kGone,         ///< The client left.
  };
  struct Prefilled {
    Prefill what = Prefill::kLost;
    bool is_worth_another = false;  ///< Another prefill engine may do better with the same body.
    std::string kv_params{};
    std::string answer{};  ///< Whole, where its token is wanted.
  };
  /// An answer that begins with the prefill engine's token.
  struct Splice {
    std::string event;
    std::string body;       ///< For decode engines, until one has begun.
    bool is_begun = false;  ///< The client has our head and the event.
  };
  struct Spliced {
    FirstToken what = FirstToken::kSent;
    bool keeps = false;  ///< With kSent: the connection goes on.
  };
  struct Admitted {
    std::optional<Slot> slot;
    std::string refusal;  ///< The answer when there is no slot; empty when the client left.
  };

  [[nodiscard]] bool is_head() const noexcept { return head_.method == "HEAD"; }
  AccessList::Verdict check_key();
  boost::asio::awaitable<bool> own_page();
  boost::asio::awaitable<bool> models();
  boost::asio::awaitable<bool> split(const std::vector<JsonMember>& members);
  /// Whether the model is one that no engine serves; all engines are asked again before it is.
  boost::asio::awaitable<bool> is_unknown_model();
  /// Begins a question to each engine that is up, one for a URL, and waits for all of them.
  boost::asio::awaitable<void> ask_engines(
      const std::function<boost::asio::awaitable<void>(std::shared_ptr<Engine>)>& ask);
  [[nodiscard]] Fleet::Request wanted(const std::vector<const Engine*>& tried) const;
  /// Remembers an engine that ended the connection, or went down, while it had the request.
  void note_end(const UpstreamCall& call, const Error& error);
  [[nodiscard]] bool is_suspect() const noexcept { return ended_at_.size() >= 2; }
  void count_suspect();
  boost::asio::awaitable<bool> answer_suspect();
  boost::asio::awaitable<Prefilled> prefill(const std::vector<JsonMember>& members,
                                            bool wants_token);
  boost::asio::awaitable<Prefilled> prefill_once(Slot& slot, const std::string& body);
  boost::asio::awaitable<Spliced> splice(const std::vector<JsonMember>& members,
                                         Prefilled& prefilled);
  boost::asio::awaitable<bool> forward(std::string_view body);
  boost::asio::awaitable<Admitted> admit(std::vector<const Engine*>& tried);
  boost::asio::awaitable<Relay> relay(UpstreamCall& call, Error& error);
  boost::asio::awaitable<Relay> relay_stream(UpstreamCall& call, Error& error);
  boost::asio::awaitable<Relay> relay_whole(UpstreamCall& call, Error& error);
  /// Ends a stream that the client has a part of. False when the client left.
  boost::asio::awaitable<bool> end_with_error(const Error& error, bool is_in_event);
  /// What an engine's breaker learns of a request.
  static void judge(Slot& slot, unsigned status, const Error& error);
  boost::asio::awaitable<bool> wait(Duration time);
  /// A drawn delay that doubles with each attempt. False when the client left meanwhile.
  boost::asio::awaitable<bool> wait_before_retry(std::int64_t attempt);
  boost::asio::awaitable<bool> answer(unsigned status, std::string_view text,
                                      std::string_view fields = {});
  [[nodiscard]] std::string engine_request(const Engine& engine, std::size_t body_size,
                                           bool is_prefill) const;
  [[nodiscard]] std::string answer_head(const ResponseHead& head, std::string_view framing);
  [[nodiscard]] std::uint64_t key_of(const std::vector<JsonMember>& members) const;
  void learn_response(std::string_view begin, const std::shared_ptr<Engine>& engine);
  /// Whether the connection goes on after the answer whose head is made now; tells it if not.
  bool keeps_connection();
  void forget_body();
  void interrupt();

  ClientConnection& client_;
  Shared& shared_;
  const RequestHead& head_;
  Route route_;
  std::string request_id_;
  std::string cors_;      // Lines of each answer.
  std::string key_name_;  // A copy: the list of keys may be replaced meanwhile.
  std::string body_;
  std::uint64_t key_ = 0;              // What belongs together, for policies.
  std::string model_;                  // Which engines may have it; empty: all.
  std::vector<std::string> ended_at_;  // Engines that had the request when they ended.
  TimePoint began_;
  boost::asio::steady_timer timer_;
  UpstreamCall* call_ = nullptr;    // What a client that leaves interrupts.
  std::shared_ptr<Engine> pinned_;  // The only engine that can answer.
  std::optional<Splice> splice_;

  // For metrics and log.
  unsigned status_ = 0;
  std::optional<Prefill> prefill_;
  std::optional<FirstToken> first_token_;
  std::string prefill_engine_;
  std::string decode_engine_;
  std::optional<Duration> prefill_time_;
  std::optional<Duration> first_event_time_;
  std::uint64_t events_ = 0;
  std::uint64_t bytes_in_ = 0;
  std::uint64_t bytes_out_ = 0;
  unsigned retries_ = 0;
  bool late_error_ = false;
};

}  // namespace pegaflow::router
