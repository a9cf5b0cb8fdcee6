#pragma once
/// \file
/// The meaning of each call of a client: instances, namespaces, and which process may access which
/// page until when.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/block_key.h"
#include "base/error.h"
#include "base/id128.h"
#include "base/job_id.h"
#include "capnp/wire/codec.h"
#include "cluster/epochs.h"
#include "cluster/peer_proof.h"
#include "engine/block_store.h"
#include "engine/demand/demand.h"
#include "engine/frames/checksum_table.h"
#include "engine/namespace_table.h"
#include "server/cache/cache_stats.h"
#include "server/cache/instance_report.h"
#include "server/cache/job_waits.h"
#include "server/chains/prompt_chains.h"

namespace pegaflow::server {

struct KeptNames;

/// The cache of one node, without its wire.
///
/// Knows every connection that has sent its hello, by the id that it was given. When a connection
/// ends, the pages that its process may still access stay with its id (the connection is
/// *detached*) until the process has ended or reports that all its copies have.
///
/// An instance is *complete* while all its ranks are connected. Only then is anything found,
/// claimed or reserved for it; until then the engine runs without the cache, with no time limit. Of
/// the ranks that hold one shard the lowest saves.
///
/// Thread-bound: the RPC thread. No call blocks, or lasts longer than the store's own calls; longer
/// work is left to work().
class CacheService {
 public:
  struct Options {
    engine::BlockStore::Options store{};
    /// The part of the pool (see numa_ranges()) near a NUMA node, by the system's number of that
    /// NUMA node. Empty where the pool has one part.
    std::map<std::int32_t, std::uint32_t> part_of_numa_node{};
    /// Limit of detached connections; each keeps a descriptor. At the limit no worker may register.
    std::size_t max_detached = 1024;
    /// The windows of hit rates and their ceilings; see Demand.
    std::vector<std::chrono::seconds> demand_windows = {
        std::chrono::minutes(5), std::chrono::hours(1), std::chrono::hours(24)};
    /// Limit of pending await_job() calls of all connections: each stays open for seconds.
    std::size_t max_waits = 1024;
    cluster::Epochs::Next next_epoch{};  ///< See Epochs.
  };

  /// The legacy of the server before this one, in `Options::store.kept`.
  struct Former {
    /// Clients that may still access the pool: nothing that they may access is reused before each
    /// of them has reported that its copies have ended, or former_client_gone() was called.
    std::vector<Id128> clients;
    /// Find its blocks. Without it nothing is found, and nothing saved before its clients have
    /// quiesced.
    bool adopt = false;
    /// Other nodes may have reset the namespaces of its blocks: they are not served before
    /// confirm_epochs().
    bool waits_for_nodes = false;
  };

  /// Ends a connection that another one replaces; it calls disconnected() before it returns.
  using EndConnection = std::function<void(const Id128& connection)>;

  /// `clock` outlives it.
  /// Errors: those of BlockStore::create and Demand::create.
  static Result<std::unique_ptr<CacheService>> create(const Options& options, const Clock& clock,
                                                      EndConnection end_connection);
  /// Continues where another server ended. To be called before anything else.
  /// Errors: kCorrupt when what it left contradicts itself; then this object must not be used.
  Result<void> continue_from(const Former& former);
  ~CacheService();

  // ---- the server before this one

  /// Calls `hook` with a connection, or with the process of a client of the former server, once
  /// nothing that began under it can access the pool any longer.
  void on_client_end(std::function<void(const Id128&)> hook) { on_client_end_ = std::move(hook); }
  /// Such a client has ended. Ignores unknown ones.
  void former_client_gone(const Id128& process);
  /// The epochs of all nodes are known: adopted blocks are served from now on.
  void confirm_epochs();
  /// They are not known and may not be soon: adopted blocks are dropped.
  void drop_unconfirmed();
  struct FormerReport {
    std::uint64_t adopted_blocks = 0;  ///< At the start.
    std::uint64_t adopted_bytes = 0;
    std::uint64_t discarded_frames = 0;  ///< In use by blocks that were not whole or found.
    std::size_t clients = 0;             ///< Clients that have not quiesced.
    bool waits_for_nodes = false;
  };
  [[nodiscard]] FormerReport former() const;

  // ---- connections

