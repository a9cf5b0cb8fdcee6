#include "router/request/access_record.h"

#include <chrono>
#include <string>
#include <string_view>

#include <doctest/doctest.h>

#include "tests/unit/router/exchange_fixture.h"

namespace pegaflow::router {
namespace {

using std::chrono::milliseconds;

const Route kCompletions{.kind = RouteKind::kSplit, .name = "completions"};

/// The only line of the log from its first field on, without the time that the request took.
std::string line_without_time() {
  REQUIRE(LogLines::all().size() == 1);
  std::string line = LogLines::all().front();
  line.erase(0, line.find("answered "));
  const std::size_t at = line.find(" ms=");
  REQUIRE(at != std::string::npos);
  return line.erase(at, std::min(line.find(' ', at + 1), line.size()) - at);
}

TEST_SUITE("access_record") {
  TEST_CASE("a line has the bytes of both directions, and only what the request had") {
    const LogLines log;
    ExchangeFixture f(false);
    f.record.status = 200;
    f.record.bytes_in = 1234;
    f.record.bytes_out = 56789;

    f.record.finish(f.shared, {.route = kCompletions, .id = "a", .key_name = ""});

    CHECK(line_without_time() == "answered id=a route=completions status=200 in=1234 out=56789");
  }

  TEST_CASE("a line names key, engines, reasons, times, retries and the kind of end") {
    const LogLines log;
    ExchangeFixture f(false);
    f.record.status = 200;
    f.record.prefill = Prefill::kLost;
    f.record.first_token = FirstToken::kDecode;
    f.record.prefill_engine = "http://p:1";
    f.record.decode_engine = "http://d:1";
    f.record.prefill_time = milliseconds(12);
    f.record.first_event_time = milliseconds(34);
    f.record.events = 7;
    f.record.count_retry(f.shared.metrics, Role::kDecode);
    f.record.has_late_error = true;

    f.record.finish(f.shared,
                    {.route = kCompletions, .id = "a", .key_name = "team", .is_gone = true});

    CHECK(line_without_time() ==
          "answered id=a route=completions status=200 in=0 out=0 key=team prefill=" +
              std::string(to_string(Prefill::kLost)) +
              " first_token=decode p=http://p:1 d=http://d:1 p_ms=12.000 first_ms=34.000 events=7 "
              "retries=1 late_error=1 gone=1");
    CHECK(f.shared.metrics.retries[static_cast<std::size_t>(Role::kDecode)] == 1);
  }

  TEST_CASE("a request is counted by its route and the class of its status") {
    const LogLines log;
    ExchangeFixture f(false);
    for (const unsigned status : {200U, 204U, 404U, 503U}) {
      f.record.status = status;
      f.record.finish(f.shared, {.route = kCompletions, .id = "a", .key_name = ""});
    }
    f.record.first_token = FirstToken::kSent;
    f.record.finish(f.shared, {.route = kCompletions, .id = "a", .key_name = "", .is_gone = true});

    CHECK(f.shared.metrics.requests[{"completions", "2xx"}] == 2);
    CHECK(f.shared.metrics.requests[{"completions", "4xx"}] == 1);
    CHECK(f.shared.metrics.requests[{"completions", "5xx"}] == 1);
    CHECK(f.shared.metrics.requests[{"completions", "gone"}] == 1);
    CHECK(f.shared.metrics.first_token[static_cast<std::size_t>(FirstToken::kSent)] == 0);
  }

  TEST_CASE("the router's own pages and --access-log false leave no line") {
    const LogLines log;
    ExchangeFixture f(false);
    const Route health{.kind = RouteKind::kHealth, .name = "health"};
    f.record.finish(f.shared, {.route = health, .id = "a", .key_name = ""});
    f.options.access_log = false;
    f.record.finish(f.shared, {.route = kCompletions, .id = "a", .key_name = ""});

    CHECK(LogLines::all().empty());
    CHECK(f.shared.metrics.requests.size() == 2);
  }

  TEST_CASE("a response of the router counts all its bytes, also those of its head") {
    ExchangeFixture f(false);
    boost::asio::co_spawn(f.io, f.request.send_error(404, "no such model"), boost::asio::detached);
    f.io.run();

    CHECK(f.record.status == 404);
    CHECK(f.record.bytes_out == f.client.received.size());
    CHECK(f.client.received.find("X-Request-Id: the-request\r\n") != std::string::npos);
  }
}

}  // namespace
}  // namespace pegaflow::router
