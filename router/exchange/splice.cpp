// The part of Exchange that sends a prefill engine's token first, and has a decode engine go on.
#include <utility>

#include <boost/asio/awaitable.hpp>

#include "base/log.h"
#include "router/client_connection.h"
#include "router/exchange/exchange.h"
#include "router/page/pages.h"

namespace pegaflow::router {

namespace asio = boost::asio;

namespace {
constexpr Log kLog{"router"};
}  // namespace

asio::awaitable<Exchange::Spliced> Exchange::splice(const std::vector<JsonMember>& members,
                                                    Prefilled& prefilled) {
  if (prefilled.answer.empty()) co_return Spliced{FirstToken::kNoPrefill};
  {
    FirstToken why = FirstToken::kSent;
    const auto token = read_first_token(prefilled.answer, why);
    if (!token) co_return Spliced{why};
    prefilled.answer = std::string();
    splice_.emplace(
        Splice{first_event(*token), continued_body(members, *token, prefilled.kv_params)});
    // Counted and given back with the client's body.
    shared_.metrics.body_bytes += splice_->body.size();
    client_.body_bytes_ += splice_->body.size();
  }
  std::vector<const Engine*> tried;
  Error error;
  // Until the head is sent, whatever happens leaves it to forward(): a queue, an engine that does
  // not take the prompt's tokens, one that is gone. Then only an engine that can go on is of use.
  for (std::int64_t attempt = 0; attempt <= shared_.options.retries; ++attempt) {
    if (attempt > 0 && !co_await wait_before_retry(attempt - 1)) co_return Spliced{};
    const Fleet::Choice choice = shared_.fleet.choose(Role::kDecode, wanted(tried));
    if (!choice.engine) break;
    if (attempt > 0) {
      ++shared_.metrics.retries[static_cast<std::size_t>(Role::kDecode)];
      ++retries_;
    }
    tried.push_back(choice.engine.get());
    Slot slot(shared_, choice.engine);
    decode_engine_ = choice.engine->url.text;
    const TimePoint began = shared_.now();
    Relay how = Relay::kNothingSent;
    unsigned status = 0;
    error = {};
    {
      UpstreamCall call(shared_.engine_connections, choice.engine);
      call_ = &call;
      std::string request = engine_request(*choice.engine, splice_->body.size(), false);
      const Result<void> opened = co_await call.open(
          std::move(request), splice_->body, shared_.options.answer_timeout, Resend::kUnlessSent);
      if (!opened) {
        error = opened.error();
      } else if (status = call.head().status; status == 200 && is_event_stream(call.head())) {
        how = co_await relay_stream(call, error);
      } else {
        const Errc code = status == 200 ? Errc::kCorrupt : Errc::kBusy;
        error = {code, fmt::format("{} answered {} and no stream", decode_engine_, status)};
      }
      call_ = nullptr;
      note_end(call, error);
    }
    if (client_.is_gone() || how == Relay::kGone) co_return Spliced{};
    shared_.metrics.leg[static_cast<std::size_t>(Role::kDecode)].record(shared_.now() - began);
    judge(slot, status, error);
    if (how != Relay::kNothingSent) co_return Spliced{FirstToken::kSent, true};
    if (!splice_->is_begun || is_suspect()) break;
  }
  if (!splice_->is_begun) {
    kLog.debug("a prefill engine's token is of no use id={} why=\"{}\"", request_id_, error.detail);
    shared_.metrics.body_bytes -= splice_->body.size();
    client_.body_bytes_ -= splice_->body.size();
    splice_.reset();
    co_return Spliced{FirstToken::kDecode};
  }
  if (is_suspect()) count_suspect();
  const bool sent = co_await end_with_error(error, false);
  co_return Spliced{FirstToken::kSent, sent};
}

}  // namespace pegaflow::router
