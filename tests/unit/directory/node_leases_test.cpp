#include "directory/node_leases.h"

#include <algorithm>
#include <chrono>

#include <doctest/doctest.h>

#include "tests/unit/directory/agent_fixture.h"

namespace pegaflow::directory::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// The commands that read leases fail with that reply.
std::function<std::optional<Reply>(const MemoryServer::Words&)> failing(std::string command,
                                                                        Reply reply) {
  return [command = std::move(command),
          reply = std::move(reply)](const MemoryServer::Words& words) -> std::optional<Reply> {
    if (words[0] != command || (command == "ZRANGEBYLEX" && words[1] != "n")) return {};
    return reply;
  };
}

TEST_SUITE("node_leases") {
  TEST_CASE("leases that cannot be read make no node dead") {
    TestDirectory directory;
    AgentOptions quiet;
    quiet.announcer.slow_rate = 0.001;
    TestNode reader = directory.node({.number = 1, .life = 1, .agent = quiet});
    TestNode owner = directory.node({.number = 2, .life = 2, .agent = quiet});
    const auto keys = anchors_from(1, 64);
    owner.announce(keys);
    directory.pass(seconds(3), {&reader, &owner});
    REQUIRE(reader.ask(keys) == std::vector<std::uint64_t>{2});

    MemoryServer& server = *reader.servers[0];
    SUBCASE("an error") { server.faults = failing("MGET", error("ERR no")); }
    SUBCASE("fewer leases than were asked for") {
      server.faults = failing("MGET", {.kind = Reply::Kind::kArray, .text = {}, .items = {}});
    }
    SUBCASE("another type") { server.faults = failing("MGET", integer(7)); }
    SUBCASE("no list of nodes") { server.faults = failing("ZRANGEBYLEX", error("WRONGTYPE")); }
    for (int i = 0; i < 30; ++i) {
      directory.pass(seconds(1), {&reader, &owner});
      const auto found = reader.ask(keys);
      // The owner is known, or nothing is said.
      CHECK(
          (found == std::vector<std::uint64_t>{2} || reader.found->result == Found::Result::kDown));
    }
    CHECK_FALSE(reader.agent->is_usable());
    CHECK(directory.members() == keys.size());
    server.faults = nullptr;
    directory.pass(seconds(4), {&reader, &owner});
    CHECK(reader.ask(keys) == std::vector<std::uint64_t>{2});
  }

  TEST_CASE("a connection that breaks in the middle of a refresh delays it, and ends nothing") {
    TestDirectory directory;
    TestNode reader = directory.node({.number = 1, .life = 1});
    TestNode owner = directory.node({.number = 2, .life = 2});
    directory.pass(seconds(3), {&reader, &owner});
    for (int i = 0; i < 20; ++i) {
      directory.clock.advance(milliseconds(500));
      owner.step();
      reader.agent->step();
      reader.servers[0]->run(static_cast<std::size_t>(i % 4));
      reader.servers[0]->lose();
    }
    directory.pass(seconds(4), {&reader, &owner});
    CHECK(reader.agent->is_usable());
    CHECK(reader.agent->stats().nodes == 2);
  }

  TEST_CASE("two nodes that take one number at once have two numbers after their renewals") {
    TestDirectory directory;
    // Of these addresses both have the same first number.
    unsigned other = 0;
    const auto number_of = [](unsigned node) {
      const std::string text =
          seal(Bytes32{}, "number 1", fmt::format("10.0.0.{}:50055", node) + '\0' + "0");
      return text.substr(text.size() - 2);
    };
    unsigned first = 1;
    for (; other == 0; ++first) {
      for (unsigned candidate = first + 1; candidate < 4000 && other == 0; ++candidate) {
        if (number_of(first) == number_of(candidate)) other = candidate;
      }
      if (other != 0) break;
    }
    TestNode a = directory.node({.number = first, .life = 1});
    TestNode b = directory.node({.number = other, .life = 2});
    const auto keys_a = anchors_from(1, 64);
    const auto keys_b = anchors_from(2, 64);
    a.announce(keys_a);
    b.announce(keys_b);
    // Both have read that the number is free before one of them writes its lease.
    for (TestNode* const node : {&a, &b}) {
      node->agent->step();
      node->servers[0]->run();
      node->agent->step();
    }
    directory.pass(seconds(8), {&a, &b});

    CHECK(a.agent->stats().conflicts + b.agent->stats().conflicts == 1);
    CHECK(a.agent->stats().nodes == 2);
    CHECK(b.ask(keys_a) == std::vector<std::uint64_t>{1});
    CHECK(a.ask(keys_b) == std::vector<std::uint64_t>{2});
    directory.pass(seconds(30), {&a, &b});
    CHECK(b.ask(keys_a) == std::vector<std::uint64_t>{1});
    CHECK(a.ask(keys_b) == std::vector<std::uint64_t>{2});
  }

  TEST_CASE("another node with the same address is counted, and a former process is not") {
    TestDirectory directory;
    {
      TestNode former = directory.node({.number = 1, .life = 1});
      directory.pass(seconds(1), {&former});
    }
    TestNode node = directory.node({.number = 1, .life = 2});
    directory.pass(seconds(10), {&node});
    CHECK(node.agent->stats().conflicts == 0);
    TestNode twin = directory.node({.number = 1, .life = 3});
    directory.pass(seconds(10), {&node, &twin});
    CHECK(node.agent->stats().conflicts > 0);
    CHECK(node.agent->stats().rebuilds <= 1);
  }

  TEST_CASE("a server that takes no writes receives no members until it takes a lease") {
    TestDirectory directory;
    TestNode node = directory.node({.number = 1, .life = 1});
    const auto keys = anchors_from(1, 3000);
    node.announce(keys);
    std::string why;
    SUBCASE("it is full") { why = "OOM command not allowed when used memory > 'maxmemory'."; }
    SUBCASE("it is a replica") { why = "READONLY You can't write against a read only replica."; }
    SUBCASE("the user may not") { why = "NOPERM this user has no permissions"; }
    node.servers[0]->faults = [&why](const MemoryServer::Words& words) -> std::optional<Reply> {
      if (words[0] != "SET" && words[0] != "ZADD") return {};
      if (words[1] == "g") return {};
      return error(why);
    };
    directory.pass(seconds(30), {&node});
    CHECK(node.count("ZADD", "a:") < 30);
    CHECK(node.count("SET", "n:") >= 9);

    node.servers[0]->faults = nullptr;
    directory.pass(seconds(5), {&node});
    CHECK(directory.members() == keys.size());
  }

  TEST_CASE("leases are extended at a server that is full, and what it has is found") {
    TestDirectory directory;
    TestNode reader = directory.node({.number = 1, .life = 1});
    TestNode owner = directory.node({.number = 2, .life = 2});
    const auto keys = anchors_from(1, 64);
    owner.announce(keys);
    reader.announce(keys);
    directory.pass(seconds(3), {&reader, &owner});
    REQUIRE(reader.ask(keys) == std::vector<std::uint64_t>{2});

    for (TestNode* const node : {&reader, &owner}) {
      node->servers[0]->faults = [](const MemoryServer::Words& words) -> std::optional<Reply> {
        if (words[0] != "SET" && words[0] != "ZADD") return {};
        return error("OOM command not allowed when used memory > 'maxmemory'.");
      };
      node->forget_commands();
    }
    for (int i = 0; i < 60; ++i) {
      directory.pass(seconds(1), {&reader, &owner});
      CHECK(reader.ask(keys) == std::vector<std::uint64_t>{2});
    }
    CHECK(reader.agent->stats().nodes == 2);
    CHECK(directory.members() == 2 * keys.size());
    // One renewal in three seconds; no anchor is written before the server takes the node's number.
    CHECK(owner.count("PEXPIRE", "n:") >= 19);
    CHECK(owner.count("ZADD", "a:") <= 64);

    const auto more = anchors_from(2, 64);
    owner.announce(more);
    directory.pass(seconds(5), {&reader, &owner});
    for (TestNode* const node : {&reader, &owner}) node->servers[0]->faults = nullptr;
    directory.pass(seconds(5), {&reader, &owner});
    CHECK(reader.ask(more) == std::vector<std::uint64_t>{2});
    CHECK(reader.agent->stats().repaired == 0);
  }

  TEST_CASE("a user without PEXPIRE has leases, too") {
    TestDirectory directory;
    TestNode reader = directory.node({.number = 1, .life = 1});
    TestNode owner = directory.node({.number = 2, .life = 2});
    for (TestNode* const node : {&reader, &owner}) {
      node->servers[0]->faults = failing("PEXPIRE", error("NOPERM this user has no permissions"));
    }
    const auto keys = anchors_from(1, 64);
    owner.announce(keys);
    directory.pass(seconds(3), {&reader, &owner});
    for (int i = 0; i < 30; ++i) {
      directory.pass(seconds(1), {&reader, &owner});
      CHECK(reader.ask(keys) == std::vector<std::uint64_t>{2});
    }
    CHECK(owner.count("PEXPIRE") == 1);
    CHECK(owner.agent->stats().errors == 0);
    CHECK(owner.agent->stats().rebuilds <= 1);
  }

  TEST_CASE("a node that knows no lease of another says so") {
    TestDirectory directory;
    TestNode node = directory.node({.number = 1, .life = 1});
    const auto keys = anchors_from(1, 64);
    directory.pass(seconds(3), {&node});
    CHECK(node.ask(keys).empty());
    CHECK(node.found->is_alone);
    TestNode other = directory.node({.number = 2, .life = 2});
    directory.pass(seconds(3), {&node, &other});
    CHECK(node.ask(keys).empty());
    CHECK_FALSE(node.found->is_alone);
    directory.pass(seconds(30), {&node});
    CHECK(node.ask(keys).empty());
    CHECK(node.found->is_alone);
  }

  TEST_CASE("numbers of others are removed only while a server has few open commands") {
    TestDirectory directory;
    TestNode node = directory.node({.number = 1, .life = 1});
    directory.pass(seconds(3), {&node});
    for (unsigned i = 0; i < 65536; ++i) {
      const std::string number{static_cast<char>(i >> 8), static_cast<char>(i)};
      directory.data[0].sets["n"].insert(number + "foreign");
    }
    std::size_t most = 0;
    for (int i = 0; i < 300; ++i) {
      node.agent->step();
      // One answer at a time, so that what it causes is seen.
      while (node.servers[0]->open() != 0) {
        node.servers[0]->run(1);
        most = std::max(most, node.servers[0]->open());
      }
      directory.clock.advance(milliseconds(20));
    }
    CHECK(most > 100);
    CHECK(most < 600);
    CHECK(node.count("ZREM", "n") > 100);
  }
}

}  // namespace
}  // namespace pegaflow::directory::testing
