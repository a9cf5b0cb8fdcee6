#pragma once
/// \file
/// Processes that use a store at random, and fail at random.

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/core.h>

#include "base/clock.h"
#include "engine/block_store.h"
#include "engine/eviction/eviction.h"
#include "engine/types/numa_ranges.h"
#include "engine/types/shape.h"
#include "tests/sim/oracle_store.h"
#include "tests/sim/page_memory.h"

namespace pegaflow::sim {

/// Counts of the events that a simulation must have seen to be meaningful.
struct Coverage {
  std::map<std::string, std::uint64_t> counts;
  void hit(const std::string& what, std::uint64_t times = 1) { counts[what] += times; }
};

/// One store, its model, the bytes of its pool, and the processes around them.
///
/// Each step makes one call, on the store and on the model, and compares all that both report.
/// Everything follows from the seed. Thread-bound.
class World {
 public:
  World(std::uint64_t seed, engine::EvictionKind eviction, Coverage& coverage);

  /// Throws Mismatch when the store and the model, or the bytes, disagree.
  void step();
  /// Every process ends, then the cache is emptied: afterwards every frame is free.
  void shut_down();

  /// The last calls, oldest first.
  [[nodiscard]] const std::deque<std::string>& history() const { return history_; }

 private:
  /// A process with an incarnation; its connection may end while it still copies.
  struct Process {
    Id128 incarnation;
    std::uint32_t instance = 0;
    std::uint32_t shard = 0;
    bool killed = false;
  };
  struct Connection {
    engine::HolderId holder{};
    std::size_t process = 0;
    bool lost = false;
  };
  struct Page {
    engine::FrameIndex frame = engine::kNoFrame;
    Place place = {};  ///< The place of one shard's page.
    BlockKey key;
    Stamp stamp{};
  };
  /// One shard's part in a job.
  struct Save {
    JobId job;
    engine::HolderId holder{};
    engine::SpaceId space{};
    std::size_t asked = 0;         ///< Keys of a job of several shards.
    std::vector<Page> pages = {};  ///< Not sealed yet, in the order of reserving.
    bool copies_ended = false;
    bool published = false;  ///< It waits for the other shards.
  };
  /// A job of several shards, as its scheduler handed it out.
  struct SharedJob {
    JobId job;
    std::uint32_t instance = 0;
    engine::SpaceId space{};
    std::vector<BlockKey> keys = {};
    std::map<engine::FrameIndex, std::map<std::uint32_t, Stamp>> stamps =
        {};                                       ///< By frame, by shard.
    std::vector<engine::FrameIndex> frames = {};  ///< Not sealed yet, in the order of reserving.
  };
  struct OneSpace {
    engine::SpaceId id{};
    engine::ShapeId shape{};
    std::uint32_t shards = 1;
  };
  /// The pages of a sealed block, by shard.
  using Stamps = std::map<std::uint32_t, Stamp>;
  struct Claim {
    engine::HolderId holder{};
    Id128 token;
    engine::SpaceId space{};
    std::vector<Stamps> blocks = {};
    std::set<std::size_t> came = {};  ///< Those of them that were still in flight.
  };
  struct Load {
    engine::HolderId holder{};
    engine::PinId pin{};
    Id128 token;
    std::size_t first = 0;
    std::size_t count =
        0;  ///< Blocks of the call; `pages` has those of the slices that were pinned.
    std::vector<Page> pages = {};
    bool copies_ended = false;
  };

  /// A block that is fetched from another node, into a frame that was reserved for it.
  struct Bringing {
    engine::SpaceId space{};
    BlockKey key;
    engine::FrameIndex frame = engine::kNoFrame;
    std::vector<Page> pages = {};  ///< By shard.
    Stamps stamps = {};
    bool is_given_up = false;
  };
  /// Pages that another node may read until it ends the lease, or the lease expires.
  struct Loan {
    engine::LeaseId lease{};
    TimePoint end;  ///< The time by which the last of its reads has ended, late ones included.
    std::vector<Page> pages = {};
    bool is_over = false;
  };

  // ---- actions; each returns without effect where it does not apply
  void reserve();
  void reserve_shared(std::size_t connection);
  /// The store and the model are asked for its state from now on, for a while.
  void remember(const JobId& job);
  void publish();
  void abandon();
  void copy_some();
  void lookup();
  void claim();
  void claim_together(engine::HolderId holder, std::uint32_t instance);
  [[nodiscard]] bool fits_together(engine::HolderId holder,
                                   std::span<const engine::BlockStore::ClaimPart> parts) const;
  void unclaim();
  void open();
  /// Checks the result of open() and begins to read what it pinned.
  void read_pages(Load& load, const Claim& claim, const std::vector<engine::FrameIndex>& frames);
  void open_again();
  void release();
  void invalidate();
  void fetch();
  void bring();
  void look_for_arrivals();
  void lend();
  void end_lease();
  void connect();
  void lose_connection();
  void end_process();
  void quiesce();
  void reset_space();
  void pass_time();
  void expire();
  void work();
  void start_cleanup();
  void call_wrongly();

