#include "perf/gpu/gpu_kinds.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <numeric>
#include <optional>
#include <random>
#include <string_view>
#include <thread>
#include <utility>

#include "base/units.h"
#include "harness/pattern.h"
#include "perf/gpu/batch_inbox.h"

namespace pegaflow::perf {
namespace {

using Clock = std::chrono::steady_clock;
using Direction = Device::Direction;
using Directions = GpuMemory::Directions;
using Batches = std::vector<Device::Batch>;

constexpr std::size_t kMostKinds = 16;
constexpr std::uint64_t kJobBytes = std::uint64_t{256} << 20;

constexpr std::uint64_t kMaxGroups = 64;
/// A block that tensor-parallel sizes share has several pieces of each layer.
constexpr std::uint64_t kMaxLayers = 4096;

/// The decimal number that is all of `text`.
std::optional<std::uint64_t> number(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (status != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// Cuts the part of `text` in front of `separator` off; no value if there is none.
std::optional<std::string_view> cut(std::string_view& text, char separator) {
  const std::size_t at = text.find(separator);
  if (at == std::string_view::npos) return std::nullopt;
  const std::string_view front = text.substr(0, at);
  text.remove_prefix(at + 1);
  return front;
}

Result<GpuKind> parse_kind(const std::string& text) {
  const auto refuse = [&] {
    return fail(Errc::kInvalidArgument,
                "--kinds: '{}' is not NAME:[GROUPSx]LAYERSxBYTES[@BLOCKS], for example "
                "window:5x8x128kb@64, with 1 to {} groups, 1 to {} layers and 1 to 100,000 blocks",
                text, kMaxGroups, kMaxLayers);
  };
  GpuKind kind;
  std::string_view rest = text;
  const auto name = cut(rest, ':');
  if (!name || name->empty()) return refuse();
  kind.name = *name;
  if (const std::size_t at = rest.find('@'); at != std::string_view::npos) {
    const auto blocks = number(rest.substr(at + 1));
    if (!blocks || *blocks == 0 || *blocks > 100'000) return refuse();
    kind.blocks = *blocks;
    rest = rest.substr(0, at);
  }
  std::vector<std::uint64_t> counts;
  while (const auto part = cut(rest, 'x')) {
    const auto count = number(*part);
    if (!count || *count == 0 || *count > kMaxLayers) return refuse();
    counts.push_back(*count);
  }
  if (counts.empty() || counts.size() > 2) return refuse();
  if (counts.size() == 2 && counts.front() > kMaxGroups) return refuse();
  const Result<std::uint64_t> bytes = parse_bytes(rest);
  if (!bytes || *bytes == 0) return refuse();
  kind.groups = counts.size() == 2 ? static_cast<std::uint32_t>(counts.front()) : 1;
  kind.group = {.segments = counts.back(), .segment_bytes = *bytes};
  if (*bytes % 16 != 0 || *bytes > kMaxPageBytes || kind.slot_bytes() > kMaxPageBytes) {
    return fail(
        Errc::kInvalidArgument,
        "--kinds: the layers of '{}' are not a multiple of 16 bytes, with at most {} a page", text,
        format_bytes(kMaxPageBytes));
  }
  return kind;
}

/// One direction: sends its batches in turn, and keeps those of two jobs queued.
class BatchStream {
 public:
  BatchStream(Device& device, BatchInbox& inbox, const Batches& batches, std::size_t ahead)
      : device_(device), inbox_(inbox), batches_(batches), ahead_(ahead) {}

  Result<void> run(Clock::time_point until) {
    while (Clock::now() < until) PEGA_TRY(send());
    return inbox_.wait(sent_, 0);
  }
  /// Sends each batch once and waits for all.
  Result<void> run_once() {
    for (std::size_t i = 0; i < batches_.size(); ++i) PEGA_TRY(send());
    return inbox_.wait(sent_, 0);
  }
  /// Bytes of all batches that were sent.
  [[nodiscard]] std::uint64_t bytes(std::span<const PageLayout> layouts) const {
    std::uint64_t bytes = 0;
    for (std::uint64_t i = 0; i < sent_; ++i) {
      const Device::Batch& batch = batches_[i % batches_.size()];
      bytes += batch.copies.size() * layouts[batch.layout].page_bytes();
    }
    return bytes;
  }

 private:
  Result<void> send() {
    Device::Batch batch = batches_[sent_ % batches_.size()];
    batch.ticket = ++sent_ * 2 + (batch.direction == Direction::kSave ? 0 : 1);
    PEGA_TRY(device_.submit(std::move(batch)));
    return inbox_.wait(sent_, ahead_);
  }

  Device& device_;
  BatchInbox& inbox_;
  const Batches& batches_;
  std::size_t ahead_;
  std::uint64_t sent_ = 0;
};

/// The figures of one set of kinds, in one order of blocks and slots.
class KindsBench {
 public:
  KindsBench(const KindsRun& run, CudaDevice& device, std::span<std::byte> pool,
             std::vector<Figure>& figures)
      : run_(run), device_(device), pool_(pool), figures_(figures) {}

  Result<void> start(const std::shared_ptr<cuda::Driver>& driver) {
    std::uint64_t job_slots_bytes = 0;
    std::uint64_t job_blocks = 0;
    std::vector<GpuGroup> groups;
    for (const GpuKind& kind : run_.kinds) {
      groups.insert(groups.end(), kind.groups, kind.group);
      job_slots_bytes += kind.blocks * kind.slot_bytes();
      job_blocks += kind.blocks * kind.groups;
      job_bytes_ += kind.job_bytes();
    }
    jobs_ = pool_.size() / job_slots_bytes / 2;
    if (jobs_ == 0) {
      return fail(Errc::kInvalidArgument,
                  "--set: {} are less than two jobs of {}; give more, or kinds with fewer blocks",
                  format_bytes(pool_.size()), format_bytes(job_slots_bytes));
    }
    batches_per_job_ = groups.size();
    blocks_ = job_blocks * jobs_ * 2;
    PEGA_TRY_LET(memory_, GpuMemory::create(driver, run_.device, groups, blocks_));
    return device_.attach(memory_->layouts(), pool_, [this](Device::Completion&& done) {
      inboxes_[done.ticket % 2]->put(std::move(done));
    });
  }

  Result<void> run_order(const std::string& order) {
    order_ = order;
    draw_places();
    if (run_.check) PEGA_TRY(check());
    for (const Directions directions :
         {Directions::kToHost, Directions::kToDevice, Directions::kBoth}) {
      PEGA_TRY(measure(directions));
    }
    return {};
  }

 private:
  [[nodiscard]] Batches& batches(Direction direction) {
    return direction == Direction::kSave ? saves_ : loads_;
  }

  /// Gives each page of all jobs a block and a part of a slot.
  void draw_places() {
    std::mt19937_64 random(run_.seed);
    std::vector<std::uint32_t> blocks(blocks_);
    std::iota(blocks.begin(), blocks.end(), 0U);
    std::vector<std::vector<std::uint64_t>> slots;  // Offsets in the pool, by kind.
    std::uint64_t begin = 0;
    for (const GpuKind& kind : run_.kinds) {
      std::vector<std::uint64_t>& places = slots.emplace_back(kind.blocks * jobs_ * 2);
      for (std::uint64_t& place : places) place = std::exchange(begin, begin + kind.slot_bytes());
      if (order_ == "shuffled") std::shuffle(places.begin(), places.end(), random);
    }
    if (order_ == "shuffled") std::shuffle(blocks.begin(), blocks.end(), random);

    std::size_t next_block = 0;
    std::vector<std::size_t> next_slot(slots.size());
    for (const Direction direction : {Direction::kSave, Direction::kLoad}) {
      Batches& all = batches(direction);
      all.clear();
      for (std::uint64_t job = 0; job < jobs_; ++job) {
        std::size_t layout = 0;
        for (std::size_t k = 0; k < slots.size(); ++k) {
          const GpuKind& kind = run_.kinds[k];
          for (std::uint32_t group = 0; group < kind.groups; ++group, ++layout) {
            Device::Batch& batch = all.emplace_back(
                Device::Batch{.direction = direction, .copies = {}, .layout = layout});
            for (std::uint64_t i = 0; i < kind.blocks; ++i) {
              batch.copies.push_back({blocks[next_block++], slots[k][next_slot[k] + i] +
                                                                group * kind.group.page_bytes()});
            }
          }
          next_slot[k] += kind.blocks;
        }
      }
    }
  }

  struct Copied {
    std::uint64_t bytes = 0;
    Result<void> result;
  };

  Copied stream(Direction direction, Clock::time_point until) {
    auto& inbox = inboxes_[direction == Direction::kSave ? 0 : 1];
    inbox = std::make_unique<BatchInbox>();
    BatchStream stream(device_, *inbox, batches(direction), 2 * batches_per_job_);
    Copied copied{.result = stream.run(until)};
    copied.bytes = stream.bytes(memory_->layouts());
    return copied;
  }

  /// GB/s, both directions added up.
  Result<double> copy(Directions directions) {
    const auto begin = Clock::now();
    const auto until = begin + std::chrono::milliseconds(run_.milliseconds);
    Copied saved;
    std::thread other;
    if (directions != Directions::kToDevice) {
      other = std::thread([&] { saved = stream(Direction::kSave, until); });
    }
    Copied loaded;
    if (directions != Directions::kToHost) loaded = stream(Direction::kLoad, until);
    if (other.joinable()) other.join();
    const std::chrono::duration<double> took = Clock::now() - begin;
    PEGA_TRY(saved.result);
    PEGA_TRY(loaded.result);
    return static_cast<double>(saved.bytes + loaded.bytes) / took.count() / 1e9;
  }

  Result<void> measure(Directions directions) {
    const double seconds = static_cast<double>(run_.milliseconds) / 1e3;
    if (auto warm = copy(directions); !warm) return tl::unexpected<Error>(warm.error());
    Rounds rounds;
    for (std::int64_t round = 0; round < run_.rounds; ++round) {
      PEGA_TRY_LET(const double peak, memory_->contiguous_rate(pool_, directions, seconds));
      PEGA_TRY_LET(const double ours, copy(directions));
      rounds.add({ours}, {peak});
    }
    PEGA_TRY_LET(const Rounds::Comparison compared, rounds.compare());
    add(compared, directions);
    return {};
  }

  void add(const Rounds::Comparison& compared, Directions directions) {
    const std::string direction = directions == Directions::kToHost     ? "save"
                                  : directions == Directions::kToDevice ? "load"
                                                                        : "both";
    const CudaDevice::Info info = device_.info();
    const std::string path = info.path == cuda::Path::kDirect ? "direct" : "staged";
    const std::string kinds = to_string(run_.kinds);
    figures_.push_back(
        {.run = fmt::format("{} {}, {}, {}", direction, kinds, order_, path),
         .params = {{"kinds", kinds},
                    {"job_bytes", static_cast<std::int64_t>(job_bytes_)},
                    {"direction", direction},
                    {"order", order_},
                    {"path", path},
                    {"gpu", info.name}},
         .figure = compared.figure.median(),
         .unit = "GB/s",
         .bound = compared.bound.median(),
         .bound_name = "contiguous copy, idle",
         .side = Side::kAtLeast,
         .target = directions == Directions::kBoth ? 0.95 : 0.97,
         .n = compared.rounds,
         .spread = fmt::format("ratio {:.3f} to {:.3f}", compared.ratio_low, compared.ratio_high)});
  }

  [[nodiscard]] std::span<std::byte> page_at(const Device::Batch& batch, std::size_t copy) const {
    return pool_.subspan(batch.copies[copy].pool_offset,
                         memory_->layouts()[batch.layout].page_bytes());
  }

  /// Loads pages with a pattern, reads the GPU's memory by other means, saves the pages elsewhere,
  /// and compares every byte: of one job, of all kinds.
  Result<void> check() {
    Batches load(loads_.begin(), loads_.begin() + static_cast<std::ptrdiff_t>(batches_per_job_));
    Batches save(saves_.begin(), saves_.begin() + static_cast<std::ptrdiff_t>(batches_per_job_));
    std::vector<GpuMemory::Expected> pages;
    PEGA_TRY(memory_->clear());
    for (std::size_t i = 0; i < load.size(); ++i) {
      for (std::size_t k = 0; k < load[i].copies.size(); ++k) {
        Device::Copy& copy = load[i].copies[k];
        const auto origin = static_cast<std::uint32_t>(pages.size());
        harness::write_pattern(page_at(load[i], k), harness::pattern_seed(run_.seed, origin));
        pages.push_back({.layout = load[i].layout, .block = copy.block, .origin = origin});
        save[i].copies[k].block = copy.block;
      }
    }
    PEGA_TRY(send_once(load, Direction::kLoad));
    PEGA_TRY(memory_->check(pages, run_.seed));
    PEGA_TRY(send_once(save, Direction::kSave));
    std::size_t origin = 0;
    for (const Device::Batch& batch : save) {
      for (std::size_t k = 0; k < batch.copies.size(); ++k, ++origin) {
        if (!harness::is_pattern(page_at(batch, k), harness::pattern_seed(run_.seed, origin))) {
          return fail(Errc::kCorrupt, "the page of block {} is not what was saved",
                      batch.copies[k].block);
        }
      }
    }
    return {};
  }

  Result<void> send_once(const Batches& batches, Direction direction) {
    auto& inbox = inboxes_[direction == Direction::kSave ? 0 : 1];
    inbox = std::make_unique<BatchInbox>();
    return BatchStream(device_, *inbox, batches, batches.size()).run_once();
  }

  const KindsRun& run_;
  CudaDevice& device_;
  const std::span<std::byte> pool_;
  std::vector<Figure>& figures_;
  std::string order_;
  std::uint64_t jobs_ = 0;  ///< In each direction.
  std::uint64_t job_bytes_ = 0;
  std::size_t batches_per_job_ = 0;
  std::uint64_t blocks_ = 0;  ///< On the GPU.
  std::unique_ptr<GpuMemory> memory_;
  Batches saves_;
  Batches loads_;
  std::array<std::unique_ptr<BatchInbox>, 2> inboxes_;
};

}  // namespace

Result<std::vector<GpuKind>> parse_kinds(std::span<const std::string> texts) {
  if (texts.empty() || texts.size() > kMostKinds) {
    return fail(Errc::kInvalidArgument, "--kinds: {} kinds; give 1 to {}", texts.size(),
                kMostKinds);
  }
  std::vector<GpuKind> kinds;
  for (const std::string& text : texts) {
    PEGA_TRY_LET(GpuKind kind, parse_kind(text));
    if (kind.blocks == 0) {
      kind.blocks = std::max<std::uint64_t>(1, kJobBytes / texts.size() / kind.slot_bytes());
    }
    kinds.push_back(std::move(kind));
  }
  return kinds;
}

std::string to_string(std::span<const GpuKind> kinds) {
  std::string text;
  for (const GpuKind& kind : kinds) {
    if (!text.empty()) text += ", ";
    text += fmt::format("{} of {} ", kind.blocks, kind.name);
    if (kind.groups > 1) text += fmt::format("{} x ", kind.groups);
    text += fmt::format("{} x {}", kind.group.segments, format_bytes(kind.group.segment_bytes));
  }
  return text;
}

Result<void> measure_kinds(const KindsRun& run, const std::shared_ptr<cuda::Driver>& driver,
                           CudaDevice& device, std::span<std::byte> pool,
                           std::vector<Figure>& figures) {
  KindsBench bench(run, device, pool, figures);
  Result<void> done = bench.start(driver);
  for (const std::string& order : run.orders) {
    if (done) done = bench.run_order(order);
  }
  device.detach();  // Also after an error: pool and memory outlive the attachment.
  return done;
}

}  // namespace pegaflow::perf
