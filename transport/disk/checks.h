#pragma once
/// \file
/// Validation that all backends of Disk share: limits and requests.

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/error.h"
#include "transport/disk/disk.h"

namespace pegaflow::disk {

/// The number of bytes that a request transfers.
inline std::uint64_t bytes_of(const Disk::Request& request) {
  std::uint64_t bytes = 0;
  for (const std::span<std::byte> span : request.memory) bytes += span.size();
  return bytes;
}

inline bool is_write(Disk::Operation operation) {
  return operation == Disk::Operation::kWrite || operation == Disk::Operation::kDurableWrite;
}

/// "read", "write", "durable write" or "flush", as errors spell it.
const char* to_string(Disk::Operation operation) noexcept;

/// Errors: kInvalidArgument, with the limit and its range.
Result<void> check(const Disk::Limits& limits);

/// Errors: kInvalidArgument, with the ticket, unless the request is aligned and lies within a file
/// of that size.
Result<void> check(const Disk::Request& request, std::uint64_t size_bytes);

/// Errors: kInvalidArgument unless `size_bytes` is a positive multiple of Disk::kAlignment.
Result<void> check_size(std::uint64_t size_bytes);

}  // namespace pegaflow::disk
