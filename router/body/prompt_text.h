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
};

/// The prompt of a body of the route `route` ("chat", "completions", "messages", "responses"). A
/// body with several prompts, with embeddings, or of another route has none.
PromptText prompt_text(std::string_view route, const std::vector<JsonMember>& members);

}  // namespace pegaflow::router
