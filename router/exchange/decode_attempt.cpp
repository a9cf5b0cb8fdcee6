#include "router/exchange/decode_attempt.h"

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "router/body/body_session.h"
#include "router/body/kv_hints.h"
#include "router/state/kv_leg.h"

namespace pegaflow::router {

namespace asio = boost::asio;

namespace {

void judge(EnginePermit& permit, unsigned status, const Error& error) {
  if (error.code == Errc::kCancelled) return;  // The router has withdrawn the request.
  if (is_engine_failure(status) || error.code == Errc::kPeerLost || error.code == Errc::kTimeout ||
      error.code == Errc::kRefused || error.code == Errc::kCorrupt || error.code == Errc::kIo) {
    permit.failed();
  } else {
    permit.succeeded();
  }
}

}  // namespace

asio::awaitable<DecodeResult> DecodeAttempts::send(EnginePermit& permit, std::string_view body,
                                                   Resend resend, const OnHead& on_head) {
  Shared& shared = request_.shared();
  const std::shared_ptr<Engine> engine = permit.engine();
  record_.decode_engine = engine->url.text;
  const TimePoint began = shared.now();
  DecodeResult result;
  const KvLeg kv(shared, needs_.view.kv, *engine);
  std::string hinted;
  if (const std::string_view hint = kv.hint(); !hint.empty()) {
    hinted = with_hint(body, hint);
    body = hinted;
  }
  std::string named;
  if (const std::string_view session = kv.body_session(); !session.empty()) {
    named = with_session(body, session);
    body = named;
  }
  {
    UpstreamCall call(shared.engine_connections, engine);
    const ClientWait::CallScope scope(wait_, call);
    std::string head = request_.engine_head(*engine, body.size(), false, needs_.view.kv);
    const Result<void> opened =
        co_await call.open(std::move(head), body, shared.options.answer_timeout, resend);
    if (opened) {
      result.status = call.head().status;
      result.how = co_await on_head(call, result.error);
    } else {
      result.error = opened.error();
    }
    needs_.note_end(call, result.error);
  }
  if (request_.client().is_gone()) result.how = Relayed::kGone;
  if (result.how == Relayed::kGone) co_return result;
  if (result.error.code != Errc::kCancelled) {
    shared.metrics.leg[static_cast<std::size_t>(Role::kDecode)].record(shared.now() - began);
  }
  judge(permit, result.status, result.error);
  co_return result;
}

}  // namespace pegaflow::router
