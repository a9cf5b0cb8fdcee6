#include "transport/cuda/copy_plan.h"

#include <algorithm>
#include <bit>

#include "base/assert.h"

namespace pegaflow::cuda {
namespace {

/// Staging begins at a multiple of this, so that pieces in it keep the alignment that they have in
/// the page.
constexpr std::uint64_t kOriginAlignment = 256;

std::uint32_t unit_of(const Segment& segment, std::uint64_t page_offset) {
  const std::uint64_t all = reinterpret_cast<std::uintptr_t>(segment.base) |
                            segment.block_stride_bytes | segment.size_bytes | page_offset | 16;
  return static_cast<std::uint32_t>(all & (~all + 1));  // The lowest bit that is set.
}

}  // namespace

CopyPlan::CopyPlan(const PageLayout& layout, std::uint64_t register_bytes, bool owns_slots)
    : page_bytes_(layout.page_bytes()),
      pitch_(slot_bytes_for(page_bytes_)),
      register_bytes_(register_bytes),
      owns_slots_(owns_slots),
      mean_segment_bytes_(page_bytes_ / layout.segments().size()) {
  PEGA_ASSERT(std::has_single_bit(register_bytes), "ranges of {} bytes", register_bytes);
  std::uint64_t page_offset = 0;
  for (const Segment& segment : layout.segments()) {
    const auto base = reinterpret_cast<std::uintptr_t>(segment.base);
    const std::uint32_t unit = unit_of(segment, page_offset);
    for (std::uint64_t at = 0; at < segment.size_bytes; at += kPieceBytes) {
      const std::uint64_t bytes = std::min<std::uint64_t>(kPieceBytes, segment.size_bytes - at);
      pieces_.push_back({.base = base + at,
                         .stride = segment.block_stride_bytes,
                         .page_offset = page_offset + at,
                         .bytes = static_cast<std::uint32_t>(bytes),
                         .unit = unit});
    }
    page_offset += segment.size_bytes;
  }
  // About eight units per thread, which are in flight together.
  const std::uint64_t mean_piece = page_bytes_ / pieces_.size();
  group_ = static_cast<unsigned>(
      std::bit_floor(std::clamp<std::uint64_t>(mean_piece / 128, 32, kThreads)));
}

Slice CopyPlan::next(std::size_t copy, std::uint32_t piece, std::size_t copies,
                     std::uint64_t max_bytes) const {
  PEGA_ASSERT(copy < copies && piece < pieces_.size(), "copy {} of {}, piece {}", copy, copies,
              piece);
  const auto piece_count = static_cast<std::uint32_t>(pieces_.size());
  if (piece == 0 && pitch_ <= max_bytes) {
    const std::size_t pages = std::min<std::uint64_t>(copies - copy, max_bytes / pitch_);
    return {.first_copy = copy,
            .copies = pages,
            .first_piece = 0,
            .pieces = piece_count,
            .origin = 0,
            .first_byte = 0,
            .page_bytes = page_bytes_,
            .staged_bytes = pages * pitch_,
            .ends_pages = true};
  }
  const std::uint64_t first_byte = pieces_[piece].page_offset;
  const std::uint64_t origin = first_byte / kOriginAlignment * kOriginAlignment;
  std::uint32_t end = piece;
  std::uint64_t end_byte = first_byte;
  do {
    end_byte = pieces_[end].page_offset + pieces_[end].bytes;
    ++end;
  } while (end < piece_count &&
           pieces_[end].page_offset + pieces_[end].bytes - origin <= max_bytes);
  return {.first_copy = copy,
          .copies = 1,
          .first_piece = piece,
          .pieces = end - piece,
          .origin = origin,
          .first_byte = first_byte,
          .page_bytes = end_byte - first_byte,
          .staged_bytes = end_byte - origin,
          .ends_pages = end == piece_count};
}

void CopyPlan::add(std::vector<Transfer>& transfers, std::byte* pool, std::uint64_t pool_offset,
                   DeviceAddress device, std::uint64_t bytes) const {
  while (bytes != 0) {
    const std::uint64_t left_in_range = register_bytes_ - pool_offset % register_bytes_;
    const std::uint64_t now = std::min(bytes, left_in_range);
    std::byte* const host = pool + pool_offset;
    if (!transfers.empty() && pool_offset % register_bytes_ != 0 &&
        transfers.back().host + transfers.back().bytes == host &&
        transfers.back().device + transfers.back().bytes == device) {
      transfers.back().bytes += now;
    } else {
      transfers.push_back({host, device, now});
    }
    pool_offset += now;
    device += now;
    bytes -= now;
  }
}

std::vector<Transfer> CopyPlan::staged_transfers(const Slice& slice,
                                                 std::span<const Device::Copy> copies,
                                                 std::byte* pool, DeviceAddress staging) const {
  std::vector<Transfer> transfers;
  transfers.reserve(slice.copies);
  for (std::size_t i = 0; i < slice.copies; ++i) {
    const std::uint64_t slot = copies[slice.first_copy + i].pool_offset;
    // To the end of the slot where the next page follows there: both belong to this batch, and the
    // bytes between them are padding, or there are none.
    const bool joined = (owns_slots_ || page_bytes_ == pitch_) && slice.page_bytes == page_bytes_ &&
                        i + 1 < slice.copies &&
                        copies[slice.first_copy + i + 1].pool_offset == slot + pitch_;
    add(transfers, pool, slot + slice.first_byte,
        staging + i * pitch_ + (slice.first_byte - slice.origin),
        joined ? pitch_ : slice.page_bytes);
  }
  return transfers;
}

std::vector<Transfer> CopyPlan::direct_transfers(const Slice& slice,
                                                 std::span<const Device::Copy> copies,
                                                 std::byte* pool) const {
  std::vector<Transfer> transfers;
  for (std::size_t i = 0; i < slice.copies; ++i) {
    const Device::Copy& copy = copies[slice.first_copy + i];
    for (std::uint32_t p = slice.first_piece; p < slice.first_piece + slice.pieces; ++p) {
      const Piece& piece = pieces_[p];
      add(transfers, pool, copy.pool_offset + piece.page_offset,
          piece.base + copy.block * piece.stride, piece.bytes);
    }
  }
  return transfers;
}

}  // namespace pegaflow::cuda
