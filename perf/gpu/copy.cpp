/// \file
/// `pegaflow-perf copy`: how fast pages move between an engine's memory and the pool.

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

/// The bound: the same segments from the same places to the same places, by as many threads.
double memcpy_rate(const harness::EngineMemory& memory, std::span<std::byte> pool,
                   Direction direction, const std::vector<Device::Copy>& copies, unsigned threads) {
  const auto copy_some = [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      memory.copy(copies[i].block, pool.data() + copies[i].pool_offset, direction);
    }
  };
  // The threads wait at the line, so that making them is not measured.
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

/// One round with a checksum of each page, and one without.
Result<void> compare_verified(Device& device, Inbox& inbox, const PageLayout& layout,
                              Direction direction, std::vector<Device::Copy> copies,
                              Rounds& rounds) {
  PEGA_TRY_LET(const double without, device_rate(device, inbox, layout, direction, copies, 1));
  for (Device::Copy& copy : copies) copy.checksum = true;
  PEGA_TRY_LET(const double with, device_rate(device, inbox, layout, direction, copies, 2));
  rounds.add({with}, {without});
  return {};
}

/// Saves all blocks, loads them back into other blocks, and looks at every byte in between.
Result<void> check(Device& device, Inbox& inbox, harness::EngineMemory& memory,
                   std::span<std::byte> pool, const std::vector<Device::Copy>& copies,
                   std::uint64_t salt) {
  memory.write_pattern(salt);
  PEGA_TRY(device_rate(device, inbox, memory.layout(), Direction::kSave, copies, salt));
  for (const Device::Copy& copy : copies) {
    const auto page = pool.subspan(copy.pool_offset, memory.layout().page_bytes());
    if (!harness::page_has_pattern(memory.layout(), page, copy.block, salt)) {
      return fail(Errc::kCorrupt, "the page of block {} is not what was saved", copy.block);
    }
  }
  // Each page to the block of its neighbor, so that a load that copies nothing is seen.
  memory.clear();
  std::vector<Device::Copy> moved = copies;
  for (std::size_t i = 0; i < moved.size(); ++i)
    moved[i].block = copies[(i + 1) % copies.size()].block;
  PEGA_TRY(device_rate(device, inbox, memory.layout(), Direction::kLoad, moved, salt));
  for (std::size_t i = 0; i < moved.size(); ++i) {
    if (!memory.has_pattern(moved[i].block, copies[i].block, salt)) {
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

/// One save and one load of every block through the client library: reserve, copy, publish; claim,
/// open, copy, release. The load's rate. The bytes are always checked: here somebody else chose the
/// slots.
Result<double> whole_load(Mover& mover, CacheSession& session, harness::EngineMemory& memory,
                          std::span<const std::uint32_t> blocks, const Id128& scheduler,
                          std::uint64_t job, const KeySource& keys) {
  std::vector<BlockKey> names;
  for (std::size_t i = 0; i < blocks.size(); ++i)
    names.push_back(keys.key(job * blocks.size() + i));
  memory.write_pattern(job);
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
    if (!memory.has_pattern(block, block, job)) {
      return fail(Errc::kCorrupt, "block {} is not what was saved", block);
    }
  }
  return gigabytes_per_second(blocks.size() * memory.layout().page_bytes(), took);
}

std::string spread_of(const Rounds::Comparison& compared) {
  return fmt::format("ratio {:.2f} to {:.2f}", compared.ratio_low, compared.ratio_high);
}

/// All figures of one page size, on a server of its own.
Result<void> measure(const CopyOptions& options, std::uint64_t page_bytes,
                     std::vector<Figure>& figures) {
  const auto seed = static_cast<std::uint64_t>(options.common.seed);
  const auto threads = static_cast<unsigned>(options.threads);
  const std::uint64_t blocks = kRoundBytes / page_bytes;
  const std::uint64_t segment = std::min(kSegmentBytes, page_bytes);
  // A claim may hold half of the pool, and every round of whole loads saves its pages anew.
  PEGA_TRY_LET(
      const harness::ServerProcess server,
      harness::ServerProcess::start(
          {.program = options.common.server, .pool_bytes = 4 * kRoundBytes, .arguments = {}}));
  PEGA_TRY_LET(harness::EngineMemory memory,
               harness::EngineMemory::create(page_bytes, segment, blocks));
  std::vector<std::uint32_t> order(blocks);
  std::iota(order.begin(), order.end(), 0U);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(seed));  // As after hours of serving.
  const Params params = {{"page_bytes", static_cast<std::int64_t>(page_bytes)},
                         {"segment_bytes", static_cast<std::int64_t>(segment)},
                         {"threads", options.threads}};
  const auto add = [&](const Rounds& rounds, std::string what, std::optional<double> reach,
                       std::string bound_name = "memcpy") -> Result<void> {
    PEGA_TRY_LET(const Rounds::Comparison compared, rounds.compare());
    figures.push_back({.run = fmt::format("{}, pages of {}", what, format_bytes(page_bytes)),
                       .params = params,
                       .figure = compared.figure.median(),
                       .unit = "GB/s",
                       .bound = compared.bound.median(),
                       .bound_name = std::move(bound_name),
                       .side = Reach::kAtLeast,
                       .reach = reach,
                       .n = compared.rounds,
                       .spread = spread_of(compared)});
    return {};
  };

  // Both sides of a round on the same cores. Made after the server, which may go where it likes.
  PEGA_TRY_LET(const SameCores cores, SameCores::create());
  PEGA_TRY_LET(const auto device,
               HostDevice::create({.threads = static_cast<int>(options.threads)}));
  {
    kj::AsyncIoContext io = kj::setupAsyncIo();
    PEGA_TRY_LET(const auto client, harness::WireClient::connect(io, server.socket_path()));
    PEGA_TRY_LET(const harness::WireClient::Registered registered,
                 client->register_worker("copy", page_bytes, blocks));
    PEGA_TRY_LET(const std::vector<std::uint32_t> slots,
                 client->reserve(1, KeySource(seed).packed(0, blocks)));
    PEGA_TRY_LET(const harness::Mapping pool,
                 harness::Mapping::shared(registered.pool.get(), registered.pool_bytes));
    std::vector<Device::Copy> copies;
    for (std::size_t i = 0; i < blocks; ++i) {
      if (slots.at(i) == harness::WireClient::kNoFrame)
        return fail(Errc::kOutOfCapacity, "no slot for block {}", i);
      copies.push_back({.block = order[i], .pool_offset = slots[i] * kSlotAlignment});
    }
    Inbox inbox;
    PEGA_TRY(device->attach(memory.layout(), pool.bytes(),
                            [&inbox](Device::Completion&& done) { inbox.put(std::move(done)); }));
    // Also the warm-up: it touches every page of both sides.
    Result<void> held = check(*device, inbox, memory, pool.bytes(), copies, seed);
    for (const Direction direction : {Direction::kSave, Direction::kLoad}) {
      Rounds rounds;
      Rounds verified;
      for (std::int64_t round = 0; held && round < options.rounds; ++round) {
        held = cores.use(static_cast<std::size_t>(round), threads);
        if (!held) break;
        Result<double> ours = device_rate(*device, inbox, memory.layout(), direction, copies,
                                          static_cast<std::uint64_t>(round));
        if (!ours) {
          held = tl::unexpected<Error>(ours.error());
          break;
        }
        rounds.add({*ours}, {memcpy_rate(memory, pool.bytes(), direction, copies, threads)});
        if (options.verify) {
          held = compare_verified(*device, inbox, memory.layout(), direction, copies, verified);
          if (!held) break;
        }
        if (options.check) {
          held = check(*device, inbox, memory, pool.bytes(), copies,
                       seed + 1 + static_cast<std::uint64_t>(round));
        }
      }
      const std::string name = direction == Direction::kSave ? "save" : "load";
      if (held) held = add(rounds, name, 0.9);
      if (held && options.verify) {
        held = add(verified, name + " with a checksum of each page", std::nullopt, "without");
      }
    }
    device->detach();  // Before the pool is unmapped, also on the way out with an error.
    if (held) held = client->abandon(1);
    PEGA_TRY(held);
  }

  // The same through the client library. Its bound is memcpy with the pool as this mapping has it.
  const Id128 scheduler = Id128::random();
  const LinkOptions link{
      .socket_path = server.socket_path(), .instance = "whole", .build = "pegaflow-perf"};
  PEGA_TRY_LET(const auto mover,
               Mover::start({.link = link, .factors = {{"program", "pegaflow-perf copy"}}},
                            memory.layout(), *device));
  PEGA_TRY_LET(const auto session, CacheSession::start(link));
  if (!mover->wait_for(LinkState::kReady, std::chrono::seconds(10)) ||
      !session->wait_for(LinkState::kReady, std::chrono::seconds(10))) {
    return fail(Errc::kPeerLost, "the client library did not connect: {} {}",
                mover->status().detail, session->status().detail);
  }
  PEGA_TRY_LET(harness::Mapping target, harness::Mapping::anonymous(kRoundBytes));
  std::vector<Device::Copy> copies;
  for (std::size_t i = 0; i < blocks; ++i)
    copies.push_back({.block = order[i], .pool_offset = i * page_bytes});
  Rounds rounds;
  constexpr std::uint64_t kWholeRounds = 4;
  for (std::uint64_t round = 0; round <= kWholeRounds; ++round) {
    PEGA_TRY(cores.use(round, threads));
    PEGA_TRY_LET(const double ours, whole_load(*mover, *session, memory, order, scheduler,
                                               round + 1, KeySource(~seed)));
    const double bound = memcpy_rate(memory, target.bytes(), Direction::kLoad, copies, threads);
    if (round != 0) rounds.add({ours}, {bound});
  }
  PEGA_TRY(add(rounds, "whole load: claim, open, copy, release", std::nullopt));
  mover->close();
  return {};
}

}  // namespace