  struct Hello {
    Id128 process;              ///< The incarnation.
    Id128 previous_connection;  ///< None for the first.
    bool quiesced = false;      ///< All copies begun under it have ended.
    std::string build;
    /// Calls process_gone() while it exists; null: the end of the process cannot be detected, so
    /// this connection gets no pool.
    std::shared_ptr<void> watch;
  };
  /// Errors: kInvalidArgument without an incarnation, or for a previous connection of another
  /// process.
  Result<void> connected(const Id128& connection, Hello hello);
  /// The connection ended. Ignores unknown ones.
  void disconnected(const Id128& connection);
  /// The process of `connection`, which may be detached, ended: it can no longer copy.
  void process_gone(const Id128& connection);
  /// All copies have ended and the pool is unmapped; every further call returns kGone.
  Result<void> goodbye(const Id128& connection);

  struct Registered {
    std::string namespace_hash;
  };
  /// Makes the connection the worker of one rank of its instance.
  /// Errors: kRefused for a page that the namespace or the pool cannot have, a rank that another
  /// living process serves, or a process that cannot be watched; kBusy when too many connections
  /// are detached; kInvalidArgument for an invalid list of factors, for a rank that contradicts the
  /// others of its instance, or when it has registered as something else; kGone for an unknown
  /// connection.
  Result<Registered> register_rank(const Id128& connection, const Registration& registration);
  /// Makes the connection a scheduler of `instance`, which need not be there yet. Its jobs are
  /// named after `scheduler`; none: they cannot be awaited. Errors: kInvalidArgument when it
  /// belongs to another instance; kGone.
  Result<void> attach(const Id128& connection, const std::string& instance,
                      const Id128& scheduler = {});
  /// Stores what this side of the engine reports about itself, for display only. Replaces its
  /// earlier report. Errors: kInvalidArgument before attach or register; kGone.
  Result<void> describe(const Id128& connection, EngineInfo engine);
  /// Limit of connections that have declined.
  static constexpr std::size_t kMaxDeclined = 256;
  /// The connection's engine is configured to use the cache and does not. Shown until the
  /// connection ends or says goodbye; replaces an earlier one. Errors: kInvalidArgument when the
  /// connection belongs to an instance; kBusy beyond kMaxDeclined connections; kGone.
  Result<void> decline(const Id128& connection, Decline decline);

  // ---- calls of a scheduler

  struct Found {
    std::size_t blocks = 0;
    bool complete = false;  ///< All ranks of the instance are connected; else all is a miss.
  };
  /// When a lookup is counted: kLater until its caller has searched other tiers for the blocks that
  /// are not in the pool, so that each missing block has one reason over all tiers.
  enum class Counted : bool { kNow, kLater };
  /// Errors: kInvalidArgument before attach or register; kGone.
  Result<Found> lookup(const Id128& connection, std::span<const BlockKey> keys,
                       Counted when = Counted::kNow);
  /// Counts a lookup that found the first `found` of `keys`, and the `elsewhere` behind them in
  /// other tiers. Does nothing for a connection that has ended.
  void note_lookup(const Id128& connection, std::span<const BlockKey> keys, std::size_t found,
                   std::size_t elsewhere);
  /// Errors: as lookup(), and those of the store.
  Result<Found> claim(const Id128& connection, const Id128& token, std::span<const BlockKey> keys);
  /// The number of keys of one claim() or claim_more(), and of blocks that open() returns at once:
  /// so that no event-loop iteration lasts over 500 us, with cold caches too.
  static constexpr std::size_t kClaimSlice = 1024;
  static constexpr std::size_t kOpenSlice = 2048;
  /// Continues a claim; see BlockStore::claim_more. Ends the claim if the instance is no longer
  /// complete.
  Result<Found> claim_more(const Id128& connection, const Id128& token,
                           std::span<const BlockKey> keys);
  Result<void> unclaim(const Id128& connection, const Id128& token);

