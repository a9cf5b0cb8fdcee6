#include "perf/disk/fio.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <utility>
#include <vector>

#include <poll.h>

#include <nlohmann/json.hpp>

#include "harness/child.h"

namespace pegaflow::perf {
namespace {

constexpr const char* kProgram = "/usr/bin/fio";
constexpr std::chrono::seconds kPatience{120};
constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

}  // namespace

Result<DiskRate> run_fio(const FioLoad& load) {
  std::error_code error;
  if (!std::filesystem::exists(kProgram, error)) {
    return fail(Errc::kRefused, "{} is missing: apt-get install fio", kProgram);
  }
  PEGA_TRY_LET(const harness::TemporaryDirectory directory, harness::TemporaryDirectory::create());
  const std::string log_file = directory.path() + "/fio.json";
  const std::uint64_t depth = std::max<std::uint64_t>(1, load.bytes_in_flight / load.block_bytes);
  std::vector<std::string> command = {"/usr/bin/env",
                                      "GLIBC_TUNABLES=glibc.malloc.hugetlb=1",
                                      kProgram,
                                      "--name=bound",
                                      "--filename=" + load.path,
                                      "--ioengine=io_uring",
                                      "--direct=1",
                                      "--rw=" + load.rw,
                                      fmt::format("--bs={}", load.block_bytes),
                                      fmt::format("--iodepth={}", depth),
                                      fmt::format("--offset={}", load.begin),
                                      fmt::format("--size={}", load.file_bytes),
                                      fmt::format("--io_size={}", load.total_bytes),
                                      fmt::format("--randseed={}", load.seed),
                                      "--norandommap",
                                      "--allow_file_create=0",
                                      "--invalidate=0",
                                      "--thread",
                                      "--output-format=json"};
  if (load.stride_bytes != 0) {
    command.insert(command.end(),
                   {"--zonemode=strided", fmt::format("--zonesize={}", load.block_bytes),
                    fmt::format("--zonerange={}", load.stride_bytes)});
  }
  PEGA_TRY_LET(harness::Child child,
               harness::Child::start({.command = std::move(command), .log_file = log_file}));
  pollfd entry{.fd = child.pidfd(), .events = POLLIN, .revents = 0};
  constexpr auto kMs = std::chrono::milliseconds(kPatience).count();
  if (::poll(&entry, 1, static_cast<int>(kMs)) != 1) {
    return fail(Errc::kTimeout, "fio did not end within {} s", kPatience.count());
  }
  PEGA_TRY_LET(const std::string output, harness::read_file(log_file));
  Result<DiskRate> parsed = parse_fio(output);
  if (parsed) return parsed;
  return fail(Errc::kRefused, "fio failed: {}", output.substr(0, 300));
}

Result<DiskRate> parse_fio(const std::string& output) {
  // Warnings may precede the object.
  const std::size_t begin = output.find('{');
  const nlohmann::json report =
      begin == std::string::npos
          ? nlohmann::json(nlohmann::json::value_t::discarded)
          : nlohmann::json::parse(output.substr(begin), nullptr, /*allow_exceptions=*/false);
  if (report.is_discarded()) return fail(Errc::kCorrupt, "fio: the output is no JSON");
  try {
    const nlohmann::json& job = report.at("jobs").at(0);
    const double read_bytes = job.at("read").at("io_bytes").get<double>();
    const nlohmann::json& side = read_bytes > 0 ? job.at("read") : job.at("write");
    const double bytes = side.at("io_bytes").get<double>();
    const double rate = side.at("bw_bytes").get<double>();
    if (job.at("error").get<int>() != 0 || bytes <= 0 || rate <= 0) {
      return fail(Errc::kCorrupt, "fio: nothing was transferred, or with an error");
    }
    const double cpu_percent = job.at("usr_cpu").get<double>() + job.at("sys_cpu").get<double>();
    const double cpu_ms = job.at("job_runtime").get<double>() * cpu_percent / 100;
    return DiskRate{.gigabytes_per_second = rate / 1e9, .cpu_ms_per_gib = cpu_ms / (bytes / kGiB)};
  } catch (const nlohmann::json::exception& problem) {
    return fail(Errc::kCorrupt, "fio: {}", problem.what());
  }
}

}  // namespace pegaflow::perf
