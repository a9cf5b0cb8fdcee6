#pragma once
/// \file
/// The expected results of the block store, in the simplest form: no hashing, no cleverness, all
/// searched and counted again each time. Written from the design, not from the store.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/block_key.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"
#include "engine/block_store.h"
#include "engine/eviction/eviction.h"
#include "engine/types/shape.h"
#include "tests/support/eviction_models.h"

namespace pegaflow::sim {

/// A model of BlockStore. The store under test chooses ids and the free frame of a shape that a key
/// gets; the model checks that the choice is legal. The model derives all else by itself, including
/// which extents exist and which shape gets them, and which block is evicted: see `Order`.
///
/// The end of a claim, reservation or pin takes effect at once, but its blocks are returned through
/// one first-in, first-out queue: a step of it is one block returned, one row (claim, reservation,
/// pin) ended, or one frame visited. Each call that ends something does a slice of steps, and so
/// does work().
class OracleStore {
 public:
  OracleStore(const engine::BlockStore::Options& options, const Clock& clock);

  void add_shape(engine::ShapeId shape, const engine::Shape& description);
  void add_space(engine::SpaceId space, engine::ShapeId shape);
  void retire_space(engine::SpaceId space);
  void add_holder(engine::HolderId holder, std::uint32_t instance, const Id128& process);
  void set_shard(engine::HolderId holder, std::uint32_t shard, std::uint32_t shards);
  void holder_lost(engine::HolderId holder);
  [[nodiscard]] bool may_touch(engine::HolderId holder) const;
  void holder_gone(engine::HolderId holder);

  std::size_t lookup(engine::SpaceId space, std::span<const BlockKey> keys);
  [[nodiscard]] std::size_t present(engine::SpaceId space, std::span<const BlockKey> keys) const;
  Result<std::size_t> claim(engine::HolderId holder, engine::SpaceId space,
                            std::span<const BlockKey> keys, const Id128& token);
  Result<std::size_t> claim_more(engine::HolderId holder, const Id128& token,
                                 std::span<const BlockKey> keys);
  Result<bool> claim_together(engine::HolderId holder,
                              std::span<const engine::BlockStore::ClaimPart> parts);
  void unclaim(engine::HolderId holder, const Id128& token);
  Result<engine::BlockStore::OpenedPages> open(engine::HolderId holder, const Id128& token,
                                               std::size_t first, std::size_t count,
                                               engine::PinId pin,
                                               std::size_t limit = ~std::size_t{0});
  void release(engine::HolderId holder, engine::PinId pin);
  Result<bool> invalidate(engine::HolderId holder, engine::PinId pin, std::size_t place);

  /// `chosen` is the store's result, which provides the choice of free frames. Throws Mismatch when
  /// a choice is not legal.
  Result<engine::BlockStore::Fetch> fetch(engine::HolderId holder, engine::SpaceId space,
                                          const Id128& token, std::size_t first,
                                          std::span<const BlockKey> keys, std::size_t fetchable,
                                          const Result<engine::BlockStore::Fetch>& chosen);
  bool fetched(engine::FrameIndex frame);
  void give_up(engine::FrameIndex frame);
  void quiesced(engine::FrameIndex frame);
  [[nodiscard]] Result<std::size_t> arrived(const Id128& token, std::size_t first,
                                            std::size_t count);
  /// `chosen` is the store's result, which provides the choice of a name.
  Result<std::vector<engine::FrameIndex>> lend(engine::SpaceId space,
                                               std::span<const BlockKey> keys, Duration time,
                                               const Result<engine::BlockStore::Lent>& chosen);
  void end_lease(engine::LeaseId lease);
  [[nodiscard]] bool is_lent(engine::LeaseId lease) const;

  /// `chosen` as in fetch().
  Result<std::vector<engine::FrameIndex>> reserve(
      engine::HolderId holder, engine::SpaceId space, const JobId& job, std::size_t first,
      std::span<const BlockKey> keys, const Result<std::vector<engine::FrameIndex>>& chosen,
      engine::BlockStore::NoRoom no_room = engine::BlockStore::NoRoom::kSkip,
      engine::BlockStore::MayRefuse may_refuse = engine::BlockStore::MayRefuse::kNo);
  Result<std::size_t> publish(engine::HolderId holder, const JobId& job, std::size_t limit);
  void abandon(engine::HolderId holder, const JobId& job);

