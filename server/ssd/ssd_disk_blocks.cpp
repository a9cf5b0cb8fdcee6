// Blocks of SsdDisk: reads with their proofs, writes, and the tables that name them.
#include <algorithm>
#include <memory>
#include <utility>

#include "base/assert.h"
#include "base/log.h"
#include "engine/ssd/scan.h"
#include "server/ssd/ssd_disk.h"
#include "transport/checksum.h"

namespace pegaflow::server {
namespace {

namespace ssd = engine::ssd;

constexpr Log kLog{"ssd"};
/// Between two calls of poll(), which is called once a second.
constexpr Duration kLatePoll = std::chrono::milliseconds(1500);

/// Writes that fail in a row before the disk is only read.
constexpr std::size_t kMostWriteFailures = 3;

/// Hashes the pages, each at the beginning of its span, on the disk's thread.
Disk::Hook hash_pages(const SsdDisk::Block& block) {
  std::vector<std::span<const std::byte>> pages;
  for (std::size_t i = 0; i < block.memory.size(); ++i) {
    pages.push_back(block.memory[i].first(block.page_bytes[i]));
  }
  return [pages = std::move(pages)](Disk::Completion& completion) -> Result<void> {
    for (const std::span<const std::byte> page : pages) {
      completion.checksums.push_back(PageChecksum::of(page));
    }
    return {};
  };
}

/// Whether a page has other bytes than its writer had.
bool is_damaged(std::span<const std::uint64_t> writers, std::span<const std::uint64_t> found) {
  for (std::size_t i = 0; i < std::min(writers.size(), found.size()); ++i) {
    if (writers[i] != SsdDisk::kNoChecksum && writers[i] != found[i]) return true;
  }
  return false;
}

}  // namespace

/// A block that is being written.
struct SsdDisk::Writing {
  ssd::Origin origin;
  BlockKey key;
  std::uint16_t number = 0;
  std::uint64_t bytes = 0;
  std::vector<std::uint64_t> checksums;  ///< Its writer's.
  ssd::SegmentLog::Room room;
  OnWritten done;
  bool is_forgotten = false;
};

SsdDisk::SsdDisk(std::unique_ptr<Disk> disk, const Options& options, const Clock& clock)
    : options_(options), clock_(clock), tables_at_(clock.now()), disk_(std::move(disk)) {}

SsdDisk::~SsdDisk() {
  state_ = State::kLeft;
  disk_.reset();
  // The owner of the Disk may have passed no completion since; what is left has ended.
  std::unordered_map<std::uint64_t, Handler> rest;
  std::swap(rest, pending_);
  for (auto& [ticket, handler] : rest) {
    Disk::Completion completion;
    completion.ticket = ticket;
    completion.error = Error{.code = Errc::kCancelled, .detail = "the disk was closed"};
    handler(completion);
  }
}

void SsdDisk::Block::add(std::span<std::byte> pool, std::uint64_t offset, std::uint64_t bytes) {
  const std::uint64_t padded = (bytes + ssd::kSector - 1) / ssd::kSector * ssd::kSector;
  memory.push_back(pool.subspan(offset, padded));
  page_bytes.push_back(bytes);
}

std::uint64_t SsdDisk::Block::bytes() const {
  std::uint64_t sum = 0;
  for (const std::span<std::byte> each : memory) sum += each.size();
  return sum;
}

// ---- reading

bool SsdDisk::may_read() const {
  return (state_ == State::kScanning || state_ == State::kReady || state_ == State::kReadOnly) &&
         late_reads_ == 0 && breaker_.is_closed(clock_.now()) && !latency_.is_open();
}

/// Whether the block is in the index, and may be served.
bool SsdDisk::finds(const ssd::SpaceName& name, const ssd::Epoch& epoch,
                    const BlockKey& key) const {
  const auto number = names_.find(name, epoch);
  if (!number) return false;
  const auto found = index_->find(*number, key);
  return found && (serves_recovered_ || found->life >= first_own_life_);
}

bool SsdDisk::has(const ssd::SpaceName& name, const ssd::Epoch& epoch, const BlockKey& key) const {
  return may_read() && finds(name, epoch, key);
}

bool SsdDisk::hides(const ssd::SpaceName& name, const ssd::Epoch& epoch,
                    const BlockKey& key) const {
  return latency_.is_open() && state_ != State::kLeft && state_ != State::kOpening &&
         finds(name, epoch, key);
}

bool SsdDisk::is_leaving(const ssd::Origin& origin, const BlockKey& key) const {
  const auto number = names_.find(origin.name, origin.epoch);
  const auto found = number ? index_->find(*number, key) : std::nullopt;
  if (!found || (found->row.flags & ssd::Entry::kHits) == 0) return false;
  return log_->is_leaving(found->life);
}

bool SsdDisk::read(Block block, OnLoaded done) {
  if (!has(block.origin.name, block.origin.epoch, block.key)) return false;
  const auto found = index_->find(*names_.find(block.origin.name, block.origin.epoch), block.key);
  const TimePoint began = clock_.now();
  Disk::Request request{.offset = std::uint64_t{found->row.place} * ssd::kSector,
                        .memory = block.memory,
                        .hook = hash_pages(block)};
  const std::uint64_t bytes = block.bytes();
  // The block may be longer than this row's: of another key with an equal fingerprint.
  if (request.offset + bytes > superblock_.end()) return false;
  const ssd::Index::Place at = found->at;
  const std::uint64_t order = next_read_;
  auto ended = [this, at, began, bytes, order, life = found->life, row = found->row,
                block = std::move(block), done = std::move(done)](Disk::Completion& completion) {
    log_->end_read(at.segment);
    const TimePoint now = clock_.now();
    counted_.read_seconds += std::chrono::duration<double>(now - began).count();
    const auto read = reading_.extract(order);
    reading_bytes_ -= bytes;
    const std::uint64_t until_end = read.mapped().bytes_until_end;
    if (!completion.error && latency_.ended(began, until_end, now)) note_slow("reads");
    const bool is_current = index_->row(at) != nullptr && index_->row(at)->proof == row.proof;
    Loaded loaded;
    if (completion.error) {
      if (completion.error->code != Errc::kCancelled) {
        ++counted_.read_errors;
        breaker_.failed(clock_.now());
        if (is_current) index_->remove(at);
        kLog.warn("a block could not be read path={} error=\"{}\"", disk_ ? attributes().path : "",
                  to_string(*completion.error));
      }
      done(std::move(loaded));
      return;
    }
    breaker_.succeeded();
    const std::uint64_t proof =
        options_.mistakes.skips_proof
            ? ssd::proof_of(block.origin, block.key, life, completion.checksums)
            : row.proof;
    loaded.proven = ssd::Proven::prove(block.origin, block.key, life, completion.checksums, proof);
    if (!loaded.proven) {
      ++counted_.proof_failures;
      if (is_current) index_->remove(at);
    } else {
      ++counted_.read_blocks;
      counted_.read_bytes += bytes;
      if (is_current) index_->note_hit(at);
      if ((row.flags & ssd::Entry::kHasChecksums) != 0) {
        loaded.checksums = std::move(completion.checksums);
      }
    }
    done(std::move(loaded));
  };
  if (!submit(std::move(request), std::move(ended))) return false;
  log_->begin_read(at.segment);
  reading_bytes_ += bytes;
  reading_.emplace(next_read_++, InFlight{.began = began, .bytes_until_end = reading_bytes_});
  breaker_.began(began);
  return true;
}

// ---- slowness

void SsdDisk::note_slow(std::string_view what) const {
  kLog.warn("a disk is slow and is not read until it recovers path={} because=\"{}\"",
            disk_ ? attributes().path : "", what);
}

void SsdDisk::look_for_slowness() {
  const TimePoint now = clock_.now();
  // After a pause of this process its reads look late, whose completions wait to be read.
  const bool was_paused = now - std::exchange(polled_at_, now) > kLatePoll;
  if (!reading_.empty() && !was_paused) {
    const InFlight& oldest = reading_.begin()->second;
    if (latency_.waits(now - oldest.began, oldest.bytes_until_end, now)) note_slow("a read hangs");
  }
  if (latency_.is_probe_due(now) && state_ != State::kLeft) probe();
}

/// Reads a part of the log, whatever it holds, into memory of its own.
void SsdDisk::probe() {
  auto buffer = std::make_shared<AlignedBuffer>(LatencyBreaker::kProbeBytes);
  const auto segment = static_cast<std::uint32_t>(probes_++ % superblock_.segments);
  const TimePoint began = clock_.now();
  const bool is_begun = submit(
      {.offset = superblock_.segment_offset(segment), .memory = {buffer->bytes()}, .hook = {}},
      [this, buffer, began](Disk::Completion& completion) {
        const TimePoint now = clock_.now();
        if (!latency_.probe_ended(!completion.error, now - began, now)) return;
        kLog.info("a disk is fast again and is read path={}", disk_ ? attributes().path : "");
      });
  if (is_begun) latency_.probe_began();
}

// ---- writing

bool SsdDisk::takes_blocks() const {
  return state_ == State::kReady && syncing_.empty() && !latency_.is_open();
}

/// Closes the open segment and opens the next one.
bool SsdDisk::open_segment() {
  log_->close();
  write_tables(false);
  std::uint64_t rows = 0;
  for (std::uint32_t each = 0; most_rows_ != 0 && each < superblock_.segments; ++each) {
    rows += index_->rows_of(each);
  }
  make_room_in_index(rows, superblock_.most_entries());
  const auto next = log_->next();
  if (!next) return false;
  for (std::uint32_t i = 0; i < index_->rows_of(*next); ++i) {
    if (index_->row({*next, i}) != nullptr) ++counted_.reclaimed_blocks;
  }
  const std::uint64_t life = next_life_++;
  log_->open(*next, life);
  index_->begin(*next, life);
  auto page = std::make_shared<AlignedBuffer>(ssd::kSector);
  ssd::encode(ssd::SegmentHeader{.segment = *next, .life = life}, superblock_.disk,
              page->bytes().first<ssd::kSector>());
  // Without its header the segment is free after a restart.
  const bool is_accepted = submit({.operation = Disk::Operation::kWrite,
                                   .offset = superblock_.segment_offset(*next),
                                   .memory = {page->bytes()},
                                   .hook = {}},
                                  [this, page, segment = *next](Disk::Completion& completion) {
                                    if (completion.error) ++counted_.write_errors;
                                    if (log_->header_written(segment)) end_segment(segment);
                                  });
  if (!is_accepted) (void)log_->header_written(*next);
  return true;
}

std::optional<SsdDisk::WriteId> SsdDisk::write(const Block& block,
                                               std::vector<std::uint64_t> checksums,
                                               OnWritten done) {
  const std::uint64_t bytes = block.bytes();
  if (!takes_blocks() || bytes == 0 || bytes > log_->most_bytes()) return std::nullopt;
  const auto number = names_.number(block.origin, seconds());
  write_names();
  if (!number) {
    if (names_.is_exhausted()) {
      drop_all([](bool) {});
      names_.restart();
    }
    return std::nullopt;
  }
  auto room = log_->take(bytes);
  if (!room && open_segment()) room = log_->take(bytes);
  if (!room) return std::nullopt;
  auto writing = std::make_unique<Writing>(Writing{.origin = block.origin,
                                                   .key = block.key,
                                                   .number = *number,
                                                   .bytes = bytes,
                                                   .checksums = std::move(checksums),
                                                   .room = *room,
                                                   .done = std::move(done)});
  const WriteId id = next_ticket_;
  const bool is_accepted =
      submit({.operation = Disk::Operation::kWrite,
              .offset = room->offset,
              .memory = block.memory,
              .hook = hash_pages(block)},
             [this, id](Disk::Completion& completion) { end_write(id, completion); });
  if (!is_accepted) {
    log_->lost(*room);
    return std::nullopt;
  }
  writing_.emplace(id, std::move(writing));
  return id;
}

void SsdDisk::forget(WriteId write) {
  const auto found = writing_.find(write);
  if (found != writing_.end()) found->second->is_forgotten = true;
}

void SsdDisk::end_write(std::uint64_t ticket, Disk::Completion& completion) {
  const auto found = writing_.find(ticket);
  const std::unique_ptr<Writing> writing = std::move(found->second);
  writing_.erase(found);
  if (completion.error) {
    log_->lost(writing->room);
    if (completion.error->code != Errc::kCancelled) {
      ++counted_.write_errors;
      kLog.warn("a block could not be written error=\"{}\"", to_string(*completion.error));
      write_failed();
    }
    writing->done(Written::kFailed);
    return;
  }
  write_failures_ = 0;
  counted_.written_bytes += writing->bytes;
  // A page that changed since it was saved must not get a proof. One whose frame has another block
  // by now differs for that reason.
  if (!writing->is_forgotten && !options_.mistakes.keeps_damaged &&
      is_damaged(writing->checksums, completion.checksums)) {
    log_->lost(writing->room);
    ++counted_.damaged_blocks;
    writing->done(Written::kDamaged);
    write_tables(false);
    return;
  }
  // A reset since the write began gave the namespace another number.
  const bool is_kept = (!writing->is_forgotten || options_.mistakes.keeps_forgotten) &&
                       names_.origin(writing->number) != nullptr &&
                       index_->life(writing->room.segment) == writing->room.life;
  if (!is_kept) {
    log_->lost(writing->room);
    ++counted_.forgotten_writes;
    writing->done(Written::kForgotten);
    write_tables(false);
    return;
  }
  ++counted_.written_blocks;
  ssd::Entry entry{.key = writing->key,
                   .proof = ssd::proof_of(writing->origin, writing->key, writing->room.life,
                                          completion.checksums),
                   .place = static_cast<std::uint32_t>(writing->room.offset / ssd::kSector),
                   .units = static_cast<std::uint32_t>(writing->bytes / ssd::kSector),
                   .number = writing->number,
                   .kind = writing->origin.kind,
                   .depth = ssd::Entry::kUnknownDepth,
                   .flags = 0,
                   .saved_at = seconds()};
  if (writing->checksums == completion.checksums) entry.flags |= ssd::Entry::kHasChecksums;
  index_->add(writing->room.segment, {.fingerprint = ssd::fingerprint_of(entry.number, entry.key),
                                      .proof = entry.proof,
                                      .place = entry.place,
                                      .number = entry.number,
                                      .flags = entry.flags});
  log_->wrote(writing->room, entry);
  writing->done(Written::kKept);
  write_tables(false);
}

void SsdDisk::write_failed() {
  log_->close();
  write_tables(false);
  if (++write_failures_ < kMostWriteFailures || state_ != State::kReady) return;
  state_ = State::kReadOnly;
  kLog.error(
      "a disk of the cache takes no more writes, its blocks are still read path={} failures={}",
      disk_ ? attributes().path : "", write_failures_);
}

// ---- tables

void SsdDisk::poll() {
  if (state_ == State::kReady || state_ == State::kReadOnly) {
    const TimePoint now = clock_.now();
    const bool is_due =
        now - tables_at_ >= options_.table_delay && names_saved_ == names_.version();
    if (is_due) tables_at_ = now;
    write_tables(is_due);
  }
  write_names();
  look_for_slowness();
}

void SsdDisk::write_tables(bool all) {
  // A number belongs to its name only once the names are durable: until then the next process may
  // give it to another one.
  if (state_ == State::kLeft || names_saved_ != names_.version()) return;
  while (const auto table = log_->next_table(all)) {
    auto page = std::make_shared<AlignedBuffer>(ssd::kSector);
    ssd::encode(table->page, superblock_.disk, page->bytes().first<ssd::kSector>());
    const bool is_accepted =
        submit({.operation = Disk::Operation::kWrite,
                .offset = table->offset,
                .memory = {page->bytes()},
                .hook = {}},
               [this, page, segment = table->segment](Disk::Completion& completion) {
                 if (completion.error) ++counted_.write_errors;
                 counted_.table_bytes += ssd::kSector;
                 if (log_->table_written(segment)) end_segment(segment);
                 write_tables(!syncing_.empty());
               });
    if (!is_accepted) {
      (void)log_->table_written(table->segment);
      return;
    }
  }
}

/// Everything of the segment is written.
void SsdDisk::end_segment(std::uint32_t segment) {
  index_->close(segment);
  // No job waits for it: it bounds what a power cut loses.
  (void)submit({.operation = Disk::Operation::kFlush, .memory = {}, .hook = {}},
               [](Disk::Completion&) {});
}

// ---- stopping

void SsdDisk::sync(std::function<void()> done) {
  syncing_.push_back(std::move(done));
  if (log_) {
    log_->close();
    write_tables(true);
  }
  write_names();
  finish_sync();
}

/// Flushes once every header, block and table is written.
void SsdDisk::finish_sync() {
  if (is_flushing_ ||
      (log_ && state_ != State::kLeft && (log_->in_flight() != 0 || log_->unsaved() != 0))) {
    return;
  }
  is_flushing_ = true;
  const auto end = [this] {
    is_flushing_ = false;
    std::vector<std::function<void()>> done;
    std::swap(done, syncing_);
    for (const auto& each : done) each();
  };
  if (!submit({.operation = Disk::Operation::kFlush, .memory = {}, .hook = {}},
              [end](Disk::Completion&) { end(); })) {
    end();
  }
}

}  // namespace pegaflow::server
