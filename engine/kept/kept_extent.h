#pragma once
/// \file
/// The record of one extent in the kept tables.

#include <array>
#include <cstdint>

#include "engine/types/shape.h"
#include "engine/types/unit_run.h"

namespace pegaflow::engine {

/// An extent, as a later process restores it. `serial` is written last and cleared first.
struct alignas(64) KeptExtent {
  std::uint64_t serial = 0;  ///< 0: there is none.
  std::uint64_t check = 0;   ///< A hash of the members but for `touched`.
  std::uint32_t shape = 0;   ///< The number of its shape in the process that wrote it.
  std::uint32_t frames = 0;
  std::uint32_t touched = 0;  ///< Frames from here on were never used.
  std::uint32_t run_count = 0;
  std::array<UnitRun, kMaxNumaNodes> runs{};

  [[nodiscard]] bool is_whole() const noexcept;
  [[nodiscard]] std::uint64_t hash() const noexcept;
};

}  // namespace pegaflow::engine
