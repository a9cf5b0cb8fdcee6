#pragma once
/// \file
/// Other engines whose memory a mover reads.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/os/unique_fd.h"
#include "client/direct/guards.h"
#include "transport/device.h"

namespace pegaflow {

/// A guard of consecutive blocks.
struct BlockGuard {
  Guard guard;
  std::uint32_t blocks = 0;
};

/// The engines that the server has named: their memory at the device, their guards and their
/// pidfds. An engine whose memory the device cannot read is remembered as such.
///
/// Thread-bound. At its limit it forgets the engine that was not read for the longest time.
class Sources {
 public:
  static constexpr std::size_t kMost = 64;
  /// An engine that cannot be read at present is not read again before this time has passed.
  static constexpr std::chrono::seconds kPause{30};

  /// `device` and `clock` outlive it.
  Sources(Device& device, const Clock& clock) : device_(device), clock_(clock) {}
  /// Calls clear().
  ~Sources() { clear(); }
  Sources(const Sources&) = delete;
  Sources& operator=(const Sources&) = delete;

  /// Watches the process of an engine as long as its result lives, and calls forget_ended() when it
  /// ends; not from within the call.
  using Watch = std::function<std::shared_ptr<void>(int process)>;
  /// Without a function all watches end: they may not outlive what they wait on.
  void watch_with(Watch watch);
  /// Forgets the engines that have ended and are not being read: memory of a GPU is not freed as
  /// long as it is mapped here.
  void forget_ended();

  /// The server no longer has this engine. Forgets it, unless it is being read.
  void forget(std::uint64_t source);

  /// The names of the engines here. Forgets ended ones first, and those whose pause is over.
  [[nodiscard]] std::vector<std::uint64_t> known();
  [[nodiscard]] bool knows(std::uint64_t source) const { return find(source) != nullptr; }

  /// Adds an engine of another host, with memory that has a network. Errors: as below, but for
  /// those of its guards and its process.
  Result<void> add_far(std::uint64_t source, const PeerMemory& memory, std::uint32_t guard_count);
  /// Adds an engine. `memory.process` is ignored; an engine that it has already stays as it is.
  /// Errors: kRefused when its memory or its guards cannot be used, and then it is remembered as
  /// unreadable; kGone when its process has ended or the device is not attached; kBusy when kMost
  /// engines are being read, or no descriptor is free. `has_turn`: its process consents to reads in
  /// this turn, which may be over: then it is unreadable for kPause.
  Result<void> add(std::uint64_t source, PeerMemory memory, UniqueFd process, int guards,
                   std::uint32_t guard_count, bool has_turn = false);

  /// A read that has begun.
  struct Reading {
    std::uint64_t peer = 0;  ///< The engine's name at the device.
    /// The places of the guards that the device has to read after the blocks; none on this host.
    std::vector<std::uint32_t> guards{};
  };
  /// Begins to read `blocks` of an engine under `guards`.
  /// Errors: kGone for an unknown engine, kRefused for an unreadable one, kInternal when the guards
  /// do not cover the blocks or a block or a guard does not exist.
  Result<Reading> begin(std::uint64_t source, std::span<const std::uint32_t> blocks,
                        std::span<const BlockGuard> guards);
  /// Ends it after the last copy. `values` are those of Reading::guards, as the device has read
  /// them. Returns how many of the leading blocks have had their content all the time.
  std::size_t end(std::uint64_t source, std::span<const BlockGuard> guards,
                  std::span<const std::uint64_t> values = {});
  /// The device has found that it cannot read the engine's memory: for kPause if its process had
  /// consented, which may end.
  void refuse(std::uint64_t source, const Error& why);
  /// A read of an engine did not arrive, or not in time. If that is of another host, it is not read
  /// for kPause: each attempt would cost its request as much time. Returns whether it is.
  bool suspend(std::uint64_t source, const Error& why);

  /// Forgets all engines, at the end of a connection: another server has other names for them. No
  /// batch that reads one of them is in flight.
  void clear();
  /// The number of calls of clear(): an engine belongs to the period in which it was named.
  [[nodiscard]] std::uint64_t period() const noexcept { return period_; }

 private:
  struct Source {
    std::uint64_t id = 0;    ///< The server's name for it.
    std::uint64_t peer = 0;  ///< Its name at the device; 0: not there.
    std::uint64_t block_count = 0;
    UniqueFd process;  ///< Empty: on another host.
    std::shared_ptr<void> watch;
    PeerGuards guards;  ///< Those on this host.
    std::uint32_t guard_count = 0;
    bool is_far = false;  ///< On another host.
    bool has_turn = false;
    std::size_t reads = 0;  ///< Pieces in flight.
    bool is_unreadable = false;
    std::optional<TimePoint> paused_until{};
  };
  /// Whether it is on this host and its process has ended.
  [[nodiscard]] static bool has_ended(const Source& source);
  [[nodiscard]] const Source* find(std::uint64_t source) const;
  [[nodiscard]] Source* find(std::uint64_t source);
  std::vector<Source>::iterator erase(std::vector<Source>::iterator source);
  void add_unreadable(std::uint64_t source, UniqueFd process, const Error& why,
                      bool has_turn = false);
  /// Whether the device's answer is to be remembered: not that of an engine that has ended, or of a
  /// device that is not attached or short of something.
  [[nodiscard]] static bool is_final(const Error& error) {
    return error.code != Errc::kGone && error.code != Errc::kBusy;
  }
  Result<Source*> add_readable(std::uint64_t source, const PeerMemory& memory,
                               std::uint32_t guard_count);
  Result<void> make_room();

  Device& device_;
  const Clock& clock_;
  std::vector<Source> sources_;  ///< The one that was read last is the last one.
  std::uint64_t last_peer_ = 0;
  std::uint64_t period_ = 0;
  Watch watch_;
};

}  // namespace pegaflow
