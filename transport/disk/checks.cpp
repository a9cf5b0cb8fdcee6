#include "transport/disk/checks.h"

namespace pegaflow::disk {
namespace {

constexpr std::uint64_t kLeastInFlight = std::uint64_t{1} << 20;
constexpr std::uint64_t kMostInFlight = std::uint64_t{1} << 30;

Result<void> check_bytes(const char* name, std::uint64_t bytes) {
  if (bytes >= kLeastInFlight && bytes <= kMostInFlight) return {};
  return fail(Errc::kInvalidArgument, "disk: {} in flight are {}, outside of {} to {}", name, bytes,
              kLeastInFlight, kMostInFlight);
}

bool is_aligned(std::uint64_t number) { return number % Disk::kAlignment == 0; }

}  // namespace

const char* to_string(Disk::Operation operation) noexcept {
  switch (operation) {
    case Disk::Operation::kRead:
      return "read";
    case Disk::Operation::kWrite:
      return "write";
    case Disk::Operation::kDurableWrite:
      return "durable write";
    case Disk::Operation::kFlush:
      return "flush";
  }
  return "unknown";
}

Result<void> check(const Disk::Limits& limits) {
  PEGA_TRY(check_bytes("bytes of reads", limits.read_bytes));
  PEGA_TRY(check_bytes("bytes of writes", limits.write_bytes));
  if (limits.requests < 1 || limits.requests > Disk::kMostQueued) {
    return fail(Errc::kInvalidArgument, "disk: {} requests, outside of 1 to {}", limits.requests,
                Disk::kMostQueued);
  }
  return {};
}

Result<void> check(const Disk::Request& request, std::uint64_t size_bytes) {
  const char* const name = to_string(request.operation);
  if (request.operation == Disk::Operation::kFlush) {
    if (request.memory.empty()) return {};
    return fail(Errc::kInvalidArgument, "disk: flush {} has memory", request.ticket);
  }
  if (request.memory.empty() || request.memory.size() > Disk::kMostPieces) {
    return fail(Errc::kInvalidArgument, "disk: {} {} has {} spans of memory, not 1 to {}", name,
                request.ticket, request.memory.size(), Disk::kMostPieces);
  }
  std::uint64_t bytes = 0;
  bool aligned = is_aligned(request.offset);
  for (const std::span<std::byte> span : request.memory) {
    aligned = aligned && !span.empty() && is_aligned(span.size()) &&
              is_aligned(reinterpret_cast<std::uintptr_t>(span.data()));
    if (span.size() > Disk::kMostBytes - bytes) {
      return fail(Errc::kInvalidArgument, "disk: {} {} has more than {} bytes", name,
                  request.ticket, Disk::kMostBytes);
    }
    bytes += span.size();
  }
  if (!aligned) {
    return fail(Errc::kInvalidArgument,
                "disk: the offset, an address or a size of {} {} is not a multiple of {}", name,
                request.ticket, Disk::kAlignment);
  }
  if (bytes > size_bytes || request.offset > size_bytes - bytes) {
    return fail(Errc::kInvalidArgument, "disk: {} {} of {} bytes at {} exceeds the file's {}", name,
                request.ticket, bytes, request.offset, size_bytes);
  }
  return {};
}

Result<void> check_size(std::uint64_t size_bytes) {
  if (size_bytes >= Disk::kAlignment && is_aligned(size_bytes) && size_bytes >> 62U == 0) return {};
  return fail(Errc::kInvalidArgument, "disk: a size of {} bytes is not a positive multiple of {}",
              size_bytes, Disk::kAlignment);
}

}  // namespace pegaflow::disk
