#include "server/http/http_connections.h"

#include <chrono>
#include <utility>

#include <doctest/doctest.h>
#include <kj/async-io.h>
#include <kj/timer.h>

namespace pegaflow::server {
namespace {

/// Connections over pipes without a buffer, on a clock of the test.
struct Fixture {
  explicit Fixture(std::size_t places)
      : all({.places = places, .take_timeout = std::chrono::seconds(10)}, timer) {}

  struct Client {
    kj::Own<kj::AsyncIoStream> end;
    kj::Own<HttpConnection> connection;
    kj::Promise<void> closed = kj::NEVER_DONE;
  };
  Client connect() {
    auto pipe = kj::newTwoWayPipe();
    Client client{kj::mv(pipe.ends[0]), all.add(kj::mv(pipe.ends[1]), false)};
    client.closed = client.connection->on_end();
    return client;
  }
  void advance(std::chrono::milliseconds time) {
    now = now + time.count() * kj::MILLISECONDS;
    timer.advanceTo(now);
  }

  kj::EventLoop loop;
  kj::WaitScope scope{loop};
  kj::TimePoint now = kj::origin<kj::TimePoint>();
  kj::TimerImpl timer{now};
  HttpConnections all;
};

TEST_SUITE("HttpConnections") {
  using std::chrono::milliseconds;

  TEST_CASE("a response that is not read within 10 s of its request ends the connection") {
    Fixture f(4);
    auto client = f.connect();
    client.connection->begin_request();
    f.advance(milliseconds(6000));  // The RPC thread took its time.
    auto writing = client.connection->write("x", 1);

    f.advance(milliseconds(3999));
    CHECK_FALSE(client.closed.poll(f.scope));
    CHECK(f.all.counters().unread == 0);
    f.advance(milliseconds(1));

    CHECK(client.closed.poll(f.scope));
    CHECK_FALSE(writing.poll(f.scope));
    CHECK(f.all.counters().unread == 1);
    CHECK(f.all.counters().open == 0);
  }

  TEST_CASE("the response to an invalid request has 10 s of its own") {
    Fixture f(4);
    auto client = f.connect();
    client.connection->begin_request();
    client.connection->end_request();
    f.advance(milliseconds(60'000));
    auto writing = client.connection->write("x", 1);

    f.advance(milliseconds(9999));
    CHECK_FALSE(client.closed.poll(f.scope));
    f.advance(milliseconds(1));
    CHECK(client.closed.poll(f.scope));
  }

  TEST_CASE("a client that reads its responses stays connected") {
    Fixture f(1);
    auto client = f.connect();
    for (int request = 0; request < 5; ++request) {
      client.connection->begin_request();
      auto writing = client.connection->write("x", 1);
      char byte = 0;
      client.end->tryRead(&byte, 1, 1).wait(f.scope);
      writing.wait(f.scope);
      client.connection->end_request();
      f.advance(milliseconds(60'000));
    }
    CHECK_FALSE(client.closed.poll(f.scope));
    CHECK(f.all.counters().unread == 0);
  }

  TEST_CASE(
      "room is made by the oldest client that does not take its response, then by the oldest "
      "without a request") {
    Fixture f(3);
    auto silent = f.connect();
    f.advance(milliseconds(1000));
    auto waiting = f.connect();
    waiting.connection->begin_request();
    auto stalled = f.connect();
    stalled.connection->begin_request();
    auto writing = stalled.connection->write("x", 1);
    CHECK_FALSE(writing.poll(f.scope));

    auto fourth = f.connect();
    CHECK(stalled.closed.poll(f.scope));
    CHECK_FALSE(silent.closed.poll(f.scope));

    auto fifth = f.connect();
    CHECK(silent.closed.poll(f.scope));
    CHECK_FALSE(waiting.closed.poll(f.scope));
    CHECK_FALSE(fourth.closed.poll(f.scope));
    CHECK(f.all.counters().displaced == 2);
    CHECK(f.all.counters().open == 3);
  }

  TEST_CASE("with a request pending on every connection the oldest makes room") {
    Fixture f(2);
    auto oldest = f.connect();
    oldest.connection->begin_request();
    auto other = f.connect();
    other.connection->begin_request();

    auto third = f.connect();

    CHECK(oldest.closed.poll(f.scope));
    CHECK_FALSE(other.closed.poll(f.scope));
    CHECK_FALSE(third.closed.poll(f.scope));
    CHECK(f.all.counters().displaced == 1);
  }

  TEST_CASE(
      "a new client has time to send a request, while others send without a pause and reconnect") {
    Fixture f(3);
    auto first = f.connect();
    auto second = f.connect();
    for (auto* const busy : {&first, &second}) {
      busy->connection->begin_request();
      busy->connection->end_request();
      busy->connection->begin_request();
    }
    auto probe = f.connect();

    auto third = f.connect();
    CHECK(first.closed.poll(f.scope));
    probe.connection->begin_request();
    auto fourth = f.connect();

    CHECK(second.closed.poll(f.scope));
    CHECK_FALSE(probe.closed.poll(f.scope));
    CHECK_FALSE(third.closed.poll(f.scope));
    CHECK_FALSE(fourth.closed.poll(f.scope));
  }
}

}  // namespace
}  // namespace pegaflow::server
