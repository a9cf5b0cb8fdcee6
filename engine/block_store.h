#pragma once
/// \file
/// Which blocks exist, in which frame of the pool, who may touch them, and which goes next.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/block_key.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"
#include "base/job_id.h"
#include "engine/eviction/kind.h"
#include "engine/tables/lost_blocks.h"
#include "engine/types/ids.h"
#include "engine/types/shape.h"

namespace pegaflow::engine {

/// Owns the index from (space, key) to frame over one pool. Knows no bytes.
///
/// A frame holds the pages of all shards of a block, so a block is there whole or not at all. It is
/// free, reserved (somebody may be writing), coming (it is fetched from somewhere), sealed
/// (findable) or quarantined (somebody might still touch it). It is given out again only when
/// nobody can still touch it: see the table in docs/architecture.md. The store never grows: when
/// nothing can be evicted, reserve() says so and the caller drops its save.
///
/// Blocks of different shapes share the pool in *extents*, runs of units that one shape has for
/// itself; see docs/decisions/0005. A shape without a free frame takes free units; then, from
/// another shape, the extent that was used longest ago on average, if that is longer ago than the
/// use of the block it would evict itself; then it evicts its own. An extent with a block that is
/// written or held stays where it is.
///
/// Eviction takes the block at rest (sealed, neither pinned, claimed nor lent) that its policy
/// names; see engine/eviction/eviction.h. Replicas, which were fetched and so are elsewhere too, go
/// before all others of their shape, oldest first. When none is at rest, the oldest claim is
/// revoked whole; claims that nobody opened within `claim_grace` go before all others. Blocks of
/// one chain come to rest last block first, so that a chain is eaten from its end: a block without
/// its parent is useless.
///
/// No call lasts longer than a few hundred microseconds. What may be longer (a lost holder with
/// 100,000 pins, an emptied cache) takes effect at once for every caller, but its blocks are given
/// back one after the other through one queue, first in first out: the call itself does one slice
/// of that queue, work() does the others. Ask has_work() after a call that ends something.
///
/// Thread-bound, no locks. 64 bytes a frame, 8 for what the policy remembers, and two to four
/// 8-byte index cells, however many shards it has; claims, pins, leases and reservations cost 4
/// bytes a block while they live, and about 150 bytes each. A fetch costs nothing beside its
/// frames.
class BlockStore {
 public:
  struct Options {
    std::uint64_t pool_bytes = 0;  ///< 4 KiB to 8 TiB.
    std::uint32_t numa_nodes = 1;  ///< Of memory, that the pool is dealt to; see numa_ranges().
    /// Of the pool: what one instance may hold: the blocks of its claims, and of pins that were
    /// opened from its claims and outlived them.
    double instance_share = 0.5;
    double server_share = 0.8;   ///< Of the pool: distinct blocks that are claimed, pinned or lent.
    double fetch_share = 0.25;   ///< Of the pool: frames that fetches have, given-up ones included.
    double save_reserve = 0.05;  ///< Of the pool: what fetches leave free or at rest, for saves.
    double lend_share = 0.25;    ///< Of the pool: blocks that are lent, counted once a lease.
    Duration longest_lease = std::chrono::seconds(60);
    /// How much longer than it was asked for a lease lasts here: clocks differ in their rates.
    Duration lease_margin = std::chrono::seconds(1);
    Duration reservation_timeout = std::chrono::seconds(30);
    Duration claim_grace = std::chrono::seconds(1);
    EvictionKind eviction = kDefaultEviction;
    std::uint32_t slice_blocks = 256;            ///< Blocks that one slice of queued work handles.
    std::uint32_t remembered_losses = 1U << 20;  ///< See LostBlocks: 4 MiB.
    /// See Journal: 5 MiB, once somebody has asked for it. The second is the first's position.
    std::uint32_t journal_entries = 1U << 17;
    std::uint64_t journal_first = 0;
    // Rows of the tables. Far above what shares and timeouts leave room for in an honest run.
    std::uint32_t max_claims = 65536;
    std::uint32_t max_pins = 262144;
    std::uint32_t max_reservations =
        16384;  ///< Jobs, forgotten ones with a living writer included.
    std::uint32_t max_leases = 4096;
  };

