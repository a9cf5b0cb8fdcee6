// The pages of pegaflow-server for routers: the journal, lists of blocks, links and prefetches.
#include <chrono>
#include <cstring>
#include <ctime>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <thread>

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/hex.h"
#include "base/session_name.h"
#include "cluster/peer_proof.h"
#include "harness/http_request.h"
#include "tests/support/nodes.h"

namespace pegaflow::testing {
namespace {

using harness::http_request;
using harness::HttpResponse;

constexpr std::size_t kPiece = std::size_t{8} << 10;
constexpr const char* kSecret = "3f9c61d8-routers-and-servers-share-it";

/// A router that has the secret.
struct Router {
  explicit Router(const ServerProcess& to, const char* text = kSecret) : server(to), secret(text) {}

  [[nodiscard]] HttpResponse send(std::string_view method, const std::string& target,
                                  const std::string& body = "", long age_s = 0) const {
    const auto time = static_cast<std::uint64_t>(::time(nullptr) - age_s);
    const std::string token = cluster::http_token(
        secret, {.time = time, .method = method, .target = target, .body = body});
    return http_request(server.http(), method, target, {"Authorization: Bearer " + token}, body)
        .value();
  }
  [[nodiscard]] HttpResponse get(const std::string& target) const { return send("GET", target); }
  [[nodiscard]] nlohmann::json links() const { return nlohmann::json::parse(get("/links").body); }
  /// The namespace of the only engine.
  [[nodiscard]] std::string space() const {
    return nlohmann::json::parse(server.get("/instances").body)
        .at("instances")
        .at(0)
        .at("namespace");
  }

  const ServerProcess& server;
  cluster::PeerSecret secret;
};

/// An answer of /journal or /blocks, as docs/router_api.md describes it.
struct Blocks {
  explicit Blocks(const HttpResponse& response) {
    REQUIRE_MESSAGE(response.status == 200, response.body);
    const std::string& body = response.body;
    REQUIRE(body.size() >= 64);
    REQUIRE(body.substr(0, 8) == "PEGABLK1");
    server = to_hex(std::as_bytes(std::span(body).subspan(8, 16)));
    generation = number<std::uint64_t>(body, 24);
    position = number<std::uint64_t>(body, 32);
    flags = number<std::uint32_t>(body, 40);
    const std::size_t count = number<std::uint32_t>(body, 44);
    const std::size_t key_bytes = number<std::uint16_t>(body, 54);
    REQUIRE(body.size() == 64 + count * key_bytes + (count + 7) / 8);
    for (std::size_t i = 0; i < count; ++i) {
      const auto bits = static_cast<unsigned char>(body[64 + count * key_bytes + i / 8]);
      ((bits >> (i % 8) & 1U) != 0 ? gone : present)
          .insert(body.substr(64 + i * key_bytes, key_bytes));
    }
  }
  template <typename Number>
  static Number number(const std::string& body, std::size_t at) {
    Number value{};
    std::memcpy(&value, body.data() + at, sizeof value);
    return value;
  }
  [[nodiscard]] bool lost() const { return (flags & 1U) != 0; }
  [[nodiscard]] bool more() const { return (flags & 2U) != 0; }
  [[nodiscard]] std::string next() const {
    return fmt::format("&generation={}&position={}", generation, position);
  }

  std::string server;
  std::uint64_t generation = 0;
  std::uint64_t position = 0;
  std::uint32_t flags = 0;
  std::set<std::string> present;
  std::set<std::string> gone;
};

/// The chains behind the blocks of a journal with `chains=1`.
struct Chains {
  explicit Chains(const HttpResponse& response) {
    REQUIRE_MESSAGE(response.status == 200, response.body);
    const std::string& body = response.body;
    const auto word = [&body](std::size_t at) { return Blocks::number<std::uint64_t>(body, at); };
    const std::size_t entries = Blocks::number<std::uint32_t>(body, 44);
    const std::size_t count = Blocks::number<std::uint32_t>(body, 60);
    const std::size_t key_bytes = Blocks::number<std::uint16_t>(body, 54);
    std::size_t at = 64 + entries * key_bytes + (entries + 7) / 8;
    REQUIRE(body.size() >= at + 8);
    position = word(at);
    at += 8;
    for (std::size_t i = 0; i < count; ++i) {
      REQUIRE(body.size() >= at + 16);
      auto& chain = of[word(at)];
      block_tokens = Blocks::number<std::uint32_t>(body, at + 8);
      const std::size_t keys = Blocks::number<std::uint32_t>(body, at + 12);
      at += 16;
      REQUIRE(body.size() >= at + 8 * keys);
      for (std::size_t key = 0; key < keys; ++key) chain.push_back(word(at + 8 * key));
      at += 8 * keys;
    }
    CHECK(body.size() == at);
  }

