#pragma once
/// \file
/// The checks of their callers that all devices have in common.

#include <cstddef>
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

/// The layout, the blocks and the places of a batch.
inline Result<void> check_batch(const Device::Batch& batch, std::span<const PageLayout> layouts,
                                std::uint64_t pool_bytes) {
  if (batch.layout >= layouts.size()) {
    return fail(Errc::kInvalidArgument, "batch {}: layout {} of {}", batch.ticket, batch.layout,
                layouts.size());
  }
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
