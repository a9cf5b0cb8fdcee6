#pragma once
/// \file
/// The checksum of a page: it tells saved bytes from bytes that were overwritten since.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace pegaflow {

/// Stands for "no checksum was taken".
inline constexpr std::uint64_t kNoChecksum = 0;

/// XXH3-64 of a page's bytes in the page's order. Every device computes the same, so that a page
/// saved by one can be compared by another.
///
/// It detects a stray write, a bad copy or bad memory. It does not protect against an attacker:
/// every process that maps the pool is trusted.
class PageChecksum {
 public:
  /// Takes some 600 bytes, once; reuse it. Without memory every value() is kNoChecksum.
  PageChecksum();
  PageChecksum(PageChecksum&&) noexcept = default;
  PageChecksum& operator=(PageChecksum&&) noexcept = default;
  ~PageChecksum();

  /// Forgets what was added.
  void reset() noexcept;
  void add(std::span<const std::byte> bytes) noexcept;
  /// The checksum of all bytes added since reset(). kNoChecksum only without memory.
  [[nodiscard]] std::uint64_t value() const noexcept;

  /// The checksum of contiguous bytes.
  static std::uint64_t of(std::span<const std::byte> page) noexcept;

 private:
  struct State;
  struct Free {
    void operator()(State* state) const noexcept;
  };
  std::unique_ptr<State, Free> state_;
};

/// The checksum of a page that several copies make up, from those of its parts in the page's order:
/// that of an only part, else the XXH3-64 of them as little-endian numbers. kNoChecksum if a part
/// has none.
std::uint64_t checksum_of_parts(std::span<const std::uint64_t> parts) noexcept;

}  // namespace pegaflow
