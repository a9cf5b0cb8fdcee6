/// \file
/// `pegaflow-perf start`: the time from start to ready, beside that of touching the memory.

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <iostream>
#include <thread>

#include <sys/mman.h>

#include "base/os/unique_fd.h"
#include "base/units.h"
#include "engine/pool/memory_room.h"
#include "harness/engine_memory.h"
#include "harness/server_process.h"
#include "perf/lib/command.h"

namespace pegaflow::perf {
namespace {

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

/// GB/s at which `threads` make fresh shared memory present, of the kind that a server uses.
Result<double> touch_rate(std::uint64_t bytes, bool huge, unsigned threads) {
  const UniqueFd fd(::memfd_create("pegaflow-perf", MFD_CLOEXEC | (huge ? MFD_HUGETLB : 0U)));
  if (!fd || ::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return fail_errno(errno, "make a memfd");
  }
  PEGA_TRY_LET(const harness::Mapping mapping, harness::Mapping::shared(fd.get(), bytes));
  const auto begin = std::chrono::steady_clock::now();
  constexpr std::uint64_t kChunkBytes = std::uint64_t{32} << 20;
  std::atomic<std::uint64_t> next{0};
  std::atomic<int> failure{0};
  const auto touch = [&] {
    while (true) {
      const std::uint64_t offset = next.fetch_add(kChunkBytes);
      if (offset >= bytes) return;
      const auto chunk =
          mapping.bytes().subspan(offset, std::min<std::uint64_t>(kChunkBytes, bytes - offset));
      if (::madvise(chunk.data(), chunk.size(), MADV_POPULATE_WRITE) != 0) failure.store(errno);
    }
  };
  std::vector<std::thread> others;
  for (unsigned i = 1; i < threads; ++i) others.emplace_back(touch);
  touch();
  for (std::thread& other : others) other.join();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  if (failure.load() != 0) return fail_errno(failure.load(), "touch memory");
  return static_cast<double>(bytes) / took.count() / 1e9;
}

struct StartOptions {
  CommonOptions common;
  std::uint64_t size = std::uint64_t{8} << 30;
  std::int64_t rounds = 3;
};

/// Seconds from the start of a server until it is ready. The server has ended afterwards.
Result<double> start_seconds(const StartOptions& options) {
  PEGA_TRY_LET(harness::ServerProcess server,
               harness::ServerProcess::start(
                   {.program = options.common.server, .pool_size = std::to_string(options.size)}));
  const std::chrono::duration<double> took = server.start_time();
  PEGA_TRY(server.stop());
  return took.count();
}

std::vector<Figure> figures_of(const Rounds::Comparison& compared, const Samples& seconds,
                               std::uint64_t size, const Params& params) {
  const std::string run = "start to ready, pool of " + format_bytes(size);
  std::vector<Figure> figures;
  figures.push_back(
      {.run = run,
       .params = params,
       .figure = compared.figure.median(),
       .unit = "GB/s",
       .bound = compared.bound.median(),
       .bound_name = "the same threads touch fresh memory",
       .side = Side::kAtLeast,
       .target = 0.8,
       .n = compared.rounds,
       .spread = fmt::format("ratio {:.2f} to {:.2f}", compared.ratio_low, compared.ratio_high)});
  figures.push_back({.run = run,
                     .params = params,
                     .figure = seconds.median(),
                     .unit = "s",
                     .bound = std::nullopt,
                     .bound_name = "",
                     .n = seconds.count(),
                     .spread = fmt::format("{} to {}", format_number(seconds.quantile(0)),
                                           format_number(seconds.quantile(1)))});
  return figures;
}

}  // namespace

Outcome run_start(int argc, const char* const* argv) {
  StartOptions options;
  OptionTable table(
      "pegaflow-perf start",
      "Measures the time from the start of a server until it is ready, beside threads "
      "that only touch the same memory.");
  declare(table, options.common);
  table.bytes("size", options.size, std::uint64_t{64} << 20, std::uint64_t{1} << 44,
              "Size of the pool.");
  table.integer("rounds", options.rounds, 1, 100,
                "Rounds; each starts a server and touches memory once.");
  PEGA_TRY_LET(const OptionTable::Next next, table.parse(argc, argv, std::cout));
  if (next == OptionTable::Next::kExit) return std::nullopt;

  PEGA_TRY_LET(const Conditions conditions, begin_run(options.common));
  PEGA_TRY_LET(const engine::HugePages pages, engine::huge_pages());
  const bool huge = pages.page_bytes != 0 && pages.free >= options.size / pages.page_bytes;
  const unsigned threads = std::max(1U, std::thread::hardware_concurrency());
  Rounds measured;
  std::vector<double> seconds;
  for (std::int64_t round = 0; round < options.rounds; ++round) {
    progress(fmt::format("round {} of {}", round + 1, options.rounds));
    PEGA_TRY_LET(const double took, start_seconds(options));
    seconds.push_back(took);
    PEGA_TRY_LET(const double bound, touch_rate(options.size, huge, threads));
    measured.add({static_cast<double>(options.size) / took / 1e9}, {bound});
  }
  PEGA_TRY_LET(const Rounds::Comparison compared, measured.compare());
  PEGA_TRY_LET(const Samples took, Samples::of(std::move(seconds)));
  const Params params = {{"pool_bytes", static_cast<std::int64_t>(options.size)},
                         {"threads", static_cast<std::int64_t>(threads)},
                         {"memory", huge ? "huge pages" : "tmpfs, 4 KiB pages"}};
  return Report{.title = "pegaflow-perf start",
                .figures = figures_of(compared, took, options.size, params),
                .conditions = conditions,
                .json = options.common.json};
}

}  // namespace pegaflow::perf
