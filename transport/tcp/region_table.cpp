#include "transport/tcp/region_table.h"

namespace pegaflow::tcp {

Result<RegionId> RegionTable::add(std::span<std::byte> memory) {
  if (memory.empty()) return fail(Errc::kInvalidArgument, "a region has at least one byte");
  const std::uint32_t number = used_.load(std::memory_order_relaxed);
  if (number == kMaximum) {
    return fail(Errc::kOutOfCapacity, "{} regions were registered already", kMaximum);
  }
  Region& region = regions_[number];
  region.size_bytes = memory.size();
  region.begin.store(memory.data(), std::memory_order_relaxed);
  // Pairs with find(): a thread that sees the number also sees the entry.
  used_.store(number + 1, std::memory_order_release);
  return RegionId{number};
}

Result<void> RegionTable::lend(RegionId region, TimePoint until) {
  if (find(region) == nullptr) {
    return fail(Errc::kInvalidArgument, "there is no region {}",
                static_cast<std::uint32_t>(region));
  }
  regions_[static_cast<std::uint32_t>(region)].lent_until_ns.store(until.time_since_epoch().count(),
                                                                   std::memory_order_release);
  return {};
}

void RegionTable::remove(RegionId region) noexcept {
  if (find(region) == nullptr) return;
  regions_[static_cast<std::uint32_t>(region)].begin.store(nullptr, std::memory_order_relaxed);
}

std::vector<RegionDescriptor> RegionTable::describe() const {
  std::vector<RegionDescriptor> all;
  for (std::uint32_t i = 0; i < used_.load(std::memory_order_acquire); ++i) {
    if (find(RegionId{i}) == nullptr) continue;
    all.push_back({.region = RegionId{i}, .size_bytes = regions_[i].size_bytes});
  }
  return all;
}

const RegionTable::Region* RegionTable::find(RegionId region) const noexcept {
  const auto number = static_cast<std::uint32_t>(region);
  // Pairs with add().
  if (number >= used_.load(std::memory_order_acquire)) return nullptr;
  const Region& entry = regions_[number];
  return entry.begin.load(std::memory_order_relaxed) == nullptr ? nullptr : &entry;
}

std::uint64_t RegionTable::size_bytes(RegionId region) const noexcept {
  const Region* const found = find(region);
  return found == nullptr ? 0 : found->size_bytes;
}

std::optional<std::span<std::byte>> RegionTable::part(RegionId region, std::uint64_t offset,
                                                      std::uint64_t size_bytes) const noexcept {
  const Region* const found = find(region);
  if (found == nullptr || offset > found->size_bytes || size_bytes > found->size_bytes - offset) {
    return std::nullopt;
  }
  return std::span(found->begin.load(std::memory_order_relaxed) + offset,
                   static_cast<std::size_t>(size_bytes));
}

bool RegionTable::lent(RegionId region, TimePoint now) const noexcept {
  const Region* const found = find(region);
  // Pairs with lend(): a lease that ended before this request has ended here.
  return found != nullptr &&
         now.time_since_epoch().count() < found->lent_until_ns.load(std::memory_order_acquire);
}

}  // namespace pegaflow::tcp
