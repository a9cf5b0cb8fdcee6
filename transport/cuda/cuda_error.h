#pragma once
/// \file
/// Translation of CUDA's status codes.

#include <string_view>

#include "base/error.h"
#include "transport/cuda/driver.h"

namespace pegaflow::cuda {

/// kOutOfCapacity when there is no memory, else kIo; the detail has CUDA's name and text for it.
Error to_error(Driver& driver, Status status, std::string_view what);

/// Returns nothing for success, else the error of `status`.
inline Result<void> check(Driver& driver, Status status, std::string_view what) {
  if (status == kSuccess) return {};
  return tl::unexpected<Error>(to_error(driver, status, what));
}

}  // namespace pegaflow::cuda