  /// Whether the caller's namespace has several kinds of blocks. Then restorable() and
  /// claim_restorable() take the place of lookup() and claim(), with the keys of the prompt's
  /// units. Errors: as lookup().
  Result<bool> has_kinds(const Id128& connection);
  struct Restorable {
    struct Range {
      std::size_t kind = 0;
      engine::BlockRange blocks;
    };
    std::size_t units = 0;  ///< The longest restorable prefix; 0: none beyond the engine's own.
    bool complete = false;
    std::vector<Range> ranges;  ///< The blocks that it needs, by kind.
  };
  /// Finds the longest prefix that the cache can restore; see engine::RestorableSearch. The engine
  /// has `local_units` itself. Errors: as lookup(); kInvalidArgument when they are not a multiple
  /// of the alignment.
  Result<Restorable> restorable(const Id128& connection, std::span<const BlockKey> units,
                                std::size_t local_units, Counted when = Counted::kNow);
  /// As note_lookup(), in units: a prefix of `found` units is restorable from the pool, and one of
  /// `reachable` with other tiers.
  void note_restorable(const Id128& connection, std::span<const BlockKey> units,
                       std::size_t local_units, std::size_t found, std::size_t reachable);
  /// Claims the blocks of the longest restorable prefix that the limits allow, all of them or none.
  /// The claims on the kinds end together. Errors: as restorable(), and those of the store.
  Result<Restorable> claim_restorable(const Id128& connection, const Id128& token,
                                      std::span<const BlockKey> units, std::size_t local_units);
  /// The token of the claim on the blocks of one kind, for open(). Errors: as lookup();
  /// kInvalidArgument for a kind that the namespace does not have.
  Result<Id128> claim_of_kind(const Id128& connection, const Id128& token, std::size_t kind);
  struct Boundaries {
    std::vector<std::byte> restorable;  ///< Bit i of byte i / 8: (i + 1) x alignment tokens.
    bool complete = false;
  };
  /// Every length beyond `local_units` at which the prompt is restorable. Errors: as restorable();
  /// kInvalidArgument for an instance that has not registered kinds.
  Result<Boundaries> boundaries(const Id128& connection, std::span<const BlockKey> units,
                                std::size_t local_units);
  struct Journal {
    std::uint64_t space = 0;  ///< Another number is another generation; 0: there is none yet.
    /// The place of an entry is its kind. has_lost also when `space` differs from the caller's.
    engine::BlockStore::JournalPart part;
  };
  /// The blocks that became findable in the caller's namespace, and those that ceased to be, since
  /// an earlier answer returned `space` and `position`; from BlockStore::kJournalEnd only the
  /// present position. The first such call starts the journal. Errors: as lookup(); kOutOfCapacity
  /// when there is no memory for it.
  Result<Journal> journal(const Id128& connection, std::uint64_t space, std::uint64_t position);
  /// Keeps which blocks a prompt of the caller's engine has, for routers. Returns whether they want
  /// to know; until the first rank has registered they cannot. Errors: as lookup().
  Result<bool> report_chain(const Id128& connection, PromptChain chain);
  [[nodiscard]] PromptChains& chains() noexcept { return chains_; }
  [[nodiscard]] const PromptChains& chains() const noexcept { return chains_; }
  /// Answers once that job and its scheduler's jobs before it are over; see JobWaits::wait. kGone
  /// also while a rank of that scheduler's instance is disconnected.
  void await_job(const Id128& connection, const JobId& job, Duration patience,
                 JobWaits::Answer answer, JobWaits::Until until = JobWaits::Until::kOver);
  /// How far the jobs of a scheduler are; see JobWaits::reached.
  [[nodiscard]] std::uint64_t jobs_reached(const Id128& scheduler,
                                           JobWaits::Until until = JobWaits::Until::kOver);
  /// Where the caller's engine finds blocks in the memory of other engines; see DirectReads.
  struct Reach {
    engine::SpaceId generation{};  ///< The present one of its namespace.
    std::vector<Id128> workers;    ///< The connections of all its ranks.
  };
  /// No value for a caller whose instance is not served, or has several kinds of blocks.
  [[nodiscard]] std::optional<Reach> direct_reach(const Id128& connection);
  /// The namespace generation of a job's blocks; no value if it has none now.
  [[nodiscard]] std::optional<engine::SpaceId> space_of_job(const JobId& job) const;
  /// Errors: kInvalidArgument for a connection that has neither attached nor registered; kGone.
  Result<void> check_member(const Id128& connection);
  struct Reset {
    std::uint64_t generation = 0;
    Bytes32 space{};  ///< The namespace, whose epoch was raised; see spread_reset().
  };
  /// Ensures that no block that the namespace holds now is ever found again at this node.
  /// Errors: kGone when no rank of the instance is connected, or not all of them ever were: without
  /// the sizes of their pages the namespace has no name among nodes.
  Result<Reset> reset_cache(const Id128& connection);

  // ---- calls of a worker; kInvalidArgument for a connection that has not registered

