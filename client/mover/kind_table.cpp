#include "client/mover/kind_table.h"

#include <algorithm>
#include <utility>

namespace pegaflow {

KindTable KindTable::plain(PageLayout layout) {
  KindTable table;
  table.add(BlockRule::kPrefix, 0, 0, std::span(&layout, 1));
  return table;
}

Result<KindTable> KindTable::of_cells(std::span<const PageLayout> cells, bool apart) {
  if (cells.empty()) return fail(Errc::kInvalidArgument, "a block without cells");
  for (const PageLayout& cell : cells) {
    if (cell.page_bytes() == cells.front().page_bytes()) continue;
    return fail(Errc::kInvalidArgument, "cells of {} and {} bytes", cells.front().page_bytes(),
                cell.page_bytes());
  }
  if (cells.front().page_bytes() > kMaxPageBytes / cells.size()) {
    return fail(Errc::kInvalidArgument, "{} cells of {} bytes; at most {} are cached", cells.size(),
                cells.front().page_bytes(), kMaxPageBytes);
  }
  KindTable table;
  if (apart) {
    table.add(BlockRule::kPrefix, 0, 0, cells);
    table.kinds_.front().is_cut = true;
    return table;
  }
  std::vector<Segment> segments;
  for (const PageLayout& cell : cells) {
    segments.insert(segments.end(), cell.segments().begin(), cell.segments().end());
  }
  PEGA_TRY_LET(PageLayout whole,
               PageLayout::create(std::move(segments), cells.front().block_count()));
  return plain(std::move(whole));
}

Result<KindTable> KindTable::create(const MoverKinds& kinds) {
  if (kinds.kinds.empty() || kinds.kinds.size() > kMaxKinds) {
    return fail(Errc::kInvalidArgument, "{} kinds of blocks; 1 to {} are possible",
                kinds.kinds.size(), kMaxKinds);
  }
  if (kinds.unit_tokens == 0 || kinds.alignment_tokens == 0) {
    return fail(Errc::kInvalidArgument,
                "units of {} tokens and an alignment of {}: both must be positive",
                kinds.unit_tokens, kinds.alignment_tokens);
  }
  KindTable table;
  table.unit_tokens_ = kinds.unit_tokens;
  table.alignment_tokens_ = kinds.alignment_tokens;
  for (const MoverKind& kind : kinds.kinds) {
    table.add(kind.rule, kind.tokens, kind.block_tokens, kind.members);
    if (table.kinds_.back().page_bytes > kMaxPageBytes) {
      return fail(Errc::kInvalidArgument,
                  "kind {} of blocks has pages of {} bytes; at most {} are cached",
                  table.size() - 1, table.kinds_.back().page_bytes, kMaxPageBytes);
    }
  }
  if (table.layouts_.empty()) {
    return fail(Errc::kInvalidArgument,
                "no kind of blocks has a member: this rank has no KV cache");
  }
  return table;
}

void KindTable::add(BlockRule rule, std::uint32_t tokens, std::uint32_t block_tokens,
                    std::span<const PageLayout> members) {
  KindPages& pages = kinds_.emplace_back(
      KindPages{.rule = rule, .tokens = tokens, .block_tokens = block_tokens, .members = {}});
  for (const PageLayout& member : members) {
    pages.members.push_back({.layout = layouts_.size(),
                             .begin = pages.page_bytes,
                             .bytes = member.page_bytes(),
                             .block_count = member.block_count()});
    pages.page_bytes += member.page_bytes();
    layouts_.push_back(member);
  }
}

std::uint64_t KindTable::largest_page() const noexcept {
  std::uint64_t largest = 0;
  for (const KindPages& kind : kinds_) largest = std::max(largest, kind.page_bytes);
  return largest;
}

std::uint64_t KindTable::block_count() const noexcept {
  std::uint64_t most = 0;
  for (const PageLayout& layout : layouts_) most = std::max(most, layout.block_count());
  return most;
}

Result<void> KindTable::check(std::size_t kind, std::size_t count,
                              std::span<const std::uint32_t> blocks) const {
  if (kind >= kinds_.size()) {
    return fail(Errc::kInvalidArgument, "kind {} of {} kinds of blocks", kind, kinds_.size());
  }
  const std::vector<KindPages::Member>& members = kinds_[kind].members;
  const std::size_t per_key = kinds_[kind].blocks_per_key();
  if (blocks.size() != count * per_key) {
    return fail(Errc::kInvalidArgument,
                "{} blocks for {} keys of kind {}, which has {} for each key", blocks.size(), count,
                kind, per_key);
  }
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const std::uint64_t block_count = members[i % per_key].block_count;
    if (blocks[i] >= block_count) {
      return fail(Errc::kInvalidArgument, "block {} of {}", blocks[i], block_count);
    }
  }
  return {};
}

}  // namespace pegaflow