  [[nodiscard]] bool is_saving(const JobId& job);

  void expire();
  [[nodiscard]] std::optional<TimePoint> next_deadline() const;
  bool work();
  [[nodiscard]] bool has_work() const { return !queue_.empty(); }
  void start_cleanup();
  [[nodiscard]] const engine::BlockStore::Cleanup& cleanup() const { return cleanup_; }
  [[nodiscard]] bool is_idle() const;
  [[nodiscard]] engine::BlockStore::Stats stats() const;
  /// Keys of the sealed blocks, including those whose extent is leaving.
  [[nodiscard]] std::set<BlockKey> sealed(engine::SpaceId space) const;
  /// Frames of the evictable blocks of all shapes, the one evictable for longest in front.
  [[nodiscard]] const std::list<engine::FrameIndex>& evictable() const { return evictable_; }

 private:
  enum class State { kFree, kWritten, kInFlight, kGivenUp, kQuiesced, kSealed };
  struct Frame {
    State state = State::kFree;
    engine::SpaceId space{};
    BlockKey key;
    /// The key leads to this frame; false after it was reserved elsewhere, or invalidated.
    bool has_key = false;
    Id128 writer;
    std::uint64_t job = 0;
    std::uint64_t last_use = 0;  ///< When it last became evictable.
    int holds = 0;               ///< Claims, pins and leases, until their blocks were returned.
    bool is_replica = false;
    /// A writer has got it and has not ended.
    [[nodiscard]] bool is_written() const {
      return state != State::kFree && state != State::kSealed;
    }
    [[nodiscard]] bool is_fetched() const { return is_written() && state != State::kWritten; }
  };
  /// Which of a shape's blocks is evicted next; blocks are named by their frames.
  using Order = testing::EvictionModel;
  struct Run {
    std::uint32_t first = 0;
    std::uint32_t count = 0;
  };
  struct Extent {
    std::uint64_t serial = 0;
    engine::ShapeId shape{};
    std::vector<Run> runs = {};  ///< By part of the frame.
    std::uint32_t frames = 0;
    std::uint32_t touched = 0;
    std::uint64_t made = 0;
    bool leaving = false;
  };
  struct OneShape {
    std::unique_ptr<Order> order = {};
    std::unique_ptr<Order> replicas = {};  ///< The oldest first; all of them before the others.
    std::vector<std::pair<std::uint32_t, std::uint64_t>> parts = {};  ///< NUMA node, and bytes.
    std::vector<std::uint32_t> units = {};
    std::uint64_t frame_bytes = 0;
    int leaving_for_it = 0;
    std::uint64_t in_vain_use = ~std::uint64_t{0};
    std::uint64_t in_vain_quiet = ~std::uint64_t{0};
  };
  struct Holder {
    std::uint32_t instance = 0;
    Id128 process;
    std::uint32_t shard = 0;
    std::uint32_t shards = 1;
    bool lost = false;
    bool gone = false;
    /// The writer of its blocks: ranks of one instance count as one.
    [[nodiscard]] Id128 writer() const {
      return shards > 1 ? Id128{~std::uint64_t{0}, instance} : process;
    }
  };
  struct Claim {
    std::uint64_t serial = 0;
    Id128 token;
    engine::HolderId holder{};
    engine::SpaceId space{};
    TimePoint made;
    bool opened = false;
    std::vector<engine::FrameIndex> blocks = {};
    std::uint64_t group = 0;  ///< Equal for claims that end together; 0: it is alone.
  };
  struct Pin {
    engine::HolderId holder{};
    engine::PinId name{};
    Id128 token;
    std::size_t first = 0;
    std::size_t count = 0;
    std::uint64_t claim = 0;
    std::uint32_t instance = 0;
    TimePoint opened;
    std::uint64_t bytes = 0;
    std::vector<engine::FrameIndex> blocks = {};
  };
  struct Lease {
    engine::LeaseId id{};
    TimePoint made;
    TimePoint end;
    std::vector<engine::FrameIndex> blocks = {};
  };
  enum class Fate { kLive, kForgotten, kWriterLost, kEnded };
  enum class Part { kNotAsked, kWriting, kPublished, kDone };
  struct Writer {
    Part part = Part::kNotAsked;
    engine::HolderId holder{};
    std::size_t asked = 0;
    std::uint64_t listed = 0;  ///< Rising: the order of a holder's writers.
  };
  struct Job {
    std::uint64_t serial = 0;
    JobId id;
    engine::SpaceId space{};
    Fate fate = Fate::kLive;
    bool named = true;
    bool due = true;
    bool queued = false;
    TimePoint deadline;
    std::vector<Writer> writers = {};  ///< By shard.
    std::vector<engine::FrameIndex> answers = {};
    std::vector<engine::FrameIndex> frames = {};
    [[nodiscard]] std::size_t count(Part part) const;
  };
  enum class Kind { kGiveBack, kFreeJob, kLeave, kRetire, kDeadSweep, kCleanup, kLeaving };
  struct Work {
    Kind kind{};
    std::vector<engine::FrameIndex> blocks = {};  ///< kGiveBack
    std::uint64_t job = 0;                        ///< kFreeJob
    engine::HolderId holder{};                    ///< kLeave
    engine::SpaceId space{};                      ///< kRetire
    engine::FrameIndex next = 0;                  ///< The sweeps.
    bool again = false;                           ///< kDeadSweep
    std::uint64_t extent = 0;                     ///< kLeaving: serial
    engine::ShapeId for_shape{};                  ///< kLeaving
  };

