#include "router/kv/kv_pools.h"

#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "router/body/kv_hints.h"

namespace pegaflow::router {
namespace {

template <typename Number>
void append(std::string& to, Number number) {
  for (std::size_t i = 0; i < sizeof number; ++i) {
    to.push_back(static_cast<char>(static_cast<std::uint64_t>(number) >> (8 * i)));
  }
}

/// An answer as docs/router_api.md describes it.
std::string answer(char server, unsigned flags, const std::vector<std::uint64_t>& hashes,
                   std::uint64_t position = 0, std::uint32_t cursor = 0, bool is_gone = false,
                   std::uint64_t generation = 1) {
  std::string body = "PEGABLK1" + std::string(16, server);
  append(body, generation);
  append(body, position);
  append(body, std::uint32_t{flags});
  append(body, static_cast<std::uint32_t>(hashes.size()));
  append(body, cursor);
  append(body, std::uint16_t{0});
  append(body, std::uint16_t{8});
  append(body, std::uint32_t{16});
  append(body, std::uint32_t{0});
  for (const std::uint64_t hash : hashes) append(body, hash);
  body += std::string((hashes.size() + 7) / 8, is_gone ? '\xFF' : '\0');
  return body;
}

constexpr unsigned kLost = 1;
constexpr unsigned kMore = 2;
constexpr unsigned kList = 4;

class Rig {
 public:
  Rig() : lessons(texts), fleet(*blocks, *placement, expected, lessons, {}) {
    engines.push_back(std::make_shared<Engine>(EngineUrl::parse("http://a:8000").value(),
                                               Role::kDecode, Breaker::Options()));
    fleet.set_engines(engines, TimePoint{});
    pools.set_servers(
        {EngineUrl::parse("http://a:50061").value(), EngineUrl::parse("http://b:50061").value()});
    LinksPage page{.node = std::string(32, '1')};
    page.engines.push_back({.instance = "i", .space = "n", .block_bytes = 32, .block_tokens = 16});
    pools.set_links("http://a:50061", page);
    page.node = std::string(32, '2');
    pools.set_links("http://b:50061", page);
  }
  void answered(const std::string& body, const std::string& server = "http://a:50061") {
    pools.answered(server, "n", PoolPage::read(body).value());
  }
  [[nodiscard]] std::string target(const std::string& server = "http://a:50061") const {
    return pools.next_target(server, "n");
  }
  [[nodiscard]] std::uint64_t held(const std::string& server = "http://a:50061") const {
    return blocks->blocks_of(pools.nodes().at(server).pools.at("n").holder);
  }
  [[nodiscard]] bool is_trusted() const {
    return pools.nodes().at("http://a:50061").pools.at("n").is_trusted;
  }

