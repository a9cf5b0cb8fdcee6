#include "transport/cuda/peer_mapping.h"

#include <algorithm>
#include <bit>
#include <map>
#include <utility>

#include "base/assert.h"
#include "base/log.h"
#include "base/os/pidfd.h"
#include "transport/cuda/attach/layout_plans.h"
#include "transport/cuda/copy_plan.h"
#include "transport/cuda/cuda_error.h"
#include "transport/device_checks.h"

namespace pegaflow::cuda {
namespace {

constexpr Log kLog{"cuda"};

/// The bytes of a segment from its first to its last block. No overflow after check_peer().
std::uint64_t extent_of(const Segment& segment, std::uint64_t block_count) {
  return (block_count - 1) * segment.block_stride_bytes + segment.size_bytes;
}

}  // namespace

Result<PeerMemory> share_memory(Driver& driver, const PageLayout& layout) {
  PeerMemory memory{.segments = {}, .block_count = layout.block_count()};
  for (const Segment& segment : layout.segments()) {
    const auto address = std::bit_cast<std::uintptr_t>(segment.base);
    DeviceAddress base = 0;
    const Status status = driver.export_memory(address, memory.handles.emplace_back(), base);
    if (status != kSuccess) {
      return fail(Errc::kRefused,
                  "CUDA cannot share the memory at {:#x} with other processes: {}; it can if the "
                  "engine's allocator has neither expandable segments nor a sleep mode",
                  address, driver.describe(status));
    }
    // An offset, not an address. NOLINTNEXTLINE(performance-no-int-to-ptr)
    auto* const offset = reinterpret_cast<std::byte*>(address - base);
    memory.segments.push_back({offset, segment.block_stride_bytes, segment.size_bytes});
  }
  return memory;
}

Result<std::unique_ptr<PeerMapping>> PeerMapping::open(std::shared_ptr<Driver> driver,
                                                       Context context, const PeerMemory& memory,
                                                       const PageLayout& layout,
                                                       std::span<const Piece> own) {
  if (memory.handles.empty()) {
    return fail(Errc::kRefused, "add peer: its memory is not on a GPU, and that of this engine is");
  }
  if (memory.handles.size() != memory.segments.size()) {
    return fail(Errc::kInvalidArgument, "add peer: {} handles for {} segments",
                memory.handles.size(), memory.segments.size());
  }
  PEGA_TRY(device::check_peer(memory, layout));
  if (has_process_ended(memory.process)) {
    return fail(Errc::kGone, "add peer: its process has ended");
  }
  std::unique_ptr<PeerMapping> peer(new PeerMapping(std::move(driver), context, memory));
  PEGA_TRY_LET(std::vector<Segment> mapped, peer->map(memory));
  PEGA_TRY_LET(const PageLayout theirs, PageLayout::create(std::move(mapped), memory.block_count));
  const CopyPlan plan(theirs, kSlotAlignment, true);
  std::vector<Piece> pieces(plan.pieces().begin(), plan.pieces().end());
  PEGA_ASSERT(pieces.size() == own.size(), "{} pieces beside {}", pieces.size(), own.size());
  // Both ends are accessed in the same units.
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    pieces[i].unit = std::min(pieces[i].unit, own[i].unit);
  }
  PEGA_TRY(peer->upload(pieces));
  return peer;
}

Result<std::vector<Segment>> PeerMapping::map(const PeerMemory& memory) {
  struct Allocation {
    DeviceAddress base = 0;
    std::uint64_t bytes = 0;
  };
  std::map<MemoryHandle, Allocation> allocations;
  std::vector<Segment> segments;
  for (std::size_t i = 0; i < memory.segments.size(); ++i) {
    const auto [found, is_new] = allocations.try_emplace(memory.handles[i]);
    Allocation& allocation = found->second;
    if (is_new) {
      const Status status = driver_->open_exported(found->first, allocation.base, allocation.bytes);
      if (status != kSuccess) {
        return fail(
            Errc::kRefused,
            "CUDA cannot map the memory of the other engine: {}; both engines need GPUs that "
            "reach each other's memory, and one IPC and PID namespace",
            driver_->describe(status));
      }
      opened_.push_back(allocation.base);
    }
    const Segment& segment = memory.segments[i];
    const auto offset = std::bit_cast<std::uintptr_t>(segment.base);
    const std::uint64_t extent = extent_of(segment, memory.block_count);
    if (offset > allocation.bytes || extent > allocation.bytes - offset) {
      return fail(
          Errc::kInvalidArgument,
          "add peer: segment {} with {} bytes from {} on is beyond the {} of its allocation", i,
          extent, offset, allocation.bytes);
    }
    // On the device. NOLINTNEXTLINE(performance-no-int-to-ptr)
    auto* const base = reinterpret_cast<std::byte*>(allocation.base + offset);
    segments.push_back({base, segment.block_stride_bytes, segment.size_bytes});
  }
  return segments;
}

Result<void> PeerMapping::upload(std::span<const Piece> pieces) {
  // On a stream of its own: it must not wait for copies of the engine.
  Stream stream = nullptr;
  PEGA_TRY(check(*driver_, driver_->create_stream(0, stream), "create a stream"));
  const Result<void> uploaded = upload_pieces(*driver_, pieces, stream, pieces_);
  driver_->destroy_stream(stream);
  return uploaded;
}

PeerMapping::~PeerMapping() {
  const CurrentContext current(*driver_, context_);
  if (pieces_ != 0) driver_->release(pieces_);
  for (const DeviceAddress base : opened_) {
    const Status status = driver_->close_exported(base);
    if (status != kSuccess) {
      kLog.warn("the memory of another engine stays mapped error=\"{}\"",
                driver_->describe(status));
    }
  }
}

}  // namespace pegaflow::cuda