  /// `clock` outlives the store.
  /// Errors: kInvalidArgument when an option is out of its range; kOutOfCapacity when there is no
  /// memory for the tables.
  static Result<std::unique_ptr<BlockStore>> create(const Options& options, const Clock& clock);
  ~BlockStore();

  // ---- shapes

  /// The name of a shape, made if there is none, with one user more. Its index has room for as many
  /// blocks as the pool can hold of it: about 20 bytes each, which come in slices through work().
  /// Errors: kInvalidArgument for a shape without shards or with an empty page; kRefused when a
  /// page passes 1 GiB or the pages of a block do not fit the pool; kBusy when 256 shapes have
  /// users, or as many others still have blocks; kOutOfCapacity when there is no memory for the
  /// index.
  Result<ShapeId> add_shape(const Shape& shape);
  /// Gives one add_shape() back. Once a shape has no user, no space and no block, its memory is
  /// given back through work() and its name is void: the last user must not make a space of it.
  void leave_shape(ShapeId shape);
  /// Whether frames of that shape are in the pool.
  [[nodiscard]] bool has_blocks(ShapeId shape) const;
  /// The number of times that a shape lost its last frame. While it stays the same, no shape that
  /// had blocks is without them.
  [[nodiscard]] std::uint64_t emptied_shapes() const;
  /// Where the shard's page of the block in `frame` begins in the pool, in bytes: a multiple of
  /// 4 KiB. `frame` is one that reserve(), open(), fetch() or lend() gave out.
  [[nodiscard]] std::uint64_t page_offset(FrameIndex frame, std::uint32_t shard) const;
  [[nodiscard]] std::uint64_t page_bytes(FrameIndex frame, std::uint32_t shard) const;
  /// A number that no other page in the pool has, for tables beside this one; those of an extent
  /// follow each other without a gap. Below the pool's bytes / 4 KiB.
  [[nodiscard]] std::uint32_t page_number(FrameIndex frame, std::uint32_t shard) const;

  // ---- spaces and holders

  /// A new space for blocks of that shape, empty. Never one that existed before, and never 0.
  /// `former` was its namespace's until now: blocks of that one are remembered as lost.
  SpaceId make_space(ShapeId shape, std::optional<SpaceId> former = std::nullopt);
  /// Makes every block of `space` unfindable at once, revokes its claims and forgets its
  /// reservations; slots come back through work() as their readers and writers end. Pins stay.
  /// Afterwards its keys are misses and reserve() says kGone. Unknown spaces are fine.
  void retire_space(SpaceId space);

  /// `instance` groups holders for instance_share; `process` tells blocks' writers apart.
  HolderId add_holder(std::uint32_t instance, Id128 process);
  /// The holder writes `shard` of `shards`; until then it is the only one. Not while it has a job.
  /// Ranks of one instance then count as one writer of blocks.
  void set_shard(HolderId holder, std::uint32_t shard, std::uint32_t shards);
  /// The connection ended but its process may live and copy on: its claims end, its reservations
  /// are forgotten and their slots quarantined; its pins stay, and their blocks stay findable.
  /// Unknown or lost holders are fine.
  void holder_lost(HolderId holder);
  /// Whether the holder, lost or not, has a pin or a job: its process may touch a slot.
  [[nodiscard]] bool may_touch(HolderId holder) const;
  /// Its process is known gone, or said that all its copies ended: whatever is left of the holder
  /// (lost or not) is given back. The id is unknown afterwards, and never used again.
  void holder_gone(HolderId holder);

  // ---- reading

