#pragma once
/// \file
/// Adjacent units of the pool.

#include <cstdint>

namespace pegaflow::engine {

struct UnitRun {
  std::uint32_t first = 0;
  std::uint32_t count = 0;
};

}  // namespace pegaflow::engine
