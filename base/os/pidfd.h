#pragma once
/// \file
/// Questions to a pidfd, a descriptor that stands for a process.

#include <optional>

#include <sys/types.h>

namespace pegaflow {

/// The number of a pidfd's process in /proc: 0 in a PID namespace that is invisible there, -1 when
/// the process has ended and was reaped. No value when `fd` is not a pidfd or there is no /proc.
/// The number is that of another process in this process's PID namespace if /proc is another one's.
std::optional<pid_t> process_of_pidfd(int fd);

/// The number of a pidfd's process in this process's PID namespace. No value when it has none
/// there, when /proc is another namespace's, and when the process was reaped.
std::optional<pid_t> own_number_of_pidfd(int fd);

/// Whether the process of a pidfd has ended. Also true for a descriptor that is not open.
bool has_process_ended(int pidfd);

}  // namespace pegaflow
