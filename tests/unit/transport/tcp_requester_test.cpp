// How far the reader's end of one connection requests ahead.

#include <array>
#include <chrono>
#include <cstddef>
#include <deque>
#include <vector>

#include <sys/socket.h>

#include <doctest/doctest.h>

#include "base/os/unique_fd.h"
#include "transport/checksum.h"
#include "transport/tcp/requester.h"

namespace pegaflow::tcp {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kPiece = 4096;
constexpr Id128 kHolder{11, 22};

/// A connection with a simulated holder, and a clock that the test advances.
struct Bench {
  explicit Bench(const Requester::Window& window) {
    int fds[2] = {-1, -1};
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) == 0);
    holder = UniqueFd(fds[1]);
    requester.emplace(UniqueFd(fds[0]), kHolder, window, now);
    REQUIRE(requester->send_requests());
    Hello hello;
    REQUIRE(::recv(holder.get(), &hello, sizeof hello, 0) == sizeof hello);
    send_message(Welcome{.holder_high = kHolder.high, .holder_low = kHolder.low});
    take();
    REQUIRE(requester->greeted());
  }

  template <typename Message>
  void send_message(const Message& message) const {
    REQUIRE(::send(holder.get(), &message, sizeof message, 0) == sizeof message);
  }
  void take() {
    REQUIRE(
        requester->receive(now, [](const Piece&, std::optional<Errc> error) { CHECK(!error); }));
  }

  /// Requests as many pieces as there is room for; returns their number.
  std::size_t request_all() {
    std::size_t requested = 0;
    for (; requester->has_room(kPiece, false); ++requested)
      requester->request({.place = place}, now);
    REQUIRE(requester->send_requests());
    for (std::size_t i = 0; i < requested; ++i) {
      Request request;
      REQUIRE(::recv(holder.get(), &request, sizeof request, 0) == sizeof request);
      open.push_back(request);
    }
    return requested;
  }
  /// Sends that many responses from the holder.
  void respond(std::size_t count) {
    for (; count > 0; --count) {
      const Request request = open.front();
      open.pop_front();
      send_message(Response{.request_id = request.request_id,
                            .slot = request.slot,
                            .size_bytes = kPiece,
                            .checksum = PageChecksum::of(place)});
      send_message(place);
    }
    take();
  }
  /// Requests all that there is room for, with the responses one round trip later.
  void round(Duration round_trip) {
    request_all();
    now += round_trip;
    respond(open.size());
  }

  TimePoint now{1h};
  std::array<std::byte, kPiece> place{};
  UniqueFd holder;
  std::optional<Requester> requester;
  std::deque<Request> open;
};

constexpr Requester::Window kWindow{
    .pieces = 64, .bytes = 16 * kPiece, .least_bytes = 4 * kPiece, .group_bytes = 2 * kPiece};

TEST_SUITE("the socket lane requests ahead") {
  TEST_CASE("the least window at first, and more when a group of it has arrived") {
    Bench bench(kWindow);
    CHECK(bench.request_all() == 4);

    bench.respond(1);
    CHECK(bench.request_all() == 0);
    bench.respond(1);
    CHECK(bench.request_all() == 2);
  }

  TEST_CASE("more on a long path, but never more than the window") {
    Bench bench(kWindow);
    for (int i = 0; i < 4; ++i) bench.round(10ms);
    CHECK(bench.request_all() == 8);
    bench.now += 10ms;
    bench.respond(8);

    for (int i = 0; i < 40; ++i) bench.round(10ms);
    CHECK(bench.requester->window_bytes() == 16 * kPiece);
    CHECK(bench.request_all() == 16);
  }

  TEST_CASE("less again when the path gets slow, but at least the least window") {
    Bench bench(kWindow);
    for (int i = 0; i < 40; ++i) bench.round(10ms);

    for (int i = 0; i < 10; ++i) bench.round(1s);

    CHECK(bench.requester->window_bytes() == 4 * kPiece);
  }

  TEST_CASE("as much as before after a pause") {
    Bench bench(kWindow);
    for (int i = 0; i < 40; ++i) bench.round(10ms);

    for (int i = 0; i < 8; ++i) {
      bench.now += 1h;
      bench.round(10ms);
    }

    CHECK(bench.requester->window_bytes() == 16 * kPiece);
  }

  TEST_CASE("one piece, however large it is") {
    Bench bench({.pieces = 4, .bytes = kPiece / 2, .least_bytes = kPiece / 2, .group_bytes = 1});
    CHECK(bench.request_all() == 1);
    bench.respond(1);
    CHECK(bench.request_all() == 1);
  }
}

}  // namespace
}  // namespace pegaflow::tcp
