#include "router/request/engine_needs.h"

#include "router/http/log.h"

namespace pegaflow::router {

namespace asio = boost::asio;

Fleet::Request EngineNeeds::fleet_request(const std::vector<const Engine*>& tried) const {
  return {.view = view, .model = model, .tried = tried, .excluded = crashed_};
}

void EngineNeeds::note_end(const UpstreamCall& call, const Error& error) {
  const bool ended =
      error.code == Errc::kPeerLost || error.code == Errc::kIo || error.code == Errc::kGone;
  if (ended && call.was_sent()) crashed_.push_back(call.engine()->url.text);
}

void EngineNeeds::report_suspect() {
  ++request_.shared().metrics.suspect_requests;
  g_log.warn(
      "a request is not tried again: two engines ended while they served it id={} route={} "
      "engines={},{}",
      request_.id(), request_.route().name, crashed_[0], crashed_[1]);
}

asio::awaitable<bool> EngineNeeds::refuse_suspect() {
  // The clients of OpenAI and Anthropic obey this field, and repeat a request after any other 5xx.
  return request_.send_error(
      502, "two engines ended while they served this request; it is not tried again",
      "X-Should-Retry: false\r\n");
}

}  // namespace pegaflow::router
