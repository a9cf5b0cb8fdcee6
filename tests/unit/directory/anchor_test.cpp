#include "directory/anchor.h"

#include <random>
#include <set>
#include <string>

#include <doctest/doctest.h>

#include "directory/epoch_board.h"
#include "directory/node_leases.h"
#include "tests/support/seed.h"

namespace pegaflow::directory {
namespace {

BlockKey key_of(std::uint64_t number) {
  BlockKey key;
  std::memcpy(key.bytes.data(), &number, sizeof number);
  return key;
}

Bytes32 bytes_of(unsigned value) {
  Bytes32 bytes{};
  bytes[0] = static_cast<std::byte>(value);
  return bytes;
}

TEST_SUITE("Anchor") {
  TEST_CASE("one block in 32 is an anchor, and one in 8 at the start of a prompt") {
    std::size_t anchors = 0;
    std::size_t heads = 0;
    for (std::uint64_t i = 0; i < 32'000; ++i) {
      anchors += is_anchor(key_of(i), false) ? 1 : 0;
      heads += is_anchor(key_of(i), true) ? 1 : 0;
      if (is_anchor(key_of(i), false)) CHECK(is_anchor(key_of(i), true));
    }
    CHECK(anchors > 900);
    CHECK(anchors < 1100);
    CHECK(heads > 3800);
    CHECK(heads < 4200);
  }

  TEST_CASE("the secret, the namespace with its kind, the epoch and the key all change an anchor") {
    const Anchor one = anchor_of(bytes_of(1), bytes_of(2), {3, 4}, key_of(5));
    CHECK(anchor_of(bytes_of(1), bytes_of(2), {3, 4}, key_of(5)) == one);
    const std::set<Anchor> all{one,
                               anchor_of(bytes_of(9), bytes_of(2), {3, 4}, key_of(5)),
                               anchor_of(bytes_of(1), bytes_of(9), {3, 4}, key_of(5)),
                               anchor_of(bytes_of(1), bytes_of(2), {9, 4}, key_of(5)),
                               anchor_of(bytes_of(1), bytes_of(2), {3, 9}, key_of(5)),
                               anchor_of(bytes_of(1), bytes_of(2), {3, 4}, key_of(9))};
    CHECK(all.size() == 6);
  }

  TEST_CASE("a member is read as it was written, and bytes of another length are none") {
    std::mt19937_64 random(testing::seed());
    for (int i = 0; i < 1000; ++i) {
      const Member member{.anchor = random(),
                          .node = static_cast<NodeNumber>(random()),
                          .life = static_cast<std::uint16_t>(random())};
      CHECK(to_text(member).size() == kMemberBytes);
      CHECK(member_of(to_text(member)) == member);
      const Range range = range_of(member.anchor);
      CHECK(to_text(member) >= range.first.substr(1));
      CHECK(to_text(member) < range.end.substr(1));
    }
    CHECK_FALSE(member_of(""));
    CHECK_FALSE(member_of(std::string(11, 'x')));
    CHECK_FALSE(member_of(std::string(13, 'x')));
    CHECK(range_of(~Anchor{0}).end == "+");
  }

  TEST_CASE("the nodes of two anchors are in another order") {
    const auto order = [](Anchor anchor) {
      std::set<std::pair<std::string, NodeNumber>> sorted;
      for (NodeNumber node = 0; node < 64; ++node) {
        sorted.emplace(to_text({.anchor = anchor, .node = node, .life = 0}), node);
      }
      return sorted.begin()->second;
    };
    std::set<NodeNumber> first;
    for (Anchor anchor = 1; anchor <= 100; ++anchor) first.insert(order(anchor));
    CHECK(first.size() > 20);
  }

  TEST_CASE("a lease is read with any of the secrets, and not without") {
    const Lease lease{.node = {7, 8}, .address = "10.0.0.7:50055", .lanes = "rdma,tcp"};
    const std::vector<Bytes32> keys{bytes_of(1), bytes_of(2)};
    CHECK(Lease::unsealed(keys, lease.sealed(bytes_of(2))) == lease);
    CHECK_FALSE(Lease::unsealed(keys, lease.sealed(bytes_of(3))));
    CHECK_FALSE(Lease::unsealed(keys, ""));
    CHECK_FALSE(Lease::unsealed(keys, seal(bytes_of(1), "lease 1", "short")));
    CHECK_FALSE(Lease::unsealed(keys, seal(bytes_of(1), "epochs 1", std::string(20, '\0'))));
    std::string changed = lease.sealed(bytes_of(1));
    changed[20] ^= 1;
    CHECK_FALSE(Lease::unsealed(keys, changed));
  }

  TEST_CASE("epochs are read as they were written, and other bytes are none") {
    const KnownEpochs known{.spaces = {{bytes_of(2), {5, 6}}, {bytes_of(1), {7, 8}}},
                            .floor = {1, 2}};
    const auto read = epochs_of(to_text(known));
    REQUIRE(read);
    CHECK(read->floor == known.floor);
    REQUIRE(read->spaces.size() == 2);
    CHECK(read->spaces[0].first == bytes_of(1));
    CHECK(to_text(*read) == to_text(known));
    CHECK_FALSE(epochs_of(""));
    CHECK_FALSE(epochs_of(to_text(known) + "x"));
    CHECK_FALSE(epochs_of(to_text({.spaces = {}, .floor = {.counter = Epoch::kEnd, .id = 0}})));
  }
}

}  // namespace
}  // namespace pegaflow::directory
