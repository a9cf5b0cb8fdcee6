#include "transport/cuda/copy_plan.h"

#include <algorithm>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include "tests/support/seed.h"
#include "transport/cuda/staging_ring.h"

namespace pegaflow::cuda {
namespace {

constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;

Segment segment(std::uintptr_t base, std::uint64_t stride, std::uint64_t bytes) {
  // NOLINTNEXTLINE(performance-no-int-to-ptr): no byte of it is touched.
  return {reinterpret_cast<std::byte*>(base), stride, bytes};
}

CopyPlan plan_of(std::vector<Segment> segments, std::uint64_t range = kGiB,
                 bool owns_slots = true) {
  return {PageLayout::create(std::move(segments), 1000).value(), range, owns_slots};
}

std::byte* const kPool = segment(std::uintptr_t{1} << 40, 1, 1).base;
std::uint64_t offset_of(const Transfer& transfer) {
  return static_cast<std::uint64_t>(transfer.host - kPool);
}

TEST_SUITE("CopyPlan") {
  TEST_CASE("pieces are segments cut at 32 KiB, with the widest unit that fits all of them") {
    const CopyPlan plan = plan_of({segment(0x10000, 1 << 20, 80 << 10),
                                   segment(0x900008, 1 << 20, 24), segment(0x900101, 999, 7)});

    const auto pieces = plan.pieces();
    REQUIRE(pieces.size() == 5);
    CHECK(pieces[0].base == 0x10000);
    CHECK(pieces[2].base == 0x10000 + (64 << 10));
    CHECK(pieces[2].page_offset == 64 << 10);
    CHECK(pieces[2].bytes == 16 << 10);
    CHECK(pieces[2].unit == 16);
    CHECK(pieces[3].unit == 8);
    CHECK(pieces[3].page_offset == 80 << 10);
    CHECK(pieces[4].unit == 1);
    CHECK(pieces[4].stride == 999);
    CHECK(plan.mean_segment_bytes() == ((80 << 10) + 31) / 3);
  }

  TEST_CASE("the threads of a piece follow from its size") {
    CHECK(plan_of({segment(0x10000, 1 << 20, 32 << 10)}).group() == 256);
    CHECK(plan_of({segment(0x10000, 1 << 20, 16 << 10)}).group() == 128);
    CHECK(plan_of({segment(0x10000, 1 << 20, 100)}).group() == 32);
  }

  TEST_CASE("a slice has as many complete pages as fit") {
    const CopyPlan plan = plan_of({segment(0x10000, 1 << 20, 10'000)});
    CHECK(plan.pitch() == 12'288);

    const Slice slice = plan.next(3, 0, 100, 5 * 12'288 + 5);

    CHECK(slice.first_copy == 3);
    CHECK(slice.copies == 5);
    CHECK(slice.pieces == 1);
    CHECK(slice.ends_pages);
    CHECK(slice.staged_bytes == 5 * 12'288);
    CHECK(slice.bytes() == 50'000);
    CHECK(plan.next(98, 0, 100, kGiB).copies == 2);
  }

  TEST_CASE("a page larger than a slice goes in parts that cover it once") {
    const CopyPlan plan =
        plan_of({segment(0x10000, 1 << 20, 100'001), segment(0x4000000, 1 << 20, 200'000)});
    std::uint64_t next_byte = 0;
    std::uint32_t piece = 0;
    for (bool done = false; !done;) {
      const Slice slice = plan.next(7, piece, 8, 70'000);
      CHECK(slice.copies == 1);
      CHECK(slice.first_byte == next_byte);
      CHECK(slice.origin <= slice.first_byte);
      CHECK(slice.origin % 256 == 0);
      CHECK(slice.staged_bytes <= 70'000);
      next_byte += slice.page_bytes;
      piece += slice.pieces;
      done = slice.ends_pages;
    }
    CHECK(next_byte == 300'001);
    CHECK(piece == plan.pieces().size());
  }

  TEST_CASE("pages in neighboring slots are one transfer, until a range ends") {
    const CopyPlan plan = plan_of({segment(0x10000, 1 << 20, 4096)}, 16 << 10);
    // Slots 0, 1, 2 | 5, 4 | 6, 7, 8 with a range that ends before 8.
    std::vector<Device::Copy> copies;
    for (const std::uint64_t slot : {0, 1, 2, 5, 4, 6, 7, 8}) copies.push_back({9, slot * 4096});
    const Slice slice = plan.next(0, 0, copies.size(), kGiB);

    const auto transfers = plan.staged_transfers(slice, copies, kPool, 0x5000000);

    std::vector<std::pair<std::uint64_t, std::uint64_t>> seen;
    for (const Transfer& transfer : transfers) {
      seen.emplace_back(offset_of(transfer) / 4096, transfer.bytes / 4096);
    }
    CHECK(seen == std::vector<std::pair<std::uint64_t, std::uint64_t>>{
                      {0, 3}, {5, 1}, {4, 1}, {6, 2}, {8, 1}});
    CHECK(transfers[1].device == 0x5000000 + 3 * 4096);
  }

  TEST_CASE("the bytes between a page and the end of its slot move only inside a transfer") {
    const CopyPlan plan = plan_of({segment(0x10000, 1 << 20, 10'000)});
    const std::vector<Device::Copy> copies = {{1, 0}, {2, 12'288}, {3, 100 * 4096}};
    const Slice slice = plan.next(0, 0, copies.size(), kGiB);

    const auto transfers = plan.staged_transfers(slice, copies, kPool, 0x5000000);

    REQUIRE(transfers.size() == 2);
    CHECK(transfers[0].bytes == 12'288 + 10'000);
    CHECK(transfers[1].bytes == 10'000);
  }

  TEST_CASE("where pages of other layouts share the slots, a transfer has the bytes of one page") {
    const CopyPlan plan = plan_of({segment(0x10000, 1 << 20, 10'000)}, kGiB, false);
    const std::vector<Device::Copy> copies = {{1, 0}, {2, 12'288}};

    const auto transfers =
        plan.staged_transfers(plan.next(0, 0, 2, kGiB), copies, kPool, 0x5000000);

    REQUIRE(transfers.size() == 2);
    CHECK(transfers[0].bytes == 10'000);
    CHECK(transfers[1].bytes == 10'000);
    const CopyPlan whole = plan_of({segment(0x10000, 1 << 20, 12'288)}, kGiB, false);
    CHECK(whole.staged_transfers(whole.next(0, 0, 2, kGiB), copies, kPool, 0x5000000).size() == 1);
  }

  TEST_CASE("every byte is moved once, on either path, and no transfer crosses a range") {
    std::mt19937_64 random(testing::seed());
    for (int round = 0; round < 200; ++round) {
      std::vector<Segment> segments;
      for (std::size_t i = 1 + random() % 4; i > 0; --i) {
        segments.push_back(
            segment(std::uintptr_t{i} << 36 | random() % 64, 1 << 20, 1 + random() % 100'000));
      }
      const std::uint64_t range = std::uint64_t{1} << (12 + random() % 8);
      const CopyPlan plan = plan_of(segments, range);
      std::uint64_t page_bytes = 0;
      for (const Segment& one : segments) page_bytes += one.size_bytes;
      std::vector<Device::Copy> copies;
      std::uint64_t slot = 0;
      for (std::uint32_t i = 0; i < 1 + random() % 20; ++i) {
        copies.push_back({i, slot});
        slot += plan.pitch() * (1 + random() % 2);
      }
      const std::uint64_t most = 4096 + random() % 400'000;
      std::uint64_t moved = 0;
      std::uint64_t direct = 0;
      std::uint32_t piece = 0;
      for (std::size_t copy = 0; copy < copies.size();) {
        const Slice slice = plan.next(copy, piece, copies.size(), most);
        for (const bool staged : {true, false}) {
          for (const Transfer& one :
               staged ? plan.staged_transfers(slice, copies, kPool, std::uint64_t{1} << 45)
                      : plan.direct_transfers(slice, copies, kPool)) {
            const std::uint64_t begin = offset_of(one);
            CHECK(begin / range == (begin + one.bytes - 1) / range);
            CHECK(begin + one.bytes <= slot);
            (staged ? moved : direct) += one.bytes;
          }
        }
        copy = slice.ends_pages ? slice.first_copy + slice.copies : copy;
        piece = slice.ends_pages ? 0 : piece + slice.pieces;
      }
      CHECK(direct == copies.size() * page_bytes);
      CHECK(moved >= direct);  // Including the padding between neighbors.
      CHECK(moved < direct + copies.size() * kSlotAlignment);
    }
  }
}

TEST_SUITE("StagingRing") {
  TEST_CASE("a range waits for the newest one that it overlaps, and for no other") {
    std::mt19937_64 random(testing::seed());
    for (int round = 0; round < 50; ++round) {
      const std::uint64_t size = StagingRing::kAlignment * (4 + random() % 60);
      StagingRing ring(size);
      struct Taken {
        StagingRing::Range range;
        std::uint64_t bytes;
      };
      std::deque<Taken> taken;
      std::size_t waits = 0;
      for (int step = 0; step < 2'000; ++step) {
        if (random() % 3 == 0 && !taken.empty()) {
          ring.give_back();
          taken.pop_front();
          continue;
        }
        const std::uint64_t bytes = 1 + random() % (size / 2);
        const StagingRing::Range range = ring.take(bytes);
        CHECK(range.begin % StagingRing::kAlignment == 0);
        CHECK(range.begin + bytes <= size);
        std::uint64_t newest = 0;
        for (const auto& [other, other_bytes] : taken) {
          CHECK(other.number < range.number);
          // Both are multiples of the alignment.
          constexpr std::uint64_t kUnit = StagingRing::kAlignment;
          const auto end = [](std::uint64_t begin, std::uint64_t length) {
            return begin + (length + kUnit - 1) / kUnit * kUnit;
          };
          if (other.begin < end(range.begin, bytes) &&
              range.begin < end(other.begin, other_bytes)) {
            newest = other.number;
          }
        }
        CHECK(range.behind == newest);
        waits += newest != 0 ? 1 : 0;
        taken.push_back({range, bytes});
      }
      CHECK(waits > 0);
    }
  }

  TEST_CASE("an empty ring has room for its full size") {
    StagingRing ring(8 * StagingRing::kAlignment);
    REQUIRE(ring.take(3 * StagingRing::kAlignment).begin == 0);
    ring.give_back();
    const StagingRing::Range all = ring.take(8 * StagingRing::kAlignment);
    CHECK(all.begin == 0);
    CHECK(all.behind == 0);
    CHECK(ring.take(1).behind == all.number);
  }
}

}  // namespace
}  // namespace pegaflow::cuda
