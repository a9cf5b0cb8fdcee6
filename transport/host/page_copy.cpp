#include "transport/host/page_copy.h"

#include <algorithm>
#include <cstring>

#include <emmintrin.h>

namespace pegaflow {
namespace {

/// Small enough for a second-level cache, large enough that the cost of the calls is negligible.
constexpr std::uint64_t kPieceBytes = 32 * 1024;

/// memcpy does not read the destination of larger pieces either.
constexpr std::uint64_t kMostStreamedBytes = 16384;
constexpr std::uint64_t kLineBytes = 64;

bool is_streamed(const std::byte* to, std::uint64_t bytes) {
  return bytes <= kMostStreamedBytes && bytes % kLineBytes == 0 &&
         reinterpret_cast<std::uintptr_t>(to) % sizeof(__m128i) == 0;
}

/// memcpy that writes around the cache. Visible to other threads after _mm_sfence().
void stream(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  for (std::uint64_t at = 0; at < bytes; at += kLineBytes) {
    const auto* const source = reinterpret_cast<const __m128i*>(from + at);
    auto* const target = reinterpret_cast<__m128i*>(to + at);
    const __m128i a = _mm_loadu_si128(source);
    const __m128i b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2);
    const __m128i d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
}

}  // namespace

void copy_page(const PageLayout& layout, Device::Direction direction, std::uint32_t block,
               std::byte* page) noexcept {
  for (const Segment& segment : layout.segments()) {
    std::byte* const piece = segment.base + block * segment.block_stride_bytes;
    if (direction == Device::Direction::kSave) {
      std::memcpy(page, piece, segment.size_bytes);
    } else if (is_streamed(piece, segment.size_bytes)) {
      stream(piece, page, segment.size_bytes);
    } else {
      std::memcpy(piece, page, segment.size_bytes);
    }
    page += segment.size_bytes;
  }
  _mm_sfence();
}

std::uint64_t copy_page(const PageLayout& layout, Device::Direction direction, std::uint32_t block,
                        std::byte* page, PageChecksum& checksum) noexcept {
  checksum.reset();
  for (const Segment& segment : layout.segments()) {
    std::byte* at = segment.base + block * segment.block_stride_bytes;
    for (std::uint64_t left = segment.size_bytes; left != 0;) {
      const std::uint64_t bytes = std::min(left, kPieceBytes);
      if (direction == Device::Direction::kSave) {
        std::memcpy(page, at, bytes);
      } else {
        std::memcpy(at, page, bytes);
      }
      checksum.add({at, bytes});
      at += bytes;
      page += bytes;
      left -= bytes;
    }
  }
  return checksum.value();
}

std::uint64_t checksum_of(const PageLayout& layout, std::uint32_t block,
                          PageChecksum& checksum) noexcept {
  checksum.reset();
  for (const Segment& segment : layout.segments()) {
    checksum.add({segment.base + block * segment.block_stride_bytes, segment.size_bytes});
  }
  return checksum.value();
}

}  // namespace pegaflow