  /// How many of `keys`, from the first on, are sealed. Holds nothing and changes no recency.
  ///
  /// Of the last block that it counts the whole key was compared; a missing one before it may be
  /// taken for there, once in 2^32 / (blocks in the pool). Whoever wants them claims them, and that
  /// compares every key. docs/decisions/0010 has the reasons.
  [[nodiscard]] std::size_t lookup(SpaceId space, std::span<const BlockKey> keys) const;
  /// The same for somebody who is no engine of this node: counted nowhere.
  [[nodiscard]] std::size_t present(SpaceId space, std::span<const BlockKey> keys) const;

  /// A claim on the longest sealed prefix of `keys` within the limits, under `token`. Makes the
  /// blocks recent. Returns how many blocks it holds; with 0 no claim exists.
  /// Errors: kInvalidArgument when the token is in use or none, kGone for an unknown or lost
  /// holder, kBusy when there are `max_claims` claims.
  Result<std::size_t> claim(HolderId holder, SpaceId space, std::span<const BlockKey> keys,
                            const Id128& token);
  /// Goes on with a claim of this holder: adds the longest sealed prefix of `keys`, which come
  /// behind those that it has, within the limits. Returns how many; so long claims go in slices.
  /// Errors: kGone for a token that is unknown or was revoked, or a holder unknown or lost.
  Result<std::size_t> claim_more(HolderId holder, const Id128& token,
                                 std::span<const BlockKey> keys);
  /// Ends a claim of this holder; its pins stay. Unknown tokens are fine: it may have been revoked.
  void unclaim(HolderId holder, const Id128& token);

  struct OpenedPages {
    std::vector<FrameIndex> frames;   ///< In the order of the claimed keys.
    std::size_t by_this_process = 0;  ///< Of them, how many the opening process itself saved.
    bool is_new = false;              ///< Pinned by this call; else it was a repeated one.
  };
  /// Pins the claimed blocks `first` to `first + count` for `holder` under the name `pin`. Repeated
  /// under one name it changes nothing and answers the same. A long range goes in slices: one call
  /// pins at most `limit` blocks and answers for these; the same call goes on, until it has
  /// answered for `count`. A pin that lacks slices is one on what it has. Errors: kGone when the
  /// token is unknown or was revoked, when a block of the slice was condemned, or the holder is
  /// unknown or lost; kInvalidArgument when the range is empty or beyond the claim, or when the
  /// name is used for another range; kBusy when a block of the slice is coming, see arrived(), or
  /// when there are `max_pins` pins. It never fails for a share.
  Result<OpenedPages> open(HolderId holder, const Id128& token, std::size_t first,
                           std::size_t count, PinId pin, std::size_t limit = ~std::size_t{0});
  /// The space of a claim that may be opened; no value where open() would answer kGone.
  [[nodiscard]] std::optional<SpaceId> space_of_claim(const Id128& token) const;
  /// The holder's copies out of the pin ended. Unknown pins are fine: a repeated release.
  void release(HolderId holder, PinId pin);
  /// The bytes of the pinned block at `place` of the pin are not what was saved: it is a miss from
  /// now on, a claim that has it cannot be opened there, and its slot is freed when the last claim
  /// and pin on it have ended. Its key may be reserved again at once. True if that was news.
  /// Errors: kGone when the holder has no such pin; kInvalidArgument for a place beyond it.
  Result<bool> invalidate(HolderId holder, PinId pin, std::size_t place);

  // ---- fetching, from another node or tier
  //
  // A claim may hold blocks that are not here yet. fetch() makes it longer by them, and gives out
  // frames for those that nobody brings yet. Who called brings the bytes, then says of each frame
  // fetched(), or, when they will not come, give_up() and quiesced(): once each, in any order, from
  // any turn. Until give_up() the same frame may be filled again from somewhere else. A frame stays
  // as it is until quiesced(), whatever becomes of the claim, its holder and the space.

