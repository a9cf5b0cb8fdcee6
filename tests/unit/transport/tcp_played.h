#pragma once
/// \file
/// Both ends of the socket lane, simulated byte by byte.

#include <cerrno>
#include <chrono>
#include <span>
#include <string>
#include <vector>

#include <sys/socket.h>

#include <doctest/doctest.h>

#include "base/os/unique_fd.h"
#include "tests/support/fabric_node.h"
#include "tests/support/shifted_clock.h"
#include "transport/checksum.h"
#include "transport/tcp/socket_address.h"
#include "transport/tcp/tcp_fabric.h"
#include "transport/tcp/wire.h"

namespace pegaflow::testing {

using tcp::Hello;
using tcp::Request;
using tcp::Response;
using tcp::Verdict;
using tcp::Welcome;

constexpr std::uint64_t kSeed = 7;

/// A blocking socket with a timeout.
class Played {
 public:
  explicit Played(UniqueFd socket) : socket_(std::move(socket)) {
    const timeval patience{.tv_sec = kHang.count(), .tv_usec = 0};
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  }
  static Played connect(const std::string& address) {
    const auto to = tcp::SocketAddress::parse(address).value();
    UniqueFd socket(::socket(to.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
    REQUIRE(::connect(socket.get(), to.data(), to.size()) == 0);
    return Played(std::move(socket));
  }
  template <typename Message>
  void send(const Message& message) const {
    (void)::send(socket_.get(), &message, sizeof message, MSG_NOSIGNAL);
  }
  /// Ignores errors: the other side may have closed.
  void send_bytes(std::span<const std::byte> bytes) const {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return;
      bytes = bytes.subspan(static_cast<std::size_t>(sent));
    }
  }
  void shrink_send_buffer() const {
    const int bytes = 4096;
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
  }
  /// Sends `bytes` repeatedly until the other side has read nothing for a moment, or `most` of
  /// them. Returns how many were sent.
  [[nodiscard]] std::size_t send_until_full(std::span<const std::byte> bytes,
                                            std::size_t most) const {
    const timeval patience{.tv_sec = 0, .tv_usec = 300000};
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    std::size_t sent = 0;
    while (sent < most) {
      const ssize_t part = ::send(socket_.get(), bytes.data() + sent % bytes.size(),
                                  bytes.size() - sent % bytes.size(), MSG_NOSIGNAL);
      if (part <= 0) break;
      sent += static_cast<std::size_t>(part);
    }
    return sent;
  }
  template <typename Message>
  Message receive() const {
    Message message;
    REQUIRE(::recv(socket_.get(), &message, sizeof message, MSG_WAITALL) ==
            static_cast<ssize_t>(sizeof message));
    return message;
  }
  /// Whether the other side closes before it sends anything more.
  [[nodiscard]] bool closed() const {
    char byte = 0;
    const ssize_t got = ::recv(socket_.get(), &byte, 1, 0);
    return got == 0 || (got < 0 && errno == ECONNRESET);
  }
  /// Reads this many bytes; false when the other side closes before.
  [[nodiscard]] bool receive_into(std::span<std::byte> bytes) const {
    return ::recv(socket_.get(), bytes.data(), bytes.size(), MSG_WAITALL) ==
           static_cast<ssize_t>(bytes.size());
  }

 private:
  UniqueFd socket_;
};

/// A simulated holder.
class PlayedHolder {
 public:
  PlayedHolder() {
    const auto at = tcp::SocketAddress::parse("127.0.0.1:0").value();
    listener_ = UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    REQUIRE(::bind(listener_.get(), at.data(), at.size()) == 0);
    REQUIRE(::listen(listener_.get(), 16) == 0);
    const timeval patience{.tv_sec = kHang.count(), .tv_usec = 0};
    ::setsockopt(listener_.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    fill_pattern(memory, kSeed);
  }
  [[nodiscard]] FabricDescriptor describe() const {
    const std::string text = to_string(tcp::SocketAddress::near_end(listener_.get()).value());
    const auto* const begin = reinterpret_cast<const std::byte*>(text.data());
    return {.backend = "tcp",
            .incarnation = self,
            .address = {begin, begin + text.size()},
            .regions = {{.region = RegionId{0}, .size_bytes = memory.size()}}};
  }
  [[nodiscard]] Played accept() const {
    UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    REQUIRE(socket);
    return Played(std::move(socket));
  }
  [[nodiscard]] Welcome welcome() const {
    return {.holder_high = self.high, .holder_low = self.low};
  }
  /// Accepts a connection and welcomes the reader.
  [[nodiscard]] Played greeted() const {
    Played connection = accept();
    (void)connection.receive<Hello>();
    connection.send(welcome());
    return connection;
  }
  [[nodiscard]] std::span<const std::byte> requested(const Request& request) const {
    return std::span(memory).subspan(request.offset, request.size_bytes);
  }
  [[nodiscard]] Response response_to(const Request& request) const {
    return {.request_id = request.request_id,
            .slot = request.slot,
            .size_bytes = request.size_bytes,
            .checksum = PageChecksum::of(requested(request))};
  }
  void serve(const Played& connection, const Request& request) const {
    connection.send(response_to(request));
    connection.send_bytes(requested(request));
  }

  Id128 self = Id128::random();
  std::vector<std::byte> memory = std::vector<std::byte>(1 << 20);

 private:
  UniqueFd listener_;
};

inline const SteadyClock kClock;

inline FabricNode::Make tcp_maker(const TcpFabric::Options& options, const Clock& clock = kClock) {
  return [options, &clock](Fabric::CompletionSink sink) -> std::unique_ptr<Fabric> {
    auto made = TcpFabric::create(options, clock, std::move(sink));
    REQUIRE_MESSAGE(made, to_string(made.error()));
    return std::move(*made);
  };
}

/// A real reader of a simulated holder, with one connection unless a test needs more, and pieces of
/// 4 KiB.
struct ReaderOfPlayed {
  explicit ReaderOfPlayed(TcpFabric::Options options = {}, unsigned connections = 1)
      : node(tcp_maker(
                 [&] {
                   options.connections = connections;
                   options.piece_bytes = 4096;
                   // No test depends on these timeouts unless it sets them.
                   if (options.stall_timeout == std::chrono::seconds(2))
                     options.stall_timeout = kHang;
                   if (options.connect_timeout == std::chrono::seconds(1))
                     options.connect_timeout = kHang;
                   return options;
                 }(),
                 clock),
             1 << 20, kSeed + 1) {
    peer = node.fabric->connect(holder.describe()).value();
  }
  void request(std::uint64_t ticket, std::vector<Fabric::Chunk> chunks,
               Fabric::Priority priority = Fabric::Priority::kForeground,
               TimePoint deadline = late()) {
    REQUIRE(node.fabric->read({.ticket = ticket,
                               .peer = peer,
                               .priority = priority,
                               .deadline = deadline,
                               .chunks = std::move(chunks)}));
  }
  [[nodiscard]] Fabric::Chunk page(std::uint64_t number, std::uint64_t pages = 1) const {
    return {.remote_region = RegionId{0},
            .remote_offset = number * 4096,
            .local_region = node.region,
            .local_offset = number * 4096,
            .size_bytes = pages * 4096};
  }
  [[nodiscard]] bool came(std::uint64_t number) const {
    const auto got = std::span(node.memory).subspan(number * 4096, 4096);
    const auto held = std::span(holder.memory).subspan(number * 4096, 4096);
    return std::equal(got.begin(), got.end(), held.begin());
  }

  /// Lets `time` pass for the reader.
  void pass(Duration time) {
    wait_for_iterations(*node.fabric);
    clock.advance(time);
    wait_for_iterations(*node.fabric);
  }

  ShiftedClock clock;
  PlayedHolder holder;
  FabricNode node;
  Fabric::PeerId peer{};
};

}  // namespace pegaflow::testing
