#pragma once
/// \file
/// A node that lies, and its blocks: see lying_node_main.cpp.

#include <cstddef>
#include <cstdint>

namespace pegaflow::testing {

enum class Lie : std::uint8_t {
  kNone,          ///< Right bytes: shows that the reader does not reject it for another reason.
  kUnasked,       ///< Bytes for a request that was never sent.
  kOtherPlace,    ///< Bytes for a request under the slot of another one.
  kBeyondPlaces,  ///< The same, under an unknown slot.
  kTwice,         ///< The right bytes, and then others for the same request.
  kLonger,        ///< More bytes than requested, under their checksum.
  kShorter,       ///< Fewer bytes.
  kOtherBytes,    ///< The same number of bytes, under the checksum of the right ones.
  kOldLife,       ///< Its lane responds as a former incarnation.
  kOldVerdict,    ///< Its lane responds that it is another incarnation than requested.
};

inline constexpr std::size_t kLyingPageBytes = std::size_t{512} << 10;
inline constexpr std::size_t kLyingBlocks = 32;
/// The node has the blocks of this number and of later ones.
inline constexpr std::uint64_t kFirstLyingBlock = 1;

/// The byte at `i` of a lie: 16 bytes that occur nowhere else, repeated.
constexpr std::byte lying_byte(std::size_t i) {
  constexpr char kText[] = "THIS is a LIE!\xE1\xE2";
  return static_cast<std::byte>(kText[i % 16]);
}

}  // namespace pegaflow::testing