  std::uint64_t position = 0;
  std::uint32_t block_tokens = 0;
  std::map<std::uint64_t, std::vector<std::uint64_t>> of;  ///< Keys by the session's name.
};

std::set<std::string> texts(const std::vector<BlockKey>& keys) {
  std::set<std::string> all;
  for (const BlockKey& key : keys) {
    all.emplace(reinterpret_cast<const char*>(key.bytes.data()), BlockKey::kMaxBytes);
  }
  return all;
}

ServerProcess::Options with_secret(const TemporaryDirectory& directory,
                                   ServerProcess::Options options = {}) {
  options.arguments.emplace_back("--peer-secret-file");
  options.arguments.push_back(secret_file(directory.path(), kSecret));
  return options;
}

HttpResponse at_socket(const ServerProcess& server, std::string_view method,
                       const std::string& path) {
  return http_request((server.directory() / "pega.http").string(), method, path).value();
}

/// One server with a secret, one engine, and a router.
struct OneNode {
  TemporaryDirectory directory;
  ServerProcess server{with_secret(directory)};
  EngineAt engine{server, kPiece, 64};
  Router router{server};
  std::string journal = "/journal?namespace=" + router.space();
  std::string blocks = "/blocks?namespace=" + router.space();

  void save(std::uint64_t first, std::size_t count) const {
    REQUIRE_FALSE(engine.engine->save(numbers_from(first, count), blocks_from(0, count)).error);
  }
};

/// The body of POST /prefetch.
std::string prefetch(const std::string& space, const std::string& id,
                     const std::vector<BlockKey>& keys, const std::string& node = "") {
  std::string digits;
  for (const BlockKey& key : keys) digits += to_hex(key.bytes);
  nlohmann::json body = {{"namespace", space}, {"id", id}, {"keys", digits}};
  if (!node.empty()) body["sources"] = {{{"node", node}, {"blocks", keys.size()}}};
  return body.dump();
}

TEST_SUITE("routers") {
  TEST_CASE("without a secret file the pages are refused, and the text says how to get them") {
    const ServerProcess server{ServerProcess::Options{}};
    for (const char* const path : {"/journal?namespace=x", "/blocks?namespace=x", "/links"}) {
      const auto refused = http_request(server.http(), "GET", path).value();
      CHECK(refused.status == 403);
      CHECK(refused.body.find("--peer-secret-file") != std::string::npos);
    }
    CHECK(http_request(server.http(), "POST", "/prefetch").value().status == 403);
    CHECK(server.metric("pegaflow_router_requests_refused_total") == 4);
    // The Unix socket is for this machine's users that may use the cache.
    CHECK(at_socket(server, "GET", "/links").status == 200);
  }

  TEST_CASE("a token fits one request, for two minutes, and either secret of a changed file") {
    const TemporaryDirectory directory;
    const ServerProcess server{with_secret(directory)};
    const Router router(server);
    CHECK(router.get("/links").status == 200);
    CHECK(http_request(server.http(), "GET", "/links").value().status == 401);
    CHECK(router.send("GET", "/links", "", 600).status == 401);
    CHECK(router.send("GET", "/links", "", -600).status == 401);
    CHECK(Router(server, "another-secret-of-enough-bytes").get("/links").status == 401);
    const std::string other =
        cluster::http_token(router.secret, {.time = static_cast<std::uint64_t>(::time(nullptr)),
                                            .method = "GET",
                                            .target = "/journal?namespace=x",
                                            .body = {}});
    CHECK(http_request(server.http(), "GET", "/links", {"Authorization: Bearer " + other})
              .value()
              .status == 401);

    // A rotation: the new secret is accepted beside the old one.
    const char* const second = "0a1b2c3d4e5f-the-next-secret";
    const std::string file = secret_file(directory.path(), kSecret);
    std::ofstream(file) << kSecret << "\n\n" << second << '\n';
    const auto end = std::chrono::steady_clock::now() + kHang;
    while (Router(server, second).get("/links").status != 200) {
      REQUIRE(std::chrono::steady_clock::now() < end);
    }
    CHECK(router.get("/links").status == 200);
  }

  TEST_CASE("the journal reports each block that was saved or evicted, in both lengths of keys") {
    const OneNode node;
    const Blocks start(node.router.get(node.journal));
    CHECK(start.present.empty());
    CHECK_FALSE(start.lost());
    node.save(1, 20);

    const Blocks saved(node.router.get(node.journal + start.next()));
    CHECK(saved.present == texts(numbered_keys(numbers_from(1, 20))));
    CHECK(saved.gone.empty());
    CHECK(saved.generation == start.generation);
    CHECK(saved.server == start.server);
    const Blocks low(node.router.get(node.journal + start.next() + "&keys=8"));
    CHECK(low.present.size() == 20);
    CHECK(low.present.begin()->size() == 8);

    REQUIRE(at_socket(node.server, "POST", "/cache/memory/cleanup").status == 200);
    const Blocks evicted(node.router.get(node.journal + saved.next()));
    CHECK(evicted.gone == saved.present);
    CHECK(evicted.present.empty());
  }

  TEST_CASE("a request for the journal waits for the next block, and a reset ends the wait") {
    const OneNode node;
    const Blocks start(node.router.get(node.journal));
    HttpResponse answer;
    std::thread waiting([&] { answer = node.router.get(node.journal + start.next()); });
    CHECK(node.server.metric_becomes("pegaflow_journal_readers", 1));
    // Other pages, of routers too, do not wait behind it.
    CHECK(node.router.get("/links").status == 200);
    node.save(1, 4);
    waiting.join();
    CHECK_FALSE(Blocks(answer).present.empty());
    CHECK(node.server.metric_becomes("pegaflow_journal_readers", 0));

    const Blocks all(node.router.get(node.journal + start.next()));
    std::thread again([&] { answer = node.router.get(node.journal + all.next()); });
    CHECK(node.server.metric_becomes("pegaflow_journal_readers", 1));
    REQUIRE(node.engine.engine->session().reset_cache(kHang));
    again.join();
    const Blocks reset(answer);
    CHECK(reset.lost());
    CHECK(reset.present.empty());
    CHECK(reset.generation != start.generation);
    CHECK(Blocks(node.router.get(node.blocks)).present.empty());
  }

  TEST_CASE("a router that asks for chains gets the blocks of prompts, and others see nothing") {
    const OneNode node;
    CacheSession& session = node.engine.engine->session();
    CHECK(node.router.links().at("chains") == 1);
    const std::vector<BlockKey> keys = numbered_keys(numbers_from(1, 3));
    // No router wants any: the first one is a question, and is dropped.
    CHECK(session.wants_chains());
    session.report_chain("pf1:0", keys, 16);
    CHECK(node.server.metric_becomes(
        R"(pegaflow_rpc_duration_seconds_count{method="report_chain"})", 1));
    CHECK(node.server.metric(R"(pegaflow_prompt_chains_total{result="unwanted"})") == 1);

    const HttpResponse first = node.router.get(node.journal + "&chains=1");
    const Chains none(first);
    CHECK(none.of.empty());
    const Blocks start(node.router.get(node.journal));
    const std::string next =
        fmt::format("{}{}&chains=1&chain_position={}", node.journal, start.next(), none.position);
    HttpResponse answer;
    std::thread waiting([&] { answer = node.router.get(next); });
    CHECK(node.server.metric_becomes("pegaflow_journal_readers", 1));
    session.report_chain("pf1:1", keys, 16);
    waiting.join();
    const Chains told(answer);
    REQUIRE(told.of.size() == 1);
    std::vector<std::uint64_t> low;
    for (const BlockKey& key : keys) low.push_back(key.low_bits());
    CHECK(told.of.at(session_name("pf1:1")) == low);
    CHECK(told.block_tokens == 16);
    // The answer has been awaited: the engine knows now that they are wanted.
    const auto end = std::chrono::steady_clock::now() + kHang;
    while (!session.wants_chains()) REQUIRE(std::chrono::steady_clock::now() < end);
    CHECK(session.wants_chains());
    CHECK(node.router.links().at("engines").at(0).at("chains") == true);
    // The id itself is in no answer, and a journal without the parameter is as it was.
    CHECK(answer.body.find("pf1:1") == std::string::npos);
    node.save(1, 2);
    CHECK(Blocks(node.router.get(node.journal + start.next())).present.size() == 2);
    CHECK(node.router.get(node.journal + "&chains=2").status == 400);
    CHECK(node.router.get(node.journal + "&chains=1&chain_position=x").status == 400);
  }

  TEST_CASE("a position of another life of the server is lost, and the incarnation shows it") {
    const OneNode node;
    const Blocks start(node.router.get(node.journal));
    CHECK(Blocks(node.router.get(node.journal + "&position=5")).lost());
    const OneNode other;
    const Blocks elsewhere(other.router.get(other.journal + start.next()));
    CHECK(elsewhere.lost());
    CHECK(elsewhere.server != start.server);
  }

  TEST_CASE("the list has the blocks of the pool, and the journal goes on from before it") {
    const OneNode node;
    node.save(1, 30);
    const Blocks list(node.router.get(node.blocks));
    CHECK(list.present == texts(numbered_keys(numbers_from(1, 30))));
    CHECK_FALSE(list.more());
    node.save(100, 5);
    const Blocks later(node.router.get(node.journal + list.next()));
    CHECK(later.present == texts(numbered_keys(numbers_from(100, 5))));
    const std::string former = fmt::format("{}&generation={}", node.blocks, list.generation + 1);
    CHECK(Blocks(node.router.get(former)).lost());
  }

  TEST_CASE("invalid requests are refused, and the text names the value") {
    const OneNode node;
    const auto check = [&](std::string_view method, const std::string& target, int status,
                           const std::string& body = "") {
      const HttpResponse response = node.router.send(method, target, body);
      CHECK_MESSAGE(response.status == status, target, " ", body.substr(0, 200), response.body);
    };
    check("GET", "/journal", 400);
    check("GET", "/journal?namespace=0123", 404);
    check("GET", "/journal?namespace=a/b", 400);
    check("GET", node.journal + "&position=x", 400);
    check("GET", node.journal + "&position=99999999999999999999999", 400);
    check("GET", node.journal + "&kind=3", 400);
    check("GET", node.journal + "&keys=16", 400);
    check("GET", node.journal + "&other=1", 400);
    check("POST", "/journal", 405);
    check("DELETE", "/prefetch", 405);
    check("DELETE", "/prefetch/", 400);
    check("DELETE", "/prefetch/unknown", 202);
    const std::string space = node.router.space();
    const auto keys = numbered_keys(numbers_from(1, 2));
    check("POST", "/prefetch", 400, "");
    check("POST", "/prefetch", 400, "[1,2]");
    check("POST", "/prefetch", 400, std::string(100000, '['));
    check("POST", "/prefetch", 400, prefetch(space, "", keys));
    check("POST", "/prefetch", 400, prefetch(space, "a b", keys));
    check("POST", "/prefetch", 400, prefetch(space, "id", {}));
    check("POST", "/prefetch", 400, prefetch(space, "id", std::vector<BlockKey>(8193)));
    check("POST", "/prefetch", 404, prefetch("0123", "id", keys));
    check("POST", "/prefetch", 202, prefetch(space, "id", keys, "no node"));
  }

  TEST_CASE("a prefetch brings blocks of a peer into the pool as replicas, and tells nothing") {
    const TemporaryDirectory directory;
    const std::vector<std::string> at = node_addresses(2);
    const ServerProcess a{with_secret(directory, node_options(at[0], at))};
    const ServerProcess b{with_secret(directory, node_options(at[1], at))};
    EngineAt on_a(a, kPiece, 64);
    EngineAt on_b(b, kPiece, 64);
    REQUIRE(sees(b, at[0]));
    REQUIRE_FALSE(on_a.engine->save(numbers_from(1, 40), blocks_from(0, 40)).error);
    const Router router(b);
    const auto links = router.links();
    const std::string node = Router(a).links().at("node");
    CHECK(links.at("links").at(0).at("node") == node);
    CHECK(links.at("links").at(0).at("lane") == "tcp");
    CHECK(links.at("links").at(1).at("state") == "self");
    CHECK(links.at("engines").at(0).at("block_bytes") == 2 * kPiece);

    // Half of the blocks exist nowhere, or all of them: the answer is the same.
    const auto keys = numbered_keys(numbers_from(1, 80));
    const auto accepted =
        router.send("POST", "/prefetch", prefetch(router.space(), "one", keys, node));
    CHECK(b.metric_becomes("pegaflow_prefetches_total{result=\"finished\"}", 1));
    const auto unknown =
        router.send("POST", "/prefetch",
                    prefetch(router.space(), "two", numbered_keys(numbers_from(900, 80)), node));

    CHECK(accepted.status == 202);
    CHECK(unknown.status == 202);
    CHECK(accepted.body == unknown.body);
    CHECK(b.metric_becomes("pegaflow_prefetches_total{result=\"finished\"}", 2));
    CHECK(b.metric("pegaflow_prefetched_blocks_total") == 40);
    CHECK(b.metric("pegaflow_replica_blocks") == 40);
    CHECK(b.metric("pegaflow_fetch_blocks_total{result=\"whole\"}") == 40);
    CHECK(b.metric("pegaflow_fetch_hints_total{result=\"found\"}") == 1);
    CHECK(b.metric("pegaflow_fetch_hints_total{result=\"wrong\"}") == 1);
    check_nothing_is_left(b, std::nullopt);
    // The engine finds them in its own pool, byte for byte.
    const auto claimed = on_b.engine->claim(numbers_from(1, 40)).value();
    CHECK(claimed.blocks == 40);
    CHECK(claimed.coming == 0);
    CHECK_FALSE(on_b.load_and_check(claimed, 1).error);
    CHECK(b.metric("pegaflow_fetch_blocks_total{result=\"whole\"}") == 40);
    CHECK(router.links().at("links").at(0).at("bytes_per_second") > 0);
  }

  TEST_CASE("a claim with the right node asks that one alone, and one with none asks no node") {
    const TemporaryDirectory directory;
    const std::vector<std::string> at = node_addresses(3);
    const ServerProcess a{with_secret(directory, node_options(at[0], at))};
    const ServerProcess b{with_secret(directory, node_options(at[1], at))};
    const ServerProcess c{with_secret(directory, node_options(at[2], at))};
    EngineAt on_a(a, kPiece, 64);
    EngineAt on_b(b, kPiece, 64);
    REQUIRE(sees(b, at[0]));
    REQUIRE(sees(b, at[2]));
    REQUIRE_FALSE(on_a.engine->save(numbers_from(1, 8), blocks_from(0, 8)).error);
    const auto hint = [](const ServerProcess& server) {
      const std::string text = Router(server).links().at("node");
      return SessionHints{.nodes = {Id128{std::stoull(text.substr(0, 16), nullptr, 16),
                                          std::stoull(text.substr(16), nullptr, 16)}}};
    };
    CacheSession& session = on_b.engine->session();
    const auto keys = numbered_keys(numbers_from(1, 8));
    const auto look_up = [&](const SessionHints& hints) {
      return session.take(session.lookup(keys, 0, hints).value(), kHang).value().value().blocks;
    };
    const auto claim = [&](const SessionHints& hints) {
      return session.take(session.claim(keys, {}, 0, hints).value(), kHang).value().value();
    };

    CHECK(look_up({.nodes = {}, .no_nodes = true}) == 0);
    CHECK(look_up(hint(a)) == 8);
    CHECK(b.metric("pegaflow_fetch_hints_total{result=\"found\"}") == 1);
    CHECK(look_up(hint(c)) == 8);  // Wrong: all are asked.
    CHECK(b.metric("pegaflow_fetch_hints_total{result=\"wrong\"}") == 1);
    CHECK(claim({.nodes = {}, .no_nodes = true}).blocks == 0);
    const auto hinted = claim(hint(a));
    CHECK(hinted.coming == 8);
    CHECK_FALSE(on_b.load_and_check(hinted, 1).error);
  }
}

}  // namespace
}  // namespace pegaflow::testing
