#pragma once
/// \file
/// The memory of an engine's GPU, as other processes of this host map it.

#include "base/error.h"
#include "base/page_layout.h"
#include "transport/cuda/driver.h"
#include "transport/device.h"

namespace pegaflow::cuda {

/// The memory of a layout as add_peer() of other processes takes it: by CUDA's IPC handles, or
/// where there are none by descriptors of the allocations. With the context current.
/// Errors: kRefused with CUDA's reason for memory that has neither, and when so many descriptors
/// are too many for this process.
Result<PeerMemory> share_memory(Driver& driver, const PageLayout& layout);

}  // namespace pegaflow::cuda
