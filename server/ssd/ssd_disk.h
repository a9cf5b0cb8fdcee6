#pragma once
/// \file
/// One disk of the SSD tier: its log of blocks, driven over a Disk.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/block_key.h"
#include "base/clock.h"
#include "base/error.h"
#include "engine/ssd/index.h"
#include "engine/ssd/names.h"
#include "engine/ssd/proof.h"
#include "engine/ssd/segment_log.h"
#include "server/ssd/aligned_buffer.h"
#include "server/ssd/breaker.h"
#include "server/ssd/latency_breaker.h"
#include "transport/disk/disk.h"

namespace pegaflow::engine::ssd {
class Scan;
}  // namespace pegaflow::engine::ssd

namespace pegaflow::server {

/// Stores blocks on one disk and reads them back. A block that is read is delivered with its proof
/// or not at all, so no write waits for a flush: what a crash or a power cut leaves is found by a
/// scan of the tables, and what they damage fails its proof.
///
/// The exception is a reset: reset() reports only once the epoch is durable. A disk that cannot
/// take it is left: nothing is read from it again, and its superblocks are overwritten as far as
/// possible.
///
/// No call waits for the disk, except open(). Its owner passes every completion of the Disk to
/// completed(), and calls poll() once a second. Every job ends with exactly one call of its `done`,
/// inside completed() or in the destructor of the owner's Disk. Thread-bound.
class SsdDisk {
 public:
  struct Options {
    std::uint64_t size_bytes = 0;                            ///< The size of the file.
    std::uint64_t segment_bytes = std::uint64_t{128} << 20;  ///< For a file without content.
    bool format = false;  ///< Overwrite a file that is not a cache of this format.
    Duration table_delay = std::chrono::seconds(1);
    std::size_t scan_reads = 32;  ///< In flight.
    /// The memory of the index: where it is not enough for more blocks, the oldest segments are
    /// dropped before the disk is full. 0: no limit.
    std::uint64_t index_bytes = 0;
    /// Bugs that a test plants to show that the simulator detects them.
    struct Mistakes {
      bool skips_proof = false;        ///< Blocks are delivered without a check.
      bool epoch_not_flushed = false;  ///< A reset is reported before it is durable.
      bool keeps_forgotten = false;    ///< A write whose memory changed is kept.
      bool keeps_damaged = false;      ///< A block that differs from its writer's is kept.
      bool drop_spares_scan = false;   ///< A scan in flight finds dropped blocks.
    } mistakes{};
  };
  enum class State : std::uint8_t {
    kOpening,
    kScanning,
    kReady,
    kReadOnly,  ///< Writes failed repeatedly.
    kLeft,      ///< Nothing is read or written: a reset could not be recorded.
  };

  /// `clock` outlives it.
  SsdDisk(std::unique_ptr<Disk> disk, const Options& options, const Clock& clock);
  /// Waits for all I/O. Jobs that have not ended report a failure.
  ~SsdDisk();
  SsdDisk(const SsdDisk&) = delete;
  SsdDisk& operator=(const SsdDisk&) = delete;

  /// Reads the superblock, or writes one to an empty file; begins a new opening, durably. `wait`
  /// returns after at least one completion has been passed to completed(). Call it once.
  /// Errors: kRefused for a file of another program or format, a damaged one, and one that is
  /// smaller than it was, unless `format` is set; kInvalidArgument when `index_bytes` are not
  /// enough for two segments; those of the disk.
  Result<void> open(const std::function<void()>& wait);
  /// Begins to find the blocks; nothing is written before it has ended.
  void start_scan();
  void completed(Disk::Completion&& completion);
  /// Writes tables that are due, and looks whether the disk is slow.
  void poll();

  // ---- blocks

  /// A block and its memory, a span for each page that has bytes. The spans are as long as the
  /// pages, rounded up to 4 KiB.
  struct Block {
    engine::ssd::Origin origin;
    BlockKey key;
    std::vector<std::span<std::byte>> memory{};
    std::vector<std::uint64_t> page_bytes{};
    /// Adds a page of `bytes` at this place of the pool.
    void add(std::span<std::byte> pool, std::uint64_t offset, std::uint64_t bytes);
    [[nodiscard]] std::uint64_t bytes() const;  ///< On the disk.
  };

