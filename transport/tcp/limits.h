#pragma once
/// \file
/// Sizes that the two ends of the lane share.

#include <cstddef>

namespace pegaflow::tcp {

/// Of one answer. Ours ask for less (TcpFabric::Options::piece_bytes); a holder refuses more, since
/// it takes the checksum of all of it in one go.
inline constexpr std::size_t kMaximumPieceBytes = 4 << 20;

/// How much the thread moves for one connection before it looks at the others.
inline constexpr std::size_t kIterationBytes = 1 << 20;

/// Answers that go into one system call, and bytes that come out of one: half a core's second-level
/// cache of today, so that of the checksum and the kernel's copy the second finds them in it.
inline constexpr std::size_t kGroupBytes = 256 << 10;

}  // namespace pegaflow::tcp
