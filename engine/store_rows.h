#pragma once
/// \file
/// What the block store remembers besides blocks: who is there, and who holds what.

#include <cstdint>
#include <vector>

#include "base/clock.h"
#include "base/id128.h"
#include "engine/block_store.h"
#include "engine/index_list.h"

namespace pegaflow {

struct Holder;
struct Space;

/// One engine core, as far as its share of the slots goes.
struct Instance {
  std::uint64_t held_blocks = 0;  ///< Of its claims, and of pins that outlived one of its claims.
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
  std::uint64_t pinned_blocks = 0;  ///< Of all pins opened from it that still live.
  std::vector<SlotIndex> blocks;
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
  std::uint32_t claim = 0;  ///< Row; still the same claim if its serial is `claim_serial`.
  std::uint64_t claim_serial = 0;
  std::uint32_t instance = 0;  ///< Whose share it takes once its claim has ended.
  TimePoint opened;
  std::vector<SlotIndex> blocks;
  IndexLink by_age;
  IndexLink of_holder;
};

/// A reservation: slots that one holder may write. Each of its blocks names the row as its owner.
struct Job {
  enum class Fate : std::uint8_t {
    kLive,
    kForgotten,   ///< By timeout or reset: its slots wait for the writer to end its copies.
    kWriterLost,  ///< Its slots wait for the process to be gone.
    kEnded,       ///< Nobody writes them any more; the queued work frees one after the other.
  };
  JobId id;
  Holder* holder = nullptr;  ///< Until it is ended.
  Space* space = nullptr;    ///< While it is live: a space may be gone before a writer is.
  SpaceId space_id{};
  Fate fate = Fate::kLive;
  TimePoint deadline;
  std::vector<SlotIndex> slots;  ///< Not sealed yet; sealed from the end.
  IndexLink by_deadline;         ///< While it is live.
  IndexLink of_holder;           ///< Until it is ended.
  IndexLink of_space;            ///< While it is live.
};

/// One connection of one process.
struct Holder {
  HolderId id{};
  std::uint32_t instance = 0;
  std::uint32_t writer_tag = 0;
  bool is_lost = false;
  bool is_gone = false;  ///< For callers it is unknown; its rows are still being given back.
  std::uint64_t pinned_blocks = 0;
  IndexList<&Claim::of_holder> claims;
  IndexList<&Job::of_holder> live_jobs;
  IndexList<&Job::of_holder> forgotten_jobs;
  IndexList<&Pin::of_holder> pins;
};

/// One generation of one namespace.
struct Space {
  SpaceId id{};
  std::optional<SpaceId> former;  ///< The generation before it.
  bool is_retired = false;
  IndexList<&Claim::of_space> claims;
  IndexList<&Job::of_space> jobs;
};

}  // namespace pegaflow
