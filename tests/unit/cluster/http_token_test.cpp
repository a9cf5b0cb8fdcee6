// The tokens of routers' requests.
#include <cstdint>
#include <fstream>
#include <span>
#include <string>

#include <sys/stat.h>

#include <doctest/doctest.h>

#include "cluster/peer_proof.h"
#include "tests/support/server_process.h"

namespace pegaflow::cluster {
namespace {

constexpr std::uint64_t kTime = 1700000000;
const PeerSecret kSecret("0123456789abcdef-example");

PeerSecret::HttpRequest links() {
  return {.time = kTime, .method = "GET", .target = "/links", .body = {}};
}

TEST_SUITE("http_token") {
  TEST_CASE("the token is the one that docs/router_api.md describes") {
    CHECK(http_token(kSecret, links()) ==
          "pf1.1700000000.8127551cafc03604914c3bcc0d5fa008ead1725b0fd028a35450e2c00e785023");
    const PeerSecret::HttpRequest prefetch{
        .time = kTime, .method = "POST", .target = "/prefetch", .body = R"({"id":"a"})"};
    CHECK(http_token(kSecret, prefetch) ==
          "pf1.1700000000.e05f42bbdc4b5e5fc5e8489e66151df4adf7c1859117b849a00ca233b8818c53");
  }

  TEST_CASE("a seal is good for its own message and purpose, with any secret of the file") {
    const testing::TemporaryDirectory directory;
    const std::string file = (directory.path() / "secret").string();
    std::ofstream(file) << "another-secret-0123456789\n\n0123456789abcdef-example\n";
    ::chmod(file.c_str(), 0600);
    const PeerSecrets secrets = PeerSecrets::read(file).value();
    const std::string text = "a message";
    const auto message = std::as_bytes(std::span(text));
    const Bytes32 seal = kSecret.seal("replicas", message);

    CHECK(secrets.is_seal("replicas", message, seal));
    CHECK(secrets.is_seal("replicas", message, secrets.first().seal("replicas", message)));
    CHECK_FALSE(secrets.is_seal("snapshot", message, seal));
    CHECK_FALSE(secrets.is_seal("replicas", message.first(8), seal));
    CHECK_FALSE(secrets.is_seal("replicas", message, std::span(seal).first(31)));
    CHECK_FALSE(PeerSecrets().is_seal("replicas", message, seal));
    // Purpose and message cannot be shifted against each other.
    CHECK_FALSE(secrets.is_seal("replica", message, seal));
  }

  TEST_CASE("a token is good for its own request, near its time, with any secret of the file") {
    const testing::TemporaryDirectory directory;
    const std::string file = (directory.path() / "secret").string();
    std::ofstream(file) << "another-secret-0123456789\n\n0123456789abcdef-example\n";
    ::chmod(file.c_str(), 0600);
    const PeerSecrets secrets = PeerSecrets::read(file).value();
    const std::string token = http_token(kSecret, links());

    CHECK(is_http_token(secrets, links(), token, kTime));
    CHECK(is_http_token(secrets, links(), token, kTime + 120));
    CHECK(is_http_token(secrets, links(), token, kTime - 120));
    CHECK_FALSE(is_http_token(secrets, links(), token, kTime + 121));
    CHECK_FALSE(is_http_token(secrets, links(), token, kTime - 121));
    PeerSecret::HttpRequest other = links();
    other.method = "POST";
    CHECK_FALSE(is_http_token(secrets, other, token, kTime));
    other = links();
    other.target = "/links?x";
    CHECK_FALSE(is_http_token(secrets, other, token, kTime));
    other = links();
    other.body = "x";
    CHECK_FALSE(is_http_token(secrets, other, token, kTime));
    CHECK_FALSE(is_http_token(PeerSecrets(), links(), token, kTime));
  }

  TEST_CASE("texts that are no tokens are refused") {
    const PeerSecrets secrets;
    for (const char* const text :
         {"", "pf1.", "pf1..", "pf1.1700000000", "pf1.1700000000.", "pf1.17000x0000.00",
          "pf1.99999999999999999999999.00", "pf2.1700000000.00", "pf1.-1.00"}) {
      CHECK_FALSE(is_http_token(secrets, links(), text, kTime));
    }
    const std::string token = http_token(secrets.first(), links());
    CHECK(is_http_token(secrets, links(), token, kTime));
    CHECK_FALSE(is_http_token(secrets, links(), token + "0", kTime));
    CHECK_FALSE(is_http_token(secrets, links(), token.substr(0, token.size() - 1), kTime));
  }
}

}  // namespace
}  // namespace pegaflow::cluster
