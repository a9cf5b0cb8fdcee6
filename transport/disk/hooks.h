#pragma once
/// \file
/// Hooks for requests to a disk.

#include <cstdint>
#include <span>
#include <vector>

#include "transport/disk/disk.h"

namespace pegaflow::disk {

/// A hook that fills Completion::checksums: the PageChecksum (XXH3-64) of each page of `memory`,
/// whose sizes in bytes are `page_bytes`, in the order of the memory. Pages may lie across the
/// borders of spans; bytes behind the last page are not hashed.
/// `memory` is that of the request and has at least the bytes of all pages (PEGA_ASSERT).
Disk::Hook take_checksums(std::vector<std::span<std::byte>> memory,
                          std::vector<std::uint64_t> page_bytes);

}  // namespace pegaflow::disk
