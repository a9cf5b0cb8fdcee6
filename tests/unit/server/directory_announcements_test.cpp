#include "server/directory_announcements.h"

#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include <doctest/doctest.h>

#include "directory/anchor.h"

namespace pegaflow::server {
namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::size_t kSlots = 2048;
constexpr std::size_t kEntries = 64;

/// A service with a small journal, and what it announced.
struct Fixture {
  explicit Fixture(std::uint32_t journal) {
    auto made =
        CacheService::create({.store = {.pool_bytes = kSlots * kPage, .journal_entries = journal}},
                             clock, [this](const Id128& gone) { service->disconnected(gone); });
    REQUIRE(made);
    service = std::move(*made);
    REQUIRE(service->store().keep_journal());
    announcements = std::make_unique<DirectoryAnnouncements>(
        *service, [this](directory::Announcement&& one) { return take(std::move(one)); },
        DirectoryAnnouncements::Options{.entries = kEntries, .frames = kEntries});
    connection = Id128::random();
    REQUIRE(service->connected(connection, {.process = Id128::random(),
                                            .previous_connection = {},
                                            .build = "test",
                                            .watch = std::make_shared<int>(0)}));
    REQUIRE(service->register_rank(
        connection, {.instance = "engine", .factors = {{"weights", "a"}}, .page_bytes = kPage}));
  }

  bool take(directory::Announcement&& one) {
    if (!has_room) return false;
    starts += one.kind == directory::Announcement::Kind::kStartOver ? 1 : 0;
    lists += one.kind == directory::Announcement::Kind::kListed ? 1 : 0;
    for (const auto& [key, is_findable] : one.blocks) {
      if (is_findable) {
        known.insert(key.hash());
      } else {
        known.erase(key.hash());
      }
    }
    return true;
  }

  /// Saves `count` more blocks, each by itself.
  void save(std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      BlockKey key;
      const std::uint64_t word = ++last * 0x9E3779B97F4A7C15ULL;
      std::memcpy(key.bytes.data(), &word, sizeof word);
      if (directory::is_anchor(key, false)) wanted.insert(key.hash());
      const JobId job{.scheduler = Id128::random(), .number = 1};
      REQUIRE(service->reserve(connection, job, 0, std::span(&key, 1)));
      REQUIRE(service->publish(connection, job) == 0);
      while (service->work()) {
      }
    }
  }
  /// Whether all anchors among the saved blocks are known to the directory.
  [[nodiscard]] bool is_complete() const {
    return std::includes(known.begin(), known.end(), wanted.begin(), wanted.end());
  }

  ManualClock clock;
  std::unique_ptr<CacheService> service;
  std::unique_ptr<DirectoryAnnouncements> announcements;
  Id128 connection;
  std::uint64_t last = 0;
  bool has_room = true;
  std::size_t starts = 0;
  std::size_t lists = 0;
  std::set<std::uint64_t> known;
  std::set<std::uint64_t> wanted;
};

TEST_SUITE("DirectoryAnnouncements") {
  TEST_CASE("a burst is announced part by part, with one part of the journal in each step") {
    Fixture f(1024);
    f.save(1);
    CHECK_FALSE(f.announcements->step());
    f.save(10 * kEntries);

    // What the event loop has to do meanwhile waits for one part only.
    for (int i = 1; i < 10; ++i) {
      CAPTURE(i);
      CHECK(f.announcements->step());
    }
    CHECK_FALSE(f.announcements->step());
    CHECK(f.wanted.size() > 10);
    CHECK(f.is_complete());
    CHECK(f.starts == 0);
  }

  TEST_CASE("without room the next step is not due at once") {
    Fixture f(1024);
    f.save(1);
    CHECK_FALSE(f.announcements->step());
    f.save(10 * kEntries);
    f.has_room = false;
    CHECK_FALSE(f.announcements->step());
    f.has_room = true;
    CHECK(f.announcements->step());
  }

  TEST_CASE("after an overrun all is listed once, and the list has an end") {
    Fixture f(128);
    f.save(1);
    f.announcements->step();
    f.has_room = false;
    f.save(300);
    f.announcements->step();
    f.has_room = true;
    CHECK_FALSE(f.is_complete());

    for (int i = 0; i < 60; ++i) f.announcements->step();
    CHECK(f.is_complete());
    CHECK(f.starts == 1);
    CHECK(f.lists == 1);
  }

  TEST_CASE("a list goes on while the journal is never read to its end") {
    Fixture f(1024);
    f.save(kSlots);
    f.announcements->start_over();
    f.announcements->step();
    f.save(6 * kEntries);
    for (int i = 0; i < 60; ++i) {
      f.save(kEntries);  // With as many evictions this is what two steps read.
      CHECK(f.announcements->step());
      CHECK(f.announcements->step());
    }
    CHECK(f.lists == 1);
  }
}

}  // namespace
}  // namespace pegaflow::server
