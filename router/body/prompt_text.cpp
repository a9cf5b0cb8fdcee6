#include "router/body/prompt_text.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstring>

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

/// Members beside kWithoutEffect that do not change the blocks of a prompt of token ids. One that
/// is not listed may: it can name an adapter or images.
constexpr std::array<std::string_view, 14> kBesideTokens = {
    "add_special_tokens",      "cache_salt",     "echo",        "guided_choice",
    "guided_decoding_backend", "guided_grammar", "guided_json", "guided_regex",
    "logits_processors",       "model",          "prompt",      "response_format",
    "structured_outputs",      "suffix"};

/// Members of a chat's messages that hold or name media.
constexpr std::array<std::string_view, 7> kMedia = {
    "image_url", "audio_url", "video_url", "input_audio", "image_embeds", "image_pil", "file"};

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

/// Reads the id at `at`, and moves `at` behind it; false for anything but 1 to 7 digits that are
/// not the end of the text. Eight bytes at a time: a prompt may have a million ids.
bool read_short_id(const char*& at, const char* end, std::uint32_t& id) {
  constexpr std::uint64_t kZeros = 0x3030303030303030U;
  if (end - at < 8) return false;
  std::uint64_t digits = 0;
  std::memcpy(&digits, at, sizeof digits);
  digits ^= kZeros;
  const std::uint64_t others = ((digits + 0x0606060606060606U) | digits) & 0xF0F0F0F0F0F0F0F0U;
  if (others == 0) return false;
  const int count = std::countr_zero(others) / 8;
  if (count == 0) return false;
  digits <<= 64 - 8 * count;  // The digits end where eight of them would.
  digits = (digits * 10 + (digits >> 8U)) & 0x00FF00FF00FF00FFU;
  digits = (digits * 100 + (digits >> 16U)) & 0x0000FFFF0000FFFFU;
  id = static_cast<std::uint32_t>(digits * 10'000 + (digits >> 32U));
  at += count;
  return true;
}

void skip_blanks(const char*& at, const char* end) {
  while (at != end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t')) ++at;
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
  out.tokens = read_token_ids(value);
  if (!out.tokens.empty()) {
    out.text += opened(value);
    return true;
  }
  const auto elements = read_elements(value);
  if (!elements || elements->empty()) return false;
  const std::string_view first = elements->front();
  const bool is_nested = first.front() == '"' || first.front() == '[';
  if (is_nested) return !is_element && elements->size() == 1 && read_prompt(first, out, true);
  return false;
}

}  // namespace

std::vector<std::uint32_t> read_token_ids(std::string_view array) {
  std::vector<std::uint32_t> tokens;
  tokens.reserve(array.size() / 6);
  const char* at = array.data() + 1;
  const char* const end = array.data() + array.size();
  while (at != end) {
    skip_blanks(at, end);
    std::uint32_t id = 0;
    if (!read_short_id(at, end, id)) {
      const auto [behind, error] = std::from_chars(at, end, id);
      if (error != std::errc()) return {};
      at = behind;
    }
    tokens.push_back(id);
    skip_blanks(at, end);
    if (at == end || (*at != ',' && *at != ']')) return {};
    if (*at++ == ']') break;
  }
  return tokens;
}

bool has_media(std::string_view body) {
  bool found = false;
  std::vector<JsonCut> cuts;
  (void)find_members(
      body,
      [&](std::size_t, const JsonMember*, const JsonMember& member) {
        found = found || is_any_of(member, kMedia);
        return false;
      },
      cuts);
  return found;
}

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
  const JsonMember* const cut = find_member(members, "truncate_prompt_tokens");
  out.is_truncated = cut != nullptr && cut->value != "null";
  out.is_exact = !out.tokens.empty() && !out.is_truncated &&
                 std::all_of(members.begin(), members.end(), [](const JsonMember& member) {
                   return is_any_of(member, kWithoutEffect) || is_any_of(member, kBesideTokens) ||
                          member.value == "null";
                 });
  out.cache_salt = text_of(members, "cache_salt");
  out.root = root_of(route, members);
  return out;
}

}  // namespace pegaflow::router
