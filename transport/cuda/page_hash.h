#pragma once
/// \file
/// XXH3-64 of long inputs in parts that can be computed in parallel; also compiled by nvcc.
///
/// The hash adds up 16 stripes of 64 bytes, then scrambles, repeatedly. Within such a block of 1
/// KiB all sums may be computed in any order, by many threads; only the chain of scrambles is
/// serial, and short. The result equals PageChecksum's, which
/// tests/unit/transport/cuda_device_test.cpp compares. Constants and steps: xxHash 0.8
/// (BSD-2-Clause), XXH3_hashLong_64b with the default secret.

#include <cstdint>

#ifdef __CUDACC__
#define PEGA_HASH_FN __host__ __device__ inline
#define PEGA_HASH_TABLE __device__ __constant__ const
#else
#define PEGA_HASH_FN inline
#define PEGA_HASH_TABLE inline constexpr
#endif

namespace pegaflow::cuda {

inline constexpr std::uint64_t kHashBlock = 1024;
inline constexpr std::uint64_t kHashStripe = 64;
inline constexpr unsigned kHashStripes = 16;  ///< Per block.
inline constexpr unsigned kHashLanes = 8;     ///< Words of a stripe, and of the state.
/// Shorter inputs have another hash; no page is shorter.
inline constexpr std::uint64_t kHashLeastBytes = 241;

inline constexpr std::uint64_t kPrime32A = 0x9E3779B1U;
inline constexpr std::uint64_t kPrime32B = 0x85EBCA77U;
inline constexpr std::uint64_t kPrime32C = 0xC2B2AE3DU;
inline constexpr std::uint64_t kPrime64A = 0x9E3779B185EBCA87ULL;
inline constexpr std::uint64_t kPrime64B = 0xC2B2AE3D27D4EB4FULL;
inline constexpr std::uint64_t kPrime64C = 0x165667B19E3779F9ULL;
inline constexpr std::uint64_t kPrime64D = 0x85EBCA77C2B2AE63ULL;
inline constexpr std::uint64_t kPrime64E = 0x27D4EB2F165667C5ULL;

/// The default secret, as little-endian words.
PEGA_HASH_TABLE std::uint64_t kHashSecret[24] = {
    0xBE4BA423396CFEB8ULL, 0x1CAD21F72C81017CULL, 0xDB979083E96DD4DEULL, 0x1F67B3B7A4A44072ULL,
    0x78E5C0CC4EE679CBULL, 0x2172FFCC7DD05A82ULL, 0x8E2443F7744608B8ULL, 0x4C263A81E69035E0ULL,
    0xCB00C391BB52283CULL, 0xA32E531B8B65D088ULL, 0x4EF90DA297486471ULL, 0xD8ACDEA946EF1938ULL,
    0x3F349CE33F76FAA8ULL, 0x1D4F0BC7C7BBDCF9ULL, 0x3159B4CD4BE0518AULL, 0x647378D9C97E9FC8ULL,
    0xC3EBD33483ACC5EAULL, 0xEB6313FAFFA081C5ULL, 0x49DAF0B751DD0D17ULL, 0x9E68D429265516D3ULL,
    0xFCA1477D58BE162BULL, 0xCE31D07AD1B8F88FULL, 0x280416958F3ACB45ULL, 0x7E404BBBCAFBD7AFULL,
};

PEGA_HASH_FN std::uint64_t hash_secret(unsigned byte) {
  const unsigned word = byte / 8;
  const unsigned shift = byte % 8 * 8;
  const std::uint64_t low = kHashSecret[word] >> shift;
  return shift == 0 ? low : low | kHashSecret[word + 1] << (64 - shift);
}

/// Full blocks that end in a scramble.
PEGA_HASH_FN std::uint64_t hash_blocks(std::uint64_t bytes) { return (bytes - 1) / kHashBlock; }

/// Whole stripes after them, before the last 64 bytes, which are hashed once more.
PEGA_HASH_FN unsigned hash_tail_stripes(std::uint64_t bytes) {
  return static_cast<unsigned>(((bytes - 1) - hash_blocks(bytes) * kHashBlock) / kHashStripe);
}

PEGA_HASH_FN std::uint64_t hash_start(unsigned lane) {
  switch (lane) {
    case 0:
      return kPrime32C;
    case 1:
      return kPrime64A;
    case 2:
      return kPrime64B;
    case 3:
      return kPrime64C;
    case 4:
      return kPrime64D;
    case 5:
      return kPrime32B;
    case 6:
      return kPrime64E;
    default:
      return kPrime32A;
  }
}

/// The product that a word adds to its own lane; it adds itself to the neighbor (lane ^ 1).
PEGA_HASH_FN std::uint64_t hash_product(std::uint64_t word, unsigned lane, unsigned secret_byte) {
  const std::uint64_t keyed = word ^ hash_secret(secret_byte + lane * 8);
  return (keyed & 0xFFFFFFFFU) * (keyed >> 32);
}

inline constexpr unsigned kLastStripeSecret = 192 - 64 - 7;

PEGA_HASH_FN std::uint64_t hash_scramble(std::uint64_t state, unsigned lane) {
  return (state ^ (state >> 47) ^ hash_secret(192 - 64 + lane * 8)) * kPrime32A;
}

PEGA_HASH_FN std::uint64_t hash_fold(std::uint64_t a, std::uint64_t b) {
#ifdef __CUDA_ARCH__
  return (a * b) ^ __umul64hi(a, b);
#else
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
#endif
}

PEGA_HASH_FN std::uint64_t hash_finish(const std::uint64_t* state, std::uint64_t bytes) {
  std::uint64_t result = bytes * kPrime64A;
  for (unsigned i = 0; i < 4; ++i) {
    result += hash_fold(state[2 * i] ^ hash_secret(11 + 16 * i),
                        state[2 * i + 1] ^ hash_secret(11 + 16 * i + 8));
  }
  result ^= result >> 37;
  result *= 0x165667919E3779F9ULL;
  return result ^ (result >> 32);
}

}  // namespace pegaflow::cuda
