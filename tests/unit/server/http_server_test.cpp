#include "server/http_server.h"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "tests/support/server_process.h"

namespace pegaflow {
namespace {

TEST_SUITE("HttpServer") {
  TEST_CASE("/health before anything was published says what the server was started with") {
    auto listener = listen_tcp("127.0.0.1:0", "--http-addr");
    REQUIRE(listener);
    const std::string address = listener->address;
    Mailbox<AdminQuestion> questions(1);
    HttpServer::Options options;
    options.health = {
        .is_ok = false, .status = "preparing the pool", .pool_bytes = 4096, .done_bytes = 0};
    const auto server = HttpServer::start(std::move(*listener), std::move(options), questions);
    REQUIRE(server);

    const auto response = testing::http_request(address, "GET", "/health");

    CHECK(response.status == 503);
    const auto body = nlohmann::json::parse(response.body);
    CHECK(body.at("status") == "preparing the pool");
    CHECK(body.at("pool_bytes") == 4096);
  }
}

}  // namespace
}  // namespace pegaflow