  /// A page is named by its offset in the pool / 4 KiB; kNoPage: skip this key.
  static constexpr std::uint32_t kNoPage = ~std::uint32_t{0};
  struct Opened {
    std::vector<std::uint32_t> slots;      ///< Pages of the caller's shard.
    std::vector<std::uint64_t> checksums;  ///< One for each slot; empty if none has one.
    std::size_t coming = 0;                ///< Count of the other blocks that may still arrive.
    /// Appends the next slice.
    void append(Opened next);
  };
  /// Pins the first `limit` blocks of the range and returns their pages; see BlockStore::open.
  /// Errors: those of the store; kInvalidArgument for a claim on blocks of another namespace,
  /// generation or page size than the caller's.
  Result<Opened> open(const Id128& connection, const Id128& token, std::size_t first,
                      std::size_t count, engine::PinId pin, std::size_t limit = kOpenSlice);
  Result<void> release(const Id128& connection, engine::PinId pin);
  /// Invalidates the blocks whose pages at these places of the pin differ from what was saved; see
  /// BlockStore::invalidate. Counts them, and logs at most one line in 10 s.
  Result<void> corrupt(const Id128& connection, engine::PinId pin,
                       std::span<const std::uint32_t> places);
  /// The number of blocks of one reserve(), and of one publish(), which has a fifth of the work for
  /// a block: so that no event-loop iteration lasts over 500 us, with cold caches and beside other
  /// programs too.
  static constexpr std::size_t kSliceBlocks = 256;
  static constexpr std::size_t kPublishSlice = 1024;
  /// Opens those of the blocks `first` to `first` + `count` that have arrived; `coming` of the
  /// result counts those in flight. If none has arrived it returns no slots and makes no pin.
  /// Errors: as open(), and those of BlockStore::arrived().
  Result<Opened> open_arrived(const Id128& connection, const Id128& token, std::size_t first,
                              std::size_t count, engine::PinId pin);
  /// The number of blocks of the claim, from `first` on and at most `count`, that can be opened or
  /// lent now. Errors: those of BlockStore::arrived().
  [[nodiscard]] Result<std::size_t> arrived(const Id128& token, std::size_t first,
                                            std::size_t count) const;
  /// The bytes of the caller's page of each block of the claim; 0 where open() would fail.
  [[nodiscard]] std::uint64_t page_bytes(const Id128& connection, const Id128& token);
  /// The frame of the claim's block at `place`; no value if the claim has none there, or was
  /// revoked.
  [[nodiscard]] std::optional<engine::FrameIndex> claimed_frame(const Id128& token,
                                                                std::size_t place) const;
  /// Reserves at most a slice of a job's keys, those of blocks of one kind; see
  /// BlockStore::reserve, also for fewer results than keys. `first` is the place of keys[0] in the
  /// job; `has_more`: more slices of it follow. For an incomplete instance every key is skipped.
  /// Errors: those of the store; kInvalidArgument for a kind that the namespace does not have, or
  /// of which the caller has no page.
  Result<std::vector<std::uint32_t>> reserve(
      const Id128& connection, const JobId& job, std::size_t first, std::span<const BlockKey> keys,
      bool has_more = false, engine::BlockStore::NoRoom no_room = engine::BlockStore::NoRoom::kSkip,
      std::size_t kind = 0, std::span<const std::uint8_t> depths = {},
      engine::BlockStore::MayRefuse may_refuse = engine::BlockStore::MayRefuse::kNo);
  /// The time in which room may be made for a save of `blocks`, before the rest of them is skipped.
  [[nodiscard]] Duration reserve_patience(const Id128& connection, std::size_t blocks) const;
  /// Seals kPublishSlice blocks; returns how many blocks are left. `checksums` come with the first
  /// slice: none, or one for each slot of the job. Errors: those of the store, and kInvalidArgument
  /// for another number of checksums.
  Result<std::size_t> publish(const Id128& connection, const JobId& job,
                              std::span<const std::uint64_t> checksums = {});
  Result<void> abandon(const Id128& connection, const JobId& job);

  // ---- other nodes: fetches from them

