#include "transport/ucx/ucx_error.h"

#include <fmt/format.h>

namespace pegaflow::ucx {

Errc errc_of(ucs_status_t status) noexcept {
  switch (status) {
    case UCS_ERR_CANCELED:
    case UCS_ERR_CONNECTION_RESET:
    case UCS_ERR_ENDPOINT_TIMEOUT:
    case UCS_ERR_NOT_CONNECTED:
    case UCS_ERR_REJECTED:
    case UCS_ERR_TIMED_OUT:
    case UCS_ERR_UNREACHABLE:
      return Errc::kPeerLost;
    case UCS_ERR_EXCEEDS_LIMIT:
    case UCS_ERR_NO_MEMORY:
    case UCS_ERR_NO_RESOURCE:
      return Errc::kOutOfCapacity;
    case UCS_ERR_INVALID_ADDR:
    case UCS_ERR_INVALID_PARAM:
      return Errc::kInvalidArgument;
    case UCS_ERR_NO_DEVICE:
    case UCS_ERR_UNSUPPORTED:
      return Errc::kRefused;
    default:
      return Errc::kIo;
  }
}

Error ucx_error(const UcpApi& api, ucs_status_t status, std::string_view what) {
  return {errc_of(status), fmt::format("{}: {}", what, api.status_string(status))};
}

}  // namespace pegaflow::ucx
