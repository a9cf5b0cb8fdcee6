#pragma once
/// \file
/// Blocks that are fetched from another node or tier.

#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/block_store.h"
#include "engine/rights/holder_table.h"
#include "engine/rights/job_table.h"
#include "engine/rights/space_table.h"
#include "engine/store/reclaimer.h"
#include "engine/store/resident_blocks.h"

namespace pegaflow::engine {

class Reader;

/// The calls that bring blocks from another node or tier. A fetch has no row of its own: the row of
/// its frame has its state, and the Reader extends the claim that waits for it. Thread-bound.
///
/// Functions with the name of one of BlockStore's are its implementation.
class Fetcher {
 public:
  /// All of them outlive it.
  Fetcher(const BlockStore::Options& options, ResidentBlocks& blocks, HolderTable& holders,
          SpaceTable& spaces, const JobTable& jobs, Reader& reader, Reclaimer& reclaimer);

  Result<BlockStore::Fetch> fetch(HolderId holder, SpaceId space, const Id128& token,
                                  std::size_t first, std::span<const BlockKey> keys,
                                  std::size_t fetchable, BlockStore::Evicts evicts);
  [[nodiscard]] bool has_room_to_fetch(HolderId holder,
                                       std::span<const BlockStore::ClaimPart> parts) const;
  bool fetched(FrameIndex frame) { return seal(frame, kReplica); }
  bool restored(FrameIndex frame, const ssd::Proven&) { return seal(frame, kRestored); }
  bool staged(FrameIndex frame, const ssd::Proven&) { return seal(frame, kReplica); }
  void give_up(FrameIndex frame);
  void quiesced(FrameIndex frame);
  [[nodiscard]] bool is_awaited(FrameIndex frame) const;

  /// Adds its part of the statistics.
  void report(BlockStore::Stats& stats) const;

 private:
  struct Counters {
    std::uint64_t fetches = 0;
    std::uint64_t fetches_joined = 0;
    std::uint64_t fetches_no_room = 0;
    std::uint64_t fetched = 0;
    std::uint64_t fetches_given_up = 0;
    std::uint64_t claims_shortened = 0;
  };

  bool seal(FrameIndex frame, std::uint32_t writer);
  [[nodiscard]] bool is_being_saved(FrameIndex frame) const;
  /// Takes a frame to fetch this block into. `present` is the frame that the index has for the key,
  /// or kNoFrame: see ResidentBlocks::free_key(). Returns kNoFrame when limits or room do not allow
  /// a fetch.
  FrameIndex bring(const Space& space, const BlockKey& key, FrameIndex present,
                   BlockStore::Evicts evicts, std::uint32_t& steps);

  const BlockStore::Options& options_;
  ResidentBlocks& blocks_;
  HolderTable& holders_;
  SpaceTable& spaces_;
  const JobTable& jobs_;  ///< A block that is being saved is not fetched.
  Reader& reader_;
  Reclaimer& reclaimer_;
  const std::uint64_t fetch_limit_;  ///< Bytes of frames of fetches: `fetch_share`.
  const std::uint64_t busy_limit_;   ///< For BlockTable::busy_bytes(): all but `save_reserve`.
  Counters counted_;
};

}  // namespace pegaflow::engine
