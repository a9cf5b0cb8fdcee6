// Engines that keep their blocks on GPUs read them out of each other's memory: CUDA in software.
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "capnp/wire/codec.h"
#include "tests/integration/direct_worker.h"
#include "tests/support/open_descriptors.h"
#include "tests/support/seed.h"
#include "tests/support/server_process.h"
#include "tests/support/skip.h"
#include "tests/support/software_cuda.h"
#include "transport/cuda/cuda_device.h"

namespace pegaflow::testing {
namespace {

/// An engine whose memory is on a GPU of its own, and the stream on which it computes.
struct GpuWorker {
  static constexpr std::size_t kBlocks = 64;
  static constexpr std::size_t kPage = 2 * 8 * 1024;
  /// The size of an allocation of expandable segments: both layers together have more than the
  /// kernel's limit of descriptors in a message.
  static constexpr std::size_t kPiece = 4096;

  /// How its allocator has made the memory.
  enum class Allocator : std::uint8_t {
    kPlain,
    kExpandable,  ///< As with PyTorch's expandable segments.
    kElastic,     ///< The same, and it may put other memory at the same addresses.
  };

  GpuWorker(const std::string& socket, const std::string& name,
            const Mover::Options::Mistakes& mistakes = {}, bool shares = true,
            std::uint64_t features = ~std::uint64_t{0}, Allocator allocator = Allocator::kPlain)
      : memory(engine_memory(2, kPage / 2, kBlocks)), cuda(std::make_shared<SoftwareCuda>(seed())) {
    for (const Segment& segment : memory.layout().segments()) {
      const std::uint64_t bytes = kBlocks * segment.block_stride_bytes;
      if (allocator == Allocator::kPlain) {
        cuda->adopt(segment.base, bytes);
      } else {
        REQUIRE(cuda->adopt_expandable(segment.base, bytes, kPiece) == cuda::kSuccess);
      }
    }
    if (!shares) cuda->refuse_sharing();
    device =
        CudaDevice::create(
            {.staging_bytes = 256 << 10, .slice_bytes = 64 << 10, .register_bytes = 1 << 20}, cuda)
            .value();
    REQUIRE(cuda->create_stream(0, stream) == cuda::kSuccess);
    Mover::Options mover = patient_mover();
    mover.direct_group = "pd";
    mover.mistakes = mistakes;
    mover.has_fixed_memory = allocator != Allocator::kElastic;
    mover.link.features = features;
    TestEngine::Options options;
    options.socket = socket;
    options.instance = name;
    options.mover = std::move(mover);
    options.session.scheduler = Id128::random();
    engine = std::make_unique<TestEngine>(options, memory, *device);
    engine->scheduler = options.session.scheduler;
    engine->wait_ready();
  }
  ~GpuWorker() { cuda->resume(); }
  GpuWorker(const GpuWorker&) = delete;
  GpuWorker& operator=(const GpuWorker&) = delete;

  /// Marks the work that is queued on the engine's stream.
  Device::Event record() {
    return device->record_event(Device::Queue{reinterpret_cast<std::uintptr_t>(stream)}).value();
  }
  /// Saves blocks after that work, as a step does. They get their content by fill().
  void start_save(std::uint64_t job, const Numbers& numbers, const Blocks& blocks,
                  std::optional<Device::Event> computed = {}) {
    REQUIRE(engine->mover().save(engine->scheduler, job, 0, numbered_keys(numbers), blocks,
                                 record(), {}, false, computed));
  }
  void fill(const Numbers& numbers, const Blocks& blocks) {
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      memory.fill(blocks[i], TestEngine::seed_of(numbers[i], 0));
    }
  }
  void overwrite(const Blocks& blocks) {
    for (const std::uint32_t block : blocks) memory.fill(block, 0xBAD);
  }
  Result<void> follow(std::uint64_t load, const Numbers& numbers, const Blocks& blocks,
                      Duration patience = kHang) {
    return engine->mover().load_following(load, numbered_keys(numbers), blocks, patience);
  }
  bool finds_offered(const Numbers& numbers, std::size_t count) {
    return finds_offered_blocks(*engine, numbers, count);
  }
  /// Waits until so many kernels were queued on this GPU.
  bool wait_launches(std::size_t count) const {
    const auto end = std::chrono::steady_clock::now() + kHang;
    while (cuda->launches() < count) {
      if (std::chrono::steady_clock::now() >= end) return false;
      std::this_thread::yield();
    }
    return true;
  }

