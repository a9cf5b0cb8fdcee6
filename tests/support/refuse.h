#pragma once
/// \file
/// Rejection of system calls, as by a container's filter.

#include <optional>

namespace pegaflow::testing {

/// Sets the result of mbind() for this thread and the programs that it starts, until it ends: this
/// errno, or success without effect for 0. No value if the kernel has no such filters.
std::optional<int> answer_mbind_with(int error);

/// Rejects io_uring_setup() with EPERM, as the default profiles of container runtimes do. False if
/// the kernel has no such filters.
bool forbid_io_uring();

/// Rejects open() and openat() with O_DIRECT (EINVAL), as a file system without it does. False if
/// the kernel has no such filters.
bool refuse_direct_open();

/// Rejects process_vm_readv() with EPERM for this thread, as Yama and the filters of container
/// runtimes do. False if the kernel has no such filters.
bool forbid_reads_of_processes();

}  // namespace pegaflow::testing
