#pragma once
/// \file
/// Which blocks exist, in which frame of the pool, who may access them, and which is evicted next.

#include <cstddef>
#include <cstdint>
#include <functional>
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
#include "engine/frames/block_listener.h"
#include "engine/ssd/proof.h"
#include "engine/tables/lost_blocks.h"
#include "engine/types/depth.h"
#include "engine/types/ids.h"
#include "engine/types/shape.h"

namespace pegaflow::engine {

class KeptTables;

/// Owns the index from (namespace generation, key) to frame over one pool. Never reads or writes a
/// page.
///
/// A frame holds the pages of all shards of a block, so a block is present as a whole or not at
/// all. A frame is free, reserved (a client may be writing), in flight (it is fetched from another
/// node or tier), sealed (findable) or quarantined (a process or device may still access it). It is
/// reused only when no process or device can still access it: see the table in
/// docs/architecture.md. The store never grows: when no block is evictable, reserve() returns no
/// frames and the caller drops its save.
///
/// A `SpaceId` names one generation of one namespace, called a *generation* below.
///
/// Blocks of different shapes share the pool in *extents*, runs of units that belong to one shape;
/// see docs/decisions/0005. A shape without a free frame takes free units. If there are none, it
/// takes the extent of another shape that was used longest ago on average, provided that this is
/// longer ago than the last use of the block that it would evict itself. Otherwise it evicts its
/// own block. An extent with a block that is written or held stays where it is.
///
/// A block is evictable while it is sealed and neither pinned, claimed nor lent. The policy chooses
/// among the evictable blocks of a shape; see engine/eviction/eviction.h. Replicas, which were
/// fetched and so exist elsewhere too, are evicted before all others, oldest first. When no block
/// is evictable, the oldest claim is revoked as a whole; claims that were not opened within
/// `claim_grace` are revoked first. The blocks of a chain become evictable last block first, so
/// that a chain is evicted from its end: a block without its parent is useless.
///
/// No call lasts longer than a few hundred microseconds. Longer work (a lost holder with 100,000
/// pins, an emptied cache) takes effect at once for every caller, but its blocks are returned one
/// by one through a first-in, first-out queue: the call itself does one slice of that queue, work()
/// does the others. Check has_work() after a call that ends something.
///
/// Thread-bound, no locks. 64 bytes per frame, 8 for the memory of the policy (24 where a later
/// process continues with it), and two to four 8-byte index cells, however many shards it has;
/// claims, pins, leases and reservations cost 4 bytes per block while they live, and about 150
/// bytes each. A fetch costs nothing beside its frames.
class BlockStore {
 public:
  struct Options {
    std::uint64_t pool_bytes = 0;  ///< 4 KiB to 8 TiB.
    std::uint32_t numa_nodes = 1;  ///< The NUMA nodes that share the pool; see numa_ranges().
    /// Share of the pool that one instance may hold: the blocks of its claims, and of pins that
    /// were opened from its claims and outlived them.
    double instance_share = 0.5;
    /// Share for distinct blocks that are claimed, pinned or lent.
    double server_share = 0.8;
    double fetch_share = 0.25;   ///< Share for frames of fetches, given-up ones included.
    double save_reserve = 0.05;  ///< Share that fetches leave free or evictable, for saves.
    double lend_share = 0.25;    ///< Share for blocks that are lent, counted once per lease.
    Duration longest_lease = std::chrono::seconds(60);
    /// Added here to the duration of each lease, because clocks differ in their rates.
    Duration lease_margin = std::chrono::seconds(1);
    Duration reservation_timeout = std::chrono::seconds(30);
    Duration claim_grace = std::chrono::seconds(1);
    EvictionKind eviction = kDefaultEviction;
    /// Keeps the rows for a later process, which adopts them; null: they end with this one.
    /// Outlives the store.
    KeptTables* kept = nullptr;
    std::uint32_t slice_blocks = 256;            ///< Blocks that one slice of queued work handles.
    std::uint32_t remembered_losses = 1U << 20;  ///< See LostBlocks: 4 MiB.
    /// See Journal: 5 MiB, once keep_journal() was called; and the position of its first entry.
    std::uint32_t journal_entries = 1U << 17;
    std::uint64_t journal_first = 0;
    // Rows of the tables, far above the number that shares and timeouts allow in an honest run.
    std::uint32_t max_claims = 65536;
    std::uint32_t max_pins = 262144;
    std::uint32_t max_reservations = 16384;  ///< Jobs, including forgotten ones whose writer lives.
    std::uint32_t max_leases = 4096;
  };

