#include "router/exchange/first_token_splice.h"

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "router/body/first_token.h"
#include "router/page/pages.h"
#include "tests/unit/router/exchange_fixture.h"

namespace pegaflow::router {
namespace {

constexpr std::string_view kBody =
    R"({"model":"m","stream":true,"prompt":"words","max_tokens":5,"temperature":0})";
constexpr std::string_view kPrefill =
    R"({"id":"cmpl-p","created":12,"model":"m","choices":[{"index":0,"text":" one",)"
    R"("finish_reason":"length","token_ids":[7],"prompt_token_ids":[1,2]}]})";
constexpr std::string_view kKvParams = R"({"pegaflow":{"job":1}})";

/// The decode engine's events; the last one but the end counts tokens.
const std::vector<std::string> kEvents = {
    "data: {\"choices\":[{\"text\":\" tw\xC3\xB6\"}],\"usage\":null}\n\n",
    ": a comment\n\n",
    "data: {\"choices\":[{\"text\":\" three\"}],\"usage\":null}\r\n\r\n",
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":9}}\n\n",
    "data: [DONE]\n\n",
};
const std::vector<std::string> kForClient = {
    kEvents[0], kEvents[1], kEvents[2],
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":2,\"completion_tokens\":10}}\n\n",
    kEvents[4]};

std::string join(const std::vector<std::string>& texts) {
  std::string all;
  for (const std::string& text : texts) all += text;
  return all;
}

PrefilledToken token() {
  FirstToken why{};
  return read_first_token(kPrefill, why).value();
}

/// The engine's whole response. Each event is a chunk of its own if `is_chunked`.
std::string response(bool is_chunked) {
  std::string text = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n";
  if (!is_chunked)
    return text + fmt::format("Content-Length: {}\r\n\r\n", join(kEvents).size()) + join(kEvents);
  text += "Transfer-Encoding: chunked\r\n\r\n";
  for (const std::string& event : kEvents)
    text += fmt::format("{:x}\r\n{}\r\n", event.size(), event);
  return text + "0\r\n\r\n";
}

/// The body of a response to the client. Chunks are joined, and the last one has to be there.
std::string body_of(std::string_view received, bool is_chunked) {
  const std::size_t head = received.find("\r\n\r\n");
  REQUIRE(head != std::string_view::npos);
  received.remove_prefix(head + 4);
  if (!is_chunked) return std::string(received);
  std::string body;
  while (true) {
    const std::size_t line = received.find("\r\n");
    REQUIRE(line != std::string_view::npos);
    const std::size_t size = std::stoul(std::string(received.substr(0, line)), nullptr, 16);
    REQUIRE(received.size() >= line + size + 4);
    body += received.substr(line + 2, size);
    CHECK(received.substr(line + 2 + size, 2) == "\r\n");
    received.remove_prefix(line + size + 4);
    if (size == 0) break;
  }
  CHECK(received.empty());
  return body;
}

/// One splice of one request.
struct Run : ExchangeFixture {
  /// The engine's response arrives in two pieces, and its connection ends if `is_closing`.
  Run(std::string first, std::string second, bool is_http_10, bool is_closing)
      : ExchangeFixture(is_http_10) {
    engine.respond(std::move(first), std::move(second), is_closing);
    splice(std::string(kPrefill));
  }
  /// Without a response of a decode engine.
  explicit Run(std::string prefill) : ExchangeFixture(false) { splice(std::move(prefill)); }

  std::optional<Spliced> spliced;

