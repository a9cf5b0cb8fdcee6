/// \file
/// `pegaflow-perf ssd_reads`: the processor time of a server that reads blocks from a disk.

#include <algorithm>
#include <chrono>
#include <ctime>
#include <iostream>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/units.h"
#include "harness/engine_memory.h"
#include "harness/server_process.h"
#include "perf/disk/fio.h"
#include "perf/lib/command.h"
#include "perf/lib/keys.h"
#include "perf/lib/linked_engine.h"
#include "perf/lib/wait_until.h"
#include "transport/checksum.h"
#include "transport/host/host_device.h"

namespace pegaflow::perf {
namespace {

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;
constexpr std::uint64_t kSegmentBytes = 32 << 10;
constexpr std::uint64_t kBytesInFlight = 16 << 20;
/// Beside fio and a hash: the limit of a block on the RPC thread.
constexpr double kRpcMicroseconds = 5;

struct ReadsOptions {
  CommonOptions common;
  std::int64_t blocks = 256;
  std::uint64_t page_bytes = std::uint64_t{1} << 20;
  std::int64_t rounds = 25;
};

/// Milliseconds of processor time in which this thread hashes a GiB in pieces of `page_bytes`.
double hash_ms_per_gib(std::span<const std::byte> memory, std::uint64_t page_bytes) {
  const auto now = [] {
    timespec time{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) / 1e6;
  };
  std::uint64_t sum = 0;
  const double begin = now();
  for (std::uint64_t at = 0; at + page_bytes <= memory.size(); at += page_bytes) {
    sum += PageChecksum::of(memory.subspan(at, page_bytes));
  }
  const double took = now() - begin;
  // The sum is used, so that no compiler leaves the loop out.
  return sum == 0 ? 0 : took / (static_cast<double>(memory.size()) / kGiB);
}

/// The processor time of one thread so far, in microseconds.
Result<double> thread_us(pid_t pid, pid_t thread) {
  PEGA_TRY_LET(const std::string text,
               harness::read_file(fmt::format("/proc/{}/task/{}/schedstat", pid, thread)));
  try {
    return static_cast<double>(std::stoull(text)) / 1e3;
  } catch (const std::exception& problem) {
    return fail(Errc::kCorrupt, "schedstat of thread {}: {}", thread, problem.what());
  }
}

double sum_of(const harness::ServerProcess::Metrics& metrics, std::string_view name) {
  double sum = 0;
  for (const auto& [key, value] : metrics) {
    if (std::string_view(key).starts_with(std::string(name) + "{")) sum += value;
  }
  return sum;
}

/// A server with a disk, and an engine whose blocks are on it.
class Reader {
 public:
  static Result<std::unique_ptr<Reader>> start(const ReadsOptions& options) {
    const auto count = static_cast<std::uint64_t>(options.blocks);
    PEGA_TRY_LET(harness::EngineMemory memory,
                 harness::EngineMemory::create({.segments = options.page_bytes / kSegmentBytes,
                                                .segment_bytes = kSegmentBytes,
                                                .blocks = count}));
    PEGA_TRY_LET(auto device, HostDevice::create({}));
    PEGA_TRY_LET(auto directory, harness::TemporaryDirectory::create());
    const std::uint64_t bytes = count * options.page_bytes;
    // Blocks that are read may fill a quarter of the pool.
    const std::uint64_t pool = 6 * bytes;
    PEGA_TRY_LET(
        harness::ServerProcess server,
        harness::ServerProcess::start(
            {.program = options.common.server,
             .pool_size = std::to_string(pool),
             .arguments = {"--ssd-cache-path", directory.path() + "/ssd", "--ssd-cache-capacity",
                           std::to_string(2 * bytes + (std::uint64_t{512} << 20)),
                           "--ssd-write-ahead", std::to_string(pool)}}));
    std::unique_ptr<Reader> reader(new Reader(options, std::move(memory), std::move(device),
                                              std::move(directory), std::move(server)));
    PEGA_TRY(reader->fill());
    return reader;
  }