  /// `clock` outlives the store.
  /// Errors: kInvalidArgument when an option is out of its range; kOutOfCapacity when there is no
  /// memory for the tables.
  static Result<std::unique_ptr<BlockStore>> create(const Options& options, const Clock& clock);
  ~BlockStore();

  // ---- the blocks of a former process

  struct FormerShape {
    std::uint32_t number = 0;  ///< Its id, as a number.
    Shape shape{};
  };
  struct FormerSpace {
    SpaceId id{};
    std::uint32_t shape = 0;  ///< The number of its shape.
  };
  struct Adopted {
    /// Holds the frames that a process may still access, those with blocks that nothing can find
    /// among them. Call holder_gone() once no client of the former process can copy any longer.
    std::optional<HolderId> former;
    std::uint64_t held = 0;    ///< Frames.
    std::uint64_t blocks = 0;  ///< That may be found.
    std::uint64_t bytes = 0;
    std::uint64_t discarded = 0;  ///< Frames in use whose blocks cannot be found.
  };
  /// Continues with the rows in `kept` that a former process left: the sealed blocks of `spaces`,
  /// which are live under their ids from now on. `shapes` are its shapes. Each shape has one
  /// user until the caller ends that with leave_shape(). To be called before anything else. Takes
  /// about half a microsecond per block.
  /// Errors: kCorrupt when these or the rows contradict each other, and those of add_shape(); the
  /// store must not be used then.
  Result<Adopted> adopt(std::span<const FormerShape> shapes, std::span<const FormerSpace> spaces);

  // ---- shapes

  /// Returns the id of an equal shape or of a new one, with one more user. The index of a shape has
  /// room for as many blocks as fit the pool: about 20 bytes each, whose memory is allocated in
  /// slices through work().
  /// Errors: kInvalidArgument for a shape without shards or without a page; kRefused when a page
  /// exceeds 1 GiB or the pages of a block do not fit the pool; kBusy when 256 shapes have
  /// users, or as many others still have blocks; kOutOfCapacity when there is no memory for the
  /// index.
  Result<ShapeId> add_shape(const Shape& shape);
  /// Ends one add_shape(). Once a shape has no user, no generation and no block, its memory is
  /// returned through work() and its id is void: the last user must not create a generation of it.
  void leave_shape(ShapeId shape);
  /// Whether frames of that shape are in the pool.
  [[nodiscard]] bool has_blocks(ShapeId shape) const;
  /// The number of times that a shape lost its last frame. While it stays the same, no shape that
  /// had blocks is without them.
  [[nodiscard]] std::uint64_t emptied_shapes() const;
  /// The offset in the pool, in bytes, of the page that `shard` has in `frame`: a multiple of 4
  /// KiB. `frame` was returned by reserve(), open(), fetch() or lend().
  [[nodiscard]] std::uint64_t page_offset(FrameIndex frame, std::uint32_t shard) const;
  [[nodiscard]] std::uint64_t page_bytes(FrameIndex frame, std::uint32_t shard) const;
  /// A number that no other page in the pool has, for tables beside this one; the pages of an
  /// extent are numbered without a gap. Less than the pool's bytes / 4 KiB.
  [[nodiscard]] std::uint32_t page_number(FrameIndex frame, std::uint32_t shard) const;

  // ---- namespace generations and holders

  /// Creates an empty generation for blocks of that shape. Its id was never used before and is
  /// never 0. `former` is the previous generation of the namespace: its blocks are remembered as
  /// lost.
  SpaceId make_space(ShapeId shape, std::optional<SpaceId> former = std::nullopt);
  /// Makes every block of `space` unfindable at once, revokes its claims and forgets its
  /// reservations; frames are returned through work() as their readers and writers end. Pins stay.
  /// Afterwards its keys are misses and reserve() returns kGone. Unknown generations are fine.
  void retire_space(SpaceId space);

