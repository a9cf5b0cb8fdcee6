#pragma once
/// \file
/// The reservations: by job, by deadline, and the forgotten ones whose writers may still write.

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/error.h"
#include "engine/rights/rows.h"
#include "engine/tables/block_row.h"
#include "engine/tables/flat_index.h"
#include "engine/tables/row_table.h"

namespace pegaflow::engine {

/// Keeps each job in its lists (by deadline, of its generation), and its writers in those of their
/// holders.
///
/// Forgetting a job costs a step per shard, however many frames it has: a frame that is being
/// written is quarantined by the fate of its job.
class JobTable {
 public:
  static constexpr std::uint32_t kNone = FlatIndex::kNone;

  /// Errors: kOutOfCapacity.
  static Result<JobTable> create(std::uint32_t max_jobs);

  [[nodiscard]] bool is_full() const noexcept { return rows_.size() == max_jobs_; }
  [[nodiscard]] std::uint32_t size() const noexcept { return rows_.size(); }
  [[nodiscard]] std::uint32_t live_count() const noexcept { return live_; }
  [[nodiscard]] std::uint32_t find(const JobId& id) const;
  /// Adds a live job without frames and writers. Its id is not in use and the table is not full.
  /// Shards of 0 bytes, according to `shape`, count as published.
  std::uint32_t add(const JobId& id, std::uint32_t shards, Space& space, const Shape& shape,
                    std::uint64_t frame_bytes, TimePoint deadline);
  /// The holder writes its shard of a live job from now on; its shard has no writer yet.
  void add_writer(std::uint32_t row, Holder& holder);
  /// The writer of that shard has the results of the first `keys` keys.
  void note_requested(std::uint32_t row, std::uint32_t shard, std::size_t keys);
  /// Whether every shard has the result of every key that was decided.
  [[nodiscard]] bool all_know_all(std::uint32_t row) const;
  /// Whether that shard has a page in the job's blocks.
  [[nodiscard]] bool has_page(std::uint32_t row, std::uint32_t shard) const {
    return rows_[row].writers[shard] != Job::kNoPage;
  }
  /// The writer of that shard, or null: it has not reserved anything, is done, or has no page.
  [[nodiscard]] const ShardWriter* writer(std::uint32_t row, std::uint32_t shard) const;
  /// Adds the result for the next key of a job of several shards.
  void add_answer(std::uint32_t row, FrameIndex frame) { rows_[row].answers.push_back(frame); }
  /// Adds a frame to a live job; pop_frame() removes the last one from a job.
  void add_frame(std::uint32_t row, FrameIndex frame);
  FrameIndex pop_frame(std::uint32_t row);
  /// The copies of that shard ended, and are whole.
  void publish(std::uint32_t row, std::uint32_t shard);
  /// A live job becomes a forgotten one: kWriterLost if a shard that has not published has lost its
  /// holder, else kForgotten. Shards that have published are done with it.
  void forget(std::uint32_t row);
  /// That shard no longer writes to the forgotten job, if it ever did.
  void end_shard(std::uint32_t row, std::uint32_t shard);
  /// No shard writes to the forgotten job any longer: the queued work frees its frames.
  void end(std::uint32_t row);
  /// Its deadline has passed: late shards of the job no longer get an error for it.
  void leave_due(std::uint32_t row);
  /// Removes a live job without frames, all of whose shards published.
  void finish(std::uint32_t row);
  void set_queued(std::uint32_t row, bool queued) { rows_[row].is_queued = queued; }
  /// Removes an ended job if it has no references left; returns true if it did.
  bool remove_if_unused(std::uint32_t row);

  /// Whether the job can still be sealed. False once a writer has left or the generation was
  /// retired, even if the queued work has not reached the job yet.
  [[nodiscard]] bool may_publish(std::uint32_t row) const;
  /// Whether the block is written by a job that can still be sealed.
  [[nodiscard]] bool is_being_saved(const Block& block) const {
    return block.state == FrameState::kWritten && may_publish(block.owner);
  }

  [[nodiscard]] const Job& operator[](std::uint32_t row) const noexcept { return rows_[row]; }
  [[nodiscard]] const ShardWriter& writer_row(std::uint32_t row) const noexcept {
    return writers_[row];
  }
  [[nodiscard]] bool knows(std::uint32_t row) const noexcept { return rows_.knows(row); }
  /// The job whose deadline comes first, or kNone.
  [[nodiscard]] std::uint32_t first_due() const noexcept { return by_deadline_.front(); }
  /// Frames of all jobs with that fate, and their bytes.
  [[nodiscard]] std::uint32_t frames(Job::Fate fate) const noexcept {
    return frames_[static_cast<std::size_t>(fate)];
  }
  [[nodiscard]] std::uint64_t bytes(Job::Fate fate) const noexcept {
    return bytes_[static_cast<std::size_t>(fate)];
  }
  [[nodiscard]] std::uint64_t memory_bytes() const noexcept {
    return rows_.memory_bytes() + writers_.memory_bytes() + by_id_.memory_bytes();
  }

 private:
  JobTable(std::uint32_t max_jobs, FlatIndex by_id);
  void leave_live(Job& job, std::uint32_t row);
  /// Calls `is(writer)` for each shard that has requested and is not done, until it is true.
  template <typename Is>
  [[nodiscard]] bool any_writer(const Job& job, Is&& is) const;
  void drop_writer(Job& job, std::uint32_t shard, IndexList<&ShardWriter::of_holder>& list);
  void unname_if_over(Job& job, std::uint32_t row);
  void count(const Job& job, std::size_t frames, bool more) noexcept;
  void set_fate(Job& job, Job::Fate fate);

  std::uint32_t max_jobs_;
  RowTable<Job> rows_;
  RowTable<ShardWriter> writers_;
  FlatIndex by_id_;
  IndexList<&Job::by_deadline> by_deadline_;  ///< One timeout for all: in the order of adding.
  std::uint32_t live_ = 0;
  std::array<std::uint32_t, 4> frames_{};  ///< By fate.
  std::array<std::uint64_t, 4> bytes_{};   ///< By fate.
};

}  // namespace pegaflow::engine