  /// The namespace of a connection's instance, as a request to other nodes names it.
  struct Wants {
    Bytes32 space{};                        ///< See space_name().
    engine::SpaceId generation{};           ///< The present generation of the namespace.
    std::vector<std::uint64_t> page_bytes;  ///< Page sizes of a block, shard by shard.
    [[nodiscard]] std::uint64_t block_bytes() const;
  };
  /// Errors: as lookup(); kGone while the instance is not complete.
  Result<Wants> wants(const Id128& connection);
  /// The same of a namespace by its name among nodes; no value for a name that no engine has
  /// registered here.
  [[nodiscard]] std::optional<Wants> wants_by_name(const Bytes32& space) const;
  /// The kinds of a namespace, for a prompt of which the engine has some tokens itself.
  struct WantsOfKinds {
    engine::BlockKinds rules;
    std::uint64_t local_tokens = 0;
    std::vector<Wants> kinds;
  };
  /// Errors: as wants() and restorable().
  Result<WantsOfKinds> wants_of_kinds(const Id128& connection, std::size_t local_units);
  /// A block to be fetched: where its pages go.
  struct Fetched {
    std::size_t place = 0;  ///< The place of its key.
    engine::FrameIndex frame = engine::kNoFrame;
    std::vector<std::uint64_t> offsets;  ///< In the pool, shard by shard.
  };
  struct Fetch {
    std::size_t blocks = 0;  ///< The growth of the claim.
    std::size_t coming = 0;  ///< Those of `blocks` in flight.
    std::vector<Fetched> frames;
  };
  /// Extends a claim by blocks that are in flight or to be fetched; see BlockStore::fetch. At most
  /// kSliceBlocks keys. Errors: those of the store and of lookup(); kGone while the instance is not
  /// complete. kGone also when the namespace has another generation than `generation`, which
  /// wants() returned: it was reset since.
  Result<Fetch> fetch(const Id128& connection, engine::SpaceId generation, const Id128& token,
                      std::size_t first, std::span<const BlockKey> keys, std::size_t fetchable,
                      std::size_t kind = 0);
  /// See BlockStore::has_room_to_fetch(); false for a connection that has ended.
  [[nodiscard]] bool has_room_to_fetch(const Id128& connection,
                                       std::span<const engine::BlockStore::ClaimPart> parts);
  /// From now on the claims under these tokens, which fetch() made, end together; see
  /// BlockStore::join_claims. Errors: as lookup(); kGone when one of them was revoked.
  Result<void> join_claims(const Id128& connection, std::span<const Id128> tokens);
  /// All bytes of a block have arrived; `checksums` are the owner's, one for each page, or none.
  void fetched(engine::FrameIndex frame, std::uint32_t shards,
               std::span<const std::uint64_t> checksums);
  /// The same for a block that a disk of this node delivered with its proof.
  void restored(engine::FrameIndex frame, std::uint32_t shards,
                std::span<const std::uint64_t> checksums, const engine::ssd::Proven& proven);
  /// The same for a block that no engine of this node waits for: it is sealed as a replica.
  void staged(engine::FrameIndex frame, std::uint32_t shards,
              std::span<const std::uint64_t> checksums, const engine::ssd::Proven& proven);
  /// The frame's fetch failed; see BlockStore::give_up and quiesced.
  void give_up(engine::FrameIndex frame);
  void quiesce_fetch(engine::FrameIndex frame);
  /// How all workers of the caller's engine read the pools of other nodes.
  struct PoolAccess {
    std::string backend;            ///< That of their network; empty: not all of them do.
    std::uint64_t piece_bytes = 0;  ///< The mean size of a page's segments in their memory.
    bool is_slow = false;           ///< One of them reads slower than into ordinary memory.
  };
  [[nodiscard]] PoolAccess pool_access(const Id128& connection);
  /// A worker as a reader of the pools of other nodes.
  struct PoolReader {
    engine::SpaceId generation{};  ///< The present one of its namespace.
    std::uint32_t shard = 0;       ///< The shard of its pages,
    std::uint64_t page_bytes = 0;  ///< and their size.
  };
  /// Errors: kInvalidArgument for a connection that has not registered; kGone for a connection that
  /// has ended, or whose instance is not served.
  [[nodiscard]] Result<PoolReader> pool_reader(const Id128& connection);
  /// Counts blocks that a worker has loaded from there.
  void note_pool_read(const Id128& connection, std::size_t blocks);
  /// Whether a claim waits for the frame.
  [[nodiscard]] bool is_awaited(engine::FrameIndex frame) const;

  // ---- other nodes: their reads from this one

  /// The length of the longest prefix of `keys` that is here. Changes no statistics and no recency.
  [[nodiscard]] std::size_t present(const Bytes32& space, std::span<const BlockKey> keys) const;
  /// Which of `keys` are here. Changes no statistics and no recency.
  [[nodiscard]] std::vector<bool> present_each(const Bytes32& space,
                                               std::span<const BlockKey> keys) const;
  struct Lent {
    engine::LeaseId lease{};
    std::size_t blocks = 0;
    std::vector<std::uint32_t> pages;      ///< Shard by shard, block by block.
    std::vector<std::uint64_t> checksums;  ///< One for each page, or none at all.
  };
  /// Errors: those of BlockStore::lend().
  Result<Lent> lend(const Bytes32& space, std::span<const BlockKey> keys, Duration time);
  void end_lease(engine::LeaseId lease);
  /// Whether its pages are still kept in place: it was not ended, and its time is not over by the
  /// clock of this node.
  [[nodiscard]] bool is_lent(engine::LeaseId lease) const;

