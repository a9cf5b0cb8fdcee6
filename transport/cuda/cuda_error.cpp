#include "transport/cuda/cuda_error.h"

namespace pegaflow::cuda {

Error to_error(Driver& driver, Status status, std::string_view what) {
  const Errc code = status == kOutOfMemory ? Errc::kOutOfCapacity : Errc::kIo;
  return Error{code, fmt::format("{}: {}", what, driver.describe(status))};
}

}  // namespace pegaflow::cuda
