#include "transport/cuda/kernel_image.h"

namespace pegaflow::cuda {

std::span<const std::byte> kernel_image() noexcept { return {}; }

}  // namespace pegaflow::cuda