  /// `instance` groups holders for instance_share; `process` identifies the writer of a block.
  HolderId add_holder(std::uint32_t instance, Id128 process);
  /// The holder writes `shard` of `shards`; before this call it is the only shard. Not allowed
  /// while the holder has a job. Ranks of one instance then count as one writer of blocks. A holder
  /// that writes n consecutive shards of each block, like all of its instance, counts as one here:
  /// both numbers are divided by n, and no shard of the blocks may be empty.
  void set_shard(HolderId holder, std::uint32_t shard, std::uint32_t shards);
  /// The connection ended but its process may live and go on copying: its claims end, its
  /// reservations are forgotten and their frames quarantined; its pins stay, and their blocks stay
  /// findable. Unknown or lost holders are fine.
  void holder_lost(HolderId holder);
  /// Whether the holder, lost or not, has a pin or a job: its process may access a frame.
  [[nodiscard]] bool may_touch(HolderId holder) const;
  /// The process is gone, or it reported that all its copies have ended: all that is left of the
  /// holder (lost or not) is returned. The id is unknown afterwards, and never used again.
  void holder_gone(HolderId holder);

  // ---- reading

  /// Returns the length of the longest sealed prefix of `keys`. Holds nothing and changes no
  /// recency.
  ///
  /// The last block of the prefix is compared by its whole key; a missing block before it may count
  /// as present, once in 2^32 / (blocks in the pool). A claim compares every key.
  /// docs/decisions/0010 has the reasons.
  [[nodiscard]] std::size_t lookup(SpaceId space, std::span<const BlockKey> keys) const;
  /// Like lookup(), for callers other than engines of this node: changes no counter.
  [[nodiscard]] std::size_t present(SpaceId space, std::span<const BlockKey> keys) const;
  /// Bit i tells whether the block of keys[i] is sealed; at most 64 keys, each compared whole.
  /// Changes no counter and no recency.
  [[nodiscard]] std::uint64_t present_each(SpaceId space, std::span<const BlockKey> keys) const;
  /// As present_each(), of the blocks that a claim, pin or lease holds.
  [[nodiscard]] std::uint64_t held_each(SpaceId space, std::span<const BlockKey> keys) const;

  /// Counts a lookup that its caller answered from present() or present_each(): the first `found`
  /// of `keys` were found. Each other one is a miss: the `elsewhere` behind them of kOtherTier,
  /// then those that are present of kBehindHole, and the others of their own reasons.
  void note_lookup(SpaceId space, std::span<const BlockKey> keys, std::size_t found,
                   std::size_t elsewhere = 0);
  /// A tier has lost a block, for this reason (kEvicted to kDiskFailed). For lookups that miss it.
  void note_lost(SpaceId space, const BlockKey& key, Miss why);

  /// Claims the longest sealed prefix of `keys` within the limits, under `token`. Makes the blocks
  /// recent. Returns the number of claimed blocks; with 0 no claim exists.
  /// Errors: kInvalidArgument when the token is in use or none, kGone for an unknown or lost
  /// holder, kBusy when there are `max_claims` claims.
  Result<std::size_t> claim(HolderId holder, SpaceId space, std::span<const BlockKey> keys,
                            const Id128& token);
  /// Extends a claim of this holder by the longest sealed prefix of `keys`, which follow the keys
  /// that it has, within the limits. Returns the number of added blocks. Long claims are made in
  /// slices.
  /// Errors: kGone for a token that is unknown or was revoked, or a holder unknown or lost.
  Result<std::size_t> claim_more(HolderId holder, const Id128& token,
                                 std::span<const BlockKey> keys);
  /// The blocks of one of several claims that are made together.
  struct ClaimPart {
    SpaceId space{};
    std::span<const BlockKey> keys;  ///< At least one.
    Id128 token;                     ///< A different one for each part.
  };
  /// Claims the blocks of all parts, each part under its token, or none of them: returns false when
  /// one is missing or exceeds a limit. Such claims end together, by unclaim() of any of them or
  /// when one is revoked, and the opening of one counts for all. claim_more() does not extend them.
  /// Errors: as claim(); then none is made, and claims under these tokens stay as they were.
  Result<bool> claim_together(HolderId holder, std::span<const ClaimPart> parts);
  /// From now on the claims of this holder under these tokens are as if made together. None of them
  /// is part of another group. Errors: kGone when one of them was revoked or has ended.
  Result<void> join_claims(HolderId holder, std::span<const Id128> tokens);
  /// The bytes in the pool that a holder may still claim.
  struct ClaimRoom {
    std::uint64_t bytes = 0;      ///< Rest of its instance's share, for all blocks.
    std::uint64_t new_bytes = 0;  ///< Rest of the server's share, for blocks not held yet.
  };
  /// None for an unknown or lost holder.
  [[nodiscard]] ClaimRoom room_to_claim(HolderId holder) const;
  /// The bytes in the pool of each block of this generation; 0 if it is unknown or retired.
  [[nodiscard]] std::uint64_t frame_bytes(SpaceId space) const;
  /// Ends a claim of this holder, and those made together with it; its pins stay. Unknown tokens
  /// are fine: the claim may have been revoked.
  void unclaim(HolderId holder, const Id128& token);

