/// \file
/// `pegaflow-perf gpu`: the rate of copies between a GPU and the pool, idle and beside matrix
/// products, and the speed that the products keep.

#include <algorithm>
#include <atomic>
#include <iostream>
#include <numeric>
#include <optional>
#include <random>
#include <thread>

#include "base/units.h"
#include "engine/pool/pool.h"
#include "harness/pattern.h"
#include "perf/gpu/batch_inbox.h"
#include "perf/gpu/gemm.h"
#include "perf/gpu/gpu_kinds.h"
#include "perf/gpu/gpu_memory.h"
#include "perf/gpu/gpu_page.h"
#include "perf/lib/command.h"
#include "transport/cuda/cuda_device.h"

namespace pegaflow::perf {
namespace {

using Clock = std::chrono::steady_clock;
using Direction = Device::Direction;
using Directions = GpuMemory::Directions;

constexpr std::size_t kBatchPages = 128;
constexpr std::uint64_t kCheckedPages = 256;

struct GpuOptions {
  CommonOptions common;
  std::int64_t device = 0;
  std::int64_t rounds = 3;
  std::int64_t milliseconds = 200;
  std::uint64_t page = std::uint64_t{2} << 20;
  std::uint64_t set = std::uint64_t{2} << 30;
  std::uint64_t registered = std::uint64_t{32} << 30;
  std::uint64_t staging = std::uint64_t{128} << 20;
  std::uint64_t slice = std::uint64_t{32} << 20;
  std::int64_t blocks = 0;
  std::int64_t pages = 200;
  std::int64_t register_threads = 8;
  std::uint64_t register_range = std::uint64_t{1} << 30;
  bool low_priority = false;
  bool no_gemm = false;
  bool check = false;
  std::string path = "auto";
  std::string cublas;
  std::vector<std::string> segments = {"16kb",  "32kb",  "64kb", "128kb",
                                       "256kb", "512kb", "1mb",  "2mb"};
  std::vector<std::string> orders = {"shuffled"};
  std::vector<std::string> kinds;
};

/// The places of each page of the set on both sides.
struct Set {
  std::vector<std::uint32_t> blocks;
  std::vector<std::uint64_t> slots;
};

/// One direction: keeps a few batches queued until the time is over.
class Stream {
 public:
  Stream(Device& device, BatchInbox& inbox, const Set& set, std::uint64_t page_bytes,
         Direction direction)
      : device_(device), inbox_(inbox), set_(set), page_bytes_(page_bytes), direction_(direction) {}

  Result<void> run(Clock::time_point until) {
    while (Clock::now() < until) {
      PEGA_TRY(send());
      PEGA_TRY(inbox_.wait(sent_, 4));
    }
    return inbox_.wait(sent_, 0);
  }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return pages_ * page_bytes_; }

 private:
  Result<void> send() {
    Device::Batch batch{.ticket = ++sent_ * 2 + (direction_ == Direction::kSave ? 0 : 1),
                        .direction = direction_,
                        .copies = {}};
    for (std::size_t i = 0; i < kBatchPages; ++i, next_ = (next_ + 1) % set_.blocks.size()) {
      batch.copies.push_back({set_.blocks[next_], set_.slots[next_] * page_bytes_});
    }
    pages_ += batch.copies.size();
    return device_.submit(std::move(batch));
  }

  Device& device_;
  BatchInbox& inbox_;
  const Set& set_;
  std::uint64_t page_bytes_;
  Direction direction_;
  std::uint64_t sent_ = 0;
  std::uint64_t pages_ = 0;
  std::size_t next_ = 0;
};

struct Copied {
  double rate = 0;  ///< GB/s, both directions added up.
  Clock::time_point begin;
  Clock::time_point end;
};

/// The figures of one segment size.
class Bench {
 public:
  Bench(const GpuOptions& options, std::shared_ptr<cuda::Driver> driver, CudaDevice& device,
        engine::Pool& pool, Gemm* gemm, std::vector<Figure>& figures)
      : options_(options),
        driver_(std::move(driver)),
        device_(device),
        pool_(pool),
        gemm_(gemm),
        figures_(figures) {}

