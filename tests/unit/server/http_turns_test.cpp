#include "server/http/http_turns.h"

#include <cstddef>
#include <vector>

#include <doctest/doctest.h>

namespace pegaflow::server {
namespace {

struct Fixture {
  kj::EventLoop loop;
  kj::WaitScope scope{loop};
  HttpTurns turns;
};

TEST_SUITE("HttpTurns") {
  TEST_CASE("turns are taken one at a time, first come, first served") {
    Fixture f;
    std::vector<kj::Promise<kj::Own<HttpTurns::Turn>>> clients;
    for (int i = 0; i < 100; ++i) clients.push_back(f.turns.next());
    CHECK(f.turns.waiting() == 99);

    for (std::size_t i = 0; i < clients.size(); ++i) {
      REQUIRE(clients[i].poll(f.scope));
      if (i + 1 < clients.size()) CHECK_FALSE(clients[i + 1].poll(f.scope));
      const auto turn = clients[i].wait(f.scope);
      CHECK(f.turns.waiting() == clients.size() - 1 - i);
    }

    CHECK(f.turns.waiting() == 0);
    CHECK(f.turns.next().poll(f.scope));
  }

  TEST_CASE("a client that disconnects, with its turn or before it, delays no other client") {
    Fixture f;
    auto with_turn = kj::heap(f.turns.next());
    auto waiting = kj::heap(f.turns.next());
    auto granted = kj::heap(f.turns.next());
    auto last = f.turns.next();

    waiting = nullptr;
    CHECK(f.turns.waiting() == 2);
    with_turn = nullptr;  // Its turn passes to `granted`, which is dropped before it looks.
    CHECK(f.turns.waiting() == 1);
    CHECK_FALSE(last.poll(f.scope));
    granted = nullptr;

    CHECK(last.poll(f.scope));
  }
}

}  // namespace
}  // namespace pegaflow::server
