#pragma once
/// \file
/// The question for the next blocks of a load that follows its prefill.

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "base/block_key.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"
#include "client/direct/sources.h"
#include "client/link.h"

namespace pegaflow {

/// The answer: leading blocks of the question, either in the pool or in another engine's memory.
struct NextPiece {
  std::vector<std::uint32_t> slots;      ///< In the pool.
  std::vector<std::uint64_t> checksums;  ///< Those of the slots; empty if there are none.
  std::uint64_t source = 0;              ///< That other engine, as Sources knows it; 0: the pool.
  std::vector<std::uint32_t> blocks;     ///< The numbers of its blocks.
  std::vector<BlockGuard> guards;        ///< Those of `blocks`, in their order.
  std::vector<std::uint64_t> gone;       ///< Engines that Sources knows and that have left.
  /// Neither has the first block, after all of the question's patience.
  bool is_late = false;
  /// Why the memory of `source` cannot be read.
  std::optional<Error> unreadable;
};

/// The arguments of openNext.
struct NextQuestion {
  std::uint64_t pin = 0;
  std::span<const BlockKey> keys;
  Duration patience{};     ///< At most kLongestNextWait.
  bool pool_only = false;  ///< No other engine's memory.
  Id128 node{};            ///< That of the engine that computes the prompt; none: not known.
};

/// The server's limit.
inline constexpr Duration kLongestNextWait = std::chrono::seconds(10);

/// Asks the server, and enters an engine that it names in `sources`, which outlive the promise, if
/// the answer `is_wanted`: else the pin was released, and the engine's turn may be another one's.
/// `deadline` comes on top of the question's patience. After an error with kTimeout the server may
/// still execute the call: the caller releases the pin.
/// Errors: as Link::call(), and the server's.
kj::Promise<Result<NextPiece>> ask_next(Link& link, Sources& sources, const NextQuestion& question,
                                        Duration deadline, std::function<bool()> is_wanted);

}  // namespace pegaflow
