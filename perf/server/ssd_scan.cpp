/// \file
/// `pegaflow-perf ssd_scan`: how fast the blocks of a disk are found again, and their memory.

#include <algorithm>
#include <chrono>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/units.h"
#include "harness/engine_memory.h"
#include "harness/server_process.h"
#include "perf/disk/fio.h"
#include "perf/disk/ssd_tables.h"
#include "perf/lib/command.h"
#include "perf/lib/keys.h"
#include "perf/lib/linked_engine.h"
#include "transport/host/host_device.h"

namespace pegaflow::perf {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::string_view kPoolMapping = "memfd:pegaflow-pool";
constexpr std::uint64_t kPageBytes = 64 << 10;
/// The least that a scan reads of a segment: its header and three pages of its table.
constexpr std::uint64_t kLeastRead = 16 << 10;
/// Reads of a scan in flight.
constexpr std::uint64_t kReads = 32;
constexpr std::size_t kClaimsOfProbe = 5;
/// Between two claims: they are to be answered during the scan, not to take its processor time.
constexpr std::chrono::milliseconds kPause{2};

struct ScanOptions {
  CommonOptions common;
  std::int64_t blocks = 1 << 20;
  std::uint64_t block_bytes = std::uint64_t{1} << 20;
  std::int64_t rounds = 7;
};

/// The sum of a metric over its labels, of which one contains `label`.
double sum_of(const harness::ServerProcess::Metrics& metrics, std::string_view name,
              std::string_view label = {}) {
  double sum = 0;
  for (const auto& [key, value] : metrics) {
    const std::string_view text = key;
    const bool is_it = text == name || text.starts_with(std::string(name) + "{");
    if (is_it && text.find(label) != std::string_view::npos) sum += value;
  }
  return sum;
}

/// One start of a server on the file.
struct Scanned {
  double seconds = 0;  ///< The duration of the scan.
  double blocks = 0;
  double index_bytes = 0;
  double beside_bytes = 0;          ///< Resident memory beside the pool.
  std::vector<double> claims_ms{};  ///< Answered before the scan had ended.
};

Result<std::unique_ptr<LinkedEngine>> connect(const harness::ServerProcess& server,
                                              const harness::EngineMemory& memory, Device& device) {
  return LinkedEngine::connect(
      {.socket = server.socket_path(), .instance = "scan", .program = "pegaflow-perf ssd_scan"},
      memory.layout(), device);
}

Result<Scanned> scan(const ScanOptions& options, const std::string& path,
                     std::uint64_t capacity_bytes) {
  PEGA_TRY_LET(
      harness::EngineMemory memory,
      harness::EngineMemory::create({.segments = 1, .segment_bytes = kPageBytes, .blocks = 1}));
  PEGA_TRY_LET(const std::unique_ptr<HostDevice> device, HostDevice::create({}));
  PEGA_TRY_LET(
      harness::ServerProcess server,
      harness::ServerProcess::start({.program = options.common.server,
                                     .arguments = {"--ssd-cache-path", path, "--ssd-cache-capacity",
                                                   std::to_string(capacity_bytes)}}));
  Scanned scanned;
  {
    PEGA_TRY_LET(const std::unique_ptr<LinkedEngine> engine, connect(server, memory, *device));
    const std::vector<BlockKey> keys =
        KeySource(static_cast<std::uint64_t>(options.common.seed) + 1).range(0, 1);
    const std::vector<std::uint32_t> blocks = {0};
    PEGA_TRY(engine->save(1, keys, blocks));
    PEGA_TRY(engine->finish(1, 1));
    std::vector<double> probe;
    for (;;) {
      PEGA_TRY_LET(const auto metrics, server.metrics());
      if (sum_of(metrics, "pegaflow_ssd_disk_state", "state=\"ready\"") == 1) break;
      // The disk was still scanning after these were answered.
      scanned.claims_ms.insert(scanned.claims_ms.end(), probe.begin(), probe.end());
      probe.clear();
      for (std::size_t i = 0; i < kClaimsOfProbe; ++i) {
        const auto begin = Clock::now();
        PEGA_TRY_LET(const CacheSession::Answer answer, engine->claim(keys));
        probe.push_back(std::chrono::duration<double, std::milli>(Clock::now() - begin).count());
        engine->unclaim(answer.token);
        std::this_thread::sleep_for(kPause);
      }
    }
  }
  PEGA_TRY_LET(const auto metrics, server.metrics());
  scanned.seconds = sum_of(metrics, "pegaflow_ssd_scan_seconds");
  scanned.blocks = sum_of(metrics, "pegaflow_ssd_blocks");
  scanned.index_bytes = sum_of(metrics, "pegaflow_ssd_index_bytes");
  PEGA_TRY_LET(const harness::Resident resident,
               harness::resident_of(server.process().pid(), kPoolMapping));
  scanned.beside_bytes = static_cast<double>(resident.beside_bytes);
  PEGA_TRY(server.stop());
  return scanned;
}

struct Series {
  Rounds seconds;
  std::vector<double> claims_ms{};
  std::vector<double> index_bytes{};     ///< A block's.
  std::vector<double> resident_bytes{};  ///< A block's.
};

/// Scans the file, and has fio read the same tables.
Result<void> measure(const ScanOptions& options, const std::string& path, const SsdTables& tables,
                     double beside_bytes, std::int64_t round, Series& series) {
  const std::uint64_t read_bytes = std::max(kLeastRead, tables.table_bytes);
  const FioLoad load{.path = path,
                     .rw = "read",
                     .file_bytes = tables.file_bytes - tables.log_offset,
                     .block_bytes = read_bytes,
                     .bytes_in_flight = kReads * read_bytes,
                     .total_bytes = tables.segments * read_bytes,
                     .seed = options.common.seed,
                     .begin = tables.log_offset,
                     .stride_bytes = tables.segment_bytes};
  std::optional<DiskRate> bound;
  if (round % 2 == 0) {
    PEGA_TRY_LET(bound, run_fio(load));
  }
  PEGA_TRY_LET(Scanned scanned, scan(options, path, tables.file_bytes));
  if (!bound) {
    PEGA_TRY_LET(bound, run_fio(load));
  }
  const auto blocks = static_cast<double>(options.blocks);
  if (scanned.blocks < blocks) {
    return fail(Errc::kInternal, "{} of {} blocks were found", scanned.blocks, blocks);
  }
  const double fio_seconds =
      static_cast<double>(load.total_bytes) / 1e9 / bound->gigabytes_per_second;
  series.seconds.add({scanned.seconds}, {fio_seconds});
  series.index_bytes.push_back(scanned.index_bytes / blocks);
  series.resident_bytes.push_back((scanned.beside_bytes - beside_bytes) / blocks);
  series.claims_ms.insert(series.claims_ms.end(), scanned.claims_ms.begin(),
                          scanned.claims_ms.end());
  return {};
}

Result<void> add_figures(Series series, const Params& params, std::vector<Figure>& figures) {
  PEGA_TRY_LET(const Rounds::Comparison seconds, series.seconds.compare());
  figures.push_back(
      {.run = "scan",
       .params = params,
       .figure = seconds.figure.median(),
       .unit = "s",
       .bound = seconds.bound.median(),
       .bound_name = "fio reads the same tables",
       .target = 2,
       .n = seconds.rounds,
       .spread = fmt::format("ratio {:.2f} to {:.2f}; at most {} s", seconds.ratio_low,
                             seconds.ratio_high, format_number(seconds.figure.quantile(1)))});
  const std::size_t answered = series.claims_ms.size();
  if (answered != 0) {
    PEGA_TRY_LET(const Samples claims, Samples::of(std::move(series.claims_ms)));
    figures.push_back({.run = "claims answered during the scan, longest",
                       .params = params,
                       .figure = claims.quantile(1),
                       .unit = "ms",
                       .target = std::nullopt,
                       .n = answered,
                       .spread = fmt::format("median {} ms", format_number(claims.median()))});
  }
  const auto memory = [&](const char* run, std::vector<double> bytes,
                          std::optional<double> target) -> Result<void> {
    PEGA_TRY_LET(const Samples samples, Samples::of(std::move(bytes)));
    figures.push_back({.run = run,
                       .params = params,
                       .figure = samples.median(),
                       .unit = "B",
                       .bound = 48,
                       .bound_name = "the limit of a block",
                       .target = target,
                       .n = samples.count(),
                       .spread = fmt::format("{} to {} B", format_number(samples.quantile(0)),
                                             format_number(samples.quantile(1)))});
    return {};
  };
  PEGA_TRY(memory("index of a block", std::move(series.index_bytes), 1));
  // Beside the index, memory that the allocator keeps after the scan.
  return memory("resident memory of a block", std::move(series.resident_bytes), std::nullopt);
}

void declare(OptionTable& table, ScanOptions& options) {
  declare(table, options.common);
  table.integer("blocks", options.blocks, 1000, std::int64_t{1} << 24, "Blocks on the disk.");
  table.bytes("block-bytes", options.block_bytes, 4096, std::uint64_t{16} << 20,
              "Size of each block on all its shards; the file is sparse.");
  table.integer("rounds", options.rounds, 1, 1000, "Starts of a server.");
}

}  // namespace

