#include "index/token_keys/prompt.h"

namespace pegaflow::index {
namespace {

constexpr std::size_t kMostText = 1024;

Result<void> check_text(std::string_view name, std::string_view text) {
  if (text.size() <= kMostText) return {};
  return fail(Errc::kInvalidArgument, "hash a prompt: its {} has {} bytes, more than {}", name,
              text.size(), kMostText);
}

}  // namespace

Result<void> check_prompt(const TokenPrompt& prompt) {
  PEGA_TRY(check_text("cache salt", prompt.cache_salt));
  PEGA_TRY(check_text("adapter's name", prompt.lora_name));
  PEGA_TRY(check_text("adapter's path", prompt.lora_path));
  std::uint64_t end = 0;
  for (const MultimodalItem& item : prompt.items) {
    PEGA_TRY(check_text("item's identifier", item.identifier));
    if (item.offset < end || item.offset + item.length < item.offset) {
      return fail(Errc::kInvalidArgument,
                  "hash a prompt: its item at token {} begins before the end of the one before it",
                  item.offset);
    }
    end = item.offset + item.length;
  }
  return {};
}

Result<void> check_block_size(std::uint32_t block_size) {
  if (block_size >= 1 && block_size <= kMostBlockTokens) return {};
  return fail(Errc::kInvalidArgument, "hash a prompt: a block of {} tokens is not 1 to {}",
              block_size, kMostBlockTokens);
}

}  // namespace pegaflow::index