  struct Fetch {
    struct Frame {
      std::size_t place = 0;  ///< Of its key, in `keys`.
      FrameIndex frame = kNoFrame;
    };
    std::size_t blocks = 0;          ///< By which the claim got longer.
    std::size_t in_flight = 0;       ///< Of them, not here yet, those of earlier fetches included.
    std::vector<Frame> frames = {};  ///< Of those, the caller's to bring; in the order of keys.
  };
  /// Makes the claim under `token` longer by the longest prefix of `keys` of which each block is
  /// sealed, or coming already, or, among the first `fetchable` keys, gets a frame to be fetched
  /// into. So one fetch a block is under way, however many want it, and with `fetchable` 0 this
  /// only joins those under way. `first` is how many blocks the claim has; with 0 there is none,
  /// and one is made unless nothing came of it.
  ///
  /// Ends, without waiting for anything, at the first key that is none of this; that is being
  /// saved; that passes a limit of claims (see claim()), `fetch_share` or `save_reserve`; or for
  /// which there is no room even after eviction. Never revokes a claim. reserve() skips a key that
  /// is coming, as one that is being saved; so the first to ask for a key is the one that seals it.
  /// Costs what reserve() costs: longer chains go in slices, each behind the one before.
  ///
  /// Errors: kGone for an unknown or lost holder, or when `first` is not 0 and the claim was
  /// revoked or ended; kInvalidArgument when the claim is of another holder or space or has another
  /// number of blocks, or `token` is none; kBusy when there are `max_claims` claims. Of a retired
  /// or unknown space nothing comes.
  Result<Fetch> fetch(HolderId holder, SpaceId space, const Id128& token, std::size_t first,
                      std::span<const BlockKey> keys, std::size_t fetchable);
  /// All bytes of the frame are there and whole, and nobody can write to it any more: its block is
  /// sealed, as a replica, and at rest unless a claim waits for it. False when it was not, because
  /// its space was retired or it had been given up; then this is quiesced(). `frame` is one that
  /// fetch() gave out and that has not ended.
  bool fetched(FrameIndex frame);
  /// The block will not come, or not whole. At once its key may be fetched or saved again, in
  /// another frame, and no claim that waits for it can be opened there. Somebody may still write to
  /// the frame: it is in quarantine until quiesced(). Once given up, again changes nothing.
  void give_up(FrameIndex frame);
  /// Nobody can write to the frame any more; gives it up if that was not done. It is free once the
  /// claims that waited for it have ended.
  void quiesced(FrameIndex frame);
  /// Whether a claim waits for a block that fetch() gave out and that has not ended. Without one it
  /// need not be asked for; another claim may join until it is settled.
  [[nodiscard]] bool is_awaited(FrameIndex frame) const;
  /// How many blocks of the claim, from `first` on and at most `count`, are there to be opened now:
  /// up to the first that is coming. Ask again from that one on after a fetched(), give_up() or
  /// quiesced(): each call looks at what it counts and one block more.
  /// Errors: kGone when the token is unknown or was revoked, or the block at `first` was given up
  /// or condemned; kInvalidArgument when the range is empty or beyond the claim.
  [[nodiscard]] Result<std::size_t> arrived(const Id128& token, std::size_t first,
                                            std::size_t count) const;
  /// The frame of the claim's block at `place`; no value where open() would answer kGone, or beyond
  /// the claim's end.
  [[nodiscard]] std::optional<FrameIndex> claimed_frame(const Id128& token,
                                                        std::size_t place) const;

  // ---- lending, to another node

