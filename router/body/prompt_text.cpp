#include "router/body/prompt_text.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "index/text.h"

namespace pegaflow::router {
namespace {

/// Members that grow with a conversation, in the order of chat templates.
constexpr std::array<std::string_view, 6> kText = {"tools",    "system", "instructions",
                                                   "messages", "prompt", "input"};

/// Members that never affect the prompt. A member that is not listed here is part of the root: an
/// unknown one costs at most a hit.
constexpr std::array<std::string_view, 56> kWithoutEffect = {
    "allowed_token_ids",
    "background",
    "bad_words",
    "best_of",
    "frequency_penalty",
    "ignore_eos",
    "include",
    "include_stop_str_in_output",
    "kv_transfer_params",
    "length_penalty",
    "logit_bias",
    "logprob_token_ids",
    "logprobs",
    "max_completion_tokens",
    "max_output_tokens",
    "max_tokens",
    "max_tool_calls",
    "metadata",
    "min_p",
    "min_tokens",
    "modalities",
    "n",
    "parallel_tool_calls",
    "prediction",
    "presence_penalty",
    "priority",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_logprobs",
    "repetition_detection",
    "repetition_penalty",
    "request_id",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "safety_identifier",
    "seed",
    "service_tier",
    "session_id",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop",
    "stop_sequences",
    "stop_token_ids",
    "store",
    "stream",
    "stream_options",
    "stream_response",
    "temperature",
    "top_k",
    "top_logprobs",
    "top_p",
    "truncation",
    "use_beam_search",
    "user",
    "vllm_xargs",
    "web_search_options",
};

template <std::size_t N>
bool is_any_of(const JsonMember& member, const std::array<std::string_view, N>& names) {
  return std::any_of(names.begin(), names.end(),
                     [&](std::string_view name) { return member.is(name); });
}

/// The hash of the members that affect the prompt as a whole. They are hashed in the order of
/// their names, since clients may write them in any order.
std::uint64_t root_of(std::string_view route, const std::vector<JsonMember>& members) {
  std::vector<const JsonMember*> parts;
  for (const JsonMember& member : members) {
    if (!is_any_of(member, kText) && !is_any_of(member, kWithoutEffect)) parts.push_back(&member);
  }
  std::stable_sort(parts.begin(), parts.end(), [](const JsonMember* a, const JsonMember* b) {
    return a->raw_key < b->raw_key;
  });
  // JSON has no zero bytes, so they separate.
  std::string text;
  for (const JsonMember* const part : parts) {
    text.append(part->raw_key).push_back('\0');
    text.append(part->value).push_back('\0');
  }
  return std::max<std::uint64_t>(1, index::hash_root({.model = route, .rendering = text}));
}

/// A value without its closing bracket or quote, and the blanks before it.
std::string_view opened(std::string_view value) {
  if (value.empty() || (value.back() != ']' && value.back() != '"')) return value;
  value.remove_suffix(1);
  const std::size_t end = value.find_last_not_of(" \t\r\n");
  return value.substr(0, end == std::string_view::npos ? 0 : end + 1);
}

/// The ids of an array of integers; empty for anything else.
std::vector<std::uint32_t> token_ids(const std::vector<std::string_view>& elements) {
  std::vector<std::uint32_t> tokens;
  tokens.reserve(elements.size());
  for (const std::string_view element : elements) {
    std::uint32_t id = 0;
    const auto [end, error] = std::from_chars(element.data(), element.data() + element.size(), id);
    if (error != std::errc() || end != element.data() + element.size()) return {};
    tokens.push_back(id);
  }
  return tokens;
}

/// Reads the `prompt` of /v1/completions, or the only element of a list of prompts. False when it
/// is not one prompt. Lists in that element are none: each level would be read once more.
bool read_prompt(std::string_view value, PromptText& out, bool is_element = false) {
  if (value.empty()) return false;
  if (value.front() == '"') {
    out.text += opened(value);
    return true;
  }
  if (value.front() != '[') return false;
  const auto elements = read_elements(value);
  if (!elements || elements->empty()) return false;
  const std::string_view first = elements->front();
  const bool is_nested = first.front() == '"' || first.front() == '[';
  if (is_nested) return !is_element && elements->size() == 1 && read_prompt(first, out, true);
  out.tokens = token_ids(*elements);
  out.text += opened(value);
  return !out.tokens.empty();
}

}  // namespace

PromptText prompt_text(std::string_view route, const std::vector<JsonMember>& members) {
  PromptText out;
  const bool is_completion = route == "completions";
  if (!is_completion && route != "chat" && route != "messages" && route != "responses") return out;
  const std::string_view growing = is_completion          ? "prompt"
                                   : route == "responses" ? "input"
                                                          : "messages";
  const JsonMember* const main_part = find_member(members, growing);
  if (main_part == nullptr || find_member(members, "prompt_embeds") != nullptr) return out;
  if (is_completion) {
    if (!read_prompt(main_part->value, out)) return PromptText();
  } else {
    for (const std::string_view name : kText) {
      const JsonMember* const member = find_member(members, name);
      if (member == nullptr || name == "prompt" || member->value == "null") continue;
      if (member != main_part) {
        out.text += member->value;
        out.text += '\n';
        continue;
      }
      out.text += opened(member->value);
      break;
    }
  }
  out.root = root_of(route, members);
  return out;
}

}  // namespace pegaflow::router
