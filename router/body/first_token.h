#pragma once
/// \file
/// The prefill engine's token as the first one of the answer (--pd-first-token).
///
/// The prefill engine has to compute a token anyway. Sent to the client at once, it makes the time
/// to the first token that of one prefill; the decode engine goes on behind it, from the prompt's
/// tokens and that one.

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "router/http/json_text.h"

namespace pegaflow::router {

/// What became of it. All but the first mean that the decode engine computes the first token.
enum class FirstToken : unsigned char {
  kSent,         ///< The client's first token is the prefill engine's.
  kRoute,        ///< Not /v1/completions: what of a chat's answer is text only its engine knows.
  kNotStreamed,  ///< Nobody sees the first token before the last one.
  kChoices,      ///< Several prompts or several answers.
  kGrammar,      ///< The grammar's state is in the engine.
  kSeed,         ///< The second engine would begin with the seed again.
  kPenalties,    ///< They count the answer's tokens, of which the first would be the prompt's.
  kStop,         ///< A stop string may begin in the first token.
  kLogprobs,     ///< They belong to each token.
  kOneToken,     ///< There is no second one.
  kLong,         ///< The token ids of the prompt would take too much memory.
  kOther,        ///< A member of the body that nobody has thought about.
  kNoPrefill,    ///< No prefill engine has answered; prefill_total has the reason.
  kNoToken,      ///< Its answer has no token ids, or not one.
  kText,         ///< The token's text is empty, or not a whole character.
  kEnded,        ///< The answer ends with this token.
  kDecode,       ///< No decode engine took it on at once.
};
inline constexpr std::size_t kFirstTokenCount = static_cast<std::size_t>(FirstToken::kDecode) + 1;

/// The word that metrics and the access log have for it.
std::string_view to_string(FirstToken what) noexcept;

/// Bodies up to here: the ids of their tokens take about as much again, seven times at worst.
inline constexpr std::size_t kFirstTokenBodyBytes = std::size_t{1} << 20;

/// kSent when the token of a prefill engine could be the first one of the answer to this body of
/// /v1/completions, else the reason why not.
FirstToken decide_first_token(const std::vector<JsonMember>& members, std::size_t body_bytes);

/// What a prefill engine's answer says of its token. The texts are JSON, as written.
struct PrefilledToken {
  std::string id;
  std::string created;
  std::string model;
  std::string text;
  std::string token;
  std::string prompt_tokens;  ///< An array of numbers, not empty.
};

/// The token of an answer to a body that wanted `return_token_ids`; `why` is kSent, or why there is
/// none.
std::optional<PrefilledToken> read_first_token(std::string_view answer, FirstToken& why);

/// The event that the client gets first.
std::string first_event(const PrefilledToken& token);

/// The decode engine's body: the prompt's tokens and the first of the answer as its prompt, one
/// token less to compute, `kv_params` (may be empty) for kv_transfer_params, and the rest as the
/// client wrote it. `members` are of a body that decide_first_token() took.
std::string continued_body(const std::vector<JsonMember>& members, const PrefilledToken& token,
                           std::string_view kv_params);

/// Whole events of the decode engine as the client should see them: where they tell the usage, a
/// token less of the prompt and one more of the answer. All else stays byte for byte.
std::string with_first_token_counted(std::string_view events);

}  // namespace pegaflow::router
