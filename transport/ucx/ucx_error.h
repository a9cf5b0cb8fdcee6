#pragma once
/// \file
/// Translation of UCX's status codes.

#include <string>
#include <string_view>

#include "base/error.h"
#include "transport/ucx/ucp_api.h"

namespace pegaflow::ucx {

/// The code by which a caller reacts to `status`: kPeerLost for an endpoint that broke,
/// kOutOfCapacity, kRefused when there is no such device or transport, kIo for the rest.
[[nodiscard]] Errc errc_of(ucs_status_t status) noexcept;

/// An error such as "open rail mlx5_0:1: No such device".
[[nodiscard]] Error ucx_error(const UcpApi& api, ucs_status_t status, std::string_view what);

/// The failing side of a Result.
[[nodiscard]] inline tl::unexpected<Error> fail_ucx(const UcpApi& api, ucs_status_t status,
                                                    std::string_view what) {
  return tl::unexpected<Error>(ucx_error(api, status, what));
}

}  // namespace pegaflow::ucx
