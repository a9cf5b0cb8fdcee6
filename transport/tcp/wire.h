#pragma once
/// \file
/// The messages of the socket lane: four of fixed size, little-endian like every supported machine.
/// None of them contains an address.
///
///     reader                                                      holder
///       | Hello {magic, version, expected incarnation}           --> |
///       | <--       Welcome {magic, version, verdict, own incarnation} |
///       | Request {id, slot, region, offset, size}               --> |
///       | <--   Response {id, slot, verdict, size, checksum} and bytes |
///
/// A reader sends requests ahead, as many as its window allows. The slot of a request names its
/// batch, chunk and place in a table of the reader's. Responses come in the order of the requests;
/// the reader does not rely on it.

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

/// A holder's result for a greeting or a request.
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
  std::uint64_t wanted_high = 0;  ///< The incarnation that the reader expects.
  std::uint64_t wanted_low = 0;
};

struct Welcome {
  std::uint32_t magic = kMagic;
  std::uint16_t version = kWireVersion;
  Verdict verdict = Verdict::kGood;
  std::uint64_t holder_high = 0;  ///< The incarnation that responds.
  std::uint64_t holder_low = 0;
};

struct Request {
  std::uint64_t request_id = 0;  ///< A rising number of the reader's; echoed in the response.
  std::uint32_t slot = 0;        ///< Index in the reader's window; echoed in the response.
  std::uint32_t region = 0;
  std::uint64_t offset = 0;
  std::uint32_t size_bytes = 0;
  std::uint32_t reserved = 0;
};

struct Response {
  std::uint64_t request_id = 0;
  std::uint32_t slot = 0;
  /// Bytes that follow: as requested, or 0 with a verdict other than kGood.
  std::uint32_t size_bytes = 0;
  std::uint64_t checksum = 0;  ///< XXH3-64 of the bytes that follow.
  Verdict verdict = Verdict::kGood;
  std::uint16_t reserved = 0;
  std::uint32_t magic = kMagic;  ///< Detects at once that the two ends are out of step.
};

static_assert(sizeof(Hello) == 24 && sizeof(Welcome) == 24);
static_assert(sizeof(Request) == 32 && sizeof(Response) == 32);
static_assert(std::has_unique_object_representations_v<Hello> &&
              std::has_unique_object_representations_v<Welcome> &&
              std::has_unique_object_representations_v<Request> &&
              std::has_unique_object_representations_v<Response>);

/// Returns the message at the beginning of `bytes`, which contain a complete one.
template <typename Message>
Message message_of(std::span<const std::byte> bytes) noexcept {
  Message message;
  std::memcpy(&message, bytes.data(), sizeof message);
  return message;
}

}  // namespace pegaflow::tcp