  /// Extends a claim of other nodes by blocks that are here, in flight, or to be read from disks of
  /// this node; as fetch(). Claims of other nodes are never opened.
  Result<Fetch> stage(const Wants& wants, const Id128& token, std::size_t first,
                      std::span<const BlockKey> keys);
  /// The same by blocks of other nodes too, of which the first `fetchable` may be fetched; evicts
  /// replicas only. end_staging() is for such claims as well.
  Result<Fetch> prefetch(const Wants& wants, const Id128& token, std::size_t first,
                         std::span<const BlockKey> keys, std::size_t fetchable);
  void end_staging(const Id128& token);

  // ---- a tier below the pool

  /// A block as a disk names it.
  struct Stored {
    engine::ssd::Origin origin;
    BlockKey key;
    std::vector<std::uint64_t> offsets;  ///< Its pages in the pool, those without bytes left out.
    std::vector<std::uint64_t> page_bytes;  ///< Their sizes.
    /// Its writer's, the same; kNone where unknown. Empty if the namespace has kinds of blocks:
    /// members of a kind share a page, and a checksum of theirs is not that of the page's bytes.
    std::vector<std::uint64_t> checksums;
    // See BlockStore::Resident.
    bool was_used = false;
    bool came_back = false;
    engine::Depth depth = engine::kUnknownDepth;
  };
  /// The block of a frame; no value unless it is sealed, findable and no replica.
  [[nodiscard]] std::optional<Stored> stored(engine::FrameIndex frame) const;
  /// A disk did not deliver this block, which is not found there again.
  void note_disk_failed(const engine::ssd::Origin& origin, const BlockKey& key);
  /// The bytes of a stored block are not those of its writer: it is not found again.
  void invalidate(engine::FrameIndex frame);
  /// Whose blocks have this name now; no value for a name that no engine has registered here.
  [[nodiscard]] std::optional<engine::ssd::Origin> origin_of(const Bytes32& space) const;

  // ---- epochs

  /// The epochs that this node knows. A namespace whose epoch becomes newer is reset.
  [[nodiscard]] cluster::Epochs& epochs() noexcept { return epochs_; }
  /// Calls `hook` after each reset, which queues work; an empty one: no longer. A reset may be
  /// learned from any message of another node.
  void on_reset(std::function<void()> hook) { on_reset_ = std::move(hook); }
  /// Learns a reader's epoch of a namespace. Returns whether it equals this node's: only then the
  /// reader finds any block.
  bool meets(const Bytes32& space, const Epoch& theirs);
  /// Counts nodes that did not confirm a reset.
  void note_unconfirmed(std::size_t nodes) { counted_.resets_unconfirmed += nodes; }
  /// As await_job(), for an engine of another node, over the connection of that node's server.
  void await_job_for(const Id128& peer_connection, const JobId& job, Duration patience,
                     JobWaits::Answer answer, JobWaits::Until until = JobWaits::Until::kOver);
  /// That connection has ended: cancels its waits.
  void peer_left(const Id128& peer_connection);

  // ---- routers

  /// One kind of blocks of a namespace, as a router's index names it.
  struct Indexed {
    Wants wants;  ///< Its name among nodes, and its present generation.
    std::size_t kind = 0;
    std::uint32_t block_tokens = 0;  ///< 0: unknown.
  };
  /// The kind of that number of the namespace with that hash (InstanceInfo::namespace_hash). No
  /// number: the first kind of which a prompt needs a prefix, the only ones that an index can use.
  /// Errors: kGone for a namespace that no engine has completed here; kInvalidArgument for another
  /// kind, or one that does not exist; kBusy while its blocks wait for the epochs of other nodes.
  [[nodiscard]] Result<Indexed> indexed(std::string_view namespace_hash,
                                        std::optional<std::size_t> kind) const;

  /// A kind of a namespace with its present generation, as a directory announces its blocks.
  struct Announced {
    Bytes32 name{};  ///< Its name among nodes.
    engine::SpaceId generation{};
    Epoch epoch{};
  };
  /// All that are served to other nodes now, at most `limit`.
  [[nodiscard]] std::vector<Announced> announced(std::size_t limit) const;

  // ---- time and background work

  /// Does a slice of the queued work; true while there is more.
  bool work();
  [[nodiscard]] bool has_work() const;
  [[nodiscard]] std::optional<TimePoint> next_deadline() const;
  void expire();

