#pragma once
/// \file
/// An engine whose blocks are of several kinds, over the wire.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include <doctest/doctest.h>

#include "tests/support/server_process.h"
#include "tests/support/wire_client.h"

namespace pegaflow::testing {

inline constexpr std::uint64_t kPage = 4096;
inline constexpr std::uint8_t kFull = 0;
inline constexpr std::uint8_t kWindow = 1;
inline constexpr std::uint8_t kState = 2;

/// Full attention, a window of 48 tokens and a state of 32 tokens, in units of 16 tokens.
inline Registration hybrid() {
  return {.instance = "hybrid",
          .factors = {{"weights", "hybrid"}},
          .block_count = 100,
          .kinds = {{.rule = wire::Kind::Rule::PREFIX, .block_tokens = 16, .page_bytes = kPage},
                    {.rule = wire::Kind::Rule::TRAILING,
                     .tokens = 48,
                     .block_tokens = 16,
                     .page_bytes = kPage},
                    {.rule = wire::Kind::Rule::STATE, .block_tokens = 32, .page_bytes = 2 * kPage}},
          .unit_tokens = 16,
          .alignment_tokens = 32};
}

/// An engine with two connections to a server.
struct HybridEngine {
  HybridEngine(const ServerProcess& server, kj::AsyncIoContext& loop)
      : io(loop), worker(io, server.socket()), scheduler(io, server.socket()) {
    worker.hello();
    auto mapped = worker.register_rank(hybrid());
    REQUIRE(mapped);
    pool = std::move(*mapped);
    scheduler.hello();
    REQUIRE(scheduler.attach("hybrid"));
  }
  static std::size_t pages(std::uint8_t kind) { return kind == kState ? 2 : 1; }
  /// The key of a block: that of the unit that it ends with.
  static BlockKey key(std::uint8_t kind, std::uint64_t chain, std::size_t block) {
    return make_keys(chain, 64)[(block + 1) * pages(kind) - 1];
  }
  /// The byte that fills the pages of a block.
  static int content(std::uint8_t kind, std::size_t block) {
    return static_cast<int>(kind * 64 + block + 1);
  }
  std::span<std::byte> page(std::uint8_t kind, std::uint32_t slot) const {
    return pool.mapping.bytes().subspan(slot * kSlotAlignment, pages(kind) * kPage);
  }
  void save(std::uint8_t kind, std::uint64_t chain, const std::vector<std::size_t>& blocks) {
    std::vector<BlockKey> keys;
    for (const std::size_t block : blocks) keys.push_back(key(kind, chain, block));
    const JobId job{scheduler.process(), ++jobs};
    const auto slots = worker.reserve(job, keys, 0, kind);
    REQUIRE(slots);
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      REQUIRE((*slots)[i] != WireClient::kNoFrame);
      const auto bytes = page(kind, (*slots)[i]);
      std::memset(bytes.data(), content(kind, blocks[i]), bytes.size());
    }
    REQUIRE(worker.publish(job));
  }
  /// Opens a range of a claim and compares every byte with what save() wrote.
  void check_range(const Id128& token, const WireClient::Range& range, std::uint64_t pin) {
    const auto kind = static_cast<std::uint8_t>(range.kind);
    const auto slots = worker.open(token, 0, range.count, pin, kind);
    REQUIRE(slots);
    REQUIRE(slots->size() == range.count);
    for (std::uint32_t i = 0; i < range.count; ++i) {
      const auto wanted = std::byte(content(kind, range.first + i));
      const auto bytes = page(kind, (*slots)[i]);
      CHECK(
          std::all_of(bytes.begin(), bytes.end(), [&](std::byte each) { return each == wanted; }));
    }
    REQUIRE(worker.release(pin));
  }
  /// The blocks of a range as they arrive from another node. False if one of them does not.
  bool check_arriving(const Id128& token, const WireClient::Range& range, std::uint64_t first_pin) {
    for (std::uint32_t done = 0; done < range.count;) {
      auto request = worker.session().openRequest();
      write_id(token, request.initToken());
      request.setKind(static_cast<std::uint8_t>(range.kind));
      request.setFirst(done);
      request.setCount(range.count - done);
      request.setPin(first_pin + done);
      request.setPatienceMs(8000);
      const auto answer = request.send().wait(io.waitScope);
      if (answer.hasError() || answer.getSlots().size() == 0) return false;
      for (const std::uint32_t slot : answer.getSlots()) {
        const auto kind = static_cast<std::uint8_t>(range.kind);
        const auto wanted = std::byte(content(kind, range.first + done++));
        const auto bytes = page(kind, slot);
        CHECK(std::all_of(bytes.begin(), bytes.end(),
                          [&](std::byte each) { return each == wanted; }));
      }
    }
    return true;
  }
  /// Claims a prompt of 8 units that another node has, compares all bytes and ends the claim.
  void check_eight_arrive(std::uint64_t chain) {
    const Id128 token = Id128::random();
    const auto claimed = scheduler.claim(token, make_keys(chain, 8));
    REQUIRE(claimed);
    CHECK(claimed->blocks == 0);
    CHECK(claimed->elsewhere == 8);
    CHECK(claimed->ranges ==
          std::vector<WireClient::Range>{{kFull, 0, 8}, {kWindow, 5, 3}, {kState, 3, 1}});
    for (const WireClient::Range& range : claimed->ranges) {
      CHECK(check_arriving(token, range, 100 * (range.kind + 1)));
    }
    release_all(claimed->ranges);
    REQUIRE(scheduler.unclaim(token));
  }
  /// Releases the pins of check_arriving() on these ranges.
  void release_all(const std::vector<WireClient::Range>& ranges) {
    for (const WireClient::Range& range : ranges) {
      for (std::uint32_t i = 0; i < range.count; ++i) {
        REQUIRE(worker.release(100 * (range.kind + 1) + i));
      }
    }
  }
  void save_eight(std::uint64_t chain) {
    save(kFull, chain, {0, 1, 2, 3, 4, 5, 6, 7});
    save(kWindow, chain, {5, 6, 7});
    save(kState, chain, {3});
  }

  kj::AsyncIoContext& io;
  WireClient worker;
  WireClient scheduler;
  MappedPool pool;
  std::uint64_t jobs = 0;
};

}  // namespace pegaflow::testing
