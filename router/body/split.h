#pragma once
/// \file
/// Which requests are prefilled apart, and what the two engines are sent.

#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "router/http/json_text.h"

namespace pegaflow::router {

/// What became of a request's prefill. All but the first mean that the decode engine prefills.
enum class Prefill : unsigned char {
  kDone,            ///< The decode engine was told where the prompt's blocks are.
  kNoEngine,        ///< No prefill engine is configured.
  kShort,           ///< The prompt is below --min-prefill-tokens.
  kPromptLogprobs,  ///< Log-probabilities of the prompt need its whole forward pass.
  kEcho,            ///< `echo` with `logprobs`: the same.
  kPromptEmbeds,    ///< Embeddings have no token ids, so no blocks that could be found.
  kBeamSearch,      ///< Not a request of one prompt for the engine.
  kToolChoice,      ///< A named tool in /v1/messages: see decide().
  kDown,            ///< No prefill engine is up, or the one that had the prompt went down.
  kSuspended,       ///< All of them hand nothing over: see HandoverWatch.
  kBusy,            ///< All of them have --max-prefill-inflight requests.
  kRefused,         ///< No connection to it.
  kStatus,          ///< It answered another status than 200.
  kTimeout,         ///< No answer within --prefill-timeout and what the prompt adds to it.
  kLost,            ///< The connection ended in the middle.
  kNoParams,        ///< Its answer has no kv_transfer_params: saved at most, but not announced.
};
inline constexpr std::size_t kPrefillCount = static_cast<std::size_t>(Prefill::kNoParams) + 1;

/// The word that metrics and the access log have for it.
std::string_view to_string(Prefill what) noexcept;

/// How the prefill engine's answer reaches the decode engine.
enum class Flow : unsigned char {
  kStore,     ///< Content-addressed: the engines meet in PegaFlow's cache.
  kKvParams,  ///< P's kv_transfer_params in the manner of vLLM's NIXL connector.
};

/// Errors: kInvalidArgument that names the flows.
Result<Flow> parse_flow(std::string_view name);

/// kDone when the body should go to a prefill engine first, else the reason why not.
/// A prompt's tokens are taken to be its bytes / 4. `is_anthropic`: a body of /v1/messages, where
/// vLLM reads the arguments of a named tool as JSON, which one token is not: it would answer 400
/// after the whole prefill.
Prefill decide(const std::vector<JsonMember>& members, bool is_anthropic,
               std::size_t min_prefill_tokens);

/// The prefill engine's body: all that shapes the prompt, and one token to compute. Of
/// `is_anthropic` an enabled `thinking` is left out: its budget has to be below max_tokens, and in
/// vLLM it limits the answer only. (`disabled` and `adaptive` stay: a template may look at them.)
/// `wants_token`: its answer should have the ids of the prompt's tokens and of its own.
std::string prefill_body(const std::vector<JsonMember>& members, bool is_anthropic, Flow flow,
                         bool wants_token = false);

/// The decode engine's body: the client's bytes, with `kv_params` (an object as the prefill engine
/// wrote it, or empty) as its kv_transfer_params. Those of a client were cut out before
/// (steering.h).
std::string decode_body(std::string_view body, const std::vector<JsonMember>& members,
                        std::string_view kv_params);

/// kv_transfer_params of a prefill engine's answer as written; empty when it has none.
std::string kv_params_of(std::string_view answer);

/// What identifies a prompt's beginning: the first `bytes` of what the engine will see first.
/// Empty when the body has no prompt.
std::string_view prompt_prefix(const std::vector<JsonMember>& members, std::size_t bytes);

}  // namespace pegaflow::router