  /// How contiguous copies and the products slow each other down: a limit of the bound itself.
  Result<void> run_contiguous() {
    page_bytes_ = segment_bytes_ = std::uint64_t{64} << 20;
    PEGA_TRY_LET(memory_, GpuMemory::create(driver_, static_cast<int>(options_.device), page_bytes_,
                                            page_bytes_, 8));
    // Only to page-lock the pool.
    PEGA_TRY(device_.attach(memory_->layout(), pool_.bytes(), [](Device::Completion&&) {}));
    Result<void> done = compare_contiguous();
    device_.detach();
    return done;
  }

  Result<void> run(std::uint64_t segment_bytes) {
    segment_bytes_ = segment_bytes;
    page_bytes_ = std::max(segment_bytes, options_.page);
    const std::uint64_t count = options_.set / page_bytes_;
    PEGA_TRY_LET(memory_, GpuMemory::create(driver_, static_cast<int>(options_.device), page_bytes_,
                                            segment_bytes, count));
    PEGA_TRY(device_.attach(memory_->layout(), pool_.bytes(), [this](Device::Completion&& done) {
      inboxes_[done.ticket % 2]->put(std::move(done));
    }));
    Result<void> done;
    for (const std::string& order : options_.orders) {
      if (done) done = run_order(order);
    }
    device_.detach();  // Also after an error: pool and memory outlive the attachment.
    return done;
  }

 private:
  Result<void> compare_contiguous() {
    const double seconds = static_cast<double>(options_.milliseconds) / 1e3;
    const std::chrono::milliseconds window(options_.milliseconds);
    for (const Directions directions :
         {Directions::kToHost, Directions::kToDevice, Directions::kBoth}) {
      Rounds copies;
      Rounds products;
      for (std::int64_t round = 0; round < options_.rounds; ++round) {
        PEGA_TRY_LET(const double idle,
                     memory_->contiguous_rate(pool_.bytes(), directions, seconds));
        gemm_->resume();
        std::this_thread::sleep_for(window);
        PEGA_TRY_LET(const double before, gemm_alone(window));
        const auto begin = Clock::now();
        const Result<double> busy = memory_->contiguous_rate(pool_.bytes(), directions, seconds);
        const auto end = Clock::now();
        PEGA_TRY_LET(const double behind, gemm_alone(window));
        gemm_->pause();
        if (!busy) return tl::unexpected<Error>(busy.error());
        PEGA_TRY_LET(const double kept, gemm_->rate(begin, end));
        copies.add({*busy}, {idle});
        products.add({kept}, {(before + behind) / 2});
      }
      PEGA_TRY(
          add(copies, directions, "contiguous beside GEMM", "GB/s", "contiguous copy, idle", {}));
      PEGA_TRY(add(products, directions, "contiguous, GEMM kept", "TFLOP/s", "GEMM alone", {}));
    }
    return {};
  }

  Result<void> run_order(const std::string& order) {
    order_ = order;
    const std::uint64_t count = options_.set / page_bytes_;
    std::mt19937_64 random(static_cast<std::uint64_t>(options_.common.seed));
    for (Set& set : sets_) {
      const std::uint64_t first = &set == &sets_[0] ? 0 : count / 2;
      set.blocks.resize(count / 2);
      std::iota(set.blocks.begin(), set.blocks.end(), static_cast<std::uint32_t>(first));
      set.slots.assign(set.blocks.begin(), set.blocks.end());
      if (order == "shuffled") {
        std::shuffle(set.blocks.begin(), set.blocks.end(), random);
        std::shuffle(set.slots.begin(), set.slots.end(), random);
      }
    }
    if (options_.check) PEGA_TRY(check());
    for (const Directions directions :
         {Directions::kToHost, Directions::kToDevice, Directions::kBoth}) {
      PEGA_TRY(measure(directions, false));
      if (gemm_ != nullptr) PEGA_TRY(measure(directions, true));
    }
    return {};
  }

  Result<Copied> copy(Directions directions) {
    inboxes_[0] = std::make_unique<BatchInbox>();
    inboxes_[1] = std::make_unique<BatchInbox>();
    Copied copied;
    copied.begin = Clock::now();
    const auto until = copied.begin + std::chrono::milliseconds(options_.milliseconds);
    Stream saves(device_, *inboxes_[0], sets_[0], page_bytes_, Direction::kSave);
    Stream loads(device_, *inboxes_[1], sets_[1], page_bytes_, Direction::kLoad);
    Result<void> saved;
    std::thread other;
    if (directions == Directions::kBoth) {
      other = std::thread([&] { saved = saves.run(until); });
    } else if (directions == Directions::kToHost) {
      saved = saves.run(until);
    }
    Result<void> loaded;
    if (directions != Directions::kToHost) loaded = loads.run(until);
    if (other.joinable()) other.join();
    PEGA_TRY(saved);
    PEGA_TRY(loaded);
    copied.end = Clock::now();
    const std::chrono::duration<double> took = copied.end - copied.begin;
    copied.rate = static_cast<double>(saves.bytes() + loads.bytes()) / took.count() / 1e9;
    return copied;
  }

