#include "perf/net/net_memory.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <utility>

namespace pegaflow::perf {
namespace {

/// Bytes that are written or compared at a time.
constexpr std::size_t kPart = std::size_t{16} << 20;

/// `at` is the place of `part` in the whole memory, a multiple of a word.
void write_pattern(std::span<std::byte> part, std::uint64_t seed, std::size_t at) {
  for (std::size_t i = 0; i < part.size(); i += sizeof(std::uint64_t)) {
    std::uint64_t word = (at + i + 1) * 0x9E3779B97F4A7C15ULL + seed * 0xD1B54A32D192ED03ULL;
    word = (word ^ (word >> 31)) * 0xBF58476D1CE4E5B9ULL;
    std::memcpy(part.data() + i, &word, std::min(sizeof word, part.size() - i));
  }
}

}  // namespace

Result<std::optional<int>> parse_memory(std::string_view text) {
  constexpr std::string_view kCuda = "cuda";
  if (text == "host") return std::optional<int>();
  if (text == kCuda) return std::optional<int>(0);
  if (text.starts_with("cuda:")) {
    const char* const end = text.data() + text.size();
    unsigned char ordinal = 0;
    const auto [rest, error] = std::from_chars(text.data() + kCuda.size() + 1, end, ordinal);
    if (error == std::errc() && rest == end) return std::optional<int>(ordinal);
  }
  return fail(Errc::kInvalidArgument, "'{}' is not host, cuda or cuda:N", text);
}

Result<std::shared_ptr<cuda::Gpu>> open_gpu(int ordinal) {
  PEGA_TRY_LET(std::shared_ptr<cuda::Driver> driver, cuda::Driver::load());
  return cuda::Gpu::open(std::move(driver), ordinal);
}

Result<std::unique_ptr<NetMemory>> NetMemory::create(std::shared_ptr<cuda::Gpu> gpu,
                                                     std::size_t bytes) {
  std::unique_ptr<NetMemory> memory(new NetMemory(bytes));
  if (gpu == nullptr) {
    PEGA_TRY_LET(memory->host_, harness::Mapping::anonymous(bytes));
  } else {
    PEGA_TRY_LET(memory->gpu_, cuda::GpuMemory::create(std::move(gpu), bytes));
  }
  return memory;
}

Memory NetMemory::memory() const {
  if (gpu_ == nullptr) return host_.bytes();
  return gpu_->memory();
}

Result<void> NetMemory::clear() {
  if (gpu_ != nullptr) return gpu_->clear();
  std::memset(host_.bytes().data(), 0, size_bytes_);
  return {};
}

/// Calls `use` with each part of the first `bytes`: its place, and host memory for it.
template <typename Use>
Result<void> NetMemory::for_each_part(std::size_t bytes, const Use& use) {
  std::vector<std::byte> buffer(gpu_ == nullptr ? 0 : std::min(kPart, bytes));
  for (std::size_t at = 0; at < bytes; at += kPart) {
    const std::size_t size = std::min(kPart, bytes - at);
    PEGA_TRY(
        use(at, gpu_ == nullptr ? host_.bytes().subspan(at, size) : std::span(buffer).first(size)));
  }
  return {};
}

Result<void> NetMemory::fill(std::uint64_t seed) {
  return for_each_part(size_bytes_, [&](std::size_t at, std::span<std::byte> part) -> Result<void> {
    write_pattern(part, seed, at);
    if (gpu_ == nullptr) return {};
    return gpu_->write(part, at);
  });
}

Result<void> NetMemory::compare(std::uint64_t seed, std::size_t bytes) {
  std::vector<std::byte> expected(std::min(kPart, bytes));
  return for_each_part(bytes, [&](std::size_t at, std::span<std::byte> part) -> Result<void> {
    if (gpu_ != nullptr) PEGA_TRY(gpu_->read(part, at));
    const std::span<std::byte> wanted = std::span(expected).first(part.size());
    write_pattern(wanted, seed, at);
    if (std::memcmp(part.data(), wanted.data(), part.size()) == 0) return {};
    const auto differ = std::mismatch(part.begin(), part.end(), wanted.begin());
    return fail(Errc::kCorrupt, "byte {} of the memory differs from the holder's",
                at + static_cast<std::size_t>(differ.first - part.begin()));
  });
}

}  // namespace pegaflow::perf
