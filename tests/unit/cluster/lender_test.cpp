// Whom Lenders ask for what, and what they make of the answers: other nodes that the test plays.
#include "cluster/lender.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <kj/async-io.h>

namespace pegaflow::cluster {
namespace {

constexpr std::size_t kFirst = Lenders::kFirstKeys;

std::vector<BlockKey> keys(std::size_t count) {
  std::vector<BlockKey> made(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t word = (i + 1) * 0x9E3779B97F4A7C15ULL;
    std::memcpy(made[i].bytes.data(), &word, sizeof word);
  }
  return made;
}

/// Has the first `has` of keys(...), and may fail or go away at its next answers.
class PlayedLender final : public Lender {
 public:
  explicit PlayedLender(std::size_t blocks) : has(blocks) {}

  [[nodiscard]] bool is_ready() const noexcept override { return ready; }
  [[nodiscard]] std::uint64_t life() const noexcept override { return its_life; }
  [[nodiscard]] const std::string& address() const noexcept override { return address_; }
  [[nodiscard]] const Route& route() const override { return route_; }
  kj::Promise<Result<Prefix>> locate(const Bytes32& space,
                                     std::span<const BlockKey> wanted) override {
    asked.push_back(wanted.size());
    CHECK(space.front() == std::byte{9});
    const std::vector<BlockKey> its = keys(has);
    const auto from = std::find(its.begin(), its.end(), wanted.front());
    std::size_t found = 0;
    while (found < wanted.size() && from + static_cast<std::ptrdiff_t>(found) < its.end() &&
           from[static_cast<std::ptrdiff_t>(found)] == wanted[found]) {
      ++found;
    }
    if (asked.size() == fails_at) return Result<Prefix>(fail(Errc::kTimeout, "played"));
    if (answered) answered();
    return Result<Prefix>(
        Prefix{.blocks = found, .on_disks = {.blocks = std::min(found, on_disks)}});
  }
  kj::Promise<Result<Present>> locate_each(const Bytes32& space,
                                           std::span<const BlockKey> wanted) override {
    CHECK(space.front() == std::byte{9});
    if (fails_at != 0) return Result<Present>(fail(Errc::kTimeout, "played"));
    const std::vector<BlockKey> its = keys(has);
    Present present{.has = {}, .on_disks = {.blocks = on_disks}};
    for (const BlockKey& key : wanted) {
      present.has.push_back(std::find(its.begin(), its.end(), key) != its.end());
    }
    return Result<Present>(std::move(present));
  }
  kj::Promise<Result<LeaseGrant>> lease(const Bytes32&, std::span<const BlockKey>, std::size_t,
                                        std::chrono::milliseconds) override {
    return Result<LeaseGrant>(fail(Errc::kInternal, "no lease is expected here"));
  }
  kj::Promise<Result<LeaseGrant>> lease_pending(const Staging&, std::chrono::milliseconds,
                                                std::chrono::milliseconds) override {
    return Result<LeaseGrant>(fail(Errc::kInternal, "no lease is expected here"));
  }
  void end_staging(std::uint64_t) override {}
  kj::Promise<Result<bool>> confirm(std::uint64_t, Duration) override { return Result<bool>(true); }
  kj::Promise<Result<Epoch>> reset(const Bytes32&, const Epoch& epoch, Duration) override {
    return Result<Epoch>(epoch);
  }
  void release(std::uint64_t) override {}
  void lost(std::uint64_t, const std::string&) override {}
  void route_lost(std::uint64_t, const Route&, const std::string&) override {}

  std::size_t has;
  std::size_t on_disks = 0;  ///< The most blocks on disks in each answer.
  bool ready = true;
  std::uint64_t its_life = 1;
  std::size_t fails_at = 0;  ///< Which question, from 1; 0: none.
  std::function<void()> answered;
  std::vector<std::size_t> asked;  ///< How many keys each time.

 private:
  std::string address_ = "played:1";
  Route route_{};
};

struct Fixture {
  explicit Fixture(const std::vector<std::size_t>& blocks) {
    space.front() = std::byte{9};
    for (const std::size_t each : blocks) all.add(nodes.emplace_back(each));
  }

