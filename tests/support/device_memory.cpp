#include "tests/support/device_memory.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "tests/support/engine_memory.h"

namespace pegaflow::testing {
namespace {

constexpr std::byte kGap{0xEE};

}  // namespace

#define PEGA_MUST(status)                                                      \
  do {                                                                         \
    const cuda::Status must_status = (status);                                 \
    if (must_status != cuda::kSuccess) {                                       \
      throw std::runtime_error(#status ": " + driver_->describe(must_status)); \
    }                                                                          \
  } while (false)

DeviceMemory::DeviceMemory(std::shared_ptr<cuda::Driver> driver, std::size_t segments,
                           std::size_t segment_bytes, std::size_t blocks, std::size_t gap_bytes)
    : driver_(std::move(driver)),
      segment_bytes_(segment_bytes),
      blocks_(blocks),
      stride_(segment_bytes + gap_bytes) {
  PEGA_MUST(driver_->retain_primary_context(0, context_));
  const cuda::CurrentContext current(*driver_, context_);
  PEGA_MUST(driver_->create_stream(0, stream_));
  for (std::size_t i = 0; i < segments; ++i) {
    PEGA_MUST(driver_->allocate(stride_ * blocks_, allocations_.emplace_back(0)));
    PEGA_MUST(driver_->fill(allocations_.back(), std::to_integer<unsigned char>(kGap),
                            stride_ * blocks_, stream_));
  }
  PEGA_MUST(driver_->synchronize(stream_));
}

DeviceMemory::~DeviceMemory() {
  {
    const cuda::CurrentContext current(*driver_, context_);
    for (const cuda::DeviceAddress address : allocations_) driver_->release(address);
    driver_->destroy_stream(stream_);
  }
  driver_->release_primary_context(0);
}

PageLayout DeviceMemory::layout() const {
  std::vector<Segment> segments;
  for (const cuda::DeviceAddress address : allocations_) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): a layout has addresses of any kind of memory.
    segments.push_back({reinterpret_cast<std::byte*>(address), stride_, segment_bytes_});
  }
  return PageLayout::create(std::move(segments), blocks_).value();
}

std::vector<std::byte> DeviceMemory::read(std::size_t segment) const {
  std::vector<std::byte> bytes(stride_ * blocks_);
  const cuda::CurrentContext current(*driver_, context_);
  const cuda::Transfer all{bytes.data(), allocations_[segment], bytes.size()};
  PEGA_MUST(driver_->copy(cuda::Direction::kToHost, &all, 1, stream_));
  PEGA_MUST(driver_->synchronize(stream_));
  return bytes;
}

void DeviceMemory::write(std::size_t segment, std::span<const std::byte> bytes) {
  std::vector<std::byte> source(bytes.begin(), bytes.end());
  const cuda::CurrentContext current(*driver_, context_);
  const cuda::Transfer all{source.data(), allocations_[segment], source.size()};
  PEGA_MUST(driver_->copy(cuda::Direction::kToDevice, &all, 1, stream_));
  PEGA_MUST(driver_->synchronize(stream_));
}

void DeviceMemory::fill(std::uint32_t block, std::uint64_t seed) {
  std::vector<std::byte> page(allocations_.size() * segment_bytes_);
  fill_page(page.data(), page.size(), seed);
  const cuda::CurrentContext current(*driver_, context_);
  for (std::size_t i = 0; i < allocations_.size(); ++i) {
    const cuda::Transfer piece{page.data() + i * segment_bytes_, allocations_[i] + block * stride_,
                               segment_bytes_};
    PEGA_MUST(driver_->copy(cuda::Direction::kToDevice, &piece, 1, stream_));
  }
  PEGA_MUST(driver_->synchronize(stream_));
}

std::vector<std::uint32_t> DeviceMemory::wrong(const std::vector<std::uint64_t>& seeds) const {
  std::vector<bool> good(blocks_, true);
  std::vector<std::byte> page(allocations_.size() * segment_bytes_);
  for (std::size_t i = 0; i < allocations_.size(); ++i) {
    const std::vector<std::byte> bytes = read(i);
    for (std::uint32_t block = 0; block < blocks_; ++block) {
      fill_page(page.data(), page.size(), seeds[block]);
      good[block] =
          good[block] && std::memcmp(bytes.data() + block * stride_,
                                     page.data() + i * segment_bytes_, segment_bytes_) == 0;
    }
  }
  std::vector<std::uint32_t> found;
  for (std::uint32_t block = 0; block < blocks_; ++block) {
    if (!good[block]) found.push_back(block);
  }
  return found;
}

bool DeviceMemory::gaps_are_whole() const {
  for (std::size_t i = 0; i < allocations_.size(); ++i) {
    const std::vector<std::byte> bytes = read(i);
    for (std::uint32_t block = 0; block < blocks_; ++block) {
      const auto gap = bytes.begin() + static_cast<std::ptrdiff_t>(block * stride_);
      if (!std::all_of(gap + static_cast<std::ptrdiff_t>(segment_bytes_),
                       gap + static_cast<std::ptrdiff_t>(stride_),
                       [](std::byte byte) { return byte == kGap; })) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace pegaflow::testing
