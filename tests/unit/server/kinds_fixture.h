#pragma once
/// \file
/// A CacheService with an engine whose blocks are of several kinds.

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "server/cache/cache_service.h"
#include "tests/unit/server/page_size.h"

namespace pegaflow::testing {

/// The kinds of the fixture's engine, by number.
inline constexpr std::size_t kFull = 0;
inline constexpr std::size_t kWindow = 1;
inline constexpr std::size_t kState = 2;

/// The keys of a prompt's units.
inline std::vector<BlockKey> prompt(std::uint64_t chain, std::size_t units) {
  std::vector<BlockKey> made(units);
  for (std::size_t i = 0; i < units; ++i) {
    const std::uint64_t words[2] = {(chain * 1000 + i + 1) * 0x9E3779B97F4A7C15ULL, chain};
    std::memcpy(made[i].bytes.data(), words, sizeof words);
  }
  return made;
}

/// Full attention (a page), a window of 48 tokens (a page) and a state of 32 tokens (2 pages), in
/// units of 16 tokens.
inline Registration full_window_state(const std::string& instance = "engine") {
  return {.instance = instance,
          .factors = {{"weights", "hybrid"}},
          .kinds = {{.rule = wire::Kind::Rule::PREFIX, .block_tokens = 16, .page_bytes = kPage},
                    {.rule = wire::Kind::Rule::TRAILING,
                     .tokens = 48,
                     .block_tokens = 16,
                     .page_bytes = kPage},
                    {.rule = wire::Kind::Rule::STATE, .block_tokens = 32, .page_bytes = 2 * kPage}},
          .unit_tokens = 16,
          .alignment_tokens = 32};
}

struct KindsFixture {
  using CacheService = server::CacheService;

  explicit KindsFixture(const Registration& registration = full_window_state(),
                        const engine::BlockStore::Options& store = {.pool_bytes = 256 * kPage,
                                                                    .instance_share = 1.0,
                                                                    .server_share = 1.0}) {
    auto made = CacheService::create({.store = store}, clock, [this](const Id128& connection) {
      service->disconnected(connection);
    });
    REQUIRE(made);
    service = std::move(*made);
    worker = connect();
    scheduler = connect();
    REQUIRE(service->register_rank(worker, registration));
    REQUIRE(service->attach(scheduler, registration.instance));
  }
  ~KindsFixture() { work(); }
  KindsFixture(const KindsFixture&) = delete;
  KindsFixture& operator=(const KindsFixture&) = delete;

  Id128 connect() {
    const Id128 connection = Id128::random();
    REQUIRE(service->connected(connection, {.process = Id128::random(),
                                            .previous_connection = {},
                                            .build = "test",
                                            .watch = std::make_shared<int>(0)}));
    return connection;
  }
  /// Saves the blocks of a kind with these numbers, of a prompt of 64 units at most.
  void save(std::size_t kind, std::uint64_t chain, const std::vector<std::size_t>& blocks) {
    const std::size_t units = kind == kState ? 2 : 1;
    std::vector<BlockKey> keys;
    for (const std::size_t block : blocks) {
      keys.push_back(prompt(chain, 64)[(block + 1) * units - 1]);
    }
    const JobId job{.scheduler = Id128::random(), .number = 1};
    REQUIRE(reserve(job, keys, kind));
    REQUIRE(service->publish(worker, job) == 0);
  }
  Result<std::vector<std::uint32_t>> reserve(const JobId& job, std::span<const BlockKey> keys,
                                             std::size_t kind) {
    return service->reserve(worker, job, 0, keys, false, engine::BlockStore::NoRoom::kSkip, kind);
  }
  /// All that a prompt of 8 units needs: 128 tokens.
  void save_eight(std::uint64_t chain) {
    save(kFull, chain, {0, 1, 2, 3, 4, 5, 6, 7});
    save(kWindow, chain, {5, 6, 7});
    save(kState, chain, {3});
  }
  [[nodiscard]] std::size_t restorable(std::uint64_t chain, std::size_t units,
                                       std::size_t local = 0) const {
    const auto found = service->restorable(scheduler, prompt(chain, units), local);
    REQUIRE(found);
    REQUIRE(found->complete);
    return found->units;
  }
  [[nodiscard]] Result<CacheService::Restorable> claim(const Id128& token, std::uint64_t chain,
                                                       std::size_t units,
                                                       std::size_t local = 0) const {
    return service->claim_restorable(scheduler, token, prompt(chain, units), local);
  }
  [[nodiscard]] Result<CacheService::Opened> open(const Id128& token, std::size_t kind,
                                                  std::size_t first, std::size_t count,
                                                  std::uint64_t pin) const {
    PEGA_TRY_LET(const Id128 claim, service->claim_of_kind(worker, token, kind));
    return service->open(worker, claim, first, count, engine::PinId{pin});
  }
  void work() const {
    while (service->work()) {
    }
    const auto checked = service->store().check();
    CHECK_MESSAGE(checked, (checked ? "" : checked.error().detail));
  }

  ManualClock clock;
  std::unique_ptr<CacheService> service;
  Id128 worker;
  Id128 scheduler;
};

/// "0:0+8 1:5+3": blocks 0 to 8 of kind 0, and 5 to 8 of kind 1.
inline std::string text(const server::CacheService::Restorable& found) {
  std::string words;
  for (const auto& range : found.ranges) {
    if (!words.empty()) words += ' ';
    words += std::to_string(range.kind) + ":" + std::to_string(range.blocks.first) + "+" +
             std::to_string(range.blocks.count);
  }
  return words;
}

}  // namespace pegaflow::testing