  Result<void> measure(Directions directions, bool busy) {
    const double seconds = static_cast<double>(options_.milliseconds) / 1e3;
    const std::chrono::milliseconds window(options_.milliseconds);
    Rounds copies;
    Rounds products;
    if (auto warm = copy(directions); !warm) return tl::unexpected<Error>(warm.error());
    for (std::int64_t round = 0; round < options_.rounds; ++round) {
      PEGA_TRY_LET(const double peak,
                   memory_->contiguous_rate(pool_.bytes(), directions, seconds / 2));
      if (busy) {
        gemm_->resume();
        std::this_thread::sleep_for(window);  // Clocks and power become stable.
        // Alone before and after, because they drift.
        PEGA_TRY_LET(const double before, gemm_alone(window));
        const Result<Copied> ours = copy(directions);
        PEGA_TRY_LET(const double behind, gemm_alone(window));
        gemm_->pause();
        if (!ours) return tl::unexpected<Error>(ours.error());
        PEGA_TRY_LET(const double kept, gemm_->rate(ours->begin, ours->end));
        copies.add({ours->rate}, {peak});
        products.add({kept}, {(before + behind) / 2});
      } else {
        PEGA_TRY_LET(const Copied ours, copy(directions));
        copies.add({ours.rate}, {peak});
      }
    }
    const bool both = directions == Directions::kBoth;
    PEGA_TRY(add(copies, directions, busy ? "beside GEMM" : "idle", "GB/s", "contiguous copy, idle",
                 busy || both ? 0.95 : 0.97));
    if (busy) {
      PEGA_TRY(
          add(products, directions, "GEMM kept", "TFLOP/s", "GEMM alone", both ? 0.965 : 0.98));
    }
    return {};
  }

  Result<double> gemm_alone(std::chrono::milliseconds window) {
    const auto begin = Clock::now();
    std::this_thread::sleep_for(window);
    return gemm_->rate(begin, Clock::now());
  }

  Result<void> add(const Rounds& rounds, Directions directions, const std::string& what,
                   std::string unit, std::string bound_name, std::optional<double> target) {
    PEGA_TRY_LET(const Rounds::Comparison compared, rounds.compare());
    const std::string direction = directions == Directions::kToHost     ? "save"
                                  : directions == Directions::kToDevice ? "load"
                                                                        : "both";
    const CudaDevice::Info info = device_.info();
    const std::string path = what.starts_with("contiguous")     ? "plain"
                             : info.path == cuda::Path::kDirect ? "direct"
                                                                : "staged";
    figures_.push_back(
        {.run = fmt::format("{} {}, {} segments {}, {}", direction, what,
                            format_bytes(segment_bytes_), order_, path),
         .params = {{"segment_bytes", static_cast<std::int64_t>(segment_bytes_)},
                    {"page_bytes", static_cast<std::int64_t>(page_bytes_)},
                    {"direction", direction},
                    {"order", order_},
                    {"path", path},
                    {"what", what},
                    {"gpu", info.name}},
         .figure = compared.figure.median(),
         .unit = std::move(unit),
         .bound = compared.bound.median(),
         .bound_name = std::move(bound_name),
         .side = Side::kAtLeast,
         .target = target,
         .n = compared.rounds,
         .spread = fmt::format("ratio {:.3f} to {:.3f}", compared.ratio_low, compared.ratio_high)});
    return {};
  }

