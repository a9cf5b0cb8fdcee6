#pragma once
/// \file
/// What the block store remembers besides blocks: who is there, and who holds what.

#include <cstdint>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "base/id128.h"
#include "base/job_id.h"
#include "engine/tables/frame_list.h"
#include "engine/tables/index_list.h"
#include "engine/types/ids.h"
#include "engine/types/shape.h"

namespace pegaflow::engine {

struct Holder;
struct Space;

/// One engine core, as far as its share of the pool goes.
struct Instance {
  std::uint64_t held_bytes = 0;  ///< Of its claims, and of pins that outlived one of its claims.
  std::uint32_t holders = 0;
};

/// A soft right to blocks, under a token.
struct Claim {
  Id128 token;
  std::uint64_t serial = 0;  ///< Rising; tells it from a later claim in the same row.
  Holder* holder = nullptr;
  Space* space = nullptr;
  TimePoint made;
  bool is_opened = false;
  std::uint64_t frame_bytes = 0;
  std::uint64_t pinned_bytes = 0;  ///< Of all pins opened from it that still live.
  FrameList blocks;
  IndexLink by_age;
  IndexLink unopened;
  IndexLink of_holder;
  IndexLink of_space;
};

/// The hard right to read blocks, under a name that its holder chose.
struct Pin {
  PinId name{};
  Holder* holder = nullptr;
  Id128 token;  ///< What it was opened with, to recognize the same call again.
  std::uint32_t first = 0;
  std::uint32_t count = 0;  ///< Of the call; `blocks` has as many once its last slice is pinned.
  std::uint32_t claim = 0;  ///< Row; still the same claim if its serial is `claim_serial`.
  std::uint64_t claim_serial = 0;
  std::uint32_t instance = 0;  ///< Whose share it takes once its claim has ended.
  TimePoint opened;
  std::uint64_t frame_bytes = 0;
  FrameList blocks;
  IndexLink by_age;
  IndexLink of_holder;
};

/// Blocks lent to another node for a while.
struct Lease {
  LeaseId id{};
  TimePoint made;
  TimePoint end;  ///< Here, the margin included.
  std::uint64_t frame_bytes = 0;
  FrameList blocks;
  IndexLink by_age;
};

/// One shard's part in a reservation: its holder may write that shard's pages.
struct Writer {
  Holder* holder = nullptr;
  std::uint32_t job = 0;       ///< Row.
  std::size_t asked = 0;       ///< Keys of a job of several shards: their answers it has.
  bool has_published = false;  ///< Its copies have ended; the job still waits for other shards.
  IndexLink of_holder;
};

/// A reservation: frames that the writers of one job may write. Each of its blocks names the row as
/// its owner.
///
/// A job of one shard exists while it has frames. One of several shards exists from the first
/// reserve() to the end of its last shard, so that all of them get the same answer; if it is
/// forgotten before, its name stays until its deadline, so that a late shard is told so.
struct Job {
  enum class Fate : std::uint8_t {
    kLive,
    kForgotten,   ///< By timeout, reset or one shard: its frames wait for the writers to end.
    kWriterLost,  ///< Its frames wait for a process to be gone.
    kEnded,       ///< Nobody writes them any more; the queued work frees one after the other.
  };
  static constexpr std::uint32_t kNotAsked = ~std::uint32_t{0};
  static constexpr std::uint32_t kDone = ~std::uint32_t{1};

  JobId id;
  Space* space = nullptr;  ///< While it is live: a space may be gone before a writer is.
  SpaceId space_id{};
  std::uint64_t frame_bytes = 0;
  Fate fate = Fate::kLive;
  bool is_named = false;   ///< Its id leads here.
  bool is_due = false;     ///< It is in the list by deadline.
  bool is_queued = false;  ///< The queued work will come to it.
  TimePoint deadline;
  std::vector<std::uint32_t> writers;  ///< By shard: a row, kNotAsked or kDone.
  std::uint32_t writing = 0;           ///< Shards whose copies may be under way.
  std::uint32_t published = 0;
  std::uint32_t done = 0;
  std::vector<FrameIndex> answers;  ///< Of several shards: what was decided, key by key.
  std::vector<FrameIndex> frames;   ///< Not sealed yet; sealed from the end.
  IndexLink by_deadline;
  IndexLink of_space;  ///< While it is live.

  [[nodiscard]] std::uint32_t shards() const noexcept {
    return static_cast<std::uint32_t>(writers.size());
  }
};

/// One connection of one process.
struct Holder {
  HolderId id{};
  std::uint32_t instance = 0;
  std::uint32_t writer_tag = 0;
  std::uint32_t shard = 0;
  std::uint32_t shards = 1;
  bool is_lost = false;
  bool is_gone = false;  ///< For callers it is unknown; its rows are still being given back.
  std::uint64_t pinned_blocks = 0;
  IndexList<&Claim::of_holder> claims;
  std::uint32_t writing = 0;  ///< Of its writers, those that have not published.
  IndexList<&Writer::of_holder> live_writers;
  IndexList<&Writer::of_holder> forgotten_writers;  ///< Of forgotten jobs; their copies go on.
  IndexList<&Pin::of_holder> pins;
};

/// One generation of one namespace.
struct Space {
  SpaceId id{};
  ShapeId shape{};
  std::optional<SpaceId> former;  ///< The generation before it.
  bool is_retired = false;
  IndexList<&Claim::of_space> claims;
  IndexList<&Job::of_space> jobs;
};

}  // namespace pegaflow::engine
