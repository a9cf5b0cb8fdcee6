#pragma once
/// \file
/// What each call of a client means: instances, namespaces, and who may touch which page how long.

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
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
#include "server/cache/job_waits.h"

namespace pegaflow::server {

/// The cache of one node, without its wire.
///
/// Knows every connection that said hello, by the id it was given. When a connection ends, what its
/// process may still touch stays with its id (the connection has *parted*) until the process is
/// known gone or says that all its copies ended.
///
/// An instance is *complete* while all its ranks are connected. Only then is anything found,
/// claimed or reserved for it; who is told so serves without the cache, with no time limit. Of the
/// ranks that hold one shard the lowest saves.
///
/// Thread-bound: the RPC thread. No call blocks, or lasts longer than the store's own calls; what
/// takes longer is left to work().
class CacheService {
 public:
  struct Options {
    engine::BlockStore::Options store{};
    /// Which of the pool's parts (see numa_ranges()) is near a node of memory, by the system's
    /// number of that node. Empty where the pool has one part.
    std::map<std::int32_t, std::uint32_t> part_of_node{};
    /// Parted connections that may be waited for; each keeps a descriptor. At the limit nobody new
    /// may register.
    std::size_t max_parted = 1024;
    /// Over which hit rates and their ceilings are told; see Demand.
    std::vector<std::chrono::seconds> demand_windows = {
        std::chrono::minutes(5), std::chrono::hours(1), std::chrono::hours(24)};
    /// Of await_job(), of all connections: each holds a call open for seconds.
    std::size_t max_waits = 1024;
    cluster::Epochs::Next next_epoch{};  ///< See Epochs.
  };

  /// Ends a connection that was taken over; it calls disconnected() before it returns.
  using EndConnection = std::function<void(const Id128& connection)>;

  /// `clock` outlives it.
  /// Errors: those of BlockStore::create and Demand::create.
  static Result<std::unique_ptr<CacheService>> create(const Options& options, const Clock& clock,
                                                      EndConnection end_connection);
  ~CacheService();

  // ---- connections

  struct Hello {
    Id128 process;              ///< The incarnation.
    Id128 previous_connection;  ///< None when there was none.
    bool quiesced = false;      ///< All copies begun under it have ended.
    std::string build;
    /// Keeps process_gone() coming; null: it cannot be told, so this connection gets no pool.
    std::shared_ptr<void> watch;
  };
  /// Errors: kInvalidArgument without an incarnation, or for a previous connection of another
  /// process.
  Result<void> connected(const Id128& connection, Hello hello);
  /// The connection ended. Unknown ones are fine.
  void disconnected(const Id128& connection);
  /// The process behind `connection`, still there or parted, ended: nobody copies any more.
  void process_gone(const Id128& connection);
  /// All copies have ended and the pool is unmapped; every further call says kGone.
  Result<void> goodbye(const Id128& connection);