  struct Lent {
    LeaseId lease{};  ///< None when there are no frames.
    std::vector<FrameIndex> frames = {};
  };
  /// Lends the longest sealed prefix of `keys` within the limits, for reading from afar: its blocks
  /// are recent, and stay where they are, like pinned ones, until end_lease(), or until `time` and
  /// `lease_margin` have passed here. A lease is no claim: it is never revoked, survives a reset of
  /// the space, and takes no share of an instance; shortened to what keeps `lend_share` and
  /// `server_share`.
  /// Errors: kInvalidArgument unless `time` is above 0 and at most `longest_lease`; kBusy when
  /// there are `max_leases` leases.
  Result<Lent> lend(SpaceId space, std::span<const BlockKey> keys, Duration time);
  /// The reader ended it: nobody reads any more. Unknown ones are fine: it may have run out.
  void end_lease(LeaseId lease);
  /// Whether its frames may still be read: it was neither ended nor has run out, by expire().
  [[nodiscard]] bool is_lent(LeaseId lease) const;

  // ---- writing

  /// What becomes of a key whose room is not there yet.
  enum class NoRoom : std::uint8_t { kSkip, kStop };

  /// Reserves a frame for each of `keys` that is neither sealed nor reserved, evicting if need be,
  /// under `job`. May be called several times for one job: that is how long jobs go in slices (of
  /// `slice_blocks` keys). Frames come in the order of `keys`; kNoFrame means skip it (already
  /// there, being saved or fetched, or no room).
  ///
  /// With several shards the first to ask decides each key, for all of them; the others get the
  /// same answer, and the timeout counts from the first call. `first` is the place of keys[0] in
  /// the job. Each shard that asked has to publish() or abandon(). With one shard `first` means
  /// nothing, the timeout counts from the first frame, and a job for which every key is skipped
  /// does not exist.
  ///
  /// Where nothing is at rest it does at most one slice of queued work, which may be that of claims
  /// it revokes; keys for which that gives no frame are skipped. With NoRoom::kStop it answers for
  /// the keys before the first whose room is still being made by an exchange of extents, and no
  /// more: ask for the rest in a later turn. Each such call does its share of the exchange.
  /// Errors: kGone for an unknown or lost holder, for a retired space, or when the job was
  /// forgotten meanwhile; kInvalidArgument when the job belongs to another holder, space or number
  /// of shards, was published by this one, or `first` lies beyond what this shard asked for; kBusy
  /// when there are `max_reservations` jobs.
  Result<std::vector<FrameIndex>> reserve(HolderId holder, SpaceId space, const JobId& job,
                                          std::size_t first, std::span<const BlockKey> keys,
                                          NoRoom no_room = NoRoom::kSkip);
  /// The frames that the job still has to publish, in the order in which reserve() gave them. Empty
  /// where publish() would say kGone. Valid until the next call that changes something.
  [[nodiscard]] std::span<const FrameIndex> frames_of(HolderId holder, const JobId& job) const;
  /// All copies of the job into this holder's shard ended and are whole. The last shard seals at
  /// most `limit` of its blocks, the last one first, and is told how many are left: it calls again
  /// until 0. The others are told 0.
  /// Errors: kGone when the job was forgotten (timeout, reset, a lost connection, another shard's
  /// abandon), or when its shards asked for different keys: nothing is sealed, and its
  /// quarantined frames are freed once no shard is writing. Also for a job that does not exist or
  /// of which this holder has reserved nothing.
  Result<std::size_t> publish(HolderId holder, const JobId& job,
                              std::size_t limit = ~std::size_t{0});
  /// All copies of the job into this holder's shard ended, and the blocks are not good: they are
  /// forgotten for all shards, and their frames given back once none is writing. Unknown jobs are
  /// fine.
  void abandon(HolderId holder, const JobId& job);

  // ---- telling others

  /// From now on it is noted which blocks become findable and which cease to be. Costs a ring of
  /// 5 MiB, and 40 bytes written a block; until somebody asks, nothing. Never ends; a second call
  /// changes nothing. Errors: kOutOfCapacity.
  Result<void> keep_journal();

