#pragma once
/// \file
/// The questions and answers of a CacheSession.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/block_key.h"
#include "base/clock.h"
#include "base/id128.h"
#include "client/kinds.h"

namespace pegaflow {

enum class SessionTicket : std::uint64_t {};

/// The answer to a lookup or a claim.
struct SessionAnswer {
  /// Leading keys that are sealed, here or at another node, or claimed. With several kinds: leading
  /// units that can be restored; 0: none beyond those that the engine has itself.
  std::size_t blocks = 0;
  bool complete = false;   ///< All ranks of the instance are connected; else blocks is 0.
  Id128 token;             ///< The claim's; none for a lookup or an empty claim.
  std::size_t coming = 0;  ///< Those of the blocks, at the end, that another node has.
  /// For a lookup: the number of blocks after the sealed ones here which
  /// Mover::load_following() would read out of another engine's memory.
  std::size_t offered = 0;
  /// For a claim: the predicted arrival of the first and the last of them, counted from the
  /// answer; 0: unknown.
  Duration first{};
  Duration last{};
  /// For a claim with several kinds: the claimed blocks, all of those that the units need.
  std::vector<KindRange> ranges{};
};

/// The lengths at which a prompt can be restored, for a namespace with several kinds.
struct SessionBoundaries {
  bool complete = false;  ///< As in SessionAnswer; else there are none.
  /// Ascending; each stands for so many times the alignment.
  std::vector<std::uint32_t> multiples{};
};

/// The time in which the engine computes blocks that it does not load.
struct SessionCompute {
  Duration delay{};      ///< Before computing begins.
  Duration per_block{};  ///< 0: unknown.
};

/// Hints of a router, from a request, about the nodes that have its blocks. They may be wrong.
struct SessionHints {
  std::vector<Id128> nodes{};  ///< Incarnations, 8 at most; asked first instead of all.
  bool no_nodes = false;       ///< Blocks of other nodes are not wanted.
  Id128 prefill_node{};        ///< That of the engine that computes the prompt, for lookups.
};

/// Entries about the blocks of the session's namespace, one per key.
struct SessionJournal {
  std::uint64_t space = 0;  ///< With `position`: the arguments of the next question.
  std::uint64_t position = 0;
  bool lost = false;           ///< Earlier entries are missing: any block may be gone.
  bool more = false;           ///< More entries are available: ask again.
  std::vector<BlockKey> keys;  ///< In the order of the events.
  std::vector<bool> there;     ///< For each key: its block became findable; false: it no longer is.
  std::vector<std::uint8_t> kinds;  ///< For each key: the kind of its block.
};

/// The outcome of a reset by this session's server.
struct SessionReset {
  std::uint64_t generation = 0;
  /// Addresses of nodes that did not confirm it in time: their own engines may still find older
  /// blocks until those nodes can be reached.
  std::vector<std::string> unconfirmed = {};
};

}  // namespace pegaflow
