#pragma once
/// \file
/// A node that lies, and what it has: see lying_node_main.cpp.

#include <cstddef>
#include <cstdint>

namespace pegaflow::testing {

enum class Lie : std::uint8_t {
  kNone,          ///< Right bytes: shows that nobody distrusts it for another reason.
  kUnasked,       ///< Bytes for a question that nobody asked.
  kOtherPlace,    ///< Bytes for a question under the place of another one.
  kBeyondPlaces,  ///< The same, under one that there is not.
  kTwice,         ///< The right bytes, and then others for the same question.
  kLonger,        ///< More bytes than were asked for, under their checksum.
  kShorter,       ///< Less.
  kOtherBytes,    ///< As many, under the checksum of the right ones.
  kOldLife,       ///< Its lane answers as an incarnation before.
  kOldVerdict,    ///< Its lane says that it is none that the reader means.
};

inline constexpr std::size_t kLyingPageBytes = std::size_t{512} << 10;
inline constexpr std::size_t kLyingBlocks = 32;
/// It has the blocks of this number and of those behind it.
inline constexpr std::uint64_t kFirstLyingBlock = 1;

/// The byte at `i` of a lie: 16 that come nowhere else, again and again.
constexpr std::byte lying_byte(std::size_t i) {
  constexpr char kText[] = "THIS is a LIE!\xE1\xE2";
  return static_cast<std::byte>(kText[i % 16]);
}

}  // namespace pegaflow::testing
