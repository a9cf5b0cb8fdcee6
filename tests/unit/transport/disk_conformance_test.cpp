// Conformance of all disks: over io_uring, over threads, and simulated.
#include "tests/unit/transport/disk_conformance.h"

#include <memory>
#include <string>

#include "harness/child.h"
#include "transport/disk/open_disk.h"
#include "transport/disk/sim_disk.h"

namespace pegaflow::testing {
namespace {

/// A file in a scratch directory.
template <DiskBackend kBackend>
class FileBackend {
 public:
  static std::optional<std::string> unavailable() {
    const UringSupport support = probe_uring();
    if (kBackend != DiskBackend::kUring || support.allowed) return std::nullopt;
    return support.reason;
  }
  Result<void> try_open(const Disk::Limits& limits) {
    PEGA_TRY_LET(disk_, open_disk({.path = directory_.path(),
                                   .size_bytes = kDiskBytes,
                                   .backend = kBackend,
                                   .limits = limits,
                                   .threads = 4},
                                  inbox_.sink()));
    return {};
  }
  void open(const Disk::Limits& limits) {
    const Result<void> opened = try_open(limits);
    REQUIRE_MESSAGE(opened, to_string(opened.error()));
  }
  void close() { disk_.reset(); }
  Disk& disk() { return *disk_; }
  DiskInbox& inbox() { return inbox_; }
  Disk::Completion take(std::uint64_t ticket) { return inbox_.take(ticket); }

 private:
  harness::TemporaryDirectory directory_ = harness::TemporaryDirectory::create().value();
  DiskInbox inbox_;
  std::unique_ptr<Disk> disk_;
};
using UringBackend = FileBackend<DiskBackend::kUring>;
using ThreadsBackend = FileBackend<DiskBackend::kThreads>;

/// A simulated drive whose time advances while a completion is awaited.
class SimBackend {
 public:
  static std::optional<std::string> unavailable() { return std::nullopt; }
  Result<void> try_open(const Disk::Limits& limits) {
    PEGA_TRY_LET(disk_, drive_.open(limits, inbox_.sink()));
    return {};
  }
  void open(const Disk::Limits& limits) { REQUIRE(try_open(limits)); }
  void close() { disk_.reset(); }
  Disk& disk() { return *disk_; }
  DiskInbox& inbox() { return inbox_; }
  Disk::Completion take(std::uint64_t ticket) {
    while (!inbox_.has(ticket)) {
      const TimePoint next = drive_.next_time();
      REQUIRE(next != TimePoint::max());
      clock_.advance(std::max(next - clock_.now(), Duration::zero()));
      drive_.run();
    }
    return inbox_.take(ticket);
  }

 private:
  ManualClock clock_;
  SimDrive drive_{clock_, seed(), kDiskBytes};
  DiskInbox inbox_;
  std::unique_ptr<Disk> disk_;
};

TEST_CASE_TEMPLATE_INVOKE(disk_conformance, UringBackend, ThreadsBackend, SimBackend);

}  // namespace
}  // namespace pegaflow::testing
