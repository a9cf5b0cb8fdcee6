#include "router/http/sse.h"

#include <doctest/doctest.h>

namespace pegaflow::router {
namespace {

TEST_SUITE("SSE") {
  TEST_CASE("events are the same however the stream is cut") {
    const std::string stream =
        ": hello\n\ndata: a\n\nevent: x\r\ndata:b\r\n\r\ndata: c\ndata: d\n\n\n\ndata: [DONE]\n\n";
    SseTracker whole;
    CHECK(whole.feed(stream) == stream.size());
    CHECK(whole.events() == 3);
    CHECK(whole.is_finished());

    for (std::size_t cut = 0; cut <= stream.size(); ++cut) {
      CAPTURE(cut);
      SseTracker tracker;
      const std::size_t first = tracker.feed(std::string_view(stream).substr(0, cut));
      CHECK(first <= cut);
      if (first > 0) CHECK(stream[first - 1] == '\n');
      CHECK(tracker.feed(std::string_view(stream).substr(cut)) ==
            (cut == stream.size() ? 0 : stream.size() - cut));
      CHECK(tracker.events() == 3);
      CHECK(tracker.is_finished());
    }
    SseTracker bytes;
    for (const char c : stream) (void)bytes.feed({&c, 1});
    CHECK(bytes.events() == 3);
    CHECK(bytes.is_finished());
  }

  TEST_CASE("half an event does not count") {
    SseTracker tracker;
    CHECK(tracker.feed("data: a\n") == 0);
    CHECK(tracker.feed("\ndata: b") == 1);
    CHECK(tracker.events() == 1);
    CHECK(tracker.feed("\n\nrest") == 2);
    CHECK_FALSE(tracker.is_finished());
  }

  TEST_CASE("only the two closing events end a stream") {
    SseTracker anthropic;
    (void)anthropic.feed("event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n");
    CHECK(anthropic.is_finished());
    CHECK(anthropic.events() == 0);

    SseTracker other;
    (void)other.feed("data: [DONE] not\n\ndata: x[DONE]\n\nevent: message_stopped\ndata: y\n\n");
    CHECK_FALSE(other.is_finished());
    (void)other.feed("data: [DONE]\n");
    CHECK_FALSE(other.is_finished());  // Its blank line has not arrived.
    (void)other.feed("\n");
    CHECK(other.is_finished());
  }

  TEST_CASE("a line without an end needs no memory") {
    SseTracker tracker;
    const std::string piece(4096, 'x');
    for (int i = 0; i < 1000; ++i) CHECK(tracker.feed(piece) == 0);
    CHECK(tracker.feed("\ndata: a\n\n") == 10);
    CHECK(tracker.events() == 1);
  }
}

}  // namespace
}  // namespace pegaflow::router
