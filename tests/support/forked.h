#pragma once
/// \file
/// A second process for tests: an engine that can be killed.

#include <functional>

#include <sys/types.h>

namespace pegaflow::testing {

/// Runs a function in a forked child. The child goes on living after the function returned, as an
/// engine that hangs would, until it is killed or its object ends.
class Forked {
 public:
  struct Options {
    bool new_pid_namespace = false;  ///< Needs root: see may_make_pid_namespaces().
  };

  /// Waits until `body` has returned in the child; throws std::runtime_error when it threw there,
  /// with its words. The parent may have no other thread.
  explicit Forked(const std::function<void()>& body) : Forked(body, Options()) {}
  Forked(const std::function<void()>& body, const Options& options);
  /// Kills it.
  ~Forked();
  Forked(const Forked&) = delete;
  Forked& operator=(const Forked&) = delete;

  /// SIGKILL, and waits for its end.
  void kill();
  void signal(int number) const;
  [[nodiscard]] pid_t pid() const noexcept { return pid_; }

 private:
  pid_t pid_ = -1;
};

/// Whether this process may put a child into a PID namespace of its own.
bool may_make_pid_namespaces();

}  // namespace pegaflow::testing
