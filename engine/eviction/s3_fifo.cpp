#include "engine/eviction/s3_fifo.h"

#include <utility>

namespace pegaflow::engine {

Result<std::unique_ptr<EvictionPolicy>> S3FifoPolicy::create(BlockRows& rows,
                                                             std::uint32_t row_count,
                                                             PolicyMemory memory) {
  PEGA_TRY_LET(auto evicted, EvictedBlocks::create(row_count, memory));
  return std::unique_ptr<EvictionPolicy>(new S3FifoPolicy(rows, std::move(evicted)));
}

void S3FifoPolicy::sealed(std::uint32_t row, std::uint32_t hash) {
  rows_.stamp(row);
  const bool is_known = evicted_->take(hash).has_value();
  rows_[row].note = is_known ? kInMain : 0;
  (is_known ? main_ : small_).push_back(rows_, row);
  count(row, 1);
}

void S3FifoPolicy::taken(std::uint32_t row) {
  rows_[row].note |= kTaken;
  count(row, ~std::uint32_t{0});
  used_again(row);
}

void S3FifoPolicy::used_again(std::uint32_t row) {
  if ((rows_[row].note & kCount) < kCount) ++rows_[row].note;
}

void S3FifoPolicy::released(std::uint32_t row) {
  rows_.stamp(row);
  rows_[row].note &= kCount | kInMain;
  count(row, 1);
}

void S3FifoPolicy::freed(std::uint32_t row, std::uint32_t hash, Freed why) {
  const bool is_in_main = (rows_[row].note & kInMain) != 0;
  (is_in_main ? main_ : small_).erase(rows_, row);
  count(row, ~std::uint32_t{0});
  rows_[row].note = 0;
  if (why == Freed::kEvicted && !is_in_main) evicted_->add(hash, 1);
}

void S3FifoPolicy::count(std::uint32_t row, std::uint32_t by) noexcept {
  evictable_ += by;
  if ((rows_[row].note & kInMain) != 0) main_evictable_ += by;
}

bool S3FifoPolicy::small_is_due() const noexcept {
  const std::uint64_t all = std::uint64_t{small_.size()} + main_.size();
  return !small_.is_empty() && (std::uint64_t{small_.size()} * 10 > all || main_evictable_ == 0);
}

std::uint32_t S3FifoPolicy::victim() {
  if (evictable_ == 0) return kNone;
  // Terminates: an evictable row is in the queue that is due, or gets there, and each pass
  // decrements its count.
  for (;;) {
    const bool is_small = small_is_due();
    Queue& queue = is_small ? small_ : main_;
    const std::uint32_t row = queue.front();
    Block& block = rows_[row];
    if ((block.note & (kCount | kTaken)) == 0) return row;
    queue.erase(rows_, row);
    if (is_small) {
      block.note = (block.note & kTaken) | kInMain;
      if ((block.note & kTaken) == 0) ++main_evictable_;
    } else if ((block.note & kCount) != 0) {
      --block.note;
    }
    main_.push_back(rows_, row);
  }
}

/// As if no block was used again; those in the small queue go first.
void S3FifoPolicy::next_victims(std::size_t most, std::vector<std::uint32_t>& rows) const {
  std::size_t steps = 2 * most;  // Rows that are taken are in the queues too.
  for (const Queue* const queue : {&small_, &main_}) {
    std::uint32_t row = queue->front();
    for (; row != kNone && most != 0 && steps != 0; row = queue->next(rows_, row), --steps) {
      if ((rows_[row].note & kTaken) != 0) continue;
      rows.push_back(row);
      --most;
    }
  }
}

Result<void> S3FifoPolicy::check(const std::function<bool(std::uint32_t)>& is_evictable) const {
  std::uint32_t evictable = 0;
  std::uint32_t main_evictable = 0;
  for (const Queue* const queue : {&small_, &main_}) {
    std::uint32_t listed = 0;
    for (std::uint32_t row = queue->front(); row != kNone; row = queue->next(rows_, row)) {
      const std::uint32_t note = rows_[row].note;
      if (++listed > queue->size() || ((note & kInMain) != 0) != (queue == &main_)) {
        return fail(Errc::kInternal, "row {} is in the wrong queue", row);
      }
      if (((note & kTaken) == 0) != is_evictable(row)) {
        return fail(Errc::kInternal, "row {} is counted as evictable and is not, or the reverse",
                    row);
      }
      evictable += (note & kTaken) == 0 ? 1 : 0;
      main_evictable += (note & (kTaken | kInMain)) == kInMain ? 1 : 0;
    }
    if (listed != queue->size()) return fail(Errc::kInternal, "a queue of rows is broken");
  }
  if (evictable != evictable_ || main_evictable != main_evictable_) {
    return fail(Errc::kInternal, "{} rows are evictable, {} counted; {} and {} in the large queue",
                evictable, evictable_, main_evictable, main_evictable_);
  }
  return {};
}

}  // namespace pegaflow::engine
