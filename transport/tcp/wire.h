#pragma once
/// \file
/// What the socket lane says: four messages of fixed size, little-endian as every machine that we
/// run on. None of them names an address.
///
///     reader                                     holder
///       | Hello {magic, version, whom I mean}  -->  |
///       | <--   Welcome {magic, version, verdict, who I am}
///       | Request {question, slot, region, offset, size}  -->  |  as many as the reader's window
///       has | <--   Response {question, slot, verdict, size, checksum}, and that many bytes
///
/// A question has the number that a reader finds its batch, its chunk and its place by, in a table
/// of its own. Answers come in the order of the questions; the reader does not rely on it.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

namespace pegaflow::tcp {

static_assert(std::endian::native == std::endian::little, "the wire is little-endian");

/// "PGFT".
inline constexpr std::uint32_t kMagic = 0x54464750;
inline constexpr std::uint16_t kWireVersion = 1;

/// What a holder thinks of a greeting or of a question.
enum class Verdict : std::uint16_t {
  kGood = 0,
  kGone = 1,     ///< Another incarnation, or a region that is not lent.
  kInvalid = 2,  ///< No such region, or beyond its end.
  kRefused = 3,  ///< Another version.
};

struct Hello {
  std::uint32_t magic = kMagic;
  std::uint16_t version = kWireVersion;
  std::uint16_t reserved = 0;
  std::uint64_t wanted_high = 0;  ///< The incarnation that the reader means to talk to.
  std::uint64_t wanted_low = 0;
};

struct Welcome {
  std::uint32_t magic = kMagic;
  std::uint16_t version = kWireVersion;
  Verdict verdict = Verdict::kGood;
  std::uint64_t holder_high = 0;  ///< The incarnation that answers.
  std::uint64_t holder_low = 0;
};

struct Request {
  std::uint64_t request_id = 0;  ///< A rising number of the reader's; comes back as it is.
  std::uint32_t slot = 0;        ///< Where in the reader's window; comes back as it is.
  std::uint32_t region = 0;
  std::uint64_t offset = 0;
  std::uint32_t size_bytes = 0;
  std::uint32_t reserved = 0;
};

struct Response {
  std::uint64_t request_id = 0;
  std::uint32_t slot = 0;
  std::uint32_t size_bytes =
      0;                       ///< Of what follows: as asked, or 0 with a verdict that is not good.
  std::uint64_t checksum = 0;  ///< XXH3-64 of what follows.
  Verdict verdict = Verdict::kGood;
  std::uint16_t reserved = 0;
  std::uint32_t magic = kMagic;  ///< Tells at once that the two ends have lost their place.
};

static_assert(sizeof(Hello) == 24 && sizeof(Welcome) == 24);
static_assert(sizeof(Request) == 32 && sizeof(Response) == 32);
static_assert(std::has_unique_object_representations_v<Hello> &&
              std::has_unique_object_representations_v<Welcome> &&
              std::has_unique_object_representations_v<Request> &&
              std::has_unique_object_representations_v<Response>);

/// The message at the beginning of `bytes`, which hold one whole.
template <typename Message>
Message message_of(std::span<const std::byte> bytes) noexcept {
  Message message;
  std::memcpy(&message, bytes.data(), sizeof message);
  return message;
}

}  // namespace pegaflow::tcp
