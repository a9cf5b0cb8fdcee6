#pragma once
/// \file
/// The prefill engine's token as the first token of the response (--pd-first-token).
///
/// The prefill engine has to compute a token anyway. The router sends it to the client at once, so
/// that the time to the first token is that of one prefill. The decode engine continues from the
/// prompt's tokens and that token.

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "router/http/json_text.h"

namespace pegaflow::router {

/// The source of the first token. All values but the first: the decode engine computes it.
enum class FirstToken : unsigned char {
  kSent,         ///< The client's first token is the prefill engine's.
  kRoute,        ///< Not /v1/completions: only its engine can parse the response of a chat.
  kNotStreamed,  ///< The client receives the first token together with the last.
  kChoices,      ///< Several prompts or several choices.
  kGrammar,      ///< The grammar's state is in the engine.
  kSeed,         ///< The second engine would begin with the seed again.
  kPenalties,    ///< They count the generated tokens, and the first would be part of the prompt.
  kStop,         ///< A stop string may begin in the first token.
  kLogprobs,     ///< Each token needs its own.
  kOneToken,     ///< There is no second token.
  kLong,         ///< The token ids of the prompt would take too much memory.
  kOther,        ///< A member of the body that the router does not know.
  kNoPrefill,    ///< No prefill engine has responded; prefill_total has the reason.
  kNoToken,      ///< The response does not have exactly one token id.
  kText,         ///< The token's text is empty, or ends within a character.
  kEnded,        ///< The completion ends with this token.
  kDecode,       ///< No decode engine accepted the continuation at once.
};
inline constexpr std::size_t kFirstTokenCount = static_cast<std::size_t>(FirstToken::kDecode) + 1;

/// The name in metrics and in the access log.
std::string_view to_string(FirstToken what) noexcept;

/// The maximum size of a body: its token ids need about as much memory again, seven times at worst.
inline constexpr std::size_t kFirstTokenBodyBytes = std::size_t{1} << 20;

/// kSent when a prefill engine's token can be the first token of the response to this body of
/// /v1/completions; otherwise the reason against it.
FirstToken decide_first_token(const std::vector<JsonMember>& members, std::size_t body_bytes);

/// A prefill engine's token and the fields of its response. The texts are JSON, as written.
struct PrefilledToken {
  std::string id;
  std::string created;
  std::string model;
  std::string text;
  std::string token;
  std::string prompt_tokens;  ///< An array of numbers, not empty.
};

/// The token of a response to a body with `return_token_ids`. `why` is kSent, or the reason when
/// there is none.
std::optional<PrefilledToken> read_first_token(std::string_view answer, FirstToken& why);

/// The first event for the client.
std::string first_event(const PrefilledToken& token);

/// The decode engine's body: the prompt's tokens and the first token as its prompt, max_tokens less
/// one, `kv_params` (may be empty) as kv_transfer_params, and the rest as the client wrote it.
/// `members` belong to a body for which decide_first_token() returned kSent.
std::string continued_body(const std::vector<JsonMember>& members, const PrefilledToken& token,
                           std::string_view kv_params);

/// Whole events of the decode engine with corrected usage: one prompt token less, one completion
/// token more. All other bytes stay unchanged.
std::string with_first_token_counted(std::string_view events);

}  // namespace pegaflow::router
