#pragma once
/// \file
/// The part of a body that becomes the prompt, so that related requests can be recognized.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "router/http/json_text.h"

namespace pegaflow::router {

/// The parts of a body that determine its prompt, as the client wrote them. Two bodies with the
/// same `root` whose texts have a common beginning have prompts with a common beginning.
struct PromptText {
  /// A hash of the route and of all members that may affect the prompt as a whole: the model, the
  /// cache_salt, the options of the chat template. 0: the body has no prompt that can be compared.
  std::uint64_t root = 0;
  /// Tools, system prompt and messages, or the prompt, in the order of templates, without the
  /// closing bracket or quote: the next turn of a conversation begins with the whole text.
  std::string text;
  /// The token ids of a prompt that is given as such; empty otherwise.
  std::vector<std::uint32_t> tokens;
  /// The tokens are the whole prompt, and its blocks depend on nothing else than the model and
  /// `cache_salt`.
  bool is_exact = false;
  bool is_truncated = false;  ///< The engine keeps the end of the prompt only.
  std::string cache_salt{};   ///< Empty: none.
};

/// The prompt of a body of the route `route` ("chat", "completions", "messages", "responses"). A
/// body with several prompts, with embeddings, or of another route has none.
PromptText prompt_text(std::string_view route, const std::vector<JsonMember>& members);

/// The ids of the text of an array of integers, which is valid JSON; empty for anything else.
std::vector<std::uint32_t> read_token_ids(std::string_view array);

/// Whether a body of a chat has images, sound or video, whose tokens depend on the engine's
/// processor.
bool has_media(std::string_view body);

}  // namespace pegaflow::router
