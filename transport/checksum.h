#pragma once
/// \file
/// The checksum of a page: what tells bytes that were saved from bytes that somebody overwrote.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace pegaflow {

/// In place of a checksum: nobody took one.
inline constexpr std::uint64_t kNoChecksum = 0;

/// XXH3-64 of a page's bytes in the page's order. Every device computes the same, so that a page
/// saved by one can be compared by another.
///
/// It finds what a stray write, a bad copy or bad memory did. It is no proof against somebody who
/// wants to deceive: who maps the pool is trusted.
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
  /// Of what was added since reset(); never kNoChecksum, but without memory.
  [[nodiscard]] std::uint64_t value() const noexcept;

  /// Of bytes that lie in one piece.
  static std::uint64_t of(std::span<const std::byte> page) noexcept;

 private:
  struct State;
  struct Free {
    void operator()(State* state) const noexcept;
  };
  std::unique_ptr<State, Free> state_;
};

}  // namespace pegaflow
