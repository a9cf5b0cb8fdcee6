#include "server/ssd/ssd_writer.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "base/assert.h"
#include "base/log.h"
#include "capnp/wire/rpc_error.h"
#include "server/cache/background.h"

namespace pegaflow::server {
namespace {

constexpr Log kLog{"ssd"};

/// Bytes that are passed to the disks at once.
constexpr std::uint64_t kWriteBytes = std::uint64_t{16} << 20;
constexpr std::uint64_t kLeastAhead = std::uint64_t{64} << 20;
/// Blocks that one look ahead visits, of each shape: below 500 us.
constexpr std::size_t kMostAhead = 8192;
/// Blocks that are examined in one event-loop iteration.
constexpr std::size_t kSlice = 64;

}  // namespace

SsdWriter::SsdWriter(SsdDisks& disks, CacheService& service, std::span<std::byte> pool,
                     const Options& options, kj::Timer& timer, const Clock& clock)
    : disks_(disks),
      service_(service),
      pool_(pool),
      budget_(options.budget_per_day, clock.now()),
      ahead_bytes_(options.ahead != 0
                       ? options.ahead
                       : std::min(std::max(kLeastAhead, pool.size() / 20), pool.size() / 2)),
      timer_(timer),
      clock_(clock),
      tasks_(*this) {
  service_.store().set_listener(this);
}

SsdWriter::~SsdWriter() noexcept { service_.store().set_listener(nullptr); }

void SsdWriter::sealed(engine::FrameIndex frame, From from) {
  if (frame >= unwritten_.size()) unwritten_.resize(std::size_t{frame} + 1);
  unwritten_[frame] = from == From::kEngine;
  if (frame < rejected_.size()) rejected_[frame] = Rejected::kNo;
  ++changes_;
  wake();
}

void SsdWriter::dropped(engine::FrameIndex frame, bool is_evicted) {
  if (frame < unwritten_.size() && unwritten_[frame]) {
    unwritten_[frame] = false;
    if (is_evicted) ++counted_.evicted_unwritten;
  }
  const auto found = writing_.find(frame);
  if (found == writing_.end()) return;
  found->second.disk->forget(found->second.id);
  writing_.erase(found);
}

void SsdWriter::wake() {
  if (std::exchange(is_woken_, true)) return;
  tasks_.add(next_turn(timer_).then([this]() {
    is_woken_ = false;
    run();
  }));
}

void SsdWriter::run() {
  // A look ahead costs as much as the blocks that it visits, so it waits for an eighth as many.
  if (wanted_.empty() && !drained_ && changes_ > (is_due_ ? 0 : ahead_ / 8)) look_ahead();
  for (std::size_t i = 0; i < kSlice && !wanted_.empty() && writing_bytes_ < kWriteBytes; ++i) {
    if (!write(wanted_.front())) {  // Is tried again by poll().
      if (!drained_ || disks_.is_scanning()) return;
      wanted_.clear();  // No disk takes a block any longer.
      break;
    }
    wanted_.pop_front();
  }
  if (!wanted_.empty()) {
    if (writing_bytes_ < kWriteBytes) wake();
  } else if (drained_ && writing_.empty()) {
    std::exchange(drained_, {})();
  }
}

void SsdWriter::look_ahead() {
  changes_ = 0;
  is_due_ = false;
  std::vector<engine::FrameIndex> next;
  service_.store().next_victims(ahead_bytes_, kMostAhead, next);
  ahead_ = next.size();
  wanted_.assign(next.begin(), next.end());
}

/// Starts the write of a block, or skips it. Returns false when it has to be tried again later.
bool SsdWriter::write(engine::FrameIndex frame) {
  if (writing_.contains(frame)) return true;
  const auto stored = service_.stored(frame);
  if (!stored) return true;
  bool is_renewal = false;
  if (const SsdDisk* const has = disks_.having(stored->origin, stored->key); has != nullptr) {
    note_handled(frame);
    if (!has->is_leaving(stored->origin, stored->key)) return true;
    is_renewal = true;
  }
  SsdDisk* const disk = disks_.taking();
  if (disk == nullptr) return false;
  SsdDisk::Block block{.origin = stored->origin, .key = stored->key};
  for (std::size_t i = 0; i < stored->offsets.size(); ++i) {
    block.add(pool_, stored->offsets[i], stored->page_bytes[i]);
  }
  const std::uint64_t bytes = block.bytes();
  if (bytes > disk->most_block_bytes()) {
    ++counted_.rejected_too_large;
    note_handled(frame);
    return true;
  }
  if (!is_in_budget(frame, *stored, bytes)) {
    note_handled(frame);
    return true;
  }
  // The id is known only when write() returns, and a write never ends before.
  auto id = std::make_shared<SsdDisk::WriteId>(0);
  writing_bytes_ += bytes;
  const auto begun =
      disk->write(block, stored->checksums, [this, frame, id, bytes](SsdDisk::Written written) {
        writing_bytes_ -= bytes;
        ended(frame, *id, written);
      });
  if (!begun) {
    writing_bytes_ -= bytes;
    ++counted_.failed;
    note_handled(frame);
    return true;
  }
  if (is_renewal) ++counted_.renewed;
  *id = *begun;
  writing_.emplace(frame, Write{.disk = disk, .id = *begun, .bytes = bytes});
  return true;
}

/// Whether the budget takes the block. A rejected one is offered again only once it was used.
bool SsdWriter::is_in_budget(engine::FrameIndex frame, const CacheService::Stored& block,
                             std::uint64_t bytes) {
  if (!budget_.is_limited()) return true;
  if (drained_) {
    // The last opportunity: what is left of the budget is of no use later.
    if (budget_.take_last(bytes, clock_.now())) return true;
    ++counted_.rejected_budget;
    return false;
  }
  if (frame >= rejected_.size()) rejected_.resize(std::size_t{frame} + 1, Rejected::kNo);
  Rejected& rejected = rejected_[frame];
  if (rejected == Rejected::kUsed || (rejected == Rejected::kUnused && !block.was_used)) {
    return false;
  }
  if (budget_.take({.key = block.key,
                    .bytes = bytes,
                    .was_used = block.was_used,
                    .came_back = block.came_back,
                    .depth = block.depth},
                   clock_.now())) {
    return true;
  }
  if (rejected == Rejected::kNo) ++counted_.rejected_budget;
  rejected = block.was_used ? Rejected::kUsed : Rejected::kUnused;
  return false;
}

void SsdWriter::ended(engine::FrameIndex frame, SsdDisk::WriteId id, SsdDisk::Written written) {
  const auto found = writing_.find(frame);
  if (found != writing_.end() && found->second.id == id) {
    writing_.erase(found);
    note_handled(frame);  // Kept, or counted with its reason below.
    if (written == SsdDisk::Written::kDamaged) {
      kLog.error("a block in the pool differs from what was saved and is invalidated");
      service_.invalidate(frame);
    }
  }
  if (written == SsdDisk::Written::kFailed) ++counted_.failed;
  if (written == SsdDisk::Written::kForgotten) ++counted_.forgotten;
  wake();
}

void SsdWriter::drain(std::function<void()> done) {
  drained_ = std::move(done);
  const std::vector<engine::FrameIndex> all = service_.store().residents();
  wanted_.assign(all.begin(), all.end());
  wake();
}

void SsdWriter::taskFailed(kj::Exception&& exception) {
  PEGA_ASSERT(false, "writing to the disks failed: {}", error_from(exception).detail);
}

}  // namespace pegaflow::server