  struct JournalEntry {
    BlockKey key;
    bool is_present = false;  ///< Else it is gone.
  };
  struct JournalPart {
    std::vector<JournalEntry> entries;  ///< Of the space asked for, in order.
    std::uint64_t next = 0;             ///< Where to go on reading.
    bool has_lost = false;  ///< What was said from the position asked for on is not held.
    bool has_more = false;  ///< There is more from `next` on.
  };
  static constexpr std::uint64_t kJournalEnd = ~std::uint64_t{0};
  /// What was said of blocks of `space` from position `from` on (kJournalEnd: nothing yet, only
  /// where it ends), looking at no more than `limit` entries. A block that is sealed is there; it
  /// is gone when it was evicted, cleaned or condemned. A space that is retired is not taken apart
  /// block by block: nothing more is said of it. That a block is there is said again when somebody
  /// claims it or wants to save it. Empty without keep_journal().
  [[nodiscard]] JournalPart journal(SpaceId space, std::uint64_t from, std::size_t limit) const;

  // ---- time and background work

  /// Forgets reservations older than the timeout, and ends leases that have run out, at most
  /// `slice_blocks` of each. Call it at next_deadline().
  void expire();
  /// When expire() has something to do; no value while nothing is reserved or lent.
  [[nodiscard]] std::optional<TimePoint> next_deadline() const;
  /// Does one slice of what is queued; true while there is more.
  bool work();
  [[nodiscard]] bool has_work() const;

  struct Cleanup {
    std::uint64_t evicted_blocks = 0;
    std::uint64_t evicted_bytes = 0;
    std::uint64_t still_referenced_blocks = 0;  ///< Held or being written when passed.
    bool done = false;
  };
  /// Queues the eviction of every block at rest, in the order of frames; cleanup() tells how far it
  /// is. A second call while one is under way joins it.
  void start_cleanup();
  [[nodiscard]] const Cleanup& cleanup() const;

  /// True when no frame is reserved, coming, quarantined, pinned, claimed or lent.
  [[nodiscard]] bool is_idle() const;

