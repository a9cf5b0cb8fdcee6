#pragma once
/// \file
/// Which requests are split into prefill and decode, and the bodies for the two engines.

#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "router/http/json_text.h"

namespace pegaflow::router {

/// The outcome of a request's prefill. All values but the first: the decode engine prefills.
enum class Prefill : unsigned char {
  kDone,            ///< The decode engine receives the location of the prompt's blocks.
  kNoEngine,        ///< No prefill engine is configured.
  kShort,           ///< The prompt is below --min-prefill-tokens.
  kPromptLogprobs,  ///< Log-probabilities of the prompt need its whole forward pass.
  kEcho,            ///< `echo` with `logprobs`: the same reason.
  kPromptEmbeds,    ///< Embeddings have no token ids, and therefore no block keys.
  kBeamSearch,      ///< The engine turns it into several prompts.
  kToolChoice,      ///< A named tool in /v1/messages: see decide().
  kCached,          ///< A decode engine has all but --min-prefill-tokens of the prompt.
  kCost,            ///< A decode engine alone costs no more than the best pair of engines.
  kDown,            ///< No prefill engine is up, or the prompt's engine went down.
  kSuspended,       ///< All prefill engines are suspended: see HandoverWatch.
  kBusy,            ///< All prefill engines have --max-prefill-inflight requests.
  kRefused,         ///< The connection failed.
  kStatus,          ///< The status was not 200.
  kTimeout,         ///< No response within --prefill-timeout and its extension for the prompt.
  kLost,            ///< The connection broke.
  kNoParams,        ///< No kv_transfer_params: blocks may be saved, but are not announced.
  kUnneeded,        ///< With Flow::kAuto: the decode engine's response ended first.
};
inline constexpr std::size_t kPrefillCount = static_cast<std::size_t>(Prefill::kUnneeded) + 1;

/// The name in metrics and in the access log.
std::string_view to_string(Prefill what) noexcept;

/// How the prefill engine's result reaches the decode engine.
enum class Flow : unsigned char {
  kStore,     ///< Content-addressed: the engines share PegaFlow's cache.
  kAuto,      ///< The same, and both engines receive the request at once where they can.
  kKvParams,  ///< kv_transfer_params in the format of vLLM's NIXL connector.
};

/// How the legs of a request with a prefill followed each other.
enum class Handover : unsigned char {
  kSerial,     ///< The decode engine received the request after the prefill.
  kEarly,      ///< Both at once.
  kWithdrawn,  ///< Both at once; the prefill failed, so a decode engine received it again.
  kLate,       ///< Both at once; the decode engine was late, so it was sent again.
};
inline constexpr std::size_t kHandoverCount = static_cast<std::size_t>(Handover::kLate) + 1;
std::string_view to_string(Handover what) noexcept;

/// Whether the engines share PegaFlow's cache.
constexpr bool uses_store(Flow flow) noexcept { return flow != Flow::kKvParams; }

/// --flow direct: kAuto, and the router reports engines that no other one reads.
inline constexpr std::string_view kDirectFlow = "direct";
/// Errors: kInvalidArgument that names the flows.
Result<Flow> parse_flow(std::string_view name);

/// kDone when the body should go to a prefill engine first; otherwise the reason against it.
/// The number of tokens is estimated as bytes / 4. `is_anthropic`: a body of /v1/messages, where
/// vLLM parses the arguments of a named tool as JSON. One token is not JSON, so vLLM would respond
/// with 400 after the whole prefill.
Prefill decide(const std::vector<JsonMember>& members, bool is_anthropic,
               std::size_t min_prefill_tokens);

/// The prefill engine's body: all members that affect the prompt, and one token to compute. With
/// `is_anthropic` an enabled `thinking` is left out: its budget must be below max_tokens, and in
/// vLLM it limits the output only. (`disabled` and `adaptive` stay: a template may read them.)
/// `wants_token`: the response should have the ids of the prompt's tokens and of the new token.
std::string prefill_body(const std::vector<JsonMember>& members, bool is_anthropic, Flow flow,
                         bool wants_token = false);

/// The decode engine's body: the client's bytes, with `kv_params` (an object as the prefill engine
/// wrote it, or empty) as its kv_transfer_params. The client's own were removed before
/// (steering.h).
std::string decode_body(std::string_view body, const std::vector<JsonMember>& members,
                        std::string_view kv_params);

/// kv_transfer_params of a prefill engine's response as written; empty when it has none.
std::string kv_params_of(std::string_view answer);

/// Whether the response is a stream of events.
bool is_streamed(const std::vector<JsonMember>& members);

/// The beginning of a prompt: the first `bytes` of the messages, prompt or input. Empty when the
/// body has none.
std::string_view prompt_prefix(const std::vector<JsonMember>& members, std::size_t bytes);

}  // namespace pegaflow::router
