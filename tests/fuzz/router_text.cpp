// libFuzzer: any bytes as a body that is split, and as a stream of events.
//
// The router accepts the same JSON as another parser. The bodies for both engines are JSON with the
// expected meaning, also those that continue after a token. The events of a stream do not depend on
// the cut. What the policy kv-aware adds leaves the rest of a body as it was. No answer of an
// engine or a server causes a crash.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/assert.h"
#include "router/body/cache_salt.h"
#include "router/body/early_params.h"
#include "router/body/first_token.h"
#include "router/body/full_report.h"
#include "router/body/kv_hints.h"
#include "router/body/prompt_text.h"
#include "router/body/split.h"
#include "router/body/steering.h"
#include "router/body/usage.h"
#include "router/http/json_text.h"
#include "router/http/sse.h"
#include "router/kv/pool_page.h"
#include "router/routing/namespaces.h"

namespace pegaflow::router {
namespace {

using nlohmann::json;

/// The verdict of another parser. None on texts that it rejects and RFC 8259 allows (a number that
/// no double can hold, half of a surrogate pair), and on texts that it accepts and RFC 8259 does
/// not (a byte order mark, and bytes after a zero byte).
std::optional<json> other_opinion(const std::string& text) {
  if (text.find('\0') != std::string::npos || text.substr(0, 1) == "\xEF") return std::nullopt;
  try {
    return json::parse(text);
  } catch (const json::out_of_range&) {
    return std::nullopt;
  } catch (const json::parse_error& error) {
    if (std::string_view(error.what()).find("surrogate") != std::string_view::npos) {
      return std::nullopt;
    }
    return json(json::value_t::discarded);
  }
}

void check_split(const std::vector<JsonMember>& members, bool is_anthropic) {
  (void)decide(members, is_anthropic, 1);
  const json to_prefill =
      json::parse(prefill_body(members, is_anthropic, Flow::kStore), nullptr, false);
  PEGA_ASSERT(to_prefill.is_object(), "the prefill engine's body is not JSON");
  PEGA_ASSERT(to_prefill["max_tokens"] == 1 && to_prefill["stream"] == false,
              "more than one token");
  PEGA_ASSERT(to_prefill["kv_transfer_params"]["pegaflow"]["save_tail"] == true, "no tail");
}

/// Reads the text as the client's body, as the prefill engine's response, and as events.
void check_first_token(const std::string& text, const std::vector<JsonMember>& members) {
  FirstToken why = FirstToken::kSent;
  const auto token = read_first_token(text, why);
  PEGA_ASSERT(token.has_value() == (why == FirstToken::kSent), "the reason contradicts the token");
  if (token) {
    const std::string event = first_event(*token);
    PEGA_ASSERT(json::parse(event.substr(6), nullptr, false).is_object(), "the event is not JSON");
  }
  if (const auto place = place_of(text)) {
    const json early =
        json::parse(early_params(*place, std::chrono::milliseconds(1)), nullptr, false);
    PEGA_ASSERT(early.is_object(), "the parameters of an early request are not JSON");
  }
  if (decide_first_token(members, text.size()) != FirstToken::kSent) return;
  const PrefilledToken one{"null", "0", "null", "\"a\"", "9", "[1]"};
  const json body = json::parse(continued_body(members, one, "{}"), nullptr, false);
  PEGA_ASSERT(body.is_object() && body["prompt"] == json({1, 9}), "another prompt");
  PEGA_ASSERT(body["stream"] == true && body["max_tokens"].is_number_integer(), "another body");
}

void erase_steering(json& object) {
  for (const char* name :
       {"kv_transfer_params", "ec_transfer_params", "kv_hints", "kv_cache_report_mode"}) {
    object.erase(name);
  }
  const auto session = object.find("session_id");
  if (session != object.end() && session->is_string() &&
      is_own_session(session->get_ref<const std::string&>())) {
    object.erase(session);
  }
}

/// Whether an object has two session ids: a parser uses the last one, and the cut may leave the
/// first.
bool has_several_sessions(const std::string& text) {
  int sessions = 0;
  std::vector<JsonCut> none;
  const auto count = [&](std::size_t, const JsonMember*, const JsonMember& member) {
    if (member.is("session_id")) ++sessions;
    return false;
  };
  PEGA_ASSERT(find_members(text, count, none).has_value(), "the parsers disagree");
  return sessions > 1;
}

/// The router removes the steering members from every body and then adds its own.
void check_steering(const std::string& text, const std::vector<JsonMember>& members,
                    const json& parsed) {
  const auto cut = without_steering(text, SteeringDepth::kKnownPath);
  PEGA_ASSERT(cut.has_value(), "the parsers disagree");
  if (*cut) PEGA_ASSERT(may_steer(members), "the quick check missed a steering member");
  const std::string body = *cut ? **cut : text;
  const auto left = read_members(body);
  PEGA_ASSERT(left.has_value(), "the cut text is not JSON");
  if (has_several_sessions(text)) return;

  json wanted = parsed;
  erase_steering(wanted);
  const auto extra = wanted.find("vllm_xargs");
  if (extra != wanted.end() && extra->is_object()) erase_steering(*extra);
  PEGA_ASSERT(json::parse(decode_body(body, *left, "")) == wanted, "another body");
  wanted["kv_transfer_params"] = {{"a", 1}};
  PEGA_ASSERT(json::parse(decode_body(body, *left, "{\"a\":1}")) == wanted, "another body");
}

/// Whether vLLM accepts the salts: none, null, or a non-empty string. In a text with several salts
/// the last one is used, but each of them must be valid.
bool are_salts(const std::vector<JsonMember>& members) {
  return std::all_of(members.begin(), members.end(), [](const JsonMember& member) {
    return !member.is("cache_salt") || member.value == "null" ||
           (member.value.front() == '"' && member.value.size() > 2);
  });
}

/// A tenant's body is the client's with a salt that depends on the tenant and the client's salt.
void check_salt(const std::string& text, const std::vector<JsonMember>& members,
                const json& parsed) {
  static const CacheSalts salts("a secret of some bytes");
  const Tenant tenant{salts, "ann"};
  std::string body = text;
  std::vector<JsonMember> read = read_members(body).value();
  const bool is_set = set_cache_salt(body, read, tenant).has_value();
  PEGA_ASSERT(is_set == are_salts(members), "the verdicts on the salt differ");

  json wanted = parsed;
  const auto own = parsed.find("cache_salt");
  const bool has_own = own != parsed.end() && own->is_string();
  wanted["cache_salt"] = salts.salt("ann", has_own ? own->get<std::string>() : std::string());
  if (is_set) {
    PEGA_ASSERT(json::parse(body) == wanted, "another body");
    const auto again = read_members(body);
    PEGA_ASSERT(again && again->size() == read.size(), "the members differ");
    for (std::size_t i = 0; i < read.size(); ++i) {
      PEGA_ASSERT((*again)[i].whole.data() == read[i].whole.data() &&
                      (*again)[i].whole.size() == read[i].whole.size() &&
                      (*again)[i].value.data() == read[i].value.data() &&
                      (*again)[i].value.size() == read[i].value.size() &&
                      (*again)[i].raw_key.data() == read[i].raw_key.data() &&
                      (*again)[i].raw_key.size() == read[i].raw_key.size(),
                  "the members are at other positions");
    }
  }
  body = text;
  PEGA_ASSERT(set_cache_salt_anywhere(body, tenant).has_value(), "the parsers disagree");
  const json anywhere = json::parse(body);
  PEGA_ASSERT(anywhere.contains("cache_salt"), "no salt");
  if (is_set) PEGA_ASSERT(anywhere["cache_salt"] == wanted["cache_salt"], "another salt");
}

/// The policy kv-aware reads a body, and adds to it.
void check_kv(const std::string& text, const std::vector<JsonMember>& members, const json& parsed) {
  for (const std::string_view route : {"chat", "completions", "messages", "responses", "other"}) {
    const PromptText prompt = prompt_text(route, members);
    PEGA_ASSERT(prompt.root != 0 || (prompt.text.empty() && prompt.tokens.empty()),
                "a text without a root");
    PEGA_ASSERT(prompt.text.size() <= text.size() + members.size(), "more text than the body has");
  }
  const json full = json::parse(with_full_report(text), nullptr, false);
  PEGA_ASSERT(full.is_object(), "the body with a full report is not JSON");
  const auto xargs = parsed.find("vllm_xargs");
  if (xargs == parsed.end()) {
    json wanted = parsed;
    wanted["vllm_xargs"] = {{"kv_cache_report_mode", "full"}};
    PEGA_ASSERT(full == wanted, "another body");
  }
  if (!parsed.contains("kv_transfer_params")) {
    json wanted = parsed;
    wanted["kv_transfer_params"] = {{"pegaflow", {{"hints", "compute"}}}};
    PEGA_ASSERT(json::parse(with_hint(text, "\"compute\"")) == wanted, "another body");
  }
}

/// Answers of engines and servers.
void check_answers(const std::string& text) {
  (void)find_usage(text);
  (void)PoolPage::read(text);
  (void)PoolPage::read("PEGABLK1" + text);
  (void)PoolPage::read("PEGABLK1" + text, true);
  (void)LinksPage::read(text);
}

void check_body(const std::string& text) {
  const auto members = read_members(text);
  if (!members && members.error().detail.find("too many") != std::string::npos) return;
  const std::optional<json> other = other_opinion(text);
  if (!other) return;
  const json& parsed = *other;
  const bool is_object = !parsed.is_discarded() && parsed.is_object();
  PEGA_ASSERT(members.has_value() == is_object, "the parsers disagree");
  if (!members) return;

  for (const bool is_anthropic : {false, true}) check_split(*members, is_anthropic);
  (void)prompt_prefix(*members, 16);
  for (const JsonMember& member : *members) (void)json_unescape(member.value);

  check_first_token(text, *members);

  check_steering(text, *members, parsed);
  check_salt(text, *members, parsed);
  check_kv(text, *members, parsed);
}

void check_stream(std::string_view bytes, std::size_t step) {
  SseTracker whole;
  const std::size_t all = whole.feed(bytes);
  SseTracker pieces;
  std::size_t last = 0;
  for (std::size_t at = 0; at < bytes.size(); at += step) {
    const std::string_view piece = bytes.substr(at, step);
    const std::size_t ended = pieces.feed(piece);
    PEGA_ASSERT(ended <= piece.size(), "{} of {}", ended, piece.size());
    if (ended > 0) last = at + ended;
  }
  PEGA_ASSERT(all == last, "events end at {} and at {}", all, last);
  PEGA_ASSERT(whole.events() == pieces.events(), "{} {}", whole.events(), pieces.events());
  PEGA_ASSERT(whole.is_finished() == pieces.is_finished(), "finished or not");
  const std::string counted = with_first_token_counted(bytes);
  PEGA_ASSERT(with_first_token_counted(bytes.substr(0, all)) +
                      with_first_token_counted(bytes.substr(all)) ==
                  counted,
              "usage depends on the cut");
  if (bytes.find("prompt_tokens") == std::string_view::npos)
    PEGA_ASSERT(counted == bytes, "changed");
}

}  // namespace
}  // namespace pegaflow::router

// libFuzzer chose the name. NOLINTNEXTLINE(readability-identifier-naming)
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  const std::string text(reinterpret_cast<const char*>(data) + 1, size - 1);
  pegaflow::router::check_body(text);
  (void)pegaflow::router::read_instances(text);
  pegaflow::router::check_answers(text);
  pegaflow::router::check_stream(text, data[0] % 32 + 1);
  return 0;
}
