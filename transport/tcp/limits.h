#pragma once
/// \file
/// Sizes that the two ends of the lane share.

#include <cstddef>

namespace pegaflow::tcp {

/// The largest response. Our own requests are smaller (TcpFabric::Options::piece_bytes); a holder
/// rejects larger ones, since it computes the checksum of a response in one go.
inline constexpr std::size_t kMaximumPieceBytes = 4 << 20;

/// Bytes that the thread moves for one connection before it serves the others.
inline constexpr std::size_t kIterationBytes = 1 << 20;

/// Bytes of the responses in one system call, and of one receive: half of a current core's
/// second-level cache, so that the second of checksum and kernel copy finds the bytes there.
inline constexpr std::size_t kGroupBytes = 256 << 10;

}  // namespace pegaflow::tcp
