#include "router/kv/kv_pools.h"

#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "base/session_name.h"
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

/// The same with the chain of one prompt behind it.
std::string with_chain(std::string body, std::uint64_t session,
                       const std::vector<std::uint64_t>& hashes, std::uint32_t block_tokens = 16) {
  body[60] = 1;
  append(body, std::uint64_t{77});
  append(body, session);
  append(body, block_tokens);
  append(body, static_cast<std::uint32_t>(hashes.size()));
  for (const std::uint64_t hash : hashes) append(body, hash);
  return body;
}

constexpr unsigned kLost = 1;
constexpr unsigned kMore = 2;
constexpr unsigned kList = 4;

class Rig {
 public:
  Rig() : lessons(texts), fleet(*blocks, *placement, expected, lessons, tokens, streams()) {
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
  static KvStreams streams() {
    return {
        .add = [](index::StreamId, const index::EventSocket::Stream&) { return Result<void>(); },
        .remove = [](index::StreamId) {},
        .replay = [](index::StreamId, std::uint64_t, std::uint64_t) { return Result<void>(); }};
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
  KvTokens tokens = KvTokens::create({}).value();
  KvFleet fleet;
  KvPools pools{*blocks, *placement, fleet, lessons};
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

  TEST_CASE("where a journal has the chains of prompts, texts are learned from them") {
    Rig rig;
    CHECK(!rig.pools.offers_chains(rig.engines[0]->id));
    LinksPage page{.node = std::string(32, '1'), .has_chains = true};
    page.engines.push_back({.instance = "i", .space = "n", .block_tokens = 16});
    rig.pools.set_links("http://a:50061", page);
    CHECK(rig.pools.offers_chains(rig.engines[0]->id));
    rig.answered(answer('s', kList, {1, 2, 3}, 70));
    CHECK(rig.target() == "/journal?namespace=n&generation=1&position=70&keys=8&chains=1");

    const std::string prompt(600, 'a');
    index::Text text;
    index::hash_text(1, prompt, text);
    rig.lessons.begin("pf1:1", text, {}, KvLessons::By::kChain);
    rig.lessons.begin("pf1:2", text, {}, KvLessons::By::kEvents);
    const auto told = [&](std::string_view session, std::uint32_t block_tokens = 16) {
      const std::string body =
          with_chain(answer('s', 0, {4}, 71), session_name(session), {1, 2, 3, 9}, block_tokens);
      rig.pools.answered("http://a:50061", "n", PoolPage::read(body, true).value());
      index::TextIndex::Known known;
      rig.texts.look_up(text, known);
      return known.keys;
    };
    CHECK(told("pf1:2").empty());  // Its engine's events tell it.
    CHECK(told("pf1:3").empty());  // Another router's.
    CHECK(told("pf1:1", 32).empty());
    const std::vector<index::Key> known = told("pf1:1");
    REQUIRE(known.size() == 4);
    CHECK(known[3] == index::key_of(0, 9));
    CHECK(rig.target() ==
          "/journal?namespace=n&generation=1&position=71&keys=8&chains=1&chain_position=77");
    // Another process of the server counts anew.
    rig.answered(answer('t', 0, {}, 71));
    rig.answered(answer('t', kList, {}, 5));
    CHECK(rig.target() == "/journal?namespace=n&generation=1&position=5&keys=8&chains=1");
  }

  TEST_CASE("the pool of an engine of SGLang is read with the names that its events have") {
    Rig rig;
    rig.answered(answer('s', kList, {1, 2, 3}, 70));
    index::EventAddress address;
    address.endpoint = "tcp://a:5557";
    address.dialect = index::Dialect::kSglang;
    rig.fleet.set_addresses(rig.engines[0]->id, {address}, "", TimePoint{});
    rig.pools.attach_engines();
    CHECK(rig.target() == "/blocks?namespace=n&cursor=0&keys=first8");
    CHECK(rig.held() == 0);
    rig.answered(answer('s', kList, {4}, 90));
    rig.pools.attach_engines();
    CHECK(rig.target() == "/journal?namespace=n&generation=1&position=90&keys=first8");
    CHECK(rig.held() == 1);
  }

  TEST_CASE("an engine without events does not change the names of blocks in a pool") {
    Rig rig;
    rig.engines.push_back(std::make_shared<Engine>(EngineUrl::parse("http://a:8001").value(),
                                                   Role::kDecode, Breaker::Options()));
    rig.fleet.set_engines(rig.engines, TimePoint{});
    index::EventAddress address;
    address.endpoint = "tcp://a:5557";
    address.dialect = index::Dialect::kSglang;
    rig.fleet.set_addresses(rig.engines[0]->id, {address}, "", TimePoint{});
    rig.pools.attach_engines();
    rig.answered(answer('s', kList, {4}, 90));
    for (int i = 0; i < 3; ++i) rig.pools.attach_engines();
    CHECK(rig.target() == "/journal?namespace=n&generation=1&position=90&keys=first8");
    CHECK(rig.is_trusted());
    CHECK(rig.held() == 1);
  }

  TEST_CASE("chains that do not fit their answer are rejected") {
    const std::string good = with_chain(answer('s', 0, {1}, 70), 5, {1, 2});
    CHECK(PoolPage::read(good, true).value().chains.size() == 1);
    CHECK(!PoolPage::read(good));
    for (std::size_t size = 0; size < good.size(); ++size) {
      CHECK(!PoolPage::read(std::string_view(good).substr(0, size), true));
    }
    CHECK(!PoolPage::read(good + "x", true));
    std::string many = good;
    many[60] = '\xFF';
    many[63] = '\xFF';
    CHECK(!PoolPage::read(many, true));
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
