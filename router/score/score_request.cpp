#include "router/score/score_request.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>

#include "router/http/json_text.h"

namespace pegaflow::router {

namespace {

/// Members of these requests that engines do not have: they affect no prompt.
constexpr std::array<std::string_view, 4> kOwn = {"candidates", "prompt_tokens", "keys",
                                                  "token_ids"};
template <std::size_t N>
bool is_any_of(const JsonMember& member, const std::array<std::string_view, N>& names) {
  return std::any_of(names.begin(), names.end(),
                     [&](std::string_view name) { return member.is(name); });
}

template <typename Number>
bool read_number(std::string_view text, Number& out, int base = 10) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out, base);
  return error == std::errc() && end == text.data() + text.size();
}

/// The elements of the array `member`, at most `limit`.
Result<std::vector<std::string_view>> elements_of(const JsonMember& member, std::string_view name,
                                                  std::size_t limit) {
  if (member.value.front() != '[') {
    return fail(Errc::kInvalidArgument, "\"{}\": not a list", name);
  }
  PEGA_TRY_LET(auto elements, read_elements(member.value));
  if (elements.empty()) return fail(Errc::kInvalidArgument, "\"{}\": the list is empty", name);
  if (elements.size() > limit) {
    return fail(Errc::kInvalidArgument, "\"{}\": {} elements are more than {}", name,
                elements.size(), limit);
  }
  return elements;
}

Result<std::vector<std::uint32_t>> read_tokens(const JsonMember& member) {
  PEGA_TRY_LET(const auto elements,
               elements_of(member, "token_ids", std::numeric_limits<std::size_t>::max()));
  std::vector<std::uint32_t> tokens(elements.size());
  for (std::size_t i = 0; i < elements.size(); ++i) {
    if (!read_number(elements[i], tokens[i])) {
      return fail(Errc::kInvalidArgument, "\"token_ids\": element {} is not a token id: {}", i,
                  elements[i].substr(0, 40));
    }
  }
  return tokens;
}

/// The low 64 bits of a hash: a number, or the last 16 of its hexadecimal digits.
bool read_hash(std::string_view element, std::uint64_t& hash) {
  if (element.front() != '"') return read_number(element, hash);
  const std::string_view digits = element.substr(1, element.size() - 2);
  if (digits.size() < 16 || digits.size() > 128) return false;
  const bool is_hex = std::all_of(digits.begin(), digits.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
  });
  return is_hex && read_number(digits.substr(digits.size() - 16), hash, 16);
}

Result<std::vector<index::Key>> read_keys(const JsonMember& member) {
  PEGA_TRY_LET(const auto elements, elements_of(member, "keys", ScoreRequest::kMaxKeys));
  std::vector<index::Key> keys;
  keys.reserve(elements.size());
  for (std::size_t i = 0; i < elements.size(); ++i) {
    std::uint64_t hash = 0;
    if (!read_hash(elements[i], hash)) {
      return fail(Errc::kInvalidArgument,
                  "\"keys\": element {} is neither a number of 64 bits nor a string of 16 to 128 "
                  "hexadecimal digits: {}",
                  i, elements[i].substr(0, 40));
    }
    keys.push_back(index::key_of(0, hash));
  }
  return keys;
}

Result<void> read_candidates(const JsonMember& member, ScoreRequest& out) {
  PEGA_TRY_LET(const auto elements,
               elements_of(member, "candidates", ScoreRequest::kMaxCandidates));
  for (const std::string_view element : elements) {
    std::string url = json_unescape(element);
    if (url.empty()) {
      return fail(Errc::kInvalidArgument, "\"candidates\": {} is not an engine's URL",
                  element.substr(0, 80));
    }
    if (url.back() == '/') url.pop_back();
    out.candidates.push_back(std::move(url));
  }
  return {};
}

/// Sets the prompt from the members that an engine would see.
Result<void> read_prompt(const std::vector<JsonMember>& members, const JsonMember* tokens,
                         ScoreRequest& out) {
  std::vector<JsonMember> seen;
  for (const JsonMember& member : members) {
    if (!is_any_of(member, kOwn)) seen.push_back(member);
  }
  // As a client of the completions API would write it: routers that learned it know it so.
  if (tokens != nullptr) seen.push_back({"prompt", tokens->value, tokens->whole});
  const JsonMember* const messages = find_member(seen, "messages");
  if (out.is_chat && messages->value.front() != '[') {
    return fail(Errc::kInvalidArgument, "\"messages\": not a list");
  }
  out.prompt = prompt_text(out.is_chat ? "chat" : "completions", seen);
  if (out.prompt.root != 0 && (tokens == nullptr || !out.prompt.tokens.empty())) return {};
  if (tokens != nullptr) PEGA_TRY(read_tokens(*tokens));  // It names the wrong element.
  return fail(Errc::kInvalidArgument,
              "\"{}\": not one prompt; a prompt is a text or a list of token ids, and messages are "
              "a list",
              out.is_chat ? "messages" : "prompt");
}

Result<ScoreRequest> read_request(std::string_view body, bool is_lesson) {
  PEGA_TRY_LET(const auto members, read_members(body));
  const auto find = [&](std::string_view name) { return find_member(members, name); };
  const JsonMember* const text = find("prompt");
  const JsonMember* const messages = find("messages");
  const JsonMember* const tokens = find("token_ids");
  const JsonMember* const keys = find("keys");
  const int texts = (text != nullptr) + (messages != nullptr);
  const int ids = (tokens != nullptr) + (keys != nullptr);
  if (is_lesson ? texts != 1 || ids != 1 : texts + ids != 1) {
    return is_lesson
               ? fail(Errc::kInvalidArgument,
                      "a lesson has one of \"prompt\" and \"messages\", and one of \"token_ids\" "
                      "and \"keys\"")
               : fail(Errc::kInvalidArgument,
                      "a request has exactly one of \"prompt\", \"messages\", \"token_ids\" and "
                      "\"keys\"");
  }
  ScoreRequest out{.model = text_of(members, "model"), .is_chat = messages != nullptr};
  if (keys != nullptr) {
    PEGA_TRY_LET(out.keys, read_keys(*keys));
    out.form = PromptForm::kKeys;
  }
  if (is_lesson && tokens != nullptr) {
    PEGA_TRY_LET(out.tokens, read_tokens(*tokens));
  }
  if (is_lesson || keys == nullptr) {
    PEGA_TRY(read_prompt(members, is_lesson ? nullptr : tokens, out));
    if (keys == nullptr && !out.prompt.tokens.empty()) out.form = PromptForm::kTokens;
    out.prompt.cache_salt = text_of(members, "cache_salt");
  }
  if (is_lesson && !out.prompt.tokens.empty()) {
    return fail(Errc::kInvalidArgument, "\"prompt\": a lesson is about a text, not token ids");
  }
  if (const JsonMember* const count = find("prompt_tokens")) {
    std::uint32_t number = 0;
    if (!read_number(count->value, number) || number == 0) {
      return fail(Errc::kInvalidArgument, "\"prompt_tokens\": {} is not a number of tokens above 0",
                  count->value.substr(0, 40));
    }
    out.prompt_tokens = number;
  }
  if (const JsonMember* const list = find("candidates")) PEGA_TRY(read_candidates(*list, out));
  out.has_media = out.is_chat && has_media(body);
  return out;
}

}  // namespace

Result<ScoreRequest> read_score_request(std::string_view body) { return read_request(body, false); }

Result<ScoreRequest> read_lesson(std::string_view body) { return read_request(body, true); }

}  // namespace pegaflow::router