  struct Registered {
    std::string namespace_hash;
  };
  /// Makes the connection the worker of one rank of its instance.
  /// Errors: kRefused for a page that the namespace or the pool cannot have, a rank that another
  /// living process serves, or a process that cannot be watched; kBusy when too many parted
  /// connections are waited for; kInvalidArgument for a list of factors that is none, for a rank
  /// that contradicts the others of its instance, or when it has registered as something else;
  /// kGone for an unknown connection.
  Result<Registered> register_rank(const Id128& connection, const Registration& registration);
  /// Makes the connection a scheduler of `instance`, which need not be there yet. Its jobs are
  /// named after `scheduler`; none: nobody can await them. Errors: kInvalidArgument when it belongs
  /// to another instance; kGone.
  Result<void> attach(const Id128& connection, const std::string& instance,
                      const Id128& scheduler = {});
  /// What the engine's side behind the connection reports about itself; for people only. Replaces
  /// what it reported before. Errors: kInvalidArgument before attach or register; kGone.
  Result<void> describe(const Id128& connection, EngineInfo engine);
  /// Connections that may have declined at once.
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
  /// Errors: kInvalidArgument before attach or register; kGone.
  Result<Found> lookup(const Id128& connection, std::span<const BlockKey> keys);
  /// Errors: as lookup(), and those of the store.
  Result<Found> claim(const Id128& connection, const Id128& token, std::span<const BlockKey> keys);
  /// Of how many keys claim() and claim_more() may be asked at once, and open() answers at once: so
  /// that no turn of the loop lasts over 500 us, with cold caches too.
  static constexpr std::size_t kClaimSlice = 1024;
  static constexpr std::size_t kOpenSlice = 2048;
  /// Goes on with a claim; see BlockStore::claim_more. Where the instance is not complete any more
  /// the claim is ended.
  Result<Found> claim_more(const Id128& connection, const Id128& token,
                           std::span<const BlockKey> keys);
  Result<void> unclaim(const Id128& connection, const Id128& token);
  struct Journal {
    std::uint64_t space = 0;  ///< Another number is another generation; 0: there is none yet.
    engine::BlockStore::JournalPart part;  ///< has_lost also when `space` is not the one asked for.
  };
  /// What became findable in the caller's namespace, and what ceased to be, since an earlier answer
  /// gave `space` and `position`; from BlockStore::kJournalEnd only where that is. Notes it from
  /// the first such call on. Errors: as lookup(); kOutOfCapacity when there is no memory for it.
  Result<Journal> journal(const Id128& connection, std::uint64_t space, std::uint64_t position);
  /// Answers once that job and its scheduler's jobs before it are over; see JobWaits::wait. kGone
  /// also while a rank of that scheduler's instance is away.
  void await_job(const Id128& connection, const JobId& job, Duration patience,
                 JobWaits::Answer answer);
  /// Errors: kInvalidArgument for a connection that has neither attached nor registered; kGone.
  Result<void> check_member(const Id128& connection);
  struct Reset {
    std::uint64_t generation = 0;
    Bytes32 space{};  ///< The namespace, whose epoch was raised; see spread_reset().
  };
  /// Nothing that the namespace holds is ever found again at this node.
  /// Errors: kGone when no rank of the instance is there, or all of them never were: without the
  /// sizes of their pages the namespace has no name among nodes.
  Result<Reset> reset_cache(const Id128& connection);

  // ---- calls of a worker; all say kInvalidArgument to one that did not register

  /// A page is named by its offset in the pool / 4 KiB; kNoPage: skip this key.
  static constexpr std::uint32_t kNoPage = ~std::uint32_t{0};
  struct Opened {
    std::vector<std::uint32_t> slots;      ///< Pages of the caller's shard.
    std::vector<std::uint64_t> checksums;  ///< One a slot; empty where none of them has one.
    std::size_t coming = 0;                ///< Of the others, how many may still come.
    /// Those of the next slice come behind these.
    void append(Opened next);
  };
  /// Pins a slice of the range and answers for it; see BlockStore::open. All of it, with a `limit`
  /// of `count`. Errors: those of the store; kInvalidArgument for a claim on blocks of another
  /// namespace, generation or page size than the caller's.
  Result<Opened> open(const Id128& connection, const Id128& token, std::size_t first,
                      std::size_t count, engine::PinId pin, std::size_t limit = kOpenSlice);
  Result<void> release(const Id128& connection, engine::PinId pin);
  /// The pages at these places of the pin are not what was saved; see BlockStore::condemn. Counted,
  /// and said in one line, at most one in 10 s.
  Result<void> corrupt(const Id128& connection, engine::PinId pin,
                       std::span<const std::uint32_t> places);
  /// What reserve() should be asked for at once, and what publish() does, which has a fifth of the
  /// work with a block: so that no turn of the loop lasts over 500 us, with cold caches and beside
  /// other programs too.
  static constexpr std::size_t kSliceBlocks = 256;
  static constexpr std::size_t kPublishSlice = 1024;
  /// What is there to be opened now of the blocks `first` to `first` + `count`, which may be
  /// coming: `coming` of the answer. Without any of them there: no slots and no pin. Errors: as
  /// open(), and those of BlockStore::arrived().
  Result<Opened> open_arrived(const Id128& connection, const Id128& token, std::size_t first,
                              std::size_t count, engine::PinId pin);
  /// The frame of the claim's block at `place`; no value where the claim has none there, or was
  /// revoked.
  [[nodiscard]] std::optional<engine::FrameIndex> claimed_frame(const Id128& token,
                                                                std::size_t place) const;
  /// At most a slice of a job's keys; see BlockStore::reserve, also for fewer answers than keys.
  /// `first` is the place of keys[0] in the job; `has_more`: more slices of it follow. Of an
  /// incomplete instance every key is skipped.
  Result<std::vector<std::uint32_t>> reserve(
      const Id128& connection, const JobId& job, std::size_t first, std::span<const BlockKey> keys,
      bool has_more = false,
      engine::BlockStore::NoRoom no_room = engine::BlockStore::NoRoom::kSkip);
  /// How long room may be made for a save of `blocks`, before the rest of them is skipped.
  [[nodiscard]] Duration reserve_patience(const Id128& connection, std::size_t blocks) const;
  /// Seals kPublishSlice blocks; returns how many blocks are left. `checksums` come with the first
  /// slice: none, or one for each slot of the job. Errors: those of the store, and kInvalidArgument
  /// for another number of checksums.
  Result<std::size_t> publish(const Id128& connection, const JobId& job,
                              std::span<const std::uint64_t> checksums = {});
  Result<void> abandon(const Id128& connection, const JobId& job);

