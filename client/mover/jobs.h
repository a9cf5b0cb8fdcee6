#pragma once
/// \file
/// Save and load jobs, from their acceptance to their report.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/block_key.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"
#include "base/job_id.h"
#include "client/load_pace.h"
#include "transport/device.h"

namespace pegaflow {

/// The common part of saves and loads. Bound to the private thread once it is accepted.
struct MoverJob {
  enum class Phase : std::uint8_t {
    kAsking,      ///< reserve or open is pending; nothing is copied.
    kCopying,     ///< The device has the batch.
    kPublishing,  ///< Saves only: the copies have ended; publish is pending.
  };
  Phase phase = Phase::kAsking;
  std::uint64_t id = 0;  ///< The engine's name: the number of the job, or the load.
  TimePoint accepted{};
  std::vector<std::uint32_t> blocks;
  std::size_t copies = 0;        ///< Pages in the device's batch.
  bool connection_lost = false;  ///< Then none of its copies count.
};

struct SaveJob : MoverJob {
  JobId job;
  std::vector<BlockKey> keys;
  Device::Event after = Device::Event::kNow;
  std::size_t skipped = 0;  ///< Blocks without a slot.
};

/// A load has several pieces if its blocks arrive from another node one after the other.
struct LoadJob : MoverJob {
  Id128 token;
  std::uint64_t first = 0;
  std::uint64_t pin = 0;                    ///< The pin of the current piece.
  std::size_t done = 0;                     ///< Blocks of earlier pieces: loaded.
  std::size_t copied = 0;                   ///< Their pages.
  std::optional<TimePoint> coming_until{};  ///< Set once further blocks are known to be in flight.
  /// The checksums of the piece's saved pages, one per copy. Empty: nothing is compared.
  std::vector<std::uint64_t> checksums;
  std::size_t verified = 0;
  std::size_t corrupt = 0;
  std::optional<LoadPace::Computing> computing{};
  LoadPace pace;
  std::optional<TimePoint> worth_until{};  ///< The end of the pending open's usefulness.
  TimePoint submitted{};                   ///< When the device received the piece.
  Duration copying{};                      ///< Time of all pieces on the device.
  std::optional<LoadPace::Cut> cut{};
  std::optional<Error> gave_up;  ///< Why no further page is wanted; it may have come too late.
};

/// Stops on a completion that does not fit the job.
void check_completion(const MoverJob& job, const Device::Completion& completion);

/// The error of a job whose response has too few or too many slots, or one beyond the pool.
Error bad_slots(std::size_t slots, std::size_t blocks);

/// The error of a job that ends without a response; `lost`: with its connection.
Error unanswered_error(bool lost);

}  // namespace pegaflow
