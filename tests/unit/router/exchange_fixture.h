#pragma once
/// \file
/// One request inside a router, between a client in memory and an engine behind a socket.

#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <boost/asio/awaitable.hpp>
#include <boost/asio/buffer.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>

#include "base/clock.h"
#include "base/log.h"
#include "router/request/access_record.h"
#include "router/request/client.h"
#include "router/request/client_request.h"
#include "router/request/client_wait.h"
#include "router/request/engine_needs.h"
#include "router/request/held_bodies.h"
#include "router/state/shared.h"
#include "router/upstream/engine_connections.h"

namespace pegaflow::router {

/// Keeps the log lines of a scope instead of printing them. One at a time.
class LogLines {
 public:
  LogLines() {
    all().clear();
    set_log_sink([](LogLevel, std::string_view line) { all().emplace_back(line); });
  }
  ~LogLines() { set_log_sink(nullptr); }
  LogLines(const LogLines&) = delete;
  LogLines& operator=(const LogLines&) = delete;

  static std::vector<std::string>& all() {
    static std::vector<std::string> lines;
    return lines;
  }
};

/// A client that keeps what it receives.
class MemoryClient final : public Client {
 public:
  using Client::send;
  boost::asio::awaitable<bool> send(std::string_view first, std::string_view second) override {
    received += first;
    received += second;
    co_return true;
  }
  void watch(std::function<void()>) override {}
  void unwatch() override {}
  [[nodiscard]] bool is_gone() const noexcept override { return false; }
  [[nodiscard]] std::string address() const override { return "127.0.0.1"; }
  void end_with_this_response() noexcept override { is_ended = true; }
  void release_body() noexcept override { is_body_released = true; }

  std::string received;
  bool is_ended = false;
  bool is_body_released = false;
};

/// Accepts one connection, reads one request to its end, and sends a response in two pieces.
class ScriptedEngine {
 public:
  /// `io` outlives the engine.
  explicit ScriptedEngine(boost::asio::io_context& io)
      : acceptor_(io, {boost::asio::ip::make_address("127.0.0.1"), 0}) {}

  [[nodiscard]] std::string url() const {
    return "http://127.0.0.1:" + std::to_string(acceptor_.local_endpoint().port());
  }

  /// Sends `first`, then `second`; closes the connection after it if `is_closing`.
  void respond(std::string first, std::string second, bool is_closing) {
    boost::asio::co_spawn(acceptor_.get_executor(),
                          serve(std::move(first), std::move(second), is_closing),
                          boost::asio::detached);
  }

  std::string request;

 private:
  boost::asio::awaitable<void> serve(std::string first, std::string second, bool is_closing) {
    namespace asio = boost::asio;
    auto socket = std::make_unique<asio::ip::tcp::socket>(
        co_await acceptor_.async_accept(asio::use_awaitable));
    socket->set_option(asio::ip::tcp::no_delay(true));
    std::array<char, 4096> part;
    while (!is_whole()) {
      const std::size_t size =
          co_await socket->async_read_some(asio::buffer(part), asio::use_awaitable);
      request.append(part.data(), size);
    }
    co_await asio::async_write(*socket, asio::buffer(first), asio::use_awaitable);
    // The router reads the first piece before it finds the second one.
    for (int i = 0; i < kTurns; ++i) co_await asio::post(asio::use_awaitable);
    if (!second.empty()) {
      co_await asio::async_write(*socket, asio::buffer(second), asio::use_awaitable);
    }
    if (!is_closing) kept_ = std::move(socket);
  }

  [[nodiscard]] bool is_whole() const {
    constexpr std::string_view kLength = "Content-Length: ";
    const std::size_t head = request.find("\r\n\r\n");
    if (head == std::string::npos) return false;
    const std::size_t at = request.find(kLength);
    return request.size() >= head + 4 + std::stoul(request.substr(at + kLength.size()));
  }

  static constexpr int kTurns = 8;

  boost::asio::ip::tcp::acceptor acceptor_;
  std::unique_ptr<boost::asio::ip::tcp::socket> kept_;
};

/// A router with one decode engine, and one request to it.
class ExchangeFixture {
 public:
  /// `is_http_10`: the client's response has no chunks.
  explicit ExchangeFixture(bool is_http_10)
      : engine(io),
        deadlines_(clock_, [](TimePoint) {}),
        connections_(io, deadlines_, {}),
        fleet_({},
               std::array<std::unique_ptr<Policy>, kRoleCount>{
                   std::move(make_policy("round-robin", 1).value()),
                   std::move(make_policy("round-robin", 1).value())},
               clock_),
        shared{.io = io,
               .options = options,
               .fleet = fleet_,
               .engine_connections = connections_,
               .deadlines = deadlines_,
               .random = std::mt19937_64(1)},
        head_{.method = "POST",
              .target = "/v1/completions",
              .is_http_10 = is_http_10,
              .fields = {{"X-Request-Id", "the-request"}}},
        record{.began = shared.now()},
        request(client, shared, head_, record),
        needs(request),
        wait(request),
        bodies(request) {
    options.retry_delay = Duration::zero();
    fleet_.set(EngineList::parse("decode " + engine.url()).value());
    for (const auto& each : fleet_.engines()) each->is_up = true;
  }

  boost::asio::io_context io;
  ScriptedEngine engine;
  RouterOptions options;
  MemoryClient client;

 private:
  SteadyClock clock_;
  Deadlines deadlines_;
  EngineConnections connections_;
  Fleet fleet_;

 public:
  Shared shared;

 private:
  RequestHead head_;

 public:
  AccessRecord record;
  ClientRequest request;
  EngineNeeds needs;
  ClientWait wait;
  HeldBodies bodies;
};

}  // namespace pegaflow::router