  /// Loads pages with a pattern, reads the GPU's memory by other means, saves the pages elsewhere,
  /// and compares every byte.
  Result<void> check() {
    const std::size_t count = std::min<std::uint64_t>(kCheckedPages, sets_[0].blocks.size());
    const std::uint64_t salt = static_cast<std::uint64_t>(options_.common.seed) + segment_bytes_;
    const auto page_at = [&](std::uint64_t slot) {
      return pool_.bytes().subspan(slot * page_bytes_, page_bytes_);
    };
    PEGA_TRY(memory_->clear());
    Device::Batch load{.ticket = 1, .direction = Direction::kLoad, .copies = {}};
    Device::Batch save{.ticket = 2, .direction = Direction::kSave, .copies = {}};
    std::vector<GpuMemory::Expected> pages;
    for (std::size_t i = 0; i < count; ++i) {
      harness::write_pattern(page_at(sets_[0].slots[i]), harness::pattern_seed(salt, i));
      load.copies.push_back({sets_[0].blocks[i], sets_[0].slots[i] * page_bytes_, true});
      save.copies.push_back({sets_[0].blocks[i], sets_[1].slots[i] * page_bytes_, true});
      pages.push_back({.block = sets_[0].blocks[i], .origin = static_cast<std::uint32_t>(i)});
    }
    for (std::unique_ptr<BatchInbox>& inbox : inboxes_) inbox = std::make_unique<BatchInbox>();
    PEGA_TRY(device_.submit(load));
    PEGA_TRY(inboxes_[1]->wait(1, 0));
    PEGA_TRY(memory_->check(pages, salt));
    PEGA_TRY(device_.submit(save));
    PEGA_TRY(inboxes_[0]->wait(1, 0));
    for (std::size_t i = 0; i < count; ++i) {
      if (!harness::is_pattern(page_at(sets_[1].slots[i]), harness::pattern_seed(salt, i))) {
        return fail(Errc::kCorrupt, "the page of block {} is not what was saved", pages[i].block);
      }
    }
    return {};
  }