  /// Whether the disk has the block and may be read. One whose namespace has another epoch is not
  /// there, nor one of an earlier opening while serve_recovered(false).
  [[nodiscard]] bool has(const engine::ssd::SpaceName& name, const engine::ssd::Epoch& epoch,
                         const BlockKey& key) const;
  /// Whether the disk has the block, and is not asked for it because it is slow.
  [[nodiscard]] bool hides(const engine::ssd::SpaceName& name, const engine::ssd::Epoch& epoch,
                           const BlockKey& key) const;
  /// Whether a block that is here should be written again when it leaves the pool: it was read, and
  /// its segment is one of the next to be used again.
  [[nodiscard]] bool is_leaving(const engine::ssd::Origin& origin, const BlockKey& key) const;

  struct Loaded {
    std::optional<engine::ssd::Proven> proven;  ///< None: the block could not be read.
    std::vector<std::uint64_t> checksums;  ///< By page, where its writer took the same; or empty.
  };
  using OnLoaded = std::function<void(Loaded&&)>;
  /// Reads the block into its memory. Returns false when it is not there; then `done` is not
  /// called.
  bool read(Block block, OnLoaded done);
  /// A read in flight missed its deadline: the disk may hang, and is not read before every such
  /// read has ended, with late_read_ended().
  void read_is_late() noexcept { ++late_reads_; }
  void late_read_ended() noexcept { --late_reads_; }

  static constexpr std::uint64_t kNoChecksum = 0;
  /// A name for a write in flight.
  using WriteId = std::uint64_t;
  enum class Written : std::uint8_t {
    kKept,
    kForgotten,
    kFailed,
    kDamaged,  ///< Its bytes are not those of its writer, and it is not kept.
  };
  using OnWritten = std::function<void(Written)>;
  /// Writes the block. `checksums` are those of its writer, by page, kNoChecksum for a page without
  /// one. No value when the disk takes no block now; then `done` is not called.
  std::optional<WriteId> write(const Block& block, std::vector<std::uint64_t> checksums,
                               OnWritten done);
  /// The memory of this write will change: the block is not kept. Unknown ones are fine.
  void forget(WriteId write);
  /// Whether a block of that size is taken now.
  [[nodiscard]] bool takes_blocks() const;
  [[nodiscard]] std::uint64_t most_block_bytes() const { return log_->most_bytes(); }

  // ---- epochs

  /// The epochs that the disk has recorded, by name.
  [[nodiscard]] const std::vector<engine::ssd::NameRecord>& names() const {
    return names_.records();
  }
  /// Records the epoch if it is newer: its older blocks are not found from now on. `done(true)`
  /// once no older block can be found after a power cut either, perhaps at once; `done(false)` when
  /// that failed, and the disk was left.
  void reset(const engine::ssd::SpaceName& name, const engine::ssd::Epoch& epoch,
             std::function<void(bool)> done);
  /// Whether blocks of earlier openings are found. True at first.
  void serve_recovered(bool serve) { serves_recovered_ = serve; }
  /// No block that is here now is found again, durably. `done` as for reset(), except that a disk
  /// that cannot record it is not left. While an earlier one is in flight, later ones wait and are
  /// recorded together.
  void drop_all(std::function<void(bool)> done);

  // ---- stopping, reports

  /// Writes all tables, flushes, and calls `done`. To be called after the last write().
  void sync(std::function<void()> done);

  struct Stats {
    State state = State::kOpening;
    std::uint64_t capacity_bytes = 0;  ///< The bytes of all segments.
    std::uint64_t segments = 0;
    std::uint64_t free_segments = 0;
    std::uint64_t blocks = 0;
    std::uint64_t index_bytes = 0;
    std::uint64_t read_bytes = 0;
    std::uint64_t read_blocks = 0;
    std::uint64_t written_bytes = 0;  ///< Without tables.
    std::uint64_t written_blocks = 0;
    std::uint64_t reclaimed_blocks = 0;  ///< Lost with a segment that was used again.
    std::uint64_t table_bytes = 0;
    std::uint64_t proof_failures = 0;
    std::uint64_t read_errors = 0;
    std::uint64_t write_errors = 0;
    std::uint64_t forgotten_writes = 0;
    std::uint64_t damaged_blocks = 0;  ///< Written with other bytes than their writer's.
    double read_seconds = 0;           ///< The sum over all reads, waiting included.
    std::uint64_t scanned_segments = 0;
    std::uint64_t recovered_blocks = 0;
    double scan_seconds = 0;
    bool is_breaker_open = false;         ///< Or a read is late.
    bool is_slow = false;                 ///< Not read, because its reads take too long.
    std::uint64_t index_limit_bytes = 0;  ///< 0: none.
  };
  [[nodiscard]] Stats stats() const;
  [[nodiscard]] State state() const noexcept { return state_; }
  [[nodiscard]] const Disk::Attributes& attributes() const { return disk_->attributes(); }
  [[nodiscard]] Disk::Stats disk_stats() const { return disk_->stats(); }
  /// Jobs, tables and records whose I/O has not ended.
  [[nodiscard]] std::size_t in_flight() const noexcept { return pending_.size(); }
  /// Errors: kInternal that names the first broken invariant. For tests.
  [[nodiscard]] Result<void> check() const;

