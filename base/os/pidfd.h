#pragma once
/// \file
/// Questions to a pidfd, a descriptor that stands for a process.

#include <optional>

#include <sys/types.h>

#include "base/error.h"

namespace pegaflow {

/// The number of a pidfd's process in /proc: 0 in a PID namespace that is invisible there, -1 when
/// the process has ended and was reaped. No value when `fd` is not a pidfd or there is no /proc.
/// The number is that of another process in this process's PID namespace if /proc is another one's.
std::optional<pid_t> process_of_pidfd(int fd);

/// The number of a pidfd's process in this process's PID namespace.
/// Errors: kGone when the process has ended; kRefused when it has no number there, when /proc is
/// another namespace's or not mounted, and for another descriptor; kBusy when no descriptor is
/// free.
Result<pid_t> own_number_of_pidfd(int fd);

/// Whether the process of a pidfd has ended. Also true for a descriptor that is not open.
bool has_process_ended(int pidfd);

}  // namespace pegaflow
