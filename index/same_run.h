#pragma once
/// \file
/// The comparison of a chain with the cells of a run.

#include <cstdint>
#include <span>

#include "index/cells.h"

namespace pegaflow::index {

/// How many cells from `place` on have the keys of `chain`, in its order, and the set `set`.
[[nodiscard]] std::uint32_t same_run(const Cells& cells, Place place, std::span<const Key> chain,
                                     SetId set);

}  // namespace pegaflow::index