  // ---- other nodes: what we fetch from them

  /// What a connection's instance wants from other nodes.
  struct Wants {
    Bytes32 space{};                        ///< See space_name().
    engine::SpaceId generation{};           ///< Of the namespace, as it is now.
    std::vector<std::uint64_t> page_bytes;  ///< Of a block, shard by shard.
    [[nodiscard]] std::uint64_t block_bytes() const;
  };
  /// Errors: as lookup(); kGone while the instance is not complete.
  Result<Wants> wants(const Id128& connection);
  /// A block to be brought: where its pages go.
  struct Fetched {
    std::size_t place = 0;  ///< Of its key.
    engine::FrameIndex frame = engine::kNoFrame;
    std::vector<std::uint64_t> offsets;  ///< In the pool, shard by shard.
  };
  struct Fetch {
    std::size_t blocks = 0;  ///< By which the claim got longer.
    std::size_t coming = 0;  ///< Of them, not here yet.
    std::vector<Fetched> frames;
  };
  /// Makes a claim longer by blocks that are coming or will be brought; see BlockStore::fetch. At
  /// most kSliceBlocks keys. Errors: those of the store and of lookup(); kGone while the instance
  /// is not complete.
  /// kGone also when the namespace has another generation than `generation`, which wants() gave: it
  /// was reset since.
  Result<Fetch> fetch(const Id128& connection, engine::SpaceId generation, const Id128& token,
                      std::size_t first, std::span<const BlockKey> keys, std::size_t fetchable);
  /// All bytes of a block are there; `checksums` as its owner has them, a page each, or none.
  void fetched(engine::FrameIndex frame, std::uint32_t shards,
               std::span<const std::uint64_t> checksums);
  /// It will not come; see BlockStore::give_up and quiesced.
  void give_up(engine::FrameIndex frame);
  void quiesce_fetch(engine::FrameIndex frame);
  /// Whether a claim waits for it.
  [[nodiscard]] bool is_awaited(engine::FrameIndex frame) const;

  // ---- other nodes: what they read here

  /// How many blocks, from the first on, are here. Counts for nothing.
  [[nodiscard]] std::size_t present(const Bytes32& space, std::span<const BlockKey> keys) const;
  struct Lent {
    engine::LeaseId lease{};
    std::vector<std::uint32_t> pages;      ///< Shard by shard, block by block.
    std::vector<std::uint64_t> checksums;  ///< A page each, or none at all.
  };
  /// Errors: those of BlockStore::lend().
  Result<Lent> lend(const Bytes32& space, std::span<const BlockKey> keys, Duration time);
  void end_lease(engine::LeaseId lease);
  /// Whether its pages are kept in place now: it was not ended, and its time is not over here.
  [[nodiscard]] bool is_lent(engine::LeaseId lease) const;

