// What a node writes about its anchors is bounded, and says in the end what it has.
#include "directory/announcer.h"

#include <chrono>
#include <random>

#include <doctest/doctest.h>

#include "tests/support/seed.h"
#include "tests/unit/directory/agent_fixture.h"

namespace pegaflow::directory::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// Without the circle, which would hide what is missing.
AgentOptions quiet() {
  AgentOptions options;
  options.announcer.slow_rate = 0.001;
  return options;
}

/// The anchors of a node that the servers have.
std::size_t stored(const TestDirectory& directory, const std::vector<BlockKey>& keys,
                   unsigned secret = 1) {
  std::size_t found = 0;
  for (const BlockKey& key : keys) {
    const Anchor anchor = anchor_of(bytes_of(secret), bytes_of(7), {}, key);
    const std::string start = range_of(anchor).first.substr(1);
    for (const Data& data : directory.data) {
      const auto bucket = data.sets.find(bucket_of(anchor, 8));
      if (bucket == data.sets.end()) continue;
      const auto member = bucket->second.lower_bound(start);
      if (member != bucket->second.end() && member->starts_with(start)) ++found;
    }
  }
  return found;
}

TEST_SUITE("announcer") {
  TEST_CASE("writes to a server that takes none are bounded, and nothing is missing afterwards") {
    TestDirectory directory;
    AgentOptions options = quiet();
    options.announcer.most_writes = 256;
    TestNode node = directory.node({.number = 1, .agent = options});
    directory.pass(seconds(1), {&node});
    const auto kept = anchors_from(1, 3000);
    const auto evicted = anchors_from(2, 3000);

    for (std::size_t i = 0; i < kept.size(); ++i) {
      node.announce({evicted[i], kept[i]});
      if (i >= 100) node.announce({evicted[i - 100]}, false);
      if (i % 64 != 0) continue;
      node.agent->step();  // The server answers nothing.
      directory.clock.advance(milliseconds(20));
      CHECK(node.agent->stats().pending <= 256);
    }
    node.announce(evicted, false);
    directory.pass(seconds(4), {&node});
    CHECK(node.agent->stats().pending == 0);
    CHECK(node.agent->stats().anchors == kept.size());
    CHECK(node.agent->stats().dropped > 0);
    CHECK(stored(directory, kept) == kept.size());
  }

  TEST_CASE("after an overrun only what differs is written") {
    TestDirectory directory;
    TestNode node = directory.node({.number = 1, .agent = quiet()});
    const auto same = anchors_from(1, 2000);
    const auto gone = anchors_from(2, 40);
    const auto fresh = anchors_from(3, 30);
    node.announce(same);
    node.announce(gone);
    directory.pass(seconds(2), {&node});
    REQUIRE(directory.members() == same.size() + gone.size());
    node.forget_commands();

    node.agent->take({.kind = Announcement::Kind::kStartOver});
    node.announce(fresh);
    node.announce(same);
    directory.pass(seconds(1), {&node});
    // Before all are listed nothing is missing there.
    CHECK(directory.members() == same.size() + gone.size() + fresh.size());
    node.agent->take({.kind = Announcement::Kind::kListed});
    directory.pass(seconds(2), {&node});
    CHECK(stored(directory, same) == same.size());
    CHECK(stored(directory, fresh) == fresh.size());
    CHECK(stored(directory, gone) == 0);
    CHECK(node.count("ZADD", "a:") == fresh.size());
    CHECK(node.count("ZREM", "a:") == gone.size());
  }

  TEST_CASE("with another secret the former names are removed, some with each step") {
    TestDirectory directory;
    TestNode node = directory.node({.number = 1, .agent = quiet()});
    const auto keys = anchors_from(1, 40'000);
    node.announce(keys);
    directory.pass(seconds(12), {&node});
    REQUIRE(directory.members() == keys.size());

    node.agent->set_keys({.anchors = bytes_of(2), .all = {bytes_of(2), bytes_of(1)}});
    node.agent->take({.kind = Announcement::Kind::kStartOver});
    node.announce(keys);
    node.agent->take({.kind = Announcement::Kind::kListed});
    directory.pass(seconds(20), {&node});
    CHECK(stored(directory, keys, 2) == keys.size());
    CHECK(stored(directory, keys, 1) == 0);
    CHECK(node.agent->stats().anchors == keys.size());
  }

  TEST_CASE("a server that loses its data again and again does not keep others from theirs") {
    TestDirectory directory(2);
    AgentOptions options = quiet();
    options.announcer.fast_rate = 500;
    TestNode node = directory.node({.number = 1, .agent = options});
    const auto keys = anchors_from(1, 4000);
    node.announce(keys);
    directory.pass(seconds(12), {&node});
    const std::size_t all = directory.data[1].members();
    REQUIRE(directory.members() == keys.size());

    directory.data[1] = Data();
    for (int i = 0; i < 60; ++i) {
      node.servers[0]->lose();
      directory.pass(milliseconds(300), {&node});
    }
    CHECK(directory.data[1].members() == all);
  }

  TEST_CASE("dead members behind many that live are found, too") {
    TestDirectory directory;
    AgentOptions busy;
    busy.announcer.least_circle = milliseconds(100);
    busy.announcer.sweep_one_in = 1;
    TestNode node = directory.node({.number = 1, .agent = busy});
    TestNode other = directory.node({.number = 2, .life = 2});
    const auto keys = anchors_from(1, 1);
    node.announce(keys);
    directory.pass(seconds(3), {&node, &other});
    const Anchor own = anchor_of(bytes_of(1), bytes_of(7), {}, keys[0]);
    auto& bucket = directory.data[0].sets[bucket_of(own, 8)];
    const auto leases = directory.data[0].sets["n"];
    REQUIRE(leases.size() == 2);
    std::optional<NodeNumber> number;
    for (const std::string& text : leases) {
      const auto each = static_cast<NodeNumber>(static_cast<unsigned char>(text[0]) << 8 |
                                                static_cast<unsigned char>(text[1]));
      if (member_of(*bucket.begin())->node != each) number = each;
    }
    const Anchor first = own >> 56 << 56;
    for (Anchor i = 0; i < 600; ++i) {
      bucket.insert(to_text({.anchor = first + i, .node = *number, .life = 2}));
    }
    for (Anchor i = 1; i <= 5; ++i)
      bucket.insert(to_text({.anchor = own + i, .node = 9, .life = 9}));

    directory.pass(seconds(5), {&node, &other});
    CHECK(bucket.size() == 601);
  }

  TEST_CASE("whatever happens to servers, they have the anchors of the node at the end") {
    std::mt19937_64 random(pegaflow::testing::seed());
    for (int run = 0; run < 30; ++run) {
      CAPTURE(run);
      TestDirectory directory(3);
      AgentOptions options = quiet();
      options.announcer.most_writes = 64;
      TestNode node = directory.node({.number = 1, .agent = options});
      std::vector<BlockKey> all = anchors_from(1 + random() % 1000, 600);
      std::vector<bool> has(all.size());
      for (int i = 0; i < 300; ++i) {
        std::vector<BlockKey> part;
        const bool is_added = random() % 5 < 3;
        for (std::size_t block = 0; block < all.size(); ++block) {
          if (random() % 16 != 0) continue;
          has[block] = is_added;
          part.push_back(all[block]);
        }
        node.announce(part, is_added);
        MemoryServer& server = *node.servers[random() % 3];
        switch (random() % 12) {
          case 0:
            server.lose();
            break;
          case 1:
            directory.data[random() % 3] = Data();
            break;
          case 2: {
            node.agent->take({.kind = Announcement::Kind::kStartOver});
            std::vector<BlockKey> listed;
            for (std::size_t block = 0; block < all.size(); ++block) {
              if (has[block]) listed.push_back(all[block]);
            }
            node.announce(listed);
            node.agent->take({.kind = Announcement::Kind::kListed});
            break;
          }
          case 3:  // It is full for a while.
            server.faults = [](const MemoryServer::Words& words) -> std::optional<Reply> {
              if (words[0] != "SET" && words[0] != "ZADD") return {};
              return error("OOM command not allowed when used memory > 'maxmemory'.");
            };
            break;
          default:
            server.faults = nullptr;
        }
        server.run(random() % 64);
        node.agent->step();
        directory.clock.advance(milliseconds(random() % 400));
      }
      for (const auto& server : node.servers) server->faults = nullptr;
      directory.pass(seconds(12), {&node});

      std::vector<BlockKey> wanted;
      for (std::size_t block = 0; block < all.size(); ++block) {
        if (has[block]) wanted.push_back(all[block]);
      }
      CHECK(node.agent->stats().anchors == wanted.size());
      CHECK(stored(directory, wanted) == wanted.size());
    }
  }
}

}  // namespace
}  // namespace pegaflow::directory::testing