 private:
  using Handler = std::function<void(Disk::Completion&)>;
  struct Writing;
  struct SavingNames;
  struct Waiter {
    std::uint64_t version = 0;
    std::function<void(bool)> done;
  };

  bool submit(Disk::Request request, Handler handler);
  Result<void> wait_for(Disk::Request request, const std::function<void()>& wait);
  [[nodiscard]] Result<engine::ssd::Superblock> divide(const Id128& disk, std::uint64_t size_bytes,
                                                       std::uint64_t segment_bytes) const;
  Result<void> choose_superblock(std::span<std::byte> head);
  Result<void> choose_size();
  void scan_more(std::shared_ptr<AlignedBuffer> buffer);
  void end_scan();
  bool open_segment();
  void end_segment(std::uint32_t segment);
  void end_write(std::uint64_t ticket, Disk::Completion& completion);
  void write_failed();
  void write_tables(bool all);
  void write_names();
  void save_names(const std::shared_ptr<SavingNames>& saving);
  void retry_names(const std::shared_ptr<SavingNames>& saving, const Error& why);
  void names_written(std::uint64_t version, bool is_good);
  void leave(const Error& why);
  void write_superblocks(std::function<void(bool)> done);
  void write_drops();
  void finish_sync();
  [[nodiscard]] bool may_read() const;
  [[nodiscard]] bool finds(const engine::ssd::SpaceName& name, const engine::ssd::Epoch& epoch,
                           const BlockKey& key) const;
  Result<void> limit_index();
  void make_room_in_index(std::uint64_t rows, std::uint64_t coming);
  void look_for_slowness();
  void probe();
  void note_slow(std::string_view what) const;
  [[nodiscard]] std::uint32_t seconds() const;

  const Options options_;
  const Clock& clock_;
  State state_ = State::kOpening;
  engine::ssd::Superblock superblock_;
  engine::ssd::NameTable names_;
  std::optional<engine::ssd::Index> index_;
  std::optional<engine::ssd::SegmentLog> log_;
  std::unique_ptr<engine::ssd::Scan> scan_;
  std::size_t refused_scan_reads_ = 0;  ///< Since the queue of the disk was full.
  TimePoint scan_began_{};
  std::uint64_t next_life_ = 0;
  std::uint64_t first_own_life_ = 0;  ///< Segments of smaller lives are of earlier openings.
  bool serves_recovered_ = true;
  TimePoint tables_at_{};
  std::uint64_t names_saved_ = 0;  ///< The version that is durable.
  bool is_writing_names_ = false;
  std::vector<Waiter> waiters_;  ///< For names to be durable.
  bool is_writing_drops_ = false;
  std::vector<std::function<void(bool)>> drops_;  ///< For the superblocks after those in flight.
  std::vector<std::function<void()>> syncing_;
  bool is_flushing_ = false;
  Breaker breaker_;
  std::size_t late_reads_ = 0;
  LatencyBreaker latency_;
  /// A read of a block in flight.
  struct InFlight {
    TimePoint began{};
    std::uint64_t bytes_until_end = 0;  ///< Its own, and those that were in flight before.
  };
  std::map<std::uint64_t, InFlight> reading_;  ///< By order.
  std::uint64_t reading_bytes_ = 0;
  std::uint64_t next_read_ = 0;
  std::uint64_t probes_ = 0;
  TimePoint polled_at_{};
  std::uint64_t most_rows_ = 0;     ///< The limit of the index; 0: none.
  std::size_t write_failures_ = 0;  ///< In a row.
  std::uint64_t next_ticket_ = 1;
  std::unordered_map<std::uint64_t, Handler> pending_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Writing>> writing_;
  Stats counted_;
  std::unique_ptr<Disk> disk_;  ///< Last: its destructor completes what is in flight.
};

[[nodiscard]] std::string_view to_string(SsdDisk::State state);

}  // namespace pegaflow::server
