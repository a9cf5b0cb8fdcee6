#include "transport/disk/open_disk.h"

#include <utility>

#include "transport/disk/checks.h"
#include "transport/disk/disk_file.h"
#include "transport/disk/file_disk.h"

namespace pegaflow {
namespace {

constexpr unsigned kMostThreads = 64;

Result<void> check(const DiskOptions& options) {
  if (options.path.empty()) return fail(Errc::kInvalidArgument, "disk: the path is empty");
  if (options.threads < 1 || options.threads > kMostThreads) {
    return fail(Errc::kInvalidArgument, "disk: {} threads, outside of 1 to {}", options.threads,
                kMostThreads);
  }
  return disk::check(options.limits);
}

}  // namespace

Result<DiskBackend> parse_disk_backend(std::string_view text) {
  if (text == "auto") return DiskBackend::kAuto;
  if (text == "uring") return DiskBackend::kUring;
  if (text == "threads") return DiskBackend::kThreads;
  return fail(Errc::kInvalidArgument, "'{}' is not auto, uring or threads", text);
}

Result<std::unique_ptr<Disk>> open_disk(const DiskOptions& options, Disk::CompletionSink sink) {
  PEGA_TRY(check(options));
  DiskBackend backend = options.backend;
  std::string reason = "chosen by the configuration";
  if (backend != DiskBackend::kThreads) {
    UringSupport support = probe_uring();
    if (!support.allowed && backend == DiskBackend::kUring) {
      return fail(Errc::kRefused, "{}: use the backend `threads` or `auto`", support.reason);
    }
    if (backend == DiskBackend::kAuto) {
      backend = support.allowed ? DiskBackend::kUring : DiskBackend::kThreads;
      reason = std::move(support.reason);
    }
  }
  PEGA_TRY_LET(disk::DiskFile file,
               disk::DiskFile::open(options.path, options.size_bytes, options.lock_wait));
  PEGA_TRY_LET(
      std::unique_ptr<disk::FileDisk> opened,
      disk::FileDisk::start(std::move(file), options, backend, std::move(reason), std::move(sink)));
  return opened;
}

}  // namespace pegaflow
