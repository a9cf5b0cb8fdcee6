#include "index/cells.h"

#include <algorithm>
#include <bit>

#include "base/assert.h"

namespace pegaflow::index {
namespace {

// A segment is emptied in one go, about 30 us, and is much longer than an event.
constexpr std::size_t kMostSegmentCells = 1024;
constexpr std::size_t kFewestSegmentCells = 16;
constexpr std::size_t kMoreSegments = 8;  // The reserve, the one being filled, and some to gain.
constexpr std::size_t kBeyond = 16;       // Readers compare a few cells at once, past the last too.

}  // namespace

Result<Cells> Cells::create(std::size_t max_blocks) {
  const std::size_t segment_cells =
      std::clamp(std::bit_floor(max_blocks / 64), kFewestSegmentCells, kMostSegmentCells);
  const std::size_t segments = (max_blocks + max_blocks / 8) / segment_cells + kMoreSegments;
  const std::size_t count = 1 + segments * segment_cells + kBeyond;
  PEGA_TRY_LET(ZeroArray<Key> keys, ZeroArray<Key>::create(count));
  PEGA_TRY_LET(ZeroArray<CellWord> words, ZeroArray<CellWord>::create(count));
  return Cells(std::move(keys), std::move(words), static_cast<std::uint32_t>(segments),
               static_cast<std::uint32_t>(segment_cells));
}

Cells::Cells(ZeroArray<Key> keys, ZeroArray<CellWord> words, std::uint32_t segments,
             std::uint32_t segment_cells)
    : keys_(std::move(keys)),
      words_(std::move(words)),
      segment_cells_(segment_cells),
      live_in_(segments),
      line_(segments) {
  free_.reserve(segments);
  // The lowest are used first, so memory is touched from its beginning.
  for (std::uint32_t segment = segments; segment-- > 1;) free_.push_back(segment);
}

bool Cells::is_fragmented() const {
  const std::size_t in_use = (segments() - free_.size()) * segment_cells_;
  return free_.size() < segments() / 4 && in_use - live_ > in_use / 8;
}

Place Cells::append(Key key, CellWord word) {
  if (used_ == segment_cells_) {
    PEGA_ASSERT(!free_.empty(), "all {} segments are in use", segments());
    push_line(filling_);
    filling_ = free_.back();
    free_.pop_back();
    used_ = 0;
  }
  const Place place = 1 + filling_ * segment_cells_ + used_++;
  keys_[place] = key;
  words_[place] = word;
  ++live_in_[filling_];
  ++live_;
  return place;
}

void Cells::drop(Place place) {
  words_[place] = {};
  --live_in_[segment_of(place)];
  --live_;
}

std::uint32_t Cells::take_oldest() {
  PEGA_ASSERT(line_size_ > 0, "no segment of {} is full", segments());
  const std::uint32_t segment = line_[line_first_];
  line_first_ = line_first_ + 1 == line_.size() ? 0 : line_first_ + 1;
  --line_size_;
  return segment;
}

void Cells::push_line(std::uint32_t segment) {
  line_[(line_first_ + line_size_) % line_.size()] = segment;
  ++line_size_;
}

Cells::Range Cells::range_of(std::uint32_t segment) const {
  const Place begin = 1 + segment * segment_cells_;
  return {begin, begin + segment_cells_};
}

std::size_t Cells::bytes() const {
  return keys_.bytes() + words_.bytes() + (live_in_.size() + line_.size()) * sizeof(std::uint32_t);
}

}  // namespace pegaflow::index