  struct OpenedPages {
    std::vector<FrameIndex> frames;   ///< In the order of the claimed keys.
    std::size_t by_this_process = 0;  ///< Frames that the opening process itself saved.
    bool is_new = false;              ///< Pinned by this call, not by an earlier one.
  };
  /// Pins the claimed blocks `first` to `first + count` for `holder` under the name `pin`. A
  /// repeated call under one name changes nothing and returns the same. A long range is opened in
  /// slices: one call pins at most `limit` blocks and returns these; repeat the call until `count`
  /// blocks are pinned. A pin that lacks slices covers the blocks pinned so far. Never fails for a
  /// share.
  /// Errors: kGone when the token is unknown or was revoked, when a block of the slice was
  /// invalidated, or the holder is unknown or lost; kInvalidArgument when the range is empty or
  /// beyond the claim, or when the name is used for another range; kBusy when a block of the slice
  /// is in flight, see arrived(), or when there are `max_pins` pins.
  Result<OpenedPages> open(HolderId holder, const Id128& token, std::size_t first,
                           std::size_t count, PinId pin, std::size_t limit = ~std::size_t{0});
  /// The generation of a claim that may be opened; no value where open() would return kGone.
  [[nodiscard]] std::optional<SpaceId> space_of_claim(const Id128& token) const;
  /// Ends a pin after the holder's last copy out of it. Idempotent: an unknown pin is no error.
  void release(HolderId holder, PinId pin);
  /// The bytes of the pinned block at `place` of the pin are wrong: the block is a miss from now
  /// on, a claim on it cannot be opened there, and its frame is freed when the last claim and pin
  /// on it have ended. Its key may be reserved again at once. Returns false when the block was
  /// invalidated before.
  /// Errors: kGone when the holder has no such pin; kInvalidArgument for a place beyond it.
  Result<bool> invalidate(HolderId holder, PinId pin, std::size_t place);

  // ---- fetching, from another node or tier
  //
  // A claim may hold blocks that have not arrived yet. fetch() extends it by such blocks, and
  // returns frames for those that no earlier fetch brings. The caller brings the bytes and then
  // calls, for each frame, either fetched() or, when they will not arrive, give_up() and
  // quiesced(): once each, in any order, in any event-loop iteration. Until give_up() the same
  // frame may be filled again from another source. A frame stays reserved until quiesced(),
  // whatever happens to the claim, its holder and the generation.