  const GpuOptions& options_;
  const std::shared_ptr<cuda::Driver> driver_;
  CudaDevice& device_;
  engine::Pool& pool_;
  Gemm* const gemm_;
  std::vector<Figure>& figures_;
  std::uint64_t segment_bytes_ = 0;
  std::uint64_t page_bytes_ = 0;
  std::string order_ = "in order";
  Set sets_[2];  ///< Pages of saves and of loads, disjoint.
  std::unique_ptr<BatchInbox> inboxes_[2];
  std::unique_ptr<GpuMemory> memory_;
};

/// Creates the device of all sizes: an engine too has one for its lifetime.
Result<std::unique_ptr<CudaDevice>> make_device(const GpuOptions& options,
                                                const std::shared_ptr<cuda::Driver>& driver) {
  CudaDevice::Options device{.ordinal = static_cast<int>(options.device),
                             .staging_bytes = options.staging,
                             .slice_bytes = options.slice,
                             .kernel_blocks = static_cast<unsigned>(options.blocks),
                             .low_priority = options.low_priority};
  if (options.path == "staged") device.path = cuda::Path::kStaged;
  if (options.path == "direct") device.path = cuda::Path::kDirect;
  return CudaDevice::create(device, driver);
}

Result<engine::Pool> make_pool(std::uint64_t bytes) {
  const std::atomic<bool> stop{false};
  return engine::Pool::create({.size_bytes = bytes}, stop, [](std::uint64_t, std::uint64_t) {});
}

std::string memory_of(const engine::Pool& pool) {
  return fmt::format("pages of {}", format_bytes(pool.page_bytes()));
}

/// The time to register a large pool with CUDA.
Result<Figure> measure_registration(const GpuOptions& options,
                                    const std::shared_ptr<cuda::Driver>& driver) {
  PEGA_TRY_LET(engine::Pool pool, make_pool(options.registered));
  PEGA_TRY_LET(const auto memory, GpuMemory::create(driver, static_cast<int>(options.device),
                                                    options.page, 64 << 10, 4));
  PEGA_TRY_LET(
      const auto device,
      CudaDevice::create({.ordinal = static_cast<int>(options.device),
                          .register_bytes = options.register_range,
                          .register_threads = static_cast<unsigned>(options.register_threads)},
                         driver));
  std::vector<double> seconds;
  for (std::int64_t round = 0; round < options.rounds; ++round) {
    PEGA_TRY(device->attach(memory->layout(), pool.bytes(), [](Device::Completion&&) {}));
    seconds.push_back(std::chrono::duration<double>(device->info().register_time).count());
    device->detach();
  }
  const double first = seconds.front();
  PEGA_TRY_LET(const Samples samples, Samples::of(std::move(seconds)));
  return Figure{.run = fmt::format("register a pool of {}, {}", format_bytes(pool.size_bytes()),
                                   memory_of(pool)),
                .params = {{"pool_bytes", static_cast<std::int64_t>(pool.size_bytes())},
                           {"memory", memory_of(pool)}},
                .figure = samples.median(),
                .unit = "s",
                .bound = 1,
                .bound_name = "the target of a start",
                .side = Side::kAtMost,
                .target = 1,
                .n = samples.count(),
                .spread = fmt::format("{:.2f} to {:.2f}, the first {:.2f}", samples.quantile(0),
                                      samples.quantile(1), first)};
}

void declare(OptionTable& table, GpuOptions& o) {
  declare(table, o.common);
  table.integer("device", o.device, 0, 63, "The GPU, by its number in this process.");
  table.list("segments", o.segments, "Segment sizes: the share of one layer in a block.");
  table.list("kinds", o.kinds,
             "Measure jobs with these kinds of blocks instead, on an idle GPU only. Each is "
             "NAME:[GROUPSx]LAYERSxBYTES[@BLOCKS]: groups of layers, over the same memory as those "
             "of all kinds, with so many bytes of a block each, and the blocks of each save and "
             "load; without @BLOCKS an equal share of 256mb.");
  table.bytes("page", o.page, 64 << 10, std::uint64_t{64} << 20,
              "Page size, a block over all layers; a larger segment is a page by itself.");
  table.list("orders", o.orders, "Orders of the blocks: shuffled, in-order.");
  table.bytes("set", o.set, std::uint64_t{512} << 20, std::uint64_t{64} << 30,
              "Bytes that are copied repeatedly; half of them per direction when both run.");
  table.integer("rounds", o.rounds, 1, 100, "Rounds that alternate with the bound.");
  table.integer("milliseconds", o.milliseconds, 20, 10'000, "Length of one round.");
  table.bytes("register", o.registered, 0, std::uint64_t{1} << 40,
              "Pool size whose registration is timed; 0: none.");
  table.integer("register-threads", o.register_threads, 1, 256, "Threads of the registration.");
  table.bytes("register-range", o.register_range, 2 << 20, std::uint64_t{1} << 40,
              "Bytes registered at a time; a power of two.");
  table.integer("pages", o.pages, 0, 100'000, "Loads and saves of one page that are timed.");
  table.text("path", o.path, "auto, staged or direct.");
  table.bytes("staging", o.staging, 1 << 20, std::uint64_t{4} << 30,
              "Staging memory on the GPU, per direction.");
  table.bytes("slice", o.slice, 64 << 10, std::uint64_t{1} << 30, "Bytes copied at a time.");
  table.integer("kernel-blocks", o.blocks, 0, 10'000,
                "Thread blocks of a kernel; 0: one per multiprocessor.");
  table.flag("low-priority", o.low_priority, "Give kernels a lower priority than the engine's.");
  table.flag("no-gemm", o.no_gemm, "Measure only on an idle GPU.");
  table.text("cublas", o.cublas, "Path of cuBLAS if the loader does not find it.");
  table.flag("check", o.check, "Compare every byte in both directions before measuring.");
}

/// Errors: kInvalidArgument, which names the option.
Result<void> check_words(const GpuOptions& options) {
  for (const std::string& order : options.orders) {
    if (order != "shuffled" && order != "in-order") {
      return fail(Errc::kInvalidArgument, "--orders: '{}' is neither shuffled nor in-order", order);
    }
  }
  if (options.path != "auto" && options.path != "staged" && options.path != "direct") {
    return fail(Errc::kInvalidArgument, "--path: '{}' is not auto, staged or direct", options.path);
  }
  return {};
}

/// Errors: kInvalidArgument, which names the size.
Result<std::vector<std::uint64_t>> segment_sizes(const GpuOptions& options) {
  std::vector<std::uint64_t> sizes;
  for (const std::string& text : options.segments) {
    PEGA_TRY_LET(const std::uint64_t bytes, parse_bytes(text));
    const std::uint64_t page = std::max(options.page, bytes);
    if (bytes < 4096 || bytes % 16 != 0 || page % bytes != 0 || page > options.set / 8) {
      return fail(Errc::kInvalidArgument,
                  "--segments: {} is not at least 4kb, a divisor of the page, and a page at most "
                  "1/8 of the set",
                  text);
    }
    sizes.push_back(bytes);
  }
  return sizes;
}

/// Measures everything that needs no long-lived device: registration, and single pages.
Result<void> measure_parts(const GpuOptions& options, const std::shared_ptr<cuda::Driver>& driver,
                           std::vector<Figure>& figures) {
  if (options.registered != 0) {
    progress("register " + format_bytes(options.registered));
    PEGA_TRY_LET(Figure figure, measure_registration(options, driver));
    figures.push_back(std::move(figure));
  }
  if (options.pages == 0) return {};
  progress("one page at a time");
  return measure_single_pages({.common = options.common,
                               .device = static_cast<int>(options.device),
                               .page_bytes = options.page,
                               .count = static_cast<std::size_t>(options.pages)},
                              driver, figures);
}

/// Measures copies of all segment sizes, idle and beside matrix products.
Result<void> measure_copies(const GpuOptions& options, const std::vector<std::uint64_t>& sizes,
                            const std::shared_ptr<cuda::Driver>& driver, engine::Pool& pool,
                            std::vector<Figure>& figures) {
  std::unique_ptr<Gemm> gemm;
  if (!options.no_gemm) {
    PEGA_TRY_LET(gemm, Gemm::start(driver, static_cast<int>(options.device), options.cublas));
  }
  PEGA_TRY_LET(const std::unique_ptr<CudaDevice> device, make_device(options, driver));
  if (gemm) {
    progress("contiguous copies beside matrix products");
    Bench bench(options, driver, *device, pool, gemm.get(), figures);
    PEGA_TRY(bench.run_contiguous());
  }
  for (const std::uint64_t bytes : sizes) {
    progress("segments of " + format_bytes(bytes));
    Bench bench(options, driver, *device, pool, gemm.get(), figures);
    PEGA_TRY(bench.run(bytes));
  }
  return {};
}

/// Measures copies of jobs with several kinds of blocks.
Result<void> measure_kinds_of(const GpuOptions& options, const std::vector<GpuKind>& kinds,
                              const std::shared_ptr<cuda::Driver>& driver, engine::Pool& pool,
                              std::vector<Figure>& figures) {
  PEGA_TRY_LET(const std::unique_ptr<CudaDevice> device, make_device(options, driver));
  progress("jobs of " + to_string(kinds));
  return measure_kinds({.kinds = kinds,
                        .orders = options.orders,
                        .device = static_cast<int>(options.device),
                        .rounds = options.rounds,
                        .milliseconds = options.milliseconds,
                        .seed = static_cast<std::uint64_t>(options.common.seed),
                        .check = options.check},
                       driver, *device, pool.bytes(), figures);
}

}  // namespace

Outcome run_gpu(int argc, const char* const* argv) {
  GpuOptions options;
  OptionTable table("pegaflow-perf gpu",
                    "Measures copies of pages between the pool and blocks on a GPU, beside "
                    "contiguous copies of page-locked memory, idle and beside matrix products.");
  declare(table, options);
  PEGA_TRY_LET(const OptionTable::Next next, table.parse(argc, argv, std::cout));
  if (next == OptionTable::Next::kExit) return std::nullopt;
  PEGA_TRY(check_words(options));
  PEGA_TRY_LET(const std::vector<std::uint64_t> sizes, segment_sizes(options));
  std::vector<GpuKind> kinds;
  if (!options.kinds.empty()) {
    PEGA_TRY_LET(kinds, parse_kinds(options.kinds));
  }

  PEGA_TRY_LET(const std::shared_ptr<cuda::Driver> driver, cuda::Driver::load());
  PEGA_TRY_LET(const Conditions conditions, begin_run(options.common));
  std::vector<Figure> figures;
  if (kinds.empty()) PEGA_TRY(measure_parts(options, driver, figures));
  PEGA_TRY_LET(engine::Pool pool, make_pool(options.set));
  if (kinds.empty()) {
    PEGA_TRY(measure_copies(options, sizes, driver, pool, figures));
  } else {
    PEGA_TRY(measure_kinds_of(options, kinds, driver, pool, figures));
  }
  return Report{.title = "pegaflow-perf gpu, pool on " + memory_of(pool),
                .figures = std::move(figures),
                .conditions = conditions,
                .json = options.common.json};
}

}  // namespace pegaflow::perf
