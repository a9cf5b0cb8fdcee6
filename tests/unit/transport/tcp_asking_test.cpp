// How far the reader's end of one connection asks ahead.

#include <array>
#include <chrono>
#include <cstddef>
#include <deque>
#include <vector>

#include <sys/socket.h>

#include <doctest/doctest.h>

#include "base/os/unique_fd.h"
#include "transport/checksum.h"
#include "transport/tcp/asking.h"

namespace pegaflow::tcp {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kPiece = 4096;
constexpr Id128 kHolder{11, 22};

/// A connection whose other end is played, and a clock that is pushed on.
struct Bench {
  explicit Bench(const Asking::Window& window) {
    int fds[2] = {-1, -1};
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) == 0);
    holder = UniqueFd(fds[1]);
    asking.emplace(UniqueFd(fds[0]), kHolder, window, now);
    REQUIRE(asking->send_questions());
    Hello hello;
    REQUIRE(::recv(holder.get(), &hello, sizeof hello, 0) == sizeof hello);
    say(Welcome{.holder_high = kHolder.high, .holder_low = kHolder.low});
    take();
    REQUIRE(asking->greeted());
  }

  template <typename Message>
  void say(const Message& message) const {
    REQUIRE(::send(holder.get(), &message, sizeof message, 0) == sizeof message);
  }
  void take() {
    REQUIRE(asking->receive(now, [](const Piece&, std::optional<Errc> error) { CHECK(!error); }));
  }

  /// Asks for as much as there is room for; how many pieces.
  std::size_t ask_all() {
    std::size_t asked = 0;
    for (; asking->has_room(kPiece, false); ++asked) asking->ask({.place = place}, now);
    REQUIRE(asking->send_questions());
    for (std::size_t i = 0; i < asked; ++i) {
      Ask ask;
      REQUIRE(::recv(holder.get(), &ask, sizeof ask, 0) == sizeof ask);
      open.push_back(ask);
    }
    return asked;
  }
  /// The holder answers that many.
  void answer(std::size_t count) {
    for (; count > 0; --count) {
      const Ask ask = open.front();
      open.pop_front();
      say(Answer{.question = ask.question,
                 .slot = ask.slot,
                 .size_bytes = kPiece,
                 .checksum = PageChecksum::of(place)});
      say(place);
    }
    take();
  }
  /// All that there is room for, a round trip later.
  void round(Duration round_trip) {
    ask_all();
    now += round_trip;
    answer(open.size());
  }

  TimePoint now{1h};
  std::array<std::byte, kPiece> place{};
  UniqueFd holder;
  std::optional<Asking> asking;
  std::deque<Ask> open;
};

constexpr Asking::Window kWindow{
    .pieces = 64, .bytes = 16 * kPiece, .least_bytes = 4 * kPiece, .group_bytes = 2 * kPiece};

TEST_SUITE("the socket lane asks ahead") {
  TEST_CASE("for the least window at first, and again when a group of it is there") {
    Bench bench(kWindow);
    CHECK(bench.ask_all() == 4);

    bench.answer(1);
    CHECK(bench.ask_all() == 0);
    bench.answer(1);
    CHECK(bench.ask_all() == 2);
  }

  TEST_CASE("for more where the way is long, and never for more than the window") {
    Bench bench(kWindow);
    for (int i = 0; i < 4; ++i) bench.round(10ms);
    CHECK(bench.ask_all() == 8);
    bench.now += 10ms;
    bench.answer(8);

    for (int i = 0; i < 40; ++i) bench.round(10ms);
    CHECK(bench.asking->window_bytes() == 16 * kPiece);
    CHECK(bench.ask_all() == 16);
  }

  TEST_CASE("for less again when the way gets slow, but for the least window") {
    Bench bench(kWindow);
    for (int i = 0; i < 40; ++i) bench.round(10ms);

    for (int i = 0; i < 10; ++i) bench.round(1s);

    CHECK(bench.asking->window_bytes() == 4 * kPiece);
  }

  TEST_CASE("for as much as before after a rest") {
    Bench bench(kWindow);
    for (int i = 0; i < 40; ++i) bench.round(10ms);

    for (int i = 0; i < 8; ++i) {
      bench.now += 1h;
      bench.round(10ms);
    }

    CHECK(bench.asking->window_bytes() == 16 * kPiece);
  }

  TEST_CASE("for one piece, however large it is") {
    Bench bench({.pieces = 4, .bytes = kPiece / 2, .least_bytes = kPiece / 2, .group_bytes = 1});
    CHECK(bench.ask_all() == 1);
    bench.answer(1);
    CHECK(bench.ask_all() == 1);
  }
}

}  // namespace
}  // namespace pegaflow::tcp
