#pragma once
/// \file
/// Child processes that never outlive this one, and what the kernel knows about them.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <sys/types.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/os/unique_fd.h"

namespace pegaflow::harness {

/// A running program. The destructor kills it; the kernel does when this process dies first.
/// Thread-bound to the thread that started it: the kernel kills the child when that thread ends.
class Child {
 public:
  struct Options {
    std::vector<std::string> command;  ///< The first is the program: a path, or a name in $PATH.
    std::string
        log_file;  ///< Standard output and error go here, from its beginning; empty: inherited.
    int inherited_fd = -1;  ///< Stays open in the child under its number; -1: none.
    std::vector<std::string> environment{};  ///< NAME=VALUE, in addition to this process's.
  };

  /// Errors: the kernel's when it cannot be started.
  static Result<Child> start(const Options& options);

  Child(Child&& other) noexcept;
  Child& operator=(Child&& other) noexcept;
  ~Child();

  [[nodiscard]] pid_t pid() const noexcept { return pid_; }
  /// Readable once the process has ended.
  [[nodiscard]] int pidfd() const noexcept { return pidfd_.get(); }
  [[nodiscard]] bool running() const;

  /// Sends SIGKILL and waits for the end of the process.
  void kill();
  /// Sends a signal. Errors: the kernel's; kGone when the process has ended.
  Result<void> signal(int number) const;
  /// The exit status once the process has ended, -N for signal N; no value after `limit`.
  std::optional<int> wait_for_exit(Duration limit);
  /// Sends SIGTERM, then SIGKILL if the process has not ended within `patience`.
  /// Errors: kTimeout when it had to be killed, kInternal when it ended with another status than 0.
  Result<void> stop(Duration patience);

  /// User and system time of all threads so far. Errors: the kernel's once the process is gone.
  [[nodiscard]] Result<Duration> cpu_time() const;

 private:
  Child(pid_t pid, UniqueFd pidfd) : pid_(pid), pidfd_(std::move(pidfd)) {}
  pid_t pid_ = -1;
  UniqueFd pidfd_;
};

/// The sum of voluntary context switches of all threads of a process: each is a wake-up that ended
/// in sleep. Thread `except` is left out.
/// Errors: the kernel's once the process is gone; kIo when the kernel does not count switches.
Result<std::uint64_t> voluntary_switches(pid_t pid, pid_t except = 0);

/// Resident bytes of a process, mapping by mapping.
struct Resident {
  std::uint64_t pool_bytes = 0;    ///< In mappings whose name contains `pool_name`.
  std::uint64_t beside_bytes = 0;  ///< In all other mappings.
};
/// Adds up the text of /proc/PID/smaps.
/// Errors: kCorrupt when a mapping has no Rss line or a number cannot be read.
Result<Resident> sum_smaps(std::string_view smaps, std::string_view pool_name);
/// Errors: the kernel's when the process is gone; as sum_smaps().
Result<Resident> resident_of(pid_t pid, std::string_view pool_name);

/// Reads a whole small file, in /proc too. Errors: the kernel's.
Result<std::string> read_file(const std::string& path);

/// A directory under $TMPDIR or /tmp. The destructor removes it with its contents.
class TemporaryDirectory {
 public:
  /// Errors: the kernel's.
  static Result<TemporaryDirectory> create();
  TemporaryDirectory(TemporaryDirectory&& other) noexcept : path_(std::exchange(other.path_, {})) {}
  TemporaryDirectory& operator=(TemporaryDirectory&&) = delete;
  ~TemporaryDirectory();
  [[nodiscard]] const std::string& path() const noexcept { return path_; }

 private:
  explicit TemporaryDirectory(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

/// The path of the running program. Errors: the kernel's.
Result<std::string> own_path();

}  // namespace pegaflow::harness
