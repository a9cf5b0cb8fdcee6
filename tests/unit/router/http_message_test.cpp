#include "router/http/http_message.h"

#include <doctest/doctest.h>

namespace pegaflow::router {
namespace {

/// Feeds in pieces of `step` bytes, as a connection does. The error's status, or 0.
unsigned feed(RequestParser& parser, std::string_view text, std::size_t step) {
  std::string kept;
  for (std::size_t at = 0; at < text.size(); at += step) {
    kept += text.substr(at, step);
    while (!kept.empty() && !parser.is_complete()) {
      const auto used = parser.feed(kept);
      if (!used) return parser.error_status();
      if (*used == 0) break;
      kept.erase(0, *used);
    }
  }
  return 0;
}

TEST_SUITE("HTTP messages") {
  TEST_CASE("a request is the same however it is cut into pieces") {
    const std::string text =
        "POST /v1/x?y HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nTransfer-Encoding: "
        "chunked\r\n\r\n3;ext=1\r\nabc\r\n2\r\nde\r\n0\r\nTrailer: x\r\n\r\n";
    for (std::size_t step = 1; step <= text.size(); ++step) {
      CAPTURE(step);
      RequestParser parser({});
      REQUIRE(feed(parser, text, step) == 0);
      REQUIRE(parser.is_complete());
      CHECK(parser.head().method == "POST");
      CHECK(parser.head().target == "/v1/x?y");
      CHECK(parser.head().keep_alive);
      CHECK(parser.head().wants_continue);
      CHECK(*find_field(parser.head().fields, "HOST") == "h");
      CHECK(parser.take_body() == "abcde");
    }
  }

  TEST_CASE("an empty chunked body is the same however it is cut into pieces") {
    for (const std::string_view fields : {"", "T: x\r\n"}) {
      const std::string rest = fmt::format("Transfer-Encoding: chunked\r\n\r\n0\r\n{}\r\n", fields);
      const std::string request = "POST / HTTP/1.1\r\nHost: h\r\n" + rest;
      const std::string answer = "HTTP/1.1 200 OK\r\n" + rest;
      for (std::size_t step = 1; step <= request.size(); ++step) {
        CAPTURE(step);
        RequestParser parser({});
        REQUIRE(feed(parser, request, step) == 0);
        CHECK(parser.is_complete());
        ResponseParser reader;
        std::string kept;
        std::string body;
        for (std::size_t at = 0; at < answer.size(); at += step) {
          kept += answer.substr(at, step);
          for (std::size_t used = 1; used > 0 && !kept.empty(); kept.erase(0, used)) {
            used = reader.feed(kept, body).value();
          }
        }
        CHECK(reader.is_complete());
        CHECK(body.empty());
      }
    }
  }

  TEST_CASE("each limit has its own status") {
    RequestParser::Limits limits{.header_bytes = 100, .body_bytes = 4};
    RequestParser head(limits);
    CHECK(feed(head, "GET / HTTP/1.1\r\nX: " + std::string(200, 'x'), 7) == 431);
    RequestParser length(limits);
    CHECK(feed(length, "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nabcde", 7) == 413);
    RequestParser chunks(limits);
    CHECK(feed(chunks,
               "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"
               "2\r\nde\r\n",
               3) == 413);
    RequestParser many({.fields = 2});
    CHECK(feed(many, "GET / HTTP/1.1\r\nHost: h\r\nA: 1\r\nA: 2\r\n\r\n", 7) == 431);
    RequestParser bad(limits);
    CHECK(feed(bad, "nonsense\r\n\r\n", 3) == 400);
  }

  TEST_CASE("a chunk's first line and a trailer are bounded") {
    const std::string head = "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n";
    for (const std::string_view begin : {"2;a=", "0;a=", "0\r\nT: "}) {
      CAPTURE(begin);
      for (const std::size_t step : {1, 7, 5000}) {
        RequestParser parser({.header_bytes = 200, .body_bytes = 1000});
        const std::string request = "POST / HTTP/1.1\r\nHost: h\r\n" + head;
        CHECK(feed(parser, request + std::string(begin) + std::string(400, 'x'), step) == 400);
        RequestParser short_one({.header_bytes = 200, .body_bytes = 1000});
        CHECK(feed(short_one, request + std::string(begin) + std::string(100, 'x'), step) == 0);
      }
      ResponseParser reader;
      std::string kept = "HTTP/1.1 200 OK\r\n" + head + std::string(begin);
      std::string body;
      bool is_refused = false;
      // A megabyte of input: unused bytes are presented again, with more.
      for (std::size_t piece = 0; piece < 16 && !is_refused; ++piece) {
        kept += std::string(65536, 'x');
        for (std::size_t used = 1; used > 0 && !is_refused;) {
          const auto fed = reader.feed(kept, body);
          is_refused = !fed;
          used = fed.value_or(0);
          kept.erase(0, used);
        }
      }
      CHECK(is_refused);
      CHECK(kept.size() <= 6 * 65536);
      CHECK(body == "abc");
    }
  }

  TEST_CASE("the limit of a chunk's first line and of a trailer is exact, however it is cut") {
    const std::string head = "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n";
    constexpr std::size_t kLimit = 80;
    for (std::size_t size = kLimit - 2; size <= kLimit + 4; ++size) {
      const auto fill = [&](std::size_t others) { return std::string(size - others, 'x'); };
      for (const std::string& body :
           {"2;a=" + fill(6) + "\r\nab\r\n0\r\n\r\n", "0;a=" + fill(8) + "\r\n\r\n",
            "0\r\nT: " + fill(10) + "\r\n\r\n"}) {
        for (std::size_t step = 1; step <= head.size() + body.size(); ++step) {
          CAPTURE(size);
          CAPTURE(step);
          RequestParser parser({.header_bytes = kLimit, .body_bytes = 4});
          CHECK(feed(parser, head + body, step) == (size <= kLimit + 1 ? 0 : 400));
          if (size <= kLimit + 1) CHECK(parser.is_complete());
        }
      }
    }
  }

  TEST_CASE("the limit of a head is exact, however it is cut") {
    const std::string start = "GET / HTTP/1.0\r\n";
    for (std::size_t size = 60; size < 72; ++size) {
      // Fields that end anywhere, the last of them with blanks behind it.
      for (const std::string& fields : {std::string("Host: h\r\n"), std::string("A: 1  \r\n")}) {
        std::string text = start;
        while (text.size() + fields.size() + 8 < size) text += fields;
        text += "B: " + std::string(size - text.size() - 7, 'x') + "\r\n\r\n";
        REQUIRE(text.size() == size);
        for (std::size_t step = 1; step <= size; ++step) {
          CAPTURE(size);
          CAPTURE(step);
          RequestParser parser({.header_bytes = 66, .body_bytes = 4});
          CHECK(feed(parser, text, step) == (size <= 66 ? 0 : 431));
          if (size <= 66) CHECK(parser.is_complete());
        }
      }
    }
  }

  TEST_CASE("a response is read to its end with every kind of framing") {
    for (const char* const text :
         {"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
          "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
          "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
          "HTTP/1.1 200 OK\r\n\r\nhello"}) {
      for (std::size_t step = 1; step < 90; ++step) {
        CAPTURE(text);
        CAPTURE(step);
        ResponseParser parser;
        std::string body;
        std::string kept;
        const std::string_view all(text);
        for (std::size_t at = 0; at < all.size(); at += step) {
          kept += all.substr(at, step);
          while (!kept.empty()) {
            const auto used = parser.feed(kept, body);
            REQUIRE(used);
            if (*used == 0) break;
            kept.erase(0, *used);
          }
        }
        if (!parser.is_complete()) CHECK(parser.feed_end());
        CHECK(parser.is_complete());
        CHECK(parser.head().status == 200);
        CHECK(body == "hello");
      }
    }
  }

  TEST_CASE("a response that is cut off or invalid is an error") {
    std::string body;
    ResponseParser half;
    REQUIRE(half.feed("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", body));
    REQUIRE(half.feed("hel", body));
    CHECK(half.feed_end().error().code == Errc::kPeerLost);
    ResponseParser none;
    CHECK(none.feed_end().error().code == Errc::kPeerLost);
    ResponseParser garbage;
    CHECK(garbage.feed("SSH-2.0-x\r\n\r\n", body).error().code == Errc::kCorrupt);
    // A router never requests an upgrade, and the bytes after one are not HTTP.
    ResponseParser upgrade;
    CHECK(
        upgrade.feed("HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n", body).error().code ==
        Errc::kCorrupt);
    ResponseParser head(true);
    REQUIRE(head.feed("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", body));
    CHECK(head.is_complete());
  }

  TEST_CASE("hop-by-hop fields are known by name and by Connection") {
    const HttpFields fields = {{"Connection", "close, X-One"}, {"connection", "x-two"}};
    for (const char* const name : {"connection", "Transfer-Encoding", "TE", "x-one", "X-TWO"}) {
      CHECK(is_hop_by_hop(name, fields));
    }
    CHECK_FALSE(is_hop_by_hop("x-three", fields));
    CHECK(equals_ignoring_case("aB", "Ab"));
    CHECK_FALSE(equals_ignoring_case("a", "ab"));
    CHECK(find_field(fields, "x") == nullptr);
  }
}

}  // namespace
}  // namespace pegaflow::router