  EngineMemory memory;
  std::shared_ptr<SoftwareCuda> cuda;
  std::unique_ptr<CudaDevice> device;
  std::unique_ptr<TestEngine> engine;
  cuda::Stream stream = nullptr;
};

/// The prefill engine saves the blocks, and a load into blocks from 20 on gets them from the pool.
void check_pool_load(TestEngine& prefill, TestEngine& decode, const Numbers& numbers) {
  CHECK(prefill.next_finished().blocks == 6);
  const Mover::Finished loaded = decode.next_finished();
  CHECK_FALSE(loaded.error);
  CHECK(loaded.direct_bytes == 0);
  CHECK(decode.wrong_blocks(numbers, blocks_from(20, 6)) == 0);
}

/// Group and lane of an instance's only rank in /instances; null: none.
nlohmann::json lane_of(const ServerProcess& server, std::string_view name) {
  const auto page = nlohmann::json::parse(server.get("/instances").body);
  for (const auto& one : page.at("instances")) {
    if (one.at("instance") != name) continue;
    return one.at("ranks").at(0).value("direct", nlohmann::json());
  }
  return "no such instance";
}

struct GpuPair {
  explicit GpuPair(const Mover::Options::Mistakes& mistakes = {},
                   GpuWorker::Allocator allocator = GpuWorker::Allocator::kPlain)
      : prefill(server.socket(), "prefill", mistakes, true, ~std::uint64_t{0}, allocator),
        decode(server.socket(), "decode", mistakes, true, ~std::uint64_t{0}, allocator) {}

  /// Reads a prompt directly, for which the memory of the prefill engine is mapped.
  void read_once(const Numbers& numbers) {
    const Blocks from = blocks_from(0, numbers.size());
    prefill.cuda->block(prefill.stream, true);
    prefill.start_save(1, numbers, from);
    REQUIRE(decode.finds_offered(numbers, numbers.size()));
    REQUIRE(decode.follow(1, numbers, blocks_from(50, numbers.size())));
    end_step(numbers, from);
    REQUIRE(decode.engine->next_finished().direct_bytes == numbers.size() * GpuWorker::kPage);
    prefill.cuda->resume();
    REQUIRE_FALSE(prefill.engine->next_finished().error);
  }

  /// Its step ends: the blocks get their content, and nothing else happens on its GPU.
  void end_step(const Numbers& numbers, const Blocks& blocks) {
    prefill.fill(numbers, blocks);
    prefill.cuda->hold();
    prefill.cuda->block(prefill.stream, false);
    prefill.cuda->allow(1);
    prefill.cuda->settle();
  }

  ServerProcess server;
  GpuWorker prefill;
  GpuWorker decode;
};

/// Prompts that one GPU computes and another one loads, in any order of events.
class GpuRounds {
 public:
  explicit GpuRounds(const Mover::Options::Mistakes& mistakes = {},
                     GpuWorker::Allocator allocator = GpuWorker::Allocator::kPlain)
      : pair_(mistakes, allocator) {}

  /// The blocks of one further prompt that were reported as loaded with other bytes.
  std::size_t wrong_blocks() {
    ++job_;
    const std::size_t count = 1 + random_() % 10;
    const Numbers numbers = numbers_from(next_, count);
    next_ += count;
    const Blocks from = blocks_from(static_cast<std::uint32_t>(random_() % 20), count);
    const Blocks to = blocks_from(static_cast<std::uint32_t>(30 + random_() % 20), count);
    GpuWorker& prefill = pair_.prefill;
    GpuWorker& decode = pair_.decode;
    decode.overwrite(to);
    prefill.overwrite(from);
    prefill.cuda->block(prefill.stream, true);
    const bool loads_first = random_() % 2 == 0;
    if (loads_first) REQUIRE(decode.follow(job_, numbers, to));
    prefill.start_save(job_, numbers, from);
    if (!loads_first) REQUIRE(decode.follow(job_, numbers, to));
    if (random_() % 2 == 0) REQUIRE(decode.finds_offered(numbers, count));
    if (random_() % 3 == 0) {
      pair_.end_step(numbers, from);
      prefill.cuda->resume();
    } else {
      prefill.fill(numbers, from);
      prefill.cuda->block(prefill.stream, false);
    }
    const Mover::Finished saved = prefill.engine->next_finished();
    prefill.overwrite(from);
    CHECK(saved.blocks == count);
    const Mover::Finished loaded = decode.engine->next_finished();
    CHECK_FALSE(loaded.error);
    direct_ += loaded.direct_bytes / GpuWorker::kPage;
    return decode.engine->wrong_blocks(numbers, to, loaded.failed_blocks);
  }
  [[nodiscard]] std::uint64_t direct() const noexcept { return direct_; }

