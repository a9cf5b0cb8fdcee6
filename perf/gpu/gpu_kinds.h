#pragma once
/// \file
/// Copies of several kinds of blocks between the pool and a GPU, beside contiguous copies.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/page_layout.h"
#include "perf/gpu/gpu_memory.h"
#include "perf/lib/figures.h"
#include "transport/cuda/cuda_device.h"

namespace pegaflow::perf {

/// Groups of equal layers, whose pages lie one behind the other in a slot of the pool.
struct GpuKind {
  std::string name;  ///< For the report.
  std::uint32_t groups = 1;
  GpuGroup group;
  std::uint64_t blocks = 0;  ///< The number in each save and each load.

  [[nodiscard]] std::uint64_t slot_bytes() const noexcept {
    return slot_bytes_for(groups * group.page_bytes());
  }
  [[nodiscard]] std::uint64_t job_bytes() const noexcept {
    return blocks * groups * group.page_bytes();
  }
};

/// Reads kinds written as NAME:[GROUPSx]LAYERSxBYTES[@BLOCKS]: "full:8x128kb@625",
/// "window:5x8x128kb@64". Kinds without @BLOCKS have an equal share of 256 MiB, at least one block.
/// Errors: kInvalidArgument, which names the text; for more than 16 kinds; for a page of more than
/// 1 GiB.
Result<std::vector<GpuKind>> parse_kinds(std::span<const std::string> texts);

/// "625 of full 8 x 128 KiB, 64 of window 5 x 8 x 128 KiB".
std::string to_string(std::span<const GpuKind> kinds);

struct KindsRun {
  std::vector<GpuKind> kinds;
  std::vector<std::string> orders;  ///< "shuffled", "in-order".
  int device = 0;
  std::int64_t rounds = 3;
  std::int64_t milliseconds = 200;
  std::uint64_t seed = 1;
  bool check = false;  ///< Compare every byte of a load and of a save first.
};

/// Adds figures of saves, loads and both. A save or a load has the batches that the client library
/// would submit: one for each group of each kind. Half of the pages that fit into `pool` are of
/// saves, half of loads, all of them in blocks of their own on the GPU.
/// Errors: kInvalidArgument when `pool` holds fewer than two jobs; kCorrupt when a byte is wrong;
/// those of the device and of CUDA.
Result<void> measure_kinds(const KindsRun& run, const std::shared_ptr<cuda::Driver>& driver,
                           CudaDevice& device, std::span<std::byte> pool,
                           std::vector<Figure>& figures);

}  // namespace pegaflow::perf
