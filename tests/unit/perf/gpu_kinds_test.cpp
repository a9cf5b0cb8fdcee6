#include "perf/gpu/gpu_kinds.h"

#include <memory>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "harness/engine_memory.h"
#include "harness/pattern.h"
#include "tests/support/seed.h"
#include "tests/support/software_cuda.h"

namespace pegaflow::perf {
namespace {

std::vector<GpuKind> kinds_of(const std::vector<std::string>& texts) {
  return parse_kinds(texts).value();
}

std::string refused(const std::vector<std::string>& texts) {
  const auto kinds = parse_kinds(texts);
  REQUIRE_FALSE(kinds);
  CHECK(kinds.error().code == Errc::kInvalidArgument);
  return kinds.error().detail;
}

/// A device in software, and a pool.
struct Rig {
  explicit Rig(std::size_t pool_bytes)
      : pool(harness::Mapping::anonymous(pool_bytes).value()),
        device(CudaDevice::create({.staging_bytes = 1 << 20, .slice_bytes = 256 << 10}, driver)
                   .value()) {}
  Result<void> measure(const KindsRun& run) {
    return measure_kinds(run, driver, *device, pool.bytes(), figures);
  }
  std::shared_ptr<testing::SoftwareCuda> driver =
      std::make_shared<testing::SoftwareCuda>(testing::seed());
  harness::Mapping pool;
  std::unique_ptr<CudaDevice> device;
  std::vector<Figure> figures;
};

KindsRun small_run(const std::vector<std::string>& kinds) {
  return {.kinds = kinds_of(kinds),
          .orders = {"shuffled", "in-order"},
          .rounds = 2,
          .milliseconds = 20,
          .seed = testing::seed(),
          .check = true};
}

TEST_SUITE("gpu_kinds") {
  TEST_CASE("a kind has groups of layers, and the blocks of a job") {
    const auto kinds = kinds_of({"full:8x128kb@625", "window:5x8x128KiB@64"});
    CHECK(kinds[0].groups == 1);
    CHECK(kinds[0].group.page_bytes() == 1 << 20);
    CHECK(kinds[0].job_bytes() == std::uint64_t{625} << 20);
    CHECK(kinds[1].groups == 5);
    CHECK(kinds[1].slot_bytes() == 5 << 20);
    CHECK(kinds[1].blocks == 64);
    CHECK(to_string(kinds) == "625 of full 8 x 128 KiB, 64 of window 5 x 8 x 128 KiB");
  }

  TEST_CASE("kinds without a number of blocks have equal shares of 256 MiB") {
    const auto kinds = kinds_of({"full:1x1mb", "state:3x4x1mb"});
    CHECK(kinds[0].blocks == 128);
    CHECK(kinds[1].blocks == 10);
    CHECK(kinds_of({"state:64x8mb"})[0].blocks == 1);
    CHECK(kinds_of({"pieces:4096x512"})[0].slot_bytes() == 2 << 20);
  }

  TEST_CASE("an invalid kind is refused by its text") {
    for (const std::string text :
         {"", "full", ":1x64kb", "full:64kb", "full:0x64kb", "full:x64kb", "full:1x2x3x64kb",
          "full:65x1x64kb", "full:4097x512", "full:1x", "full:1x0", "full:1xmany", "full:1x64kb@",
          "full:1x64kb@0", "full:1x64kb@b", "full:1x64kb@100001"}) {
      CHECK(refused({text}).find("'" + text + "' is not NAME:") != std::string::npos);
    }
    CHECK(refused({"full:1x100"}).find("multiple of 16 bytes") != std::string::npos);
    CHECK(refused({"full:64x64mb"}).find("at most 1 GiB a page") != std::string::npos);
    CHECK(refused({}).find("0 kinds; give 1 to 16") != std::string::npos);
    CHECK(refused(std::vector<std::string>(17, "full:1x64kb")).find("17 kinds") !=
          std::string::npos);
  }

  TEST_CASE(
      "saves and loads of overlaid groups stand beside contiguous copies, every byte checked") {
    Rig rig(8 << 20);
    // Pages that do not fill their slots, and groups with fewer or smaller layers than others.
    REQUIRE(rig.measure(small_run({"full:3x2kb@20", "window:5x2x1040@9", "state:2x1x64kb@2"})));
    REQUIRE(rig.figures.size() == 6);
    std::vector<std::string> runs;
    for (const Figure& figure : rig.figures) {
      runs.push_back(figure.run.substr(0, 4) + figure.run.substr(figure.run.rfind(", ") - 8, 8));
      CHECK(figure.figure > 0);
      CHECK(figure.ratio().value() > 0);
      CHECK(figure.n == 2);
      CHECK(figure.held().has_value());
    }
    CHECK(runs == std::vector<std::string>{"saveshuffled", "loadshuffled", "bothshuffled",
                                           "savein-order", "loadin-order", "bothin-order"});
    CHECK(rig.driver->registered_ranges() == 0);
  }

  TEST_CASE("a set that has no room for a save and a load is refused") {
    Rig rig(1 << 20);
    const auto done = rig.measure(small_run({"full:3x2kb@20", "state:2x1x64kb@8"}));
    REQUIRE_FALSE(done);
    CHECK(done.error().detail.find("--set: 1 MiB are less than two jobs of 1.16 MiB") == 0);
  }

  TEST_CASE("a byte of a group that is not its page's is found") {
    const auto driver = std::make_shared<testing::SoftwareCuda>(testing::seed());
    const std::vector<GpuGroup> groups{{.segments = 2, .segment_bytes = 64},
                                       {.segments = 1, .segment_bytes = 32}};
    const auto memory = GpuMemory::create(driver, 0, groups, 4).value();
    // The driver's memory is the host's.
    const auto put = [&](std::size_t layout, std::uint32_t block, std::uint32_t origin) {
      std::size_t i = 0;
      for (const Segment& segment : memory->layouts()[layout].segments()) {
        harness::write_pattern(
            {segment.base + block * segment.block_stride_bytes, segment.size_bytes},
            harness::pattern_seed(9, origin), i++ * segment.size_bytes);
      }
    };
    put(0, 3, 0);
    put(1, 1, 1);
    const std::vector<GpuMemory::Expected> pages{{.layout = 0, .block = 3, .origin = 0},
                                                 {.layout = 1, .block = 1, .origin = 1}};
    CHECK(memory->check(pages, 9));
    memory->layouts()[0].segments()[1].base[3 * 64 + 63] ^= std::byte{1};
    CHECK(memory->check(pages, 9).error().detail ==
          "segment 1 of block 3 differs from the page of 0");
    put(0, 3, 0);
    memory->layouts()[1].segments()[0].base[64] ^= std::byte{1};
    CHECK(memory->check(pages, 9).error().code == Errc::kCorrupt);
  }
}

}  // namespace
}  // namespace pegaflow::perf