  // ---- epochs

  /// Whoever learns of an epoch gives it here; the namespace is reset if that is newer.
  [[nodiscard]] cluster::Epochs& epochs() noexcept { return epochs_; }
  /// Learns a reader's epoch of a namespace. True when it is ours: only then there is anything for
  /// that reader.
  bool meets(const Bytes32& space, const Epoch& theirs);
  /// So many nodes did not confirm a reset.
  void note_unconfirmed(std::size_t nodes) { counted_.resets_unconfirmed += nodes; }
  /// As await_job(), for an engine of another node, whose server's connection that is.
  void await_job_for(const Id128& peer_connection, const JobId& job, Duration patience,
                     JobWaits::Answer answer);
  /// That connection has ended; nobody waits by it any more.
  void peer_left(const Id128& peer_connection);

  // ---- time and background work

  /// A slice of queued work; true while there is more.
  bool work();
  [[nodiscard]] bool has_work() const;
  [[nodiscard]] std::optional<TimePoint> next_deadline() const;
  void expire();

  // ---- for people

  struct RankInfo {
    std::uint32_t rank = 0;
    std::uint32_t shard = 0;
    bool is_connected = false;
    std::string build;
    Id128 process;
    std::uint64_t page_bytes = 0;
    std::uint64_t block_count = 0;
    std::int32_t node = -1;              ///< Of its memory, as it said.
    std::optional<EngineInfo> engine{};  ///< While it is connected and has described itself.
  };
  /// A side of an engine that is configured to use the cache and does not.
  struct DeclinedInfo {
    Decline decline;
    std::string build;
  };
  struct InstanceInfo {
    std::string id;
    /// "connected", "waiting for ranks", "not served: REASON", "refused: REASON" or
    /// "disconnected".
    std::string state;
    std::string namespace_hash;
    std::vector<engine::NamespaceFactor> factors;
    std::uint64_t generation = 0;
    std::uint32_t shards = 0;
    std::vector<RankInfo> ranks;  ///< That were ever there, in order.
    std::uint32_t rank_count = 0;
    std::uint32_t schedulers = 0;
    std::optional<EngineInfo> scheduler{};   ///< As a scheduler of it described the engine.
    std::vector<DeclinedInfo> not_served{};  ///< The scheduler first, then by rank.
  };
  /// In the order of their ids, those that only declined among them.
  [[nodiscard]] std::vector<InstanceInfo> instances() const;

  struct Stats {
    engine::BlockStore::Stats store;
    std::vector<engine::BlockStore::ShapeStats> shapes;
    std::uint64_t memory_bytes = 0;  ///< Beside the pool.
    std::size_t clients = 0;
    std::size_t detached = 0;
    std::size_t instances = 0;
    std::size_t instances_waiting = 0;  ///< Some of their ranks are connected, and not all.
    /// Instances of which a side has declined, each counted once, by the reason that /instances
    /// shows.
    std::array<std::size_t, kDeclineReasons> instances_declined{};
    std::size_t instances_refused = 0;  ///< All of their ranks are connected, and refused.
    std::size_t namespaces = 0;
    std::size_t space_names = 0;  ///< By which other nodes may ask for namespaces.
    // Since the start.
    std::uint64_t load_bytes = 0;
    std::uint64_t load_blocks_own = 0;    ///< Written by the process that loads them.
    std::uint64_t load_blocks_other = 0;  ///< Written by another one.
    std::uint64_t save_bytes = 0;
    std::uint64_t fetch_bytes = 0;               ///< Of blocks that were brought from other nodes.
    std::uint64_t lent_bytes = 0;                ///< Of blocks that other nodes were lent.
    std::uint64_t refused_page_size = 0;         ///< Registrations.
    std::vector<engine::Demand::Window> demand;  ///< Lately.
    std::uint64_t lookup_blocks_not_served = 0;  ///< Asked for by instances that are not complete.
    std::uint64_t corrupt_pages = 0;             ///< Reported by the workers that loaded them.
    std::size_t epochs = 0;                      ///< Namespaces with an epoch of their own.
    std::uint64_t resets_here = 0;               ///< That an engine of this node asked for.
    std::uint64_t resets_learned = 0;            ///< Of a namespace here, from other nodes.
    std::uint64_t resets_unconfirmed = 0;        ///< Nodes that did not confirm one in time.
    std::optional<std::uint32_t> next_victim_idle_s;
    JobWaits::Stats waits;
  };
  [[nodiscard]] Stats stats() const;
  [[nodiscard]] engine::BlockStore& store() noexcept { return *store_; }
  [[nodiscard]] const engine::BlockStore& store() const noexcept { return *store_; }