Outcome run_ssd_scan(int argc, const char* const* argv) {
  ScanOptions options;
  OptionTable table("pegaflow-perf ssd_scan",
                    "Starts servers on a sparse file whose tables name blocks: the time until they "
                    "are found, beside fio, and their memory.");
  declare(table, options);
  PEGA_TRY_LET(const OptionTable::Next next, table.parse(argc, argv, std::cout));
  if (next == OptionTable::Next::kExit) return std::nullopt;

  PEGA_TRY_LET(const Conditions conditions, begin_run(options.common));
  PEGA_TRY_LET(const harness::TemporaryDirectory directory, harness::TemporaryDirectory::create());
  const std::string path = directory.path() + "/ssd";
  progress("writing the tables");
  PEGA_TRY_LET(
      const SsdTables tables,
      write_ssd_tables(path, static_cast<std::uint64_t>(options.blocks), options.block_bytes,
                       static_cast<std::uint64_t>(options.common.seed)));
  // The memory of a server whose file has as many segments and no block.
  const std::string empty = directory.path() + "/empty";
  PEGA_TRY(write_ssd_tables(empty, 1, options.block_bytes, 1));
  PEGA_TRY_LET(const Scanned beside, scan(options, empty, std::uint64_t{300} << 20));
  Series series;
  for (std::int64_t round = 0; round < options.rounds; ++round) {
    progress(fmt::format("round {} of {}", round + 1, options.rounds));
    PEGA_TRY(measure(options, path, tables, beside.beside_bytes, round, series));
  }
  const Params params = {{"blocks", options.blocks},
                         {"block_bytes", static_cast<std::int64_t>(options.block_bytes)},
                         {"segments", static_cast<std::int64_t>(tables.segments)}};
  std::vector<Figure> figures;
  PEGA_TRY(add_figures(std::move(series), params, figures));
  return Report{.title = fmt::format("pegaflow-perf ssd_scan, {} blocks of {}", options.blocks,
                                     format_bytes(options.block_bytes)),
                .figures = std::move(figures),
                .conditions = conditions,
                .json = options.common.json};
}

}  // namespace pegaflow::perf