  // ---- reports

  using RankInfo = server::RankInfo;
  using DeclinedInfo = server::DeclinedInfo;
  using InstanceInfo = server::InstanceInfo;
  /// In the order of their ids, those that only declined among them.
  [[nodiscard]] std::vector<InstanceInfo> instances() const;

  using Stats = CacheStats;
  [[nodiscard]] Stats stats() const;
  [[nodiscard]] engine::BlockStore& store() noexcept { return *store_; }
  [[nodiscard]] const engine::BlockStore& store() const noexcept { return *store_; }

 private:
  struct Rank;
  struct Instance;
  struct Client;
  struct Detached;
  class PromptSearch;

  CacheService(std::unique_ptr<engine::BlockStore> store, std::unique_ptr<engine::Demand> demand,
               const Options& options, const Clock& clock, EndConnection end_connection);
  /// Whether anything is found, claimed or reserved for the instance.
  [[nodiscard]] bool serves(const Instance& instance) const;
  /// Whether blocks of a former server wait for the epochs of other nodes.
  [[nodiscard]] bool is_held_back(engine::NamespaceId space) const;
  Result<void> adopt(const KeptNames& names);
  [[nodiscard]] Result<void> restore_namespaces(const KeptNames& names);
  void end_former_if_quiesced();
  /// Records the names for the server after this one.
  void record_names();
  /// Sets the checksums of a block's pages; returns the sum of their sizes.
  std::uint64_t note_checksums(engine::FrameIndex frame, std::uint32_t shards,
                               std::span<const std::uint64_t> checksums);
  [[nodiscard]] Fetch with_pages(const engine::BlockStore::Fetch& planned,
                                 std::uint32_t shards) const;
  Result<Client*> client(const Id128& connection);
  Result<Client*> member(const Id128& connection);
  Result<Client*> worker(const Id128& connection);
  Result<void> join(Client& client, const std::string& instance);
  /// Checks that the claim is on blocks that have a page of the caller's shard and size: that it is
  /// of the caller's namespace generation. Returns their kind; 0 for a claim that is gone, which
  /// open() reports. Errors: kInvalidArgument.
  [[nodiscard]] Result<std::size_t> check_claim(const Client& caller, const Id128& token) const;
  /// Checks the registration against what is known of its instance; ends the connection that it
  /// replaces.
  Result<void> check_rank(const Client& caller, const Registration& registration);
  [[nodiscard]] Result<void> check_cells(const Registration& registration) const;
  /// The repeated registration of a worker: the same rank again.
  [[nodiscard]] Result<Registered> register_again(const Client& caller,
                                                  const Registration& registration) const;
  Result<void> check_new_rank(const Client& caller, const Registration& registration);
  Result<void> enter_namespace(Client& caller, const Registration& registration,
                               engine::NamespaceId& entered);
  /// Makes the caller, which has entered `space_name` and its instance, the worker of its rank.
  void add_rank(Client& caller, const Registration& registration, engine::NamespaceId space_name);
  /// Ends the client's rights in its instance, and leaves it.
  void drop_membership(Client& client);
  /// Undoes add_rank(); the caller stays a scheduler if it was one.
  void withdraw_rank(Client& caller);
  /// The shape of each kind of blocks. Errors: kRefused for ranks that contradict each other.
  [[nodiscard]] Result<std::vector<engine::Shape>> shapes_of(const Instance& instance) const;
  /// All ranks are connected: determines the namespace's shapes. Errors: kBusy when the store has
  /// no room for another shape now; kRefused, which the instance keeps as its state.
  [[nodiscard]] Result<void> complete(Instance& instance);
  [[nodiscard]] std::uint32_t numa_part_of(const Instance& instance, std::uint32_t shard) const;
  [[nodiscard]] engine::SpaceId space_of(const Instance& instance, std::size_t kind = 0) const;
  [[nodiscard]] const engine::NamespaceTable::Kind* kind_called(const Bytes32& name) const;
  [[nodiscard]] Wants wants_of(const Instance& instance, std::size_t kind) const;
  /// Removes the names of namespaces among nodes for which `is_over` returns true.
  template <typename IsOver>
  void forget_names(IsOver&& is_over);
  void name_spaces(Instance& instance);
  [[nodiscard]] Bytes32 name_of(const engine::NamespaceTable::Namespace& space,
                                std::size_t kind) const;
  /// Starts a new generation of each namespace whose epoch is newer than the generation's.
  void retire_outdated();
  /// The shards of a worker's rank.
  struct Shards {
    std::uint32_t first = 0;
    std::uint32_t count = 1;
  };
  [[nodiscard]] static Shards shards_of(const Client& caller);
  [[nodiscard]] std::vector<std::uint32_t> pages_of(const std::vector<engine::FrameIndex>& frames,
                                                    const Client& caller) const;
  /// The kind whose blocks are those of `space`; no value when it is not of the namespace's present
  /// generation.
  [[nodiscard]] std::optional<std::size_t> kind_of(const Instance& instance,
                                                   engine::SpaceId space) const;
  [[nodiscard]] KindStats& counted(const Instance& instance, std::size_t kind);
  /// The pages of a block, shard by shard. The instance is complete.
  [[nodiscard]] const std::vector<engine::Shape::Shard>& pages_of_kind(const Instance& instance,
                                                                       std::size_t kind) const;
  /// The writer of `shard` has requested slots of a job of that kind; see JobWaits::begun().
  void begun(const Instance& instance, const JobId& job, std::size_t kind, std::uint32_t shard,
             bool has_more);
  void leave_instance(Client& client);
  void leave_schedulers(Client& client);
  /// The declined sides by instance: the scheduler first, then the ranks in order.
  [[nodiscard]] std::map<std::string, std::vector<DeclinedInfo>> declined() const;
  /// Adds the reports of schedulers to those of their instances.
  void add_schedulers(std::vector<InstanceInfo>& list) const;
  void end_detached(std::unordered_map<Id128, std::unique_ptr<Detached>>::iterator detached);
  void drop_reference(Instance& instance);
  [[nodiscard]] Result<void> check_kind(const Instance& instance, std::size_t kind) const;
  [[nodiscard]] Result<std::uint64_t> local_tokens(const Instance& instance,
                                                   std::size_t local_units) const;
  /// The blocks of kind 0, which stands for all, that a lookup over several kinds asks for.
  struct FirstKind {
    std::vector<BlockKey> keys;
    std::size_t found = 0;      ///< In a restorable prefix of `tokens`; 0: there is none.
    std::size_t elsewhere = 0;  ///< The blocks behind them up to `reachable_tokens`.
  };
  [[nodiscard]] static FirstKind first_kind(const Instance& instance,
                                            std::span<const BlockKey> units, std::uint64_t local,
                                            std::uint64_t tokens, std::uint64_t reachable_tokens);
  Result<bool> claim_all(const Client& caller, const Id128& token, std::span<const BlockKey> units,
                         const Restorable& wanted);
  void unclaim_kinds(const Client& client, const Id128& token);

