#include "base/error.h"

#include <cerrno>
#include <system_error>

namespace pegaflow {

std::string_view to_string(Errc code) noexcept {
  switch (code) {
    case Errc::kInvalidArgument:
      return "invalid_argument";
    case Errc::kBusy:
      return "busy";
    case Errc::kOutOfCapacity:
      return "out_of_capacity";
    case Errc::kGone:
      return "gone";
    case Errc::kTimeout:
      return "timeout";
    case Errc::kCancelled:
      return "cancelled";
    case Errc::kPeerLost:
      return "peer_lost";
    case Errc::kRefused:
      return "refused";
    case Errc::kCorrupt:
      return "corrupt";
    case Errc::kIo:
      return "io";
    case Errc::kInternal:
      return "internal";
  }
  return "unknown";
}

std::string to_string(const Error& error) {
  return fmt::format("{}: {}", to_string(error.code), error.detail);
}

namespace {

Errc code_of(int error_number) noexcept {
  switch (error_number) {
    case EINVAL:
    case ENAMETOOLONG:
    case EBADF:
      return Errc::kInvalidArgument;
    case EAGAIN:
    case EBUSY:
    case EMFILE:
    case ENFILE:
      return Errc::kBusy;
    case ENOMEM:
    case ENOSPC:
      return Errc::kOutOfCapacity;
    case ETIMEDOUT:
      return Errc::kTimeout;
    case ECANCELED:
    case EINTR:
      return Errc::kCancelled;
    case ECONNREFUSED:
    case ECONNRESET:
    case ENOENT:
    case EPIPE:
      return Errc::kPeerLost;
    case EACCES:
    case EPERM:
    case EADDRINUSE:
      return Errc::kRefused;
    default:
      return Errc::kIo;
  }
}

}  // namespace

tl::unexpected<Error> fail_errno(int error_number, std::string_view what) {
  return fail(code_of(error_number), "{}: {}", what, std::generic_category().message(error_number));
}

}  // namespace pegaflow
