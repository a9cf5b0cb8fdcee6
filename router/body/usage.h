#pragma once
/// \file
/// The usage that an engine reports in its response.

#include <cstdint>
#include <optional>
#include <string_view>

namespace pegaflow::router {

/// The tokens of a prompt, as the engine counted them.
struct Usage {
  std::uint32_t prompt_tokens = 0;
  std::optional<std::uint32_t> cached_tokens{};  ///< Not set: the engine does not report it.
};

/// The last `usage` object within a piece of a response, streamed or not, in the format of OpenAI's
/// or Anthropic's API; nullopt when the piece has none that is whole.
std::optional<Usage> find_usage(std::string_view piece);

}  // namespace pegaflow::router
