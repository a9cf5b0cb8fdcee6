// Members of nodes that live are not removed, whatever a reader knows of their leases.
#include <chrono>

#include <doctest/doctest.h>

#include "tests/unit/directory/agent_fixture.h"

namespace pegaflow::directory::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST_SUITE("live_members") {
  TEST_CASE("a node that joined after the leases were read keeps its members") {
    TestDirectory directory;
    TestNode reader = directory.node({.number = 1, .life = 1});
    directory.pass(milliseconds(100), {&reader});
    REQUIRE(reader.agent->is_usable());
    TestNode joined = directory.node({.number = 2, .life = 2});
    const auto keys = anchors_from(1, 64);
    joined.announce(keys);
    directory.pass(milliseconds(100), {&joined});
    REQUIRE(directory.members() == keys.size());

    // The reader has not read the leases again: it meets members of a number that it does not know.
    for (int i = 0; i < 32; ++i) reader.ask(keys);
    CHECK(directory.members() == keys.size());
    // And it has learned the lease meanwhile.
    CHECK(reader.ask(keys) == std::vector<std::uint64_t>{2});
  }

  TEST_CASE("a node that restarted under its number keeps its members, the former ones go") {
    TestDirectory directory;
    TestNode reader = directory.node({.number = 1, .life = 1});
    const auto keys = anchors_from(1, 64);
    {
      TestNode former = directory.node({.number = 2, .life = 2});
      former.announce(keys);
      directory.pass(milliseconds(100), {&reader, &former});
    }
    directory.pass(seconds(2), {&reader});
    REQUIRE(reader.ask(keys) == std::vector<std::uint64_t>{2});
    TestNode next = directory.node({.number = 2, .life = 3});
    next.announce(keys);
    directory.pass(milliseconds(100), {&next});
    REQUIRE(directory.members() == 2 * keys.size());

    for (int i = 0; i < 400; ++i) reader.ask(keys);
    CHECK(reader.ask(keys) == std::vector<std::uint64_t>{3});
    CHECK(directory.members() < 2 * keys.size());
    for (const BlockKey& key : keys) {
      const Anchor anchor = anchor_of(bytes_of(1), bytes_of(7), {}, key);
      bool is_there = false;
      for (const auto& [name, members] : directory.data[0].sets) {
        for (const std::string& member : members) {
          const auto one = member_of(member);
          is_there = is_there || (one && one->anchor == anchor && one->life == 3);
        }
      }
      CHECK(is_there);
    }
  }

  TEST_CASE("after an outage that is longer than a lease no node is taken for dead") {
    TestDirectory directory;
    TestNode reader = directory.node({.number = 1, .life = 1});
    TestNode owner = directory.node({.number = 2, .life = 2});
    const auto keys = anchors_from(1, 64);
    owner.announce(keys);
    directory.pass(seconds(3), {&reader, &owner});
    REQUIRE(reader.ask(keys) == std::vector<std::uint64_t>{2});

    directory.clock.advance(seconds(30));
    // The owner is back first; the reader has not read the leases yet.
    directory.pass(milliseconds(40), {&owner});
    CHECK_FALSE(reader.agent->is_usable());
    reader.ask(keys);
    CHECK(reader.found->result == Found::Result::kDown);
    CHECK(directory.members() == keys.size());
    directory.pass(milliseconds(40), {&reader});
    CHECK(reader.ask(keys) == std::vector<std::uint64_t>{2});
  }

  TEST_CASE("a node whose lease ran out while it stood still announces all of its anchors again") {
    TestDirectory directory;
    AgentOptions quiet;
    quiet.announcer.slow_rate = 0.001;  // The circle would heal it, too, but much later.
    TestNode reader = directory.node({.number = 1, .life = 1, .agent = quiet});
    TestNode owner = directory.node({.number = 2, .life = 2, .agent = quiet});
    const auto keys = anchors_from(1, 64);
    owner.announce(keys);
    directory.pass(seconds(3), {&reader, &owner});
    // The process is stopped for longer than its lease; others remove its members meanwhile.
    directory.pass(seconds(25), {&reader});
    for (int i = 0; i < 400; ++i) reader.ask(keys);
    REQUIRE(directory.members() < keys.size());

    directory.pass(seconds(4), {&owner, &reader});
    CHECK(directory.members() == keys.size());
    CHECK(reader.ask(keys) == std::vector<std::uint64_t>{2});
  }

  TEST_CASE("a server receives the lease of a node before its members") {
    TestDirectory directory;
    AgentOptions quiet;
    quiet.announcer.slow_rate = 0.001;  // Only what follows the loss is written.
    TestNode owner = directory.node({.number = 2, .life = 2, .agent = quiet});
    owner.announce(anchors_from(1, 64));
    directory.pass(seconds(1), {&owner});
    owner.forget_commands();
    directory.data[0] = Data();  // It is flushed.
    directory.pass(seconds(5), {&owner});

    bool has_lease = false;
    std::size_t members = 0;
    for (const auto& words : owner.servers[0]->done) {
      has_lease = has_lease || (words[0] == "SET" && words[1].starts_with("n:"));
      if (words[0] != "ZADD" || !words[1].starts_with("a:") || ++members > 1) continue;
      CHECK(has_lease);
    }
    CHECK(members >= 64);
  }

  TEST_CASE(
      "members and numbers of other lengths are removed, so that they hide no node for long") {
    TestDirectory directory;
    TestNode reader = directory.node({.number = 1, .life = 1});
    TestNode owner = directory.node({.number = 2, .life = 2});
    const auto keys = anchors_from(1, 2);
    owner.announce(keys);
    directory.pass(seconds(3), {&reader, &owner});
    for (const BlockKey& key : keys) {
      const Anchor anchor = anchor_of(bytes_of(1), bytes_of(7), {}, key);
      const std::string start = range_of(anchor).first.substr(1);
      for (char i = 0; i < 16; ++i) {
        directory.data[0].sets[bucket_of(anchor, 8)].insert(start + std::string(1, i));
      }
    }
    for (char i = 0; i < 16; ++i) directory.data[0].sets["n"].insert(std::string(3, i));
    CHECK(reader.ask(keys).empty());

    for (int i = 0; i < 400; ++i) reader.ask(keys);
    CHECK(reader.ask(keys) == std::vector<std::uint64_t>{2});
    directory.pass(seconds(60), {&reader, &owner});
    CHECK(directory.data[0].sets["n"].size() == 2);
  }
}

}  // namespace
}  // namespace pegaflow::directory::testing