  /// The blocks that a fetch may evict to get a frame.
  enum class Evicts : std::uint8_t {
    kAny,
    kReplicas,  ///< Those of the same shape: no block that exists only here is evicted.
  };
  struct Fetch {
    struct Frame {
      std::size_t place = 0;  ///< Index of its key in `keys`.
      FrameIndex frame = kNoFrame;
    };
    std::size_t blocks = 0;     ///< Blocks added to the claim.
    std::size_t in_flight = 0;  ///< Those of them that have not arrived, earlier fetches included.
    std::vector<Frame> frames = {};  ///< Those that the caller brings, in the order of keys.
  };
  /// Extends the claim under `token` by the longest prefix of `keys` of which each block is sealed,
  /// or in flight already, or, among the first `fetchable` keys, gets a frame to be fetched into.
  /// So each block has one fetch in flight, however many claims want it, and with `fetchable` 0
  /// this only joins fetches in flight. `first` is the number of blocks that the claim has; with 0
  /// there is no claim yet, and one is made unless the prefix is empty.
  ///
  /// Never waits. Ends at the first key for which none of this holds; that is being saved; that
  /// exceeds a limit of claims (see claim()), `fetch_share` or `save_reserve`; or for which there
  /// is no room even after eviction. Never revokes a claim. reserve() skips a key that is in flight
  /// like one that is being saved, so the first fetch or save of a key is the one that seals it.
  /// Costs as much as reserve(): longer chains are fetched in slices, each behind the one before.
  ///
  /// Errors: kGone for an unknown or lost holder, or when `first` is not 0 and the claim was
  /// revoked or ended; kInvalidArgument when the claim is of another holder or generation or has
  /// another number of blocks, or `token` is none; kBusy when there are `max_claims` claims. For a
  /// retired or unknown generation the prefix is empty.
  Result<Fetch> fetch(HolderId holder, SpaceId space, const Id128& token, std::size_t first,
                      std::span<const BlockKey> keys, std::size_t fetchable,
                      Evicts evicts = Evicts::kAny);
  /// Whether the blocks of all parts are within the limits now, with a frame for each one that is
  /// neither present nor in flight. Ask before a fetch of which a part is of no use: its frames
  /// cost other blocks their place. The tokens of the parts do not matter.
  [[nodiscard]] bool has_room_to_fetch(HolderId holder, std::span<const ClaimPart> parts) const;
  /// All bytes of the frame have arrived and are whole, and nothing can write to it any longer: its
  /// block is sealed, as a replica, and evictable unless a claim waits for it. Returns false when
  /// it was not sealed, because its generation was retired or it had been given up; then this is
  /// quiesced(). `frame` was returned by fetch() and has not ended.
  bool fetched(FrameIndex frame);
  /// The same for a block that was read from a disk of this node and proved itself. It is sealed as
  /// if it had been saved, not as a replica: it must not be the first to be evicted again.
  bool restored(FrameIndex frame, const ssd::Proven& proven);
  /// The same for a block that was read for another node: it is sealed as a replica, since the disk
  /// has it.
  bool staged(FrameIndex frame, const ssd::Proven& proven);
  /// The block will not arrive, or not whole. Its key may be fetched or saved again at once, in
  /// another frame, and no claim that waits for it can be opened there. A device or peer may still
  /// write to the frame: it is quarantined until quiesced(). Idempotent.
  void give_up(FrameIndex frame);
  /// No device or peer can write to the frame any longer; includes give_up(). The frame is free
  /// once the claims that waited for it have ended.
  void quiesced(FrameIndex frame);
  /// Whether a claim waits for a block that fetch() returned and that has not ended. Without one
  /// its bytes need not be requested; another claim may join until it is quiesced.
  [[nodiscard]] bool is_awaited(FrameIndex frame) const;
  /// Returns the number of blocks of the claim, from `first` on and at most `count`, that can be
  /// opened now: up to the first that is in flight. Call again from that one on after a fetched(),
  /// give_up() or quiesced(): each call visits the blocks that it counts and one more.
  /// Errors: kGone when the token is unknown or was revoked, or the block at `first` was given up
  /// or invalidated; kInvalidArgument when the range is empty or beyond the claim.
  [[nodiscard]] Result<std::size_t> arrived(const Id128& token, std::size_t first,
                                            std::size_t count) const;
  /// The frame of the claim's block at `place`; no value where open() would return kGone, or beyond
  /// the claim's end.
  [[nodiscard]] std::optional<FrameIndex> claimed_frame(const Id128& token,
                                                        std::size_t place) const;

  // ---- copying, to a tier below
  //
  // A tier reads blocks in place without holding them. It discards a copy when the listener reports
  // that the frame's block was dropped meanwhile: the bytes of a sealed block do not change before.

  /// Reports sealed and dropped blocks to `listener` from now on, which outlives the store or is
  /// replaced by null.
  void set_listener(BlockListener* listener);
  struct Resident {
    SpaceId space{};
    BlockKey key;
    ShapeId shape{};
    bool is_replica = false;
    bool was_used = false;   ///< Claimed or lent since it was saved, or read from a disk.
    bool came_back = false;  ///< Evicted and saved again, as far as the eviction policy knows.
    Depth depth = kUnknownDepth;
  };
  /// The block of a frame; no value unless it is sealed and was not invalidated.
  [[nodiscard]] std::optional<Resident> resident(FrameIndex frame) const;
  /// The bytes of this frame's block are wrong; see the function above. Returns false when the
  /// frame has no resident block.
  bool invalidate(FrameIndex frame);
  /// Appends the blocks, of each shape, that are evicted next when `bytes` of it are saved; fewer
  /// by what is free. At most `most` of each shape; none that are replicas. A forecast.
  void next_victims(std::uint64_t bytes, std::size_t most, std::vector<FrameIndex>& frames) const;
  /// All sealed blocks that are no replicas, the last used first. O(frames): for a shutdown.
  [[nodiscard]] std::vector<FrameIndex> residents() const;

  // ---- lending, to another node

