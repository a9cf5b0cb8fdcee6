#pragma once
/// \file
/// Translates Asio's error codes into Errc.

#include <string_view>

#include <boost/asio/error.hpp>
#include <boost/system/error_code.hpp>

#include "base/error.h"

namespace pegaflow::router {

/// The Error of a call on a socket. kRefused: no process listens at the address; kCancelled: the
/// router ended the call; kPeerLost: the connection broke; kIo: any other error.
inline tl::unexpected<Error> fail_socket(const boost::system::error_code& ec,
                                         std::string_view what) {
  namespace errors = boost::asio::error;
  Errc code = Errc::kIo;
  if (ec == errors::connection_refused || ec == errors::host_unreachable ||
      ec == errors::network_unreachable || ec == errors::host_not_found) {
    code = Errc::kRefused;
  } else if (ec == errors::operation_aborted || ec == errors::bad_descriptor) {
    code = Errc::kCancelled;
  } else if (ec == errors::eof || ec == errors::connection_reset || ec == errors::broken_pipe ||
             ec == errors::connection_aborted || ec == errors::timed_out) {
    code = Errc::kPeerLost;
  }
  return fail(code, "{}: {}", what, ec.message());
}

}  // namespace pegaflow::router