  [[nodiscard]] bool is_active(engine::HolderId holder) const;
  [[nodiscard]] bool is_known(engine::HolderId holder) const;
  [[nodiscard]] bool is_doomed(const Job& job) const;
  [[nodiscard]] engine::FrameIndex find(engine::SpaceId space, const BlockKey& key) const;
  /// The store's hash: it decides which names a lookup, and a policy's memory, mistake for each
  /// other.
  [[nodiscard]] static std::uint32_t name_hash(engine::SpaceId space, const BlockKey& key);
  /// Length of the prefix whose keys have the hash of some readable block; 0 when lookups do not
  /// use hashes.
  [[nodiscard]] std::size_t prefix_by_name_hash(engine::SpaceId space,
                                                std::span<const BlockKey> keys) const;
  [[nodiscard]] std::uint64_t held_by_instance(std::uint32_t instance) const;
  [[nodiscard]] std::uint64_t held_on_server() const;
  [[nodiscard]] bool has_claim(std::uint64_t serial) const;
  Claim* claim_of(const Id128& token);
  Job* job_of(const JobId& id);
  Job* job_of(std::uint64_t serial);

  void seal(engine::FrameIndex frame, const Id128& writer);
  void hold(engine::FrameIndex frame);
  void make_evictable(engine::FrameIndex frame);
  void became_evictable(engine::FrameIndex frame);
  void give_back(engine::FrameIndex frame);
  void free(engine::FrameIndex frame,
            engine::EvictionPolicy::Freed why = engine::EvictionPolicy::Freed::kDropped);
  void evict(engine::FrameIndex frame,
             engine::EvictionPolicy::Freed why = engine::EvictionPolicy::Freed::kDropped);
  void forget(Job& job);
  void end_shard(Job& job, std::uint32_t shard);
  void end_if_over(Job& job);
  void end_claim(std::uint64_t serial);
  /// Ends the claim, then the others of its group that are younger, then the older ones.
  void end_group_of(std::uint64_t serial);
  void end_pin(engine::HolderId holder, engine::PinId name);
  std::vector<engine::FrameIndex> hold_prefix(engine::HolderId holder, engine::SpaceId space,
                                              std::span<const BlockKey> keys);
  enum class Room : std::uint8_t { kThere, kLater, kNone, kRefused };
  void extend_claim(Claim* claim, engine::HolderId holder, engine::SpaceId space,
                    const Id128& token, const std::vector<engine::FrameIndex>& blocks);
  /// Whether that much stays within the share of the pool.
  [[nodiscard]] bool is_within(double share, std::uint64_t bytes) const;
  /// Whether the server may hold this block, or, for kNoFrame, one more.
  [[nodiscard]] bool server_may_hold(engine::SpaceId space, engine::FrameIndex frame) const;
  [[nodiscard]] bool may_fetch(std::uint64_t bytes) const;
  [[nodiscard]] bool is_openable(engine::FrameIndex frame) const;
  void move_key(engine::FrameIndex present);
  /// Throws Mismatch unless that is a free frame of the shape, which it marks as touched.
  void take(engine::FrameIndex choice, engine::ShapeId shape);
  Room make_room(engine::ShapeId shape, std::size_t& steps, bool may_revoke,
                 const std::uint32_t* saved = nullptr);
  [[nodiscard]] bool has_free(engine::ShapeId shape) const;
  /// Throws Mismatch when that block is not evictable.
  [[nodiscard]] engine::FrameIndex victim(engine::ShapeId shape);
  [[nodiscard]] Order& order_of(engine::FrameIndex frame);