  struct Stats {
    // Frames now, and bytes of them.
    std::uint64_t pool_bytes = 0;
    std::uint64_t used_bytes = 0;  ///< Of frames that are not free.
    std::uint64_t sealed_bytes = 0;
    std::uint64_t written_bytes = 0;  ///< Reserved, coming or quarantined.
    std::uint64_t quarantined_bytes = 0;
    std::uint64_t held_bytes = 0;
    std::uint64_t fetch_bytes = 0;  ///< Coming or given up.
    std::uint64_t lent_bytes = 0;   ///< Counted once a lease.
    std::uint32_t units = 0;        ///< That extents are made of.
    std::uint32_t free_units = 0;
    std::uint64_t unit_steps = 0;  ///< Of looking for free units, since the start: its cost.
    std::uint32_t reserved = 0;
    std::uint32_t sealed = 0;  ///< Findable or of a retired space, pinned ones included.
    std::uint32_t quarantined_timeout =
        0;  ///< Forgotten after the timeout or a reset; writer lives.
    std::uint32_t quarantined_writer_lost = 0;  ///< The writer's connection ended.
    /// Sealed blocks whose reader's connection ended, counted once a pin.
    std::uint64_t pinned_by_lost_readers = 0;
    std::uint32_t in_flight = 0;  ///< Blocks that are being fetched.
    std::uint32_t replicas = 0;   ///< Of `sealed`, those that were fetched.
    /// Frames of fetches that were given up: somebody may still write, or a claim waits for them.
    std::uint32_t quarantined_fetch = 0;
    std::uint32_t held =
        0;  ///< Distinct blocks, also coming ones, that are claimed, pinned or lent.
    std::uint64_t leases = 0;
    std::uint64_t lent = 0;  ///< Blocks, counted once a lease.
    std::optional<TimePoint> oldest_lease;
    std::uint64_t claims = 0;
    std::uint64_t pins = 0;          ///< Rows, those of lost holders included.
    std::uint64_t reservations = 0;  ///< Jobs, without the forgotten ones.
    std::optional<TimePoint> oldest_pin;
    EvictionKind eviction = kDefaultEviction;  ///< The policy.
    // Since the start.
    std::uint64_t lookups = 0;
    std::uint64_t lookup_hits = 0;    ///< Blocks.
    std::uint64_t lookup_misses = 0;  ///< Blocks beyond the sealed prefix.
    /// Of lookup_misses, by Miss. Keys are chained: what comes behind an unknown block is unknown
    /// too, so the search for reasons ends some blocks behind the last that is remembered.
    MissCounts misses{};
    std::uint64_t insertions = 0;        ///< Blocks sealed by saves.
    std::uint64_t evictions = 0;         ///< Blocks evicted to make room.
    std::uint64_t evicted_replicas = 0;  ///< Of them.
    std::uint64_t extents_taken = 0;     ///< By one shape from another, with their blocks.
    std::uint64_t cleaned = 0;           ///< Blocks evicted by cleanup.
    std::uint64_t retired = 0;           ///< Blocks dropped with their space.
    std::uint64_t invalidated = 0;       ///< Blocks dropped because their bytes were wrong.
    std::uint64_t skipped_present = 0;   ///< Keys that reserve() skipped: there or being saved.
    std::uint64_t skipped_no_room = 0;
    std::uint64_t claims_revoked = 0;
    std::uint64_t claims_shortened = 0;
    std::uint64_t reservations_timed_out = 0;
    std::uint64_t late_publishes = 0;    ///< publish() of a job that had been forgotten.
    std::uint64_t fetches = 0;           ///< Blocks for which fetch() gave out a frame.
    std::uint64_t fetches_joined = 0;    ///< Blocks that fetch() found coming.
    std::uint64_t fetches_no_room = 0;   ///< Calls of fetch() that ended for want of a frame.
    std::uint64_t fetched = 0;           ///< Blocks sealed by fetched().
    std::uint64_t fetches_given_up = 0;  ///< Blocks that were not.
    std::uint64_t leases_made = 0;
    std::uint64_t leases_expired = 0;  ///< That ran out before the reader ended them.
    std::uint64_t leases_shortened = 0;
    AgeHistogram evicted_age;   ///< From the seal of an evicted block to its end.
    AgeHistogram dropped_age;   ///< The same of blocks dropped by a cleanup or a reset.
    AgeHistogram evicted_idle;  ///< How long an evicted block had been at rest.
  };
  [[nodiscard]] Stats stats() const;
  /// Whether the job may still be sealed: some shard has not published, or not all of it is sealed
  /// yet, and it was not forgotten. False for a job that was never heard of.
  [[nodiscard]] bool is_saving(const JobId& job) const;
  /// How long the block has been at rest that goes next, of the shape where it is longest; no value
  /// when none is at rest.
  [[nodiscard]] std::optional<std::uint32_t> next_victim_idle_s() const;
  /// What each shape has of the pool.
  struct ShapeStats {
    Shape shape{};
    std::uint64_t frame_bytes = 0;
    std::uint32_t extents = 0;
    std::uint64_t frames = 0;  ///< Of its extents.
    std::uint32_t used = 0;    ///< Of them, not free.
  };
  [[nodiscard]] std::vector<ShapeStats> shapes() const;
  /// Bytes of the index and tables, without the pool.
  [[nodiscard]] std::uint64_t memory_bytes() const;

  /// The frame of the `n`-th block at rest, counted from the one that came to rest last. O(frames);
  /// for tests that damage one.
  [[nodiscard]] std::optional<FrameIndex> recent_frame(std::size_t n) const;

  /// Checks every invariant of the tables, in O(frames). For tests and simulations.
  /// Errors: kInternal that names the first broken one.
  [[nodiscard]] Result<void> check() const;

 private:
  struct Impl;
  explicit BlockStore(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace pegaflow::engine