 private:
  void splice(std::string prefill) {
    const auto members = read_members(kBody).value();
    Prefilled prefilled{.kv_params = std::string(kKvParams), .response = std::move(prefill)};
    ResponseWriter writer(request, record, bodies);
    FirstTokenSplice splice(request, needs, wait, record, bodies, writer);
    boost::asio::co_spawn(
        io,
        [&]() -> boost::asio::awaitable<void> {
          spliced = co_await splice.run(members, prefilled);
          io.stop();
        },
        [](const std::exception_ptr& problem) {
          if (problem) std::rethrow_exception(problem);
        });
    io.run_for(std::chrono::seconds(20));
    REQUIRE(spliced);
  }
};

/// The body for the client if the engine ends after `sent` bytes of its events, which is not all.
std::string body_of_broken(std::size_t sent) {
  std::string body = first_event(token());
  std::size_t end = 0;
  std::size_t whole = 0;
  for (; whole < kEvents.size() && end + kEvents[whole].size() <= sent; ++whole) {
    end += kEvents[whole].size();
    body += kForClient[whole];
  }
  return body + error_frame(false, Errc::kPeerLost);
}

TEST_SUITE("first_token_splice") {
  TEST_CASE("the token precedes the engine's stream, wherever the stream is split") {
    const std::string expected = first_event(token()) + join(kForClient);
    for (const bool is_chunked : {false, true}) {
      const std::string whole = response(is_chunked);
      for (std::size_t at = 1; at <= whole.size(); ++at) {
        CAPTURE(is_chunked);
        CAPTURE(at);
        const Run run(whole.substr(0, at), whole.substr(at), !is_chunked, false);

        CHECK(run.spliced->what == FirstToken::kSent);
        CHECK(run.spliced->keeps);
        REQUIRE(body_of(run.client.received, is_chunked) == expected);
        CHECK(run.record.status == 200);
        CHECK(run.record.events == 4);  // The token's, and three with data.
        CHECK(run.record.bytes_out == first_event(token()).size() + join(kEvents).size());
        CHECK(run.record.first_event_time);
        CHECK_FALSE(run.record.has_late_error);
        CHECK(run.client.is_body_released);
        CHECK(run.shared.metrics.body_bytes == 0);
      }
    }
  }

  TEST_CASE("the engine receives the prompt's tokens, the token and one token less to compute") {
    const Run run(response(false), "", true, false);

    const std::string& sent = run.engine.request;
    CHECK(sent.substr(sent.find("\r\n\r\n") + 4) ==
          R"({"kv_transfer_params":{"pegaflow":{"job":1}},"model":"m","stream":true,)"
          R"("temperature":0,"max_tokens":4,"prompt":[1,2,7]})");
    CHECK(run.record.decode_engine == run.engine.url());
  }

  TEST_CASE("a stream that breaks after any byte ends with whole events and an error event") {
    const std::string whole = response(false);
    const std::size_t head = whole.find("\r\n\r\n") + 4;
    const LogLines log;
    for (std::size_t at = head; at < whole.size(); ++at) {
      CAPTURE(at);
      const std::string expected = body_of_broken(at - head);
      const Run run(whole.substr(0, at), "", false, true);

      CHECK(run.spliced->what == FirstToken::kSent);
      CHECK(run.spliced->keeps);
      REQUIRE(body_of(run.client.received, true) == expected);
      CHECK(run.record.has_late_error);
      CHECK(run.shared.metrics.late_errors == 1);
      // Until an event of the stream is sent, another engine may continue after the token.
      CHECK(run.client.is_body_released == (at >= head + kEvents[0].size()));
      CHECK(run.shared.metrics.body_bytes == run.bodies.continuation().size());
    }
  }

  TEST_CASE("without an engine's head the client receives nothing, and a decode leg takes over") {
    const std::string whole = response(false);
    for (std::size_t at = 0; at < whole.find("\r\n\r\n") + 4; ++at) {
      CAPTURE(at);
      const Run run(whole.substr(0, at), "", false, true);

      CHECK(run.spliced->what == FirstToken::kDecode);
      CHECK(run.client.received.empty());
      CHECK_FALSE(run.client.is_body_released);
      CHECK(run.record.bytes_out == 0);
      CHECK(run.shared.metrics.body_bytes == 0);
    }
  }

  TEST_CASE("an engine that rejects the continuation leaves the request to a decode leg") {
    const Run run("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", "", false, false);

    CHECK(run.spliced->what == FirstToken::kDecode);
    CHECK(run.client.received.empty());
    CHECK(run.shared.metrics.body_bytes == 0);
  }

  TEST_CASE("a prefill without a token is the reason against the splice") {
    CHECK(Run("").spliced->what == FirstToken::kNoPrefill);
    CHECK(Run("{}").spliced->what == FirstToken::kNoToken);
    // Cut after each byte, it is no JSON.
    for (std::size_t at = 1; at < kPrefill.size(); ++at) {
      CAPTURE(at);
      const Run run(std::string(kPrefill.substr(0, at)));
      CHECK(run.spliced->what == FirstToken::kNoToken);
      CHECK(run.client.received.empty());
    }
  }
}

}  // namespace
}  // namespace pegaflow::router
