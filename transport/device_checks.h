#pragma once
/// \file
/// The checks of their callers that all devices have in common.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/error.h"
#include "transport/device.h"

namespace pegaflow::device {

/// The arguments of Device::attach().
inline Result<void> check_attach(std::span<const PageLayout> layouts, std::span<std::byte> pool,
                                 const Device::CompletionSink& sink) {
  if (layouts.empty()) return fail(Errc::kInvalidArgument, "attach: no layout was given");
  if (pool.empty() || sink == nullptr) {
    return fail(Errc::kInvalidArgument,
                "attach: the pool is empty or no completion sink was given");
  }
  return {};
}

/// The pages of a peer, beside a layout of the reader.
inline Result<void> check_peer_pages(const PeerMemory& memory, const PageLayout& layout) {
  const auto same_size = [](const Segment& one, const Segment& other) {
    return one.size_bytes == other.size_bytes;
  };
  if (!std::ranges::equal(memory.segments, layout.segments(), same_size)) {
    return fail(Errc::kRefused,
                "add peer: its {} segments differ in number or size from the {} of this engine",
                memory.segments.size(), layout.segments().size());
  }
  if (memory.block_count == 0) return fail(Errc::kInvalidArgument, "add peer: it has no block");
  return {};
}

/// Whether a peer's memory is only on another host, where no process of this host reaches it.
inline bool is_on_another_host(const PeerMemory& memory) {
  return memory.process < 0 && memory.network.has_value();
}

/// For devices without a network.
inline Result<void> check_host(const PeerMemory& memory) {
  if (!is_on_another_host(memory)) return {};
  return fail(Errc::kRefused,
              "add peer: its memory is on another host, and this device has no network");
}

/// The memory of a peer on this host, beside a layout of the reader.
inline Result<void> check_peer(const PeerMemory& memory, const PageLayout& layout) {
  PEGA_TRY(check_peer_pages(memory, layout));
  for (const Segment& segment : memory.segments) {
    std::uint64_t end = 0;
    if (__builtin_mul_overflow(memory.block_count - 1, segment.block_stride_bytes, &end) ||
        __builtin_add_overflow(end, segment.size_bytes, &end) ||
        __builtin_add_overflow(end, std::bit_cast<std::uintptr_t>(segment.base), &end)) {
      return fail(Errc::kInvalidArgument,
                  "add peer: {} blocks of {} bytes from address {:#x} on are beyond all addresses",
                  memory.block_count, segment.block_stride_bytes,
                  std::bit_cast<std::uintptr_t>(segment.base));
    }
  }
  return {};
}

/// The blocks of a batch that reads a peer with `peer_blocks` blocks; no value: an unknown peer.
inline Result<void> check_peer_batch(const Device::Batch& batch, const PageLayout& layout,
                                     std::optional<std::uint64_t> peer_blocks) {
  if (batch.direction != Device::Direction::kLoad || batch.layout != 0) {
    return fail(Errc::kInvalidArgument, "batch {}: only loads of layout 0 read a peer",
                batch.ticket);
  }
  if (!peer_blocks) {
    return fail(Errc::kInvalidArgument, "batch {}: unknown peer {}", batch.ticket, batch.peer);
  }
  for (const Device::Copy& copy : batch.copies) {
    if (copy.block >= layout.block_count() || copy.pool_offset >= *peer_blocks) {
      return fail(Errc::kInvalidArgument, "block {} of {}, from block {} of {} of peer {}",
                  copy.block, layout.block_count(), copy.pool_offset, *peer_blocks, batch.peer);
    }
  }
  return {};
}

/// The layout, the blocks and the places of a batch. `peer_blocks`: as check_peer_batch().
inline Result<void> check_batch(const Device::Batch& batch, std::span<const PageLayout> layouts,
                                std::uint64_t pool_bytes,
                                std::optional<std::uint64_t> peer_blocks = std::nullopt) {
  if (batch.layout >= layouts.size()) {
    return fail(Errc::kInvalidArgument, "batch {}: layout {} of {}", batch.ticket, batch.layout,
                layouts.size());
  }
  if (batch.peer != 0) return check_peer_batch(batch, layouts[batch.layout], peer_blocks);
  const std::uint64_t block_count = layouts[batch.layout].block_count();
  const std::uint64_t page_bytes = layouts[batch.layout].page_bytes();
  for (const Device::Copy& copy : batch.copies) {
    if (copy.block >= block_count || copy.pool_offset > pool_bytes ||
        page_bytes > pool_bytes - copy.pool_offset) {
      return fail(Errc::kInvalidArgument,
                  "block {} of {}, a page of {} bytes at {} in a pool of {}", copy.block,
                  block_count, page_bytes, copy.pool_offset, pool_bytes);
    }
  }
  return {};
}

}  // namespace pegaflow::device
