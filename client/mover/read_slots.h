#pragma once
/// \file
/// The common part of the responses to `reserve` and `open`.

#include <cstdint>
#include <vector>

#include "base/error.h"
#include "capnp/wire/codec.h"

namespace pegaflow {

/// Reads the slots of a response, or its error.
template <typename Response>
Result<std::vector<std::uint32_t>> read_slots(Response& response) {
  if (response.hasError()) return tl::unexpected<Error>(read_error(response.getError()));
  const auto slots = response.getSlots();
  std::vector<std::uint32_t> copied;
  copied.reserve(slots.size());
  for (const std::uint32_t slot : slots) copied.push_back(slot);
  return copied;
}

}  // namespace pegaflow