  // ---- the pool (oracle_pool.cpp)
  [[nodiscard]] std::unique_ptr<Order> make_order(std::uint64_t frame_bytes);
  [[nodiscard]] std::unique_ptr<Order> make_replica_order(std::uint64_t frame_bytes);
  [[nodiscard]] std::uint64_t bytes_of(Run run) const;
  [[nodiscard]] Run range(std::uint32_t node) const;
  [[nodiscard]] std::optional<Run> free_run(std::uint32_t node, std::uint32_t count,
                                            std::uint64_t part_bytes) const;
  bool grow(engine::ShapeId shape);
  void start_exchange(engine::ShapeId shape, engine::FrameIndex victim);
  struct Window {
    std::uint64_t mean_use = 0;
    std::vector<Extent*> extents = {};
  };
  /// The extents of other shapes in the way of one part of an extent of this shape, used longest
  /// ago on average; no value where none may leave.
  [[nodiscard]] std::optional<Window> oldest_window(engine::ShapeId shape, std::size_t part);
  [[nodiscard]] Extent* extent_at(std::uint32_t unit);
  [[nodiscard]] const Extent* extent_at(std::uint32_t unit) const;
  [[nodiscard]] Extent* extent_of(engine::FrameIndex frame);
  [[nodiscard]] const Extent* extent_of(engine::FrameIndex frame) const;
  [[nodiscard]] Extent* extent_with(std::uint64_t serial);
  [[nodiscard]] engine::FrameIndex first_frame(const Extent& extent) const;
  [[nodiscard]] std::size_t busy(const Extent& extent) const;
  [[nodiscard]] bool is_readable(engine::FrameIndex frame) const;
  [[nodiscard]] engine::FrameIndex next_touched(engine::FrameIndex frame) const;
  [[nodiscard]] std::uint64_t bytes_of(engine::FrameIndex frame) const;

  void slice();
  bool step();
  bool step(Work& work);
  bool step_leave(engine::HolderId holder);
  bool step_retire(engine::SpaceId space);
  bool step_dead_sweep(Work& work);
  bool step_cleanup(Work& work);
  bool step_leaving(Work& work);

  engine::BlockStore::Options options_;
  const Clock& clock_;
  std::uint64_t unit_bytes_;
  std::uint32_t units_;
  std::uint32_t rows_a_unit_;
  std::vector<Frame> frames_;
  std::list<Extent> extents_;
  std::unique_ptr<engine::BlockRows> rows_;  ///< For orders that are policies.
  std::map<engine::ShapeId, OneShape> shapes_;
  std::uint64_t uses_ = 0;
  JobId last_reserved_{};
  std::uint64_t quiet_ = 0;
  std::list<engine::FrameIndex> evictable_;
  std::map<engine::SpaceId, engine::ShapeId> live_spaces_;
  std::map<engine::HolderId, Holder> holders_;
  std::list<Claim> claims_;  ///< Oldest first, like the others.
  std::list<Pin> pins_;
  std::list<Job> jobs_;
  std::list<Lease> leases_;
  std::deque<Work> queue_;
  std::size_t step_cost_ = 1;  ///< Cost of the last step, in blocks.
  std::uint64_t next_serial_ = 1;
  engine::BlockStore::Cleanup cleanup_;
  engine::BlockStore::Stats counted_;
};

/// Thrown by the simulation when the store and the model disagree.
struct Mismatch {
  std::string what;
};

}  // namespace pegaflow::sim
