#include "engine/ssd/segment_log.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/assert.h"

namespace pegaflow::engine::ssd {

SegmentLog::SegmentLog(const Superblock& superblock)
    : superblock_(superblock), reads_(superblock.segments) {
  for (std::uint32_t i = 0; i < superblock.segments; ++i) free_.insert(i);
}

void SegmentLog::found(std::uint32_t segment, std::uint64_t life) {
  leaving_.reset();
  free_.erase(segment);
  closed_.emplace(life, segment);
}

void SegmentLog::drop_all() {
  leaving_.reset();
  for (const auto& [life, segment] : closed_) free_.insert(segment);
  closed_.clear();
}

std::optional<std::uint32_t> SegmentLog::drop_oldest() {
  is_short_ = true;
  const auto oldest = std::find_if(closed_.begin(), closed_.end(),
                                   [this](const auto& each) { return !is_read(each.second); });
  if (oldest == closed_.end()) return std::nullopt;
  const std::uint32_t segment = oldest->second;
  closed_.erase(oldest);
  free_.insert(segment);
  leaving_.reset();
  return segment;
}

SegmentLog::Writing* SegmentLog::writing(std::uint32_t segment) {
  const auto found = std::find_if(writing_.begin(), writing_.end(),
                                  [&](const Writing& each) { return each.segment == segment; });
  return found == writing_.end() ? nullptr : &*found;
}

std::optional<SegmentLog::Room> SegmentLog::take(std::uint64_t bytes) {
  if (open_ == kNone) return std::nullopt;
  Writing& to = *writing(open_);
  if (bytes > superblock_.segment_bytes - to.used || to.taken == superblock_.most_entries()) {
    return std::nullopt;
  }
  const Room room{.segment = to.segment,
                  .offset = superblock_.segment_offset(to.segment) + to.used,
                  .life = to.life};
  to.used += bytes;
  ++to.in_flight;
  ++to.taken;
  return room;
}

void SegmentLog::wrote(const Room& room, const Entry& entry) {
  Writing* const to = writing(room.segment);
  PEGA_ASSERT(to != nullptr && to->in_flight != 0 && to->life == room.life,
              "no write is in flight in segment {}", room.segment);
  --to->in_flight;
  to->entries.push_back(entry);
}

void SegmentLog::lost(const Room& room) {
  Writing* const to = writing(room.segment);
  PEGA_ASSERT(to != nullptr && to->in_flight != 0 && to->life == room.life,
              "no write is in flight in segment {}", room.segment);
  --to->in_flight;
  settle(room.segment);
}

void SegmentLog::close() {
  if (open_ == kNone) return;
  writing(open_)->is_open = false;
  settle(std::exchange(open_, kNone));
}

/// Moves a segment of which everything is written to the closed ones; returns whether it did.
bool SegmentLog::settle(std::uint32_t segment) {
  const auto found = std::find_if(writing_.begin(), writing_.end(),
                                  [&](const Writing& each) { return each.segment == segment; });
  if (found == writing_.end() || found->is_open || !found->has_header || found->in_flight != 0 ||
      found->saving != 0 || found->saved != found->entries.size()) {
    return false;
  }
  closed_.emplace(found->life, segment);
  leaving_.reset();
  writing_.erase(found);
  return true;
}

std::optional<std::uint32_t> SegmentLog::next() const {
  for (const std::uint32_t segment : free_) {
    if (!is_read(segment)) return segment;
  }
  for (const auto& [life, segment] : closed_) {
    if (!is_read(segment)) return segment;
  }
  return std::nullopt;
}

void SegmentLog::open(std::uint32_t segment, std::uint64_t life) {
  PEGA_ASSERT(open_ == kNone && !is_read(segment), "segment {} cannot be opened", segment);
  leaving_.reset();
  free_.erase(segment);
  std::erase_if(closed_, [&](const auto& each) { return each.second == segment; });
  writing_.push_back(
      {.segment = segment, .life = life, .used = superblock_.head_bytes(), .entries = {}});
  open_ = segment;
}

bool SegmentLog::header_written(std::uint32_t segment) {
  Writing* const to = writing(segment);
  PEGA_ASSERT(to != nullptr && !to->has_header, "no header of segment {} is in flight", segment);
  to->has_header = true;
  return settle(segment);
}

std::uint64_t SegmentLog::greatest_leaving() const {
  const std::size_t free = is_short_ ? 0 : free_.size();
  const std::size_t all = is_short_ ? closed_.size() + writing_.size() : superblock_.segments;
  const std::size_t count = all * 2 / 5;
  if (free >= count || closed_.empty()) return 0;
  const std::size_t last = std::min(count - free, closed_.size()) - 1;
  return std::next(closed_.begin(), static_cast<std::ptrdiff_t>(last))->first;
}

std::optional<SegmentLog::Table> SegmentLog::next_table(bool all) {
  for (Writing& each : writing_) {
    if (each.saving != 0) continue;
    const std::size_t unsaved = each.entries.size() - each.saved;
    const auto page = static_cast<std::uint32_t>(each.saved / kEntriesPerPage);
    const std::size_t first = std::size_t{page} * kEntriesPerPage;
    const std::size_t end = std::min(first + kEntriesPerPage, each.entries.size());
    const bool is_full = end - first == kEntriesPerPage;
    const bool is_last = !each.is_open && each.in_flight == 0;
    if (unsaved == 0 || (!is_full && !is_last && !all)) continue;
    each.saving = end;
    const auto begin = each.entries.begin() + static_cast<std::ptrdiff_t>(first);
    return Table{.segment = each.segment,
                 .offset = superblock_.segment_offset(each.segment) + (1 + page) * kSector,
                 .page = {.life = each.life,
                          .page = page,
                          .entries = {begin, begin + static_cast<std::ptrdiff_t>(end - first)}}};
  }
  return std::nullopt;
}

bool SegmentLog::table_written(std::uint32_t segment) {
  Writing* const to = writing(segment);
  PEGA_ASSERT(to != nullptr && to->saving != 0, "no page of segment {} is in flight", segment);
  to->saved = std::exchange(to->saving, 0);
  return settle(segment);
}

std::size_t SegmentLog::unsaved() const {
  std::size_t count = 0;
  for (const Writing& each : writing_) count += each.entries.size() - each.saved;
  return count;
}

std::size_t SegmentLog::in_flight() const {
  std::size_t count = 0;
  for (const Writing& each : writing_) {
    count += each.in_flight + (each.saving != 0 ? 1 : 0) + (each.has_header ? 0 : 1);
  }
  return count;
}

}  // namespace pegaflow::engine::ssd
