#pragma once
/// \file
/// The frames of a claim or a pin.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "engine/types/ids.h"

namespace pegaflow::engine {

/// A list that is made, in one or several pieces, and then only shrinks. A few frames are stored
/// inline: otherwise a hundred thousand pins on one block each would be as many allocations, which
/// the allocator, once they are freed, would merge in the middle of another call.
class FrameList {
 public:
  static constexpr std::size_t kInside = 3;  ///< Frames that are stored inline.

  FrameList() = default;
  explicit FrameList(std::span<const FrameIndex> frames)
      : size_(static_cast<std::uint32_t>(frames.size())) {
    if (frames.size() > kInside) outside_ = std::make_unique_for_overwrite<FrameIndex[]>(size_);
    std::copy(frames.begin(), frames.end(), outside_ ? outside_.get() : inside_.data());
  }
  /// `first`, followed by `others`.
  FrameList(const FrameList& first, std::span<const FrameIndex> others)
      : size_(first.size_ + static_cast<std::uint32_t>(others.size())) {
    if (size_ > kInside) outside_ = std::make_unique_for_overwrite<FrameIndex[]>(size_);
    FrameIndex* const to = outside_ ? outside_.get() : inside_.data();
    std::copy(others.begin(), others.end(), std::copy(first.begin(), first.end(), to));
  }
  FrameList(FrameList&& other) noexcept
      : size_(std::exchange(other.size_, 0)),
        inside_(other.inside_),
        outside_(std::move(other.outside_)) {}
  FrameList& operator=(FrameList&& other) noexcept {
    size_ = std::exchange(other.size_, 0);
    inside_ = other.inside_;
    outside_ = std::move(other.outside_);
    return *this;
  }
  ~FrameList() = default;

  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] const FrameIndex* data() const noexcept {
    return outside_ ? outside_.get() : inside_.data();
  }
  [[nodiscard]] const FrameIndex* begin() const noexcept { return data(); }
  [[nodiscard]] const FrameIndex* end() const noexcept { return data() + size_; }
  [[nodiscard]] FrameIndex operator[](std::size_t place) const noexcept { return data()[place]; }
  void pop_back() noexcept { --size_; }

 private:
  std::uint32_t size_ = 0;
  std::array<FrameIndex, kInside> inside_{};
  std::unique_ptr<FrameIndex[]> outside_;
};
static_assert(sizeof(FrameList) == 24);

}  // namespace pegaflow::engine
