#include "server/http/http_guard.h"

#include <optional>

#include <doctest/doctest.h>

namespace pegaflow::server {
namespace {

constexpr const char* kRight = "Bearer 0123456789abcdef";

unsigned status(const HttpGuard& guard, const PostHeaders& headers) {
  const std::optional<PostRefusal> refusal = guard.refuse(headers);
  return refusal ? refusal->status : 200;
}

TEST_SUITE("HttpGuard") {
  TEST_CASE("a POST over TCP needs the token, and is always refused without a token file") {
    const HttpGuard with("0123456789abcdef", "/run/x.http", "node-1");
    CHECK(status(with, {.host = "127.0.0.1:9091", .authorization = kRight}) == 200);
    CHECK(status(with, {.authorization = kRight}) == 200);
    CHECK(status(with, {.host = "127.0.0.1:9091"}) == 401);
    CHECK(status(with, {.authorization = "Bearer 0123456789abcdeX"}) == 401);
    CHECK(status(with, {.authorization = "Bearer 0123456789abcdef0"}) == 401);
    CHECK(status(with, {.authorization = "0123456789abcdef"}) == 401);

    const HttpGuard without("", "/run/x.http", "node-1");
    CHECK(status(without, {.host = "127.0.0.1:9091"}) == 403);
    CHECK(status(without, {.authorization = "Bearer "}) == 403);
    CHECK(without.refuse({})->why.find("/run/x.http") != std::string::npos);
  }

  TEST_CASE("a Host that is neither an address nor a name of this machine is refused") {
    const HttpGuard guard("0123456789abcdef", "", "node-1.example.org");
    const auto with_host = [&](const char* host) {
      return status(guard, {.host = host, .authorization = kRight});
    };
    for (const char* const ours :
         {"127.0.0.1", "localhost:9091", "LocalHost", "10.1.2.3:9091", "[::1]:9091", "[fe80::1]",
          "node-1", "Node-1.example.org:9091"}) {
      INFO(ours);
      CHECK(with_host(ours) == 200);
    }
    for (const char* const foreign :
         {"evil.example", "evil.example:9091", "127.0.0.1.evil.example", "localhost.evil.example",
          "node-1.evil.example", "", ":9091", "[evil]"}) {
      INFO(foreign);
      CHECK(with_host(foreign) == 403);
    }
    // Nothing is equal to a name that could not be read.
    CHECK(status(HttpGuard("0123456789abcdef", "", ""), {.host = "", .authorization = kRight}) ==
          403);
  }

  TEST_CASE("a page of another origin is refused, even with the token") {
    const HttpGuard guard("0123456789abcdef", "", "node-1");
    const auto from = [&](const char* origin) {
      return status(guard, {.host = "node-1:9091", .origin = origin, .authorization = kRight});
    };
    CHECK(from("http://node-1:9091") == 200);
    CHECK(from("HTTP://Node-1:9091") == 200);
    CHECK(from("http://node-1") == 403);
    CHECK(from("http://evil.example") == 403);
    CHECK(from("null") == 403);
    CHECK(status(guard, {.origin = "http://node-1:9091", .authorization = kRight}) == 403);
  }
}

}  // namespace
}  // namespace pegaflow::server
