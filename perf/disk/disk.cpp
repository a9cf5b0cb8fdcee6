/// \file
/// `pegaflow-perf disk`: reads and writes of a disk, beside fio on the same file.

#include <filesystem>
#include <iostream>
#include <utility>

#include <unistd.h>

#include "harness/child.h"
#include "perf/disk/disk_load.h"
#include "perf/disk/fio.h"
#include "perf/lib/command.h"

namespace pegaflow::perf {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

struct DiskBenchOptions {
  CommonOptions common;
  std::string path;
  std::string io = "auto";
  std::uint64_t file_bytes = std::uint64_t{2} << 30;
  std::uint64_t round_bytes = 512 * kMiB;
  std::uint64_t read_bytes = 16 * kMiB;
  std::uint64_t write_bytes = 8 * kMiB;
  std::int64_t rounds = 7;
};

/// One figure: a load of ours, and what stands beside it.
struct Comparison {
  std::string run;
  DiskLoad load;
  double target = 0;
  std::string fio_rw;  ///< Empty: the bound is `bound_load` instead of fio.
  DiskLoad bound_load{};
  std::string bound_name{};
};

/// Rates of both sides, by round.
struct Series {
  Rounds rates;
  std::vector<double> cpu;
  std::vector<double> bound_cpu;
};

std::vector<Comparison> comparisons(std::uint64_t round_bytes) {
  const auto read = [&](std::uint64_t block, bool hashed) {
    return DiskLoad{.block_bytes = block, .total_bytes = round_bytes, .hashed = hashed};
  };
  DiskLoad beside = read(kMiB, false);
  beside.beside_writes = true;
  const DiskLoad write{.operation = Disk::Operation::kWrite,
                       .block_bytes = kMiB,
                       .total_bytes = round_bytes,
                       .sequential = true};
  const std::string fio = "fio, io_uring and O_DIRECT";
  return {
      {"reads of 64 KiB", read(64 << 10, false), 0.9, "randread", {}, fio},
      {"reads of 1 MiB", read(kMiB, false), 0.95, "randread", {}, fio},
      {"reads of 1 MiB, hashed", read(kMiB, true), 0.95, "randread", {}, fio},
      {"reads of 8 MiB", read(8 * kMiB, false), 0.95, "randread", {}, fio},
      {"writes of 1 MiB", write, 0.9, "write", {}, fio},
      {"reads of 1 MiB beside full writes", beside, 0.7, "", read(kMiB, false),
       "the same reads alone"},
  };
}

Result<DiskRate> run_bound(LoadedDisk& disk, const DiskBenchOptions& options,
                           const Comparison& compared, std::int64_t round) {
  if (compared.fio_rw.empty()) return disk.run(compared.bound_load);
  const bool reads = compared.load.operation == Disk::Operation::kRead;
  return run_fio({.path = disk.disk().attributes().path,
                  .rw = compared.fio_rw,
                  .file_bytes = disk.disk().size_bytes(),
                  .block_bytes = compared.load.block_bytes,
                  .bytes_in_flight = reads ? options.read_bytes : options.write_bytes,
                  .total_bytes = options.round_bytes,
                  .seed = options.common.seed + round});
}

/// The sides change places from round to round.
Result<void> measure(LoadedDisk& disk, const DiskBenchOptions& options, const Comparison& compared,
                     std::int64_t round, Series& series) {
  DiskRate ours;
  DiskRate bound;
  if (round % 2 == 0) {
    PEGA_TRY_LET(ours, disk.run(compared.load));
  }
  PEGA_TRY_LET(bound, run_bound(disk, options, compared, round));
  if (round % 2 != 0) {
    PEGA_TRY_LET(ours, disk.run(compared.load));
  }
  series.rates.add({ours.gigabytes_per_second}, {bound.gigabytes_per_second});
  series.cpu.push_back(ours.cpu_ms_per_gib);
  series.bound_cpu.push_back(bound.cpu_ms_per_gib);
  return {};
}

Result<void> add_figures(const Comparison& compared, Series series, const Params& params,
                         std::vector<Figure>& figures) {
  PEGA_TRY_LET(const Rounds::Comparison rates, series.rates.compare());
  PEGA_TRY_LET(const Samples cpu, Samples::of(std::move(series.cpu)));
  PEGA_TRY_LET(const Samples bound_cpu, Samples::of(std::move(series.bound_cpu)));
  figures.push_back(
      {.run = compared.run,
       .params = params,
       .figure = rates.figure.median(),
       .unit = "GB/s",
       .bound = rates.bound.median(),
       .bound_name = compared.bound_name,
       .side = Side::kAtLeast,
       .target = compared.target,
       .n = rates.rounds,
       .spread = fmt::format("ratio {:.2f} to {:.2f}; bound {} to {} GB/s", rates.ratio_low,
                             rates.ratio_high, format_number(rates.bound.quantile(0)),
                             format_number(rates.bound.quantile(1)))});
  figures.push_back({.run = compared.run + ", CPU",
                     .params = params,
                     .figure = cpu.median(),
                     .unit = "ms/GiB",
                     .bound = bound_cpu.median(),
                     .bound_name = compared.bound_name,
                     .target = std::nullopt,
                     .n = cpu.count(),
                     .spread = fmt::format("{} to {}", format_number(cpu.quantile(0)),
                                           format_number(cpu.quantile(1)))});
  return {};
}

void declare(OptionTable& table, DiskBenchOptions& options) {
  declare(table, options.common);
  table.text("path", options.path,
             "The directory on the disk to measure; by default the one for temporary files. A file "
             "in it is written and removed.");
  table.text("io", options.io, "auto, uring or threads.");
  table.bytes("file", options.file_bytes, 64 * kMiB, std::uint64_t{1} << 44,
              "Size of the file; larger than the caches of the disk.");
  table.bytes("bytes", options.round_bytes, 8 * kMiB, std::uint64_t{1} << 40,
              "Bytes of each side of a round.");
  table.bytes("reads-in-flight", options.read_bytes, kMiB, std::uint64_t{1} << 30,
              "Bytes of reads in flight, on both sides.");
  table.bytes("writes-in-flight", options.write_bytes, kMiB, std::uint64_t{1} << 30,
              "Bytes of writes in flight, on both sides.");
  table.integer("rounds", options.rounds, 1, 1000, "Rounds for each figure.");
}

/// A directory on the disk, for the one file; removed with its content.
class Scratch {
 public:
  static Result<Scratch> create(const std::string& parent) {
    std::error_code error;
    std::string path =
        std::filesystem::absolute((parent.empty() ? std::filesystem::temp_directory_path(error)
                                                  : std::filesystem::path(parent)) /
                                  fmt::format("pegaflow-perf-{}", ::getpid()));
    if (!std::filesystem::create_directory(path, error)) {
      return fail(Errc::kInvalidArgument, "--path: make {}: {}", path, error.message());
    }
    return Scratch(std::move(path));
  }
  Scratch(Scratch&& other) noexcept : path_(std::exchange(other.path_, {})) {}
  Scratch& operator=(Scratch&&) = delete;
  ~Scratch() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  explicit Scratch(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

}  // namespace

Outcome run_disk(int argc, const char* const* argv) {
  DiskBenchOptions options;
  OptionTable table("pegaflow-perf disk",
                    "Measures reads and writes of a file on a disk, beside fio with the same file, "
                    "sizes and bytes in flight.");
  declare(table, options);
  PEGA_TRY_LET(const OptionTable::Next next, table.parse(argc, argv, std::cout));
  if (next == OptionTable::Next::kExit) return std::nullopt;

  PEGA_TRY_LET(const Conditions conditions, begin_run(options.common));
  PEGA_TRY_LET(const DiskBackend backend, parse_disk_backend(options.io));
  PEGA_TRY_LET(const Scratch scratch, Scratch::create(options.path));
  PEGA_TRY_LET(const std::unique_ptr<LoadedDisk> disk,
               LoadedDisk::open({.path = scratch.path(),
                                 .size_bytes = options.file_bytes / (8 * kMiB) * (8 * kMiB),
                                 .backend = backend,
                                 .limits = {.read_bytes = options.read_bytes,
                                            .write_bytes = options.write_bytes}},
                                static_cast<std::uint64_t>(options.common.seed)));
  progress("writing the file");
  PEGA_TRY(disk->fill());
  const std::vector<Comparison> all = comparisons(options.round_bytes);
  std::vector<Series> series(all.size());
  for (std::int64_t round = 0; round < options.rounds; ++round) {
    progress(fmt::format("round {} of {}", round + 1, options.rounds));
    for (std::size_t i = 0; i < all.size(); ++i) {
      PEGA_TRY(measure(*disk, options, all[i], round, series[i]));
    }
  }
  const Disk::Attributes& attributes = disk->disk().attributes();
  const Params params = {{"io", attributes.backend},
                         {"direct", attributes.direct ? "yes" : "no"},
                         {"file_bytes", static_cast<std::int64_t>(disk->disk().size_bytes())},
                         {"reads_in_flight", static_cast<std::int64_t>(options.read_bytes)},
                         {"writes_in_flight", static_cast<std::int64_t>(options.write_bytes)}};
  std::vector<Figure> figures;
  for (std::size_t i = 0; i < all.size(); ++i) {
    PEGA_TRY(add_figures(all[i], std::move(series[i]), params, figures));
  }
  return Report{.title = "pegaflow-perf disk, " + attributes.backend,
                .figures = std::move(figures),
                .conditions = conditions,
                .json = options.common.json};
}

}  // namespace pegaflow::perf
