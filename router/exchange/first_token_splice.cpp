#include "router/exchange/first_token_splice.h"

#include <cstdint>

#include <fmt/format.h>

#include "router/http/log.h"

namespace pegaflow::router {

namespace asio = boost::asio;

namespace {

/// The head of a stream that no engine has begun.
ResponseHead stream_head() {
  ResponseHead head;
  head.status = 200;
  head.reason = "OK";
  head.fields = {{"content-type", "text/event-stream; charset=utf-8"}};
  return head;
}

}  // namespace

FirstTokenSplice::FirstTokenSplice(ClientRequest& request, EngineNeeds& needs, ClientWait& wait,
                                   AccessRecord& record, HeldBodies& bodies, ResponseWriter& writer)
    : request_(request),
      shared_(request.shared()),
      needs_(needs),
      wait_(wait),
      record_(record),
      bodies_(bodies),
      writer_(writer),
      attempts_(request, needs, wait, record) {}

FirstToken FirstTokenSplice::prepare(const std::vector<JsonMember>& members, Prefilled& prefilled) {
  if (prefilled.response.empty()) return FirstToken::kNoPrefill;
  FirstToken why = FirstToken::kSent;
  const auto token = read_first_token(prefilled.response, why);
  if (!token) return why;
  std::string().swap(prefilled.response);
  opening_ = {.text = first_event(*token)};
  bodies_.hold_continuation(continued_body(members, *token, prefilled.kv_params));
  return FirstToken::kSent;
}

asio::awaitable<DecodeResult> FirstTokenSplice::attempt(Engine& engine, EnginePermit& permit) {
  const DecodeAttempts::OnHead on_head = [&](UpstreamCall& call,
                                             Error& error) -> asio::awaitable<Relayed> {
    const unsigned status = call.head().status;
    if (status == 200 && is_event_stream(call.head())) {
      engine.continues = true;
      StreamRelay stream(writer_, call, &opening_);
      co_return co_await stream.run(error);
    }
    error = {status == 200 ? Errc::kCorrupt : Errc::kBusy,
             fmt::format("{} returned {} and no stream", call.engine()->url.text, status)};
    co_return Relayed::kNothingSent;
  };
  co_return co_await attempts_.send(permit, bodies_.continuation(), Resend::kUnlessSent, on_head);
}

asio::awaitable<Spliced> FirstTokenSplice::run(const std::vector<JsonMember>& members,
                                               Prefilled& prefilled) {
  const FirstToken prepared = prepare(members, prefilled);
  if (prepared != FirstToken::kSent) co_return Spliced{prepared};
  Error error;
  // Until the head is sent, any obstacle (a queue, an engine that rejects token ids or is gone)
  // leaves the request to the DecodeLeg. After it, only an engine that continues the stream helps.
  // An engine that has accepted token ids before hardly rejects them now.
  for (std::int64_t number = 0; number <= shared_.options.retries; ++number) {
    if (number > 0) {
      const bool stays = co_await wait_.wait_before_retry(number - 1);
      if (!stays) co_return Spliced{};
    }
    const Fleet::Choice choice = shared_.fleet.choose(Role::kDecode, needs_.fleet_request(tried_));
    if (!choice.engine) break;
    if (number > 0) record_.count_retry(shared_.metrics, Role::kDecode);
    tried_.push_back(choice.engine.get());
    EnginePermit permit(shared_, choice.engine);
    if (choice.engine->continues && !opening_.is_sent) {
      const bool sent = co_await send_opening(writer_, opening_, stream_head());
      if (!sent) co_return Spliced{};
    }
    const DecodeResult got = co_await attempt(*choice.engine, permit);
    error = got.error;
    if (got.how == Relayed::kNothingSent) choice.engine->continues = false;
    if (got.how == Relayed::kGone) co_return Spliced{};
    if (got.how != Relayed::kNothingSent) co_return Spliced{FirstToken::kSent, true};
    if (!opening_.is_sent || needs_.is_suspect()) break;
  }
  if (!opening_.is_sent) {
    g_log.debug("a prefill engine's token is not used id={} why=\"{}\"", request_.id(),
                error.detail);
    bodies_.drop_continuation();
    co_return Spliced{FirstToken::kDecode};
  }
  if (needs_.is_suspect()) needs_.report_suspect();
  const bool sent = co_await writer_.end_stream_with_error(error, false);
  co_return Spliced{FirstToken::kSent, sent};
}

}  // namespace pegaflow::router
