#include "router/http/routes.h"

#include <doctest/doctest.h>

namespace pegaflow::router {
namespace {

TEST_SUITE("routes") {
  TEST_CASE("unlisted paths are denied") {
    for (const char* const path :
         {"/", "", "*", "/v1", "/v1/", "/metrics/", "//health", "/v1/chat/completions/render",
          "/sleep", "/v1/responses/", "/v1/responses/a/b", "/v1/responses/a/cancel/x",
          "http://h/health", "/V1/models", "/v1/%6dodels"}) {
      CAPTURE(path);
      CHECK(find_route("GET", path, {}).kind == RouteKind::kDenied);
    }
  }

  TEST_CASE("each path has its methods") {
    CHECK(find_route("POST", "/v1/chat/completions?a=b", {}).kind == RouteKind::kSplit);
    CHECK(find_route("GET", "/v1/chat/completions", {}).kind == RouteKind::kWrongMethod);
    CHECK(find_route("POST", "/v1/messages", {}).is_anthropic);
    CHECK(find_route("GET", "/v1/responses/resp_1?x", {}).kind == RouteKind::kResponses);
    CHECK(find_route("POST", "/v1/responses/resp_1/cancel", {}).kind == RouteKind::kResponses);
    CHECK(find_route("POST", "/v1/responses/resp_1", {}).kind == RouteKind::kWrongMethod);
    CHECK_FALSE(find_route("GET", "/health", {}).needs_key);
    CHECK(find_route("GET", "/v1/models", {}).needs_key);
    CHECK(find_route("HEAD", "/health", {}).kind == RouteKind::kHealth);
    CHECK(find_route("OPTIONS", "/health", {}).methods == "GET, HEAD");
    CHECK(find_route("GE", "/health", {}).kind == RouteKind::kWrongMethod);
    CHECK(find_route("PUT", "/extra?x", {"/extra"}).kind == RouteKind::kOne);
    CHECK(find_route("HEAD", "/extra?x", {"/extra"}).kind == RouteKind::kWrongMethod);
    CHECK(find_route("CONNECT", "/extra", {"/extra"}).kind == RouteKind::kWrongMethod);
  }

  TEST_CASE("scores have a path of their own, because /score is an engine's") {
    CHECK(find_route("POST", "/score", {}).kind == RouteKind::kOne);
    CHECK(find_route("POST", "/kv/score", {}).kind == RouteKind::kScore);
    CHECK(find_index_route("POST", "/score?x").kind == RouteKind::kScore);
    CHECK(find_index_route("POST", "/kv/score").kind == RouteKind::kScore);
    CHECK(find_index_route("GET", "/score").kind == RouteKind::kWrongMethod);
    CHECK(find_index_route("HEAD", "/index/dump?source=1").kind == RouteKind::kDump);
    CHECK(find_index_route("POST", "/v1/completions").kind == RouteKind::kDenied);
  }

  TEST_CASE("an announcement has the path of its request behind a prefix, and needs a key") {
    const Route route = find_route("POST", "/kv/prefetch/v1/messages?x", {});
    CHECK(route.kind == RouteKind::kAnnounced);
    CHECK(route.announced == "messages");
    CHECK(route.is_anthropic);
    CHECK(route.needs_key);
    CHECK(find_route("POST", "/kv/prefetch/v1/chat/completions", {}).announced == "chat");
    CHECK(find_route("GET", "/kv/prefetch/v1/completions", {}).kind == RouteKind::kWrongMethod);
    CHECK(find_route("POST", "/kv/prefetch/v1/embeddings", {}).kind == RouteKind::kDenied);
    CHECK(find_index_route("POST", "/kv/prefetch/v1/completions").kind == RouteKind::kDenied);
  }

  TEST_CASE("a response's id is in its path") {
    CHECK(response_id_of("/v1/responses/resp_1/cancel?x") == "resp_1");
    CHECK(response_id_of("/v1/responses/resp_1/other").empty());
    CHECK(response_id_of("/v1/responses").empty());
  }
}

}  // namespace
}  // namespace pegaflow::router