  struct Lent {
    LeaseId lease{};  ///< None when there are no frames.
    std::vector<FrameIndex> frames = {};
  };
  /// Lends the longest sealed prefix of `keys` within the limits to a reader on another node. The
  /// blocks become recent, and stay where they are, like pinned ones, until end_lease(), or until
  /// `time` and `lease_margin` have passed here. A lease is no claim: it is never revoked, survives
  /// a reset of the namespace, and takes no share of an instance. It is shortened to what
  /// `lend_share` and `server_share` allow.
  /// Errors: kInvalidArgument unless `time` is above 0 and at most `longest_lease`; kBusy when
  /// there are `max_leases` leases.
  Result<Lent> lend(SpaceId space, std::span<const BlockKey> keys, Duration time);
  /// The reader has ended its reads. Unknown leases are fine: the lease may have expired.
  void end_lease(LeaseId lease);
  /// Whether its frames may still be read: it was neither ended nor expired by expire().
  [[nodiscard]] bool is_lent(LeaseId lease) const;

  // ---- writing

  /// Treatment of a key whose room is not available yet.
  enum class NoRoom : std::uint8_t { kSkip, kStop };
  /// Whether the eviction policy may keep its blocks rather than save a new one. Never for a save
  /// that another engine waits for.
  enum class MayRefuse : bool { kNo, kYes };

  /// Reserves a frame for each of `keys` that is neither sealed nor reserved, under `job`, and
  /// evicts other blocks if it must. May be called several times for one job: long jobs are
  /// reserved in slices (of `slice_blocks` keys). Frames are returned in the order of `keys`;
  /// kNoFrame means that the key is skipped (present, being saved or fetched, or no room).
  ///
  /// With several shards the first one to call decides each key for all of them; the others get the
  /// same result, and the timeout starts with the first call. `first` is the index of keys[0] in
  /// the job. Each shard that called must publish() or abandon(). With one shard `first` has no
  /// meaning, the timeout starts with the first frame, and a job for which every key is skipped
  /// does not exist.
  ///
  /// When no block is evictable, it does at most one slice of queued work, which may include claims
  /// that it revokes; keys that then still have no frame are skipped. With NoRoom::kStop it returns
  /// results only for the keys before the first whose room is still being made by an exchange of
  /// extents: repeat the call for the rest in a later event-loop iteration. Each such call does its
  /// share of the exchange.
  ///
  /// `depths`: what the client sent for each key (see depth_from_sent()), for the tier below; keys
  /// beyond its end are of unknown depth. `may_refuse`: a key may also be skipped because the
  /// eviction policy refuses it; the slices of a job are one save for the policy.
  /// Errors: kGone for an unknown or lost holder, for a retired generation, or when the job was
  /// forgotten meanwhile; kInvalidArgument when the job belongs to another holder, generation or
  /// number of shards, was published by this one, when this one has no page in such blocks, or
  /// `first` lies beyond the keys that this shard
  /// has reserved; kBusy when there are `max_reservations` jobs.
  Result<std::vector<FrameIndex>> reserve(HolderId holder, SpaceId space, const JobId& job,
                                          std::size_t first, std::span<const BlockKey> keys,
                                          NoRoom no_room = NoRoom::kSkip,
                                          std::span<const std::uint8_t> depths = {},
                                          MayRefuse may_refuse = MayRefuse::kNo);
  /// The frames that the job still has to publish, in the order in which reserve() returned them.
  /// Empty where publish() would return kGone. Valid until the next call that changes something.
  [[nodiscard]] std::span<const FrameIndex> frames_of(HolderId holder, const JobId& job) const;
  /// The generation whose blocks a job writes; no value for a job that is unknown or forgotten.
  [[nodiscard]] std::optional<SpaceId> space_of_job(const JobId& job) const;
  /// All copies of the job into this holder's shard ended and are whole. The last shard seals at
  /// most `limit` of its blocks, the last one first, and gets the number that is left: it repeats
  /// the call until 0. The other shards get 0.
  /// Errors: kGone when the job was forgotten (timeout, reset, a lost connection, another shard's
  /// abandon), or when its shards reserved different keys: nothing is sealed, and its quarantined
  /// frames are freed once no shard is writing. Also for a job that does not exist or of which this
  /// holder has reserved nothing.
  Result<std::size_t> publish(HolderId holder, const JobId& job,
                              std::size_t limit = ~std::size_t{0});
  /// All copies of the job into this holder's shard ended, and the blocks are not good: they are
  /// forgotten for all shards, and their frames returned once no shard is writing. Unknown jobs are
  /// fine.
  void abandon(HolderId holder, const JobId& job);

