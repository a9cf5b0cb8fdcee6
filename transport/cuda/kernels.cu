/// \file
/// The kernels: move pieces of blocks to and from staging, and compute checksums of pages there.
///
/// Loaded through the driver API from a fat binary; transport/meson.build compiles it.

#include <cstdint>

#include "transport/cuda/kernels.h"
#include "transport/cuda/page_hash.h"

namespace {

using namespace pegaflow::cuda;

/// Eight loads in flight per thread, 128 KiB on a multiprocessor. The fewer threads it takes to
/// move as much, the more are left to the engine.
template <typename Unit>
__device__ void copy_units(const char* from, char* to, unsigned bytes, unsigned lane,
                           unsigned lanes) {
  const Unit* const source = reinterpret_cast<const Unit*>(from);
  Unit* const target = reinterpret_cast<Unit*>(to);
  const unsigned count = bytes / sizeof(Unit);
  unsigned i = lane;
  constexpr unsigned kAhead = 8;
  for (; i + (kAhead - 1) * lanes < count; i += kAhead * lanes) {
    Unit units[kAhead];
#pragma unroll
    for (unsigned u = 0; u < kAhead; ++u) units[u] = source[i + u * lanes];
#pragma unroll
    for (unsigned u = 0; u < kAhead; ++u) target[i + u * lanes] = units[u];
  }
  for (; i < count; i += lanes) target[i] = source[i];
}

__device__ void copy_piece(const char* from, char* to, const Piece& piece, unsigned lane,
                           unsigned lanes) {
  switch (piece.unit) {
    case 16: return copy_units<uint4>(from, to, piece.bytes, lane, lanes);
    case 8: return copy_units<uint2>(from, to, piece.bytes, lane, lanes);
    case 4: return copy_units<unsigned>(from, to, piece.bytes, lane, lanes);
    case 2: return copy_units<unsigned short>(from, to, piece.bytes, lane, lanes);
    default: return copy_units<char>(from, to, piece.bytes, lane, lanes);
  }
}

template <bool kGather>
__device__ void move(const MoveArguments& a) {
  const Piece* const pieces = reinterpret_cast<const Piece*>(a.pieces);
  const unsigned groups = kThreads / a.group;
  const unsigned lane = threadIdx.x % a.group;
  const std::uint64_t items = std::uint64_t{a.page_count} * a.piece_count;
  const std::uint64_t step = std::uint64_t{gridDim.x} * groups;
  std::uint64_t item = std::uint64_t{blockIdx.x} * groups + threadIdx.x / a.group;
  if (item >= items) return;
  Piece next = pieces[item % a.piece_count];
  for (; item < items; item += step) {
    const auto page = static_cast<std::uint32_t>(item / a.piece_count);
    const Piece piece = next;
    if (item + step < items) next = pieces[(item + step) % a.piece_count];  // Prefetched.
    char* const block = reinterpret_cast<char*>(piece.base + a.blocks[page] * piece.stride);
    char* const staged =
        reinterpret_cast<char*>(a.staging + page * a.pitch + (piece.page_offset - a.origin));
    if (kGather) {
      copy_piece(block, staged, piece, lane, a.group);
    } else {
      copy_piece(staged, block, piece, lane, a.group);
    }
  }
}

/// Reads the peer's memory over the link between the GPUs, or in this GPU.
__device__ void pull(const PullArguments& a) {
  const Piece* const pieces = reinterpret_cast<const Piece*>(a.pieces);
  const Piece* const peers = reinterpret_cast<const Piece*>(a.peers_pieces);
  const unsigned groups = kThreads / a.group;
  const unsigned lane = threadIdx.x % a.group;
  const std::uint64_t items = std::uint64_t{a.page_count} * a.piece_count;
  const std::uint64_t step = std::uint64_t{gridDim.x} * groups;
  std::uint64_t item = std::uint64_t{blockIdx.x} * groups + threadIdx.x / a.group;
  if (item >= items) return;
  Piece next_to = pieces[item % a.piece_count];
  Piece next_from = peers[item % a.piece_count];
  for (; item < items; item += step) {
    const auto page = static_cast<std::uint32_t>(item / a.piece_count);
    const Piece to = next_to;
    const Piece from = next_from;
    if (item + step < items) {
      next_to = pieces[(item + step) % a.piece_count];
      next_from = peers[(item + step) % a.piece_count];
    }
    copy_piece(reinterpret_cast<const char*>(from.base + a.peers_blocks[page] * from.stride),
               reinterpret_cast<char*>(to.base + a.blocks[page] * to.stride), from, lane, a.group);
  }
}

__device__ std::uint64_t add_lanes(std::uint64_t value) {
  // Threads 8 and 16 apart have the same lane of the hash.
  value += __shfl_xor_sync(0xFFFFFFFFU, value, 8);
  return value + __shfl_xor_sync(0xFFFFFFFFU, value, 16);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(pegaflow::cuda::kThreads, 2)
    pega_gather(const __grid_constant__ MoveArguments arguments) {
  move<true>(arguments);
}

extern "C" __global__ void __launch_bounds__(pegaflow::cuda::kThreads, 2)
    pega_scatter(const __grid_constant__ MoveArguments arguments) {
  move<false>(arguments);
}

extern "C" __global__ void __launch_bounds__(pegaflow::cuda::kThreads, 2)
    pega_pull(const __grid_constant__ PullArguments arguments) {
  pull(arguments);
}

/// A warp computes the sums of one block of a page.
extern "C" __global__ void __launch_bounds__(pegaflow::cuda::kThreads)
    pega_hash_sums(HashArguments a) {
  const std::uint64_t blocks = hash_blocks(a.page_bytes);
  const std::uint64_t warps = std::uint64_t{gridDim.x} * (kThreads / 32);
  const unsigned thread = threadIdx.x % 32;
  const unsigned lane = thread % kHashLanes;
  for (std::uint64_t item = std::uint64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
       item < a.page_count * blocks; item += warps) {
    const std::uint64_t page = item / blocks;
    const std::uint64_t* const words = reinterpret_cast<const std::uint64_t*>(
        a.staging + page * a.pitch + item % blocks * kHashBlock);
    std::uint64_t products = 0;
    std::uint64_t plain = 0;
#pragma unroll
    for (unsigned k = 0; k < 4; ++k) {
      const std::uint64_t word = words[thread + 32 * k];
      products += hash_product(word, lane, 8 * ((thread + 32 * k) / kHashLanes));
      plain += word;
    }
    products = add_lanes(products);
    plain = add_lanes(plain);
    const std::uint64_t sum = products + __shfl_xor_sync(0xFFFFFFFFU, plain, 1);
    if (thread < kHashLanes) reinterpret_cast<std::uint64_t*>(a.sums)[item * kHashLanes + lane] = sum;
  }
}

/// A warp, of which eight threads compute, follows the chain of one page.
extern "C" __global__ void __launch_bounds__(pegaflow::cuda::kHashThreads)
    pega_hash_chain(HashArguments a) {
  const std::uint64_t blocks = hash_blocks(a.page_bytes);
  const unsigned thread = threadIdx.x;
  const unsigned lane = thread % kHashLanes;
  for (std::uint64_t page = blockIdx.x; page < a.page_count; page += gridDim.x) {
    const std::uint64_t* const sums =
        reinterpret_cast<const std::uint64_t*>(a.sums) + page * blocks * kHashLanes + lane;
    std::uint64_t state = hash_start(lane);
    std::uint64_t block = 0;
    for (; block + 8 <= blocks; block += 8) {  // Eight loads at once, ahead of the chain.
      std::uint64_t ahead[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) ahead[k] = sums[(block + k) * kHashLanes];
#pragma unroll
      for (int k = 0; k < 8; ++k) state = hash_scramble(state + ahead[k], lane);
    }
    for (; block < blocks; ++block) state = hash_scramble(state + sums[block * kHashLanes], lane);

    const unsigned char* const bytes =
        reinterpret_cast<const unsigned char*>(a.staging + page * a.pitch);
    const auto add = [&](std::uint64_t at, unsigned secret_byte) {
      std::uint64_t word = 0;  // The last stripe may begin anywhere.
      for (unsigned k = 0; k < 8; ++k) word |= std::uint64_t{bytes[at + lane * 8 + k]} << (8 * k);
      state += hash_product(word, lane, secret_byte);
      state += __shfl_xor_sync(0xFFFFFFFFU, word, 1);
    };
    const unsigned stripes = hash_tail_stripes(a.page_bytes);
    for (unsigned n = 0; n < stripes; ++n) add(blocks * kHashBlock + n * kHashStripe, 8 * n);
    add(a.page_bytes - kHashStripe, kLastStripeSecret);

    std::uint64_t all[kHashLanes];
#pragma unroll
    for (unsigned i = 0; i < kHashLanes; ++i) all[i] = __shfl_sync(0xFFFFFFFFU, state, i);
    if (thread == 0) reinterpret_cast<std::uint64_t*>(a.hashes)[page] = hash_finish(all, a.page_bytes);
  }
}
