#pragma once
/// \file
/// PEGA_ASSERT is for bugs in PegaFlow only. A condition that a peer, a disk or a user can cause is
/// an Error.
/// A broken invariant stops a server: a cache that lies is worse than none. It must not stop an
/// engine: there the thread's loop holds a ThrowOnAssert and catches BrokenInvariant to retire the
/// session.

#include <stdexcept>
#include <string>

#include <fmt/core.h>

namespace pegaflow {

/// The exception that PEGA_ASSERT throws on a thread that holds a ThrowOnAssert.
class BrokenInvariant : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

/// While it lives, PEGA_ASSERT throws on this thread instead of ending the process. They nest.
class ThrowOnAssert {
 public:
  ThrowOnAssert() noexcept;
  ~ThrowOnAssert();
  ThrowOnAssert(const ThrowOnAssert&) = delete;
  ThrowOnAssert& operator=(const ThrowOnAssert&) = delete;
};

/// Prints one line to standard error and aborts, or throws BrokenInvariant. Called by PEGA_ASSERT.
[[noreturn]] void assertion_failed(const char* file, int line, const char* condition,
                                   const std::string& detail);

}  // namespace pegaflow

/// `PEGA_ASSERT(count <= capacity_, "{} of {}", count, capacity_)`. Always on.
#define PEGA_ASSERT(condition, ...)                  \
  (__builtin_expect(static_cast<bool>(condition), 1) \
       ? static_cast<void>(0)                        \
       : ::pegaflow::assertion_failed(__FILE__, __LINE__, #condition, ::fmt::format(__VA_ARGS__)))