  // ---- the journal, for subscribers

  /// From now on the store records which blocks become findable and which cease to be. Costs a ring
  /// of 5 MiB, and 40 bytes written per block; nothing before the first call. Never ends; a second
  /// call changes nothing.
  /// Errors: kOutOfCapacity.
  Result<void> keep_journal();

  struct JournalEntry {
    BlockKey key;
    bool is_present = false;  ///< False: it is gone.
    std::uint8_t place = 0;   ///< Its generation among those that were given.
    Depth depth = kUnknownDepth;
  };
  struct JournalPart {
    std::vector<JournalEntry> entries;  ///< In order, of the requested generation.
    std::uint64_t next = 0;             ///< The position to continue from.
    bool has_lost = false;              ///< Entries after the requested position were overwritten.
    bool has_more = false;              ///< There are more entries from `next` on.
  };
  static constexpr std::uint64_t kJournalEnd = ~std::uint64_t{0};
  /// The entries about blocks of `space` from position `from` on (kJournalEnd: none yet, only the
  /// end's position); visits no more than `limit` entries. A sealed block is present; it is gone
  /// when it was evicted, cleaned or invalidated. A retired generation has no entries for its
  /// blocks: there are simply no further ones. That a block is present is recorded again when a
  /// claim or a save meets it. Empty without keep_journal().
  [[nodiscard]] JournalPart journal(SpaceId space, std::uint64_t from, std::size_t limit) const;
  /// The same for several generations, at most 256: their entries in one order.
  [[nodiscard]] JournalPart journal(std::span<const SpaceId> spaces, std::uint64_t from,
                                    std::size_t limit) const;

  /// The position after the newest entry; 0 without keep_journal().
  [[nodiscard]] std::uint64_t journal_end() const;
  /// Calls `wake` once: at the next entry of the journal, or when a generation is retired. It must
  /// not call the store. Replaces an earlier one that was not called yet.
  void on_next_entry(std::function<void()> wake);

  struct Listed {
    std::vector<BlockKey> keys;
    std::vector<Depth> depths;   ///< By key.
    FrameIndex next = kNoFrame;  ///< The frame to continue from; kNoFrame: that was the last one.
  };
  /// The sealed blocks of `space` in the frames from `from` on; visits at most `limit` frames. A
  /// block that is sealed during the whole enumeration is in exactly one of its parts; the journal,
  /// from its position before the first part on, has all other changes.
  [[nodiscard]] Listed list(SpaceId space, FrameIndex from, std::size_t limit) const;

  // ---- time and background work

  /// Forgets reservations older than the timeout, and ends expired leases, at most `slice_blocks`
  /// of each. Call it at next_deadline().
  void expire();
  /// When expire() has something to do; no value while nothing is reserved or lent.
  [[nodiscard]] std::optional<TimePoint> next_deadline() const;
  /// Does one slice of the queued work; returns true while there is more.
  bool work();
  [[nodiscard]] bool has_work() const;

  struct Cleanup {
    std::uint64_t evicted_blocks = 0;
    std::uint64_t evicted_bytes = 0;
    std::uint64_t still_referenced_blocks = 0;  ///< Held or being written when visited.
    bool done = false;
  };
  /// Queues the eviction of every evictable block, in the order of frames; cleanup() reports the
  /// progress. A second call while one is in progress joins it.
  void start_cleanup();
  [[nodiscard]] const Cleanup& cleanup() const;

  /// True when no frame is reserved, in flight, quarantined, pinned, claimed or lent.
  [[nodiscard]] bool is_idle() const;

