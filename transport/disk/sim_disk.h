#pragma once
/// \file
/// A simulated disk: its time comes from a clock of the caller's, its faults from a seed.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "transport/disk/disk.h"

namespace pegaflow {

/// The medium and its cache, which outlive the process that opens it. All state is by sector of
/// 4 KiB: persisted, cached (a power cut may lose it) or in flight.
///
/// Nothing runs by itself: run() executes all events that are due by the clock, and next_time()
/// returns the time of the next. With a ManualClock that is set to next_time() before each run(),
/// each seed and sequence of calls yields one sequence of events.
///
/// Memory is taken only for sectors that were written. Thread-bound, together with the Disks opened
/// on it, unless the caller holds a lock of its own.
class SimDrive {
 public:
  /// Probabilities for each piece of I/O; all 0 by default.
  struct Faults {
    double read_error = 0;         ///< EIO once; the next try may succeed.
    double write_error = 0;        ///< EIO; each sector has its old or its new content.
    double no_space = 0;           ///< A write ends with ENOSPC, as on a thin volume.
    double torn_write = 0;         ///< Reports success; only some sectors are written.
    double lost_write = 0;         ///< Reports success; no sector is written.
    double misdirected_write = 0;  ///< Reports success; written at another place.
    double misdirected_read = 0;   ///< Reports success; read from another place.
    double read_flip = 0;          ///< One bit of what is read is wrong, once.
    double rot = 0;                ///< One bit of what is read is wrong for ever.
    double short_transfer = 0;     ///< Fewer bytes than requested.
    double slow = 0;               ///< Takes up to `slowest` longer.
    double hang = 0;         ///< Never ends, until release_hung() or the drive is powered off.
    double flush_error = 0;  ///< EIO; what was cached may be lost.
    Duration slowest = std::chrono::seconds(1);
  };

  /// Time that a piece takes; pieces in flight share the bandwidth.
  struct Speed {
    Duration latency = std::chrono::microseconds(80);
    double bytes_per_second = 2e9;
  };

  /// `clock` outlives the drive. The medium reads as zeros. `size_bytes` is a multiple of
  /// Disk::kAlignment.
  SimDrive(const Clock& clock, std::uint64_t seed, std::uint64_t size_bytes);
  /// All Disks are destroyed before.
  ~SimDrive();
  SimDrive(const SimDrive&) = delete;
  SimDrive& operator=(const SimDrive&) = delete;

  /// Opens the drive; `sink` is called inside run(), and inside the destructor of the Disk.
  /// Destroying the Disk is a clean stop: pieces in flight are executed at once, hung ones too.
  /// Errors: kBusy while another Disk, or I/O of a killed one, has the lock.
  Result<std::unique_ptr<Disk>> open(const Disk::Limits& limits, Disk::CompletionSink sink);

  /// The time of the next event; TimePoint::max() when there is none.
  [[nodiscard]] TimePoint next_time() const;
  /// Executes all events that are due by the clock.
  void run();

  void set_faults(const Faults& faults);
  void set_speed(const Speed& speed);

  /// SIGKILL of the process: no further completion is delivered and nothing is accepted by the open
  /// Disk (kGone), while pieces in flight go on, into its memory as well, until they end. The lock
  /// is free only then: see is_locked().
  void kill();
  [[nodiscard]] bool is_locked() const;
  /// A power cut: like kill(), but pieces in flight end at once, each sector of theirs with its old
  /// or its new content, and any subset of the sectors that were not flushed falls back to its
  /// persisted content. The memory of the process is no longer touched.
  void power_cut();
  /// The device disappears (every piece ends with ENODEV) or is back, with its cache lost.
  void set_gone(bool gone);
  /// Ends all hung pieces, with success.
  void release_hung();

  /// Reads of this sector fail with EIO until it is written, or never again fail.
  void set_bad_sector(std::uint64_t offset, bool bad = true);
  /// Flips one bit of the medium, persisted and cached.
  void flip_bit(std::uint64_t offset, unsigned bit);
  /// The content as a reader would get it from a device without faults, for oracles and damage.
  void peek(std::uint64_t offset, std::span<std::byte> to) const;
  void poke(std::uint64_t offset, std::span<const std::byte> from);

  struct Counts {
    std::uint64_t pieces = 0;  ///< Executed.
    std::uint64_t faults = 0;  ///< Those of them with a fault of any kind.
    std::uint64_t bytes_read = 0;
    std::uint64_t bytes_written = 0;
    std::uint64_t flushes = 0;
    std::uint64_t sectors_lost = 0;  ///< Unflushed sectors that power cuts threw away.
    std::size_t in_flight = 0;       ///< Pieces, now; hung ones too.
  };
  [[nodiscard]] const Counts& counts() const;

 private:
  class Medium;
  class OpenDisk;
  std::unique_ptr<Medium> medium_;
};

}  // namespace pegaflow