  /// The blocks of each owner, by its place among the nodes.
  std::vector<std::pair<std::size_t, std::size_t>> owners(std::size_t count) {
    // What is asked for need not be there any longer than the call.
    auto wanted = std::make_unique<std::vector<BlockKey>>(keys(count));
    auto promise = all.owners(space, *wanted);
    std::fill(wanted->begin(), wanted->end(), BlockKey{});
    wanted.reset();
    std::vector<std::pair<std::size_t, std::size_t>> found;
    for (const Lenders::Owner& owner : promise.wait(io.waitScope)) {
      std::size_t place = 0;
      while (&nodes[place] != owner.peer) ++place;
      CHECK(owner.life == 1);
      found.emplace_back(place, owner.blocks);
    }
    return found;
  }

  kj::AsyncIoContext io = kj::setupAsyncIo();
  Bytes32 space{};
  std::deque<PlayedLender> nodes;
  Lenders all;
};

using Owners = std::vector<std::pair<std::size_t, std::size_t>>;
using Asked = std::vector<std::size_t>;

}  // namespace

TEST_SUITE("Lenders") {
  TEST_CASE("the blocks on the disks of an owner are added up over its two answers") {
    Fixture f({100});
    f.nodes[0].on_disks = 20;
    const auto wanted = keys(kFirst + 10);
    const auto found = f.all.owners(f.space, wanted).wait(f.io.waitScope);
    REQUIRE(found.size() == 1);
    CHECK(found[0].blocks == kFirst + 10);
    CHECK(found[0].on_disks.blocks == 30);  // 20 of the first 32, and all of the rest.
  }

  TEST_CASE("who has not the first keys is not sent the others, and most comes first") {
    Fixture f({0, kFirst - 1, kFirst, 100, 200, 100});

    CHECK(f.owners(150) == Owners{{4, 150}, {3, 100}, {5, 100}, {2, kFirst}, {1, kFirst - 1}});

    CHECK(f.nodes[0].asked == Asked{kFirst});
    CHECK(f.nodes[1].asked == Asked{kFirst});
    CHECK(f.nodes[2].asked == Asked{kFirst, 150 - kFirst});
    CHECK(f.nodes[4].asked == Asked{kFirst, 150 - kFirst});
  }

  TEST_CASE("a question of few keys is one question") {
    Fixture f({100});
    CHECK(f.owners(kFirst) == Owners{{0, kFirst}});
    CHECK(f.nodes[0].asked == Asked{kFirst});

    CHECK(f.owners(kFirst + 1) == Owners{{0, kFirst + 1}});
    CHECK(f.nodes[0].asked == Asked{kFirst, kFirst, 1});
  }

  TEST_CASE("who does not answer has nothing, or nothing more") {
    Fixture f({100, 100, 40});
    f.nodes[0].fails_at = 1;
    f.nodes[1].fails_at = 2;

    CHECK(f.owners(60) == Owners{{2, 40}, {1, kFirst}});

    CHECK(f.nodes[0].asked == Asked{kFirst});
  }

  TEST_CASE("who is not ready is not asked, nor asked again when it went away") {
    Fixture f({100, 100, 100});
    f.nodes[0].ready = false;
    f.nodes[1].answered = [&f]() { f.nodes[1].ready = false; };
    f.nodes[2].answered = [&f]() { f.nodes[2].its_life = 2; };

    CHECK(f.owners(60) == Owners{{1, kFirst}, {2, kFirst}});

    CHECK(f.nodes[0].asked.empty());
    CHECK(f.nodes[1].asked == Asked{kFirst});
    CHECK(f.nodes[2].asked == Asked{kFirst});
  }

  TEST_CASE("each block is asked for at every node that is ready, and who has none is left out") {
    Fixture f({2, 0, 4, 4, 4});
    f.nodes[3].ready = false;
    f.nodes[4].fails_at = 1;
    const std::vector<BlockKey> all = keys(4);
    const std::vector<BlockKey> wanted = {all[3], all[1]};

    const auto holders = f.all.holders(f.space, wanted).wait(f.io.waitScope);

    REQUIRE(holders.size() == 2);
    CHECK(holders[0].peer == &f.nodes[0]);
    CHECK(holders[0].has == std::vector<bool>{false, true});
    CHECK(holders[1].peer == &f.nodes[2]);
    CHECK(holders[1].has == std::vector<bool>{true, true});
  }

  TEST_CASE("without nodes there are no owners") {
    Fixture f({});
    CHECK(f.owners(60).empty());
  }
}

}  // namespace pegaflow::cluster