  struct Cost {
    double server_ms_per_gib = 0;
    double rpc_us_per_block = 0;
  };
  /// Loads all blocks from the disk.
  Result<Cost> load(std::uint64_t round) {
    PEGA_TRY(empty_pool());
    const pid_t pid = server_.process().pid();
    PEGA_TRY_LET(const auto metrics, server_.metrics());
    PEGA_TRY_LET(const double rpc_begin, thread_us(pid, pid));
    PEGA_TRY_LET(const Duration begin, server_.process().cpu_time());
    PEGA_TRY_LET(const CacheSession::Answer claim, link_->claim(keys_));
    PEGA_TRY(link_->load(round, claim.token, blocks_));
    PEGA_TRY(link_->finish(1, blocks_.size()));
    PEGA_TRY_LET(const Duration end, server_.process().cpu_time());
    PEGA_TRY_LET(const double rpc_end, thread_us(pid, pid));
    link_->unclaim(claim.token);
    PEGA_TRY_LET(const auto after, server_.metrics());
    const double read = sum_of(after, "pegaflow_ssd_read_bytes_total") -
                        sum_of(metrics, "pegaflow_ssd_read_bytes_total");
    const auto bytes = static_cast<double>(blocks_.size() * options_.page_bytes);
    if (read < bytes)
      return fail(Errc::kInternal, "{} of {} bytes came from the disk", read, bytes);
    return Cost{.server_ms_per_gib =
                    std::chrono::duration<double, std::milli>(end - begin).count() / (bytes / kGiB),
                .rpc_us_per_block = (rpc_end - rpc_begin) / static_cast<double>(blocks_.size())};
  }
  [[nodiscard]] std::string file() const { return directory_.path() + "/ssd"; }

 private:
  Reader(const ReadsOptions& options, harness::EngineMemory memory,
         std::unique_ptr<HostDevice> device, harness::TemporaryDirectory directory,
         harness::ServerProcess server)
      : options_(options),
        memory_(std::move(memory)),
        device_(std::move(device)),
        directory_(std::move(directory)),
        server_(std::move(server)),
        keys_(KeySource(static_cast<std::uint64_t>(options.common.seed))
                  .range(0, static_cast<std::size_t>(options.blocks))),
        blocks_(static_cast<std::size_t>(options.blocks)) {
    std::iota(blocks_.begin(), blocks_.end(), 0U);
  }

  /// Saves all blocks, and waits until they are on the disk.
  Result<void> fill() {
    PEGA_TRY_LET(link_, LinkedEngine::connect({.socket = server_.socket_path(),
                                               .instance = "reads",
                                               .program = "pegaflow-perf ssd_reads"},
                                              memory_.layout(), *device_));
    memory_.fill_all(static_cast<std::uint64_t>(options_.common.seed));
    PEGA_TRY(link_->save(1, keys_, blocks_));
    PEGA_TRY(link_->finish(1, blocks_.size()));
    return wait_until("the blocks are on the disk", [&]() -> Result<bool> {
      PEGA_TRY_LET(const auto metrics, server_.metrics());
      return sum_of(metrics, "pegaflow_ssd_blocks") >= static_cast<double>(blocks_.size());
    });
  }

  /// Evicts all blocks. Those of the round before are referenced until the server has read its
  /// unclaim.
  Result<void> empty_pool() {
    return wait_until("the pool is empty", [&]() -> Result<bool> {
      PEGA_TRY(server_.post("/cache/memory/cleanup"));
      PEGA_TRY_LET(const auto metrics, server_.metrics());
      const auto used = metrics.find("pegaflow_pool_used_bytes");
      return used != metrics.end() && used->second == 0;
    });
  }

