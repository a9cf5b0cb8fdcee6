/// \file
/// `pegaflow-perf copy`: the rate of copies between an engine's memory and the pool.

#include <algorithm>
#include <atomic>
#include <iostream>
#include <numeric>
#include <random>
#include <thread>

#include <poll.h>

#include "base/page_layout.h"
#include "base/units.h"
#include "client/cache_session.h"
#include "client/mover.h"
#include "harness/engine_memory.h"
#include "harness/pattern.h"
#include "harness/server_process.h"
#include "harness/wire_client.h"
#include "perf/gpu/copy_engines.h"
#include "perf/lib/command.h"
#include "perf/lib/cores.h"
#include "perf/lib/inbox.h"
#include "perf/lib/workload.h"
#include "transport/host/host_device.h"

namespace pegaflow::perf {
namespace {

using Clock = std::chrono::steady_clock;
using Direction = Device::Direction;

constexpr std::uint64_t kRoundBytes = kCopyRoundBytes;
constexpr std::uint64_t kSegmentBytes = kCopySegmentBytes;

struct CopyOptions {
  CommonOptions common;
  std::int64_t engines = 1;
  std::int64_t threads = 1;
  std::int64_t rounds = 10;
  bool check = false;
  bool verify = false;
  std::vector<std::string> pages = {"64kb", "128kb", "256kb", "512kb", "1mb", "2mb", "4mb"};
};

double gigabytes_per_second(std::uint64_t bytes, Clock::duration took) {
  return static_cast<double>(bytes) / std::chrono::duration<double>(took).count() / 1e9;
}

/// The bound: memcpy of the same segments between the same places, by the same number of threads.
double memcpy_rate(const harness::EngineMemory& memory, std::span<std::byte> pool,
                   Direction direction, const std::vector<Device::Copy>& copies, unsigned threads) {
  const auto copy_some = [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      memory.copy(copies[i].block, pool.data() + copies[i].pool_offset, direction);
    }
  };
  // The threads wait for the start, so that their creation is not measured.
  std::atomic<bool> go{false};
  std::vector<std::thread> others;
  for (unsigned i = 1; i < threads; ++i) {
    others.emplace_back([&, i] {
      go.wait(false);
      copy_some(copies.size() * i / threads, copies.size() * (i + 1) / threads);
    });
  }
  const auto begin = Clock::now();
  go.store(true);
  go.notify_all();
  copy_some(0, copies.size() / threads);
  for (std::thread& other : others) other.join();
  return gigabytes_per_second(copies.size() * memory.layout().page_bytes(), Clock::now() - begin);
}

Result<double> device_rate(Device& device, Inbox& inbox, const PageLayout& layout,
                           Direction direction, const std::vector<Device::Copy>& copies,
                           std::uint64_t ticket) {
  Device::Batch batch{.ticket = ticket, .direction = direction, .copies = copies};
  const auto begin = Clock::now();
  PEGA_TRY(device.submit(std::move(batch)));
  const Device::Completion done = inbox.take();
  const auto took = Clock::now() - begin;
  if (done.error) return tl::unexpected<Error>(*done.error);
  if (done.copied != copies.size()) {
    return fail(Errc::kInternal, "{} of {} pages were copied", done.copied, copies.size());
  }
  return gigabytes_per_second(copies.size() * layout.page_bytes(), took);
}

/// Adds a round with a checksum of each page, beside one without.
Result<void> compare_verified(Device& device, Inbox& inbox, const PageLayout& layout,
                              Direction direction, std::vector<Device::Copy> copies,
                              Rounds& rounds) {
  PEGA_TRY_LET(const double without, device_rate(device, inbox, layout, direction, copies, 1));
  for (Device::Copy& copy : copies) copy.checksum = true;
  PEGA_TRY_LET(const double with, device_rate(device, inbox, layout, direction, copies, 2));
  rounds.add({with}, {without});
  return {};
}

/// Saves all blocks, loads them into other blocks, and checks every byte after each step.
Result<void> check(Device& device, Inbox& inbox, harness::EngineMemory& memory,
                   std::span<std::byte> pool, const std::vector<Device::Copy>& copies,
                   std::uint64_t salt) {
  memory.fill_all(salt);
  PEGA_TRY(device_rate(device, inbox, memory.layout(), Direction::kSave, copies, salt));
  for (const Device::Copy& copy : copies) {
    const auto page = pool.subspan(copy.pool_offset, memory.layout().page_bytes());
    if (!harness::is_pattern(page, harness::pattern_seed(salt, copy.block))) {
      return fail(Errc::kCorrupt, "the page of block {} is not what was saved", copy.block);
    }
  }
  // Each page goes to its neighbor's block, so that a load that copies nothing is detected.
  memory.clear();
  std::vector<Device::Copy> moved = copies;
  for (std::size_t i = 0; i < moved.size(); ++i)
    moved[i].block = copies[(i + 1) % copies.size()].block;
  PEGA_TRY(device_rate(device, inbox, memory.layout(), Direction::kLoad, moved, salt));
  for (std::size_t i = 0; i < moved.size(); ++i) {
    if (!memory.holds(moved[i].block, harness::pattern_seed(salt, copies[i].block))) {
      return fail(Errc::kCorrupt, "block {} is not what was saved", moved[i].block);
    }
  }
  return {};
}

Result<Mover::Finished> wait_for_job(Mover& mover) {
  while (true) {
    std::vector<Mover::Finished> finished = mover.take_finished();
    if (!finished.empty()) {
      if (finished.front().error) return tl::unexpected<Error>(*finished.front().error);
      return std::move(finished.front());
    }
    pollfd entry{.fd = mover.finished_fd(), .events = POLLIN, .revents = 0};
    if (::poll(&entry, 1, 30'000) != 1) return fail(Errc::kTimeout, "a job took over 30 s");
  }
}

/// Saves and loads every block through the client library: reserve, copy, publish; claim, open,
/// copy, release. Returns the rate of the load. Always checks the bytes: the server chose the
/// slots.
Result<double> whole_load(Mover& mover, CacheSession& session, harness::EngineMemory& memory,
                          std::span<const std::uint32_t> blocks, const Id128& scheduler,
                          std::uint64_t job, const KeySource& keys) {
  std::vector<BlockKey> names;
  for (std::size_t i = 0; i < blocks.size(); ++i)
    names.push_back(keys.key(job * blocks.size() + i));
  memory.fill_all(job);
  PEGA_TRY(mover.save(scheduler, job, names, blocks, Device::Event::kNow));
  PEGA_TRY_LET(const Mover::Finished saved, wait_for_job(mover));
  if (saved.blocks != blocks.size()) {
    return fail(Errc::kInternal, "{} of {} blocks were saved", saved.blocks, blocks.size());
  }
  memory.clear();
  const auto begin = Clock::now();
  PEGA_TRY_LET(const CacheSession::Ticket ticket, session.claim(names));
  const auto answer = session.take(ticket, std::chrono::seconds(5));
  if (!answer) return fail(Errc::kTimeout, "a claim took over 5 s");
  if (!*answer) return tl::unexpected<Error>(answer->error());
  if ((*answer)->blocks != blocks.size()) {
    return fail(Errc::kInternal, "{} of {} blocks were claimed", (*answer)->blocks, blocks.size());
  }
  PEGA_TRY(mover.load(job, (*answer)->token, 0, blocks));
  PEGA_TRY_LET(const Mover::Finished loaded, wait_for_job(mover));
  const auto took = Clock::now() - begin;
  session.unclaim((*answer)->token);
  if (!loaded.failed_blocks.empty()) {
    return fail(Errc::kInternal, "{} blocks were not loaded", loaded.failed_blocks.size());
  }
  for (const std::uint32_t block : blocks) {
    if (!memory.holds(block, harness::pattern_seed(job, block))) {
      return fail(Errc::kCorrupt, "block {} is not what was saved", block);
    }
  }
  return gigabytes_per_second(blocks.size() * memory.layout().page_bytes(), took);
}

std::string spread_of(const Rounds::Comparison& compared) {
  return fmt::format("ratio {:.2f} to {:.2f}", compared.ratio_low, compared.ratio_high);
}

/// The figures of one page size, on a server of its own.
class PageBench {
 public:
  static Result<std::unique_ptr<PageBench>> start(const CopyOptions& options,
                                                  std::uint64_t page_bytes) {
    // A claim may hold half of the pool, and every round of whole loads saves new pages.
    PEGA_TRY_LET(harness::ServerProcess server,
                 harness::ServerProcess::start({.program = options.common.server,
                                                .pool_size = std::to_string(4 * kRoundBytes)}));
    const std::uint64_t segment_bytes = std::min(kSegmentBytes, page_bytes);
    PEGA_TRY_LET(harness::EngineMemory memory,
                 harness::EngineMemory::create({.segments = page_bytes / segment_bytes,
                                                .segment_bytes = segment_bytes,
                                                .blocks = kRoundBytes / page_bytes}));
    // Both sides of a round use the same cores. Created after the server, which may use any.
    PEGA_TRY_LET(SameCores cores, SameCores::create());
    PEGA_TRY_LET(auto device, HostDevice::create({.threads = static_cast<int>(options.threads)}));
    return std::unique_ptr<PageBench>(new PageBench(options, page_bytes, std::move(server),
                                                    std::move(memory), std::move(cores),
                                                    std::move(device)));
  }

  /// Measures saves and loads by the device alone.
  Result<void> measure_device(std::vector<Figure>& figures) {
    kj::AsyncIoContext io = kj::setupAsyncIo();
    PEGA_TRY_LET(const auto client, harness::WireClient::connect(io, server_.socket_path()));
    PEGA_TRY_LET(const harness::WireClient::Registered registered,
                 client->register_worker("copy", page_bytes_, order_.size()));
    PEGA_TRY_LET(const std::vector<std::uint32_t> slots,
                 client->reserve(client->job(1), KeySource(seed_).range(0, order_.size())));
    PEGA_TRY_LET(const harness::Mapping pool,
                 harness::Mapping::shared(registered.pool.get(), registered.pool_bytes));
    PEGA_TRY_LET(const std::vector<Device::Copy> copies, copies_between(slots));
    Inbox inbox;
    PEGA_TRY(device_->attach(memory_.layout(), pool.bytes(),
                             [&inbox](Device::Completion&& done) { inbox.put(std::move(done)); }));
    // Also the warm-up: it touches every page of both sides.
    Result<void> held = check(*device_, inbox, memory_, pool.bytes(), copies, seed_);
    for (const Direction direction : {Direction::kSave, Direction::kLoad}) {
      if (held) held = measure_direction(direction, inbox, pool.bytes(), copies, figures);
    }
    device_->detach();  // Before the pool is unmapped, also after an error.
    if (held) held = client->abandon(client->job(1));
    return held;
  }

  /// Measures whole loads through the client library, beside memcpy from a mapping like the pool.
  Result<void> measure_client(std::vector<Figure>& figures) {
    constexpr std::uint64_t kWholeRounds = 4;
    const LinkOptions link{
        .socket_path = server_.socket_path(), .instance = "whole", .build = "pegaflow-perf"};
    PEGA_TRY_LET(const auto mover,
                 Mover::start({.link = link, .factors = {{"program", "pegaflow-perf copy"}}},
                              memory_.layout(), *device_));
    PEGA_TRY_LET(const auto session, CacheSession::start(link));
    if (!mover->wait_for(LinkState::kReady, std::chrono::seconds(10)) ||
        !session->wait_for(LinkState::kReady, std::chrono::seconds(10))) {
      return fail(Errc::kPeerLost, "the client library did not connect: {} {}",
                  mover->status().detail, session->status().detail);
    }
    PEGA_TRY_LET(const harness::Mapping pages, harness::Mapping::anonymous(kRoundBytes));
    std::vector<Device::Copy> copies;
    for (std::size_t i = 0; i < order_.size(); ++i)
      copies.push_back({.block = order_[i], .pool_offset = i * page_bytes_});
    const Id128 scheduler = Id128::random();
    Rounds rounds;
    for (std::uint64_t round = 0; round <= kWholeRounds; ++round) {
      PEGA_TRY(cores_.use(round, threads()));
      PEGA_TRY_LET(const double ours, whole_load(*mover, *session, memory_, order_, scheduler,
                                                 round + 1, KeySource(~seed_)));
      const double bound = memcpy_rate(memory_, pages.bytes(), Direction::kLoad, copies, threads());
      if (round != 0) rounds.add({ours}, {bound});
    }
    PEGA_TRY(
        add(rounds, "whole load: claim, open, copy, release", std::nullopt, "memcpy", figures));
    mover->close();
    return {};
  }

 private:
  PageBench(const CopyOptions& options, std::uint64_t page_bytes, harness::ServerProcess server,
            harness::EngineMemory memory, SameCores cores, std::unique_ptr<HostDevice> device)
      : options_(options),
        page_bytes_(page_bytes),
        seed_(static_cast<std::uint64_t>(options.common.seed)),
        server_(std::move(server)),
        memory_(std::move(memory)),
        cores_(std::move(cores)),
        device_(std::move(device)),
        order_(kRoundBytes / page_bytes) {
    std::iota(order_.begin(), order_.end(), 0U);
    // As after hours of serving.
    std::shuffle(order_.begin(), order_.end(), std::mt19937_64(seed_));
  }

  [[nodiscard]] unsigned threads() const { return static_cast<unsigned>(options_.threads); }

  [[nodiscard]] Result<std::vector<Device::Copy>> copies_between(
      const std::vector<std::uint32_t>& slots) const {
    std::vector<Device::Copy> copies;
    for (std::size_t i = 0; i < order_.size(); ++i) {
      if (slots.at(i) == harness::WireClient::kNoFrame)
        return fail(Errc::kOutOfCapacity, "no slot for block {}", i);
      copies.push_back({.block = order_[i], .pool_offset = slots[i] * kSlotAlignment});
    }
    return copies;
  }

  Result<void> measure_direction(Direction direction, Inbox& inbox, std::span<std::byte> pool,
                                 const std::vector<Device::Copy>& copies,
                                 std::vector<Figure>& figures) {
    Rounds rounds;
    Rounds verified;
    for (std::int64_t round = 0; round < options_.rounds; ++round) {
      const auto number = static_cast<std::uint64_t>(round);
      PEGA_TRY(cores_.use(number, threads()));
      PEGA_TRY_LET(const double ours,
                   device_rate(*device_, inbox, memory_.layout(), direction, copies, number));
      rounds.add({ours}, {memcpy_rate(memory_, pool, direction, copies, threads())});
      if (options_.verify) {
        PEGA_TRY(compare_verified(*device_, inbox, memory_.layout(), direction, copies, verified));
      }
      if (options_.check)
        PEGA_TRY(check(*device_, inbox, memory_, pool, copies, seed_ + 1 + number));
    }
    const std::string name = direction == Direction::kSave ? "save" : "load";
    PEGA_TRY(add(rounds, name, 0.9, "memcpy", figures));
    if (!options_.verify) return {};
    return add(verified, name + " with a checksum of each page", std::nullopt, "without", figures);
  }

  Result<void> add(const Rounds& rounds, const std::string& what, std::optional<double> target,
                   std::string bound_name, std::vector<Figure>& figures) const {
    PEGA_TRY_LET(const Rounds::Comparison compared, rounds.compare());
    figures.push_back({.run = fmt::format("{}, pages of {}", what, format_bytes(page_bytes_)),
                       .params = {{"page_bytes", static_cast<std::int64_t>(page_bytes_)},
                                  {"segment_bytes",
                                   static_cast<std::int64_t>(std::min(kSegmentBytes, page_bytes_))},
                                  {"threads", options_.threads}},
                       .figure = compared.figure.median(),
                       .unit = "GB/s",
                       .bound = compared.bound.median(),
                       .bound_name = std::move(bound_name),
                       .side = Side::kAtLeast,
                       .target = target,
                       .n = compared.rounds,
                       .spread = spread_of(compared)});
    return {};
  }

  const CopyOptions& options_;
  const std::uint64_t page_bytes_;
  const std::uint64_t seed_;
  const harness::ServerProcess server_;
  harness::EngineMemory memory_;
  const SameCores cores_;
  const std::unique_ptr<HostDevice> device_;
  std::vector<std::uint32_t> order_;  ///< The blocks, shuffled.
};

}  // namespace

Outcome run_copy(int argc, const char* const* argv) {
  CopyOptions options;
  OptionTable table("pegaflow-perf copy",
                    "Measures copies of pages between the pool of a real server and blocks in "
                    "shuffled order, in segments of 32 KiB, beside memcpy of the same bytes.");
  declare(table, options.common);
  table.integer("engines", options.engines, 1, 8,
                "Number of engines; several engines save and load concurrently through the client "
                "library, and the figure is their sum.");
  table.integer("threads", options.threads, 1, 64, "Copy threads of each engine, and of memcpy.");
  table.integer("rounds", options.rounds, 1, 1000,
                "Rounds of 128 MiB for each page size and direction.");
  table.flag("check", options.check, "Compare all bytes after every round, not only the first.");
  table.flag("verify", options.verify,
             "Also measure copies with a checksum of each page, as with pegaflow.verify=all.");
  table.list("pages", options.pages, "Page sizes: powers of two from 16kb to 64mb.");
  PEGA_TRY_LET(const OptionTable::Next next, table.parse(argc, argv, std::cout));
  if (next == OptionTable::Next::kExit) return std::nullopt;

  if (options.engines > 1 && options.verify) {
    return fail(Errc::kInvalidArgument, "--verify takes one engine, not {}", options.engines);
  }
  PEGA_TRY_LET(const Conditions conditions, begin_run(options.common));
  std::vector<Figure> figures;
  for (const std::string& text : options.pages) {
    PEGA_TRY_LET(const std::uint64_t page_bytes, parse_bytes(text));
    if (page_bytes < kRoundBytes / 8192 || page_bytes > kRoundBytes / 2 ||
        (page_bytes & (page_bytes - 1)) != 0) {
      return fail(Errc::kInvalidArgument, "--pages: {} is not a power of two from 16kb to 64mb",
                  text);
    }
    progress("pages of " + format_bytes(page_bytes));
    if (options.engines == 1) {
      PEGA_TRY_LET(const auto bench, PageBench::start(options, page_bytes));
      PEGA_TRY(bench->measure_device(figures));
      PEGA_TRY(bench->measure_client(figures));
      continue;
    }
    PEGA_TRY_LET(Figure figure,
                 measure_engines({.server = options.common.server,
                                  .seed = static_cast<std::uint64_t>(options.common.seed),
                                  .engines = static_cast<std::uint32_t>(options.engines),
                                  .threads = static_cast<std::uint32_t>(options.threads),
                                  .rounds = static_cast<std::uint32_t>(options.rounds),
                                  .check = options.check},
                                 page_bytes));
    figures.push_back(std::move(figure));
  }
  return Report{.title = "pegaflow-perf copy",
                .figures = std::move(figures),
                .conditions = conditions,
                .json = options.common.json};
}

}  // namespace pegaflow::perf
