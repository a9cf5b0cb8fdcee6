#include "transport/cuda/peer_mapping.h"

#include <algorithm>
#include <bit>
#include <map>
#include <utility>

#include "base/assert.h"
#include "base/log.h"
#include "base/os/descriptor_box.h"
#include "base/os/pidfd.h"
#include "transport/cuda/attach/layout_plans.h"
#include "transport/cuda/copy_plan.h"
#include "transport/cuda/cuda_error.h"
#include "transport/cuda/shared_memory.h"
#include "transport/device_checks.h"

namespace pegaflow::cuda {
namespace {

constexpr Log kLog{"cuda"};

tl::unexpected<Error> unmappable(const std::string& why) {
  return fail(Errc::kRefused,
              "CUDA cannot map the memory of the other engine: {}; both engines need GPUs that "
              "reach each other's memory, and one IPC and PID namespace",
              why);
}

}  // namespace

Result<std::unique_ptr<PeerMapping>> PeerMapping::open(std::shared_ptr<Driver> driver,
                                                       Context context, const PeerMemory& memory,
                                                       const PageLayout& layout,
                                                       std::span<const Piece> own) {
  if (!memory.is_on_gpu()) {
    return fail(Errc::kRefused, "add peer: its memory is not on a GPU, and that of this engine is");
  }
  const std::size_t named = memory.mapped ? memory.mapped->range_of.size() : memory.handles.size();
  if (named != memory.segments.size()) {
    return fail(Errc::kInvalidArgument, "add peer: {} {} for {} segments", named,
                memory.mapped ? "ranges" : "handles", memory.segments.size());
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

Result<std::vector<PeerMapping::Addresses>> PeerMapping::open_handles(
    std::span<const MemoryHandle> handles) {
  std::map<MemoryHandle, Addresses> allocations;
  std::vector<Addresses> found;
  for (const MemoryHandle& handle : handles) {
    const auto [row, is_new] = allocations.try_emplace(handle);
    Addresses& allocation = row->second;
    if (is_new) {
      const Status status = driver_->open_exported(handle, allocation.base, allocation.bytes);
      if (status != kSuccess) return unmappable(driver_->describe(status));
      opened_.push_back(allocation.base);
    }
    found.push_back(allocation);
  }
  return found;
}

Result<PeerMapping::Addresses> PeerMapping::reserve(std::span<const std::uint64_t> sizes) {
  Addresses range;
  for (const std::uint64_t bytes : sizes) {
    if (bytes == 0 || __builtin_add_overflow(range.bytes, bytes, &range.bytes)) {
      return fail(Errc::kInvalidArgument, "add peer: an allocation of {} bytes", bytes);
    }
  }
  const Status status = driver_->reserve_addresses(range.bytes, range.base);
  if (status != kSuccess) return unmappable(driver_->describe(status));
  reserved_.push_back(range);
  return range;
}

Result<std::vector<PeerMapping::Addresses>> PeerMapping::map_ranges(const MappedMemory& memory) {
  std::vector<Addresses> ranges;
  std::vector<Addresses> allocations;
  for (const std::vector<std::uint64_t>& sizes : memory.ranges) {
    PEGA_TRY_LET(const Addresses range, reserve(sizes));
    DeviceAddress at = range.base;
    for (const std::uint64_t bytes : sizes) {
      allocations.push_back({at, bytes});
      at += bytes;
    }
    ranges.push_back(range);
  }
  auto next = allocations.cbegin();
  PEGA_TRY(DescriptorBox::look(memory.descriptors ? memory.descriptors->get() : -1,
                               allocations.size(), [&](UniqueFd descriptor) -> Result<void> {
                                 const Status status =
                                     driver_->map(next->base, next->bytes, descriptor.get());
                                 if (status != kSuccess)
                                   return unmappable(driver_->describe(status));
                                 mapped_.push_back(*next++);
                                 return {};
                               }));
  for (const Addresses& range : ranges) {
    const Status status = driver_->allow_access(range.base, range.bytes);
    if (status != kSuccess) return unmappable(driver_->describe(status));
  }
  std::vector<Addresses> found;
  for (const std::uint32_t range : memory.range_of) {
    if (range >= ranges.size()) {
      return fail(Errc::kInvalidArgument, "add peer: range {} of {}", range, ranges.size());
    }
    found.push_back(ranges[range]);
  }
  return found;
}

Result<std::vector<Segment>> PeerMapping::map(const PeerMemory& memory) {
  PEGA_TRY_LET(const std::vector<Addresses> addresses,
               memory.mapped ? map_ranges(*memory.mapped) : open_handles(memory.handles));
  std::vector<Segment> segments;
  for (std::size_t i = 0; i < memory.segments.size(); ++i) {
    const Segment& segment = memory.segments[i];
    const auto offset = std::bit_cast<std::uintptr_t>(segment.base);
    // No overflow after check_peer().
    const std::uint64_t extent = extent_of(segment, memory.block_count);
    if (offset > addresses[i].bytes || extent > addresses[i].bytes - offset) {
      return fail(
          Errc::kInvalidArgument,
          "add peer: segment {} with {} bytes from {} on is beyond the {} of its allocation", i,
          extent, offset, addresses[i].bytes);
    }
    // On the device. NOLINTNEXTLINE(performance-no-int-to-ptr)
    auto* const base = reinterpret_cast<std::byte*>(addresses[i].base + offset);
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
  const auto released = [this](Status status) {
    if (status == kSuccess) return;
    kLog.warn("the memory of another engine stays mapped error=\"{}\"", driver_->describe(status));
  };
  if (pieces_ != 0) driver_->release(pieces_);
  for (const DeviceAddress base : opened_) released(driver_->close_exported(base));
  for (const Addresses& each : mapped_) released(driver_->unmap(each.base, each.bytes));
  for (const Addresses& each : reserved_) released(driver_->free_addresses(each.base, each.bytes));
}

}  // namespace pegaflow::cuda