  // ---- parts of the actions
  /// The arguments of a call that no correct process makes.
  struct Wrong {
    std::vector<BlockKey> keys;
    engine::HolderId talking{};
    engine::HolderId former{};
    Id128 old_token;
  };
  /// Throws Mismatch unless both have the same outcome.
  template <typename Answered, typename Expected>
  void expect(const char* what, const Answered& answered, const Expected& expected);
  void reserve_foreign_job(const Wrong& wrong);
  void fetch_wrongly(const Wrong& wrong);
  void lend_wrongly(const Wrong& wrong);
  void end_unknown(const Wrong& wrong);
  [[nodiscard]] SharedJob& pick_shared_job(const Process& process);
  void end_copies_of(engine::HolderId holder, bool whole);
  void holder_gone(std::size_t connection);
  void forget_records_of(engine::HolderId holder);
  void do_publish(std::size_t save, engine::HolderId caller, std::size_t limit);
  void release_load(std::size_t load);
  /// The claim under `token` got longer by the first blocks of `keys`, or was made.
  void note_fetch(engine::HolderId holder, engine::SpaceId space, const Id128& token,
                  std::span<const BlockKey> keys, const engine::BlockStore::Fetch& made);
  [[nodiscard]] Bringing* bringing(engine::SpaceId space, const BlockKey& key);
  void end_writes(const Bringing& of, bool whole);
  /// Readers on other nodes whose lease has expired stop, at the latest.
  void end_late_reads();

  // ---- comparison
  void compare();
  void compare_stats();
  void compare_order();
  void compare_journal();

  // ---- random choices
  std::size_t pick(std::size_t count);
  bool chance(double probability);
  /// A connection that is up, of a process that lives.
  [[nodiscard]] std::optional<std::size_t> pick_talking();
  /// Its process lives; the connection may be lost with some calls still in flight.
  [[nodiscard]] bool may_speak(engine::HolderId holder) const;
  /// Its copies are in progress.
  [[nodiscard]] bool touches_memory(engine::HolderId holder) const;
  std::vector<BlockKey> pick_keys();
  /// A generation whose blocks have the shards of that instance.
  engine::SpaceId pick_space(std::uint32_t instance);
  void make_shapes();
  [[nodiscard]] std::uint32_t shards_of(std::uint32_t instance) const;
  [[nodiscard]] Place place_of(engine::FrameIndex frame, std::uint32_t shard,
                               engine::ShapeId shape) const;
  [[nodiscard]] engine::ShapeId shape_of(engine::SpaceId space) const;
  [[nodiscard]] std::uint32_t shards_of_save(const Save& save) const;
  void add_page(Save& save, engine::FrameIndex frame, const BlockKey& key, std::uint32_t shard);
  template <typename... Args>
  void note(fmt::format_string<Args...> format, Args&&... args) {
    history_.push_back(fmt::format("{}: ", steps_) +
                       fmt::format(format, std::forward<Args>(args)...));
    if (history_.size() > kHistory) history_.pop_front();
    ++notes_;
  }

  std::mt19937_64 random_;
  Coverage& coverage_;
  ManualClock clock_;
  engine::BlockStore::Options options_;
  std::unique_ptr<engine::BlockStore> store_;
  std::unique_ptr<OracleStore> oracle_;
  std::unique_ptr<PageMemory> memory_;

  static constexpr std::size_t kHistory = 200;
  static constexpr std::uint64_t kCell = 4096;
  /// The instance whose ranks hold a shard each.
  static constexpr std::uint32_t kShared = 2;
  static constexpr std::size_t kEventKinds = 26;
  std::array<double, kEventKinds> weights_{};
  std::vector<Process> processes_;
  std::vector<Connection> connections_;
  std::vector<engine::HolderId> former_holders_;
  std::vector<OneSpace> spaces_;
  std::map<engine::SpaceId, engine::ShapeId> shape_of_space_;
  std::map<engine::ShapeId, engine::Shape> shapes_;
  std::uint32_t shards_ = 2;  ///< Shards of instance 2; the others have one.
  std::vector<SharedJob> shared_jobs_;
  std::vector<engine::SpaceId> former_spaces_;
  std::vector<std::vector<BlockKey>> chains_;
  std::vector<Save> saves_;
  std::vector<Claim> claims_;
  std::vector<Id128> former_tokens_;
  std::vector<Load> loads_;
  std::vector<Bringing> bringing_;
  std::vector<Loan> loans_;
  std::map<std::pair<engine::SpaceId, BlockKey>, Stamps> published_;
  /// A reader of the journal up to this position believes that these blocks are present.
  std::uint64_t journal_read_ = 0;
  std::map<engine::SpaceId, std::set<BlockKey>> believed_;
  std::set<engine::SpaceId> not_all_read_;  ///< They have entries that were not read.
  std::uint64_t next_stamp_ = 1;
  std::uint64_t next_token_ = 1;
  std::uint64_t next_job_ = 1;
  std::deque<JobId> last_jobs_;
  std::uint64_t next_pin_ = 1;
  std::uint64_t steps_ = 0;
  std::uint64_t notes_ = 0;
  std::deque<std::string> history_;
};

}  // namespace pegaflow::sim