  const ReadsOptions& options_;
  harness::EngineMemory memory_;
  std::unique_ptr<HostDevice> device_;
  harness::TemporaryDirectory directory_;
  harness::ServerProcess server_;
  std::vector<BlockKey> keys_;
  std::vector<std::uint32_t> blocks_;
  std::unique_ptr<LinkedEngine> link_;  ///< Destroyed before its device and memory.
};

Result<std::vector<Figure>> measure(const ReadsOptions& options, Reader& reader) {
  const std::uint64_t bytes = static_cast<std::uint64_t>(options.blocks) * options.page_bytes;
  PEGA_TRY_LET(const harness::Mapping hashed, harness::Mapping::anonymous(bytes));
  std::fill(hashed.bytes().begin(), hashed.bytes().end(), std::byte{0x5A});
  Rounds server;
  std::vector<double> rpc;
  for (std::int64_t round = 0; round < options.rounds; ++round) {
    progress(fmt::format("round {} of {}", round + 1, options.rounds));
    const auto bound = [&]() -> Result<double> {
      PEGA_TRY_LET(const DiskRate fio, run_fio({.path = reader.file(),
                                                .rw = "randread",
                                                .file_bytes = bytes,
                                                .block_bytes = options.page_bytes,
                                                .bytes_in_flight = kBytesInFlight,
                                                .total_bytes = bytes,
                                                .seed = options.common.seed + round}));
      return fio.cpu_ms_per_gib + hash_ms_per_gib(hashed.bytes(), options.page_bytes);
    };
    double beside = 0;
    if (round % 2 == 0) {
      PEGA_TRY_LET(beside, bound());
    }
    PEGA_TRY_LET(const Reader::Cost cost, reader.load(static_cast<std::uint64_t>(round) + 2));
    if (round % 2 != 0) {
      PEGA_TRY_LET(beside, bound());
    }
    server.add({cost.server_ms_per_gib}, {beside});
    rpc.push_back(cost.rpc_us_per_block);
  }
  PEGA_TRY_LET(const Rounds::Comparison compared, server.compare());
  PEGA_TRY_LET(const Samples calls, Samples::of(std::move(rpc)));
  const Params params = {{"blocks", options.blocks},
                         {"page_bytes", static_cast<std::int64_t>(options.page_bytes)}};
  return std::vector<Figure>{
      {.run = "CPU of the server for reads from a disk",
       .params = params,
       .figure = compared.figure.median(),
       .unit = "ms/GiB",
       .bound = compared.bound.median(),
       .bound_name = "fio, and one pass of XXH3-64",
       .target = 1.15,
       .n = compared.rounds,
       .spread = fmt::format("ratio {:.2f} to {:.2f}", compared.ratio_low, compared.ratio_high)},
      {.run = "CPU of the RPC thread, claim and opens included",
       .params = params,
       .figure = calls.median(),
       .unit = "us/block",
       .bound = kRpcMicroseconds,
       .bound_name = "the limit of a block",
       .n = calls.count(),
       .spread = fmt::format("{} to {} us", format_number(calls.quantile(0)),
                             format_number(calls.quantile(1)))}};
}

void declare(OptionTable& table, ReadsOptions& options) {
  declare(table, options.common);
  table.integer("blocks", options.blocks, 1, 4096, "Blocks of a load, all from the disk.");
  table.bytes("page-bytes", options.page_bytes, kSegmentBytes, std::uint64_t{16} << 20,
              "Size of a block, a multiple of 32 KiB.");
  table.integer("rounds", options.rounds, 1, 1000, "Loads.");
}

}  // namespace

Outcome run_ssd_reads(int argc, const char* const* argv) {
  ReadsOptions options;
  OptionTable table("pegaflow-perf ssd_reads",
                    "Loads blocks from a disk, and measures the processor time of the server "
                    "beside that of fio and of a hash over the same number of bytes.");
  declare(table, options);
  PEGA_TRY_LET(const OptionTable::Next next, table.parse(argc, argv, std::cout));
  if (next == OptionTable::Next::kExit) return std::nullopt;

  PEGA_TRY_LET(const Conditions conditions, begin_run(options.common));
  progress("writing the blocks");
  PEGA_TRY_LET(const std::unique_ptr<Reader> reader, Reader::start(options));
  PEGA_TRY_LET(std::vector<Figure> figures, measure(options, *reader));
  return Report{.title = fmt::format("pegaflow-perf ssd_reads, {} blocks of {}", options.blocks,
                                     format_bytes(options.page_bytes)),
                .figures = std::move(figures),
                .conditions = conditions,
                .json = options.common.json};
}

}  // namespace pegaflow::perf
