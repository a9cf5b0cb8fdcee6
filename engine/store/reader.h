#pragma once
/// \file
/// Lookups, claims and pins.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/clock.h"
#include "engine/block_store.h"
#include "engine/rights/claim_table.h"
#include "engine/rights/holder_table.h"
#include "engine/rights/job_table.h"
#include "engine/rights/pin_table.h"
#include "engine/rights/space_table.h"
#include "engine/store/reclaimer.h"
#include "engine/store/resident_blocks.h"

namespace pegaflow::engine {

/// The calls of clients that read: they look blocks up, claim them, pin them and release them.
/// Thread-bound.
///
/// Functions with the name of one of BlockStore's are its implementation.
class Reader {
 public:
  /// All of them outlive it.
  Reader(const Clock& clock, ResidentBlocks& blocks, HolderTable& holders, SpaceTable& spaces,
         ClaimTable& claims, PinTable& pins, const JobTable& jobs, Reclaimer& reclaimer)
      : clock_(clock),
        blocks_(blocks),
        holders_(holders),
        spaces_(spaces),
        claims_(claims),
        pins_(pins),
        jobs_(jobs),
        reclaimer_(reclaimer) {}

  [[nodiscard]] std::size_t lookup(SpaceId space, std::span<const BlockKey> keys);
  [[nodiscard]] std::size_t present(SpaceId space, std::span<const BlockKey> keys) const;
  [[nodiscard]] std::uint64_t present_each(SpaceId space, std::span<const BlockKey> keys) const;
  [[nodiscard]] std::uint64_t held_each(SpaceId space, std::span<const BlockKey> keys) const;
  void note_lookup(SpaceId space, std::span<const BlockKey> keys, std::size_t found,
                   std::size_t elsewhere);

  Result<std::size_t> claim(HolderId holder, SpaceId space, std::span<const BlockKey> keys,
                            const Id128& token);
  Result<std::size_t> claim_more(HolderId holder, const Id128& token,
                                 std::span<const BlockKey> keys);
  Result<bool> claim_together(HolderId holder, std::span<const BlockStore::ClaimPart> parts);
  Result<void> join_claims(HolderId holder, std::span<const Id128> tokens);
  [[nodiscard]] BlockStore::ClaimRoom room_to_claim(HolderId holder);
  [[nodiscard]] std::uint64_t frame_bytes(SpaceId space) const;
  void unclaim(HolderId holder, const Id128& token);
  [[nodiscard]] std::optional<SpaceId> space_of_claim(const Id128& token) const;
  [[nodiscard]] Result<std::size_t> arrived(const Id128& token, std::size_t first,
                                            std::size_t count) const;
  [[nodiscard]] std::optional<FrameIndex> claimed_frame(const Id128& token,
                                                        std::size_t place) const;

  Result<BlockStore::OpenedPages> open(HolderId holder, const Id128& token, std::size_t first,
                                       std::size_t count, PinId pin, std::size_t limit);
  void release(HolderId holder, PinId pin);
  Result<bool> invalidate(HolderId holder, PinId pin, std::size_t place);

  // ---- for fetches, which extend claims by blocks that have not arrived

  /// The row of the claim of `first` blocks that a fetch may extend; kNone if there is no claim
  /// under this token yet. Errors: those of BlockStore::fetch() about the claim.
  Result<std::uint32_t> extensible(const Holder& owner, SpaceId space, const Id128& token,
                                   std::size_t first) const;
  /// Adds held blocks to the claim in `row`; creates a claim if `row` is kNone. Returns its row.
  std::uint32_t extend_claim(std::uint32_t row, Holder& owner, Space& space, const Id128& token,
                             std::span<const FrameIndex> frames);

  /// Adds its part of the statistics.
  void report(BlockStore::Stats& stats) const;

 private:
  /// Bit i: the block of keys[i] is readable, and `has` returns true for its frame.
  template <typename Has>
  [[nodiscard]] std::uint64_t mask_of(SpaceId space, std::span<const BlockKey> keys, Has has) const;

  struct Counters {
    std::uint64_t lookups = 0;
    std::uint64_t lookup_hits = 0;
    std::uint64_t lookup_misses = 0;
    MissCounts misses{};
    std::uint64_t claims_shortened = 0;
  };

  /// Counts a lookup that found the first `found` keys; the `elsewhere` keys behind them are in
  /// other tiers, and the `readable` ones behind those are present.
  void count_lookup(SpaceId space, std::span<const BlockKey> keys, std::size_t found,
                    std::size_t elsewhere, std::size_t readable);
  /// Checks that a new claim may have the token. Errors: kInvalidArgument.
  [[nodiscard]] Result<void> check_unused(const Id128& token) const;
  /// Counts the reasons why the keys from the first miss of a lookup on were not found.
  void count_misses(const Space& space, std::span<const BlockKey> missing);
  [[nodiscard]] Miss why_missing(const Space& space, const BlockKey& key, FrameIndex frame) const;
  /// Blocks `first` to `first + count` of the claim. Errors: kInvalidArgument.
  static Result<std::span<const FrameIndex>> range_of(const Claim& claim, std::size_t first,
                                                      std::size_t count);
  [[nodiscard]] BlockStore::OpenedPages pages_of(std::span<const FrameIndex> frames,
                                                 std::uint32_t writer_tag) const;

  const Clock& clock_;
  ResidentBlocks& blocks_;
  HolderTable& holders_;
  SpaceTable& spaces_;
  ClaimTable& claims_;
  PinTable& pins_;
  const JobTable& jobs_;  ///< Why a block is missing: its save may be in progress.
  Reclaimer& reclaimer_;
  Counters counted_;
};

}  // namespace pegaflow::engine
