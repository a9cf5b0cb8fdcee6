#include "server/http/http_server.h"

#include <cerrno>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "base/os/unique_fd.h"
#include "tests/support/patience.h"
#include "tests/support/server_process.h"

namespace pegaflow::server {
namespace {

struct Fixture {
  explicit Fixture(HttpServer::Options options = {}) {
    auto listener = listen_tcp("127.0.0.1:0", "--http-addr");
    REQUIRE(listener);
    address = listener->address;
    options.health = {
        .is_ok = false, .status = "preparing the pool", .pool_bytes = 4096, .done_bytes = 0};
    auto started =
        HttpServer::start(std::move(*listener), std::nullopt, std::move(options), questions);
    REQUIRE(started);
    server = std::move(*started);
  }
  [[nodiscard]] int health() const {
    return testing::http_request(address, "GET", "/health").status;
  }

  /// The questions that the RPC thread would find, once there is one.
  std::vector<AdminQuestion> wait_for_questions() {
    pollfd wanted{questions.fd(), POLLIN, 0};
    ::poll(&wanted, 1, std::chrono::milliseconds(testing::kHang).count());
    std::vector<AdminQuestion> found;
    questions.drain([&](AdminQuestion&& each) { found.push_back(each); });
    return found;
  }

  Mailbox<AdminQuestion> questions{2 * HttpServer::kQuestions};
  std::string address;
  std::unique_ptr<HttpServer> server;
};

/// A client with little room for what it does not read.
UniqueFd connect_to(const std::string& address) {
  UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int small = 4096;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port =
      htons(static_cast<std::uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  REQUIRE(::connect(fd.get(), reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0);
  return fd;
}

/// Sends `count` requests for /metrics at once.
void ask_for_pages(const UniqueFd& client, int count) {
  std::string requests;
  for (int i = 0; i < count; ++i) requests += "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";
  const ssize_t sent = ::send(client.get(), requests.data(), requests.size(), MSG_NOSIGNAL);
  REQUIRE(sent == static_cast<ssize_t>(requests.size()));
}

/// Sends requests and reads nothing, until the server closes the connection; false at the limit.
bool is_closed_while_asking(const UniqueFd& client) {
  const std::string request = "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n";
  const auto end = std::chrono::steady_clock::now() + testing::kHang;
  while (std::chrono::steady_clock::now() < end) {
    const ssize_t sent =
        ::send(client.get(), request.data(), request.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) continue;
    if (errno != EAGAIN) return true;
    pollfd wanted{client.get(), POLLOUT, 0};
    ::poll(&wanted, 1, std::chrono::milliseconds(testing::kHang).count());
    if ((wanted.revents & (POLLHUP | POLLERR)) != 0) return true;
  }
  return false;
}

TEST_SUITE("HttpServer") {
  TEST_CASE("/health before the first publish has the initial health") {
    const Fixture f;

    const auto response = testing::http_request(f.address, "GET", "/health");

    CHECK(response.status == 503);
    const auto body = nlohmann::json::parse(response.body);
    CHECK(body.at("status") == "preparing the pool");
    CHECK(body.at("pool_bytes") == 4096);
  }

  TEST_CASE("a client that sends requests and does not read loses its connection") {
    HttpServer::Options options;
    options.connections.take_timeout = std::chrono::milliseconds(50);
    const Fixture f(std::move(options));
    const UniqueFd client = connect_to(f.address);

    CHECK(is_closed_while_asking(client));
    CHECK(f.health() == 503);
  }

  TEST_CASE("with all places taken by silent clients the oldest makes room, and /health answers") {
    HttpServer::Options options;
    options.connections.places = 2;
    const Fixture f(std::move(options));
    const UniqueFd oldest = connect_to(f.address);
    const UniqueFd other = connect_to(f.address);

    CHECK(f.health() == 503);

    char byte = 0;
    CHECK(::recv(oldest.get(), &byte, 1, 0) == 0);
    CHECK(::recv(other.get(), &byte, 1, MSG_DONTWAIT) == -1);
    CHECK(errno == EAGAIN);
  }

  TEST_CASE("pages are made one at a time, and /health waits for none of them") {
    constexpr int kClients = 16;
    constexpr int kPages = 20;
    Fixture f;
    f.server->publish_health({.is_ok = true, .status = "ok"});
    std::vector<UniqueFd> clients;
    for (int i = 0; i < kClients; ++i) {
      clients.push_back(connect_to(f.address));
      ask_for_pages(clients.back(), kPages);
    }

    for (int page = 0; page < kClients * kPages; ++page) {
      const std::vector<AdminQuestion> asked = f.wait_for_questions();
      REQUIRE(asked.size() == 1);
      // Every connection has been read by now, and the RPC thread has not answered.
      if (page % 32 == 0) CHECK(f.health() == 200);
      HttpNews answer;
      answer.ticket = asked[0].ticket;
      REQUIRE(f.server->publish(std::move(answer)));
    }
    CHECK(f.health() == 200);
  }

  TEST_CASE("with a page pending on every connection /health is answered") {
    HttpServer::Options options;
    options.connections.places = 4;
    Fixture f(std::move(options));
    f.server->publish_health({.is_ok = true, .status = "ok"});
    std::vector<UniqueFd> clients;
    for (int i = 0; i < 4; ++i) {
      clients.push_back(connect_to(f.address));
      ask_for_pages(clients.back(), 1);
    }
    CHECK(f.wait_for_questions().size() == 1);

    CHECK(f.health() == 200);
  }

  TEST_CASE("health that changes faster than it is read takes no place of an answer") {
    auto listener = listen_tcp("127.0.0.1:0", "--http-addr");
    REQUIRE(listener);
    const std::string address = listener->address;
    Mailbox<AdminQuestion> questions(1);
    const auto server = HttpServer::start(std::move(*listener), std::nullopt, {}, questions);
    REQUIRE(server);

    // Each burst is longer than the mailbox, and sent faster than its reader can empty it.
    for (int burst = 0; burst < 20; ++burst) {
      for (int i = 0; i < 2000; ++i) {
        (*server)->publish_health({.is_ok = false, .status = std::to_string(i)});
      }
      HttpNews answer;
      answer.ticket = 1;
      REQUIRE((*server)->publish(std::move(answer)));
    }

    (*server)->publish_health({.is_ok = true, .status = "the last"});
    const auto response = testing::http_request(address, "GET", "/health");
    CHECK(nlohmann::json::parse(response.body).at("status") == "the last");
  }
}

}  // namespace
}  // namespace pegaflow::server