 private:
  std::mt19937_64 random_{seed()};
  GpuPair pair_;
  std::uint64_t job_ = 0;
  std::uint64_t next_ = 1;
  std::uint64_t direct_ = 0;
};

TEST_SUITE("direct reads between GPUs") {
  TEST_CASE("blocks are read from the other GPU as soon as its work on them is over") {
    if (!CudaDevice::has_kernels()) PEGA_SKIP("built without CUDA kernels");
    GpuPair f;
    const Numbers numbers = numbers_from(1, 12);
    const Blocks from = blocks_from(3, 12);
    const Blocks to = blocks_from(40, 12);
    f.prefill.overwrite(from);
    f.prefill.cuda->block(f.prefill.stream, true);

    f.prefill.start_save(1, numbers, from);
    REQUIRE(f.decode.finds_offered(numbers, 12));  // A decode engine may reserve its blocks.
    REQUIRE(f.decode.follow(7, numbers, to));
    f.end_step(numbers, from);

    const Mover::Finished loaded = f.decode.engine->next_finished();
    CHECK_FALSE(loaded.error);
    CHECK(loaded.direct_bytes == 12 * GpuWorker::kPage);
    CHECK(f.decode.engine->wrong_blocks(numbers, to) == 0);
    f.prefill.cuda->resume();
    const Mover::Finished saved = f.prefill.engine->next_finished();
    CHECK(saved.blocks == 12);
    CHECK(f.decode.engine->lookup(numbers).value().blocks == 12);
  }

  TEST_CASE(
      "blocks are read once they are computed, while their save waits for the rest of the step") {
    if (!CudaDevice::has_kernels()) PEGA_SKIP("built without CUDA kernels");
    GpuPair f;
    const Numbers numbers = numbers_from(1, 12);
    const Blocks from = blocks_from(3, 12);
    const Blocks to = blocks_from(40, 12);
    f.prefill.fill(numbers, from);
    const Device::Event computed = f.prefill.record();
    f.prefill.cuda->settle();
    f.prefill.cuda->block(f.prefill.stream, true);  // The rest of the step runs for long.
    f.prefill.start_save(1, numbers, from, computed);
    REQUIRE(f.decode.follow(7, numbers, to));

    const Mover::Finished loaded = f.decode.engine->next_finished();
    CHECK_FALSE(loaded.error);
    CHECK(loaded.direct_bytes == 12 * GpuWorker::kPage);
    CHECK(f.decode.engine->wrong_blocks(numbers, to) == 0);
    CHECK(f.decode.engine->lookup(numbers).value().blocks == 0);
    f.prefill.cuda->block(f.prefill.stream, false);
    CHECK(f.prefill.engine->next_finished().blocks == 12);
    CHECK(f.decode.engine->lookup(numbers).value().blocks == 12);
  }

  TEST_CASE("of two saves in flight, the blocks of the one that is over are read first") {
    if (!CudaDevice::has_kernels()) PEGA_SKIP("built without CUDA kernels");
    GpuPair f;
    const Numbers numbers = numbers_from(1, 8);
    const Numbers first = numbers_from(1, 4);
    const Numbers second = numbers_from(5, 4);
    f.prefill.cuda->block(f.prefill.stream, true);
    f.prefill.start_save(1, first, blocks_from(0, 4));
    f.prefill.start_save(2, second, blocks_from(4, 4));
    REQUIRE(f.decode.finds_offered(numbers, 8));
    REQUIRE(f.decode.follow(7, numbers, blocks_from(20, 8)));
    const std::size_t before = f.decode.cuda->launches();

    f.end_step(first, blocks_from(0, 4));
    REQUIRE(f.decode.wait_launches(before + 1));
    f.prefill.fill(second, blocks_from(4, 4));
    f.prefill.cuda->resume();

    const Mover::Finished loaded = f.decode.engine->next_finished();
    CHECK_FALSE(loaded.error);
    CHECK(loaded.direct_bytes >= 4 * GpuWorker::kPage);
    CHECK(f.decode.engine->wrong_blocks(numbers, blocks_from(20, 8)) == 0);
    f.prefill.engine->next_finished();
    f.prefill.engine->next_finished();
  }

  TEST_CASE("bytes that were read after their guard was closed do not count") {
    if (!CudaDevice::has_kernels()) PEGA_SKIP("built without CUDA kernels");
    const Numbers numbers = numbers_from(1, 6);
    // The prefill engine waits two seconds for the reader, whose GPU does not get on.
    const auto read_late = [&](const Mover::Options::Mistakes& mistakes) {
      GpuPair f(mistakes);
      f.read_once(numbers_from(100, 2));
      f.prefill.cuda->block(f.prefill.stream, true);
      f.prefill.start_save(2, numbers, blocks_from(0, 6));
      REQUIRE(f.decode.finds_offered(numbers, 6));
      const std::size_t before = f.decode.cuda->launches();
      f.decode.cuda->hold();
      REQUIRE(f.decode.follow(7, numbers, blocks_from(20, 6)));
      f.end_step(numbers, blocks_from(0, 6));
      REQUIRE(f.decode.wait_launches(before + 1));
      f.prefill.cuda->resume();
      CHECK(f.prefill.engine->next_finished().blocks == 6);
      f.prefill.overwrite(blocks_from(0, 6));
      f.decode.cuda->resume();
      const Mover::Finished loaded = f.decode.engine->next_finished();
      CHECK_FALSE(loaded.error);
      return std::pair(loaded.direct_bytes,
                       f.decode.engine->wrong_blocks(numbers, blocks_from(20, 6)));
    };
    CHECK(read_late({}) == std::pair<std::uint64_t, std::size_t>(0, 0));
    // A mistake in closing or comparing them would be seen by this test.
    CHECK(read_late({.keeps_guards = true}).second == 6);
    CHECK(read_late({.checks_guards_first = true}).second == 6);
  }

  TEST_CASE("expandable segments are read, and no descriptor of them stays") {
    if (!CudaDevice::has_kernels()) PEGA_SKIP("built without CUDA kernels");
    GpuPair f({}, GpuWorker::Allocator::kExpandable);
    CHECK(lane_of(f.server, "prefill").at("lane") == "cuda");
    f.read_once(numbers_from(1, 12));
    CHECK(f.decode.engine->wrong_blocks(numbers_from(1, 12), blocks_from(50, 12)) == 0);

    const std::size_t here = open_descriptors();
    const std::size_t there = open_descriptors(f.server.pid());
    for (int i = 0; i < 3; ++i) {
      GpuWorker other(f.server.socket(), "other", {}, true, ~std::uint64_t{0},
                      GpuWorker::Allocator::kExpandable);
      // Its two layers have 128 allocations each, of which the server has one descriptor.
      CHECK(open_descriptors(f.server.pid()) < there + 256 + 16);
    }
    const auto end = std::chrono::steady_clock::now() + kHang;
    while (open_descriptors(f.server.pid()) > there && std::chrono::steady_clock::now() < end) {
      std::this_thread::yield();
    }
    CHECK(open_descriptors(f.server.pid()) <= there);
    CHECK(open_descriptors() <= here);
  }

  TEST_CASE("all readers map memory of many allocations, although few descriptors can be sent") {
    if (!CudaDevice::has_kernels()) PEGA_SKIP("built without CUDA kernels");
    // The kernel lets a user send no more descriptors at a time than a process may have.
    ServerProcess server({.command_prefix = {"setpriv", "--inh-caps=-sys_resource,-sys_admin",
                                             "--bounding-set=-sys_resource,-sys_admin", "sh", "-c",
                                             "ulimit -n 1900; exec \"$0\" \"$@\""}});
    constexpr auto kAll = ~std::uint64_t{0};
    GpuWorker prefill(server.socket(), "prefill", {}, true, kAll,
                      GpuWorker::Allocator::kExpandable);
    std::vector<std::unique_ptr<GpuWorker>> readers;
    for (int i = 0; i < 12; ++i) {
      readers.push_back(std::make_unique<GpuWorker>(server.socket(), "decode" + std::to_string(i)));
    }
    for (std::uint64_t round = 1; round <= 2; ++round) {
      const Numbers numbers = numbers_from(100 * round, 6);
      prefill.cuda->block(prefill.stream, true);
      prefill.start_save(round, numbers, blocks_from(0, 6));
      for (auto& each : readers) REQUIRE(each->follow(round, numbers, blocks_from(20, 6)));
      REQUIRE(server.metric_becomes("pegaflow_direct_waits", static_cast<double>(readers.size())));
      prefill.fill(numbers, blocks_from(0, 6));
      prefill.cuda->hold();
      prefill.cuda->block(prefill.stream, false);
      prefill.cuda->allow(1);
      // The save goes on once all have read.
      for (auto& each : readers) {
        CHECK(each->engine->next_finished().direct_bytes == 6 * GpuWorker::kPage);
        CHECK(each->engine->wrong_blocks(numbers, blocks_from(20, 6)) == 0);
      }
      prefill.cuda->resume();
      REQUIRE_FALSE(prefill.engine->next_finished().error);
    }
  }

  TEST_CASE("without shared memory, or with a server that lacks it, blocks come from the pool") {
    ServerProcess server;
    bool prefill_shares = true;
    bool decode_shares = true;
    std::uint64_t features = ~std::uint64_t{0};
    SUBCASE("the prefill engine cannot share its memory") { prefill_shares = false; }
    SUBCASE("the decode engine cannot") { decode_shares = false; }
    SUBCASE("the server supports engines on CPUs only") { features = ~kFeaturePending; }
    auto allocator = GpuWorker::Allocator::kPlain;
    SUBCASE("the server does not support expandable segments") {
      features = ~kFeatureRanges;
      allocator = GpuWorker::Allocator::kExpandable;
    }
    SUBCASE("their allocators may replace the memory") {
      allocator = GpuWorker::Allocator::kElastic;
    }
    GpuWorker prefill(server.socket(), "prefill", {}, prefill_shares, features, allocator);
    GpuWorker decode(server.socket(), "decode", {}, decode_shares, features, allocator);
    for (std::uint64_t round = 1; round <= 3; ++round) {
      const Numbers numbers = numbers_from(round * 10, 6);
      prefill.fill(numbers, blocks_from(0, 6));
      prefill.cuda->block(prefill.stream, true);
      prefill.start_save(round, numbers, blocks_from(0, 6));
      REQUIRE(decode.follow(round, numbers, blocks_from(20, 6)));
      CHECK(decode.engine->lookup(numbers).value().offered == 0);
      prefill.cuda->block(prefill.stream, false);
      check_pool_load(*prefill.engine, *decode.engine, numbers);
    }
  }

  TEST_CASE("a GPU that cannot map the other one's memory gets the blocks from the pool") {
    if (!CudaDevice::has_kernels()) PEGA_SKIP("built without CUDA kernels");
    GpuPair f;
    f.decode.cuda->refuse_sharing();
    for (std::uint64_t round = 1; round <= 3; ++round) {
      const Numbers numbers = numbers_from(round * 10, 6);
      f.prefill.fill(numbers, blocks_from(0, 6));
      f.prefill.start_save(round, numbers, blocks_from(0, 6));
      REQUIRE(f.decode.follow(round, numbers, blocks_from(20, 6)));
      check_pool_load(*f.prefill.engine, *f.decode.engine, numbers);
    }
  }

  TEST_CASE("engines on CPUs and on GPUs of one group do not read each other") {
    ServerProcess server;
    GpuWorker prefill(server.socket(), "prefill");
    DirectWorker decode(server.socket(), "decode");
    DirectWorker other(server.socket(), "other", "");
    CHECK(lane_of(server, "prefill") == nlohmann::json{{"group", "pd"}, {"lane", "cuda"}});
    CHECK(lane_of(server, "decode") ==
          nlohmann::json{{"group", "pd"}, {"lane", "process_vm_readv"}});
    CHECK(lane_of(server, "other").is_null());
    const Numbers numbers = numbers_from(1, 6);
    prefill.fill(numbers, blocks_from(0, 6));
    prefill.cuda->block(prefill.stream, true);
    prefill.start_save(1, numbers, blocks_from(0, 6));
    REQUIRE(decode.finds_offered(numbers, 6));
    REQUIRE(decode.follow(7, numbers, blocks_from(20, 6)));
    prefill.cuda->block(prefill.stream, false);
    check_pool_load(*prefill.engine, *decode.engine, numbers);
  }

  TEST_CASE("in any order of events, no load reports other bytes than those of its keys") {
    if (!CudaDevice::has_kernels()) PEGA_SKIP("built without CUDA kernels");
    CAPTURE(seed());
    auto allocator = GpuWorker::Allocator::kPlain;
    SUBCASE("of memory with handles") {}
    SUBCASE("of expandable segments") { allocator = GpuWorker::Allocator::kExpandable; }
    GpuRounds rounds({}, allocator);
    const std::size_t count = direct_rounds(200);
    for (std::size_t round = 0; round < count; ++round) {
      CAPTURE(round);
      REQUIRE(rounds.wrong_blocks() == 0);
    }
    MESSAGE(count, " prompts, ", rounds.direct(), " blocks were read directly");
    CHECK(rounds.direct() > 0);
  }

  TEST_CASE("blocks that are announced before the GPU has computed them are detected") {
    if (!CudaDevice::has_kernels()) PEGA_SKIP("built without CUDA kernels");
    CAPTURE(seed());
    GpuRounds rounds({.ready_at_once = true});
    std::size_t wrong = 0;
    for (int round = 0; round < 200 && wrong == 0; ++round) wrong = rounds.wrong_blocks();
    CHECK(wrong != 0);
  }
}

}  // namespace
}  // namespace pegaflow::testing
