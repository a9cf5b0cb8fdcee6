// Compares our declarations of the driver API with the toolkit's, where there is one.
#include <type_traits>

#include <cuda.h>

#include <doctest/doctest.h>

#include "transport/cuda/driver.h"

namespace pegaflow::cuda {
namespace {

static_assert(sizeof(CUdeviceptr) == sizeof(DeviceAddress));
static_assert(std::is_pointer_v<CUstream> && std::is_pointer_v<CUevent>);
static_assert(sizeof(CUresult) == sizeof(Status));
static_assert(sizeof(CUdevice) == sizeof(int));
// The struct that driver.cpp passes to cuMemcpyBatchAsync.
static_assert(sizeof(CUmemcpyAttributes) == 6 * sizeof(int));
static_assert(offsetof(CUmemcpyAttributes, srcLocHint) == sizeof(int));
static_assert(offsetof(CUmemcpyAttributes, flags) == 5 * sizeof(int));
static_assert(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM == 1);

TEST_CASE("CUDA's constants equal those of its header") {
  CHECK(kSuccess == CUDA_SUCCESS);
  CHECK(kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(kNotReady == CUDA_ERROR_NOT_READY);
  CHECK(kNotSupported == CUDA_ERROR_NOT_SUPPORTED);
  CHECK(static_cast<int>(Attribute::kMultiprocessors) == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  CHECK(static_cast<int>(Attribute::kComputeMajor) == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  CHECK(static_cast<int>(Attribute::kComputeMinor) == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  CHECK(static_cast<int>(Attribute::kFlushOptions) ==
        CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS);
  CHECK(static_cast<int>(Attribute::kWritesOrdering) ==
        CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING);
  CHECK(kOrderedForOwner == CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER);
  CHECK(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST == 1);
  CHECK(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX == 0);
  CHECK(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER == 100);
  CHECK(CU_STREAM_NON_BLOCKING == 1);
  CHECK(CU_EVENT_DISABLE_TIMING == 2);
  CHECK(CU_MEMHOSTALLOC_PORTABLE == 1);
  CHECK(CU_MEMHOSTALLOC_DEVICEMAP == 2);
  CHECK(CU_MEMHOSTREGISTER_PORTABLE == 1);
}

}  // namespace
}  // namespace pegaflow::cuda
