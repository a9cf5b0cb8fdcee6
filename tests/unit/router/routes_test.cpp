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

  TEST_CASE("a response's id is in its path") {
    CHECK(response_id_of("/v1/responses/resp_1/cancel?x") == "resp_1");
    CHECK(response_id_of("/v1/responses/resp_1/other").empty());
    CHECK(response_id_of("/v1/responses").empty());
  }
}

}  // namespace
}  // namespace pegaflow::router
