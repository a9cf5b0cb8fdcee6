#pragma once
/// \file
/// Failures as values. The code determines the caller's reaction; the detail names the operation,
/// its object and the error of the library.

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/core.h>
#include <tl/expected.hpp>

namespace pegaflow {

/// Each code calls for a different reaction of the caller. A miss is not an error.
enum class Errc : std::uint8_t {
  kInvalidArgument,  ///< The call is invalid; the same call fails again.
  kBusy,             ///< A queue or a limit is full; try later.
  kOutOfCapacity,    ///< Nothing can be evicted.
  kGone,             ///< Revoked, aborted, or from another incarnation; start over.
  kTimeout,          ///< No response before the deadline.
  kCancelled,        ///< The caller withdrew.
  kPeerLost,         ///< The connection to the other process or node is lost.
  kRefused,          ///< Version, layout or permission; fix the configuration.
  kCorrupt,          ///< Bytes differ from those that were written.
  kIo,               ///< A device or the kernel failed.
  kInternal,         ///< A bug in PegaFlow or in a library.
};

/// Number of codes, for tables indexed by Errc.
inline constexpr std::size_t kErrcCount = static_cast<std::size_t>(Errc::kInternal) + 1;

/// The code as metrics and logs spell it, for example "peer_lost".
std::string_view to_string(Errc code) noexcept;

/// A failure, returned to the function that handles or reports it, which logs it once.
struct Error {
  Errc code = Errc::kInternal;
  std::string detail;
};

/// "peer_lost: unpack the region key of 10.0.0.7: Connection reset".
std::string to_string(const Error& error);

/// A value, or the Error that prevented it.
template <typename T>
using Result = tl::expected<T, Error>;

/// Makes the error of any Result: `return fail(Errc::kBusy, "{} reads are queued", n);`
template <typename... Args>
[[nodiscard]] tl::unexpected<Error> fail(Errc code, fmt::format_string<Args...> format,
                                         Args&&... args) {
  return tl::unexpected<Error>(Error{code, fmt::format(format, std::forward<Args>(args)...)});
}

/// Like fail(), for a system call: the code and the text follow from `error_number` (an errno).
[[nodiscard]] tl::unexpected<Error> fail_errno(int error_number, std::string_view what);

}  // namespace pegaflow

#define PEGA_CONCAT_INNER(a, b) a##b
#define PEGA_CONCAT(a, b) PEGA_CONCAT_INNER(a, b)

/// Returns from the enclosing function with the error of `expression`, a Result, if it has one.
#define PEGA_TRY(expression)                                                          \
  do {                                                                                \
    if (auto pega_try_result = (expression); !pega_try_result) {                      \
      return ::tl::unexpected<::pegaflow::Error>(std::move(pega_try_result.error())); \
    }                                                                                 \
  } while (false)

/// Like PEGA_TRY, and binds the value to a name:
/// `PEGA_TRY_LET(const Slot slot, store.reserve(key));`
#define PEGA_TRY_LET(declaration, expression) \
  PEGA_TRY_LET_NAMED(PEGA_CONCAT(pega_try_let_, __LINE__), declaration, expression)
#define PEGA_TRY_LET_NAMED(name, declaration, expression)                         \
  auto name = (expression);                                                       \
  if (!name) return ::tl::unexpected<::pegaflow::Error>(std::move(name.error())); \
  declaration = std::move(*name)
