#pragma once
/// \file
/// The rows of all that may access blocks: holders, generations, and what each of them holds.
///
/// Each kind of row has one table, which alone changes it. A list in a Holder or a Space is kept by
/// the table whose rows it links.

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

/// A soft right to blocks, under a token.
struct Claim {
  Id128 token;
  std::uint64_t serial = 0;  ///< Rising; distinguishes it from a later claim in the same row.
  Holder* holder = nullptr;
  Space* space = nullptr;
  TimePoint made;
  /// The next row of the ring of claims that are revoked together; its own where it is alone.
  std::uint32_t next_together = 0;
  bool is_opened = false;
  std::uint64_t frame_bytes = 0;
  std::uint64_t pinned_bytes = 0;  ///< Bytes of all pins opened from it that still live.
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
  Id128 token;  ///< Given to open(); identifies a repeated call.
  std::uint32_t first = 0;
  std::uint32_t count =
      0;  ///< Blocks of the call; `blocks` has as many once its last slice is pinned.
  std::uint32_t claim = 0;  ///< Row; still the same claim if its serial is `claim_serial`.
  std::uint64_t claim_serial = 0;
  std::uint32_t instance = 0;  ///< The instance whose share it takes once its claim has ended.
  TimePoint opened;
  std::uint64_t frame_bytes = 0;
  FrameList blocks;
  IndexLink by_age;
  IndexLink of_holder;
};

/// Blocks lent to another node until a time.
struct Lease {
  LeaseId id{};
  TimePoint made;
  TimePoint end;  ///< On this node's clock, including the margin.
  std::uint64_t frame_bytes = 0;
  FrameList blocks;
  IndexLink by_age;
};

/// One shard's part in a reservation: its holder may write that shard's pages.
struct ShardWriter {
  Holder* holder = nullptr;
  std::uint32_t job = 0;       ///< Row.
  std::size_t requested = 0;   ///< Keys of a job of several shards whose results it has.
  bool has_published = false;  ///< Its copies have ended; the job still waits for other shards.
  IndexLink of_holder;
};

/// A reservation: frames that the writers of one job may write. Each of its blocks names the row as
/// its owner.
///
/// A job of one shard exists while it has frames. A job of several shards exists from the first
/// reserve() to the end of its last shard, so that all of them get the same results; if it is
/// forgotten before, its name stays until its deadline, so that a late shard gets an error.
struct Job {
  enum class Fate : std::uint8_t {
    kLive,
    kForgotten,   ///< By timeout, reset or one shard: its frames wait for the writers to end.
    kWriterLost,  ///< Its frames wait for the end of a process.
    kEnded,       ///< No shard writes to them any longer; the queued work frees them one by one.
  };
  static constexpr std::uint32_t kNotRequested = ~std::uint32_t{0};
  static constexpr std::uint32_t kDone = ~std::uint32_t{1};
  static constexpr std::uint32_t kNoPage = ~std::uint32_t{2};

  JobId id;
  Space* space = nullptr;  ///< While the job is live: a generation may end before a writer.
  SpaceId space_id{};
  std::uint64_t frame_bytes = 0;
  Fate fate = Fate::kLive;
  bool is_named = false;   ///< Its id leads here.
  bool is_due = false;     ///< It is in the list by deadline.
  bool is_queued = false;  ///< The queued work will reach it.
  TimePoint deadline;
  std::vector<std::uint32_t> writers;  ///< By shard: a row, kNotRequested, kDone or kNoPage.
  std::uint32_t writing = 0;           ///< Shards whose copies may be in progress.
  std::uint32_t published = 0;         ///< While it is live, with those without a page.
  std::uint32_t done = 0;
  std::vector<FrameIndex> answers;  ///< With several shards: the results, key by key.
  std::vector<FrameIndex> frames;   ///< Not sealed yet; sealed from the end.
  IndexLink by_deadline;
  IndexLink of_space;  ///< While it is live.

  [[nodiscard]] std::uint32_t shards() const noexcept {
    return static_cast<std::uint32_t>(writers.size());
  }
  /// Whether an element of `writers` is a row.
  [[nodiscard]] static bool is_row(std::uint32_t number) noexcept { return number < kNoPage; }
};

/// One connection of one process.
struct Holder {
  HolderId id{};
  std::uint32_t instance = 0;
  std::uint32_t writer_tag = 0;
  std::uint32_t shard = 0;
  std::uint32_t shards = 1;
  bool is_lost = false;
  bool is_gone = false;  ///< Unknown to callers; its rows are still being returned.
  std::uint64_t pinned_blocks = 0;
  IndexList<&Claim::of_holder> claims;
  std::uint32_t writing = 0;  ///< Its writers that have not published.
  IndexList<&ShardWriter::of_holder> live_writers;
  IndexList<&ShardWriter::of_holder>
      forgotten_writers;  ///< Writers of forgotten jobs; their copies go on.
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
