#include "engine/eviction/policy_memory.h"

namespace pegaflow::engine {
namespace {

constexpr std::size_t kPageBytes = 4096;

}  // namespace

void PolicyMemory::begin(std::uint64_t owner) noexcept {
  taken_ = kPageBytes;  // The first page has the owner.
  if (kept_.size() < kPageBytes) kept_ = {};
  if (kept_.empty()) return;
  auto& present = *reinterpret_cast<std::uint64_t*>(kept_.data());
  if (present == owner) return;
  if (present != 0) forget_zero_pages(kept_.data(), kept_.data() + kept_.size(), true);
  if (present != 0) {
    kept_ = {};  // The kernel did not clear it.
    return;
  }
  present = owner;
}

std::span<std::byte> PolicyMemory::take_kept(std::size_t count, std::size_t bytes_each) noexcept {
  const std::size_t room = kept_.size() < taken_ ? 0 : kept_.size() - taken_;
  if (count == 0 || count > room / bytes_each) return {};
  const std::span<std::byte> found = kept_.subspan(taken_, count * bytes_each);
  taken_ += (found.size() + kPageBytes - 1) / kPageBytes * kPageBytes;
  return found;
}

}  // namespace pegaflow::engine