 private:
  struct Rank;
  struct Instance;
  struct Client;
  struct Detached;

  CacheService(std::unique_ptr<engine::BlockStore> store, std::unique_ptr<engine::Demand> demand,
               const Options& options, const Clock& clock, EndConnection end_connection);
  Result<Client*> client(const Id128& connection);
  Result<Client*> member(const Id128& connection);
  Result<Client*> worker(const Id128& connection);
  Result<void> join(Client& client, const std::string& instance);
  /// Whether the claim is on blocks that have a page of the caller's shard and size: it is of the
  /// caller's namespace generation. What open() finds gone is not looked at.
  /// Errors: kInvalidArgument.
  [[nodiscard]] Result<void> check_claim(const Client& caller, const Id128& token) const;
  /// Whether the registration goes with what is known of its instance; ends the connection that it
  /// takes over.
  Result<void> check_rank(const Client& caller, const Registration& registration);
  Result<void> enter_namespace(Client& caller, const Registration& registration,
                               engine::NamespaceId& entered);
  /// All ranks are there: settles the namespace's shape.
  void complete(Instance& instance);
  [[nodiscard]] std::uint32_t node_of(const Instance& instance, std::uint32_t shard) const;
  [[nodiscard]] engine::SpaceId space_of(const Instance& instance) const;
  [[nodiscard]] const engine::NamespaceTable::Namespace* space_called(const Bytes32& name) const;
  void name_space(Instance& instance);
  [[nodiscard]] Bytes32 name_of(const engine::NamespaceTable::Namespace& space) const;
  /// Starts a new generation of each namespace whose epoch is newer than the generation's.
  void retire_outdated();
  [[nodiscard]] std::vector<std::uint32_t> pages_of(const std::vector<engine::FrameIndex>& frames,
                                                    const Client& caller) const;
  void leave_instance(Client& client);
  void leave_schedulers(Client& client);
  /// By instance, the scheduler's first and then those of ranks in order.
  [[nodiscard]] std::map<std::string, std::vector<DeclinedInfo>> declined() const;
  void end_detached(std::unordered_map<Id128, std::unique_ptr<Detached>>::iterator detached);
  void drop_reference(Instance& instance);

  std::unique_ptr<engine::BlockStore> store_;
  std::unique_ptr<engine::NamespaceTable> namespaces_;
  std::unique_ptr<engine::Demand> demand_;
  engine::ChecksumTable checksums_;
  JobWaits waits_;
  std::unordered_map<Id128, const Instance*> schedulers_;  ///< Those that are attached.
  std::uint64_t pool_bytes_;
  std::uint32_t parts_;
  std::map<std::int32_t, std::uint32_t> part_of_node_;
  std::size_t max_parted_;
  const Clock& clock_;
  std::optional<TimePoint> last_corrupt_line_;
  EndConnection end_connection_;
  std::map<std::string, Instance> instances_;
  cluster::Epochs epochs_;
  /// A namespace with a shape; may be gone by now.
  struct Named {
    engine::NamespaceId id{};
    std::vector<std::uint64_t> page_bytes;  ///< What the name says of a block, shard by shard.
    Epoch epoch;                            ///< Of its present generation.
  };
  std::map<Bytes32, Named> spaces_;  ///< One for each namespace, by its name among nodes.
  std::unordered_map<Id128, std::unique_ptr<Client>> clients_;
  std::unordered_map<Id128, std::unique_ptr<Detached>> detached_;
  std::uint32_t next_instance_ = 1;
  Stats counted_;
};

}  // namespace pegaflow::server