Outcome run_copy(int argc, const char* const* argv) {
  CopyOptions options;
  OptionTable table("pegaflow-perf copy",
                    "Pages between the pool of a real server and blocks in shuffled order, in "
                    "segments of 32 KiB, beside memcpy of the same bytes.");
  declare(table, options.common);
  table.integer("engines", options.engines, 1, 8,
                "With several, each saves and loads at once through the client library, and the "
                "figure is the sum.");
  table.integer("threads", options.threads, 1, 64, "Copy threads on both sides; of each engine.");
  table.integer("rounds", options.rounds, 1, 1000,
                "Alternations of 128 MiB for each page size and direction.");
  table.flag("check", options.check,
             "Compare all bytes after every round, not only after the first.");
  table.flag("verify", options.verify,
             "Also with a checksum of each page, as pegaflow.verify=all, beside without.");
  table.list("pages", options.pages, "Page sizes, powers of two from 16kb to 64mb.");
  PEGA_TRY_LET(const OptionTable::Next next, table.parse(argc, argv, std::cout));
  if (next == OptionTable::Next::kExit) return std::nullopt;

  if (options.engines > 1 && options.verify) {
    return fail(Errc::kInvalidArgument, "--verify is measured with one engine, not {}",
                options.engines);
  }
  PEGA_TRY_LET(const Conditions conditions, begin_run(options.common));
  std::vector<Figure> figures;
  for (const std::string& text : options.pages) {
    PEGA_TRY_LET(const std::uint64_t page_bytes, parse_bytes(text));
    if (page_bytes < kRoundBytes / 8192 || page_bytes > kRoundBytes / 2 ||
        (page_bytes & (page_bytes - 1)) != 0) {
      return fail(Errc::kInvalidArgument, "--pages {}: not a power of two from 16kb to 64mb", text);
    }
    progress("pages of " + format_bytes(page_bytes));
    if (options.engines == 1) {
      PEGA_TRY(measure(options, page_bytes, figures));
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
