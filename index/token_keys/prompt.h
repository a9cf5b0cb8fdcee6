#pragma once
/// \file
/// A prompt as token ids, with everything else that an engine's block hash depends on.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/error.h"

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

inline constexpr std::uint32_t kMostBlockTokens = 8192;

/// Errors: kInvalidArgument when items overlap or are out of order, or when a text has more than
/// 1,024 bytes.
Result<void> check_prompt(const TokenPrompt& prompt);

/// Errors: kInvalidArgument unless it is 1 to kMostBlockTokens.
Result<void> check_block_size(std::uint32_t block_size);

/// The items of one block after another. Thread-bound.
class ItemsOfBlocks {
 public:
  explicit ItemsOfBlocks(std::span<const MultimodalItem> items) : items_(items) {}

  /// The items with placeholders in [begin, end); `begin` never decreases.
  std::span<const MultimodalItem> in(std::uint64_t begin, std::uint64_t end) {
    while (!items_.empty() && items_.front().offset + items_.front().length <= begin) {
      items_ = items_.subspan(1);
    }
    std::size_t count = 0;
    while (count < items_.size() && items_[count].offset < end) ++count;
    return items_.first(count);
  }

 private:
  std::span<const MultimodalItem> items_;
};

}  // namespace pegaflow::index
