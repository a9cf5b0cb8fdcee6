#pragma once
/// \file
/// Types shared by the host and the kernels. Also compiled by nvcc, so plain structs only.

#include <cstdint>

namespace pegaflow::cuda {

/// A run of bytes that every block has, at most kPieceBytes of one segment.
struct Piece {
  std::uint64_t base;         ///< Its address in block 0, on the device.
  std::uint64_t stride;       ///< From one block to the next, in bytes.
  std::uint64_t page_offset;  ///< The offset of its first byte in the page.
  std::uint32_t bytes;
  std::uint32_t unit;  ///< All of the above are multiples of it: 16, 8, 4, 2 or 1.
};

/// The most pages of one launch: a kernel's arguments may have 4 KiB.
inline constexpr std::uint32_t kMovePages = 960;

/// The arguments of gather and scatter: complete pages, or some pieces of one page.
struct MoveArguments {
  std::uint64_t pieces;  ///< Piece[], on the device, from the first that is moved.
  std::uint64_t staging;
  std::uint64_t pitch;   ///< From one page to the next in staging.
  std::uint64_t origin;  ///< The page offset at the beginning of staging.
  std::uint32_t piece_count;
  std::uint32_t page_count;
  std::uint32_t group;  ///< Threads that move one piece: a power of two, at most kThreads.
  /// The block of each page. Stored here and not in host memory: reads from there beside copies
  /// that fill the bus would keep the threads waiting for longer than they move bytes.
  std::uint32_t blocks[kMovePages];
};
static_assert(sizeof(MoveArguments) <= 4096);

/// The most pages of one launch of pull.
inline constexpr std::uint32_t kPullPages = 480;

/// The arguments of pull: pages of a peer's blocks, into blocks of this engine.
struct PullArguments {
  std::uint64_t pieces;        ///< Piece[], on the device, from the first that is copied.
  std::uint64_t peers_pieces;  ///< The same of the peer's blocks; their units count.
  std::uint32_t piece_count;
  std::uint32_t page_count;
  std::uint32_t group;  ///< As in MoveArguments.
  std::uint32_t blocks[kPullPages];
  std::uint32_t peers_blocks[kPullPages];
};
static_assert(sizeof(PullArguments) <= 4096);

/// The arguments of the two kernels that compute the checksums of pages in staging.
struct HashArguments {
  std::uint64_t staging;
  std::uint64_t pitch;
  std::uint64_t sums;    ///< uint64[pages][blocks of a page][8], scratch.
  std::uint64_t hashes;  ///< uint64[pages], the result.
  std::uint64_t page_bytes;
  std::uint32_t page_count;
};

inline constexpr unsigned kThreads = 512;  ///< A block of gather, scatter and the sums.
inline constexpr unsigned kHashThreads = 32;

}  // namespace pegaflow::cuda