  std::unique_ptr<engine::BlockStore> store_;
  std::unique_ptr<engine::NamespaceTable> namespaces_;
  std::unique_ptr<engine::Demand> demand_;
  engine::ChecksumTable checksums_;
  JobWaits waits_;
  PromptChains chains_;
  std::unordered_map<Id128, const Instance*> schedulers_;  ///< The attached ones.
  std::uint64_t pool_bytes_;
  std::uint32_t parts_;
  std::map<std::int32_t, std::uint32_t> part_of_numa_node_;
  std::size_t max_detached_;
  const Clock& clock_;
  std::optional<TimePoint> last_corrupt_line_;
  EndConnection end_connection_;
  std::map<std::string, Instance> instances_;
  cluster::Epochs epochs_;
  std::function<void()> on_reset_;
  /// A namespace with a shape, which may no longer exist.
  struct Named {
    engine::NamespaceId id{};
    std::size_t kind = 0;
    std::vector<std::uint64_t> page_bytes;  ///< The sizes that the name stands for, shard by shard.
    Epoch epoch;                            ///< The epoch of its present generation.
  };
  std::map<Bytes32, Named> spaces_;        ///< By the name among nodes.
  std::optional<engine::HolderId> nodes_;  ///< Holds what is staged for other nodes.
  std::unordered_map<Id128, std::unique_ptr<Client>> clients_;
  std::unordered_map<Id128, std::unique_ptr<Detached>> detached_;
  std::uint32_t next_instance_ = 1;
  Stats counted_;
  engine::KeptTables* kept_;  ///< Null: nothing outlives this server.
  std::unordered_set<Id128> former_clients_;
  std::optional<engine::HolderId> former_holder_;  ///< It holds the frames that they may access.
  bool is_closed_ = false;                         ///< Until they have quiesced.
  std::unordered_set<engine::NamespaceId> held_back_;
  FormerReport former_;
  std::function<void(const Id128&)> on_client_end_ = [](const Id128&) {};
};

}  // namespace pegaflow::server