  struct Stats {
    // Frames now, and bytes of them.
    std::uint64_t pool_bytes = 0;
    std::uint64_t used_bytes = 0;  ///< Frames that are not free.
    std::uint64_t sealed_bytes = 0;
    std::uint64_t written_bytes = 0;  ///< Reserved, in flight or quarantined.
    std::uint64_t quarantined_bytes = 0;
    std::uint64_t held_bytes = 0;
    std::uint64_t fetch_bytes = 0;  ///< In flight or given up.
    std::uint64_t lent_bytes = 0;   ///< Counted once per lease.
    std::uint32_t units = 0;        ///< The units that extents consist of.
    std::uint32_t free_units = 0;
    std::uint64_t unit_steps =
        0;  ///< Steps of the search for free units since the start: its cost.
    std::uint32_t reserved = 0;
    std::uint32_t sealed = 0;  ///< Findable or of a retired generation, pinned ones included.
    std::uint32_t quarantined_timeout =
        0;  ///< Forgotten after the timeout or a reset; writer lives.
    std::uint32_t quarantined_writer_lost = 0;  ///< The writer's connection ended.
    /// Sealed blocks whose reader's connection ended, counted once per pin.
    std::uint64_t pinned_by_lost_readers = 0;
    std::uint32_t in_flight = 0;  ///< Blocks that are being fetched.
    std::uint32_t replicas = 0;   ///< The part of `sealed` that was fetched.
    /// Frames of fetches that were given up: a device or peer may still write, or a claim waits for
    /// them.
    std::uint32_t quarantined_fetch = 0;
    std::uint32_t held =
        0;  ///< Distinct blocks that are claimed, pinned or lent, including those in flight.
    std::uint64_t leases = 0;
    std::uint64_t lent = 0;  ///< Blocks, counted once per lease.
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
    /// The parts of lookup_misses, by Miss. Keys are chained: all that follows an unknown block is
    /// unknown too, so the search for reasons ends some blocks behind the last remembered one.
    MissCounts misses{};
    std::uint64_t insertions = 0;        ///< Blocks sealed by saves.
    std::uint64_t evictions = 0;         ///< Blocks evicted to make room.
    std::uint64_t evicted_replicas = 0;  ///< The replicas among them.
    std::uint64_t extents_taken = 0;     ///< Taken by one shape from another, with their blocks.
    std::uint64_t cleaned = 0;           ///< Blocks evicted by cleanup.
    std::uint64_t retired = 0;           ///< Blocks dropped with their generation.
    std::uint64_t invalidated = 0;       ///< Blocks dropped because their bytes were wrong.
    std::uint64_t skipped_present = 0;   ///< Keys that reserve() skipped: present or being saved.
    std::uint64_t skipped_no_room = 0;
    std::uint64_t skipped_refused = 0;  ///< Keys that the eviction policy refused.
    std::uint64_t claims_revoked = 0;
    std::uint64_t claims_shortened = 0;
    std::uint64_t reservations_timed_out = 0;
    std::uint64_t late_publishes = 0;    ///< publish() of a job that had been forgotten.
    std::uint64_t fetches = 0;           ///< Blocks for which fetch() returned a frame.
    std::uint64_t fetches_joined = 0;    ///< Blocks that fetch() found in flight.
    std::uint64_t fetches_no_room = 0;   ///< Calls of fetch() that ended for lack of a frame.
    std::uint64_t fetched = 0;           ///< Blocks sealed by fetched().
    std::uint64_t fetches_given_up = 0;  ///< Blocks that were not sealed.
    std::uint64_t leases_made = 0;
    std::uint64_t leases_expired = 0;  ///< Expired before the reader ended them.
    std::uint64_t leases_shortened = 0;
    AgeHistogram evicted_age;   ///< From the seal of an evicted block to its end.
    AgeHistogram dropped_age;   ///< The same of blocks dropped by a cleanup or a reset.
    AgeHistogram evicted_idle;  ///< How long an evicted block had been evictable.
  };
  [[nodiscard]] Stats stats() const;
  /// Whether the job may still be sealed: some shard has not published, or not all of it is sealed
  /// yet, and it was not forgotten. False for an unknown job.
  [[nodiscard]] bool is_saving(const JobId& job) const;
  /// How long the next victim has been evictable, for the shape where this is longest; no value
  /// when no block is evictable.
  [[nodiscard]] std::optional<std::uint32_t> next_victim_idle_s() const;
  /// The part of the pool that a shape has.
  struct ShapeStats {
    std::uint32_t number = 0;  ///< Its id.
    Shape shape{};
    std::uint64_t frame_bytes = 0;
    std::uint32_t extents = 0;
    std::uint64_t frames = 0;  ///< Frames of its extents.
    std::uint32_t used = 0;    ///< Those that are not free.
  };
  [[nodiscard]] std::vector<ShapeStats> shapes() const;
  /// Bytes of the index and tables, without the pool.
  [[nodiscard]] std::uint64_t memory_bytes() const;

  /// The frame of the `n`-th evictable block, counted from the one that became evictable last.
  /// O(frames); for tests that damage a block.
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
