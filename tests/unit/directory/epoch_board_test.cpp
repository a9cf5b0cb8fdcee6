#include "directory/epoch_board.h"

#include <chrono>

#include <doctest/doctest.h>

#include "tests/unit/directory/agent_fixture.h"

namespace pegaflow::directory::testing {
namespace {

using std::chrono::seconds;

KnownEpochs epochs_until(std::uint64_t counter) {
  return {.spaces = {{bytes_of(3), {.counter = counter, .id = 9}}}, .floor = {}};
}

/// The epochs that a server has; no value for other bytes.
std::optional<KnownEpochs> epochs_at(const Data& data, unsigned secret = 1) {
  const auto found = data.texts.find("e");
  if (found == data.texts.end()) return {};
  const std::vector<Bytes32> keys{bytes_of(secret)};
  const auto text = unseal(keys, "epochs 1", found->second.value);
  return text ? epochs_of(*text) : std::nullopt;
}

/// As a server does it: what it learns is published.
void pass_on(TestDirectory& directory, Duration time, const std::vector<TestNode*>& nodes,
             std::vector<KnownEpochs>& known) {
  for (Duration passed{}; passed < time; passed += seconds(1)) {
    directory.pass(seconds(1), nodes);
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      for (const KnownEpochs& news : std::exchange(nodes[i]->epochs, {})) {
        const auto& [space, epoch] = news.spaces.at(0);
        if (known[i].spaces.empty() || known[i].spaces[0].second < epoch) known[i] = news;
      }
      nodes[i]->agent->publish(known[i]);
    }
  }
}

TEST_SUITE("epoch_board") {
  TEST_CASE("servers with different texts all come to have the greatest epoch") {
    TestDirectory directory(2);
    std::vector<KnownEpochs> known(2);
    const std::string old = seal(bytes_of(1), "epochs 1", to_text(epochs_until(5)));
    const std::string newer = seal(bytes_of(1), "epochs 1", to_text(epochs_until(8)));
    directory.data[0].texts["e"] = {.value = old};
    directory.data[1].texts["e"] = {.value = newer};
    TestNode a = directory.node({.number = 1});
    TestNode b = directory.node({.number = 2});

    pass_on(directory, seconds(12), {&a, &b}, known);
    for (const Data& data : directory.data) {
      REQUIRE(epochs_at(data));
      CHECK(to_text(*epochs_at(data)) == to_text(epochs_until(8)));
    }
    for (const KnownEpochs& each : known) CHECK(to_text(each) == to_text(epochs_until(8)));
  }

  TEST_CASE("an old text that is written back changes nothing, and is replaced") {
    TestDirectory directory(1);
    std::vector<KnownEpochs> known{epochs_until(8), epochs_until(8)};
    TestNode a = directory.node({.number = 1});
    TestNode b = directory.node({.number = 2});
    pass_on(directory, seconds(5), {&a, &b}, known);
    for (int i = 0; i < 3; ++i) {
      directory.data[0].texts["e"] = {.value =
                                          seal(bytes_of(1), "epochs 1", to_text(epochs_until(5)))};
      pass_on(directory, seconds(8), {&a, &b}, known);
      CHECK(to_text(*epochs_at(directory.data[0])) == to_text(epochs_until(8)));
    }
    CHECK(to_text(known[0]) == to_text(epochs_until(8)));
  }

  TEST_CASE("epochs are known when every server has told them, or that it has none") {
    TestDirectory directory(2);
    TestNode node = directory.node({.number = 1});
    node.servers[1]->faults = [](const MemoryServer::Words& words) -> std::optional<Reply> {
      return words[1] == "e" ? std::optional(error("LOADING")) : std::nullopt;
    };
    directory.pass(seconds(5), {&node});
    CHECK_FALSE(node.agent->knows_epochs());
    node.servers[1]->faults = nullptr;
    directory.pass(seconds(3), {&node});
    CHECK(node.agent->knows_epochs());
  }

  TEST_CASE("a text that no node can read is not replaced by a node that knows nothing") {
    TestDirectory directory(1);
    SUBCASE("of another secret") {
      directory.data[0].texts["e"] = {.value =
                                          seal(bytes_of(2), "epochs 1", to_text(epochs_until(8)))};
    }
    SUBCASE("of another type") { directory.data[0].sets["e"] = {"x"}; }
    TestNode fresh = directory.node({.number = 1});
    fresh.agent->publish(epochs_until(3));
    directory.pass(seconds(8), {&fresh});
    CHECK_FALSE(fresh.agent->knows_epochs());
    CHECK(fresh.agent->stats().bad_epochs > 0);
    CHECK_FALSE(epochs_at(directory.data[0]));
  }

  TEST_CASE("a text that no node can read is replaced by a node that knows the epochs") {
    TestDirectory directory(1);
    TestNode node = directory.node({.number = 1});
    node.agent->publish(epochs_until(8));
    directory.pass(seconds(5), {&node});
    REQUIRE(node.agent->knows_epochs());
    directory.data[0].texts.erase("e");
    SUBCASE("of another secret") {
      directory.data[0].texts["e"] = {.value = seal(bytes_of(2), "epochs 1", "x")};
    }
    SUBCASE("no text of epochs") { directory.data[0].texts["e"] = {.value = "forged"}; }
    SUBCASE("of another type") { directory.data[0].sets["e"] = {"x"}; }
    directory.pass(seconds(5), {&node});
    REQUIRE(epochs_at(directory.data[0]));
    CHECK(to_text(*epochs_at(directory.data[0])) == to_text(epochs_until(8)));
    CHECK(node.agent->stats().bad_epochs > 0);
  }

  TEST_CASE("with two secrets the epochs of either are read, and written with the first") {
    TestDirectory directory(1);
    std::vector<KnownEpochs> known(1);
    directory.data[0].texts["e"] = {.value =
                                        seal(bytes_of(1), "epochs 1", to_text(epochs_until(8)))};
    TestNode node = directory.node({.number = 1});
    node.agent->set_keys({.anchors = bytes_of(2), .all = {bytes_of(2), bytes_of(1)}});
    pass_on(directory, seconds(6), {&node}, known);
    CHECK(to_text(known[0]) == to_text(epochs_until(8)));
    CHECK(node.agent->knows_epochs());
  }
}

}  // namespace
}  // namespace pegaflow::directory::testing
