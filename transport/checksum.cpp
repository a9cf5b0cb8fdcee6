#include "transport/checksum.h"

#include <algorithm>
#include <bit>

// The library's own choice between SSE2, AVX2 and AVX-512, where it was built with it: with SSE2
// alone the hash has some half of the speed.
#ifdef PEGA_XXHASH_DISPATCH
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

namespace pegaflow {
namespace {

/// A page whose hash is the value that means "none" gets the next value instead.
constexpr std::uint64_t mark(std::uint64_t hash) noexcept {
  return hash == kNoChecksum ? std::uint64_t{1} : hash;
}

}  // namespace

struct PageChecksum::State {
  XXH3_state_t* hash;
};

void PageChecksum::Free::operator()(State* state) const noexcept {
  XXH3_freeState(state->hash);
  delete state;
}

PageChecksum::PageChecksum() {
  if (XXH3_state_t* const hash = XXH3_createState(); hash != nullptr) {
    state_.reset(new State{hash});
    reset();
  }
}

PageChecksum::~PageChecksum() = default;

void PageChecksum::reset() noexcept {
  if (state_) XXH3_64bits_reset(state_->hash);
}

void PageChecksum::add(std::span<const std::byte> bytes) noexcept {
  if (state_) XXH3_64bits_update(state_->hash, bytes.data(), bytes.size());
}

std::uint64_t PageChecksum::value() const noexcept {
  return state_ ? mark(XXH3_64bits_digest(state_->hash)) : kNoChecksum;
}

std::uint64_t PageChecksum::of(std::span<const std::byte> page) noexcept {
  return mark(XXH3_64bits(page.data(), page.size()));
}

std::uint64_t checksum_of_parts(std::span<const std::uint64_t> parts) noexcept {
  static_assert(std::endian::native == std::endian::little);
  if (std::find(parts.begin(), parts.end(), kNoChecksum) != parts.end()) return kNoChecksum;
  return parts.size() == 1 ? parts.front() : PageChecksum::of(std::as_bytes(parts));
}

}  // namespace pegaflow