  std::unique_ptr<index::BlockIndex> blocks =
      index::BlockIndex::create({.max_blocks = 4096, .max_holders = 64}).value();
  std::unique_ptr<index::Placement> placement =
      index::Placement::create({.max_engines = 16, .max_nodes = 16}).value();
  index::ExpectedBlocks expected = index::ExpectedBlocks::create({}).value();
  index::TextIndex texts{{.bytes = 1 << 20}};
  KvLessons lessons;
  KvFleet fleet;
  KvPools pools{*blocks, *placement, fleet};
  std::vector<std::shared_ptr<Engine>> engines;
};

TEST_SUITE("kv_pools") {
  TEST_CASE("a pool is listed part by part, and its changes since the first part follow") {
    Rig rig;
    CHECK(rig.target() == "/blocks?namespace=n&cursor=0&keys=8");
    CHECK(!rig.is_trusted());
    rig.answered(answer('s', kList | kMore, {1, 2, 3}, 70, 5));
    CHECK(rig.target() == "/blocks?namespace=n&cursor=5&keys=8");
    rig.answered(answer('s', kList, {4}, 90));
    CHECK(rig.is_trusted());
    CHECK(rig.held() == 4);
    // From the first part on: what left the pool meanwhile is among the changes.
    CHECK(rig.target() == "/journal?namespace=n&generation=1&position=70&keys=8");
    rig.answered(answer('s', 0, {2, 3}, 95, 0, true));
    rig.answered(answer('s', 0, {9}, 96));
    CHECK(rig.held() == 3);
    CHECK(rig.target() == "/journal?namespace=n&generation=1&position=96&keys=8");
  }

  TEST_CASE("lost changes, a reset and another process each begin a new list") {
    for (const std::string& bad : {answer('s', kLost, {}, 99), answer('s', 0, {7}, 99, 0, false, 2),
                                   answer('t', 0, {7}, 99)}) {
      Rig rig;
      rig.answered(answer('s', kList, {1, 2, 3}, 70));
      REQUIRE(rig.is_trusted());
      rig.answered(bad);
      CHECK(!rig.is_trusted());
      CHECK(rig.held() == 0);
      CHECK(rig.target() == "/blocks?namespace=n&cursor=0&keys=8");
      CHECK(!rig.pools.nodes().at("http://a:50061").pools.at("n").reason.empty());
    }
  }

  TEST_CASE("a reset between two parts of a list begins it anew") {
    Rig rig;
    rig.answered(answer('s', kList | kMore, {1, 2}, 70, 5));
    rig.answered(answer('s', kList, {3}, 90, 0, false, 2));
    CHECK(!rig.is_trusted());
    CHECK(rig.held() == 0);
    CHECK(rig.target() == "/blocks?namespace=n&cursor=0&keys=8");
  }

  TEST_CASE("an engine belongs to the only server on its host, or to the one that it was given") {
    Rig rig;
    const KvPools::Pool* pool = rig.pools.pool_of(rig.engines[0]->id);
    REQUIRE(pool != nullptr);
    CHECK(pool == &rig.pools.nodes().at("http://a:50061").pools.at("n"));
    rig.pools.assign("http://a:8000", "http://b:50061");
    rig.pools.attach_engines();
    pool = rig.pools.pool_of(rig.engines[0]->id);
    CHECK(pool == &rig.pools.nodes().at("http://b:50061").pools.at("n"));
    // With two namespaces on the node it is not known which one is the engine's.
    LinksPage page{.node = std::string(32, '2')};
    page.engines.push_back({.instance = "i", .space = "n", .block_bytes = 0, .block_tokens = 0});
    page.engines.push_back({.instance = "j", .space = "m", .block_bytes = 0, .block_tokens = 0});
    rig.pools.set_links("http://b:50061", page);
    CHECK(rig.pools.pool_of(rig.engines[0]->id) == nullptr);
  }

  TEST_CASE("an engine that comes back with another namespace has that one's pool") {
    Rig rig;
    rig.answered(answer('s', kList, {1, 2, 3}));
    LinksPage page{.node = std::string(32, '1')};
    page.engines.push_back({.instance = "j", .space = "m", .block_bytes = 0, .block_tokens = 0});
    // The server still lists the former instance.
    page.engines.push_back({.instance = "i",
                            .space = "n",
                            .block_bytes = 0,
                            .block_tokens = 0,
                            .is_connected = false});
    rig.pools.set_links("http://a:50061", page);
    const KvPools::Pool* const pool = rig.pools.pool_of(rig.engines[0]->id);
    REQUIRE(pool != nullptr);
    CHECK(pool->space == "m");
    // Others still read from the former pool, until the server no longer has it.
    CHECK(rig.held() == 3);
    rig.pools.failed("http://a:50061", "n", "GET /journal returned 404");
    CHECK(rig.target().empty());
    CHECK(rig.pools.nodes().at("http://a:50061").pools.size() == 1);
  }

  TEST_CASE("a server that does not answer gives no credit, and one that is gone leaves nothing") {
    Rig rig;
    rig.answered(answer('s', kList, {1, 2, 3}, 70));
    rig.pools.lost("http://a:50061", "no connection");
    CHECK(!rig.is_trusted());
    CHECK(rig.held() == 0);
    rig.answered(answer('s', kList, {1}, 1), "http://b:50061");
    CHECK(rig.held("http://b:50061") == 1);
    rig.pools.set_servers({});
    while (rig.blocks->sweep(4096)) {
    }
    CHECK(rig.blocks->stats().blocks == 0);
    CHECK(rig.target().empty());
  }

  TEST_CASE("an answer of another form is rejected") {
    const std::string good = answer('s', kList, {1, 2, 3}, 70);
    CHECK(PoolPage::read(good).value().changes.size() == 3);
    for (std::size_t size = 0; size < good.size(); ++size) {
      CHECK(!PoolPage::read(std::string_view(good).substr(0, size)));
    }
    CHECK(!PoolPage::read(good + "x"));
    std::string other = good;
    other[54] = 32;  // The size of a key.
    CHECK(!PoolPage::read(other));
    for (const std::string_view bad :
         {"", "[]", "{}", R"({"node":"a"})", R"({"node":"a\"},","links":[],"engines":[]})",
          R"({"node":"a","links":[],"engines":[{"namespace":"a HTTP/1.1\r\n"}]})",
          R"({"node":"a","links":[1],"engines":[]})", R"({"node":"a","links":[],"engines":{}})"}) {
      CAPTURE(bad);
      CHECK(!LinksPage::read(bad));
    }
    const auto old = LinksPage::read(
        R"({"node":"a","links":[],"engines":[{"namespace":"b","state":"disconnected"}]})");
    REQUIRE(old);
    CHECK(!old->engines[0].is_connected);
    const auto odd = LinksPage::read(
        R"({"node":"a","links":[],"engines":[{"namespace":"b","block_bytes":-1,"block_tokens":1e99}]})");
    REQUIRE(odd);
    CHECK(odd->engines[0].block_bytes == 0);
    CHECK(odd->engines[0].block_tokens == 0);
  }

  TEST_CASE("a hint changes nothing else of a body") {
    CHECK(with_hint(R"({"prompt": 1.50})", "\"compute\"") ==
          R"({"kv_transfer_params":{"pegaflow":{"hints":"compute"}},"prompt": 1.50})");
    CHECK(with_hint(" { }", "[]") == R"( {"kv_transfer_params":{"pegaflow":{"hints":[]}} })");
  }
}

}  // namespace
}  // namespace pegaflow::router
