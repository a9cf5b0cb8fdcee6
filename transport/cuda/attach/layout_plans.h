#pragma once
/// \file
/// Preparation of a device for the layouts that are attached to it.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/error.h"
#include "base/page_layout.h"
#include "transport/cuda/copy_plan.h"
#include "transport/cuda/copy_stream.h"
#include "transport/cuda/driver.h"

namespace pegaflow::cuda {

/// Allocates memory on the device for pieces and copies them there. After an error the caller
/// releases `uploaded` too, unless it is 0. Errors: CUDA's.
Result<void> upload_pieces(Driver& driver, std::span<const Piece> pieces, Stream stream,
                           DeviceAddress& uploaded);

struct PlanOptions {
  std::uint64_t register_bytes = 0;  ///< As CopyPlan has it.
  std::optional<Path> path{};        ///< Overrides the choice.
  bool has_kernels = false;
};

struct PlannedLayouts {
  std::vector<Attached> plans;  ///< By layout.
  /// The speed of direct copies where it was measured: the least over the sizes of segments.
  std::optional<double> direct_share;
};

/// Plans the copies of each layout, uploads its pieces where there are kernels, and chooses its
/// path: direct copies are measured as a share of the copy engine's speed where the size of the
/// segments does not decide, once for each size. With the context current and nothing in flight on
/// the two streams, which take staging if a layout needs it. After an error nothing is allocated.
/// Errors: CUDA's.
Result<PlannedLayouts> plan_layouts(Driver& driver, const PlanOptions& options,
                                    std::span<const PageLayout> layouts, std::span<std::byte> pool,
                                    CopyStream& save, CopyStream& load);

/// Releases what plan_layouts() has allocated. With the context current.
void release_plans(Driver& driver, std::span<const Attached> plans);

}  // namespace pegaflow::cuda
