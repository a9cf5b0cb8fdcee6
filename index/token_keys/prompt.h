#pragma once
/// \file
/// A prompt as token ids, with everything else that an engine's block hash depends on.

#include <cstdint>
#include <span>
#include <string_view>

namespace pegaflow::index {

/// One image, sound or video in a prompt: its placeholder tokens [offset, offset + length).
struct MultimodalItem {
  std::string_view identifier{};  ///< The engine's hash of its content, as events name it.
  std::uint64_t offset = 0;       ///< Position of the first placeholder in the prompt, in tokens.
  std::uint64_t length = 0;       ///< Number of placeholders, in tokens.
};

struct TokenPrompt {
  std::span<const std::uint32_t> tokens{};
  std::string_view cache_salt{};            ///< Empty without one.
  std::string_view lora_name{};             ///< Empty without an adapter.
  std::string_view lora_path{};             ///< Where the engine loads the adapter from.
  std::span<const MultimodalItem> items{};  ///< Ordered by offset; they do not overlap.
};

}  // namespace pegaflow::index
