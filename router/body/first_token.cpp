#include "router/body/first_token.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>

#include <fmt/format.h>

namespace pegaflow::router {
namespace {

constexpr std::array<std::string_view, kFirstTokenCount> kNames = {
    "sent",       "route",    "not_streamed", "choices",   "grammar", "seed",
    "penalties",  "stop",     "logprobs",     "one_token", "long",    "other_member",
    "no_prefill", "no_token", "text",         "ended",     "decode"};

/// Members that may have any value: they affect the prompt, the sampling of one token, or nothing.
constexpr std::array<std::string_view, 19> kAny = {"model",
                                                   "prompt",
                                                   "max_tokens",
                                                   "stream",
                                                   "stream_options",
                                                   "temperature",
                                                   "top_p",
                                                   "top_k",
                                                   "min_p",
                                                   "logit_bias",
                                                   "user",
                                                   "cache_salt",
                                                   "priority",
                                                   "ignore_eos",
                                                   "skip_special_tokens",
                                                   "spaces_between_special_tokens",
                                                   "add_special_tokens",
                                                   "session_id",
                                                   "kv_transfer_params"};

/// A member that must be missing or have a usual value, and the reason otherwise.
struct Usual {
  std::string_view name;
  std::array<std::string_view, 3> values;  // Besides null; numbers are compared as numbers.
  FirstToken otherwise;
};
constexpr std::array kUsual = {
    Usual{"n", {"1"}, FirstToken::kChoices},
    Usual{"best_of", {"1"}, FirstToken::kChoices},
    Usual{"response_format", {}, FirstToken::kGrammar},
    Usual{"structured_outputs", {}, FirstToken::kGrammar},
    Usual{"guided_json", {}, FirstToken::kGrammar},
    Usual{"guided_regex", {}, FirstToken::kGrammar},
    Usual{"guided_choice", {}, FirstToken::kGrammar},
    Usual{"guided_grammar", {}, FirstToken::kGrammar},
    Usual{"seed", {}, FirstToken::kSeed},
    Usual{"presence_penalty", {"0"}, FirstToken::kPenalties},
    Usual{"frequency_penalty", {"0"}, FirstToken::kPenalties},
    Usual{"repetition_penalty", {"1"}, FirstToken::kPenalties},
    Usual{"stop", {"[]"}, FirstToken::kStop},
    Usual{"stop_token_ids", {"[]"}, FirstToken::kStop},
    Usual{"logprobs", {"false"}, FirstToken::kLogprobs},
    Usual{"top_logprobs", {}, FirstToken::kLogprobs},
    Usual{"echo", {"false"}, FirstToken::kOther},
    Usual{"min_tokens", {"0"}, FirstToken::kOther},
    Usual{"use_beam_search", {"false"}, FirstToken::kOther},
    Usual{"return_token_ids", {"false"}, FirstToken::kOther},
};

/// A whole number without its fraction: "1" for "1.0" and "1.00". Other text stays unchanged.
std::string_view without_zeros(std::string_view value) {
  const std::size_t point = value.find('.');
  if (point == std::string_view::npos) return value;
  return value.find_first_not_of('0', point + 1) == std::string_view::npos ? value.substr(0, point)
                                                                           : value;
}

std::optional<std::int64_t> whole_number(std::string_view text) {
  std::int64_t value = 0;
  const auto [rest, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (status != std::errc() || rest != text.data() + text.size()) return std::nullopt;
  return value;
}

FirstToken judge(const JsonMember& member) {
  if (std::any_of(kAny.begin(), kAny.end(), [&](auto name) { return member.is(name); })) {
    return FirstToken::kSent;
  }
  if (member.value == "null") return FirstToken::kSent;
  for (const Usual& usual : kUsual) {
    if (!member.is(usual.name)) continue;
    const std::string_view value = without_zeros(member.value);
    const bool is_usual = std::any_of(usual.values.begin(), usual.values.end(),
                                      [&](auto each) { return !each.empty() && each == value; });
    return is_usual ? FirstToken::kSent : usual.otherwise;
  }
  return FirstToken::kOther;
}

/// Whether usage is reported at the end only: usage with each event would be wrong by one.
bool reports_usage_at_the_end(std::string_view options) {
  if (options == "null") return true;
  const auto members = read_members(options);
  return members && std::all_of(members->begin(), members->end(), [](const JsonMember& each) {
           return each.is("include_usage") ||
                  (each.is("continuous_usage_stats") && each.value == "false");
         });
}

/// Whether the member is one prompt: a text, or its token ids.
bool is_one_prompt(std::string_view prompt) {
  if (prompt.front() == '"') return true;
  if (prompt.front() != '[') return false;
  const std::size_t first = prompt.find_first_not_of(" \t\r\n", 1);
  return prompt[first] >= '0' && prompt[first] <= '9';
}

std::string_view value_of(const std::vector<JsonMember>& members, std::string_view name) {
  const JsonMember* const member = find_member(members, name);
  return member == nullptr ? std::string_view("null") : member->value;
}

constexpr std::string_view kDefaultMaxTokens = "16";  // In the APIs of OpenAI and vLLM.

}  // namespace

std::string_view to_string(FirstToken what) noexcept {
  return kNames[static_cast<std::size_t>(what)];
}

FirstToken decide_first_token(const std::vector<JsonMember>& members, std::size_t body_bytes) {
  if (value_of(members, "stream") != "true") return FirstToken::kNotStreamed;
  if (!is_one_prompt(value_of(members, "prompt"))) return FirstToken::kChoices;
  FirstToken why = FirstToken::kSent;
  for (const JsonMember& member : members) {
    const FirstToken its = judge(member);
    // A known member is the better reason.
    if (its != FirstToken::kSent && (why == FirstToken::kSent || why == FirstToken::kOther)) {
      why = its;
    }
  }
  if (why != FirstToken::kSent) return why;
  if (!reports_usage_at_the_end(value_of(members, "stream_options"))) return FirstToken::kOther;
  const JsonMember* const max_tokens = find_member(members, "max_tokens");
  const auto count = whole_number(max_tokens == nullptr ? kDefaultMaxTokens : max_tokens->value);
  if (!count) return FirstToken::kOther;
  if (*count < 2) return FirstToken::kOneToken;
  return body_bytes > kFirstTokenBodyBytes ? FirstToken::kLong : FirstToken::kSent;
}

std::optional<PrefilledToken> read_first_token(std::string_view answer, FirstToken& why) {
  why = FirstToken::kNoToken;
  const auto members = read_members(answer);
  if (!members) return std::nullopt;
  const auto choices = read_elements(value_of(*members, "choices"));
  if (!choices || choices->size() != 1) return std::nullopt;
  const auto choice = read_members(choices->front());
  if (!choice) return std::nullopt;
  const auto tokens = read_elements(value_of(*choice, "token_ids"));
  if (!tokens || tokens->size() != 1 || !whole_number(tokens->front())) return std::nullopt;
  PrefilledToken token;
  token.prompt_tokens = value_of(*choice, "prompt_token_ids");
  if (token.prompt_tokens.front() != '[' || !is_one_prompt(token.prompt_tokens)) {
    return std::nullopt;
  }
  token.token = tokens->front();
  token.text = value_of(*choice, "text");
  const std::string text = json_unescape(token.text);
  // Detokenizers return this for the first bytes of a character. The decode engine would return
  // the rest of the character, or all of it.
  constexpr std::string_view kReplacement = "\xEF\xBF\xBD";
  if (text.empty() ||
      (text.size() >= kReplacement.size() &&
       text.compare(text.size() - kReplacement.size(), std::string::npos, kReplacement) == 0)) {
    why = FirstToken::kText;
    return std::nullopt;
  }
  if (value_of(*choice, "finish_reason") != "\"length\"") {
    why = FirstToken::kEnded;
    return std::nullopt;
  }
  token.id = value_of(*members, "id");
  token.created = value_of(*members, "created");
  token.model = value_of(*members, "model");
  why = FirstToken::kSent;
  return token;
}

std::string first_event(const PrefilledToken& token) {
  return fmt::format(R"(data: {{"id":{},"object":"text_completion","created":{},"model":{},)"
                     R"("choices":[{{"index":0,"text":{},"logprobs":null,"finish_reason":null,)"
                     R"("stop_reason":null}}],"usage":null}})"
                     "\n\n",
                     token.id, token.created, token.model, token.text);
}

std::string continued_body(const std::vector<JsonMember>& members, const PrefilledToken& token,
                           std::string_view kv_params) {
  const JsonMember* const max_tokens = find_member(members, "max_tokens");
  const std::int64_t count =
      whole_number(max_tokens == nullptr ? kDefaultMaxTokens : max_tokens->value).value_or(2);
  std::size_t size = token.prompt_tokens.size() + kv_params.size() + 128;
  for (const JsonMember& member : members) size += member.whole.size() + 1;
  std::string body;
  body.reserve(size);
  body += '{';
  if (!kv_params.empty()) body += fmt::format("\"kv_transfer_params\":{},", kv_params);
  for (const JsonMember& member : members) {
    if (member.is("prompt") || member.is("max_tokens") || member.is("kv_transfer_params")) continue;
    body += member.whole;
    body += ',';
  }
  body += fmt::format("\"max_tokens\":{},\"prompt\":", count - 1);
  const std::size_t end = token.prompt_tokens.rfind(']');
  body.append(token.prompt_tokens, 0, end);
  body += ',';
  body += token.token;
  body += "]}";
  return body;
}

std::string with_first_token_counted(std::string_view events) {
  constexpr std::string_view kData = "data:";
  std::string out;
  out.reserve(events.size() + 8);
  while (!events.empty()) {
    const std::size_t end = std::min(events.find('\n'), events.size() - 1) + 1;
    const std::string_view line = events.substr(0, end);
    events.remove_prefix(end);
    // Most events are tokens and need no parsing.
    if (line.substr(0, kData.size()) != kData ||
        line.find("\"prompt_tokens\"") == std::string_view::npos) {
      out += line;
      continue;
    }
    const auto members = read_members(line.substr(kData.size()));
    const auto usage = members ? read_members(value_of(*members, "usage")) : members;
    if (!usage) {
      out += line;
      continue;
    }
    const char* copied = line.data();
    for (const JsonMember& member : *usage) {
      const int change = member.is("prompt_tokens") ? -1 : member.is("completion_tokens") ? 1 : 0;
      const auto count = whole_number(member.value);
      if (change == 0 || !count) continue;
      out.append(copied, member.value.data());
      out += std::to_string(*count + change);
      copied = member.value.data() + member.value.size();
    }
    out.append(copied, line.data() + line.size());
  }
  return out;
}

}  // namespace pegaflow::router
