#pragma once
/// \file
/// Reads the bodies of POST /score and POST /learn.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "index/key.h"
#include "router/body/prompt_text.h"

namespace pegaflow::router {

/// How a request names its prompt.
enum class PromptForm : unsigned char {
  kText,    ///< `prompt` or `messages`.
  kTokens,  ///< `token_ids`, or a `prompt` of token ids.
  kKeys,    ///< `keys`.
};

/// A prompt about which a caller asks, or teaches.
struct ScoreRequest {
  static constexpr std::size_t kMaxKeys = 131'072;
  static constexpr std::size_t kMaxCandidates = 1024;

  std::string model{};  ///< Empty: the body names none.
  PromptForm form = PromptForm::kText;
  /// The text, or the tokens with their text; empty with kKeys. In a lesson always the text.
  PromptText prompt{};
  std::vector<std::uint32_t> tokens{};           ///< The tokens that the text of a lesson becomes.
  std::vector<index::Key> keys{};                ///< With kKeys, and in a lesson without tokens.
  std::optional<std::uint32_t> prompt_tokens{};  ///< `prompt_tokens`, for keys and texts.
  std::vector<std::string> candidates{};         ///< URLs; empty: all engines of the model.
  bool is_chat = false;                          ///< `messages`.
  bool has_media = false;  ///< Images, sound or video, which a tokenizer does not expand.
};

/// The request in a body of POST /score, which has exactly one of `prompt`, `messages`, `token_ids`
/// and `keys`.
/// Errors: kInvalidArgument that names the member and the fix; the client receives the detail.
Result<ScoreRequest> read_score_request(std::string_view body);

/// The lesson in a body of POST /learn: a text as `prompt` or `messages`, and what it becomes as
/// `token_ids` or `keys`.
/// Errors: as read_score_request().
Result<ScoreRequest> read_lesson(std::string_view body);

}  // namespace pegaflow::router
