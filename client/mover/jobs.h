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
#include "client/direct/sources.h"
#include "client/load_pace.h"
#include "client/mover/page_copies.h"
#include "transport/device.h"

namespace pegaflow {

/// The common part of saves and loads. Bound to the private thread once it is accepted.
struct MoverJob {
  std::uint64_t id = 0;  ///< The engine's name: the number of the job, or the load.
  TimePoint accepted{};
  bool connection_lost = false;  ///< Then none of its copies count.
  bool is_ending = false;        ///< The connection is over, or is to be closed.
};

struct SaveJob : MoverJob {
  enum class Phase : std::uint8_t {
    kAsking,      ///< reserve is pending; nothing is copied.
    kCopying,     ///< The device has the batches.
    kPublishing,  ///< The copies have ended; publish is pending.
    kReleasing,   ///< It is sealed; other engines still read its blocks.
  };
  Phase phase = Phase::kAsking;
  JobId job;
  std::size_t kind = 0;
  std::vector<BlockKey> keys;
  std::vector<std::uint8_t> depths;           ///< As the wire has them: one for each key, or none.
  std::vector<std::uint32_t> blocks;          ///< Those of all members for each key.
  bool may_refuse = false;                    ///< As the wire has it.
  Device::Event after = Device::Event::kNow;  ///< The copies wait for it,
  Device::Event computed = Device::Event::kNow;  ///< and reads by other engines for this one.
  std::size_t skipped = 0;                       ///< Keys without a slot.
  /// Open while other engines may read its blocks, at the latest until its report.
  std::optional<Guard> guard;
  PageCopies copies;
};

/// The blocks of one kind in a load, under pins of their own. It has several pieces if its blocks
/// arrive from another node, or are saved, one after the other.
struct LoadPart {
  enum class Phase : std::uint8_t {
    kAsking,      ///< open or openNext is pending; nothing is copied.
    kCopying,     ///< The device has the batches of a piece.
    kConfirming,  ///< Its copies out of another node's pool have ended; confirm is pending.
    kEnded,       ///< Nothing is in flight.
  };
  std::size_t kind = 0;
  std::uint64_t first = 0;  ///< In the claim's range of the kind.
  std::size_t count = 0;
  std::vector<std::uint32_t> blocks{};  ///< Those of all members for each block.
  Phase phase = Phase::kAsking;
  std::uint64_t pin = 0;                    ///< The pin of the current piece.
  std::size_t done = 0;                     ///< Blocks of earlier pieces: loaded.
  std::optional<TimePoint> coming_until{};  ///< Set once further blocks are known to be in flight.
  std::optional<TimePoint> worth_until{};   ///< The end of the pending open's usefulness.
  /// The checksums of the piece's saved pages, one per page. Empty: nothing is compared.
  std::vector<std::uint64_t> checksums{};
  /// The engine that the piece is read from, as in NextPiece, and the guards of its blocks.
  std::uint64_t source = 0;
  std::vector<BlockGuard> guards{};
  std::uint64_t pool = 0;  ///< The pool of another node that the piece is read from, as in Pools.
  bool is_late = false;    ///< Its deadline has passed, so that its copies were cancelled.
  PageCopies copies{};     ///< Those of the piece.
  TimePoint submitted{};   ///< When the device received the piece.
};

/// A load ends when all of its parts have ended; the first that fails makes the others end early.
struct LoadJob : MoverJob {
  Id128 token;
  std::vector<LoadPart> parts;
  std::optional<LoadPace::Computing> computing{};
  LoadPace pace;
  /// Those of its blocks, if it follows its prefill: then it has one part and no token.
  std::vector<BlockKey> keys{};
  Duration patience{};      ///< The time of such a load, from its acceptance on.
  Id128 node{};             ///< That of the engine that computes its blocks; none: not known.
  bool pool_next = false;   ///< Its next piece comes from the pool,
  bool pool_only = false;   ///< or all of them do.
  std::uint64_t bytes = 0;  ///< Copied by pieces that have ended.
  std::uint64_t direct_bytes = 0;
  std::size_t verified = 0;
  std::size_t corrupt = 0;
  Duration copying{};  ///< Time of all pieces on the device.
  std::optional<LoadPace::Cut> cut{};
  std::optional<Error> gave_up;  ///< Why no further page is wanted; it may have come too late.
  std::optional<Error> error;    ///< That of the first part that failed.
  bool in_doubt = false;         ///< No block of it counts as loaded.

  [[nodiscard]] bool is_following() const noexcept { return !keys.empty(); }
};

/// The error of a job whose response has too few or too many slots, or one beyond the pool.
Error bad_slots(std::size_t slots, std::size_t blocks);

/// The error of a job that ends without a response; `lost`: with its connection.
Error unanswered_error(bool lost);

}  // namespace pegaflow
