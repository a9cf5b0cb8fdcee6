#pragma once
/// \file
/// What the block store has to answer, in the simplest words: no hashing, no cleverness, everything
/// searched and counted anew each time. Written from the design, not from the store.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/block_key.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"
#include "engine/block_store.h"

namespace pegaflow::sim {

/// A model of BlockStore. Slots and ids are chosen by the store under test; the model checks that
/// the choice is legal. Everything else it works out by itself.
///
/// What ends takes effect at once, but its blocks come back through one queue, first in first out:
/// a step of it is one block given back, one row (claim, reservation, pin) ended, or one slot
/// looked at. Each call that ends something does a slice of steps, and so does work().
class OracleStore {
 public:
  OracleStore(const BlockStore::Options& options, const Clock& clock);

  Result<void> recut(std::uint32_t slot_count);
  void add_space(SpaceId space);
  void retire_space(SpaceId space);
  void add_holder(HolderId holder, std::uint32_t instance, const Id128& process);
  void holder_lost(HolderId holder);
  [[nodiscard]] bool may_touch(HolderId holder) const;
  void holder_gone(HolderId holder);

  std::size_t lookup(SpaceId space, std::span<const BlockKey> keys);
  Result<std::size_t> claim(HolderId holder, SpaceId space, std::span<const BlockKey> keys,
                            const Id128& token);
  void unclaim(HolderId holder, const Id128& token);
  Result<BlockStore::OpenedPages> open(HolderId holder, const Id128& token, std::size_t first,
                                       std::size_t count, PinId pin);
  void release(HolderId holder, PinId pin);

  /// `chosen` is what the store answered, for the choice of slots among the free ones. Throws
  /// Mismatch when a choice is not legal.
  Result<std::vector<SlotIndex>> reserve(HolderId holder, SpaceId space, const JobId& job,
                                         std::span<const BlockKey> keys,
                                         const Result<std::vector<SlotIndex>>& chosen);
  Result<std::size_t> publish(HolderId holder, const JobId& job, std::size_t limit);
  void abandon(HolderId holder, const JobId& job);

  void expire();
  [[nodiscard]] std::optional<TimePoint> next_deadline() const;
  bool work();
  [[nodiscard]] bool has_work() const { return !queue_.empty(); }
  void start_cleanup();
  [[nodiscard]] const BlockStore::Cleanup& cleanup() const { return cleanup_; }
  [[nodiscard]] bool is_at_rest() const;
  [[nodiscard]] BlockStore::Stats stats() const;
  /// Slots of the blocks at rest, the next to be evicted first.
  [[nodiscard]] const std::list<SlotIndex>& at_rest() const { return at_rest_; }

 private:
  enum class State { kFree, kWritten, kSealed };
  struct Slot {
    State state = State::kFree;
    SpaceId space{};
    BlockKey key;
    bool has_key = false;  ///< The key leads to this slot; not so once it was reserved elsewhere.
    Id128 writer;
    std::uint64_t job = 0;
    int holds = 0;  ///< Claims and pins, until their blocks were given back.
  };
  struct Holder {
    std::uint32_t instance = 0;
    Id128 process;
    bool lost = false;
    bool gone = false;
  };
  struct Claim {
    std::uint64_t serial = 0;
    Id128 token;
    HolderId holder{};
    SpaceId space{};
    TimePoint made;
    bool opened = false;
    std::vector<SlotIndex> blocks = {};
  };
  struct Pin {
    HolderId holder{};
    PinId name{};
    Id128 token;
    std::size_t first = 0;
    std::uint64_t claim = 0;
    std::uint32_t instance = 0;
    TimePoint opened;
    std::vector<SlotIndex> blocks = {};
  };
  enum class Fate { kLive, kForgotten, kWriterLost, kEnded };
  struct Job {
    std::uint64_t serial = 0;
    JobId id;
    HolderId holder{};
    SpaceId space{};
    Fate fate = Fate::kLive;
    std::uint64_t forgotten = 0;  ///< Rising: which was forgotten before which.
    TimePoint deadline;
    std::vector<SlotIndex> slots = {};
  };
  enum class Kind { kGiveBack, kFreeJob, kLeave, kRetire, kDeadSweep, kCleanup };
  struct Work {
    Kind kind{};
    std::vector<SlotIndex> blocks = {};  ///< kGiveBack
    std::uint64_t job = 0;               ///< kFreeJob
    HolderId holder{};                   ///< kLeave
    SpaceId space{};                     ///< kRetire
    SlotIndex next = 0;                  ///< The sweeps.
    bool again = false;                  ///< kDeadSweep
  };

  [[nodiscard]] bool is_active(HolderId holder) const;
  [[nodiscard]] bool is_known(HolderId holder) const;
  [[nodiscard]] bool is_doomed(const Job& job) const;
  [[nodiscard]] SlotIndex find(SpaceId space, const BlockKey& key) const;
  [[nodiscard]] std::uint64_t held_by_instance(std::uint32_t instance) const;
  [[nodiscard]] std::uint32_t held_on_node() const;
  [[nodiscard]] bool has_claim(std::uint64_t serial) const;
  Claim* claim_of(const Id128& token);
  Job* job_of(const JobId& id);
  Job* job_of(std::uint64_t serial);

  void hold(SlotIndex slot);
  void give_back(SlotIndex slot);
  void free(SlotIndex slot);
  void forget(Job& job);
  void end(Job& job);
  void end_claim(std::uint64_t serial);
  void end_pin(HolderId holder, PinId name);
  bool make_room(std::size_t& steps);
  [[nodiscard]] bool has_free() const;

  void slice();
  bool step();
  bool step(Work& work);
  bool step_leave(HolderId holder);
  bool step_retire(SpaceId space);

  BlockStore::Options options_;
  const Clock& clock_;
  std::vector<Slot> slots_;
  SlotIndex touched_ = 0;  ///< One past the highest slot that was ever given out.
  std::list<SlotIndex> at_rest_;
  std::set<SpaceId> live_spaces_;
  std::map<HolderId, Holder> holders_;
  std::list<Claim> claims_;  ///< Oldest first, and so the others.
  std::list<Pin> pins_;
  std::list<Job> jobs_;
  std::deque<Work> queue_;
  std::uint64_t next_serial_ = 1;
  BlockStore::Cleanup cleanup_;
  BlockStore::Stats counted_;
};

/// What the simulation throws when the store and the model disagree.
struct Mismatch {
  std::string what;
};

}  // namespace pegaflow::sim
