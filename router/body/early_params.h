#pragma once
/// \file
/// The place of a prefill engine's saves, and the parameters for a decode engine that receives a
/// request together with its prefill.

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace pegaflow::router {

/// Where the saves of a prefill engine are. Immutable.
struct PrefillPlace {
  std::string node{};         ///< The incarnation of its server, 32 hexadecimal digits.
  std::string incarnation{};  ///< That of its scheduler, in the same form.
  std::uint64_t job = 0;      ///< The last save that is known; 0: none.
};

/// The place in the kv_transfer_params of a prefill engine's answer. Empty unless the engine says
/// that its decode engines may receive their request early.
std::optional<PrefillPlace> place_of(std::string_view kv_params);

/// kv_transfer_params for a decode engine that receives its request together with the prefill at
/// `place`, and waits for it for at most `wait`. A connector that does not know of such requests
/// waits for the next save of the prefill engine.
std::string early_params(const PrefillPlace& place, std::chrono::milliseconds wait);

}  // namespace pegaflow::router
