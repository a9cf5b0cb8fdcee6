#include "server/ssd/ssd_disk.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/assert.h"
#include "base/log.h"
#include "base/units.h"
#include "engine/ssd/scan.h"
#include "server/ssd/all_done.h"

namespace pegaflow::server {
namespace {

namespace ssd = engine::ssd;

constexpr Log kLog{"ssd"};

/// The superblocks and the names.
constexpr std::uint64_t kHeadBytes = ssd::kNamesOffsets[1] + ssd::kNamesBytes;

/// Writes of one copy of the names before the disk counts as unable to take them.
constexpr unsigned kNamesAttempts = 4;

}  // namespace

std::string_view to_string(SsdDisk::State state) {
  switch (state) {
    case SsdDisk::State::kOpening:
      return "opening";
    case SsdDisk::State::kScanning:
      return "scanning";
    case SsdDisk::State::kReady:
      return "ready";
    case SsdDisk::State::kReadOnly:
      return "read-only";
    case SsdDisk::State::kLeft:
      return "left";
  }
  return "unknown";
}

bool SsdDisk::submit(Disk::Request request, Handler handler) {
  const std::uint64_t ticket = request.ticket = next_ticket_++;
  if (!disk_ || !disk_->submit(std::move(request))) return false;
  pending_.emplace(ticket, std::move(handler));
  return true;
}

void SsdDisk::completed(Disk::Completion&& completion) {
  const auto found = pending_.find(completion.ticket);
  PEGA_ASSERT(found != pending_.end(), "completion of unknown I/O {}", completion.ticket);
  const Handler handler = std::move(found->second);
  pending_.erase(found);
  handler(completion);
  if (refused_scan_reads_ > 0) {
    --refused_scan_reads_;
    scan_more(nullptr);
  }
  if (!syncing_.empty()) finish_sync();
}

// ---- opening

Result<void> SsdDisk::wait_for(Disk::Request request, const std::function<void()>& wait) {
  bool is_done = false;
  std::optional<Error> error;
  const bool is_accepted = submit(std::move(request), [&](Disk::Completion& completion) {
    is_done = true;
    error = completion.error;
  });
  if (!is_accepted) return fail(Errc::kIo, "{}: the disk took no request", attributes().path);
  while (!is_done) wait();
  if (error) return tl::unexpected<Error>(std::move(*error));
  return {};
}

Result<void> SsdDisk::open(const std::function<void()>& wait) {
  if (disk_->size_bytes() < kHeadBytes) {
    return fail(Errc::kRefused, "--ssd-cache-path {}: the file is smaller than any cache",
                attributes().path);
  }
  AlignedBuffer head(kHeadBytes);
  PEGA_TRY(wait_for({.offset = 0, .memory = {head.bytes()}, .hook = {}}, wait));
  PEGA_TRY(choose_superblock(head.bytes()));
  PEGA_TRY(choose_size());
  std::optional<ssd::Names> last;
  for (const std::uint64_t offset : ssd::kNamesOffsets) {
    auto names =
        ssd::decode_names(head.bytes().subspan(offset).first<ssd::kNamesBytes>(), superblock_.disk);
    if (names && (!last || names->sequence > last->sequence)) last = std::move(names);
  }
  // Lives of this opening are greater than all before, even if those were lost with a power cut.
  ++superblock_.opened;
  ++superblock_.sequence;
  first_own_life_ = superblock_.opened << 32;
  next_life_ = first_own_life_ + 1;
  if (last) {
    names_.load(*last);
  } else {
    // Without the epochs an older block could not be told from one that counts.
    superblock_.first_life = first_own_life_;
  }
  names_saved_ = names_.version();
  AlignedBuffer page(ssd::kSector);
  ssd::encode(superblock_, page.bytes().first<ssd::kSector>());
  for (const std::uint64_t offset : ssd::kSuperblockOffsets) {
    PEGA_TRY(wait_for({.operation = Disk::Operation::kDurableWrite,
                       .offset = offset,
                       .memory = {page.bytes()},
                       .hook = {}},
                      wait));
  }
  // Only now, so that no superblock names segments that are gone.
  if (options_.size_bytes < disk_->size_bytes()) PEGA_TRY(disk_->resize(options_.size_bytes));
  PEGA_TRY(limit_index());
  PEGA_TRY_LET(index_, ssd::Index::create(superblock_.segments, superblock_.most_entries()));
  log_.emplace(superblock_);
  counted_.capacity_bytes = superblock_.segments * superblock_.segment_bytes;
  counted_.segments = superblock_.segments;
  return {};
}

/// The superblock of a log of that size. Errors: kInvalidArgument, with the file and the options.
Result<ssd::Superblock> SsdDisk::divide(const Id128& disk, std::uint64_t size_bytes,
                                        std::uint64_t segment_bytes) const {
  auto divided = ssd::divide(disk, size_bytes, segment_bytes);
  if (divided) return divided;
  return fail(divided.error().code,
              "--ssd-cache-path {}: {}; raise --ssd-cache-capacity, or choose another "
              "--ssd-segment-size for a new file",
              attributes().path, divided.error().detail);
}

/// Takes over the file's superblock, or makes one for an empty file.
Result<void> SsdDisk::choose_superblock(std::span<std::byte> head) {
  const auto page = [&](std::size_t copy) {
    return ssd::decode_superblock(
        head.subspan(ssd::kSuperblockOffsets[copy]).first<ssd::kSector>());
  };
  const Result<ssd::Superblock> a = page(0);
  const Result<ssd::Superblock> b = page(1);
  if (const Result<ssd::Superblock> found = ssd::newer(a, b)) {
    superblock_ = *found;
    if (superblock_.end() <= disk_->size_bytes()) return {};
    if (!options_.format) {
      return fail(
          Errc::kRefused,
          "--ssd-cache-path {}: the file has {} bytes, and its superblock needs {}; restore "
          "it, or remove it, or pass --ssd-format to lose its blocks",
          attributes().path, disk_->size_bytes(), superblock_.end());
    }
  } else {
    const bool is_empty = a.error().code == Errc::kGone && b.error().code == Errc::kGone;
    if (!is_empty && !options_.format) {
      const Error& why = a.error().code == Errc::kGone ? b.error() : a.error();
      return fail(
          Errc::kRefused,
          "--ssd-cache-path {}: {}; name another file, or pass --ssd-format to overwrite it",
          attributes().path, why.detail);
    }
  }
  const std::uint64_t size = std::max(options_.size_bytes, disk_->size_bytes());
  PEGA_TRY_LET(superblock_, divide(Id128::random(), size, options_.segment_bytes));
  superblock_.sequence = 1 + std::max(a ? a->sequence : 0, b ? b->sequence : 0);
  return {};
}

/// Has the log fill the configured size. Segments behind it are lost.
Result<void> SsdDisk::choose_size() {
  PEGA_TRY_LET(const ssd::Superblock wanted,
               divide(superblock_.disk, options_.size_bytes, superblock_.segment_bytes));
  if (options_.size_bytes > disk_->size_bytes()) PEGA_TRY(disk_->resize(options_.size_bytes));
  if (wanted.segments != superblock_.segments) {
    kLog.info("the cache file is resized path={} segments={} before={}", attributes().path,
              wanted.segments, superblock_.segments);
  }
  superblock_.segments = wanted.segments;
  return {};
}

// ---- the memory of the index

namespace {
/// A row, and its part of the cells at their lowest load.
constexpr std::uint64_t kIndexBytesPerBlock = 46;
}  // namespace

Result<void> SsdDisk::limit_index() {
  if (options_.index_bytes == 0) return {};
  const std::uint64_t of_segment = superblock_.most_entries();
  most_rows_ = options_.index_bytes / kIndexBytesPerBlock;
  if (most_rows_ < 2 * of_segment) {
    return fail(Errc::kInvalidArgument,
                "--ssd-index-memory: {} for {} are not enough for two segments of {}, which need "
                "{}; raise it, or use a new file with a smaller --ssd-segment-size",
                format_bytes(options_.index_bytes), attributes().path,
                format_bytes(superblock_.segment_bytes),
                format_bytes(2 * of_segment * kIndexBytesPerBlock));
  }
  const std::uint64_t log_bytes = superblock_.segments * superblock_.segment_bytes;
  kLog.info(
      "the index of a disk is limited, blocks that are smaller on average than bytes_per_block do "
      "not fill the disk path={} index_bytes={} blocks={} bytes_per_block={}",
      attributes().path, options_.index_bytes, most_rows_, log_bytes / most_rows_);
  return {};
}

/// Drops the oldest segments until `coming` rows fit beside the `rows` that the index has.
void SsdDisk::make_room_in_index(std::uint64_t rows, std::uint64_t coming) {
  while (most_rows_ != 0 && rows + coming > most_rows_) {
    const auto dropped = log_->drop_oldest();
    if (!dropped) return;
    const std::uint64_t of_it = index_->rows_of(*dropped);
    for (std::uint32_t i = 0; i < of_it; ++i) {
      if (index_->row({*dropped, i}) != nullptr) ++counted_.reclaimed_blocks;
    }
    index_->begin(*dropped, 0);
    rows -= std::min(rows, of_it);
  }
}

// ---- scanning

void SsdDisk::start_scan() {
  state_ = State::kScanning;
  scan_began_ = clock_.now();
  scan_ = std::make_unique<ssd::Scan>(superblock_, names_, *index_, *log_);
  for (std::size_t i = 0; i < options_.scan_reads; ++i) scan_more(nullptr);
}

/// Starts the next read of the scan, into the buffer of a former one if that is large enough.
void SsdDisk::scan_more(std::shared_ptr<AlignedBuffer> buffer) {
  while (state_ == State::kScanning) {
    const auto read = scan_->next();
    if (!read) {
      if (scan_->is_done()) end_scan();
      return;
    }
    if (buffer == nullptr || buffer->bytes().size() < read->bytes) {
      buffer = std::make_shared<AlignedBuffer>(read->bytes);
    }
    const std::span<std::byte> bytes = buffer->bytes().first(read->bytes);
    const bool is_accepted = submit({.priority = Disk::Priority::kBackground,
                                     .offset = read->offset,
                                     .memory = {bytes},
                                     .hook = {}},
                                    [this, buffer, bytes, read](Disk::Completion& completion) {
                                      if (completion.error) {
                                        ++counted_.read_errors;
                                        scan_->failed(*read);
                                      } else {
                                        scan_->take(*read, bytes);
                                        make_room_in_index(index_->size(), 0);
                                      }
                                      scan_more(buffer);
                                    });
    if (is_accepted) return;
    if (!pending_.empty()) {
      // The queue of the disk is full. A completion repeats the read.
      scan_->put_back(*read);
      ++refused_scan_reads_;
      return;
    }
    scan_->failed(*read);
  }
}

void SsdDisk::end_scan() {
  const ssd::Scan::Counts& counts = scan_->counts();
  counted_.recovered_blocks = counts.blocks;
  counted_.scan_seconds = std::chrono::duration<double>(clock_.now() - scan_began_).count();
  state_ = State::kReady;
  kLog.info(
      "the blocks of a disk were found again path={} blocks={} segments={} free_segments={} "
      "seconds={:.3f} dead={} damaged_pages={} failed_reads={}",
      attributes().path, index_->size(), superblock_.segments, log_->free_segments(),
      counted_.scan_seconds, counts.dead, counts.damaged_pages, counts.failed_reads);
}

// ---- epochs

/// Names that are written to both copies, one after the other. Each is read back: a drive that
/// loses or misdirects a write reports success, and then a confirmed reset would be forgotten.
struct SsdDisk::SavingNames {
  std::uint64_t version = 0;
  AlignedBuffer area{ssd::kNamesBytes};
  AlignedBuffer read_back{ssd::kNamesBytes};
  std::size_t copy = 0;
  unsigned attempts = 0;
};

/// Writes the names, if those on the disk are older and no write of them is in flight.
void SsdDisk::write_names() {
  if (is_writing_names_ || names_saved_ == names_.version() || state_ == State::kLeft) return;
  const ssd::Names names = names_.save();
  auto saving = std::make_shared<SavingNames>();
  saving->version = names.sequence;
  ssd::encode(names, superblock_.disk, saving->area.bytes().first<ssd::kNamesBytes>());
  is_writing_names_ = true;
  save_names(saving);
}

/// Writes one copy, reads it back, and goes on with the other.
void SsdDisk::save_names(const std::shared_ptr<SavingNames>& saving) {
  const std::uint64_t offset = ssd::kNamesOffsets[saving->copy];
  const auto compared = [this, saving](Disk::Completion& completion) {
    const std::span<const std::byte> written = saving->area.bytes();
    const std::span<const std::byte> found = saving->read_back.bytes();
    const bool is_good =
        !completion.error && std::equal(written.begin(), written.end(), found.begin());
    if (is_good && ++saving->copy < ssd::kNamesOffsets.size()) return save_names(saving);
    if (is_good) return names_written(saving->version, true);
    retry_names(saving, completion.error.value_or(Error{
                            .code = Errc::kCorrupt, .detail = "what was written is not there"}));
  };
  const auto written = [this, saving, offset, compared](Disk::Completion& completion) {
    if (completion.error) return retry_names(saving, *completion.error);
    const std::span<std::byte> back = saving->read_back.bytes();
    std::fill(back.begin(), back.end(), std::byte{0});
    if (!submit({.offset = offset, .memory = {back}, .hook = {}}, compared)) {
      retry_names(saving, Error{.code = Errc::kBusy, .detail = "the queue of the disk is full"});
    }
  };
  if (!submit({.operation = options_.mistakes.epoch_not_flushed ? Disk::Operation::kWrite
                                                                : Disk::Operation::kDurableWrite,
               .offset = offset,
               .memory = {saving->area.bytes()},
               .hook = {}},
              written)) {
    retry_names(saving, Error{.code = Errc::kBusy, .detail = "the queue of the disk is full"});
  }
}

void SsdDisk::retry_names(const std::shared_ptr<SavingNames>& saving, const Error& why) {
  ++counted_.write_errors;
  if (++saving->attempts < kNamesAttempts && state_ != State::kLeft) return save_names(saving);
  if (!waiters_.empty()) leave(why);
  names_written(saving->version, false);
}

void SsdDisk::names_written(std::uint64_t version, bool is_good) {
  is_writing_names_ = false;
  if (is_good) names_saved_ = std::max(names_saved_, version);
  std::vector<Waiter> waiters;
  std::swap(waiters, waiters_);
  for (Waiter& each : waiters) {
    if (each.version <= names_saved_) {
      each.done(true);
    } else if (state_ == State::kLeft) {
      each.done(false);
    } else {
      waiters_.push_back(std::move(each));
    }
  }
  // One that failed is repeated by poll().
  if (!is_good) return;
  write_names();
  write_tables(!syncing_.empty());
}

void SsdDisk::reset(const ssd::SpaceName& name, const ssd::Epoch& epoch,
                    std::function<void(bool)> done) {
  names_.reset(name, epoch);
  if (state_ == State::kLeft) return done(true);  // Its blocks cannot be found.
  if (names_saved_ == names_.version()) return done(true);
  waiters_.push_back({.version = names_.version(), .done = std::move(done)});
  write_names();
}

/// Never reads from the disk again, in this process and, if it can still be written, in later ones.
void SsdDisk::leave(const Error& why) {
  if (state_ == State::kLeft) return;
  state_ = State::kLeft;
  kLog.error(
      "a disk of the cache could not record a reset and is no longer used; remove its file before "
      "the next start path={} reason=\"{}\"",
      attributes().path, to_string(why));
  write_superblocks([](bool) {});
  // A drop in flight may replace those when it ends late; then they are written again.
  if (is_writing_drops_) drops_.push_back([](bool) {});
}

/// Writes both copies; those of a disk that was left are no superblocks.
void SsdDisk::write_superblocks(std::function<void(bool)> done) {
  auto page = std::make_shared<AlignedBuffer>(ssd::kSector);
  if (state_ == State::kLeft) {
    std::fill(page->bytes().begin(), page->bytes().end(), std::byte{0xFF});
  } else {
    ssd::encode(superblock_, page->bytes().first<ssd::kSector>());
  }
  AllDone both(std::move(done));
  for (const std::uint64_t offset : ssd::kSuperblockOffsets) {
    const auto ended = both.begin();
    const bool is_accepted =
        submit({.operation = Disk::Operation::kDurableWrite,
                .offset = offset,
                .memory = {page->bytes()},
                .hook = {}},
               [ended, page](Disk::Completion& completion) { ended(!completion.error); });
    if (!is_accepted) ended(false);
  }
  both.close();
}

/// Writes the superblocks for all drops that wait, if none is in flight: a superblock that ends
/// late would replace a newer one, and blocks dropped since would be found again.
void SsdDisk::write_drops() {
  if (is_writing_drops_ || drops_.empty()) return;
  is_writing_drops_ = true;
  write_superblocks([this, ending = std::exchange(drops_, {})](bool is_good) {
    is_writing_drops_ = false;
    for (const auto& done : ending) done(is_good);
    write_drops();
  });
}

void SsdDisk::drop_all(std::function<void(bool)> done) {
  if (state_ == State::kLeft) return done(true);
  log_->close();
  log_->drop_all();
  superblock_.first_life = next_life_;
  if (scan_ && !options_.mistakes.drop_spares_scan) scan_->drop_before(next_life_);
  first_own_life_ = next_life_;
  for (std::uint32_t i = 0; i < superblock_.segments; ++i) {
    if (index_->life(i) < next_life_) index_->begin(i, 0);
  }
  ++superblock_.sequence;
  drops_.push_back(std::move(done));
  write_drops();
}

// ---- reports

SsdDisk::Stats SsdDisk::stats() const {
  Stats stats = counted_;
  stats.state = state_;
  stats.is_breaker_open = breaker_.is_open() || late_reads_ != 0;
  stats.is_slow = latency_.is_open();
  stats.index_limit_bytes = options_.index_bytes;
  if (index_) {
    stats.blocks = index_->size();
    stats.index_bytes = index_->memory_bytes();
  }
  if (log_) stats.free_segments = log_->free_segments();
  if (scan_) stats.scanned_segments = scan_->segments_done();
  return stats;
}

Result<void> SsdDisk::check() const { return index_ ? index_->check() : Result<void>{}; }

std::uint32_t SsdDisk::seconds() const {
  return static_cast<std::uint32_t>(std::chrono::duration_cast<std::chrono::seconds>(
                                        std::chrono::system_clock::now().time_since_epoch())
                                        .count());
}

}  // namespace pegaflow::server
