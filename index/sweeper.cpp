#include "index/sweeper.h"

#include <algorithm>

namespace pegaflow::index {
namespace {

// A block of several holders is worth as much as two passes of the hand.
constexpr std::uint32_t kShared = 2;
// The table's cache line of a cell is requested so many cells ahead.
constexpr Place kAhead = 12;

}  // namespace

void Sweeper::add_dead(std::uint32_t bit) {
  if (next_ == 1) {
    dying_.push_back(bit);
  } else {
    waiting_.push_back(bit);
  }
}

bool Sweeper::sweep(std::size_t max_cells) {
  while (max_cells > 0 && !dying_.empty()) {
    const std::size_t left = tables_.cells.last_place() + std::size_t{1} - next_;
    const std::size_t count = std::min(max_cells, left);
    visit_next(count);
    max_cells -= count;
    if (next_ > tables_.cells.last_place()) end_pass();
  }
  while (max_cells > 0 && tables_.cells.is_fragmented()) {
    join_oldest();
    max_cells -= std::min<std::size_t>(max_cells, tables_.cells.segment_cells());
  }
  return !dying_.empty() || tables_.cells.is_fragmented();
}

void Sweeper::finish() {
  while (!dying_.empty()) {
    visit_next(tables_.cells.last_place() + std::size_t{1} - next_);
    end_pass();
  }
}

void Sweeper::visit_next(std::size_t count) {
  const Place end = next_ + static_cast<Place>(count);
  for (; next_ != end; ++next_) {
    if (tables_.cells.words()[next_].set() != HolderSets::kEmpty) revive(next_);
  }
  swept_ += count;
}

void Sweeper::end_pass() {
  for (const std::uint32_t bit : dying_) tables_.holders.free_bit(bit);
  dying_.clear();
  dying_.swap(waiting_);
  next_ = 1;
}

bool Sweeper::revive(Place place) {
  const SetId former = tables_.cells.words()[place].set();
  const SetId set = tables_.sets.living(former);
  if (set == HolderSets::kRefused) {
    // Its holders without the dead ones are a set for which there is no memory.
    ++refused_;
    tables_.forget(place);
    return false;
  }
  tables_.change_set(place, set);
  return set != HolderSets::kEmpty;
}

void Sweeper::make_room_now() {
  for (std::uint32_t pressure = 0; tables_.cells.live() >= max_blocks_; ++pressure) {
    pass_oldest(pressure);
  }
  while (!tables_.cells.has_room()) join_oldest();
}

void Sweeper::pass_oldest(std::uint32_t pressure) {
  Cells& cells = tables_.cells;
  const std::uint32_t segment = cells.take_oldest();
  const auto [begin, end] = cells.range_of(segment);
  for (Place place = begin; place != end; ++place) {
    tables_.places.prefetch(cells.keys()[std::min(place + kAhead, end - 1)]);
    if (cells.words()[place].set() == HolderSets::kEmpty || !revive(place)) continue;
    const CellWord word = cells.words()[place];
    const bool is_shared = tables_.sets.size(word.set()) > 1;
    if (word.credit() + (is_shared ? kShared : 0) <= pressure) {
      tables_.forget(place);
      ++evicted_;
    } else if (word.credit() > 0) {
      cells.word(place) = CellWord::of(word.set(), word.credit() - 1);
    }
  }
  if (cells.live_in(segment) == 0) {
    cells.free_segment(segment);
  } else {
    cells.keep_segment(segment);
  }
}

void Sweeper::join_oldest() {
  Cells& cells = tables_.cells;
  const std::uint32_t segment = cells.take_oldest();
  if (cells.is_dense(segment)) return cells.keep_segment(segment);
  const auto [begin, end] = cells.range_of(segment);
  for (Place place = begin; place != end && cells.live_in(segment) > 0; ++place) {
    tables_.places.prefetch(cells.keys()[std::min(place + kAhead, end - 1)]);
    // A dead bit must not get past the hand of the sweep to where it has been already.
    if (cells.words()[place].set() == HolderSets::kEmpty || !revive(place)) continue;
    tables_.move_to_end(place);
    ++moved_;
  }
  cells.free_segment(segment);
}

}  // namespace pegaflow::index
