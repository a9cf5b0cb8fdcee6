// The HTTP server of a real server process.
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "base/os/unique_fd.h"
#include "tests/support/forked.h"
#include "tests/support/server_process.h"
#include "tests/support/skip.h"
#include "tests/support/wire_client.h"

namespace pegaflow::testing {
namespace {

using nlohmann::json;

TEST_SUITE("HTTP") {
  TEST_CASE("an unknown path is 404, a wrong method 405, both with a JSON error") {
    ServerProcess server;

    for (const char* const path :
         {"/", "/nothing", "/metrics/", "/test/overwrite_block?recent=0"}) {
      const auto response = server.get(path);
      CHECK(response.status == 404);
      CHECK(json::parse(response.body).contains("error"));
    }
    CHECK(server.post("/metrics").status == 405);
    CHECK(server.get("/cache/memory/cleanup").status == 405);
    CHECK(json::parse(server.post("/health").body).at("error") == "/health takes GET");
    CHECK(server.get("/health?x=y").status == 200);
  }

  TEST_CASE("garbage is answered with 400 or closed, and other clients are served") {
    ServerProcess server;

    CHECK(http_request(server.http(), "\x01\x02\x03", "\xff").status >= 400);
    CHECK(http_request(server.http(), "BREW", "/coffee").status >= 400);
    CHECK(server.get("/health").status == 200);
  }

  TEST_CASE("instances are listed with their namespace") {
    ServerProcess server;
    auto io = kj::setupAsyncIo();
    WireClient worker(io, server.socket());
    worker.hello();
    const auto pool = worker.register_rank("engine \"1\"", 10000);
    REQUIRE(pool);
    WireClient scheduler(io, server.socket());
    scheduler.hello();
    REQUIRE(scheduler.attach("engine \"1\""));

    const json list = json::parse(server.get("/instances").body).at("instances");

    REQUIRE(list.size() == 1);
    const json& engine = list.at(0);
    CHECK(engine.at("instance") == "engine \"1\"");
    CHECK(engine.at("connected") == true);
    CHECK(engine.at("state") == "connected");
    CHECK(engine.at("incarnation") == to_string(worker.process()));
    CHECK(engine.at("namespace") == pool->namespace_hash);
    CHECK(engine.at("page_bytes") == 10000);
    CHECK(engine.at("block_count") == 100);
    CHECK(engine.at("rank") == 0);
    CHECK(engine.at("generation") == 1);
    CHECK(engine.at("schedulers") == 1);
    CHECK(engine.at("factors") == json::parse(R"([{"name": "dtype", "value": "float16"},
                                                  {"name": "weights", "value": "a"}])"));

    REQUIRE(worker.goodbye());
    const json away = json::parse(server.get("/instances").body).at("instances").at(0);
    CHECK(away.at("connected") == false);
    CHECK(away.at("state") == "disconnected");
  }

  TEST_CASE("an id with invalid UTF-8 does not break the list") {
    ServerProcess server;
    auto io = kj::setupAsyncIo();
    WireClient scheduler(io, server.socket());
    scheduler.hello();
    REQUIRE(scheduler.attach("\xff\xfe"));

    const auto response = server.get("/instances");

    CHECK(response.status == 200);
    CHECK(json::parse(response.body).at("instances").size() == 1);
  }

  TEST_CASE("cleanup evicts every evictable block and counts the others") {
    ServerProcess server;
    auto io = kj::setupAsyncIo();
    WireClient worker(io, server.socket());
    worker.hello();
    const auto pool = worker.register_rank("engine", 4096);
    REQUIRE(pool);
    REQUIRE(worker.attach("engine"));
    const auto keys = make_keys(1, 3000);
    REQUIRE(worker.save(*pool, {Id128::random(), 1}, keys) == 3000);
    REQUIRE(worker.claim(Id128::random(), std::span(keys).first(100)));

    const json report = json::parse(server.post("/cache/memory/cleanup").body);

    CHECK(report.at("evicted_blocks") == 2900);
    CHECK(report.at("evicted_bytes") == 2900 * 4096);
    CHECK(report.at("reclaimed_bytes") == 2900 * 4096);
    CHECK(report.at("still_referenced_blocks") == 100);
    CHECK(worker.lookup(keys).blocks == 100);
    CHECK(server.metric(R"(pegaflow_cache_blocks_dropped_total{reason="cleanup"})") == 2900);
  }

  TEST_CASE("a POST over TCP needs the token, from this machine as well") {
    const TemporaryDirectory directory;
    const std::string token_file = (directory.path() / "token").string();
    std::ofstream(token_file) << "0123456789abcdef\n";
    const std::string path = "/cache/memory/cleanup";

    {
      ServerProcess without;
      const auto response = http_request(without.http(), "POST", path);
      CHECK(response.status == 403);
      CHECK(response.body.find("--http-token-file") != std::string::npos);
      CHECK(response.body.find(without.http_socket()) != std::string::npos);
      CHECK(without.post(path).status == 200);
      CHECK(without.get("/health").status == 200);
    }
    ServerProcess server({.arguments = {"--http-token-file", token_file}});
    CHECK(server.post(path).status == 200);
    CHECK(http_request(server.http(), "POST", path).status == 401);
    const auto with = [&](const std::string& value, std::vector<std::string> headers = {}) {
      headers.push_back("Authorization: " + value);
      return http_request(server.http(), "POST", path, headers).status;
    };
    CHECK(with("Bearer 0123456789abcdeX") == 401);
    CHECK(with("Bearer 0123456789abcdef0") == 401);
    CHECK(with("0123456789abcdef") == 401);
    CHECK(with("Bearer 0123456789abcdef") == 200);
    CHECK(with("Bearer 0123456789abcdef", {"Host: evil.example"}) == 403);
    CHECK(with("Bearer 0123456789abcdef", {"Origin: http://evil.example"}) == 403);
    CHECK(with("Bearer 0123456789abcdef", {"Origin: http://" + server.http()}) == 200);
  }

  TEST_CASE(
      "another user of this machine cannot empty the cache, neither over TCP nor through the "
      "socket") {
    if (::geteuid() != 0) PEGA_SKIP("only root can act as another user");
    ServerProcess server;
    // Permissions that an operator may have opened by mistake: the user is rejected all the same.
    ::chmod(server.directory().c_str(), 0777);
    ::chmod(server.http_socket().c_str(), 0666);
    const std::string path = "/cache/memory/cleanup";
    {
      const Forked stranger([&]() {
        // A relative path needs no permission on the directories above, which belong to the runner.
        std::filesystem::current_path(server.directory());
        if (::setgid(65534) != 0 || ::setuid(65534) != 0) throw std::runtime_error("setuid");
        if (http_request(server.http(), "POST", path).status != 403) {
          throw std::runtime_error("POST over TCP was not rejected");
        }
        try {
          http_request("./" + std::filesystem::path(server.http_socket()).filename().string(),
                       "POST", path);
        } catch (const std::runtime_error& closed) {
          // Closed without a response, and not for want of a path to the socket.
          if (std::string(closed.what()).find("connect to") == std::string::npos) return;
          throw;
        }
        throw std::runtime_error("POST at the Unix socket was answered");
      });
    }
    CHECK(server.metric(R"(pegaflow_http_connections_closed_total{reason="user"})") == 1);
    CHECK(server.post(path).status == 200);
  }

  TEST_CASE(
      "the Unix socket has the same pages, belongs to its group, and is removed with the server") {
    ServerProcess server;
    CHECK(http_request(server.http_socket(), "GET", "/health").body == server.get("/health").body);
    CHECK(http_request(server.http_socket(), "GET", "/nothing").status == 404);
    struct stat made {};
    REQUIRE(::stat(server.http_socket().c_str(), &made) == 0);
    CHECK(S_ISSOCK(made.st_mode));
    CHECK((made.st_mode & 0777) == 0660);

    // The socket of a killed server is replaced.
    server.kill();
    CHECK(::stat(server.http_socket().c_str(), &made) == 0);
    server.start();
    CHECK(http_request(server.http_socket(), "GET", "/health").status == 200);

    CHECK(server.terminate() == 0);
    CHECK(::stat(server.http_socket().c_str(), &made) != 0);
  }

  TEST_CASE("128 clients that request pages and never read do not block /health for others") {
    ServerProcess server;
    std::string questions;
    for (int i = 0; i < 3000; ++i) questions += "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";
    std::vector<UniqueFd> clients;
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    to.sin_port = htons(
        static_cast<std::uint16_t>(std::stoi(server.http().substr(server.http().rfind(':') + 1))));
    for (int i = 0; i < 128; ++i) {
      UniqueFd& client = clients.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      const int small = 4096;
      ::setsockopt(client.get(), SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
      REQUIRE(::connect(client.get(), reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0);
      ::send(client.get(), questions.data(), questions.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    }

    for (int i = 0; i < 20; ++i) CHECK(server.get("/health").status == 200);

    clients.clear();
    while (server.get("/metrics").status != 200) {  // Until the last of their requests ends.
    }
    const double displaced =
        server.metric(R"(pegaflow_http_connections_closed_total{reason="displaced"})");
    CHECK(displaced >= 1);
    CHECK(server.metric("pegaflow_http_connections") <= 128);
  }

  TEST_CASE("the metrics name the eviction policy") {
    const auto policy = [](const ServerProcess& server) {
      const std::string page = server.get("/metrics").body;
      constexpr std::string_view kSample = "\npegaflow_eviction_info{policy=\"";
      const std::size_t begin = page.find(kSample);
      if (begin == std::string::npos) return std::string("none");
      return page.substr(begin + kSample.size(),
                         page.find('"', begin + kSample.size()) - begin - kSample.size());
    };
    CHECK(policy(ServerProcess()) == "weighted-lru");
    for (const char* const name : {"lru", "slru", "s3-fifo", "weighted-lru", "adaptive"}) {
      CHECK(policy(ServerProcess({.arguments = {"--eviction", name}})) == name);
    }
    CHECK(policy(ServerProcess({.arguments = {"--disable-lfu-admission"}})) == "lru");
  }

  TEST_CASE("every metric that dashboards and alerts use exists from the start") {
    ServerProcess server;
    const std::string page = "\n" + server.get("/metrics").body;

    for (const char* const name : {"pegaflow_load_bytes_total",
                                   "pegaflow_load_blocks_total{written_by=\"this_process\"}",
                                   "pegaflow_load_blocks_total{written_by=\"another_process\"}",
                                   "pegaflow_save_bytes_total",
                                   "pegaflow_cache_block_insertions_total",
                                   "pegaflow_cache_block_evictions_total",
                                   "pegaflow_cache_block_hits_total",
                                   "pegaflow_cache_block_misses_total",
                                   "pegaflow_cache_resident_bytes",
                                   "pegaflow_inflight_bytes",
                                   "pegaflow_pool_capacity_bytes",
                                   "pegaflow_pool_used_bytes",
                                   "pegaflow_quarantine_slots{reason=\"timeout\"}",
                                   "pegaflow_quarantine_slots{reason=\"writer_lost\"}",
                                   "pegaflow_quarantine_slots{reason=\"reader_lost\"}",
                                   "pegaflow_pins",
                                   "pegaflow_claims",
                                   "pegaflow_oldest_pin_seconds",
                                   "pegaflow_connections",
                                   "pegaflow_rpc_turn_seconds_count",
                                   "pegaflow_rpc_turn_seconds_bucket{le=\"0.0005\"}",
                                   "pegaflow_rpc_duration_seconds_count{method=\"lookup\"}"}) {
      INFO(name);
      CHECK(page.find("\n" + std::string(name) + " ") != std::string::npos);
    }
  }
}

}  // namespace
}  // namespace pegaflow::testing
