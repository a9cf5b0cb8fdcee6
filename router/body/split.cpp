#include "router/body/split.h"

#include <algorithm>

namespace pegaflow::router {
namespace {

constexpr std::array<std::string_view, kPrefillCount> kNames = {
    "done",          "no_engine",   "short",       "prompt_logprobs", "echo",
    "prompt_embeds", "beam_search", "tool_choice", "cached",          "cost",
    "engine_down",   "suspended",   "busy",        "refused",         "status",
    "timeout",       "lost",        "no_params",   "unneeded"};

/// Members that the prefill engine receives with other values, or not at all. The rest affects the
/// prompt.
constexpr std::array<std::string_view, 10> kReplaced = {"max_tokens",
                                                        "max_completion_tokens",
                                                        "n",
                                                        "stream",
                                                        "stream_options",
                                                        "min_tokens",
                                                        "logprobs",
                                                        "top_logprobs",
                                                        "logprob_token_ids",
                                                        "kv_transfer_params"};

constexpr std::array<std::string_view, 4> kPromptParts = {"system", "tools", "messages", "prompt"};

bool given(const std::vector<JsonMember>& members, std::string_view name) {
  const JsonMember* const member = find_member(members, name);
  return member != nullptr && member->value != "null" && member->value != "false";
}

/// Whether it is an object whose `type` is `type`.
bool has_type(const JsonMember* object, std::string_view type) {
  if (object == nullptr) return false;
  const auto members = read_members(object->value);
  if (!members) return false;
  const JsonMember* const own = find_member(*members, "type");
  return own != nullptr && own->value.front() == '"' && json_unescape(own->value) == type;
}

}  // namespace

std::string_view to_string(Prefill what) noexcept { return kNames[static_cast<std::size_t>(what)]; }

std::string_view to_string(Handover what) noexcept {
  constexpr std::array<std::string_view, kHandoverCount> kHandovers = {"serial", "early",
                                                                       "withdrawn", "late"};
  return kHandovers[static_cast<std::size_t>(what)];
}

Result<Flow> parse_flow(std::string_view name) {
  if (name == "store") return Flow::kStore;
  if (name == "kv-params") return Flow::kKvParams;
  if (name == "auto" || name == kDirectFlow) return Flow::kAuto;
  return fail(Errc::kInvalidArgument,
              "unknown flow \"{}\"; the flows are store, auto, direct and kv-params", name);
}

Prefill decide(const std::vector<JsonMember>& members, bool is_anthropic,
               std::size_t min_prefill_tokens) {
  if (given(members, "prompt_logprobs")) return Prefill::kPromptLogprobs;
  if (given(members, "echo") && given(members, "logprobs")) return Prefill::kEcho;
  if (given(members, "prompt_embeds")) return Prefill::kPromptEmbeds;
  if (given(members, "use_beam_search")) return Prefill::kBeamSearch;
  if (is_anthropic && has_type(find_member(members, "tool_choice"), "tool")) {
    return Prefill::kToolChoice;
  }
  std::size_t bytes = 0;
  for (const std::string_view part : kPromptParts) {
    if (const JsonMember* const member = find_member(members, part)) bytes += member->value.size();
  }
  return bytes / 4 < min_prefill_tokens ? Prefill::kShort : Prefill::kDone;
}

std::string prefill_body(const std::vector<JsonMember>& members, bool is_anthropic, Flow flow,
                         bool wants_token) {
  std::size_t size = 512;
  for (const JsonMember& member : members) size += member.whole.size() + 1;
  std::string body;
  body.reserve(size);
  body += '{';
  for (const JsonMember& member : members) {
    const bool replaced = std::any_of(kReplaced.begin(), kReplaced.end(),
                                      [&](std::string_view name) { return member.is(name); });
    if (replaced) continue;
    if (is_anthropic && member.is("thinking") && has_type(&member, "enabled")) continue;
    body += member.whole;
    body += ',';
  }
  if (wants_token) body += R"("return_token_ids":true,)";
  body += R"("max_tokens":1,"max_completion_tokens":1,"n":1,"stream":false,"kv_transfer_params":)";
  body += uses_store(flow)
              ? R"({"pegaflow":{"save_tail":true}})"
              : R"({"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,)"
                R"("remote_block_ids":null,"remote_host":null,"remote_port":null})";
  body += '}';
  return body;
}

std::string decode_body(std::string_view body, const std::vector<JsonMember>& members,
                        std::string_view kv_params) {
  if (kv_params.empty()) return std::string(body);
  std::string out;
  out.reserve(body.size() + kv_params.size() + 32);
  out += R"({"kv_transfer_params":)";
  out += kv_params;
  if (!members.empty()) out += ',';
  out += body.substr(body.find('{') + 1);
  return out;
}

std::string kv_params_of(std::string_view answer) {
  const auto members = read_members(answer);
  if (!members) return {};
  const JsonMember* const params = find_member(*members, "kv_transfer_params");
  if (params == nullptr || params->value.front() != '{') return {};
  return std::string(params->value);
}

bool is_streamed(const std::vector<JsonMember>& members) {
  const JsonMember* const stream = find_member(members, "stream");
  return stream != nullptr && stream->value == "true";
}

std::string_view prompt_prefix(const std::vector<JsonMember>& members, std::size_t bytes) {
  // The whole conversation and not its first message: a common system prompt would send all
  // requests to one engine.
  for (const std::string_view name : {"messages", "prompt", "input"}) {
    if (const JsonMember* const member = find_member(members, name)) {
      return member->value.substr(0, bytes);
    }
  }
  return {};
}

}  // namespace pegaflow::router
