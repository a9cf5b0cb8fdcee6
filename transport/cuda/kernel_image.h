#pragma once
/// \file
/// The compiled kernels.cu, inside the program.

#include <cstddef>
#include <span>

namespace pegaflow::cuda {

/// A fat binary for Driver::load_module(). Empty when the program was built without nvcc.
std::span<const std::byte> kernel_image() noexcept;

}  // namespace pegaflow::cuda
