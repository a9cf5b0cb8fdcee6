#pragma once
/// \file
/// The copy of one page between its place in the pool and a block's segments.

#include <cstddef>
#include <cstdint>

#include "base/page_layout.h"
#include "transport/device.h"

namespace pegaflow {

/// Copies one page. Immutable arguments; any thread; the two places do not overlap.
void copy_page(const PageLayout& layout, Device::Direction direction, std::uint32_t block,
               std::byte* page) noexcept;

}  // namespace pegaflow
